// How a packed matrix of a grouped format lies in memory; the same in every tier.
//
// A column block (linear_layout.h) is, one after another:
//
//   up       a line of 16 fp32 powers of two 2^f, by which a lane's scales are multiplied
//   records  for each group of `group` inputs 16 fp16 scales d · 2^f, then 16 bytes of zeros
//   quants   from a whole line on, for each 32 inputs (an even number of times): I2 as in Q2_K, I3
//            as in Q3_K, I4 as in Q4_0, I8 as in Q8_0
//
// so that a scale is stored once whatever `group` is, and both parts are read forward. With f from
// the column's largest scale, as for the fixed-point formats, fp16 and bf16 scales are held
// exactly, but for those some 2^27 times smaller than the largest (such as fp16's subnormals beside
// its largest numbers), which round to multiples of 2^-38 of it. fp32 scales round to 11 bits:
// 2^-12 of each, at most. A scale that is no number makes its whole column NaN. The scale of a
// group whose numbers are all its zero is held as 0.
//
// With q' = q − centre (1, of ternary numbers, then 4, 8 and 128) and M = (centre − zero) · d,
// w = d · q' + M. I2, I3 and I4 are summed in fixed point: D is rint of the held scale, and the min
// term
//
//   M = (D · ((centre − zero) · 2^11) + 2^14) >> 15
//
// is (centre − zero) · d · 2^(f − 4), at most 2^13: the bounds of linear_layout.h hold. In I8, M is
// a product in fp32. Where all 16 lanes' zeros are the centre, M is left out.
#pragma once

#include "linear_layout.h"

namespace octavo {
namespace {

// The format whose quants lie the same.
template <Format F>
constexpr Format kQuantsOf = F == Format::I8   ? Format::Q8_0
                             : F == Format::I4 ? Format::Q4_0
                             : F == Format::I3 ? Format::Q3_K
                                               : Format::Q2_K;

template <Format F>
constexpr int kCentreOf = F == Format::I8   ? 128
                          : F == Format::I4 ? 8
                          : F == Format::I3 ? 4
                                            : 1;

// −8 · (sum of the quants) shifted by this is −centre · (sum of the quants).
template <Format F> constexpr int kCentreShift = F == Format::I4 ? 0 : F == Format::I3 ? 1 : 3;

constexpr int64_t kRecord = kLanes * 3; // bytes

// Bytes before the quants.
inline int64_t records_bytes(int64_t k, int64_t group) {
    return round_up(kLine + (k + group - 1) / group * kRecord, kLine);
}

// Bytes of 32 inputs.
template <Format F> constexpr int64_t kQuantsStep = traits(kQuantsOf<F>).quants;

template <Format F> inline int64_t grouped_block_bytes(int64_t k, int64_t group) {
    return records_bytes(k, group) + round_up(k / kGroup, 2) * kQuantsStep<F>;
}

template <class Byte> inline GroupParts<Byte> grouped_parts(Byte *quants) {
    return {quants, quants, nullptr, nullptr}; // nothing is high
}

// The records, one for each 32 inputs in turn.
class Records {
  public:
    Records(const uint8_t *column_block, int64_t group)
        : next_(column_block + kLine), each_(group / kGroup), left_(each_) {}

    const uint8_t *next() {
        const uint8_t *record = next_;
        if (--left_ == 0) {
            left_ = each_;
            next_ += kRecord;
        }
        return record;
    }

  private:
    const uint8_t *next_;
    int64_t each_, left_;
};

// Fetches what lies ahead, as prefetch_distance has it, over the records too, which lie before the
// quants. A single row also touches all records first: the processor's own prefetching follows a
// walk without leaps (measured on Zen 4: 22 to 29 GB/s otherwise, 36 so, which was all there was).
template <Format F, int R> class Prefetching {
  public:
    Prefetching(const uint8_t *column_block, const uint8_t *quants) {
        for (const uint8_t *at = column_block; at < quants; at += kLine) {
            prefetch(at + kAhead);
            if constexpr (R == 1)
                static_cast<void>(*static_cast<const volatile uint8_t *>(at));
        }
    }

    // With the next `groups` times 32 inputs.
    template <int64_t groups> void step(const uint8_t *quants) const {
#pragma GCC unroll 16
        for (int64_t at = 0; at < groups * kQuantsStep<F>; at += kLine)
            prefetch(quants + kAhead + at);
    }

  private:
    static constexpr int64_t kAhead = R > 1 ? 12288 : 512;
};

} // namespace
} // namespace octavo

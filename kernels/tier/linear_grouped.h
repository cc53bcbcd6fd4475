// How a packed matrix of a grouped format lies in memory; the same in every tier.
//
// A column block (linear_layout.h) is, one after another:
//
//   up       a line of 16 fp32 powers of two 2^f, by which a lane's scales are multiplied
//   records  for each group of `group` inputs 16 fp16 scales d · 2^f, then 16 bytes of zeros
//   quants   from a whole line on, for each 32 inputs (an even number of times): I4 as in Q4_0 and
//   I8
//            as in Q8_0; I3 as Q6_K's upper bits, which is two vectors of the lower two bits, byte
//            4·lane + j of vector v holding at bits 2q and 2q + 1 those of input 16v + 4q + j, then
//            a vector of the third, byte 4·lane + j holding at bit q that of input 4q + j
//
// so that a scale is stored once whatever `group` is, and both parts are read forward. With f from
// the column's largest scale, as for the fixed-point formats, fp16 and bf16 scales are held
// exactly, but for those some 2^27 times smaller than the largest (such as fp16's subnormals beside
// its largest numbers), which round to multiples of 2^-38 of it. fp32 scales round to 11 bits:
// 2^-12 of each, at most. A scale that is no number makes its whole column NaN.
//
// With q' = q − centre (4, 8 or 128) and M = (centre − zero) · d, w = d · q' + M. I3 and I4 are
// summed in fixed point: D is rint of the held scale, and the min term
//
//   M = (D · ((centre − zero) · 2^11) + 2^14) >> 15
//
// is (centre − zero) · d · 2^(f − 4), at most 2^13: the bounds of linear_layout.h hold. In I8, M is
// a product in fp32. Where all 16 lanes' zeros are the centre, M is left out.
#pragma once

#include "linear_layout.h"

namespace octavo {
namespace {

struct GroupedTraits {
    int64_t quants, high; // bytes for 32 inputs: of the first part, and of I3's third bits
    int centre;
};

constexpr GroupedTraits grouped_traits(Format format) {
    switch (format) {
    case Format::I3:
        return {128, 64, 4};
    case Format::I4:
        return {256, 0, 8};
    case Format::I8:
        return {512, 0, 128};
    default:
        return {};
    }
}

constexpr int64_t kRecord = kLanes * 3; // bytes

// Bytes before the quants.
inline int64_t records_bytes(int64_t k, int64_t group) {
    return round_up(kLine + (k + group - 1) / group * kRecord, kLine);
}

template <Format F>
constexpr int64_t kQuantsStep = grouped_traits(F).quants + grouped_traits(F).high;

template <Format F> inline int64_t grouped_block_bytes(int64_t k, int64_t group) {
    return records_bytes(k, group) + round_up(k / kGroup, 2) * kQuantsStep<F>;
}

template <Format F, class Byte> inline GroupParts<Byte> grouped_parts(Byte *quants, int64_t g) {
    Byte *at = quants + g * kQuantsStep<F>;
    return {at, at + grouped_traits(F).quants, nullptr, nullptr};
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

// Bytes ahead: see prefetch_distance.
template <int R> constexpr int64_t kGroupedPrefetch = R > 1 ? 12288 : 512;

// A tile's records lie before its quants; what those of 32 inputs prefetch begins `ahead` behind
// them, so that this much would never be fetched.
template <int R> inline void prefetch_records(const uint8_t *column_block, const uint8_t *quants) {
    for (const uint8_t *at = column_block; at < quants; at += kLine)
        prefetch(at + kGroupedPrefetch<R>);
}

template <Format F, int R> inline void prefetch_quants(const uint8_t *group_quants) {
#pragma GCC unroll 16
    for (int64_t at = 0; at < kQuantsStep<F>; at += kLine)
        prefetch(group_quants + kGroupedPrefetch<R> + at);
}

} // namespace
} // namespace octavo

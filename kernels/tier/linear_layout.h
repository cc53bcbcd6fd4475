// How a packed matrix lies in memory; the same in every tier.
//
// A matrix is a sequence of column blocks, each of 16 outputs ("lanes") and all k inputs. A column
// block of a quantized format is a sequence of chunks of 2 groups of 32 inputs (K formats: 8, the
// file's block), so that a block is read front to back, in whole cache lines. A chunk has, one
// after another, for all its groups:
//
//   quants   8 quads of 4 consecutive inputs. 4-bit part: four vectors of 64 bytes, byte 4·lane + j
//            of vector i holding input 4i + j in its low and input 16 + 4i + j in its high nibble.
//            8-bit: eight vectors, byte 4·lane + j of vector i holding input 4i + j, plus 128.
//   high     bits above the fourth. 5-bit formats: one vector, byte 4·lane + j holding at bit q
//            the fifth bit of input 4q + j. 6-bit: two vectors, byte 4·lane + j of vector v
//            holding at bits 2q and 2q + 1 bits five and six of input 16v + 4q + j.
//   scales   as stored: 16 fp16 d, then 16 fp16 m where the format has one; K formats: 16 bytes of
//            6-bit scales, then 16 of mins; Q6_K: 16 int8 scales of the first 16 inputs, then 16
//            of the last.
//
// and at its end, in the K formats, 16 fp16 d, then 16 fp16 dmin where the format has one.
//
// Float formats keep their numbers: 16 lanes of input 0, 16 lanes of input 1, …
#pragma once

#include "formats.h"

namespace octavo {
namespace {

constexpr int64_t kGroup = 32; // inputs that share a scale
constexpr int64_t kLine = 64;  // bytes
constexpr int64_t kLanes = kColumns;

constexpr int64_t round_up(int64_t n, int64_t multiple) {
    return (n + multiple - 1) / multiple * multiple;
}

// What distinguishes the quantized formats.
struct Traits {
    int64_t quants, high, scales; // bytes a group
    int64_t shared;               // bytes a chunk, at its end
    int high_bits;
    int zero;     // subtracted from the stored unsigned number
    bool has_min; // w = scale·q + min (K formats: − min)
    bool k_quant; // scales in two levels

    constexpr int64_t chunk_groups() const { return k_quant ? 8 : 2; }
    constexpr int64_t chunk_bytes() const {
        return round_up(chunk_groups() * (quants + high + scales) + shared, kLine);
    }
};

constexpr Traits traits(Format format) {
    switch (format) {
    case Format::Q4_0:
        return {256, 0, 32, 0, 0, 8, false, false};
    case Format::Q4_1:
        return {256, 0, 64, 0, 0, 0, true, false};
    case Format::Q5_0:
        return {256, 64, 32, 0, 1, 16, false, false};
    case Format::Q5_1:
        return {256, 64, 64, 0, 1, 0, true, false};
    case Format::Q8_0:
        return {512, 0, 32, 0, 0, 128, false, false};
    case Format::Q4_K:
        return {256, 0, 32, 64, 0, 0, true, true};
    case Format::Q5_K:
        return {256, 64, 32, 64, 1, 0, true, true};
    case Format::Q6_K:
        return {256, 128, 32, 32, 2, 32, false, true};
    default:
        return {};
    }
}

template <Format F> inline int64_t column_block_bytes(int64_t k) {
    constexpr FormatInfo info = format_info(F);
    if constexpr (info.quantized)
        return round_up(k / kGroup, traits(F).chunk_groups()) / traits(F).chunk_groups() *
               traits(F).chunk_bytes();
    else
        return round_up(k * kLanes * info.block_bytes, kLine);
}

// Where the parts of a group lie. Byte is uint8_t or const uint8_t.
template <class Byte> struct GroupParts {
    Byte *quants, *high, *scales, *shared;
};

template <Format F, class Byte> inline GroupParts<Byte> group_at(Byte *column_block, int64_t g) {
    constexpr Traits t = traits(F);
    constexpr int64_t kHigh = t.chunk_groups() * t.quants;
    constexpr int64_t kScales = kHigh + t.chunk_groups() * t.high;
    constexpr int64_t kShared = kScales + t.chunk_groups() * t.scales;
    Byte *chunk = column_block + g / t.chunk_groups() * t.chunk_bytes();
    const int64_t i = g % t.chunk_groups();
    return {chunk + i * t.quants, chunk + kHigh + i * t.high, chunk + kScales + i * t.scales,
            chunk + kShared};
}

constexpr int64_t kPrefetchDistance = 6144; // bytes

// Into the second-level cache: while a tile of several rows computes, prefetches into the first
// fill up the buffers that its own loads need (measured on Zen 4: half the speed at 8 rows).
inline void prefetch(const void *from) {
    __builtin_prefetch(from, 0, 1);
}

// Fetches a group's share of what lies ahead of group g; past a column block, of the next.
template <Format F> inline void prefetch_group(const uint8_t *column_block, int64_t g) {
    constexpr int64_t kBytes = traits(F).chunk_bytes() / traits(F).chunk_groups();
    const uint8_t *ahead = column_block + g * kBytes + kPrefetchDistance;
#pragma GCC unroll 16
    for (int64_t at = 0; at < kBytes; at += kLine)
        prefetch(ahead + at);
}

// One group of 32 activations of one row: 8-bit numbers, and what the formats' inner loops add for
// it. One cache line, so that a row is walked with one pointer and nothing straddles.
struct alignas(kLine) ActivationGroup {
    int8_t quants[kGroup]; // rint(x / scale), within ±127
    float scale;           // max |x| / 127
    float scaled_sum;      // scale · (sum of the quants)
    int32_t minus_8;       // −8 · (sum of the quants): where a dot product with zero 8 starts
    int32_t minus_16;
    int32_t minus_128;
    int32_t minus_32[2]; // of the first and the last 16 quants
    int32_t unused;
};
static_assert(sizeof(ActivationGroup) == kLine);

// How a group is quantized, from the bits of its largest magnitude. A group that holds an infinity
// or a NaN gets a NaN scale and zero quants, so that its row, and no other, becomes NaN. One so
// small that 127 / max overflows counts as zero.
struct GroupScale {
    float scale, inverse; // inverse 0: all quants are zero
};

inline GroupScale group_scale(uint32_t max_bits) {
    const float max = load_as<float>(&max_bits);
    if (!(max <= 0x1.fffffep127f))
        return {__builtin_nanf(""), 0.0f};
    if (max < 0x1p-120f)
        return {0.0f, 0.0f};
    return {max / 127.0f, 127.0f / max};
}

inline void finish_group(const GroupScale &s, int32_t first_sum, int32_t last_sum,
                         ActivationGroup &out) {
    const int32_t sum = first_sum + last_sum;
    out.scale = s.scale;
    out.scaled_sum = s.scale * static_cast<float>(sum);
    out.minus_8 = -8 * sum;
    out.minus_16 = -16 * sum;
    out.minus_128 = -128 * sum;
    out.minus_32[0] = -32 * first_sum;
    out.minus_32[1] = -32 * last_sum;
    out.unused = 0;
}

// Rows lie an odd number of cache lines apart, so that the rows of a tile use different cache sets.
inline int64_t activation_groups(int64_t k) {
    return (k / kGroup) | 1;
} // line each
inline int64_t activation_floats(int64_t k) {
    return (round_up(k, 16) / 16 | 1) * 16;
}

} // namespace
} // namespace octavo

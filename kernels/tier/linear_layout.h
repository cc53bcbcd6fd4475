// How a packed matrix lies in memory; the same in every tier.
//
// A matrix is a sequence of column blocks, each of 16 outputs ("lanes") and all k inputs. A column
// block of a quantized format is a sequence of chunks of 2 groups of 32 inputs (MXFP4: 4; blocks of
// 256 in the file: 8), so that a block is read front to back, in whole cache lines; the 4-bit
// formats that are summed in fixed point (linear_tile.h) have before it a line of 16 fp32 numbers,
// by which the lanes' scales are multiplied first, and NVFP4 one by which sums are multiplied last.
// A chunk has, one after another, for all its groups:
//
//   quants   8 quads of 4 consecutive inputs. 4-bit part: four vectors of 64 bytes, byte 4·lane + j
//            of vector i holding input 4i + j in its low and input 16 + 4i + j in its high nibble.
//            8-bit: eight vectors, byte 4·lane + j of vector i holding input 4i + j, plus 128.
//            2-bit: two vectors, byte 4·lane + j of vector v holding at bits 2q and 2q + 1 input
//            16v + 4q + j. 3-bit: three vectors, byte 4·lane + j of vector v holding at bits 0 to 2
//            the input j of quad {0, 2, 4}[v], at bits 3 to 5 of quad {1, 3, 5}[v]; at bits 6 and
//            7, vector 0 the low bits of quad 6, vector 2 those of quad 7, and vector 1 the third
//            bit of quad 6 and that of quad 7.
//   high     bits above the fourth. 5-bit formats: one vector, byte 4·lane + j holding at bit q
//            the fifth bit of input 4q + j. 6-bit: two vectors, byte 4·lane + j of vector v
//            holding at bits 2q and 2q + 1 bits five and six of input 16v + 4q + j.
//   scales   as stored: 16 fp16 d, then 16 fp16 m where the format has one; Q5_K: 16 bytes of 6-bit
//            scales, then 16 of mins; Q6_K: 16 int8 scales of the first 16 inputs, then 16 of the
//            last. Q4_K: for each two groups 32 bytes of scales, then 32 of mins, those of a lane
//            side by side. Q2_K: for each lane a byte of the first 16 inputs and one of the last,
//            each a 4-bit scale and above it a min. Q3_K: for all groups three vectors of 16-bit
//            words, two a lane, for the first and the last 16 inputs of the groups; word v holds at
//            bits 0 and 6 the scales of groups 2v and 2v + 1; at bit 12, words 0 and 2 the low
//            nibble of those of groups 6 and 7, and word 1 the upper bits of both. IQ4_XS: 16 int8
//            scales, 32 taken off. MXFP4: 16 exponents. T3: 16 bytes of two nibbles. T4: 16 int8.
//            NVFP4: 16 E4M3 scales of the first 16 inputs, then 16 of the last.
//
// and at its end, in the K formats, 16 fp16 d, then 16 fp16 dmin where the format has one.
//
// Float formats keep their numbers: 16 lanes of input 0, 16 lanes of input 1, …; BF16 two inputs at
// a time (k rounded up): 16 lanes of inputs 0 and 1, 16 lanes of inputs 2 and 3, …
//
// A prepared row of activations is a sequence of cells of a cache line: 32 quantized numbers and
// what belongs to them, or 16 floats, or 32 bf16 numbers. Up to 8 rows are a panel, which has the
// first cell of each of its rows, the second cell of each, …: a tile walks it with one pointer.
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
    bool fixed;   // summed in fixed point
    int low_bits = 4;
    bool split = false;       // small whole scales of 16 inputs each: summed as integers with them
    bool coded = false;       // numbers are codes into a table of 8 or 16
    bool halves = false;      // scales of 16 inputs each, and two integer sums a group
    bool scaled_last = false; // sums are multiplied by a number of the column's

    // As many as fill whole lines.
    constexpr int64_t chunk_groups() const { return k_quant ? 8 : scales == 16 ? 4 : 2; }
    constexpr int64_t chunk_bytes() const {
        return round_up(chunk_groups() * (quants + high + scales) + shared, kLine);
    }
    constexpr int64_t header_bytes() const { return fixed || scaled_last ? kLine : 0; }
};

constexpr Traits traits(Format format) {
    switch (format) {
    case Format::Q4_0:
        return {256, 0, 32, 0, 0, 8, false, false, true};
    case Format::Q4_1:
        return {256, 0, 64, 0, 0, 0, true, false, true};
    case Format::Q5_0:
        return {256, 64, 32, 0, 1, 16, false, false, false};
    case Format::Q5_1:
        return {256, 64, 64, 0, 1, 0, true, false, false};
    case Format::Q8_0:
        return {512, 0, 32, 0, 0, 128, false, false, false};
    case Format::Q2_K:
        return {128, 0, 32, 64, 0, 0, true, true, false, 2, true};
    case Format::Q3_K:
        return {192, 0, 24, 32, 0, 4, false, true, false, 3, true};
    case Format::Q4_K:
        return {256, 0, 32, 64, 0, 0, true, true, true};
    case Format::Q5_K:
        return {256, 64, 32, 64, 1, 0, true, true, false};
    case Format::Q6_K:
        return {256, 128, 32, 32, 2, 32, false, true, false, 4, false, false, true};
    case Format::IQ4_NL:
        return {256, 0, 32, 0, 0, 128, false, false, false, 4, false, true};
    case Format::IQ4_XS:
        return {256, 0, 16, 32, 0, 128, false, true, false, 4, false, true};
    case Format::MXFP4:
        return {256, 0, 16, 0, 0, 16, false, false, false, 4, false, true};
    case Format::T3_IQ1:
        return {192, 0, 16, 32, 0, 32, false, true, false, 3, false, true, true};
    case Format::T3_IQ2:
        return {192, 0, 16, 32, 0, 64, false, true, false, 3, false, true, true};
    case Format::T4_IQ3_XXS:
    case Format::T4_IQ3_S:
        return {256, 0, 16, 32, 0, 32, false, true, false, 4, false, true};
    case Format::NVFP4:
        return {256, 0, 32, 0, 0, 32, false, false, false, 4, false, true, true, true};
    default:
        return {};
    }
}

template <Format F> inline int64_t column_block_bytes(int64_t k) {
    constexpr FormatInfo info = format_info(F);
    if constexpr (info.quantized)
        return traits(F).header_bytes() + round_up(k / kGroup, traits(F).chunk_groups()) /
                                              traits(F).chunk_groups() * traits(F).chunk_bytes();
    else
        return round_up(round_up(k, F == Format::BF16 ? 2 : 1) * kLanes * info.block_bytes, kLine);
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
    Byte *chunk = column_block + t.header_bytes() + g / t.chunk_groups() * t.chunk_bytes();
    const int64_t i = g % t.chunk_groups();
    return {chunk + i * t.quants, chunk + kHigh + i * t.high, chunk + kScales + i * t.scales,
            chunk + kShared};
}

// Those of the next group of the same chunk.
template <Format F, class Byte> inline GroupParts<Byte> next_group(GroupParts<Byte> parts) {
    constexpr Traits t = traits(F);
    return {parts.quants + t.quants, parts.high + t.high, parts.scales + t.scales, parts.shared};
}

// The 6-bit scale and min of a lane of group g of Q4_K or Q5_K, given its parts.
template <class Byte> struct ScaleMin {
    Byte *scale, *min;
};

template <Format F, class Byte>
inline ScaleMin<Byte> scale_min_at(const GroupParts<Byte> &parts, int64_t g, int64_t lane) {
    if constexpr (!traits(F).fixed)
        return {parts.scales + lane, parts.scales + 16 + lane};
    Byte *pair = parts.scales - g % 2 * traits(F).scales; // of two groups
    return {pair + lane * 2 + g % 2, pair + 32 + lane * 2 + g % 2};
}

// The scale, and Q2_K's min, of the first (part 0) or last 16 inputs of group g, given its parts.
struct SplitScale {
    int scale, min;
};

template <Format F>
inline SplitScale split_scale_at(const GroupParts<const uint8_t> &parts, int64_t g, int64_t lane,
                                 int64_t part) {
    if constexpr (F == Format::Q2_K) {
        const uint8_t both = parts.scales[lane * 2 + part];
        return {both & 15, both >> 4};
    }
    g %= 8;
    const uint8_t *words = parts.scales - g * traits(F).scales + (lane * 2 + part) * 2;
    const auto word = [&](int64_t v) { return int{load_as<uint16_t>(words + v * kLine)}; };
    const int stored = g < 6 ? word(g / 2) >> g % 2 * 6 & 63
                             : word(g == 6 ? 0 : 2) >> 12 | (word(1) >> 2 * g & 3) << 4;
    return {stored - 32, 0};
}

// A coded format's numbers, and its zero on top, so that they are unsigned; scales are multiplied
// by `unit`, a power of two. MXFP4 and NVFP4: E2M1, doubled. T3_IQ1: 8g ± 1, of g = −1, 0, 1.
struct Codebook {
    uint8_t numbers[16];
    float unit = 1;
};

template <Format F> constexpr Codebook codebook() {
    switch (F) {
    case Format::MXFP4:
        return {{16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4}};
    case Format::NVFP4:
        return {{32, 33, 34, 35, 36, 38, 40, 44, 32, 31, 30, 29, 28, 26, 24, 20}};
    case Format::T3_IQ1:
        return {{25, 33, 41, 32, 23, 31, 39, 32}, 0.125f};
    case Format::T3_IQ2:
        return {{72, 89, 107, 64, 56, 39, 21, 64}, 0.125f};
    case Format::T4_IQ3_XXS:
        return {{34, 38, 42, 46, 50, 54, 58, 63, 30, 26, 22, 18, 14, 10, 6, 1}, 0.5f};
    case Format::T4_IQ3_S:
        return {{33, 35, 37, 39, 41, 43, 45, 47, 31, 29, 27, 25, 23, 21, 19, 17}};
    default:
        return {{1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241}};
    }
}

// The scale of a coded format's first (part 0) or last 16 inputs of a group, given its parts.
template <Format F>
inline float code_scale(const GroupParts<const uint8_t> &parts, int64_t lane, int64_t part) {
    const auto half = [&](const uint8_t *of) {
        return half_to_float(load_as<uint16_t>(of + lane * 2));
    };
    const uint8_t byte = parts.scales[lane];
    if constexpr (F == Format::MXFP4)
        return half_power_of_two(byte);
    else if constexpr (F == Format::NVFP4)
        return half_to_float(e4m3_to_half(parts.scales[part * kLanes + lane]));
    else if constexpr (F == Format::IQ4_NL)
        return half(parts.scales);
    else if constexpr (traits(F).halves)
        return half(parts.shared) * codebook<F>().unit *
               static_cast<float>(2 * (byte >> part * 4 & 15) + 1);
    else
        return half(parts.shared) * codebook<F>().unit *
               static_cast<float>(static_cast<int8_t>(byte));
}

// Where input i of a lane lies in a column block of floats.
template <Format F> constexpr int64_t float_offset(int64_t i, int64_t lane) {
    constexpr int64_t kInputs = F == Format::BF16 ? 2 : 1; // side by side
    return ((i / kInputs * kLanes + lane) * kInputs + i % kInputs) * format_info(F).block_bytes;
}

// How far ahead weights are fetched, in bytes. A single row asks for memory as fast as the
// processor's own prefetching has it, which a far prefetch only disturbs; more rows stop to
// compute, and then it must be told (measured on Zen 4: at one row 22 GB/s with the far and 31 with
// the near one; at four, 10 and 24). Where a large chunk's end is read with its begin, the
// processor loses track (Q6_K: 10 GB/s with the near one and 26 so), and so it does where AVX2
// looks up codes; and what lies between 1024 and 5000 bytes ahead is the worst of all.
template <Format F> constexpr int64_t prefetch_distance(int rows) {
    constexpr bool kTwoPlaces = traits(F).chunk_groups() > 2 && !traits(F).fixed;
#ifdef __AVX512VNNI__
    constexpr bool kSlow = false;
#else
    constexpr bool kSlow = traits(F).coded;
#endif
    return rows > 1 ? 12288 : kTwoPlaces || kSlow ? 6144 : 512;
}

// Into the second-level cache: while a tile of several rows computes, prefetches into the first
// fill up the buffers that its own loads need (measured on Zen 4: half the speed at 8 rows).
inline void prefetch(const void *from) {
    __builtin_prefetch(from, 0, 1);
}

// Whether a tile of R rows fetches its weights into the first-level cache after all, and no farther
// ahead than a single row: the processor's own prefetching does the rest, where few rows leave it
// the time and their activations stay in that cache beside the weights (4 bits, in times of the far
// one's: 0.86, 0.87, 0.91 with 2, 3, 4 rows of 576 inputs; 0.87 to 1.16, 1.2 and 1.5 of 2048). A
// single row takes 0.83 to 0.96 of its time with the second level, but for 8 bits.
template <Format F, int R> inline bool fetches_closely([[maybe_unused]] int64_t k) {
#ifdef __AVX512VNNI__
    constexpr int64_t kMost = traits(F).fixed ? 2304 : F == Format::Q8_0 ? 1728 : 0;
    return R == 1 ? prefetch_distance<F>(1) < 1024 && F != Format::Q8_0 : R * k <= kMost;
#else
    return false;
#endif
}

// Fetches as much as `count` groups take of what lies ahead of group g; past a column block, of the
// next.
template <Format F, int R, int count = 1>
inline void prefetch_groups(const uint8_t *column_block, int64_t g, bool closely = false) {
    constexpr int64_t kBytes = traits(F).chunk_bytes() / traits(F).chunk_groups();
    const uint8_t *from = column_block + g * kBytes;
    if (closely) {
#pragma GCC unroll 32
        for (int64_t at = 0; at < count * kBytes; at += kLine)
            __builtin_prefetch(from + prefetch_distance<F>(1) + at, 0, 3);
        return;
    }
#pragma GCC unroll 32
    for (int64_t at = 0; at < count * kBytes; at += kLine)
        prefetch(from + prefetch_distance<F>(R) + at);
}

// Fetches the scales of the block of 256 after the next, for a single row: they lie behind its
// quants, but are wanted with the first of these.
template <Format F, int R> inline void prefetch_scales(const GroupParts<const uint8_t> &block) {
    constexpr Traits t = traits(F);
    static_assert(t.k_quant);
    if constexpr (R > 1)
        return;
    for (int64_t at = t.chunk_groups() * (t.quants + t.high); at < t.chunk_bytes(); at += kLine)
        prefetch(block.quants + 2 * t.chunk_bytes() + at);
}

// Fetches ahead where a column block ends, for the padding of its last chunk: without it as many
// bytes of the next column block would not have been fetched (measured with 2 groups of 20: 30 GB/s
// for 41). A single row also touches the padding: the processor's own prefetching follows a walk
// without leaps (MXFP4 with 576 inputs: 11 GB/s for 26).
template <Format F, int R>
inline void prefetch_padding(const uint8_t *column_block, int64_t groups) {
    for (int64_t g = groups; g % traits(F).chunk_groups() != 0; ++g) {
        prefetch_groups<F, R>(column_block, g);
        if constexpr (R == 1)
            for (int64_t at = 0; at < traits(F).quants; at += kLine)
                static_cast<void>(*static_cast<const volatile uint8_t *>(
                    group_at<F>(column_block, g).quants + at));
    }
}

// A cell of quantized activations: a group of one row, and what the formats' inner loops add for
// it.
struct alignas(kLine) ActivationGroup {
    int8_t quants[kGroup]; // rint(x / scale), within ±127
    float scale;           // max |x| / 127
    float scaled_sum;      // scale · (sum of the quants)
    int32_t minus_8;       // −8 · (sum of the quants): where a dot product with zero 8 starts
    int32_t minus_32[2];   // of the first and the last 16 quants
    float unit;            // what 1 means in the fixed-point sums of the span
    // Two int16, of an even group and the next. In the even group: their fixed-point scales; in the
    // odd one: their fixed-point scaled sums.
    int32_t fixed_pair;
    int32_t minus_8_pair; // two int16, in the even group: both minus_8

    // Two int16: −(sum of the quants) of each half.
    int32_t minus_half_sums() const {
        return static_cast<int32_t>((static_cast<uint32_t>(minus_32[0] >> 5) & 0xffff) |
                                    static_cast<uint32_t>(minus_32[1]) << 11);
    }
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

// Fixed point. Within a span of 8 groups, a row's scales a and scaled sums s become integers,
//
//   A = rint(a · 2^e)        with the largest a · 2^e in [2^12, 2^13), unless e would pass 127
//   S = rint(s · 2^(e − 11))    |S| <= 2^13 · 32 · 127 / 2^11 = 16256
//
// and a column's scales d and mins m (with a zero of 8 in all formats: m + 8d where there is a min)
//
//   D = rint(d · 2^f)                |D| <= 2^14
//   M = rint of (m + 8d) · 2^(f − 4)   |M| <= 2^13 and a little
//
// Then the sum over a span of dot · ((D · A + 2^14) >> 15) + M · S, with |dot| <= 32 · 8 · 127, is
// below 2^31, and 1 in it means 2^(15 − e − f): `unit` is 2^(15 − e). The errors are some 2^-13 of
// a column's largest d by a span's largest a: where d are alike, a hundredth of 8 bits' rounding.
constexpr int64_t kSpan = 8; // groups

struct SpanScale {
    float scale, sum_scale, unit; // 2^e, 2^(e − 11), 2^(15 − e)
};

// From the bits of the largest scale of the span. NaN makes the unit NaN and all integers 0.
inline SpanScale span_scale(uint32_t max_bits) {
    if (max_bits == 0)
        return {0.0f, 0.0f, 0.0f};
    if (max_bits >= 0x7f800000u)
        return {0.0f, 0.0f, __builtin_nanf("")};
    const uint32_t biased = 266 - (max_bits >> 23);
    const uint32_t exponent = biased < 254 ? biased : 254;
    const uint32_t bits[3] = {exponent << 23, (exponent - 11) << 23, (269 - exponent) << 23};
    return {load_as<float>(&bits[0]), load_as<float>(&bits[1]), load_as<float>(&bits[2])};
}

// 2^f for a column whose largest |d| (or |m + 8d| / 8) is `largest`: NaN if that is not finite.
inline float column_scale(float largest) {
    const auto bits = load_as<uint32_t>(&largest);
    if (bits == 0)
        return 1.0f;
    if (bits >= 0x7f800000u)
        return __builtin_nanf("");
    const uint32_t biased = 267 - (bits >> 23);
    const uint32_t scale = (biased < 254 ? biased : 254) << 23;
    return load_as<float>(&scale);
}

inline int32_t pair_of(int32_t even, int32_t odd) {
    return static_cast<int32_t>(static_cast<uint32_t>(even & 0xffff) | static_cast<uint32_t>(odd)
                                                                           << 16);
}

// How the prepared rows lie. Every format's cells are a line; `width`: inputs a cell.
inline int64_t row_cells(Format format, int64_t k, int64_t width) {
    // Fixed-point sums take groups in pairs.
    return format_info(format).quantized ? round_up(k / kGroup, 2) : round_up(k, width) / width;
}

// Bytes from a cell of a row to the row's next: the height of its panel.
inline int64_t cell_step(int64_t row, int64_t rows) {
    const int64_t left = rows - row / kPanel * kPanel;
    return (left < kPanel ? left : kPanel) * kLine;
}

// Bytes before the first cell of a row.
inline int64_t row_offset(int64_t row, int64_t cells) {
    return (row / kPanel * kPanel * cells + row % kPanel) * kLine;
}

} // namespace
} // namespace octavo

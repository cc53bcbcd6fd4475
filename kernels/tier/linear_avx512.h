// Tiles for AVX-512 with VNNI: a vector is the 16 lanes of a column block.
//
// What bounds them (Zen 4): two of four pipes multiply, integers and floats alike, and a 512-bit
// operation holds one for two cycles, so each multiplication takes a cycle of all that is to be
// had. Loads that broadcast are free beside them, and so are and, or, shifts, conversions and float
// additions; vpternlog is not.
#pragma once

#include "linear_prepare_avx2.h"
#include "linear_scaled.h"

// GCC 12 warns of its own _mm512_undefined_… (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <bit>

namespace octavo {
namespace {

constexpr int kMaxTileRows = kPanel;
#ifdef __AVX512BF16__
constexpr bool kBf16 = true;
#else
constexpr bool kBf16 = false;
#endif

// Column blocks a tile takes at once. In a quantized format one has independent chains enough; so
// has one row of floats, which waits for memory rather than for its multiply-adds, but for those of
// 8 bits. More rows of floats come from the cache, and then their latency must be hidden.
template <Format F> constexpr int tile_columns(int rows) {
    constexpr bool kOne = format_info(F).quantized;
    return kOne || (rows == 1 && F != Format::E4M3) ? 1 : rows <= 3 ? 4 : 2;
}

inline __m512i broadcast(const void *from) {
    return _mm512_set1_epi32(load_as<int32_t>(from));
}

// sum += products of w's unsigned bytes and four signed bytes, summed by fours. GCC 12 would load
// and broadcast those in an instruction of its own.
inline void add_dots(__m512i &sum, __m512i w, const int8_t *x) {
#ifdef __SANITIZE_ADDRESS__
    sum = _mm512_dpbusd_epi32(sum, w, broadcast(x));
#else
    asm("vpdpbusd %2%{1to16%}, %1, %0"
        : "+v"(sum)
        : "v"(w), "m"(*reinterpret_cast<const char (*)[4]>(x)));
#endif
}

// The same for pairs of int16.
inline void add_pairs(__m512i &sum, __m512i w, const int32_t *x) {
#ifdef __SANITIZE_ADDRESS__
    sum = _mm512_dpwssd_epi32(sum, w, broadcast(x));
#else
    asm("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*x));
#endif
}

inline __m512 load_halves(const uint8_t *from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)));
}

// 2^−8 of 16 E4M3 numbers.
inline __m512 load_e4m3(const uint8_t *from) {
    const __m256i words =
        _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
    return _mm512_cvtph_ps(
        _mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16(~0x4000)));
}

inline __m512 bytes_to_floats(const uint8_t *from, bool is_signed) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from));
    return _mm512_cvtepi32_ps(is_signed ? _mm512_cvtepi8_epi32(bytes)
                                        : _mm512_cvtepu8_epi32(bytes));
}

// The numbers of quads i and i + 4 of a group, unsigned bytes.
template <Format F> struct Quads {
    const uint8_t *quants;
    __m512i high0, high1, codes;

    Quads(const uint8_t *group_quants, const uint8_t *group_high) : quants(group_quants) {
        if constexpr (traits(F).high_bits > 0)
            high0 = _mm512_loadu_si512(group_high);
        if constexpr (traits(F).high_bits > 1)
            high1 = _mm512_loadu_si512(group_high + 64);
        if constexpr (traits(F).coded) {
            static constexpr Codebook kCodes = codebook<F>();
            codes = _mm512_broadcast_i32x4(
                _mm_loadu_si128(reinterpret_cast<const __m128i *>(kCodes.numbers)));
        }
    }

    // Shifts within 16 bits move bits across bytes; the mask drops those that came from next door.
    template <int By> static __m512i shift_left(__m512i v) {
        if constexpr (By >= 0)
            return _mm512_slli_epi16(v, By);
        else
            return _mm512_srli_epi16(v, -By);
    }

    template <int I> void get_three_bits(__m512i &first, __m512i &second) const {
        const __m512i a = _mm512_loadu_si512(quants), b = _mm512_loadu_si512(quants + 64),
                      c = _mm512_loadu_si512(quants + 128);
        const auto low = [](__m512i v) {
            return _mm512_and_si512(shift_left<I % 2 * -3>(v), _mm512_set1_epi8(7));
        };
        const auto apart = [&](__m512i two) {
            return _mm512_or_si512(
                _mm512_and_si512(_mm512_srli_epi16(two, 6), _mm512_set1_epi8(3)),
                _mm512_and_si512(_mm512_srli_epi16(b, I + 2), _mm512_set1_epi8(4)));
        };
        first = low(I < 2 ? a : b);
        second = I < 2 ? low(c) : apart(I == 2 ? a : c);
    }

    template <int I> void get(__m512i &first, __m512i &second) const {
        if constexpr (F == Format::Q8_0) {
            first = _mm512_loadu_si512(quants + I * 64);
            second = _mm512_loadu_si512(quants + (I + 4) * 64);
            return;
        }
        if constexpr (traits(F).low_bits == 2) {
            const __m512i mask = _mm512_set1_epi8(3);
            first = _mm512_and_si512(shift_left<-2 * I>(_mm512_loadu_si512(quants)), mask);
            second = _mm512_and_si512(shift_left<-2 * I>(_mm512_loadu_si512(quants + 64)), mask);
        } else if constexpr (traits(F).low_bits == 3) {
            get_three_bits<I>(first, second);
        } else {
            const __m512i v = _mm512_loadu_si512(quants + I * 64);
            const __m512i low_mask = _mm512_set1_epi8(15);
            first = _mm512_and_si512(v, low_mask);
            second = _mm512_and_si512(_mm512_srli_epi16(v, 4), low_mask);
        }
        if constexpr (traits(F).coded) {
            first = _mm512_shuffle_epi8(codes, first);
            second = _mm512_shuffle_epi8(codes, second);
        }
        if constexpr (traits(F).high_bits == 1) {
            const __m512i mask = _mm512_set1_epi8(0x10);
            first = _mm512_or_si512(first, _mm512_and_si512(shift_left<4 - I>(high0), mask));
            second = _mm512_or_si512(second, _mm512_and_si512(shift_left<-I>(high0), mask));
        } else if constexpr (traits(F).high_bits == 2) {
            const __m512i mask = _mm512_set1_epi8(0x30);
            first = _mm512_or_si512(first, _mm512_and_si512(shift_left<4 - 2 * I>(high0), mask));
            second = _mm512_or_si512(second, _mm512_and_si512(shift_left<4 - 2 * I>(high1), mask));
        }
    }
};

template <Format F> struct Scales {
    __m512 scale, scale_b, min; // scale_b: of the last 16 inputs, where they have their own

    Scales(const uint8_t *scales, const uint8_t *supers) {
        if constexpr (F == Format::Q6_K) {
            const __m512 d = load_halves(supers);
            scale = _mm512_mul_ps(d, bytes_to_floats(scales, true));
            scale_b = _mm512_mul_ps(d, bytes_to_floats(scales + 16, true));
        } else if constexpr (F == Format::NVFP4) {
            scale = load_e4m3(scales);
            scale_b = load_e4m3(scales + kLanes);
        } else if constexpr (traits(F).coded && traits(F).k_quant) {
            constexpr float kUnit = codebook<F>().unit;
            __m512 d = load_halves(supers);
            if constexpr (kUnit != 1)
                d = _mm512_mul_ps(d, _mm512_set1_ps(kUnit));
            if constexpr (traits(F).halves) {
                const __m512i pairs = _mm512_cvtepu8_epi32(
                    _mm_loadu_si128(reinterpret_cast<const __m128i *>(scales)));
                const auto odd = [](__m512i doubled) {
                    const __m512i mask = _mm512_set1_epi32(30), one = _mm512_set1_epi32(1);
                    return _mm512_cvtepi32_ps(
                        _mm512_or_si512(_mm512_and_si512(doubled, mask), one));
                };
                scale = _mm512_mul_ps(d, odd(_mm512_slli_epi32(pairs, 1)));
                scale_b = _mm512_mul_ps(d, odd(_mm512_srli_epi32(pairs, 3)));
            } else {
                scale = _mm512_mul_ps(d, bytes_to_floats(scales, true));
            }
        } else if constexpr (F == Format::MXFP4) {
            const __m512i e =
                _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(scales)));
            const __m512 one = _mm512_set1_ps(1);
            scale = _mm512_scalef_ps(
                one, _mm512_cvtepi32_ps(_mm512_sub_epi32(e, _mm512_set1_epi32(128))));
        } else if constexpr (traits(F).k_quant) {
            scale = _mm512_mul_ps(load_halves(supers), bytes_to_floats(scales, false));
            min = _mm512_mul_ps(load_halves(supers + 32), bytes_to_floats(scales + 16, false));
        } else {
            scale = load_halves(scales);
            if constexpr (traits(F).has_min)
                min = load_halves(scales + 32);
        }
    }
};

template <int R, int C> inline void write_tile(const Tile &tile, __m512 (&sums)[R][C]) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
            float *to = tile.out + r * tile.ldo + c * kLanes;
            const int64_t columns = tile.columns - c * kLanes;
            const auto mask =
                static_cast<__mmask16>(columns >= kLanes ? 0xffffu : (1u << columns) - 1);
            __m512 sum = sums[r][c];
            if (tile.accumulate)
                sum = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, to), sum);
            _mm512_mask_storeu_ps(to, mask, sum);
        }
}

// The same, times what takes back the 2^f of each lane, by which its scales had been multiplied.
template <int R> inline void write_scaled(const Tile &tile, __m512 (&sums)[R][1]) {
    const __m512 down = _mm512_div_ps(_mm512_set1_ps(1), _mm512_loadu_ps(tile.weights));
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
        sums[r][0] = _mm512_mul_ps(sums[r][0], down);
    write_tile<R, 1>(tile, sums);
}

constexpr int64_t kFloatPrefetch = 6144; // bytes ahead

// The weights of an input.
template <Format F> inline __m512 load_input(const uint8_t *from, int64_t i) {
    if constexpr (F == Format::F32)
        return _mm512_loadu_ps(from + i * 64);
    if constexpr (F == Format::F16)
        return load_halves(from + i * 32);
    const __m512i pairs = _mm512_loadu_si512(from + i / 2 * 64);
    return _mm512_castsi512_ps(i % 2 == 0 ? _mm512_slli_epi32(pairs, 16)
                                          : _mm512_and_si512(pairs, _mm512_set1_epi32(~0xffff)));
}

template <Format F, int R, int C> inline void float_tile(const Tile &tile) {
    constexpr int64_t kInputs = kLine / 4; // a cell
    constexpr int64_t kBytes = kInputs * kLanes * format_info(F).block_bytes;
    __m512 sums[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c)
            sums[r][c] = _mm512_setzero_ps();
    const uint8_t *weights = tile.weights;
    const std::byte *x = tile.activations;
    const auto multiply_input = [&](int64_t i) {
        __m512 w[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c)
            w[c] = load_input<F>(weights + c * tile.block_bytes, i);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const __m512 a = _mm512_set1_ps(load_as<float>(x + r * kLine + i * 4));
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c)
                sums[r][c] = _mm512_fmadd_ps(w[c], a, sums[r][c]);
        }
    };
    int64_t left = tile.k;
    for (; left >= kInputs; left -= kInputs) {
#pragma GCC unroll 4
        for (int64_t i = 0; i < kInputs; ++i) {
            multiply_input(i);
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c)
                if (i * kLanes * format_info(F).block_bytes % kLine == 0)
                    prefetch(weights + c * tile.block_bytes + kFloatPrefetch +
                             i * kLanes * format_info(F).block_bytes);
        }
        weights += kBytes;
        x += tile.activation_step;
    }
    for (int64_t i = 0; i < left; ++i)
        multiply_input(i);
    write_tile<R, C>(tile, sums);
}

template <int R, int C> inline void scaled_tile(const Tile &tile) {
    constexpr int64_t kInputs = kLine / 4; // a cell
    __m512 sums[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c)
            sums[r][c] = _mm512_setzero_ps();
    const uint8_t *codes = tile.weights + scaled_codes(tile.k, tile.group);
    const std::byte *x = tile.activations;
    for (int64_t begin = 0; begin < tile.k; begin += tile.group) {
        const int64_t end = begin + tile.group < tile.k ? begin + tile.group : tile.k;
        __m512 products[R][C];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c)
                products[r][c] = _mm512_setzero_ps();
        const auto multiply_input = [&](int64_t i) __attribute__((always_inline)) {
            __m512 w[C];
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c)
                w[c] = load_e4m3(codes + c * tile.block_bytes + i * kLanes);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const __m512 a = _mm512_set1_ps(load_as<float>(x + r * kLine + i * 4));
#pragma GCC unroll 8
                for (int c = 0; c < C; ++c)
                    products[r][c] = _mm512_fmadd_ps(w[c], a, products[r][c]);
            }
        };
        int64_t left = end - begin;
        for (; left >= kInputs; left -= kInputs) {
#pragma GCC unroll 16
            for (int64_t i = 0; i < kInputs; ++i) {
                multiply_input(i);
                if (i * kLanes % kLine == 0)
#pragma GCC unroll 8
                    for (int c = 0; c < C; ++c)
                        prefetch(codes + c * tile.block_bytes + i * kLanes + kFloatPrefetch);
            }
            codes += kInputs * kLanes;
            x += tile.activation_step;
        }
        for (int64_t i = 0; i < left; ++i)
            multiply_input(i);
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
            const __m512 scale =
                _mm512_loadu_ps(tile.weights + c * tile.block_bytes + begin / tile.group * kLine);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
                sums[r][c] = _mm512_fmadd_ps(products[r][c], scale, sums[r][c]);
        }
    }
    write_tile<R, C>(tile, sums);
}

#ifdef __AVX512BF16__
inline __m512bh as_bf16(__m512i v) {
    return reinterpret_cast<__m512bh>(v);
}

// Two inputs at a time. An element's sum waits for itself: enough of them hide that.
template <int R, int C> inline void bf16_tile(const Tile &tile) {
    constexpr int64_t kPairs = kLine / 4; // a cell
    __m512 sums[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c)
            sums[r][c] = _mm512_setzero_ps();
    const uint8_t *weights = tile.weights;
    const std::byte *x = tile.activations;
    const auto multiply_pair = [&](int64_t i) {
        __m512i w[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
            const uint8_t *from = weights + c * tile.block_bytes + i * kLine;
            w[c] = _mm512_loadu_si512(from);
            prefetch(from + kFloatPrefetch);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const __m512i a = broadcast(x + r * kLine + i * 4);
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c)
                sums[r][c] = _mm512_dpbf16_ps(sums[r][c], as_bf16(w[c]), as_bf16(a));
        }
    };
    int64_t left = (tile.k + 1) / 2;
    for (; left >= kPairs; left -= kPairs) {
#pragma GCC unroll 4
        for (int64_t i = 0; i < kPairs; ++i)
            multiply_pair(i);
        weights += kPairs * kLine;
        x += tile.activation_step;
    }
    for (int64_t i = 0; i < left; ++i)
        multiply_pair(i);
    write_tile<R, C>(tile, sums);
}
#endif

// Adds a group's integer dot products of R rows; those of the last 16 inputs to dots_b, which may
// be dots.
template <Format F, int R>
[[gnu::always_inline]] inline void multiply_group(const GroupParts<const uint8_t> &part,
                                                  const ActivationGroup *x, __m512i (&dots)[R],
                                                  __m512i (&dots_b)[R]) {
    const Quads<F> quads(part.quants, part.high);
    const auto multiply_quads = [&]<int I>() __attribute__((always_inline)) {
        __m512i first, second;
        quads.template get<I>(first, second);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
            add_dots(dots[r], first, x[r].quants + I * 4);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
            add_dots(dots_b[r], second, x[r].quants + 16 + I * 4);
    };
    multiply_quads.template operator()<0>();
    multiply_quads.template operator()<1>();
    multiply_quads.template operator()<2>();
    multiply_quads.template operator()<3>();
}

// The low int16 of each lane from the first, the high one from the low one of the second.
inline __m512i pair_lanes(__m512i even, __m512i odd) {
    return _mm512_mask_mov_epi16(even, 0xaaaaaaaau, _mm512_slli_epi32(odd, 16));
}

// The fixed-point scales and mins of a span.
template <Format F> struct FixedScales {
    __m512 exponent, min_exponent;
    __m512i super, super_min; // K formats: 64 d and 64 dmin

    FixedScales(const uint8_t *column_block, const GroupParts<const uint8_t> &part)
        : exponent(_mm512_getexp_ps(_mm512_loadu_ps(column_block))),
          min_exponent(_mm512_sub_ps(exponent, _mm512_set1_ps(4))) {
        if constexpr (traits(F).k_quant) {
            const __m512 six = _mm512_set1_ps(6);
            super = convert(part.shared, _mm512_add_ps(exponent, six));
            super = pair_lanes(super, super);
            super_min = convert(part.shared + 32, _mm512_add_ps(min_exponent, six));
            super_min = pair_lanes(super_min, super_min);
        }
    }

    static __m512i convert(const uint8_t *halves, __m512 to) {
        return _mm512_cvtps_epi32(_mm512_scalef_ps(load_halves(halves), to));
    }

    // Of two groups.
    void get(const GroupParts<const uint8_t> &part, __m512i &scale, __m512i &min) const {
        if constexpr (traits(F).k_quant) {
            const auto times = [](const uint8_t *bytes, __m512i by) {
                const __m512i words = _mm512_cvtepu8_epi16(
                    _mm256_loadu_si256(reinterpret_cast<const __m256i *>(bytes)));
                return _mm512_mulhrs_epi16(_mm512_slli_epi16(words, 9), by);
            };
            scale = times(part.scales, super);
            min = _mm512_sub_epi16(_mm512_srai_epi16(scale, 1), times(part.scales + 32, super_min));
        } else {
            constexpr int64_t kNext = traits(F).scales;
            scale =
                pair_lanes(convert(part.scales, exponent), convert(part.scales + kNext, exponent));
            if constexpr (traits(F).has_min)
                min = _mm512_add_epi16(_mm512_srai_epi16(scale, 1),
                                       pair_lanes(convert(part.scales + 32, min_exponent),
                                                  convert(part.scales + kNext + 32, min_exponent)));
        }
    }
};

template <Format F, int R> inline void fixed_tile(const Tile &tile) {
    static_assert(traits(F).zero == 8 || traits(F).has_min);
    const auto *x = reinterpret_cast<const ActivationGroup *>(tile.activations);
    const int64_t height = tile.activation_step / kLine;
    const int64_t groups = tile.k / kGroup;
    const bool closely = fetches_closely<F, R>(tile.k);
    __m512 sums[R][1];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
        sums[r][0] = _mm512_setzero_ps();

    for (int64_t g = 0; g < groups;) {
        const int64_t end = g + kSpan < groups ? g + kSpan : groups;
        const ActivationGroup *span = x;
        const FixedScales<F> scales(tile.weights, group_at<F>(tile.weights, g));
        __m512i totals[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
            totals[r] = _mm512_setzero_si512();
        // Past an odd number of groups comes one of zeros.
        for (; g < end; g += 2, x += 2 * height) {
            const GroupParts<const uint8_t> even = group_at<F>(tile.weights, g);
            const GroupParts<const uint8_t> odd = group_at<F>(tile.weights, g + 1);
            const ActivationGroup *next = x + height;
            __m512i dots[R], dots_odd[R], scale, min;
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
                dots[r] = broadcast(&x[r].minus_8);
            multiply_group<F, R>(even, x, dots, dots);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
                dots_odd[r] = broadcast(&next[r].minus_8);
            scales.get(even, scale, min);
            multiply_group<F, R>(odd, next, dots_odd, dots_odd);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                totals[r] =
                    _mm512_dpwssd_epi32(totals[r], pair_lanes(dots[r], dots_odd[r]),
                                        _mm512_mulhrs_epi16(scale, broadcast(&x[r].fixed_pair)));
                if constexpr (traits(F).has_min)
                    add_pairs(totals[r], min, &next[r].fixed_pair);
            }
            prefetch_groups<F, R, 2>(tile.weights, g, closely);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            sums[r][0] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(totals[r]),
                                         _mm512_set1_ps(span[r].unit), sums[r][0]);
            // Kept in memory: the loop over groups needs all registers.
            if constexpr (R > 4)
                asm("" : "+m"(sums[r][0]));
        }
    }
    write_scaled<R>(tile, sums);
}

// Scales, and mins, of a K block whose first group has its parts at `part`: pairs of int16, for the
// first and the last 16 inputs of a group.
template <Format F> struct SplitScales {
    __m512i pairs[kSpan]; // Q3_K

    explicit SplitScales(const GroupParts<const uint8_t> &part) {
        if constexpr (F == Format::Q3_K) {
            const __m512i words[3] = {_mm512_loadu_si512(part.scales),
                                      _mm512_loadu_si512(part.scales + kLine),
                                      _mm512_loadu_si512(part.scales + 2 * kLine)};
            const __m512i six_bits = _mm512_set1_epi16(63), upper = _mm512_set1_epi16(0x30);
#pragma GCC unroll 3
            for (int v = 0; v < 3; ++v) {
                pairs[2 * v] = _mm512_and_si512(words[v], six_bits);
                pairs[2 * v + 1] = _mm512_and_si512(_mm512_srli_epi16(words[v], 6), six_bits);
            }
            pairs[6] = _mm512_or_si512(_mm512_srli_epi16(words[0], 12),
                                       _mm512_and_si512(_mm512_srli_epi16(words[1], 8), upper));
            pairs[7] = _mm512_or_si512(_mm512_srli_epi16(words[2], 12),
                                       _mm512_and_si512(_mm512_srli_epi16(words[1], 10), upper));
#pragma GCC unroll 8
            for (int64_t g = 0; g < kSpan; ++g)
                pairs[g] = _mm512_sub_epi16(pairs[g], _mm512_set1_epi16(32));
        }
    }

    void get([[maybe_unused]] const GroupParts<const uint8_t> &part, [[maybe_unused]] int64_t g,
             __m512i &scale, [[maybe_unused]] __m512i &min) const {
        if constexpr (F == Format::Q2_K) {
            const __m512i both = _mm512_cvtepu8_epi16(
                _mm256_loadu_si256(reinterpret_cast<const __m256i *>(part.scales)));
            scale = _mm512_and_si512(both, _mm512_set1_epi16(15));
            min = _mm512_srli_epi16(both, 4);
        } else {
            scale = pairs[g % kSpan];
        }
    }
};

// A group's integer dot products of R rows, of the first and of the last 16 inputs. Every other
// quad is multiplied where it lies in its bytes, some bits up; its sum is then shifted down, which
// is one shift instead of one for each quad.
template <Format F, int R>
[[gnu::always_inline]] inline void split_dots(const uint8_t *quants, const ActivationGroup *x,
                                              __m512i (&dots)[R], __m512i (&dots_b)[R]) {
    const auto mask = [](__m512i v, int bits) __attribute__((always_inline)) {
        return _mm512_and_si512(v, _mm512_set1_epi8(static_cast<char>(bits)));
    };
    const auto add = [&]<int quad>(__m512i w) __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
            add_dots(quad < 4 ? dots[r] : dots_b[r], w, x[r].quants + quad * 4);
    };
    const auto shift = [&](int by) __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            dots[r] = _mm512_srai_epi32(dots[r], by);
            dots_b[r] = _mm512_srai_epi32(dots_b[r], by);
        }
    };
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        // The zero of 3 bits is 4: −32 · sum, before the shift by 3.
        dots[r] = traits(F).zero == 4 ? broadcast(&x[r].minus_32[0]) : _mm512_setzero_si512();
        dots_b[r] = traits(F).zero == 4 ? broadcast(&x[r].minus_32[1]) : _mm512_setzero_si512();
    }
    const __m512i a = _mm512_loadu_si512(quants), b = _mm512_loadu_si512(quants + kLine);
    if constexpr (F == Format::Q2_K) {
        const __m512i a_high = _mm512_srli_epi16(a, 4), b_high = _mm512_srli_epi16(b, 4);
        add.template operator()<1>(mask(a, 3 << 2));
        add.template operator()<5>(mask(b, 3 << 2));
        add.template operator()<3>(mask(a_high, 3 << 2));
        add.template operator()<7>(mask(b_high, 3 << 2));
        shift(2);
        add.template operator()<0>(mask(a, 3));
        add.template operator()<4>(mask(b, 3));
        add.template operator()<2>(mask(a_high, 3));
        add.template operator()<6>(mask(b_high, 3));
    } else {
        static_assert(F == Format::Q3_K);
        const __m512i c = _mm512_loadu_si512(quants + 2 * kLine);
        const auto apart = [&]<int shift_third>(__m512i low) __attribute__((always_inline)) {
            return _mm512_or_si512(mask(_mm512_srli_epi16(low, 3), 3 << 3),
                                   mask(_mm512_srli_epi16(b, shift_third), 4 << 3));
        };
        add.template operator()<1>(mask(a, 7 << 3));
        add.template operator()<5>(mask(c, 7 << 3));
        add.template operator()<3>(mask(b, 7 << 3));
        add.template operator()<6>(apart.template operator()<1>(a));
        add.template operator()<7>(apart.template operator()<2>(c));
        shift(3);
        add.template operator()<0>(mask(a, 7));
        add.template operator()<4>(mask(c, 7));
        add.template operator()<2>(mask(b, 7));
    }
}

template <Format F, int R> inline void split_tile(const Tile &tile) {
    constexpr bool kMin = traits(F).has_min;
    static_assert(kMin || traits(F).zero == 4);
    const auto *x = reinterpret_cast<const ActivationGroup *>(tile.activations);
    const int64_t height = tile.activation_step / kLine;
    __m512 sums[R][1];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
        sums[r][0] = _mm512_setzero_ps();

    const int64_t groups = tile.k / kGroup;
    for (int64_t begin = 0; begin < groups; begin += kSpan) {
        const GroupParts<const uint8_t> block = group_at<F>(tile.weights, begin);
        const SplitScales<F> scales(block);
        if constexpr (F == Format::Q3_K) // it reads them all here
            prefetch_scales<F, R>(block);
        __m512 products[R], mins[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
            products[r] = mins[r] = _mm512_setzero_ps();
        GroupParts<const uint8_t> part = block;
        for (int64_t g = begin; g < begin + kSpan; ++g, x += height, part = next_group<F>(part)) {
            __m512i dots[R], dots_b[R], scale, min;
            split_dots<F, R>(part.quants, x, dots, dots_b);
            scales.get(part, g, scale, min);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const __m512i total = _mm512_madd_epi16(scale, pair_lanes(dots[r], dots_b[r]));
                const __m512 by = _mm512_set1_ps(x[r].scale);
                products[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total), by, products[r]);
                if constexpr (kMin) {
                    const __m512i minus_min =
                        _mm512_madd_epi16(min, _mm512_set1_epi32(x[r].minus_half_sums()));
                    mins[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(minus_min), by, mins[r]);
                }
            }
            prefetch_groups<F, R>(tile.weights, g);
        }
        const __m512 d = load_halves(block.shared);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            sums[r][0] = _mm512_fmadd_ps(products[r], d, sums[r][0]);
            if constexpr (kMin)
                sums[r][0] = _mm512_fmadd_ps(mins[r], load_halves(block.shared + 32), sums[r][0]);
            // Kept in memory: the loop over groups needs all registers.
            if constexpr (R > 4)
                asm("" : "+m"(sums[r][0]));
        }
    }
    write_tile<R, 1>(tile, sums);
}

// Times a power of two.
template <int By> inline __m512i start(const int32_t *minus_sum) {
    return _mm512_slli_epi32(broadcast(minus_sum), std::countr_zero(static_cast<unsigned>(By)));
}

template <Format F, int R> inline void quantized_tile(const Tile &tile) {
    constexpr Traits t = traits(F);
    // A single row takes a small chunk's groups at once, for less work between its loads; of 5
    // bits, that would be too many numbers for the registers.
    constexpr int kStep = R == 1 && t.chunk_groups() == 2 && t.high_bits == 0 ? 2 : 1;
    const auto *x = reinterpret_cast<const ActivationGroup *>(tile.activations);
    const int64_t height = tile.activation_step / kLine;
    __m512 sums[R][1];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
        sums[r][0] = _mm512_setzero_ps();

    const auto add_group =
        [&](const GroupParts<const uint8_t> &part) __attribute__((always_inline)) {
            __m512i dots[R], dots_b[R];
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                if constexpr (t.zero == 0) {
                    dots[r] = _mm512_setzero_si512();
                } else if constexpr (t.halves) {
                    dots[r] = start<t.zero / 32>(&x[r].minus_32[0]);
                    dots_b[r] = start<t.zero / 32>(&x[r].minus_32[1]);
                } else {
                    dots[r] = start<t.zero / 8>(&x[r].minus_8);
                }
            }
            multiply_group<F, R>(part, x, dots, t.halves ? dots_b : dots);

            const Scales<F> s(part.scales, part.shared);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                __m512 product = _mm512_mul_ps(_mm512_cvtepi32_ps(dots[r]), s.scale);
                if constexpr (t.halves)
                    product = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots_b[r]), s.scale_b, product);
                __m512 &sum = sums[r][0];
                sum = _mm512_fmadd_ps(product, _mm512_set1_ps(x[r].scale), sum);
                if constexpr (t.has_min) {
                    const __m512 scaled_sum = _mm512_set1_ps(x[r].scaled_sum);
                    sum = t.k_quant ? _mm512_fnmadd_ps(s.min, scaled_sum, sum)
                                    : _mm512_fmadd_ps(s.min, scaled_sum, sum);
                }
            }
            x += height;
        };

    const int64_t groups = tile.k / kGroup;
    const bool closely = fetches_closely<F, R>(tile.k);
    for (int64_t begin = 0; begin < groups; begin += t.chunk_groups()) {
        GroupParts<const uint8_t> part = group_at<F>(tile.weights, begin);
        if constexpr (t.k_quant)
            prefetch_scales<F, R>(part);
        const int64_t end =
            t.k_quant || groups - begin > t.chunk_groups() ? begin + t.chunk_groups() : groups;
        int64_t g = begin;
        for (; g + kStep <= end; g += kStep) {
#pragma GCC unroll 4
            for (int i = 0; i < kStep; ++i, part = next_group<F>(part))
                add_group(part);
            prefetch_groups<F, R, kStep>(tile.weights, g, closely);
        }
        for (; g < end; ++g, part = next_group<F>(part)) {
            add_group(part);
            prefetch_groups<F, R>(tile.weights, g, closely);
        }
    }
    prefetch_padding<F, R>(tile.weights, groups);
    if constexpr (t.scaled_last)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
            sums[r][0] = _mm512_mul_ps(sums[r][0], _mm512_loadu_ps(tile.weights));
    write_tile<R, 1>(tile, sums);
}

template <Format F, int R, int C> void compute_tile(const Tile &tile) {
    if constexpr (F == Format::E4M3)
        scaled_tile<R, C>(tile);
    else if constexpr (traits(F).fixed)
        fixed_tile<F, R>(tile);
    else if constexpr (traits(F).split)
        split_tile<F, R>(tile);
    else if constexpr (format_info(F).quantized)
        quantized_tile<F, R>(tile);
#ifdef __AVX512BF16__
    else if constexpr (F == Format::BF16)
        bf16_tile<R, C>(tile);
#endif
    else
        float_tile<F, R, C>(tile);
}

// Cells of 32 bf16 numbers, nearest even; the last one's rest is zero.
inline void prepare_bf16([[maybe_unused]] const float *x, [[maybe_unused]] int64_t k,
                         [[maybe_unused]] std::byte *to, [[maybe_unused]] int64_t step) {
#ifdef __AVX512BF16__
    for (; k > 0; k -= 32, x += 32, to += step) {
        const auto half = [&](int64_t begin) {
            const int64_t count = k - begin;
            const auto mask = static_cast<__mmask16>(count >= 16  ? 0xffffu
                                                     : count <= 0 ? 0u
                                                                  : (1u << count) - 1);
            return _mm512_maskz_loadu_ps(mask, x + (count > 0 ? begin : 0));
        };
        const __m512bh rounded = _mm512_cvtne2ps_pbh(half(16), half(0));
        _mm512_store_si512(to, reinterpret_cast<__m512i>(rounded));
    }
#endif
}

} // namespace
} // namespace octavo

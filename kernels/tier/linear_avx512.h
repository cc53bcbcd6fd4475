// Tiles for AVX-512 with VNNI: a vector is the 16 lanes of a column block.
#pragma once

#include "linear_layout.h"

// GCC 12 warns of its own _mm512_undefined_… (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

namespace octavo {
namespace {

constexpr int kMaxTileRows = 8;

// Column blocks a tile takes at once. In a quantized format one has independent chains enough; so
// has one row of floats, which waits for memory rather than for its multiply-adds. More rows of
// floats come from the cache, and then their latency must be hidden.
template <Format F> constexpr int tile_columns(int rows) {
    return format_info(F).quantized || rows == 1 ? 1 : rows <= 3 ? 4 : 2;
}

inline __m512i broadcast(const void *from) {
    return _mm512_set1_epi32(load_as<int32_t>(from));
}

inline __m512 load_halves(const uint8_t *from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)));
}

inline __m512 bytes_to_floats(const uint8_t *from, bool is_signed) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from));
    return _mm512_cvtepi32_ps(is_signed ? _mm512_cvtepi8_epi32(bytes)
                                        : _mm512_cvtepu8_epi32(bytes));
}

// The numbers of quads i and i + 4 of a group, unsigned bytes.
template <Format F> struct Quads {
    const uint8_t *quants;
    __m512i high0, high1;

    Quads(const uint8_t *group_quants, const uint8_t *group_high) : quants(group_quants) {
        if constexpr (traits(F).high_bits > 0)
            high0 = _mm512_loadu_si512(group_high);
        if constexpr (traits(F).high_bits > 1)
            high1 = _mm512_loadu_si512(group_high + 64);
    }

    // Shifts within 16 bits move bits across bytes; the mask drops those that came from next door.
    template <int By> static __m512i shift_left(__m512i v) {
        if constexpr (By >= 0)
            return _mm512_slli_epi16(v, By);
        else
            return _mm512_srli_epi16(v, -By);
    }

    template <int I> void get(__m512i &first, __m512i &second) const {
        const __m512i v = _mm512_loadu_si512(quants + I * 64);
        if constexpr (F == Format::Q8_0) {
            first = v;
            second = _mm512_loadu_si512(quants + (I + 4) * 64);
            return;
        }
        const __m512i low_mask = _mm512_set1_epi8(15);
        first = _mm512_and_si512(v, low_mask);
        second = _mm512_and_si512(_mm512_srli_epi16(v, 4), low_mask);
        constexpr int kOrAnd = 0xf8; // a | (b & c)
        if constexpr (traits(F).high_bits == 1) {
            const __m512i mask = _mm512_set1_epi8(0x10);
            first = _mm512_ternarylogic_epi32(first, shift_left<4 - I>(high0), mask, kOrAnd);
            second = _mm512_ternarylogic_epi32(second, shift_left<-I>(high0), mask, kOrAnd);
        } else if constexpr (traits(F).high_bits == 2) {
            const __m512i mask = _mm512_set1_epi8(0x30);
            first = _mm512_ternarylogic_epi32(first, shift_left<4 - 2 * I>(high0), mask, kOrAnd);
            second = _mm512_ternarylogic_epi32(second, shift_left<4 - 2 * I>(high1), mask, kOrAnd);
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

template <Format F, int R, int C> inline void float_tile(const Tile &tile) {
    constexpr int64_t kStep = kLanes * format_info(F).block_bytes;
    const uint8_t *weights = tile.weights;
    const std::byte *x = tile.activations;
    __m512 sums[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c)
            sums[r][c] = _mm512_setzero_ps();
    for (int64_t i = 0; i < tile.k; ++i) {
        __m512 w[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
            const uint8_t *from = weights + c * tile.block_bytes;
            if constexpr (F == Format::F32)
                w[c] = _mm512_loadu_ps(from);
            else if constexpr (F == Format::F16)
                w[c] = load_halves(from);
            else
                w[c] = _mm512_castsi512_ps(
                    _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(
                                          reinterpret_cast<const __m256i *>(from))),
                                      16));
            prefetch(from + kPrefetchDistance);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const __m512 a = _mm512_set1_ps(load_as<float>(x + r * tile.activation_stride));
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c)
                sums[r][c] = _mm512_fmadd_ps(w[c], a, sums[r][c]);
        }
        weights += kStep;
        x += sizeof(float);
    }
    write_tile<R, C>(tile, sums);
}

template <Format F, int R> inline void quantized_tile(const Tile &tile) {
    constexpr Traits t = traits(F);
    constexpr bool kHalves = F == Format::Q6_K; // two scales a group
    const auto *x = reinterpret_cast<const ActivationGroup *>(tile.activations);
    const int64_t stride = tile.activation_stride / kLine;
    __m512 sums[R][1];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
        sums[r][0] = _mm512_setzero_ps();

    const int64_t groups = tile.k / kGroup;
    for (int64_t g = 0; g < groups; ++g, ++x) {
        const GroupParts<const uint8_t> part = group_at<F>(tile.weights, g);
        __m512i dots[R], dots_b[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const ActivationGroup &row = x[r * stride];
            dots[r] = t.zero == 8     ? broadcast(&row.minus_8)
                      : t.zero == 16  ? broadcast(&row.minus_16)
                      : t.zero == 128 ? broadcast(&row.minus_128)
                      : t.zero == 32  ? broadcast(&row.minus_32[0])
                                      : _mm512_setzero_si512();
            if constexpr (kHalves)
                dots_b[r] = broadcast(&row.minus_32[1]);
        }

        const Quads<F> quads(part.quants, part.high);
        const auto multiply_quads = [&]<int I>() {
            __m512i first, second;
            quads.template get<I>(first, second);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const int8_t *q = x[r * stride].quants;
                dots[r] = _mm512_dpbusd_epi32(dots[r], first, broadcast(q + I * 4));
                __m512i &dot = kHalves ? dots_b[r] : dots[r];
                dot = _mm512_dpbusd_epi32(dot, second, broadcast(q + 16 + I * 4));
            }
        };
        multiply_quads.template operator()<0>();
        multiply_quads.template operator()<1>();
        multiply_quads.template operator()<2>();
        multiply_quads.template operator()<3>();

        const Scales<F> s(part.scales, part.shared);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const ActivationGroup &row = x[r * stride];
            __m512 product = _mm512_mul_ps(_mm512_cvtepi32_ps(dots[r]), s.scale);
            if constexpr (kHalves)
                product = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots_b[r]), s.scale_b, product);
            __m512 &sum = sums[r][0];
            sum = _mm512_fmadd_ps(product, _mm512_set1_ps(row.scale), sum);
            if constexpr (t.has_min) {
                const __m512 scaled_sum = _mm512_set1_ps(row.scaled_sum);
                sum = t.k_quant ? _mm512_fnmadd_ps(s.min, scaled_sum, sum)
                                : _mm512_fmadd_ps(s.min, scaled_sum, sum);
            }
        }
        prefetch_group<F>(tile.weights, g);
    }
    write_tile<R, 1>(tile, sums);
}

template <Format F, int R, int C> void compute_tile(const Tile &tile) {
    if constexpr (format_info(F).quantized)
        quantized_tile<F, R>(tile);
    else
        float_tile<F, R, C>(tile);
}

// q = rint(x · 127 / max |x|), ties to even.
inline void prepare_group(const float *x, ActivationGroup &out) {
    const __m512 x0 = _mm512_loadu_ps(x), x1 = _mm512_loadu_ps(x + 16);
    // As integers, magnitudes order like the numbers, and NaN is above all.
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    const uint32_t bits = _mm512_reduce_max_epu32(
        _mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(x0), magnitude),
                         _mm512_and_si512(_mm512_castps_si512(x1), magnitude)));
    const GroupScale s = group_scale(bits);
    const __m512 inverse = _mm512_set1_ps(s.inverse);
    const __mmask16 keep = s.inverse > 0 ? 0xffff : 0;
    const __m512i q0 = _mm512_maskz_cvtps_epi32(keep, _mm512_mul_ps(x0, inverse));
    const __m512i q1 = _mm512_maskz_cvtps_epi32(keep, _mm512_mul_ps(x1, inverse));
    const __m256i q = _mm256_set_m128i(_mm512_cvtepi32_epi8(q1), _mm512_cvtepi32_epi8(q0));
    _mm256_store_si256(reinterpret_cast<__m256i *>(out.quants), q);
    // Sums of four, then within each 128-bit half: the first and the last 16 quants.
    __m256i sums = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), q);
    sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32(sums, 0x4e));
    sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32(sums, 0xb1));
    finish_group(s, _mm256_cvtsi256_si32(sums), _mm256_extract_epi32(sums, 4), out);
}

} // namespace
} // namespace octavo

// Tiles for AVX2 with FMA: a vector is half the lanes of a column block.
//
// A product of bytes is vpmaddubsw (unsigned by signed, pairs summed in saturating 16 bits), then
// vpmaddwd. Sums of pairs are at most 2 · 15 · 127 for 4-bit numbers, 2 · 31 · 127 for 5-bit and
// 2 · 63 · 127 for 6-bit, so eight, four and two of them fit 16 bits. 8-bit numbers go in as their
// absolute value, their sign moved to the activation: 2 · 128 · 127 fits.
#pragma once

#include "linear_layout.h"

#include <immintrin.h>

namespace octavo {
namespace {

constexpr int kMaxTileRows = 4;
constexpr int64_t kHalf = kLanes / 2;

template <Format F> constexpr int tile_columns(int rows) {
    return format_info(F).quantized || rows > 1 ? 1 : 4;
}

inline __m256i load_bytes(const void *from) {
    return _mm256_loadu_si256(static_cast<const __m256i *>(from));
}

inline __m256i broadcast(const void *from) {
    return _mm256_set1_epi32(load_as<int32_t>(from));
}

inline __m256 load_halves(const uint8_t *from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
}

inline __m256 bytes_to_floats(const uint8_t *from, bool is_signed) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(from));
    return _mm256_cvtepi32_ps(is_signed ? _mm256_cvtepi8_epi32(bytes)
                                        : _mm256_cvtepu8_epi32(bytes));
}

// The numbers of quads I and I + 4 of a group, half the lanes: unsigned bytes, but signed for 8
// bits.
template <Format F, int I>
inline void load_quads(const uint8_t *quants, const uint8_t *high, __m256i &first,
                       __m256i &second) {
    const __m256i v = load_bytes(quants + I * 64);
    if constexpr (F == Format::Q8_0) {
        const __m256i sign = _mm256_set1_epi8(-128);
        first = _mm256_xor_si256(v, sign);
        second = _mm256_xor_si256(load_bytes(quants + (I + 4) * 64), sign);
        return;
    }
    const __m256i low_mask = _mm256_set1_epi8(15);
    first = _mm256_and_si256(v, low_mask);
    second = _mm256_and_si256(_mm256_srli_epi16(v, 4), low_mask);
    // Shifts within 16 bits move bits across bytes; the masks drop those that came from next door.
    if constexpr (traits(F).high_bits == 1) {
        const __m256i mask = _mm256_set1_epi8(0x10), bits = load_bytes(high);
        first = _mm256_or_si256(first, _mm256_and_si256(_mm256_slli_epi16(bits, 4 - I), mask));
        second = _mm256_or_si256(second, _mm256_and_si256(_mm256_srli_epi16(bits, I), mask));
    } else if constexpr (traits(F).high_bits == 2) {
        const auto place = [](__m256i bits) {
            if constexpr (I < 2)
                bits = _mm256_slli_epi16(bits, 4 - 2 * I);
            else
                bits = _mm256_srli_epi16(bits, 2 * I - 4);
            return _mm256_and_si256(bits, _mm256_set1_epi8(0x30));
        };
        first = _mm256_or_si256(first, place(load_bytes(high)));
        second = _mm256_or_si256(second, place(load_bytes(high + 64)));
    }
}

// The integer dot products of a group, one row by half the lanes.
template <Format F> struct Dots {
    __m256i sum, sum_b;       // 32 bits; sum_b: of the last 16 inputs, where they scale apart
    __m256i narrow, narrow_b; // 16 bits, not yet added to the sums

    static __m256i pairs(__m256i w, __m256i x) {
        if constexpr (F == Format::Q8_0)
            return _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
        return _mm256_maddubs_epi16(w, x);
    }
    static __m256i widen(__m256i v) { return _mm256_madd_epi16(v, _mm256_set1_epi16(1)); }

    void start(const ActivationGroup &x) {
        constexpr int zero = traits(F).zero;
        sum = zero == 8    ? broadcast(&x.minus_8)
              : zero == 16 ? broadcast(&x.minus_16)
              : zero == 32 ? broadcast(&x.minus_32[0])
                           : _mm256_setzero_si256();
        sum_b = broadcast(&x.minus_32[1]);
    }

    template <int I> void add(__m256i first, __m256i second, const ActivationGroup &group) {
        const __m256i p = pairs(first, broadcast(group.quants + I * 4));
        const __m256i q = pairs(second, broadcast(group.quants + 16 + I * 4));
        if constexpr (F == Format::Q8_0) {
            sum = _mm256_add_epi32(sum, _mm256_add_epi32(widen(p), widen(q)));
        } else if constexpr (F == Format::Q6_K) {
            narrow = I % 2 == 0 ? p : _mm256_add_epi16(narrow, p);
            narrow_b = I % 2 == 0 ? q : _mm256_add_epi16(narrow_b, q);
            if constexpr (I % 2 == 1) {
                sum = _mm256_add_epi32(sum, widen(narrow));
                sum_b = _mm256_add_epi32(sum_b, widen(narrow_b));
            }
        } else {
            constexpr int kPeriod = traits(F).high_bits == 1 ? 2 : 4;
            const __m256i both = _mm256_add_epi16(p, q);
            narrow = I % kPeriod == 0 ? both : _mm256_add_epi16(narrow, both);
            if constexpr (I % kPeriod == kPeriod - 1)
                sum = _mm256_add_epi32(sum, widen(narrow));
        }
    }
};

inline void write_half(const Tile &tile, int64_t row, int64_t lane, __m256 sum) {
    float *to = tile.out + row * tile.ldo + lane;
    const int64_t columns = tile.columns - lane;
    if (columns >= kHalf) {
        if (tile.accumulate)
            sum = _mm256_add_ps(_mm256_loadu_ps(to), sum);
        _mm256_storeu_ps(to, sum);
        return;
    }
    alignas(32) float lanes[kHalf];
    _mm256_store_ps(lanes, sum);
    for (int64_t i = 0; i < columns; ++i)
        to[i] = tile.accumulate ? to[i] + lanes[i] : lanes[i];
}

template <Format F, int R, int C> inline void float_tile(const Tile &tile) {
    constexpr int64_t kBytes = format_info(F).block_bytes;
    constexpr int H = 2 * C;
    __m256 sums[R][H];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int h = 0; h < H; ++h)
            sums[r][h] = _mm256_setzero_ps();
    const uint8_t *weights = tile.weights;
    const std::byte *x = tile.activations;
    for (int64_t i = 0; i < tile.k; ++i) {
        __m256 w[H];
#pragma GCC unroll 8
        for (int h = 0; h < H; ++h) {
            const uint8_t *from = weights + h / 2 * tile.block_bytes + h % 2 * kHalf * kBytes;
            if constexpr (F == Format::F32)
                w[h] = _mm256_loadu_ps(reinterpret_cast<const float *>(from));
            else if constexpr (F == Format::F16)
                w[h] = load_halves(from);
            else
                w[h] = _mm256_castsi256_ps(_mm256_slli_epi32(
                    _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from))),
                    16));
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const __m256 a = _mm256_set1_ps(load_as<float>(x + r * tile.activation_stride));
#pragma GCC unroll 8
            for (int h = 0; h < H; ++h)
                sums[r][h] = _mm256_fmadd_ps(w[h], a, sums[r][h]);
        }
        weights += kLanes * kBytes;
        x += sizeof(float);
    }
    for (int r = 0; r < R; ++r)
        for (int h = 0; h < H; ++h)
            write_half(tile, r, h * kHalf, sums[r][h]);
}

// R rows by H halves of a column block, the first beginning at `lane`.
template <Format F, int R, int H> inline void quantized_halves(const Tile &tile, int64_t lane) {
    constexpr Traits t = traits(F);
    const auto *x = reinterpret_cast<const ActivationGroup *>(tile.activations);
    const int64_t stride = tile.activation_stride / kLine;
    __m256 sums[R][H];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int h = 0; h < H; ++h)
            sums[r][h] = _mm256_setzero_ps();

    const int64_t groups = tile.k / kGroup;
    for (int64_t g = 0; g < groups; ++g) {
        const GroupParts<const uint8_t> part = group_at<F>(tile.weights, g);
        const uint8_t *quants = part.quants + lane * 4, *high = part.high + lane * 4;
        Dots<F> dots[R][H];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int h = 0; h < H; ++h)
                dots[r][h].start(x[r * stride]);

        const auto multiply_quads = [&]<int I>() {
#pragma GCC unroll 8
            for (int h = 0; h < H; ++h) {
                __m256i first, second;
                load_quads<F, I>(quants + h * kHalf * 4, high + h * kHalf * 4, first, second);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r)
                    dots[r][h].template add<I>(first, second, x[r * stride]);
            }
        };
        multiply_quads.template operator()<0>();
        multiply_quads.template operator()<1>();
        multiply_quads.template operator()<2>();
        multiply_quads.template operator()<3>();

#pragma GCC unroll 8
        for (int h = 0; h < H; ++h) {
            const int64_t at = lane + h * kHalf;
            __m256 scale, scale_b, min;
            if constexpr (F == Format::Q6_K) {
                const __m256 d = load_halves(part.shared + at * 2);
                scale = _mm256_mul_ps(d, bytes_to_floats(part.scales + at, true));
                scale_b = _mm256_mul_ps(d, bytes_to_floats(part.scales + 16 + at, true));
            } else if constexpr (t.k_quant) {
                scale = _mm256_mul_ps(load_halves(part.shared + at * 2),
                                      bytes_to_floats(part.scales + at, false));
                min = _mm256_mul_ps(load_halves(part.shared + 32 + at * 2),
                                    bytes_to_floats(part.scales + 16 + at, false));
            } else {
                scale = load_halves(part.scales + at * 2);
                if constexpr (t.has_min)
                    min = load_halves(part.scales + 32 + at * 2);
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const ActivationGroup &row = x[r * stride];
                __m256 product = _mm256_mul_ps(_mm256_cvtepi32_ps(dots[r][h].sum), scale);
                if constexpr (F == Format::Q6_K)
                    product =
                        _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[r][h].sum_b), scale_b, product);
                sums[r][h] = _mm256_fmadd_ps(product, _mm256_set1_ps(row.scale), sums[r][h]);
                if constexpr (t.has_min) {
                    const __m256 scaled_sum = _mm256_set1_ps(row.scaled_sum);
                    sums[r][h] = t.k_quant ? _mm256_fnmadd_ps(min, scaled_sum, sums[r][h])
                                           : _mm256_fmadd_ps(min, scaled_sum, sums[r][h]);
                }
            }
        }
        prefetch_group<F>(tile.weights, g);
        ++x;
    }
    for (int r = 0; r < R; ++r)
        for (int h = 0; h < H; ++h)
            write_half(tile, r, lane + h * kHalf, sums[r][h]);
}

template <Format F, int R, int C> void compute_tile(const Tile &tile) {
    if constexpr (!format_info(F).quantized) {
        float_tile<F, R, C>(tile);
    } else if constexpr (R == 1) {
        quantized_halves<F, 1, 2>(tile, 0);
    } else {
        quantized_halves<F, R, 1>(tile, 0);
        quantized_halves<F, R, 1>(tile, kHalf);
    }
}

inline int32_t sum_lanes(__m256i v) {
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
}

inline void prepare_group(const float *x, ActivationGroup &out) {
    // As integers, magnitudes order like the numbers, and NaN is above all.
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256 v[4];
    __m256i largest = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        v[i] = _mm256_loadu_ps(x + i * 8);
        largest = _mm256_max_epu32(largest, _mm256_and_si256(_mm256_castps_si256(v[i]), magnitude));
    }
    __m128i max =
        _mm_max_epu32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
    max = _mm_max_epu32(max, _mm_shuffle_epi32(max, 0x4e));
    max = _mm_max_epu32(max, _mm_shuffle_epi32(max, 0xb1));
    const GroupScale s = group_scale(static_cast<uint32_t>(_mm_cvtsi128_si32(max)));
    const __m256i keep = _mm256_set1_epi32(s.inverse > 0 ? -1 : 0);
    __m256i q[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
        q[i] = _mm256_and_si256(keep,
                                _mm256_cvtps_epi32(_mm256_mul_ps(v[i], _mm256_set1_ps(s.inverse))));
    // The packs work within 128-bit halves; the permutation puts the 4-byte pieces in order.
    const __m256i narrow =
        _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
    _mm256_store_si256(
        reinterpret_cast<__m256i *>(out.quants),
        _mm256_permutevar8x32_epi32(narrow, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
    finish_group(s, sum_lanes(_mm256_add_epi32(q[0], q[1])),
                 sum_lanes(_mm256_add_epi32(q[2], q[3])), out);
}

} // namespace
} // namespace octavo

// Tiles for AVX2 with FMA: a vector is half the lanes of a column block.
//
// A product of bytes is vpmaddubsw (unsigned by signed, pairs summed in saturating 16 bits), then
// vpmaddwd. Sums of pairs are at most 2 · 15 · 127 for 4-bit numbers, 2 · 31 · 127 for 5-bit and
// 2 · 63 · 127 for 6-bit, so eight, four and two of them fit 16 bits. 8-bit numbers go in as their
// absolute value, their sign moved to the activation: 2 · 128 · 127 fits. Codes go in as the
// numbers they stand for, of 5 or 8 bits.
#pragma once

#include "linear_prepare_avx2.h"
#include "linear_scaled.h"

#include <bit>

namespace octavo {
namespace {

constexpr int kMaxTileRows = 4;
constexpr bool kBf16 = false;
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

// 2^−8 of 8 E4M3 numbers.
inline __m256 load_e4m3(const uint8_t *from) {
    const __m128i words =
        _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(from)));
    return _mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(words, 7), _mm_set1_epi16(~0x4000)));
}

inline __m256 bytes_to_floats(const uint8_t *from, bool is_signed) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(from));
    return _mm256_cvtepi32_ps(is_signed ? _mm256_cvtepi8_epi32(bytes)
                                        : _mm256_cvtepu8_epi32(bytes));
}

// half_power_of_two of eight bytes.
inline __m256 half_powers_of_two(const uint8_t *from) {
    const __m256i one = _mm256_set1_epi32(1);
    const __m256i e =
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(from)));
    const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, one), 23);
    const __m256i subnormal =
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_min_epi32(e, one), one), 21);
    return _mm256_castsi256_ps(_mm256_max_epi32(normal, subnormal));
}

// The numbers of quads I and I + 4 of a group, half the lanes: unsigned bytes, but signed for 8
// bits.
template <Format F, int I>
inline void load_quads(const uint8_t *quants, const uint8_t *high, __m256i &first,
                       __m256i &second) {
    const __m256i v = load_bytes(quants + I * 64);
    if constexpr (traits(F).low_bits == 2) {
        const auto part = [](__m256i bits) {
            return _mm256_and_si256(_mm256_srli_epi16(bits, 2 * I), _mm256_set1_epi8(3));
        };
        first = part(load_bytes(quants));
        second = part(load_bytes(quants + 64));
        return;
    }
    if constexpr (traits(F).low_bits == 3) {
        const __m256i a = load_bytes(quants), b = load_bytes(quants + 64),
                      c = load_bytes(quants + 128);
        const auto low = [](__m256i bits) {
            return _mm256_and_si256(_mm256_srli_epi16(bits, I % 2 * 3), _mm256_set1_epi8(7));
        };
        const auto apart = [&](__m256i two) {
            return _mm256_or_si256(
                _mm256_and_si256(_mm256_srli_epi16(two, 6), _mm256_set1_epi8(3)),
                _mm256_and_si256(_mm256_srli_epi16(b, I + 2), _mm256_set1_epi8(4)));
        };
        first = low(I < 2 ? a : b);
        second = I < 2 ? low(c) : apart(I == 2 ? a : c);
    }
    if constexpr (F == Format::Q8_0) {
        const __m256i sign = _mm256_set1_epi8(-128);
        first = _mm256_xor_si256(v, sign);
        second = _mm256_xor_si256(load_bytes(quants + (I + 4) * 64), sign);
        return;
    }
    if constexpr (traits(F).low_bits == 4) {
        const __m256i low_mask = _mm256_set1_epi8(15);
        first = _mm256_and_si256(v, low_mask);
        second = _mm256_and_si256(_mm256_srli_epi16(v, 4), low_mask);
    }
    if constexpr (traits(F).coded) {
        static constexpr Codebook kCodes = codebook<F>();
        __m256i codes = _mm256_broadcastsi128_si256(
            _mm_loadu_si128(reinterpret_cast<const __m128i *>(kCodes.numbers)));
        if constexpr (traits(F).zero == 128)
            codes = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
        first = _mm256_shuffle_epi8(codes, first);
        second = _mm256_shuffle_epi8(codes, second);
    }
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
    static constexpr bool kSigned = traits(F).zero == 128; // numbers of 8 bits
    static constexpr bool kWide = traits(F).zero == 64;    // of 7: a sum of pairs fills 16 bits
    __m256i sum, sum_b;       // 32 bits; sum_b: of the last 16 inputs, where they scale apart
    __m256i narrow, narrow_b; // 16 bits, not yet added to the sums

    static __m256i pairs(__m256i w, __m256i x) {
        if constexpr (kSigned)
            return _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
        return _mm256_maddubs_epi16(w, x);
    }
    static __m256i widen(__m256i v) { return _mm256_madd_epi16(v, _mm256_set1_epi16(1)); }

    void start(const ActivationGroup &x) {
        constexpr unsigned zero = kSigned ? 0 : traits(F).zero; // 8 bits: signed, as are products
        if constexpr (traits(F).halves) {
            sum = times<zero / 32>(broadcast(&x.minus_32[0]));
            sum_b = times<zero / 32>(broadcast(&x.minus_32[1]));
        } else {
            sum = times<zero / 8>(broadcast(&x.minus_8));
        }
    }
    // By a power of two, or 0.
    template <unsigned By> static __m256i times(__m256i v) {
        return By == 0 ? _mm256_setzero_si256() : _mm256_slli_epi32(v, std::countr_zero(By));
    }

    template <int I> void add(__m256i first, __m256i second, const ActivationGroup &group) {
        const __m256i p = pairs(first, broadcast(group.quants + I * 4));
        const __m256i q = pairs(second, broadcast(group.quants + 16 + I * 4));
        if constexpr (kSigned) {
            sum = _mm256_add_epi32(sum, _mm256_add_epi32(widen(p), widen(q)));
        } else if constexpr (kWide) {
            sum = _mm256_add_epi32(sum, widen(p));
            sum_b = _mm256_add_epi32(sum_b, widen(q));
        } else if constexpr (traits(F).zero == 32 && !traits(F).halves) { // 6 bits
            sum = _mm256_add_epi32(sum, widen(_mm256_add_epi16(p, q)));
        } else if constexpr (traits(F).halves) {
            narrow = I % 2 == 0 ? p : _mm256_add_epi16(narrow, p);
            narrow_b = I % 2 == 0 ? q : _mm256_add_epi16(narrow_b, q);
            if constexpr (I % 2 == 1) {
                sum = _mm256_add_epi32(sum, widen(narrow));
                sum_b = _mm256_add_epi32(sum_b, widen(narrow_b));
            }
        } else {
            const __m256i both = _mm256_add_epi16(p, q);
            narrow = I % 2 == 0 ? both : _mm256_add_epi16(narrow, both);
            if constexpr (I % 2 == 1)
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

// The same for R rows, times what takes back the 2^f of each lane, by which its scales had been
// multiplied.
template <int R> inline void write_scaled(const Tile &tile, int64_t lane, const __m256 (&sums)[R]) {
    const __m256 down = _mm256_div_ps(
        _mm256_set1_ps(1), _mm256_loadu_ps(reinterpret_cast<const float *>(tile.weights) + lane));
    for (int r = 0; r < R; ++r)
        write_half(tile, r, lane, _mm256_mul_ps(sums[r], down));
}

template <Format F, int R, int C> inline void float_tile(const Tile &tile) {
    constexpr int64_t kInputs = kLine / 4; // a cell
    constexpr int H = 2 * C;
    __m256 sums[R][H];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int h = 0; h < H; ++h)
            sums[r][h] = _mm256_setzero_ps();
    const std::byte *x = tile.activations;
    for (int64_t i = 0; i < tile.k; ++i) {
        __m256 w[H];
#pragma GCC unroll 8
        for (int h = 0; h < H; ++h) {
            const uint8_t *from =
                tile.weights + h / 2 * tile.block_bytes +
                float_offset<F>(i - (F == Format::BF16 ? i % 2 : 0), h % 2 * kHalf);
            if constexpr (F == Format::F32)
                w[h] = _mm256_loadu_ps(reinterpret_cast<const float *>(from));
            else if constexpr (F == Format::F16)
                w[h] = load_halves(from);
            else
                w[h] = _mm256_castsi256_ps(
                    i % 2 == 0 ? _mm256_slli_epi32(load_bytes(from), 16)
                               : _mm256_and_si256(load_bytes(from), _mm256_set1_epi32(~0xffff)));
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const __m256 a = _mm256_set1_ps(load_as<float>(x + r * kLine + i % kInputs * 4));
#pragma GCC unroll 8
            for (int h = 0; h < H; ++h)
                sums[r][h] = _mm256_fmadd_ps(w[h], a, sums[r][h]);
        }
        if (i % kInputs == kInputs - 1)
            x += tile.activation_step;
    }
    for (int r = 0; r < R; ++r)
        for (int h = 0; h < H; ++h)
            write_half(tile, r, h * kHalf, sums[r][h]);
}

template <int R, int C> inline void scaled_tile(const Tile &tile) {
    constexpr int64_t kInputs = kLine / 4; // a cell
    constexpr int H = 2 * C;
    __m256 sums[R][H];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int h = 0; h < H; ++h)
            sums[r][h] = _mm256_setzero_ps();
    const uint8_t *codes = tile.weights + scaled_codes(tile.k, tile.group);
    const std::byte *x = tile.activations;
    for (int64_t begin = 0; begin < tile.k; begin += tile.group) {
        const int64_t end = begin + tile.group < tile.k ? begin + tile.group : tile.k;
        __m256 products[R][H];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int h = 0; h < H; ++h)
                products[r][h] = _mm256_setzero_ps();
        for (int64_t i = begin; i < end; ++i) {
            __m256 a[R];
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
                a[r] = _mm256_set1_ps(load_as<float>(x + r * kLine + i % kInputs * 4));
#pragma GCC unroll 8
            for (int h = 0; h < H; ++h) {
                const uint8_t *from = codes + h / 2 * tile.block_bytes + i * kLanes + h % 2 * kHalf;
                const __m256 w = load_e4m3(from);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r)
                    products[r][h] = _mm256_fmadd_ps(w, a[r], products[r][h]);
            }
            if (i % kInputs == kInputs - 1)
                x += tile.activation_step;
        }
#pragma GCC unroll 8
        for (int h = 0; h < H; ++h) {
            const __m256 scale = _mm256_loadu_ps(
                reinterpret_cast<const float *>(tile.weights + h / 2 * tile.block_bytes +
                                                begin / tile.group * kLine + h % 2 * kHalf * 4));
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
                sums[r][h] = _mm256_fmadd_ps(products[r][h], scale, sums[r][h]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int h = 0; h < H; ++h)
            write_half(tile, r, h * kHalf, sums[r][h]);
}

// The low int16 of each lane from the first, the high one from the low one of the second.
inline __m256i pair_lanes(__m256i even, __m256i odd) {
    return _mm256_blend_epi16(even, _mm256_slli_epi32(odd, 16), 0xaa);
}

// The fixed-point scales and mins of groups g and g + 1, of half the lanes.
template <Format F>
inline void fixed_scales(const uint8_t *weights, int64_t g, int64_t lane, __m256i &scale,
                         __m256i &min) {
    constexpr Traits t = traits(F);
    const __m256 up = _mm256_loadu_ps(reinterpret_cast<const float *>(weights) + lane);
    const __m256 min_up = _mm256_mul_ps(up, _mm256_set1_ps(0.0625f));
    const auto convert = [](const uint8_t *halves, __m256 by) {
        return _mm256_cvtps_epi32(_mm256_mul_ps(load_halves(halves), by));
    };
    const GroupParts<const uint8_t> part = group_at<F>(weights, g);
    if constexpr (t.k_quant) {
        const __m256 by = _mm256_set1_ps(64);
        const __m256i d = convert(part.shared + lane * 2, _mm256_mul_ps(up, by));
        const __m256i m = convert(part.shared + 32 + lane * 2, _mm256_mul_ps(min_up, by));
        const auto times = [](const uint8_t *bytes, __m256i by) {
            const __m256i words =
                _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(bytes)));
            return _mm256_mulhrs_epi16(_mm256_slli_epi16(words, 9), by);
        };
        scale = times(part.scales + lane * 2, pair_lanes(d, d));
        min = _mm256_sub_epi16(_mm256_srai_epi16(scale, 1),
                               times(part.scales + 32 + lane * 2, pair_lanes(m, m)));
    } else {
        const uint8_t *even = part.scales + lane * 2, *odd = even + t.scales;
        scale = pair_lanes(convert(even, up), convert(odd, up));
        if constexpr (t.has_min)
            min =
                _mm256_add_epi16(_mm256_srai_epi16(scale, 1),
                                 pair_lanes(convert(even + 32, min_up), convert(odd + 32, min_up)));
    }
}

// Sums of the products of a 4-bit group by pairs of inputs, in 16 bits (their sum by lanes is the
// dot product of the raw numbers), R rows by half the lanes.
template <Format F, int R>
inline void narrow_dots(const GroupParts<const uint8_t> &part, int64_t lane,
                        const ActivationGroup *x, __m256i (&narrow)[R]) {
    const auto add_quads = [&]<int I>() {
        __m256i first, second;
        load_quads<F, I>(part.quants + lane * 4, part.high + lane * 4, first, second);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const int8_t *q = x[r].quants + I * 4;
            const __m256i p = _mm256_maddubs_epi16(first, broadcast(q));
            narrow[r] = I == 0 ? p : _mm256_add_epi16(narrow[r], p);
            narrow[r] =
                _mm256_add_epi16(narrow[r], _mm256_maddubs_epi16(second, broadcast(q + 16)));
        }
    };
    add_quads.template operator()<0>();
    add_quads.template operator()<1>();
    add_quads.template operator()<2>();
    add_quads.template operator()<3>();
}

// The same for the first and the last 16 inputs of a group of 2 or 3 bits.
template <Format F, int R>
inline void split_dots(const GroupParts<const uint8_t> &part, int64_t lane,
                       const ActivationGroup *x, __m256i (&narrow)[R], __m256i (&narrow_b)[R]) {
    const auto add_quads = [&]<int I>() {
        __m256i first, second;
        load_quads<F, I>(part.quants + lane * 4, part.high + lane * 4, first, second);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const int8_t *q = x[r].quants + I * 4;
            const __m256i p = _mm256_maddubs_epi16(first, broadcast(q));
            const __m256i p_b = _mm256_maddubs_epi16(second, broadcast(q + 16));
            narrow[r] = I == 0 ? p : _mm256_add_epi16(narrow[r], p);
            narrow_b[r] = I == 0 ? p_b : _mm256_add_epi16(narrow_b[r], p_b);
        }
    };
    add_quads.template operator()<0>();
    add_quads.template operator()<1>();
    add_quads.template operator()<2>();
    add_quads.template operator()<3>();
}

// R rows by H halves of a column block, the first beginning at `lane`.
template <Format F, int R, int H> inline void fixed_halves(const Tile &tile, int64_t lane) {
    const auto *x = reinterpret_cast<const ActivationGroup *>(tile.activations);
    const int64_t height = tile.activation_step / kLine;
    const int64_t groups = tile.k / kGroup;
    // Copies of the even or the odd int16 of a lane in both.
    const __m256i even_twice = _mm256_set1_epi64x(0x0504050401000100);
    const __m256i odd_twice = _mm256_set1_epi64x(0x0706070603020302);
    const __m256i upper = _mm256_setr_epi64x(0, 0x0808080808080808, 0, 0x0808080808080808);
    const __m256i copy_even = _mm256_add_epi8(even_twice, upper);
    const __m256i copy_odd = _mm256_add_epi8(odd_twice, upper);
    __m256 sums[H][R];
#pragma GCC unroll 8
    for (int h = 0; h < H; ++h)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
            sums[h][r] = _mm256_setzero_ps();
    for (int64_t g = 0; g < groups;) {
        const int64_t end = g + kSpan < groups ? g + kSpan : groups;
        const ActivationGroup *span = x;
        __m256i totals[H][R];
#pragma GCC unroll 8
        for (int h = 0; h < H; ++h)
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
                totals[h][r] = _mm256_setzero_si256();
        // Past an odd number of groups comes one of zeros.
        for (; g < end; g += 2, x += 2 * height) {
            const ActivationGroup *next = x + height;
#pragma GCC unroll 8
            for (int h = 0; h < H; ++h) {
                const int64_t at = lane + h * kHalf;
                __m256i even[R], odd[R], scale, min;
                narrow_dots<F, R>(group_at<F>(tile.weights, g), at, x, even);
                narrow_dots<F, R>(group_at<F>(tile.weights, g + 1), at, next, odd);
                fixed_scales<F>(tile.weights, g, at, scale, min);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    const __m256i s = _mm256_mulhrs_epi16(scale, broadcast(&x[r].fixed_pair));
                    __m256i sum = _mm256_add_epi32(
                        _mm256_madd_epi16(even[r], _mm256_shuffle_epi8(s, copy_even)),
                        _mm256_madd_epi16(odd[r], _mm256_shuffle_epi8(s, copy_odd)));
                    sum =
                        _mm256_add_epi32(sum, _mm256_madd_epi16(s, broadcast(&x[r].minus_8_pair)));
                    if constexpr (traits(F).has_min)
                        sum = _mm256_add_epi32(
                            sum, _mm256_madd_epi16(min, broadcast(&next[r].fixed_pair)));
                    totals[h][r] = _mm256_add_epi32(totals[h][r], sum);
                }
            }
            if (lane == 0)
                prefetch_groups<F, R, 2>(tile.weights, g);
        }
#pragma GCC unroll 8
        for (int h = 0; h < H; ++h)
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
                sums[h][r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(totals[h][r]),
                                             _mm256_set1_ps(span[r].unit), sums[h][r]);
    }
#pragma GCC unroll 8
    for (int h = 0; h < H; ++h)
        write_scaled<R>(tile, lane + h * kHalf, sums[h]);
}

// The scales and mins of group g as pairs of int16, for the first and the last 16 inputs, of half
// the lanes. Where there is a zero and no min, scale · zero.
template <Format F>
inline void split_scales(const GroupParts<const uint8_t> &part, int64_t g, int64_t lane,
                         __m256i &scale, __m256i &min) {
    if constexpr (F == Format::Q2_K) {
        const __m256i both = _mm256_cvtepu8_epi16(
            _mm_loadu_si128(reinterpret_cast<const __m128i *>(part.scales + lane * 2)));
        scale = _mm256_and_si256(both, _mm256_set1_epi16(15));
        min = _mm256_srli_epi16(both, 4);
    } else {
        g %= kSpan;
        const uint8_t *words = part.scales - g * traits(F).scales + lane * 4;
        const auto shifted = [&](int64_t v, int64_t by) {
            return _mm256_srl_epi16(load_bytes(words + v * kLine), _mm_cvtsi64_si128(by));
        };
        if (g < 6)
            scale = _mm256_and_si256(shifted(g / 2, g % 2 * 6), _mm256_set1_epi16(63));
        else
            scale =
                _mm256_or_si256(shifted(g == 6 ? 0 : 2, 12),
                                _mm256_and_si256(shifted(1, 2 * g - 4), _mm256_set1_epi16(0x30)));
        scale = _mm256_sub_epi16(scale, _mm256_set1_epi16(32));
        min = _mm256_slli_epi16(scale, 2);
    }
}

// R rows by H halves of a column block, the first beginning at `lane`.
template <Format F, int R, int H> inline void split_halves(const Tile &tile, int64_t lane) {
    constexpr bool kMin = traits(F).has_min;
    static_assert(kMin || traits(F).zero == 4);
    const auto *x = reinterpret_cast<const ActivationGroup *>(tile.activations);
    const int64_t height = tile.activation_step / kLine;
    const int64_t groups = tile.k / kGroup;
    __m256 sums[H][R];
#pragma GCC unroll 8
    for (int h = 0; h < H; ++h)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
            sums[h][r] = _mm256_setzero_ps();
    for (int64_t begin = 0; begin < groups; begin += kSpan) {
        const GroupParts<const uint8_t> block = group_at<F>(tile.weights, begin);
        __m256 products[H][R], mins[H][R];
#pragma GCC unroll 8
        for (int h = 0; h < H; ++h)
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
                products[h][r] = mins[h][r] = _mm256_setzero_ps();
        GroupParts<const uint8_t> part = block;
        for (int64_t g = begin; g < begin + kSpan; ++g, x += height, part = next_group<F>(part)) {
#pragma GCC unroll 8
            for (int h = 0; h < H; ++h) {
                const int64_t at = lane + h * kHalf;
                __m256i narrow[R], narrow_b[R], scale, min;
                split_dots<F, R>(part, at, x, narrow, narrow_b);
                split_scales<F>(part, g, at, scale, min);
                const __m256i low = _mm256_set1_epi32(0xffff);
                const __m256i scale_a =
                    _mm256_or_si256(_mm256_and_si256(scale, low), _mm256_slli_epi32(scale, 16));
                const __m256i scale_b =
                    _mm256_or_si256(_mm256_srli_epi32(scale, 16), _mm256_andnot_si256(low, scale));
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    const __m256i minus_min =
                        _mm256_madd_epi16(min, _mm256_set1_epi32(x[r].minus_half_sums()));
                    __m256i total = _mm256_add_epi32(_mm256_madd_epi16(narrow[r], scale_a),
                                                     _mm256_madd_epi16(narrow_b[r], scale_b));
                    if constexpr (!kMin)
                        total = _mm256_add_epi32(total, minus_min);
                    const __m256 by = _mm256_set1_ps(x[r].scale);
                    products[h][r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(total), by, products[h][r]);
                    if constexpr (kMin)
                        mins[h][r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(minus_min), by, mins[h][r]);
                }
            }
            if (lane == 0)
                prefetch_groups<F, R>(tile.weights, g);
        }
#pragma GCC unroll 8
        for (int h = 0; h < H; ++h) {
            const uint8_t *shared = block.shared + (lane + h * kHalf) * 2;
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                sums[h][r] = _mm256_fmadd_ps(products[h][r], load_halves(shared), sums[h][r]);
                if constexpr (kMin)
                    sums[h][r] = _mm256_fmadd_ps(mins[h][r], load_halves(shared + 32), sums[h][r]);
            }
        }
    }
#pragma GCC unroll 8
    for (int h = 0; h < H; ++h)
        for (int r = 0; r < R; ++r)
            write_half(tile, r, lane + h * kHalf, sums[h][r]);
}

// R rows by H halves of a column block, the first beginning at `lane`.
template <Format F, int R, int H> inline void quantized_halves(const Tile &tile, int64_t lane) {
    constexpr Traits t = traits(F);
    const auto *x = reinterpret_cast<const ActivationGroup *>(tile.activations);
    const int64_t height = tile.activation_step / kLine;
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
                dots[r][h].start(x[r]);

        const auto multiply_quads = [&]<int I>() {
#pragma GCC unroll 8
            for (int h = 0; h < H; ++h) {
                __m256i first, second;
                load_quads<F, I>(quants + h * kHalf * 4, high + h * kHalf * 4, first, second);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r)
                    dots[r][h].template add<I>(first, second, x[r]);
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
            if constexpr (F == Format::NVFP4) {
                scale = load_e4m3(part.scales + at);
                scale_b = load_e4m3(part.scales + kLanes + at);
            } else if constexpr (F == Format::Q6_K) {
                const __m256 d = load_halves(part.shared + at * 2);
                scale = _mm256_mul_ps(d, bytes_to_floats(part.scales + at, true));
                scale_b = _mm256_mul_ps(d, bytes_to_floats(part.scales + 16 + at, true));
            } else if constexpr (t.coded && t.k_quant) {
                constexpr float kUnit = codebook<F>().unit;
                __m256 d = load_halves(part.shared + at * 2);
                if constexpr (kUnit != 1)
                    d = _mm256_mul_ps(d, _mm256_set1_ps(kUnit));
                if constexpr (t.halves) {
                    const __m256i pairs = _mm256_cvtepu8_epi32(
                        _mm_loadl_epi64(reinterpret_cast<const __m128i *>(part.scales + at)));
                    const auto odd = [](__m256i doubled) {
                        const __m256i mask = _mm256_set1_epi32(30), one = _mm256_set1_epi32(1);
                        return _mm256_cvtepi32_ps(
                            _mm256_or_si256(_mm256_and_si256(doubled, mask), one));
                    };
                    scale = _mm256_mul_ps(d, odd(_mm256_slli_epi32(pairs, 1)));
                    scale_b = _mm256_mul_ps(d, odd(_mm256_srli_epi32(pairs, 3)));
                } else {
                    scale = _mm256_mul_ps(d, bytes_to_floats(part.scales + at, true));
                }
            } else if constexpr (F == Format::MXFP4) {
                scale = half_powers_of_two(part.scales + at);
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
                const ActivationGroup &row = x[r];
                __m256 product = _mm256_mul_ps(_mm256_cvtepi32_ps(dots[r][h].sum), scale);
                if constexpr (t.halves)
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
        prefetch_groups<F, R>(tile.weights, g);
        x += height;
    }
    prefetch_padding<F, R>(tile.weights, groups);
    for (int r = 0; r < R; ++r)
        for (int h = 0; h < H; ++h) {
            const int64_t at = lane + h * kHalf;
            if constexpr (t.scaled_last)
                sums[r][h] = _mm256_mul_ps(
                    sums[r][h],
                    _mm256_loadu_ps(reinterpret_cast<const float *>(tile.weights) + at));
            write_half(tile, r, at, sums[r][h]);
        }
}

template <Format F, int R, int H> inline void halves(const Tile &tile, int64_t lane) {
    if constexpr (traits(F).fixed)
        fixed_halves<F, R, H>(tile, lane);
    else if constexpr (traits(F).split)
        split_halves<F, R, H>(tile, lane);
    else
        quantized_halves<F, R, H>(tile, lane);
}

template <Format F, int R, int C> void compute_tile(const Tile &tile) {
    if constexpr (F == Format::E4M3) {
        scaled_tile<R, C>(tile);
    } else if constexpr (!format_info(F).quantized) {
        float_tile<F, R, C>(tile);
    } else if constexpr (R == 1) { // reads memory but once
        halves<F, 1, 2>(tile, 0);
    } else {
        halves<F, R, 1>(tile, 0);
        halves<F, R, 1>(tile, kHalf);
    }
}

inline void prepare_bf16(const float *, int64_t, std::byte *, int64_t) {}

} // namespace
} // namespace octavo

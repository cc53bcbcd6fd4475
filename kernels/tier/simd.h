// Sixteen floats at a time, on every tier, so that each kernel is written once. A tier's fma is
// fused where the instruction exists and a product and a sum where it does not; either way a lane's
// result depends on that lane alone.
#pragma once

#include <cstdint>
#include <cstring>

#include "formats.h"
#include "kernels.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace octavo::OCTAVO_TIER {

inline constexpr int64_t kLanes = 16;

inline uint32_t bits_of(float x) {
    return __builtin_bit_cast(uint32_t, x);
}
inline float float_of(uint32_t bits) {
    return __builtin_bit_cast(float, bits);
}

// The 16-bit kinds, one value at a time. Values beyond f16's range become its largest.
inline uint16_t f16_from_float(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u)
        return uint16_t(sign | 0x7e00u);
    if (magnitude >= 0x477fe000u)
        return uint16_t(sign | 0x7bffu);
    if (magnitude < 0x38800000u) { // subnormal: the addition rounds to a multiple of 2^-24
        const float shifted = float_of(magnitude) + 0.5f;
        return uint16_t(sign | (bits_of(shifted) - 0x3f000000u));
    }
    const uint32_t odd = (magnitude >> 13) & 1u;
    const uint32_t rounded = (magnitude - 0x38000000u + 0xfffu + odd) >> 13;
    return uint16_t(sign | (rounded < 0x7c00u ? rounded : 0x7bffu));
}

inline uint16_t bf16_from_float(float value) {
    const uint32_t bits = bits_of(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return uint16_t((bits >> 16) | 0x40u);
    return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

template <KvKind kind> inline float float_from_half(uint16_t half) {
    if constexpr (kind == KvKind::F16)
        return half_to_float(half);
    return bfloat_to_float(half);
}

#if defined(__AVX512F__)

struct Vec {
    __m512 v;

    static Vec set(float x) { return {_mm512_set1_ps(x)}; }
    static Vec load(const float *p) { return {_mm512_loadu_ps(p)}; }
    void store(float *p) const { _mm512_storeu_ps(p, v); }

    friend Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
    friend Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
    friend Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
    friend Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
};

inline Vec fma(Vec a, Vec b, Vec c) {
    return {_mm512_fmadd_ps(a.v, b.v, c.v)};
}
inline Vec max(Vec a, Vec b) {
    return {_mm512_max_ps(a.v, b.v)};
}
inline Vec min(Vec a, Vec b) {
    return {_mm512_min_ps(a.v, b.v)};
}
inline Vec round(Vec a) {
    return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// Lanes 1, 0, 3, 2, …
inline Vec swap_pairs(Vec a) {
    return {_mm512_permute_ps(a.v, 0xb1)};
}
// Lane i ^ distance.
template <int distance> inline Vec swap_lanes(Vec a) {
    static_assert(distance == 1 || distance == 2 || distance == 4 || distance == 8);
    if constexpr (distance == 1)
        return swap_pairs(a);
    if constexpr (distance == 2)
        return {_mm512_permute_ps(a.v, 0x4e)};
    return {_mm512_shuffle_f32x4(a.v, a.v, distance == 4 ? 0xb1 : 0x4e)};
}
// Whole numbers from 0 to 255 as bytes.
inline void store_bytes(Vec a, uint8_t *p) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v)));
}
// Of sixteen words, the bits `mask` after a shift to the right.
inline Vec load_fields(const uint32_t *p, int shift, uint32_t mask) {
    const __m512i shifted = _mm512_srl_epi32(_mm512_loadu_si512(p), _mm_cvtsi32_si128(shift));
    return {_mm512_cvtepi32_ps(_mm512_and_si512(shifted, _mm512_set1_epi32(int(mask))))};
}
inline Vec load_bf16(const uint16_t *p) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16))};
}
inline void store_f16(Vec a, uint16_t *p) {
    const Vec clamped = min(Vec::set(65504.0f), max(Vec::set(-65504.0f), a));
    const __m256i half = _mm512_cvtps_ph(clamped.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), half);
}
inline void store_bf16(Vec a, uint16_t *p) {
    const __m512i bits = _mm512_castps_si512(a.v);
    const __m512i high = _mm512_srli_epi32(bits, 16);
    const __m512i bias =
        _mm512_add_epi32(_mm512_and_si512(high, _mm512_set1_epi32(1)), _mm512_set1_epi32(0x7fff));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
    const __m512i halves =
        _mm512_mask_or_epi32(rounded, nan, high, _mm512_set1_epi32(0x40)); // stays NaN
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm512_cvtepi32_epi16(halves));
}
// The first and the second halves of sixteen pairs.
template <KvKind kind> inline void unpack_pairs(__m512i pairs, Vec &first, Vec &second) {
    if constexpr (kind == KvKind::F16) {
        first.v = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(pairs));
        second.v = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(pairs, 16)));
    } else {
        first.v = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
        second.v = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(~0xffff)));
    }
}
template <KvKind kind> inline void load_pairs(const uint16_t *p, Vec &first, Vec &second) {
    unpack_pairs<kind>(_mm512_loadu_si512(p), first, second);
}
// Of the first `count` pairs, zeros after them; nothing past these is read.
template <KvKind kind>
inline void load_pairs_first(const uint16_t *p, int64_t count, Vec &first, Vec &second) {
    const auto mask = __mmask16((1u << count) - 1);
    unpack_pairs<kind>(_mm512_maskz_loadu_epi32(mask, p), first, second);
}
// value where a >= bound (false for NaN), other elsewhere.
inline Vec where_ge(Vec a, Vec bound, Vec value, Vec other) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, bound.v, _CMP_GE_OQ), other.v, value.v)};
}

#elif defined(__AVX2__)

struct Vec {
    __m256 a, b;

    static Vec set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
    static Vec load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
    void store(float *p) const {
        _mm256_storeu_ps(p, a);
        _mm256_storeu_ps(p + 8, b);
    }

    friend Vec operator+(Vec x, Vec y) {
        return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)};
    }
    friend Vec operator-(Vec x, Vec y) {
        return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)};
    }
    friend Vec operator*(Vec x, Vec y) {
        return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)};
    }
    friend Vec operator/(Vec x, Vec y) {
        return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)};
    }
};

inline Vec fma(Vec x, Vec y, Vec z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline Vec max(Vec x, Vec y) {
    return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)};
}
inline Vec min(Vec x, Vec y) {
    return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)};
}
inline Vec round(Vec x) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
inline Vec swap_pairs(Vec x) {
    return {_mm256_permute_ps(x.a, 0xb1), _mm256_permute_ps(x.b, 0xb1)};
}
template <int distance> inline Vec swap_lanes(Vec x) {
    static_assert(distance == 1 || distance == 2 || distance == 4 || distance == 8);
    if constexpr (distance == 1)
        return swap_pairs(x);
    if constexpr (distance == 2)
        return {_mm256_permute_ps(x.a, 0x4e), _mm256_permute_ps(x.b, 0x4e)};
    if constexpr (distance == 4)
        return {_mm256_permute2f128_ps(x.a, x.a, 1), _mm256_permute2f128_ps(x.b, x.b, 1)};
    return {x.b, x.a};
}
inline void store_bytes(Vec x, uint8_t *p) {
    const __m256i pairs = _mm256_packus_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
    const __m256i in_order = _mm256_permute4x64_epi64(pairs, 0xd8);
    const __m128i bytes =
        _mm_packus_epi16(_mm256_castsi256_si128(in_order), _mm256_extracti128_si256(in_order, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), bytes);
}
inline __m256 field_of(__m256i words, int shift, uint32_t mask) {
    const __m256i shifted = _mm256_srl_epi32(words, _mm_cvtsi32_si128(shift));
    return _mm256_cvtepi32_ps(_mm256_and_si256(shifted, _mm256_set1_epi32(int(mask))));
}
inline Vec load_fields(const uint32_t *p, int shift, uint32_t mask) {
    const auto *words = reinterpret_cast<const __m256i *>(p);
    return {field_of(_mm256_loadu_si256(words), shift, mask),
            field_of(_mm256_loadu_si256(words + 1), shift, mask)};
}
inline Vec load_bf16(const uint16_t *p) {
    const auto *halves = reinterpret_cast<const __m128i *>(p);
    const auto wide = [](__m128i eight) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(eight), 16));
    };
    return {wide(_mm_loadu_si128(halves)), wide(_mm_loadu_si128(halves + 1))};
}
inline void store_f16(Vec x, uint16_t *p) {
    const Vec clamped = min(Vec::set(65504.0f), max(Vec::set(-65504.0f), x));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p),
                     _mm256_cvtps_ph(clamped.a, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p + 8),
                     _mm256_cvtps_ph(clamped.b, _MM_FROUND_TO_NEAREST_INT));
}
template <KvKind kind> inline void unpack_pairs(__m256i pairs, __m256 &first, __m256 &second) {
    const __m256i low = _mm256_slli_epi32(pairs, 16);
    if constexpr (kind == KvKind::F16) {
        // Each half of the register keeps its four pairs, first then second halves.
        const __m256i parts =
            _mm256_packus_epi32(_mm256_srli_epi32(low, 16), _mm256_srli_epi32(pairs, 16));
        const __m256 left = _mm256_cvtph_ps(_mm256_castsi256_si128(parts));
        const __m256 right = _mm256_cvtph_ps(_mm256_extracti128_si256(parts, 1));
        first = _mm256_permute2f128_ps(left, right, 0x20);
        second = _mm256_permute2f128_ps(left, right, 0x31);
    } else {
        first = _mm256_castsi256_ps(low);
        second = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(~0xffff)));
    }
}
template <KvKind kind> inline void load_pairs(const uint16_t *p, Vec &first, Vec &second) {
    const auto *pairs = reinterpret_cast<const __m256i *>(p);
    unpack_pairs<kind>(_mm256_loadu_si256(pairs), first.a, second.a);
    unpack_pairs<kind>(_mm256_loadu_si256(pairs + 1), first.b, second.b);
}
// Of the first `count` pairs, zeros after them; nothing past these is read.
template <KvKind kind>
inline void load_pairs_first(const uint16_t *p, int64_t count, Vec &first, Vec &second) {
    const auto *pairs = reinterpret_cast<const int *>(p);
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i low = _mm256_cmpgt_epi32(_mm256_set1_epi32(int(count)), lanes);
    const __m256i high = _mm256_cmpgt_epi32(_mm256_set1_epi32(int(count) - 8), lanes);
    unpack_pairs<kind>(_mm256_maskload_epi32(pairs, low), first.a, second.a);
    unpack_pairs<kind>(_mm256_maskload_epi32(pairs + 8, high), first.b, second.b);
}
inline Vec floor(Vec x) {
    return {_mm256_floor_ps(x.a), _mm256_floor_ps(x.b)};
}
inline __m256 exp2_whole(__m256 x) {
    const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
}
inline Vec exp2_whole(Vec x) {
    return {exp2_whole(x.a), exp2_whole(x.b)};
}
inline Vec where_ge(Vec x, Vec bound, Vec value, Vec other) {
    return {_mm256_blendv_ps(other.a, value.a, _mm256_cmp_ps(x.a, bound.a, _CMP_GE_OQ)),
            _mm256_blendv_ps(other.b, value.b, _mm256_cmp_ps(x.b, bound.b, _CMP_GE_OQ))};
}

#else

struct Vec {
    float v[kLanes];

    template <class F> static Vec each(F &&f) {
        Vec out;
        for (int64_t i = 0; i < kLanes; ++i)
            out.v[i] = f(i);
        return out;
    }

    static Vec set(float x) {
        return each([&](int64_t) { return x; });
    }
    static Vec load(const float *p) {
        return each([&](int64_t i) { return p[i]; });
    }
    void store(float *p) const {
        for (int64_t i = 0; i < kLanes; ++i)
            p[i] = v[i];
    }

    friend Vec operator+(const Vec &a, const Vec &b) {
        return each([&](int64_t i) { return a.v[i] + b.v[i]; });
    }
    friend Vec operator-(const Vec &a, const Vec &b) {
        return each([&](int64_t i) { return a.v[i] - b.v[i]; });
    }
    friend Vec operator*(const Vec &a, const Vec &b) {
        return each([&](int64_t i) { return a.v[i] * b.v[i]; });
    }
    friend Vec operator/(const Vec &a, const Vec &b) {
        return each([&](int64_t i) { return a.v[i] / b.v[i]; });
    }
};

inline Vec fma(const Vec &a, const Vec &b, const Vec &c) {
    return a * b + c;
}
// As the x86 instructions: the second operand where either is NaN.
inline Vec max(const Vec &a, const Vec &b) {
    return Vec::each([&](int64_t i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline Vec min(const Vec &a, const Vec &b) {
    return Vec::each([&](int64_t i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
inline Vec round(const Vec &a) {
    // Adding and taking away 1.5 * 2^23 leaves the nearest whole number (|a| < 2^22).
    return Vec::each([&](int64_t i) { return (a.v[i] + 0x1.8p23f) - 0x1.8p23f; });
}
inline Vec swap_pairs(const Vec &a) {
    return Vec::each([&](int64_t i) { return a.v[i ^ 1]; });
}
template <int distance> inline Vec swap_lanes(const Vec &a) {
    return Vec::each([&](int64_t i) { return a.v[i ^ distance]; });
}
inline void store_bytes(const Vec &a, uint8_t *p) {
    for (int64_t i = 0; i < kLanes; ++i)
        p[i] = uint8_t(int32_t(a.v[i]));
}
inline Vec load_fields(const uint32_t *p, int shift, uint32_t mask) {
    uint32_t words[kLanes];
    std::memcpy(words, p, sizeof words);
    return Vec::each([&](int64_t i) { return float(int32_t(words[i] >> shift & mask)); });
}
inline Vec load_bf16(const uint16_t *p) {
    uint16_t halves[kLanes];
    std::memcpy(halves, p, sizeof halves);
    return Vec::each([&](int64_t i) { return bfloat_to_float(halves[i]); });
}
inline void store_f16(const Vec &a, uint16_t *p) {
    for (int64_t i = 0; i < kLanes; ++i)
        p[i] = f16_from_float(a.v[i]);
}
template <KvKind kind> inline void load_pairs(const uint16_t *p, Vec &first, Vec &second) {
    first = Vec::each([&](int64_t i) { return float_from_half<kind>(p[2 * i]); });
    second = Vec::each([&](int64_t i) { return float_from_half<kind>(p[2 * i + 1]); });
}
// Of the first `count` pairs, zeros after them; nothing past these is read.
template <KvKind kind>
inline void load_pairs_first(const uint16_t *p, int64_t count, Vec &first, Vec &second) {
    uint16_t pairs[2 * kLanes] = {};
    std::memcpy(pairs, p, size_t(count) * 2 * sizeof(uint16_t));
    load_pairs<kind>(pairs, first, second);
}
inline Vec floor(const Vec &a) {
    const Vec nearest = round(a);
    return Vec::each(
        [&](int64_t i) { return nearest.v[i] - (nearest.v[i] > a.v[i] ? 1.0f : 0.0f); });
}
inline Vec exp2_whole(const Vec &a) {
    // Adding 1.5 * 2^23 leaves a in the low bits: unlike a conversion, defined for NaN too.
    return Vec::each(
        [&](int64_t i) { return float_of((bits_of(a.v[i] + 0x1.8p23f) + 127u) << 23); });
}
inline Vec where_ge(const Vec &a, const Vec &bound, const Vec &value, const Vec &other) {
    return Vec::each([&](int64_t i) { return a.v[i] >= bound.v[i] ? value.v[i] : other.v[i]; });
}

#endif

// The first `count` lanes from p, zeros after them; nothing past p[count - 1] is read.
inline Vec load_first(const float *p, int64_t count) {
    float lanes[kLanes] = {};
    std::memcpy(lanes, p, size_t(count) * sizeof(float));
    return Vec::load(lanes);
}

inline void store_first(Vec x, float *p, int64_t count) {
    float lanes[kLanes];
    x.store(lanes);
    std::memcpy(p, lanes, size_t(count) * sizeof(float));
}

// Calls f(i, count) for each full vector of n elements and then for what is left, if anything.
template <class F> inline void for_vectors(int64_t n, F &&f) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
        f(i, kLanes);
    if (i < n)
        f(i, n - i);
}

inline Vec load_part(const float *p, int64_t count) {
    return count == kLanes ? Vec::load(p) : load_first(p, count);
}

inline void store_part(Vec x, float *p, int64_t count) {
    if (count == kLanes) {
        x.store(p);
    } else {
        store_first(x, p, count);
    }
}

template <KvKind kind> inline void store_half(Vec x, uint16_t *p) {
    if constexpr (kind == KvKind::F16)
        return store_f16(x, p);
#if defined(__AVX512F__)
    store_bf16(x, p);
#else
    float lanes[kLanes];
    x.store(lanes);
    for (int64_t i = 0; i < kLanes; ++i)
        p[i] = bf16_from_float(lanes[i]);
#endif
}

// Sum and maximum over the lanes, as a tree of halves (lane i with i + 8, then with i + 4, …).
#if defined(__AVX2__)
#if defined(__AVX512F__)
inline __m256 halves_sum(Vec x) {
    return _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
}
inline __m256 halves_max(Vec x) {
    return _mm256_max_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
}
#else
inline __m256 halves_sum(Vec x) {
    return _mm256_add_ps(x.a, x.b);
}
inline __m256 halves_max(Vec x) {
    return _mm256_max_ps(x.a, x.b);
}
#endif

inline float sum(Vec x) {
    const __m256 eight = halves_sum(x);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

inline float largest(Vec x) {
    const __m256 eight = halves_max(x);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
#else
inline float sum(Vec x) {
    float lanes[kLanes];
    x.store(lanes);
    for (int64_t half = kLanes / 2; half > 0; half /= 2) {
        for (int64_t i = 0; i < half; ++i)
            lanes[i] += lanes[i + half];
    }
    return lanes[0];
}

inline float largest(Vec x) {
    float lanes[kLanes];
    x.store(lanes);
    for (int64_t half = kLanes / 2; half > 0; half /= 2) {
        for (int64_t i = 0; i < half; ++i) {
            lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
        }
    }
    return lanes[0];
}
#endif

// The sum of x[i] * y[i], in one order for each n.
inline float dot_product(const float *x, const float *y, int64_t n) {
    Vec sums[4] = {Vec::set(0.0f), Vec::set(0.0f), Vec::set(0.0f), Vec::set(0.0f)};
    int64_t i = 0;
    for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
        for (int64_t j = 0; j < 4; ++j) {
            const int64_t at = i + j * kLanes;
            sums[j] = fma(Vec::load(x + at), Vec::load(y + at), sums[j]);
        }
    }
    for_vectors(n - i, [&](int64_t at, int64_t count) {
        sums[0] = fma(load_part(x + i + at, count), load_part(y + i + at, count), sums[0]);
    });
    return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

constexpr float kLog2E = 1.44269504f;

// p * e^r = e^x with x = n ln 2 + r, |r| <= ln 2 / 2: ln 2 in two parts (Cody and Waite, 1980), and
// e^r by its Taylor polynomial of degree 7 (relative error below 2^-27).
inline Vec exp_parts(Vec x, Vec &n) {
    n = round(x * Vec::set(kLog2E));
    Vec r = fma(n, Vec::set(-0x1.62e4p-1f), x);
    r = fma(n, Vec::set(-0x1.7f7d1cp-20f), r);
    Vec p = Vec::set(1.0f / 5040.0f);
    p = fma(p, r, Vec::set(1.0f / 720.0f));
    p = fma(p, r, Vec::set(1.0f / 120.0f));
    p = fma(p, r, Vec::set(1.0f / 24.0f));
    p = fma(p, r, Vec::set(1.0f / 6.0f));
    p = fma(p, r, Vec::set(0.5f));
    p = fma(p, r, Vec::set(1.0f));
    return fma(p, r, Vec::set(1.0f));
}

constexpr float kLowestExp = -87.33654f;

// e^x within 2 ulp for x in [-87.3, 88.7]; 0 below, +inf above; NaN for NaN.
inline Vec exp(Vec x) {
    const Vec low = Vec::set(kLowestExp);
    Vec n;
#if defined(__AVX512F__)
    // Scaling by a power of two goes beyond the range by itself, to +inf.
    const Vec p = exp_parts(min(Vec::set(89.0f), max(low, x)), n);
    const __mmask16 keep = _mm512_cmp_ps_mask(x.v, low.v, _CMP_NLT_UQ);
    return {_mm512_maskz_scalef_ps(keep, p.v, n.v)};
#else
    const Vec high = Vec::set(88.72284f);
    const Vec p = exp_parts(min(max(low, x), high), n);
    // The exponent moves in two steps, so that n = 128 does not overflow before its time.
    const Vec half_n = round(n * Vec::set(0.5f));
    const Vec value = p * exp2_whole(half_n) * exp2_whole(n - half_n);
    const Vec in_range = where_ge(high, x, value, x * Vec::set(__builtin_inff())); // +inf, or NaN
    return where_ge(x, low, in_range, where_ge(low, x, Vec::set(0.0f), x));
#endif
}

// x / (1 + e^-x).
inline Vec silu_of(Vec x) {
    return x / (Vec::set(1.0f) + exp(Vec::set(0.0f) - x));
}

// 1 / (1 + e^-x).
inline Vec sigmoid_of(Vec x) {
    const Vec one = Vec::set(1.0f);
    return one / (one + exp(Vec::set(0.0f) - x));
}

// log(1 + e^x) = max(x, 0) + log(1 + u) with u = e^-|x| within 0 to 1, and log(1 + u) =
// 2 artanh(s) with s = u / (2 + u), by the Taylor polynomial of degree 15 (s <= 1/3: relative error
// below 2^-27).
inline Vec softplus_of(Vec x) {
    const Vec zero = Vec::set(0.0f);
    const Vec u = exp(min(x, zero - x));
    const Vec s = u / (Vec::set(2.0f) + u);
    const Vec square = s * s;
    Vec p = Vec::set(1.0f / 15.0f);
    p = fma(p, square, Vec::set(1.0f / 13.0f));
    p = fma(p, square, Vec::set(1.0f / 11.0f));
    p = fma(p, square, Vec::set(1.0f / 9.0f));
    p = fma(p, square, Vec::set(1.0f / 7.0f));
    p = fma(p, square, Vec::set(1.0f / 5.0f));
    p = fma(p, square, Vec::set(1.0f / 3.0f));
    p = fma(p, square, Vec::set(1.0f));
    return fma(s + s, p, max(zero, x));
}

// 2^x for x <= 0, as in a softmax, within 3 ulp; 0 where that would be subnormal (AVX-512: only
// where it is 0); NaN for NaN. The fraction's power by the polynomial of degree 5 that is exact at
// 0 and has the least relative error elsewhere, below 2^-23.
inline Vec exp2_of_negative(Vec x) {
#if defined(__AVX512F__)
    const Vec f = {_mm512_reduce_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};
#else
    const Vec low = Vec::set(-126.0f);
    const Vec clamped = max(low, x);
    const Vec n = floor(clamped);
    const Vec f = clamped - n;
#endif
    Vec p = Vec::set(0x1.e97514p-10f);
    p = fma(p, f, Vec::set(0x1.27784ep-7f));
    p = fma(p, f, Vec::set(0x1.c91ce8p-5f));
    p = fma(p, f, Vec::set(0x1.ebdb56p-3f));
    p = fma(p, f, Vec::set(0x1.62e4bap-1f));
    p = fma(p, f, Vec::set(1.0f));
#if defined(__AVX512F__)
    return {_mm512_scalef_ps(p.v, x.v)};
#else
    return where_ge(low, x, Vec::set(0.0f), p * exp2_whole(n));
#endif
}

// cap * tanh(x / cap), tanh(u) = 1 - 2 / (e^(2u) + 1): absolute error below 2^-22 cap.
inline Vec softcapped(Vec x, float cap) {
    const Vec e = exp(x * Vec::set(2.0f / cap));
    return Vec::set(cap) - Vec::set(2.0f * cap) / (e + Vec::set(1.0f));
}

} // namespace octavo::OCTAVO_TIER

// Rounds activations to 8 bits with AVX2, a span of groups at a time: for the AVX2 and the AVX-512
// tiers, whose 256-bit operations are as fast here.
#pragma once

#include "linear_layout.h"

// GCC 12 warns of its own _mm512_undefined_… (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

namespace octavo {
namespace {

inline __m256i max_of_unpacked(__m256i a, __m256i b) {
    return _mm256_max_epu32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
}

inline __m256i max_of_unpacked_pairs(__m256i a, __m256i b) {
    return _mm256_max_epu32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
}

// Rows to columns.
inline void transpose(__m256i (&v)[8]) {
    __m256i t[8];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        t[2 * i] = _mm256_unpacklo_epi32(v[2 * i], v[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_epi32(v[2 * i], v[2 * i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        v[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
        v[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
        v[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
        v[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm256_permute2x128_si256(v[i], v[i + 4], 0x20);
        t[i + 4] = _mm256_permute2x128_si256(v[i], v[i + 4], 0x31);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i)
        v[i] = t[i];
}

// q = rint(x · 127 / max |x|), ties to even. Writes `groups` cells, and one of
// zero quants more if they are odd.
inline void prepare_span(const float *x, int64_t groups, std::byte *to, int64_t step) {
    // As integers, magnitudes order like the numbers, and NaN is above all.
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256i maxima[kSpan];
#pragma GCC unroll 8
    for (int64_t g = 0; g < kSpan; ++g) {
        maxima[g] = _mm256_setzero_si256();
        if (g < groups)
#pragma GCC unroll 4
            for (int64_t i = 0; i < kGroup; i += 8)
                maxima[g] = _mm256_max_epu32(
                    maxima[g],
                    _mm256_and_si256(
                        _mm256_loadu_si256(reinterpret_cast<const __m256i *>(x + g * kGroup + i)),
                        magnitude));
    }
    const __m256i low = max_of_unpacked_pairs(max_of_unpacked(maxima[0], maxima[1]),
                                              max_of_unpacked(maxima[2], maxima[3]));
    const __m256i high = max_of_unpacked_pairs(max_of_unpacked(maxima[4], maxima[5]),
                                               max_of_unpacked(maxima[6], maxima[7]));
    const __m256i bits = _mm256_max_epu32(_mm256_permute2x128_si256(low, high, 0x20),
                                          _mm256_permute2x128_si256(low, high, 0x31));

    // group_scale, for all groups.
    const __m256 max = _mm256_castsi256_ps(bits), zero = _mm256_setzero_ps();
    const __m256 is_number = _mm256_cmp_ps(max, _mm256_set1_ps(0x1.fffffep127f), _CMP_LE_OQ);
    const __m256 usable =
        _mm256_and_ps(is_number, _mm256_cmp_ps(max, _mm256_set1_ps(0x1p-120f), _CMP_GE_OQ));
    const __m256 all127 = _mm256_set1_ps(127);
    const __m256 scale =
        _mm256_blendv_ps(_mm256_set1_ps(__builtin_nanf("")),
                         _mm256_blendv_ps(zero, _mm256_div_ps(max, all127), usable), is_number);
    const __m256 inverse = _mm256_blendv_ps(zero, _mm256_div_ps(all127, max), usable);

    __m256i sums[kSpan]; // of four quants
#pragma GCC unroll 8
    for (int64_t g = 0; g < kSpan; ++g) {
        sums[g] = _mm256_setzero_si256();
        if (g >= groups)
            continue;
        const __m256i lane = _mm256_set1_epi32(static_cast<int>(g));
        const __m256 by = _mm256_permutevar8x32_ps(inverse, lane);
        __m256i q[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i)
            q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + g * kGroup + i * 8), by));
        // The packs work within 128-bit halves; the permutation puts the 4-byte pieces in order.
        const __m256i narrow = _mm256_permutevar8x32_epi32(
            _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3])),
            _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        const __m256i quants = _mm256_and_si256(
            narrow, _mm256_permutevar8x32_epi32(_mm256_castps_si256(usable), lane));
        _mm256_store_si256(reinterpret_cast<__m256i *>(to + g * step), quants);
        sums[g] = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), quants),
                                    _mm256_set1_epi16(1));
    }
    const __m256i sums_low =
        _mm256_hadd_epi32(_mm256_hadd_epi32(sums[0], sums[1]), _mm256_hadd_epi32(sums[2], sums[3]));
    const __m256i sums_high =
        _mm256_hadd_epi32(_mm256_hadd_epi32(sums[4], sums[5]), _mm256_hadd_epi32(sums[6], sums[7]));
    const __m256i first = _mm256_permute2x128_si256(sums_low, sums_high, 0x20);
    const __m256i last = _mm256_permute2x128_si256(sums_low, sums_high, 0x31);
    const __m256i sum = _mm256_add_epi32(first, last);
    const __m256 scaled_sum = _mm256_mul_ps(scale, _mm256_cvtepi32_ps(sum));

    // Fixed point.
    __m128i largest = _mm_max_epu32(_mm256_castsi256_si128(_mm256_castps_si256(scale)),
                                    _mm256_extracti128_si256(_mm256_castps_si256(scale), 1));
    largest = _mm_max_epu32(largest, _mm_shuffle_epi32(largest, 0x4e));
    largest = _mm_max_epu32(largest, _mm_shuffle_epi32(largest, 0xb1));
    const SpanScale span = span_scale(static_cast<uint32_t>(_mm_cvtsi128_si32(largest)));
    const __m256i finite = _mm256_set1_epi32(span.scale > 0 ? -1 : 0);
    const __m256i scales = _mm256_and_si256(
        finite, _mm256_cvtps_epi32(_mm256_mul_ps(scale, _mm256_set1_ps(span.scale))));
    const __m256i scaled_sums = _mm256_and_si256(
        finite, _mm256_cvtps_epi32(_mm256_mul_ps(scaled_sum, _mm256_set1_ps(span.sum_scale))));

    // The int16 of two neighbouring lanes, in the even one and in the odd one.
    const __m256i low16 = _mm256_set1_epi32(0xffff), zeros = _mm256_setzero_si256();
    const auto pair_even = [&](__m256i v) {
        return _mm256_or_si256(_mm256_and_si256(v, low16),
                               _mm256_slli_epi32(_mm256_srli_epi64(v, 32), 16));
    };
    const auto pair_odd = [&](__m256i v) {
        return _mm256_or_si256(_mm256_slli_epi64(_mm256_and_si256(v, low16), 32),
                               _mm256_slli_epi32(v, 16));
    };
    const __m256i minus_8 = _mm256_sub_epi32(zeros, _mm256_slli_epi32(sum, 3));
    __m256i fields[8] = {
        _mm256_castps_si256(scale),
        _mm256_castps_si256(scaled_sum),
        minus_8,
        _mm256_sub_epi32(zeros, _mm256_slli_epi32(first, 5)),
        _mm256_sub_epi32(zeros, _mm256_slli_epi32(last, 5)),
        _mm256_castps_si256(_mm256_set1_ps(span.unit)),
        _mm256_blend_epi32(pair_even(scales), pair_odd(scaled_sums), 0xaa),
        _mm256_blend_epi32(pair_even(minus_8), zeros, 0xaa),
    };
    transpose(fields);
#pragma GCC unroll 8
    for (int64_t g = 0; g < kSpan; ++g)
        if (g < round_up(groups, 2))
            _mm256_store_si256(reinterpret_cast<__m256i *>(to + g * step + kGroup), fields[g]);
    if (groups % 2 != 0)
        _mm256_store_si256(reinterpret_cast<__m256i *>(to + groups * step), zeros);
}

} // namespace
} // namespace octavo

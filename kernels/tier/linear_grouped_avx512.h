// Tiles of the grouped formats (linear_grouped.h) for AVX-512 with VNNI.
#pragma once

#include "linear_avx512.h"
#include "linear_grouped.h"

namespace octavo {
namespace {

inline __m128i load_zeros(const uint8_t *record) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i *>(record + 2 * kLanes));
}

template <Format F, int R> inline void grouped_fixed_tile(const Tile &tile) {
    constexpr int kCentre = kCentreOf<F>;
    const uint8_t *quants = tile.weights + records_bytes(tile.k, tile.group);
    const auto *x = reinterpret_cast<const ActivationGroup *>(tile.activations);
    const int64_t height = tile.activation_step / kLine;
    const int64_t groups = tile.k / kGroup;
    const auto start = [](const ActivationGroup &group) {
        const __m512i minus_8 = broadcast(&group.minus_8);
        return kCentreShift<F> == 0 ? minus_8 : _mm512_srai_epi32(minus_8, kCentreShift<F>);
    };
    Records records(tile.weights, tile.group);
    const Prefetching<F, R> prefetching(tile.weights, quants);
    __m512 sums[R][1];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
        sums[r][0] = _mm512_setzero_ps();

    for (int64_t g = 0; g < groups;) {
        const int64_t end = g + kSpan < groups ? g + kSpan : groups;
        const ActivationGroup *span = x;
        __m512i totals[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
            totals[r] = _mm512_setzero_si512();
        // Past an odd number of groups comes one of zeros.
        for (; g < end; g += 2, x += 2 * height, quants += 2 * kQuantsStep<F>) {
            const GroupParts<const uint8_t> even = grouped_parts(quants);
            const GroupParts<const uint8_t> odd = grouped_parts(quants + kQuantsStep<F>);
            const ActivationGroup *next = x + height;
            __m512i dots[R], dots_odd[R];
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
                dots[r] = start(x[r]);
            multiply_group<kQuantsOf<F>, R>(even, x, dots, dots);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
                dots_odd[r] = start(next[r]);
            multiply_group<kQuantsOf<F>, R>(odd, next, dots_odd, dots_odd);

            const uint8_t *record = records.next(), *record_odd = records.next();
            const __m512i scale = pair_lanes(_mm512_cvtps_epi32(load_halves(record)),
                                             _mm512_cvtps_epi32(load_halves(record_odd)));
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
                totals[r] =
                    _mm512_dpwssd_epi32(totals[r], pair_lanes(dots[r], dots_odd[r]),
                                        _mm512_mulhrs_epi16(scale, broadcast(&x[r].fixed_pair)));
            const __m128i zeros = load_zeros(record), zeros_odd = load_zeros(record_odd);
            const __m128i centre = _mm_set1_epi8(kCentre);
            const __m128i off =
                _mm_or_si128(_mm_xor_si128(zeros, centre), _mm_xor_si128(zeros_odd, centre));
            if (!_mm_testz_si128(off, off)) {
                const __m512i pairs =
                    pair_lanes(_mm512_cvtepu8_epi32(zeros), _mm512_cvtepu8_epi32(zeros_odd));
                const __m512i min = _mm512_mulhrs_epi16(
                    scale,
                    _mm512_slli_epi16(_mm512_sub_epi16(_mm512_set1_epi16(kCentre), pairs), 11));
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r)
                    add_pairs(totals[r], min, &next[r].fixed_pair);
            }
            prefetching.template step<2>(quants);
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

template <int R> inline void grouped_bytes_tile(const Tile &tile) {
    constexpr Format F = Format::I8;
    const uint8_t *quants = tile.weights + records_bytes(tile.k, tile.group);
    const auto *x = reinterpret_cast<const ActivationGroup *>(tile.activations);
    const int64_t height = tile.activation_step / kLine;
    const int64_t groups = tile.k / kGroup;
    Records records(tile.weights, tile.group);
    const Prefetching<F, R> prefetching(tile.weights, quants);
    __m512 sums[R][1];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
        sums[r][0] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; ++g, x += height, quants += kQuantsStep<F>) {
        __m512i dots[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
            dots[r] = _mm512_slli_epi32(broadcast(&x[r].minus_8), 4);
        multiply_group<kQuantsOf<F>, R>(grouped_parts(quants), x, dots, dots);
        const uint8_t *record = records.next();
        const __m512 scale = load_halves(record);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
            sums[r][0] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(dots[r]), scale),
                                         _mm512_set1_ps(x[r].scale), sums[r][0]);
        const __m128i zeros = load_zeros(record);
        const __m128i off = _mm_xor_si128(zeros, _mm_set1_epi8(-128));
        if (!_mm_testz_si128(off, off)) {
            const __m512i centred =
                _mm512_sub_epi32(_mm512_set1_epi32(128), _mm512_cvtepu8_epi32(zeros));
            const __m512 min = _mm512_mul_ps(scale, _mm512_cvtepi32_ps(centred));
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
                sums[r][0] = _mm512_fmadd_ps(min, _mm512_set1_ps(x[r].scaled_sum), sums[r][0]);
        }
        prefetching.template step<1>(quants);
    }
    write_scaled<R>(tile, sums);
}

template <Format F, int R, int C>
    requires(format_info(F).grouped)
void compute_tile(const Tile &tile) {
    if constexpr (F == Format::I8)
        grouped_bytes_tile<R>(tile);
    else
        grouped_fixed_tile<F, R>(tile);
}

} // namespace
} // namespace octavo

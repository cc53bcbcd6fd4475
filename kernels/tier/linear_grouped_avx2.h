// Tiles of the grouped formats (linear_grouped.h) for AVX2 with FMA.
#pragma once

#include "linear_avx2.h"
#include "linear_grouped.h"

namespace octavo {
namespace {

// R rows by H halves of a column block, the first beginning at `lane`.
template <Format F, int R, int H> inline void grouped_fixed_halves(const Tile &tile, int64_t lane) {
    constexpr int kCentre = kCentreOf<F>;
    const uint8_t *quants = tile.weights + records_bytes(tile.k, tile.group);
    const auto *x = reinterpret_cast<const ActivationGroup *>(tile.activations);
    const int64_t height = tile.activation_step / kLine;
    const int64_t groups = tile.k / kGroup;
    const auto load_zeros = [](const uint8_t *record, int64_t at) {
        return _mm_loadl_epi64(reinterpret_cast<const __m128i *>(record + 2 * kLanes + at));
    };
    // Copies of the even or the odd int16 of a lane in both.
    const __m256i upper = _mm256_setr_epi64x(0, 0x0808080808080808, 0, 0x0808080808080808);
    const __m256i copy_even = _mm256_add_epi8(_mm256_set1_epi64x(0x0504050401000100), upper);
    const __m256i copy_odd = _mm256_add_epi8(_mm256_set1_epi64x(0x0706070603020302), upper);
    Records records(tile.weights, tile.group);
    const Prefetching<F, R> prefetching(tile.weights, quants);
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
        for (; g < end; g += 2, x += 2 * height, quants += 2 * kQuantsStep<F>) {
            const ActivationGroup *next = x + height;
            const uint8_t *record = records.next(), *record_odd = records.next();
#pragma GCC unroll 8
            for (int h = 0; h < H; ++h) {
                const int64_t at = lane + h * kHalf;
                __m256i even[R], odd[R];
                narrow_dots<kQuantsOf<F>, R>(grouped_parts(quants), at, x, even);
                narrow_dots<kQuantsOf<F>, R>(grouped_parts(quants + kQuantsStep<F>), at, next, odd);
                const __m256i scale =
                    pair_lanes(_mm256_cvtps_epi32(load_halves(record + at * 2)),
                               _mm256_cvtps_epi32(load_halves(record_odd + at * 2)));
                const __m256i pairs = pair_lanes(_mm256_cvtepu8_epi32(load_zeros(record, at)),
                                                 _mm256_cvtepu8_epi32(load_zeros(record_odd, at)));
                const __m256i min = _mm256_mulhrs_epi16(
                    scale,
                    _mm256_slli_epi16(_mm256_sub_epi16(_mm256_set1_epi16(kCentre), pairs), 11));
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    const __m256i s = _mm256_mulhrs_epi16(scale, broadcast(&x[r].fixed_pair));
                    const __m256i minus_8 = broadcast(&x[r].minus_8_pair);
                    const __m256i begin = _mm256_srai_epi16(minus_8, kCentreShift<F>);
                    __m256i sum = _mm256_add_epi32(
                        _mm256_madd_epi16(even[r], _mm256_shuffle_epi8(s, copy_even)),
                        _mm256_madd_epi16(odd[r], _mm256_shuffle_epi8(s, copy_odd)));
                    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(s, begin));
                    sum = _mm256_add_epi32(sum,
                                           _mm256_madd_epi16(min, broadcast(&next[r].fixed_pair)));
                    totals[h][r] = _mm256_add_epi32(totals[h][r], sum);
                }
            }
            if (lane == 0)
                prefetching.template step<2>(quants);
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

// R rows by H halves of a column block, the first beginning at `lane`.
template <int R, int H> inline void grouped_bytes_halves(const Tile &tile, int64_t lane) {
    constexpr Format F = Format::I8;
    const uint8_t *quants = tile.weights + records_bytes(tile.k, tile.group);
    const auto *x = reinterpret_cast<const ActivationGroup *>(tile.activations);
    const int64_t height = tile.activation_step / kLine;
    Records records(tile.weights, tile.group);
    const Prefetching<F, R> prefetching(tile.weights, quants);
    __m256 sums[H][R];
#pragma GCC unroll 8
    for (int h = 0; h < H; ++h)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
            sums[h][r] = _mm256_setzero_ps();
    const int64_t groups = tile.k / kGroup;
    for (int64_t g = 0; g < groups; ++g, x += height, quants += kQuantsStep<F>) {
        Dots<Format::Q8_0> dots[R][H];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int h = 0; h < H; ++h)
                dots[r][h].start(x[r]);
        const auto multiply_quads = [&]<int I>() {
#pragma GCC unroll 8
            for (int h = 0; h < H; ++h) {
                __m256i first, second;
                load_quads<Format::Q8_0, I>(quants + (lane + h * kHalf) * 4, nullptr, first,
                                            second);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r)
                    dots[r][h].template add<I>(first, second, x[r]);
            }
        };
        multiply_quads.template operator()<0>();
        multiply_quads.template operator()<1>();
        multiply_quads.template operator()<2>();
        multiply_quads.template operator()<3>();

        const uint8_t *record = records.next();
        const __m128i off =
            _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i *>(record + 2 * kLanes)),
                          _mm_set1_epi8(-128));
        const bool has_min = !_mm_testz_si128(off, off);
#pragma GCC unroll 8
        for (int h = 0; h < H; ++h) {
            const int64_t at = lane + h * kHalf;
            const __m256 scale = load_halves(record + at * 2);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
                sums[h][r] =
                    _mm256_fmadd_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(dots[r][h].sum), scale),
                                    _mm256_set1_ps(x[r].scale), sums[h][r]);
            if (!has_min)
                continue;
            const __m256 centred = _mm256_sub_ps(_mm256_set1_ps(128),
                                                 bytes_to_floats(record + 2 * kLanes + at, false));
            const __m256 min = _mm256_mul_ps(scale, centred);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
                sums[h][r] = _mm256_fmadd_ps(min, _mm256_set1_ps(x[r].scaled_sum), sums[h][r]);
        }
        if (lane == 0)
            prefetching.template step<1>(quants);
    }
#pragma GCC unroll 8
    for (int h = 0; h < H; ++h)
        write_scaled<R>(tile, lane + h * kHalf, sums[h]);
}

template <Format F, int R, int H>
    requires(format_info(F).grouped)
inline void halves(const Tile &tile, int64_t lane) {
    if constexpr (F == Format::I8)
        grouped_bytes_halves<R, H>(tile, lane);
    else
        grouped_fixed_halves<F, R, H>(tile, lane);
}

template <Format F, int R, int C>
    requires(format_info(F).grouped)
void compute_tile(const Tile &tile) {
    if constexpr (R == 1) {
        halves<F, 1, 2>(tile, 0);
    } else {
        halves<F, R, 1>(tile, 0);
        halves<F, R, 1>(tile, kHalf);
    }
}

} // namespace
} // namespace octavo

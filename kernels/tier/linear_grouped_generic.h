// Tiles of the grouped formats (linear_grouped.h) in plain C++.
#pragma once

#include "linear_generic.h"
#include "linear_grouped.h"

namespace octavo {
namespace {

template <Format F, int R>
inline void grouped_fixed_tile(const Tile &tile, float (&sums)[R][kLanes]) {
    constexpr int kCentre = kCentreOf<F>;
    const uint8_t *quants = tile.weights + records_bytes(tile.k, tile.group);
    const int64_t groups = tile.k / kGroup;
    Records records(tile.weights, tile.group);
    for (int64_t begin = 0; begin < groups; begin += kSpan) {
        const int64_t end = begin + kSpan < groups ? begin + kSpan : groups;
        uint32_t totals[R][kLanes] = {};
        for (int64_t g = begin; g < end; ++g) {
            const uint8_t *record = records.next();
            uint8_t values[8][64];
            read_quads<kQuantsOf<F>>(quants + g * kQuantsStep<F>, nullptr, values);
            int32_t scale[kLanes], min[kLanes];
            for (int64_t lane = 0; lane < kLanes; ++lane) {
                scale[lane] = static_cast<int16_t>(
                    round_to_int(half_to_float(load_as<uint16_t>(record + lane * 2))));
                min[lane] =
                    multiply_high(scale[lane], (kCentre - record[2 * kLanes + lane]) * 2048);
            }
            for (int r = 0; r < R; ++r) {
                const ActivationGroup &x = group_of(tile, g, r);
                const auto half = [&](int32_t pair) {
                    return static_cast<int16_t>(static_cast<uint32_t>(pair) >> g % 2 * 16);
                };
                const int32_t x_scale = half(group_of(tile, g / 2 * 2, r).fixed_pair);
                const int32_t x_sum = half(group_of(tile, g / 2 * 2 + 1, r).fixed_pair);
                int32_t dots[kLanes];
                for (int64_t lane = 0; lane < kLanes; ++lane)
                    dots[lane] = x.minus_8 / 8 * kCentre;
                add_dots(values, x.quants, 0, 8, dots);
                for (int64_t lane = 0; lane < kLanes; ++lane) {
                    const int32_t product =
                        dots[lane] * multiply_high(scale[lane], x_scale) + min[lane] * x_sum;
                    totals[r][lane] += static_cast<uint32_t>(product);
                }
            }
        }
        for (int r = 0; r < R; ++r)
            for (int64_t lane = 0; lane < kLanes; ++lane)
                sums[r][lane] += static_cast<float>(static_cast<int32_t>(totals[r][lane])) *
                                 group_of(tile, begin, r).unit;
    }
}

template <int R> inline void grouped_bytes_tile(const Tile &tile, float (&sums)[R][kLanes]) {
    const uint8_t *quants = tile.weights + records_bytes(tile.k, tile.group);
    Records records(tile.weights, tile.group);
    for (int64_t g = 0; g < tile.k / kGroup; ++g) {
        const uint8_t *record = records.next();
        uint8_t values[8][64];
        read_quads<Format::Q8_0>(quants + g * kQuantsStep<Format::I8>, nullptr, values);
        float scale[kLanes], min[kLanes];
        bool has_min = false;
        for (int64_t lane = 0; lane < kLanes; ++lane) {
            const int centred = 128 - record[2 * kLanes + lane];
            scale[lane] = half_to_float(load_as<uint16_t>(record + lane * 2));
            min[lane] = scale[lane] * static_cast<float>(centred);
            has_min |= centred != 0;
        }
        for (int r = 0; r < R; ++r) {
            const ActivationGroup &x = group_of(tile, g, r);
            int32_t dots[kLanes];
            for (int64_t lane = 0; lane < kLanes; ++lane)
                dots[lane] = x.minus_8 * 16;
            add_dots(values, x.quants, 0, 8, dots);
            for (int64_t lane = 0; lane < kLanes; ++lane) {
                sums[r][lane] += static_cast<float>(dots[lane]) * scale[lane] * x.scale;
                if (has_min)
                    sums[r][lane] += min[lane] * x.scaled_sum;
            }
        }
    }
}

template <Format F, int R, int C>
    requires(format_info(F).grouped)
void compute_tile(const Tile &tile) {
    float sums[R][kLanes] = {};
    if constexpr (F == Format::I8)
        grouped_bytes_tile<R>(tile, sums);
    else
        grouped_fixed_tile<F, R>(tile, sums);
    scale_down<R>(tile, sums);
    write_tile<R>(tile, sums);
}

} // namespace
} // namespace octavo

// Tiles in plain C++: any processor, any compiler. Loops over the 16 lanes are left to the
// vectorizer.
#pragma once

#include "linear_layout.h"

#include <cmath>

namespace octavo {
namespace {

constexpr int kMaxTileRows = 4;

template <Format F> constexpr int tile_columns(int) {
    return 1;
}

template <Format F, int R> inline void float_tile(const Tile &tile, float (&sums)[R][kLanes]) {
    for (int64_t i = 0; i < tile.k; ++i) {
        float w[kLanes];
        for (int64_t lane = 0; lane < kLanes; ++lane) {
            const uint8_t *from = tile.weights + (i * kLanes + lane) * format_info(F).block_bytes;
            if constexpr (F == Format::F32)
                w[lane] = load_as<float>(from);
            else if constexpr (F == Format::F16)
                w[lane] = half_to_float(load_as<uint16_t>(from));
            else
                w[lane] = bfloat_to_float(load_as<uint16_t>(from));
        }
        for (int r = 0; r < R; ++r) {
            const auto x = load_as<float>(tile.activations + r * tile.activation_stride + i * 4);
            for (int64_t lane = 0; lane < kLanes; ++lane)
                sums[r][lane] += w[lane] * x;
        }
    }
}

// The numbers of a group, quad by quad: values[q][4 · lane + j] is input 4q + j.
template <Format F>
inline void read_quads(const uint8_t *quants, const uint8_t *high, uint8_t (&values)[8][64]) {
    for (int i = 0; i < 4; ++i)
        for (int64_t at = 0; at < 64; ++at) {
            const uint8_t v = quants[i * 64 + at];
            if constexpr (F == Format::Q8_0) {
                values[i][at] = v;
                values[i + 4][at] = quants[(i + 4) * 64 + at];
            } else {
                values[i][at] = v & 15;
                values[i + 4][at] = v >> 4;
            }
            if constexpr (traits(F).high_bits == 1) {
                values[i][at] |= static_cast<uint8_t>((high[at] >> i & 1) << 4);
                values[i + 4][at] |= static_cast<uint8_t>((high[at] >> (i + 4) & 1) << 4);
            } else if constexpr (traits(F).high_bits == 2) {
                values[i][at] |= static_cast<uint8_t>((high[at] >> 2 * i & 3) << 4);
                values[i + 4][at] |= static_cast<uint8_t>((high[64 + at] >> 2 * i & 3) << 4);
            }
        }
}

// Adds the dot products of quads [begin, end) to `dots`.
inline void add_dots(const uint8_t (&values)[8][64], const int8_t *x, int begin, int end,
                     int32_t (&dots)[kLanes]) {
    for (int q = begin; q < end; ++q)
        for (int64_t lane = 0; lane < kLanes; ++lane)
            for (int j = 0; j < 4; ++j)
                dots[lane] += values[q][lane * 4 + j] * x[q * 4 + j];
}

template <Format F, int R> inline void quantized_tile(const Tile &tile, float (&sums)[R][kLanes]) {
    constexpr Traits t = traits(F);
    for (int64_t g = 0; g < tile.k / kGroup; ++g) {
        uint8_t values[8][64];
        const GroupParts<const uint8_t> part = group_at<F>(tile.weights, g);
        read_quads<F>(part.quants, part.high, values);
        float scale[kLanes], scale_b[kLanes], min[kLanes];
        for (int64_t lane = 0; lane < kLanes; ++lane) {
            const float d = half_to_float(
                load_as<uint16_t>((t.k_quant ? part.shared : part.scales) + lane * 2));
            scale[lane] = d;
            if constexpr (F == Format::Q6_K) {
                scale[lane] = d * static_cast<float>(static_cast<int8_t>(part.scales[lane]));
                scale_b[lane] = d * static_cast<float>(static_cast<int8_t>(part.scales[16 + lane]));
            } else if constexpr (t.k_quant) {
                const float dmin = half_to_float(load_as<uint16_t>(part.shared + 32 + lane * 2));
                scale[lane] = d * static_cast<float>(part.scales[lane]);
                min[lane] = -(dmin * static_cast<float>(part.scales[16 + lane]));
            } else if constexpr (t.has_min) {
                min[lane] = half_to_float(load_as<uint16_t>(part.scales + 32 + lane * 2));
            }
        }
        for (int r = 0; r < R; ++r) {
            const auto &x = reinterpret_cast<const ActivationGroup *>(
                tile.activations + r * tile.activation_stride)[g];
            int32_t dots[kLanes], dots_b[kLanes];
            const int32_t start = t.zero == 8     ? x.minus_8
                                  : t.zero == 16  ? x.minus_16
                                  : t.zero == 128 ? x.minus_128
                                  : t.zero == 32  ? x.minus_32[0]
                                                  : 0;
            for (int64_t lane = 0; lane < kLanes; ++lane) {
                dots[lane] = start;
                dots_b[lane] = x.minus_32[1];
            }
            if constexpr (F == Format::Q6_K) {
                add_dots(values, x.quants, 0, 4, dots);
                add_dots(values, x.quants, 4, 8, dots_b);
            } else {
                add_dots(values, x.quants, 0, 8, dots);
            }
            for (int64_t lane = 0; lane < kLanes; ++lane) {
                float product = static_cast<float>(dots[lane]) * scale[lane];
                if constexpr (F == Format::Q6_K)
                    product += static_cast<float>(dots_b[lane]) * scale_b[lane];
                sums[r][lane] += product * x.scale;
                if constexpr (t.has_min)
                    sums[r][lane] += min[lane] * x.scaled_sum;
            }
        }
    }
}

template <Format F, int R, int C> void compute_tile(const Tile &tile) {
    static_assert(C == 1);
    float sums[R][kLanes] = {};
    if constexpr (format_info(F).quantized)
        quantized_tile<F, R>(tile, sums);
    else
        float_tile<F, R>(tile, sums);
    const int64_t columns = tile.columns < kLanes ? tile.columns : kLanes;
    for (int r = 0; r < R; ++r)
        for (int64_t lane = 0; lane < columns; ++lane) {
            float &to = tile.out[r * tile.ldo + lane];
            to = tile.accumulate ? to + sums[r][lane] : sums[r][lane];
        }
}

inline void prepare_group(const float *x, ActivationGroup &out) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < kGroup; ++i) {
        const uint32_t magnitude = load_as<uint32_t>(x + i) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    const GroupScale s = group_scale(largest);
    int32_t sums[2] = {0, 0};
    for (int64_t i = 0; i < kGroup; ++i) {
        const int32_t q =
            s.inverse > 0 ? static_cast<int32_t>(std::nearbyint(x[i] * s.inverse)) : 0;
        out.quants[i] = static_cast<int8_t>(q);
        sums[i / 16] += q;
    }
    finish_group(s, sums[0], sums[1], out);
}

} // namespace
} // namespace octavo

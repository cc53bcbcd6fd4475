// Tiles in plain C++: any processor, any compiler. Loops over the 16 lanes are left to the
// vectorizer.
#pragma once

#include "linear_scaled.h"

#include <cmath>

namespace octavo {
namespace {

constexpr int kMaxTileRows = 4;
constexpr bool kBf16 = false;

template <Format F> constexpr int tile_columns(int) {
    return 1;
}

template <Format F, int R> inline void float_tile(const Tile &tile, float (&sums)[R][kLanes]) {
    constexpr int64_t kInputs = kLine / 4; // a cell
    for (int64_t i = 0; i < tile.k; ++i) {
        float w[kLanes];
        for (int64_t lane = 0; lane < kLanes; ++lane) {
            const uint8_t *from = tile.weights + float_offset<F>(i, lane);
            if constexpr (F == Format::F32)
                w[lane] = load_as<float>(from);
            else if constexpr (F == Format::F16)
                w[lane] = half_to_float(load_as<uint16_t>(from));
            else
                w[lane] = bfloat_to_float(load_as<uint16_t>(from));
        }
        const std::byte *cell =
            tile.activations + i / kInputs * tile.activation_step + i % kInputs * 4;
        for (int r = 0; r < R; ++r) {
            const auto x = load_as<float>(cell + r * kLine);
            for (int64_t lane = 0; lane < kLanes; ++lane)
                sums[r][lane] += w[lane] * x;
        }
    }
}

template <int R> inline void scaled_tile(const Tile &tile, float (&sums)[R][kLanes]) {
    constexpr int64_t kInputs = kLine / 4; // a cell
    const uint8_t *codes = tile.weights + scaled_codes(tile.k, tile.group);
    for (int64_t begin = 0; begin < tile.k; begin += tile.group) {
        const int64_t end = begin + tile.group < tile.k ? begin + tile.group : tile.k;
        float products[R][kLanes] = {};
        for (int64_t i = begin; i < end; ++i) {
            const std::byte *cell =
                tile.activations + i / kInputs * tile.activation_step + i % kInputs * 4;
            for (int64_t lane = 0; lane < kLanes; ++lane) {
                const float w = half_to_float(e4m3_to_half(codes[i * kLanes + lane]));
                for (int r = 0; r < R; ++r)
                    products[r][lane] += w * load_as<float>(cell + r * kLine);
            }
        }
        const uint8_t *scales = tile.weights + begin / tile.group * kLine;
        for (int64_t lane = 0; lane < kLanes; ++lane)
            for (int r = 0; r < R; ++r)
                sums[r][lane] += products[r][lane] * load_as<float>(scales + lane * 4);
    }
}

// The numbers of a group, quad by quad: values[q][4 · lane + j] is input 4q + j.
template <Format F>
inline void read_quads(const uint8_t *quants, const uint8_t *high, uint8_t (&values)[8][64]) {
    if constexpr (traits(F).low_bits < 4) {
        for (int64_t at = 0; at < 64; ++at) {
            const int a = quants[at], b = quants[64 + at];
            if constexpr (traits(F).low_bits == 2) {
                for (int q = 0; q < 8; ++q)
                    values[q][at] = static_cast<uint8_t>((q < 4 ? a : b) >> q % 4 * 2 & 3);
            } else {
                const int c = quants[128 + at], all[8] = {a,
                                                          a >> 3,
                                                          b,
                                                          b >> 3,
                                                          c,
                                                          c >> 3,
                                                          a >> 6 | (b >> 4 & 4),
                                                          c >> 6 | (b >> 5 & 4)};
                for (int q = 0; q < 8; ++q)
                    values[q][at] = static_cast<uint8_t>(all[q] & 7);
            }
            if constexpr (traits(F).coded) {
                constexpr Codebook kCodes = codebook<F>();
                for (auto &quad : values)
                    quad[at] = kCodes.numbers[quad[at]];
            }
        }
        return;
    }
    for (int i = 0; i < 4; ++i)
        for (int64_t at = 0; at < 64; ++at) {
            const uint8_t v = quants[i * 64 + at];
            if constexpr (F == Format::Q8_0) {
                values[i][at] = v;
                values[i + 4][at] = quants[(i + 4) * 64 + at];
            } else if constexpr (traits(F).coded) {
                constexpr Codebook kCodes = codebook<F>();
                values[i][at] = kCodes.numbers[v & 15];
                values[i + 4][at] = kCodes.numbers[v >> 4];
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

// Nearest integer, ties to even, of |x| < 2^22; anything for NaN.
inline int32_t round_to_int(float x) {
    const float shifted = x + 0x1.8p23f;
    return static_cast<int32_t>(load_as<uint32_t>(&shifted) - 0x4b400000u);
}

// (a · b + 2^14) >> 15.
inline int32_t multiply_high(int32_t a, int32_t b) {
    return (a * b + (1 << 14)) >> 15;
}

inline const ActivationGroup &group_of(const Tile &tile, int64_t g, int r) {
    return *reinterpret_cast<const ActivationGroup *>(tile.activations + g * tile.activation_step +
                                                      r * kLine);
}

// The fixed-point scale and min of a lane of group g.
template <Format F>
inline void fixed_scale_min(const uint8_t *weights, int64_t g, int64_t lane, int32_t &scale,
                            int32_t &min) {
    const auto up = load_as<float>(weights + lane * 4);
    const GroupParts<const uint8_t> part = group_at<F>(weights, g);
    const uint8_t *halves = (traits(F).k_quant ? part.shared : part.scales) + lane * 2;
    const float d = half_to_float(load_as<uint16_t>(halves));
    const float m = traits(F).has_min ? half_to_float(load_as<uint16_t>(halves + 32)) : 0.0f;
    const auto narrow = [](float x) { return static_cast<int16_t>(round_to_int(x)); };
    if constexpr (traits(F).k_quant) {
        const ScaleMin<const uint8_t> at = scale_min_at<F>(part, g, lane);
        scale = multiply_high(*at.scale << 9, narrow(d * up * 64));
        min = (scale >> 1) - multiply_high(*at.min << 9, narrow(m * up * 4));
    } else {
        scale = narrow(d * up);
        if constexpr (traits(F).has_min)
            min = (scale >> 1) + narrow(m * up * 0.0625f);
    }
}

// Takes back the 2^f of each lane, by which its scales had been multiplied.
template <int R> inline void scale_down(const Tile &tile, float (&sums)[R][kLanes]) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
        const float down = 1 / load_as<float>(tile.weights + lane * 4);
        for (int r = 0; r < R; ++r)
            sums[r][lane] *= down;
    }
}

template <Format F, int R> inline void fixed_tile(const Tile &tile, float (&sums)[R][kLanes]) {
    const int64_t groups = tile.k / kGroup;
    for (int64_t begin = 0; begin < groups; begin += kSpan) {
        const int64_t end = begin + kSpan < groups ? begin + kSpan : groups;
        uint32_t totals[R][kLanes] = {};
        for (int64_t g = begin; g < end; ++g) {
            uint8_t values[8][64];
            const GroupParts<const uint8_t> part = group_at<F>(tile.weights, g);
            read_quads<F>(part.quants, part.high, values);
            int32_t scale[kLanes], min[kLanes] = {};
            for (int64_t lane = 0; lane < kLanes; ++lane)
                fixed_scale_min<F>(tile.weights, g, lane, scale[lane], min[lane]);
            for (int r = 0; r < R; ++r) {
                const ActivationGroup &x = group_of(tile, g, r);
                const auto half = [&](int32_t pair) {
                    return static_cast<int16_t>(static_cast<uint32_t>(pair) >> g % 2 * 16);
                };
                const int32_t x_scale = half(group_of(tile, g / 2 * 2, r).fixed_pair);
                const int32_t x_sum =
                    traits(F).has_min ? half(group_of(tile, g / 2 * 2 + 1, r).fixed_pair) : 0;
                int32_t dots[kLanes];
                for (int64_t lane = 0; lane < kLanes; ++lane)
                    dots[lane] = x.minus_8;
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
    scale_down<R>(tile, sums);
}

template <Format F, int R> inline void split_tile(const Tile &tile, float (&sums)[R][kLanes]) {
    for (int64_t begin = 0; begin < tile.k / kGroup; begin += kSpan) {
        float products[R][kLanes] = {}, mins[R][kLanes] = {};
        for (int64_t g = begin; g < begin + kSpan; ++g) {
            uint8_t values[8][64];
            const GroupParts<const uint8_t> part = group_at<F>(tile.weights, g);
            read_quads<F>(part.quants, part.high, values);
            SplitScale scales[2][kLanes];
            for (int64_t half = 0; half < 2; ++half)
                for (int64_t lane = 0; lane < kLanes; ++lane)
                    scales[half][lane] = split_scale_at<F>(part, g, lane, half);
            for (int r = 0; r < R; ++r) {
                const ActivationGroup &x = group_of(tile, g, r);
                int32_t totals[kLanes] = {}, min_totals[kLanes] = {};
                for (int half = 0; half < 2; ++half) {
                    const int32_t minus_sum = x.minus_32[half] / 32;
                    int32_t dots[kLanes];
                    for (int64_t lane = 0; lane < kLanes; ++lane)
                        dots[lane] = traits(F).zero * minus_sum;
                    add_dots(values, x.quants, half * 4, half * 4 + 4, dots);
                    for (int64_t lane = 0; lane < kLanes; ++lane) {
                        totals[lane] += dots[lane] * scales[half][lane].scale;
                        min_totals[lane] += minus_sum * scales[half][lane].min;
                    }
                }
                for (int64_t lane = 0; lane < kLanes; ++lane) {
                    products[r][lane] += static_cast<float>(totals[lane]) * x.scale;
                    mins[r][lane] += static_cast<float>(min_totals[lane]) * x.scale;
                }
            }
        }
        const uint8_t *shared = group_at<F>(tile.weights, begin).shared;
        for (int64_t lane = 0; lane < kLanes; ++lane) {
            const float d = half_to_float(load_as<uint16_t>(shared + lane * 2));
            for (int r = 0; r < R; ++r)
                sums[r][lane] += products[r][lane] * d;
            if constexpr (traits(F).has_min) {
                const float dmin = half_to_float(load_as<uint16_t>(shared + 32 + lane * 2));
                for (int r = 0; r < R; ++r)
                    sums[r][lane] += mins[r][lane] * dmin;
            }
        }
    }
}

template <Format F, int R> inline void quantized_tile(const Tile &tile, float (&sums)[R][kLanes]) {
    constexpr Traits t = traits(F);
    for (int64_t g = 0; g < tile.k / kGroup; ++g) {
        uint8_t values[8][64];
        const GroupParts<const uint8_t> part = group_at<F>(tile.weights, g);
        read_quads<F>(part.quants, part.high, values);
        float scale[kLanes], scale_b[kLanes], min[kLanes];
        for (int64_t lane = 0; lane < kLanes; ++lane) {
            if constexpr (t.coded) {
                scale[lane] = code_scale<F>(part, lane, 0);
                if constexpr (t.halves)
                    scale_b[lane] = code_scale<F>(part, lane, 1);
                continue;
            }
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
            const ActivationGroup &x = group_of(tile, g, r);
            int32_t dots[kLanes], dots_b[kLanes];
            const auto start = [&](int half) { return x.minus_32[half] / 32 * t.zero; };
            for (int64_t lane = 0; lane < kLanes; ++lane) {
                dots[lane] = t.halves ? start(0) : x.minus_8 / 8 * t.zero;
                dots_b[lane] = start(1);
            }
            if constexpr (t.halves) {
                add_dots(values, x.quants, 0, 4, dots);
                add_dots(values, x.quants, 4, 8, dots_b);
            } else {
                add_dots(values, x.quants, 0, 8, dots);
            }
            for (int64_t lane = 0; lane < kLanes; ++lane) {
                float product = static_cast<float>(dots[lane]) * scale[lane];
                if constexpr (t.halves)
                    product += static_cast<float>(dots_b[lane]) * scale_b[lane];
                sums[r][lane] += product * x.scale;
                if constexpr (t.has_min)
                    sums[r][lane] += min[lane] * x.scaled_sum;
            }
        }
    }
}

template <int R> inline void write_tile(const Tile &tile, const float (&sums)[R][kLanes]) {
    const int64_t columns = tile.columns < kLanes ? tile.columns : kLanes;
    for (int r = 0; r < R; ++r)
        for (int64_t lane = 0; lane < columns; ++lane) {
            float &to = tile.out[r * tile.ldo + lane];
            to = tile.accumulate ? to + sums[r][lane] : sums[r][lane];
        }
}

template <Format F, int R, int C> void compute_tile(const Tile &tile) {
    static_assert(C == 1);
    float sums[R][kLanes] = {};
    if constexpr (F == Format::E4M3)
        scaled_tile<R>(tile, sums);
    else if constexpr (traits(F).fixed)
        fixed_tile<F, R>(tile, sums);
    else if constexpr (traits(F).split)
        split_tile<F, R>(tile, sums);
    else if constexpr (format_info(F).quantized)
        quantized_tile<F, R>(tile, sums);
    else
        float_tile<F, R>(tile, sums);
    if constexpr (traits(F).scaled_last)
        for (auto &row : sums)
            for (int64_t lane = 0; lane < kLanes; ++lane)
                row[lane] *= load_as<float>(tile.weights + lane * 4);
    write_tile<R>(tile, sums);
}

inline void prepare_bf16(const float *, int64_t, std::byte *, int64_t) {}

// Writes `groups` cells, and one of zero quants more if they are odd.
inline void prepare_span(const float *x, int64_t groups, std::byte *to, int64_t step) {
    ActivationGroup cells[kSpan] = {};
    uint32_t largest_scale = 0;
    int32_t sums[kSpan] = {};
    for (int64_t g = 0; g < groups; ++g, x += kGroup) {
        uint32_t largest = 0;
        for (int64_t i = 0; i < kGroup; ++i) {
            const uint32_t magnitude = load_as<uint32_t>(x + i) & 0x7fffffffu;
            largest = magnitude > largest ? magnitude : largest;
        }
        const GroupScale s = group_scale(largest);
        int32_t half_sums[2] = {0, 0};
        for (int64_t i = 0; i < kGroup; ++i) {
            const int32_t q =
                s.inverse > 0 ? static_cast<int32_t>(std::nearbyint(x[i] * s.inverse)) : 0;
            cells[g].quants[i] = static_cast<int8_t>(q);
            half_sums[i / 16] += q;
        }
        sums[g] = half_sums[0] + half_sums[1];
        cells[g].scale = s.scale;
        cells[g].scaled_sum = s.scale * static_cast<float>(sums[g]);
        cells[g].minus_8 = -8 * sums[g];
        cells[g].minus_32[0] = -32 * half_sums[0];
        cells[g].minus_32[1] = -32 * half_sums[1];
        const auto bits = load_as<uint32_t>(&s.scale);
        largest_scale = bits > largest_scale ? bits : largest_scale;
    }
    const SpanScale span = span_scale(largest_scale);
    int32_t scales[kSpan] = {}, scaled_sums[kSpan] = {};
    for (int64_t g = 0; g < kSpan; ++g) {
        cells[g].unit = span.unit;
        if (span.scale > 0) {
            scales[g] = static_cast<int32_t>(std::nearbyint(cells[g].scale * span.scale));
            scaled_sums[g] =
                static_cast<int32_t>(std::nearbyint(cells[g].scaled_sum * span.sum_scale));
        }
    }
    for (int64_t g = 0; g < groups; g += 2) {
        cells[g].fixed_pair = pair_of(scales[g], scales[g + 1]);
        cells[g].minus_8_pair = pair_of(cells[g].minus_8, cells[g + 1].minus_8);
        cells[g + 1].fixed_pair = pair_of(scaled_sums[g], scaled_sums[g + 1]);
    }
    for (int64_t g = 0; g < round_up(groups, 2); ++g)
        std::memcpy(to + g * step, &cells[g], kLine);
}

} // namespace
} // namespace octavo

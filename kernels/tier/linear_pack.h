// Repacking of file blocks into column blocks, and back to numbers. Scalar: it runs once at load.
#pragma once

#include "linear_layout.h"

namespace octavo {
namespace {

// The 6-bit scale and min of group g (0…7) of a Q4_K or Q5_K block, out of its 12 packed bytes.
inline void unpack_scale_min(const uint8_t *packed, int64_t g, uint8_t &scale, uint8_t &min) {
    if (g < 4) {
        scale = packed[g] & 63;
        min = packed[g + 4] & 63;
    } else {
        scale = static_cast<uint8_t>((packed[g + 4] & 15) | (packed[g - 4] >> 6) << 4);
        min = static_cast<uint8_t>((packed[g + 4] >> 4) | (packed[g] >> 6) << 4);
    }
}

// The 32 numbers of group g (within a file block), as the unsigned integers that are packed.
template <Format F> inline void read_group(const uint8_t *block, int64_t g, uint8_t *values) {
    if constexpr (F == Format::Q8_0) {
        for (int64_t i = 0; i < 32; ++i)
            values[i] = block[2 + i] ^ 0x80;
    } else if constexpr (F == Format::Q4_K || F == Format::Q5_K) {
        constexpr int64_t kHigh = 16, kLow = F == Format::Q4_K ? 16 : 48;
        const uint8_t *low = block + kLow + g / 2 * 32;
        const auto shift = static_cast<int>(g % 2 * 4);
        for (int64_t i = 0; i < 32; ++i)
            values[i] = (low[i] >> shift) & 15;
        if constexpr (F == Format::Q5_K)
            for (int64_t i = 0; i < 32; ++i)
                values[i] |= static_cast<uint8_t>((block[kHigh + i] >> g & 1) << 4);
    } else if constexpr (F == Format::Q6_K) {
        const int64_t half = g / 4, part = g % 4; // halves of 128 values, parts of 32
        const uint8_t *low = block + half * 64 + part % 2 * 32;
        const uint8_t *high = block + 128 + half * 32;
        for (int64_t i = 0; i < 32; ++i)
            values[i] = static_cast<uint8_t>((low[i] >> part / 2 * 4 & 15) |
                                             (high[i] >> part * 2 & 3) << 4);
    } else {
        constexpr bool kMin = traits(F).has_min, kFifth = traits(F).high_bits == 1;
        const uint8_t *low = block + (kMin ? 4 : 2) + (kFifth ? 4 : 0);
        for (int64_t i = 0; i < 16; ++i) {
            values[i] = low[i] & 15;
            values[i + 16] = low[i] >> 4;
        }
        if constexpr (kFifth) {
            const auto high = load_as<uint32_t>(block + (kMin ? 4 : 2));
            for (int64_t i = 0; i < 32; ++i)
                values[i] |= static_cast<uint8_t>((high >> i & 1) << 4);
        }
    }
}

// Writes a lane of a group's quants and high bits; `quants` and `high` point at the group.
template <Format F>
inline void write_lane(const uint8_t *values, int64_t lane, uint8_t *quants, uint8_t *high) {
    if constexpr (F == Format::Q8_0) {
        for (int64_t i = 0; i < 8; ++i)
            std::memcpy(quants + i * 64 + lane * 4, values + i * 4, 4);
    } else {
        uint8_t nibbles[16];
        for (int64_t i = 0; i < 16; ++i)
            nibbles[i] = static_cast<uint8_t>((values[i] & 15) | values[i + 16] << 4);
        for (int64_t i = 0; i < 4; ++i)
            std::memcpy(quants + i * 64 + lane * 4, nibbles + i * 4, 4);
    }
    if constexpr (traits(F).high_bits == 1) {
        for (int64_t j = 0; j < 4; ++j) {
            unsigned bits = 0;
            for (int64_t q = 0; q < 8; ++q)
                bits |= (values[q * 4 + j] >> 4 & 1u) << q;
            high[lane * 4 + j] = static_cast<uint8_t>(bits);
        }
    } else if constexpr (traits(F).high_bits == 2) {
        for (int64_t v = 0; v < 2; ++v)
            for (int64_t j = 0; j < 4; ++j) {
                unsigned bits = 0;
                for (int64_t q = 0; q < 4; ++q)
                    bits |= (values[v * 16 + q * 4 + j] >> 4 & 3u) << 2 * q;
                high[v * 64 + lane * 4 + j] = static_cast<uint8_t>(bits);
            }
    }
}

// The inverse of write_lane.
template <Format F>
inline void read_lane(const uint8_t *quants, const uint8_t *high, int64_t lane, uint8_t *values) {
    for (int64_t i = 0; i < 16; ++i) {
        const int64_t at = i / 4 * 64 + lane * 4 + i % 4;
        if constexpr (F == Format::Q8_0) {
            values[i] = quants[at];
            values[i + 16] = quants[at + 256];
        } else {
            values[i] = quants[at] & 15;
            values[i + 16] = quants[at] >> 4;
        }
    }
    if constexpr (traits(F).high_bits == 1)
        for (int64_t i = 0; i < 32; ++i)
            values[i] |= static_cast<uint8_t>((high[lane * 4 + i % 4] >> i / 4 & 1) << 4);
    if constexpr (traits(F).high_bits == 2)
        for (int64_t i = 0; i < 32; ++i)
            values[i] |= static_cast<uint8_t>(
                (high[i / 16 * 64 + lane * 4 + i % 4] >> i / 4 % 4 * 2 & 3) << 4);
}

// What column_scale takes, of a column's packed scales; a bound of it for K formats.
template <Format F>
inline float largest_scale(const uint8_t *column_block, int64_t lane, int64_t k) {
    uint32_t largest = 0; // bits of a magnitude: they order like the numbers, NaN above all
    const auto take = [&](float value) {
        const uint32_t bits = load_as<uint32_t>(&value) & 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    };
    for (int64_t g = 0; g < k / kGroup; ++g) {
        const GroupParts<const uint8_t> from = group_at<F>(column_block, g);
        const uint8_t *halves = (traits(F).k_quant ? from.shared : from.scales) + lane * 2;
        const float d = half_to_float(load_as<uint16_t>(halves));
        const float m = traits(F).has_min ? half_to_float(load_as<uint16_t>(halves + 32)) : 0.0f;
        if constexpr (traits(F).k_quant) {
            take(64 * __builtin_fabsf(d) + 8 * __builtin_fabsf(m));
        } else {
            take(d);
            if constexpr (traits(F).has_min)
                take((m + 8 * d) / 8);
        }
    }
    return load_as<float>(&largest);
}

template <Format F>
inline void pack_column_block(const uint8_t *src, int64_t columns, int64_t k, uint8_t *dst) {
    constexpr FormatInfo info = format_info(F);
    const int64_t row_bytes = k / info.block_values * info.block_bytes;
    const int64_t size = column_block_bytes<F>(k);
    // A padding column has scale zero, whatever its quants.
    std::memset(dst, 0, static_cast<size_t>(size));
    if constexpr (!info.quantized) {
        constexpr int64_t kBytes = info.block_bytes;
        for (int64_t i = 0; i < k; ++i)
            for (int64_t lane = 0; lane < columns; ++lane)
                std::memcpy(dst + float_offset<F>(i, lane), src + lane * row_bytes + i * kBytes,
                            kBytes);
    } else {
        constexpr Traits t = traits(F);
        constexpr int64_t kGroupsPerBlock = info.block_values / kGroup;
        for (int64_t g = 0; g < k / kGroup; ++g) {
            for (int64_t lane = 0; lane < columns; ++lane) {
                const uint8_t *block =
                    src + lane * row_bytes + g / kGroupsPerBlock * info.block_bytes;
                const int64_t part = g % kGroupsPerBlock;
                uint8_t values[kGroup];
                read_group<F>(block, part, values);
                const GroupParts<uint8_t> to = group_at<F>(dst, g);
                write_lane<F>(values, lane, to.quants, to.high);
                if constexpr (F == Format::Q6_K) {
                    to.scales[lane] = block[192 + part * 2];
                    to.scales[16 + lane] = block[192 + part * 2 + 1];
                    if (part == 0)
                        std::memcpy(to.shared + lane * 2, block + 208, 2);
                } else if constexpr (t.k_quant) {
                    const ScaleMin<uint8_t> at = scale_min_at<F>(to, g, lane);
                    unpack_scale_min(block + 4, part, *at.scale, *at.min);
                    if (part == 0) {
                        std::memcpy(to.shared + lane * 2, block, 2);
                        std::memcpy(to.shared + 32 + lane * 2, block + 2, 2);
                    }
                } else {
                    std::memcpy(to.scales + lane * 2, block, 2);
                    if constexpr (t.has_min)
                        std::memcpy(to.scales + 32 + lane * 2, block + 2, 2);
                }
            }
        }
        if constexpr (t.fixed)
            for (int64_t lane = 0; lane < kLanes; ++lane)
                store_as(dst + lane * 4, column_scale(largest_scale<F>(dst, lane, k)));
    }
}

// Operations and their order are those of the format's definition, so that the floats are exact.
template <Format F>
inline void dequantize_lane(const uint8_t *block, int64_t lane, int64_t k, float *out) {
    if constexpr (F == Format::F32) {
        for (int64_t i = 0; i < k; ++i)
            out[i] = load_as<float>(block + float_offset<F>(i, lane));
    } else if constexpr (F == Format::F16) {
        for (int64_t i = 0; i < k; ++i)
            out[i] = half_to_float(load_as<uint16_t>(block + float_offset<F>(i, lane)));
    } else if constexpr (F == Format::BF16) {
        for (int64_t i = 0; i < k; ++i)
            out[i] = bfloat_to_float(load_as<uint16_t>(block + float_offset<F>(i, lane)));
    } else {
        constexpr Traits t = traits(F);
        for (int64_t g = 0; g < k / kGroup; ++g) {
            uint8_t values[kGroup];
            const GroupParts<const uint8_t> from = group_at<F>(block, g);
            read_lane<F>(from.quants, from.high, lane, values);
            float *y = out + g * kGroup;
            if constexpr (F == Format::Q6_K) {
                const float d = half_to_float(load_as<uint16_t>(from.shared + lane * 2));
                for (int64_t i = 0; i < kGroup; ++i) {
                    const auto scale = static_cast<int8_t>(from.scales[i / 16 * 16 + lane]);
                    y[i] = d * static_cast<float>(scale) * static_cast<float>(values[i] - 32);
                }
            } else if constexpr (t.k_quant) {
                const float d = half_to_float(load_as<uint16_t>(from.shared + lane * 2));
                const float dmin = half_to_float(load_as<uint16_t>(from.shared + 32 + lane * 2));
                const ScaleMin<const uint8_t> at = scale_min_at<F>(from, g, lane);
                const float scale = d * static_cast<float>(*at.scale);
                const float min = dmin * static_cast<float>(*at.min);
                for (int64_t i = 0; i < kGroup; ++i)
                    y[i] = scale * static_cast<float>(values[i]) - min;
            } else {
                const float d = half_to_float(load_as<uint16_t>(from.scales + lane * 2));
                for (int64_t i = 0; i < kGroup; ++i)
                    y[i] = static_cast<float>(values[i] - t.zero) * d;
                if constexpr (t.has_min) {
                    const float m = half_to_float(load_as<uint16_t>(from.scales + 32 + lane * 2));
                    for (int64_t i = 0; i < kGroup; ++i)
                        y[i] += m;
                }
            }
        }
    }
}

} // namespace
} // namespace octavo

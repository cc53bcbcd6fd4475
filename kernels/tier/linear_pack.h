// Repacking of file blocks into column blocks, and back to numbers. It runs once, at load: plain
// loops that compilers vectorize, and four numbers in a word.
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

// The sixteen 6-bit scales of a Q3_K block, out of its 12 packed bytes.
inline void unpack_3k_scales(const uint8_t *packed, uint8_t *scales) {
    for (int64_t i = 0; i < 16; ++i)
        scales[i] = static_cast<uint8_t>((packed[i % 8] >> i / 8 * 4 & 15) |
                                         (packed[8 + i % 4] >> i / 4 * 2 & 3) << 4);
}

// 32 numbers of so many bits out of a stream of bits.
template <int Bits> inline void read_stream(const uint8_t *stream, uint8_t *values) {
    if constexpr (Bits == 8) {
        std::memcpy(values, stream, kGroup);
    } else if constexpr (Bits == 3) {
        for (int64_t i = 0; i < 4; ++i, stream += 3) {
            const uint32_t bits = stream[0] | static_cast<uint32_t>(stream[1]) << 8 |
                                  static_cast<uint32_t>(stream[2]) << 16;
            for (int64_t j = 0; j < 8; ++j)
                values[8 * i + j] = static_cast<uint8_t>(bits >> 3 * j & 7);
        }
    } else {
        constexpr int64_t kEach = 8 / Bits; // in a byte
        for (int64_t i = 0; i < kGroup; ++i)
            values[i] =
                static_cast<uint8_t>(stream[i / kEach] >> i % kEach * Bits & ((1 << Bits) - 1));
    }
}

// The 32 numbers of group g (within a file block), as the unsigned integers that are packed.
template <Format F> inline void read_group(const uint8_t *block, int64_t g, uint8_t *values) {
    const int64_t half = g / 4, part = g % 4; // of a block of 256: halves of 128, parts of 32
    if constexpr (F == Format::Q8_0) {
        for (int64_t i = 0; i < 32; ++i)
            values[i] = block[2 + i] ^ 0x80;
    } else if constexpr (F == Format::Q2_K || F == Format::Q3_K) {
        const uint8_t *low = block + (F == Format::Q2_K ? 16 : 32) + half * 32;
        for (int64_t i = 0; i < 32; ++i)
            values[i] = low[i] >> part * 2 & 3;
        if constexpr (F == Format::Q3_K)
            for (int64_t i = 0; i < 32; ++i)
                values[i] |= static_cast<uint8_t>((block[i] >> g & 1) << 2);
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
        const uint8_t *low = block + half * 64 + part % 2 * 32;
        const uint8_t *high = block + 128 + half * 32;
        for (int64_t i = 0; i < 32; ++i)
            values[i] = static_cast<uint8_t>((low[i] >> part / 2 * 4 & 15) |
                                             (high[i] >> part * 2 & 3) << 4);
    } else if constexpr (F == Format::T3_IQ1 || F == Format::T3_IQ2) {
        read_stream<3>(block + 10 + g * 12, values);
    } else if constexpr (F == Format::T4_IQ3_XXS || F == Format::T4_IQ3_S) {
        read_stream<4>(block + 10 + g * 16, values);
    } else if constexpr (F == Format::NVFP4) {
        read_stream<4>(block + 2, values);
    } else {
        constexpr bool kMin = traits(F).has_min, kFifth = traits(F).high_bits == 1;
        constexpr int64_t kHeader = F == Format::MXFP4 ? 1 : kMin ? 4 : 2;
        const uint8_t *low = block + kHeader + (kFifth ? 4 : 0);
        if constexpr (F == Format::IQ4_XS)
            low = block + 8 + g * 16;
        for (int64_t i = 0; i < 16; ++i) {
            values[i] = low[i] & 15;
            values[i + 16] = low[i] >> 4;
        }
        if constexpr (kFifth) {
            const auto high = load_as<uint32_t>(block + kHeader);
            for (int64_t i = 0; i < 32; ++i)
                values[i] |= static_cast<uint8_t>((high >> i & 1) << 4);
        }
    }
}

// Writes a lane of a group's quants and high bits; `quants` and `high` point at the group. A quad
// is four bytes, which go through the same shifts.
template <Format F>
inline void write_lane(const uint8_t *values, int64_t lane, uint8_t *quants, uint8_t *high) {
    uint32_t quads[8];
    std::memcpy(quads, values, sizeof quads);
    constexpr uint32_t kEach = 0x01010101;
    const auto write = [&](uint8_t *to, int64_t vector, uint32_t four) {
        store_as(to + vector * kLine + lane * 4, four);
    };
    // Two bits of each of the quads [4v, 4v + 4), `from` on.
    const auto bit_pairs = [&](int64_t v, int from) {
        uint32_t four = 0;
        for (int q = 0; q < 4; ++q)
            four |= (quads[v * 4 + q] >> from & 3 * kEach) << 2 * q;
        return four;
    };
    if constexpr (F == Format::Q8_0) {
        for (int64_t i = 0; i < 8; ++i)
            write(quants, i, quads[i]);
    } else if constexpr (traits(F).low_bits == 2) {
        for (int64_t v = 0; v < 2; ++v)
            write(quants, v, bit_pairs(v, 0));
    } else if constexpr (traits(F).low_bits == 3) {
        write(quants, 0, quads[0] | quads[1] << 3 | (quads[6] & 3 * kEach) << 6);
        write(quants, 1,
              quads[2] | quads[3] << 3 | (quads[6] & 4 * kEach) << 4 | (quads[7] & 4 * kEach) << 5);
        write(quants, 2, quads[4] | quads[5] << 3 | (quads[7] & 3 * kEach) << 6);
    } else {
        for (int64_t i = 0; i < 4; ++i)
            write(quants, i, (quads[i] & 15 * kEach) | (quads[i + 4] & 15 * kEach) << 4);
    }
    if constexpr (traits(F).high_bits == 1) {
        uint32_t four = 0;
        for (int q = 0; q < 8; ++q)
            four |= (quads[q] >> 4 & kEach) << q;
        write(high, 0, four);
    } else if constexpr (traits(F).high_bits == 2) {
        for (int64_t v = 0; v < 2; ++v)
            write(high, v, bit_pairs(v, 4));
    }
}

// The inverse of write_lane.
template <Format F>
inline void read_lane(const uint8_t *quants, const uint8_t *high, int64_t lane, uint8_t *values) {
    for (int64_t i = 0; i < 32; ++i) {
        const int64_t quad = i / 4;
        const auto at = [&](const uint8_t *from, int64_t vector) {
            return int{from[vector * kLine + lane * 4 + i % 4]};
        };
        int value = 0;
        if constexpr (F == Format::Q8_0)
            value = at(quants, quad);
        else if constexpr (traits(F).low_bits == 2)
            value = at(quants, quad / 4) >> quad % 4 * 2 & 3;
        else if constexpr (traits(F).low_bits == 3)
            value = quad < 6
                        ? at(quants, quad / 2) >> quad % 2 * 3 & 7
                        : at(quants, quad == 6 ? 0 : 2) >> 6 | (at(quants, 1) >> quad & 1) << 2;
        else
            value = at(quants, quad % 4) >> quad / 4 * 4 & 15;
        if constexpr (traits(F).high_bits == 1)
            value |= (at(high, 0) >> quad & 1) << 4;
        if constexpr (traits(F).high_bits == 2)
            value |= (at(high, quad / 4) >> quad % 4 * 2 & 3) << 4;
        values[i] = static_cast<uint8_t>(value);
    }
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

// The scales of all groups of a K block, the first of which has its parts at `to`.
template <Format F>
inline void pack_block_scales(const uint8_t *block, int64_t lane, const GroupParts<uint8_t> &to) {
    const auto scales = [&](int64_t g) { return to.scales + g * traits(F).scales; };
    int64_t d = 0, dmin = 2; // where they lie in the block
    if constexpr (F == Format::Q6_K) {
        d = 208;
        for (int64_t g = 0; g < 8; ++g)
            for (int64_t half = 0; half < 2; ++half)
                scales(g)[half * 16 + lane] = block[192 + g * 2 + half];
    } else if constexpr (F == Format::Q2_K) {
        d = 80, dmin = 82;
        for (int64_t g = 0; g < 8; ++g)
            std::memcpy(scales(g) + lane * 2, block + g * 2, 2);
    } else if constexpr (F == Format::Q3_K) {
        d = 108;
        uint8_t s[16];
        unpack_3k_scales(block + 96, s);
        for (int64_t half = 0; half < 2; ++half) {
            const auto of = [&](int64_t g) { return unsigned{s[g * 2 + half]}; };
            const unsigned words[3] = {of(0) | of(1) << 6 | (of(6) & 15) << 12,
                                       of(2) | of(3) << 6 | of(6) >> 4 << 12 | of(7) >> 4 << 14,
                                       of(4) | of(5) << 6 | (of(7) & 15) << 12};
            for (int64_t v = 0; v < 3; ++v)
                store_as(to.scales + v * kLine + (lane * 2 + half) * 2,
                         static_cast<uint16_t>(words[v]));
        }
    } else if constexpr (F == Format::IQ4_XS) {
        const auto high = load_as<uint16_t>(block + 2);
        for (int64_t g = 0; g < 8; ++g)
            scales(g)[lane] = static_cast<uint8_t>((block[4 + g / 2] >> g % 2 * 4 & 15) +
                                                   (high >> 2 * g & 3) * 16 - 32);
    } else if constexpr (traits(F).coded) {
        for (int64_t g = 0; g < 8; ++g)
            scales(g)[lane] = block[2 + g];
    } else {
        for (int64_t g = 0; g < 8; ++g) {
            const GroupParts<uint8_t> group{nullptr, nullptr, scales(g), nullptr};
            const ScaleMin<uint8_t> at = scale_min_at<F>(group, g, lane);
            unpack_scale_min(block + 4, g, *at.scale, *at.min);
        }
    }
    std::memcpy(to.shared + lane * 2, block + d, 2);
    if constexpr (traits(F).has_min)
        std::memcpy(to.shared + 32 + lane * 2, block + dmin, 2);
}

template <Format F>
inline void pack_column_block(const uint8_t *src, int64_t columns, int64_t k, uint8_t *dst) {
    constexpr FormatInfo info = format_info(F);
    const int64_t row_bytes = info.header + k / info.block_values * info.block_bytes;
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
                    src + lane * row_bytes + info.header + g / kGroupsPerBlock * info.block_bytes;
                const int64_t part = g % kGroupsPerBlock;
                uint8_t values[kGroup];
                read_group<F>(block, part, values);
                const GroupParts<uint8_t> to = group_at<F>(dst, g);
                write_lane<F>(values, lane, to.quants, to.high);
                if constexpr (t.k_quant) {
                    if (part == 0)
                        pack_block_scales<F>(block, lane, to);
                } else if constexpr (F == Format::MXFP4) {
                    to.scales[lane] = block[0];
                } else if constexpr (F == Format::NVFP4) {
                    to.scales[lane] = block[0];
                    to.scales[kLanes + lane] = block[1];
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
        if constexpr (F == Format::NVFP4) // 2^8: e4m3_to_half; ½: the doubled numbers
            for (int64_t lane = 0; lane < columns; ++lane)
                store_as(dst + lane * 4, load_as<float>(src + lane * row_bytes) * 128);
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
            if constexpr (t.coded) {
                constexpr Codebook kCodes = codebook<F>();
                for (int64_t i = 0; i < kGroup; ++i) {
                    y[i] = code_scale<F>(from, lane, i / 16) *
                           static_cast<float>(kCodes.numbers[values[i]] - t.zero);
                    if constexpr (t.scaled_last)
                        y[i] *= load_as<float>(block + lane * 4);
                }
            } else if constexpr (t.split) {
                const float d = half_to_float(load_as<uint16_t>(from.shared + lane * 2));
                for (int64_t i = 0; i < kGroup; ++i) {
                    const SplitScale s = split_scale_at<F>(from, g, lane, i / 16);
                    y[i] = d * static_cast<float>(s.scale) * static_cast<float>(values[i] - t.zero);
                    if constexpr (t.has_min)
                        y[i] -= half_to_float(load_as<uint16_t>(from.shared + 32 + lane * 2)) *
                                static_cast<float>(s.min);
                }
            } else if constexpr (F == Format::Q6_K) {
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

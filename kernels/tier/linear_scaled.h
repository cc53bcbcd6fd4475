// How a packed matrix of E4M3 numbers lies in memory; the same in every tier.
//
// A column block (linear_layout.h) is, one after another:
//
//   scales   for each group of `group` inputs 16 fp32 scales, times 2^8 (e4m3_to_half)
//   codes    for each input 16 bytes, as stored
//
// It is summed like floats, without rounding activations: for each group in order
//
//   product += number · 2^−8 · x       (each input in order; fused)
//   sum += product · scale             (the group; fused)
#pragma once

#include "linear_layout.h"

namespace octavo {
namespace {

// Bytes before the codes.
inline int64_t scaled_codes(int64_t k, int64_t group) {
    return (k + group - 1) / group * kLine;
}

inline int64_t scaled_block_bytes(int64_t k, int64_t group) {
    return scaled_codes(k, group) + round_up(k * kLanes, kLine);
}

inline void pack_scaled_block(const uint8_t *src, int64_t columns, int64_t k, int64_t group,
                              uint8_t *dst) {
    const int64_t groups = (k + group - 1) / group, row = row_bytes(Format::E4M3, k, group);
    std::memset(dst, 0, static_cast<size_t>(scaled_block_bytes(k, group)));
    uint8_t *codes = dst + scaled_codes(k, group);
    for (int64_t lane = 0; lane < columns; ++lane) {
        const uint8_t *from = src + lane * row;
        for (int64_t g = 0; g < groups; ++g)
            store_as(dst + g * kLine + lane * 4, load_as<float>(from + g * 4) * 256);
        for (int64_t i = 0; i < k; ++i)
            codes[i * kLanes + lane] = from[groups * 4 + i];
    }
}

inline void dequantize_scaled_lane(const uint8_t *block, int64_t lane, int64_t k, int64_t group,
                                   float *out) {
    const uint8_t *codes = block + scaled_codes(k, group);
    for (int64_t i = 0; i < k; ++i)
        out[i] = half_to_float(e4m3_to_half(codes[i * kLanes + lane])) *
                 load_as<float>(block + i / group * kLine + lane * 4);
}

} // namespace
} // namespace octavo

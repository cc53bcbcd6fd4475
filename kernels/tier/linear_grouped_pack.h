// Repacking of grouped rows into column blocks, and back to numbers (linear_grouped.h).
#pragma once

#include "linear_grouped.h"
#include "linear_pack.h"

namespace octavo {
namespace {

template <Format F>
constexpr int kBitsOf = F == Format::I8   ? 8
                        : F == Format::I4 ? 4
                        : F == Format::I3 ? 3
                                          : 2;

// The bits of the largest magnitude of a row's scales, leaving out those of groups that are all
// zero: files give these any scale, and the largest of a column says how exactly the others are
// held.
template <Format F>
inline uint32_t largest_used_scale(const uint8_t *row, int64_t k, int64_t group) {
    const int64_t count = (k + group - 1) / group;
    const uint8_t *zeros = row + 4 * count, *stream = zeros + count;
    const auto is_zero = [&](int64_t i) {
        const int64_t end = (i + 1) * group < k ? (i + 1) * group : k;
        for (int64_t at = i * group; at < end; at += kGroup) {
            uint8_t values[kGroup];
            read_stream<kBitsOf<F>>(stream + at / kGroup * format_info(F).block_bytes, values);
            for (const uint8_t value : values)
                if (value != zeros[i])
                    return false;
        }
        return true;
    };
    uint32_t largest = 0; // magnitudes' bits order like the numbers, NaN above all
    for (int64_t i = 0; i < count; ++i) {
        const uint32_t bits = load_as<uint32_t>(row + i * 4) & 0x7fffffffu;
        if (bits > largest && !is_zero(i))
            largest = bits;
    }
    return largest;
}

template <Format F>
inline void pack_grouped_block(const uint8_t *src, int64_t columns, int64_t k, int64_t group,
                               uint8_t *dst) {
    constexpr int64_t kStreamBytes = format_info(F).block_bytes;
    const int64_t count = (k + group - 1) / group, row = row_bytes(F, k, group);
    uint8_t *quants = dst + records_bytes(k, group);
    // A padding column has scale zero and the neutral zero.
    std::memset(dst, 0, static_cast<size_t>(grouped_block_bytes<F>(k, group)));
    for (int64_t i = 0; i < count; ++i)
        std::memset(dst + kLine + i * kRecord + 2 * kLanes, kCentreOf<F>, kLanes);
    for (int64_t lane = 0; lane < kLanes; ++lane) {
        store_as(dst + lane * 4, 1.0f);
        if (lane >= columns)
            continue;
        const uint8_t *scales = src + lane * row, *zeros = scales + 4 * count;
        const uint32_t largest = largest_used_scale<F>(scales, k, group);
        const float up = column_scale(load_as<float>(&largest));
        store_as(dst + lane * 4, up);
        for (int64_t i = 0; i < count; ++i) {
            uint8_t *record = dst + kLine + i * kRecord;
            const bool used = (load_as<uint32_t>(scales + i * 4) & 0x7fffffffu) <= largest;
            const float scale = used ? load_as<float>(scales + i * 4) : 0.0f;
            store_as(record + lane * 2, float_to_half(scale * up));
            record[2 * kLanes + lane] = zeros[i];
        }
        const uint8_t *stream = zeros + count;
        for (int64_t g = 0; g < k / kGroup; ++g) {
            uint8_t values[kGroup];
            read_stream<kBitsOf<F>>(stream + g * kStreamBytes, values);
            write_lane<kQuantsOf<F>>(values, lane, quants + g * kQuantsStep<F>, nullptr);
        }
    }
}

template <Format F>
inline void dequantize_grouped_lane(const uint8_t *block, int64_t lane, int64_t k, int64_t group,
                                    float *out) {
    const uint8_t *quants = block + records_bytes(k, group);
    const float down = 1 / load_as<float>(block + lane * 4);
    Records records(block, group);
    for (int64_t g = 0; g < k / kGroup; ++g) {
        const uint8_t *record = records.next();
        const float scale = half_to_float(load_as<uint16_t>(record + lane * 2)) * down;
        const int zero = record[2 * kLanes + lane];
        uint8_t values[kGroup];
        read_lane<kQuantsOf<F>>(quants + g * kQuantsStep<F>, nullptr, lane, values);
        for (int64_t i = 0; i < kGroup; ++i)
            out[g * kGroup + i] = scale * static_cast<float>(values[i] - zero);
    }
}

} // namespace
} // namespace octavo

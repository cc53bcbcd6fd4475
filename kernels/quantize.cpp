#include "quantize.h"

#include "formats.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace octavo {
namespace {

constexpr int64_t kBlock = 32;
constexpr int64_t kLanes = 8; // that loops go by, so that compilers find vectors in them

// x rounded to an integer, ties to even, for |x| < 2^22: in vectors on any processor.
inline float round_even(float x) {
    return (x + 0x1.8p23f) - 0x1.8p23f;
}

// The nearest number of 11 significant bits, ties to even.
float round_scale(float scale) {
    const auto bits = load_as<uint32_t>(&scale);
    const uint32_t rounded = (bits + 0xfffu + (bits >> 13 & 1u)) & ~0x1fffu;
    return load_as<float>(&rounded);
}

void to_floats(Format source, const std::byte *from, int64_t count, float *to) {
    const auto *halves = reinterpret_cast<const uint8_t *>(from);
    if (source == Format::F32)
        std::memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
    else if (source == Format::BF16)
        for (int64_t i = 0; i < count; ++i)
            to[i] = bfloat_to_float(load_as<uint16_t>(halves + 2 * i));
    else
        for (int64_t i = 0; i < count; ++i)
            to[i] = half_to_float(load_as<uint16_t>(halves + 2 * i));
}

// Of whole blocks of 32.
bool all_finite(const float *x, int64_t count) {
    uint32_t largest[kLanes] = {};
    for (int64_t i = 0; i < count; i += kLanes)
        for (int64_t j = 0; j < kLanes; ++j) {
            const uint32_t magnitude = load_as<uint32_t>(x + i + j) << 1 >> 24; // the exponent
            largest[j] = std::max(largest[j], magnitude);
        }
    return *std::max_element(largest, largest + kLanes) < 255;
}

struct Range {
    float low, high;

    float magnitude() const { return std::max(std::fabs(low), std::fabs(high)); }
};

Range range_of(const float *x, int64_t count) {
    float low[kLanes], high[kLanes];
    for (int64_t j = 0; j < kLanes; ++j)
        low[j] = high[j] = x[j];
    for (int64_t i = 0; i < count; i += kLanes)
        for (int64_t j = 0; j < kLanes; ++j) {
            low[j] = x[i + j] < low[j] ? x[i + j] : low[j];
            high[j] = x[i + j] > high[j] ? x[i + j] : high[j];
        }
    return {*std::min_element(low, low + kLanes), *std::max_element(high, high + kLanes)};
}

// 32 numbers of 4 or 8 bits as a stream.
void write_stream(int bits, const uint8_t *numbers, uint8_t *to) {
    if (bits == 8)
        std::memcpy(to, numbers, kBlock);
    else
        for (int64_t i = 0; i < kBlock / 2; ++i)
            to[i] = static_cast<uint8_t>(numbers[2 * i] | numbers[2 * i + 1] << 4);
}

// A row; whether its scales are finite.
bool quantize_grouped(const float *x, int64_t k, int bits, int64_t group, bool symmetric,
                      uint8_t *dst) {
    const auto levels = static_cast<float>((1 << bits) - 1);
    const int64_t groups = (k + group - 1) / group;
    uint8_t *zeros = dst + 4 * groups, *stream = zeros + groups;
    for (int64_t g = 0; g < groups; ++g) {
        const int64_t begin = g * group, end = std::min(begin + group, k);
        const Range range = range_of(x + begin, end - begin);
        float zero = static_cast<float>(1 << (bits - 1)), scale;
        if (symmetric) {
            scale = round_scale(2.0f * range.magnitude() / levels);
        } else {
            const float low = std::min(range.low, 0.0f), high = std::max(range.high, 0.0f);
            scale = round_scale((high - low) / levels);
            if (scale > 0)
                zero = std::clamp(round_even(-low / scale), 0.0f, levels);
        }
        if (!std::isfinite(scale))
            return false;
        store_as(dst + 4 * g, scale);
        zeros[g] = static_cast<uint8_t>(zero);
        const float divisor = scale > 0 ? scale : 1.0f;
        for (int64_t i = begin; i < end; i += kBlock, stream += 4 * bits) {
            uint8_t numbers[kBlock];
            for (int64_t j = 0; j < kBlock; ++j) {
                const float at = x[i + j] / divisor + zero;
                const float clipped = at < 0.0f ? 0.0f : at > levels ? levels : at;
                numbers[j] = static_cast<uint8_t>(static_cast<int>(round_even(clipped)));
            }
            write_stream(bits, numbers, stream);
        }
    }
    return true;
}

} // namespace

bool can_quantize(Format source, Format format) {
    if (source != Format::F32 && source != Format::F16 && source != Format::BF16)
        return false;
    return format == Format::I4 || format == Format::I8;
}

int64_t quantize_rows(Format source, const std::byte *src, int64_t rows, int64_t k, Format format,
                      int64_t group, bool symmetric, std::byte *dst) {
    const int bits = static_cast<int>(format_info(format).block_bytes / 4);
    const int64_t from = row_bytes(source, k, 0), to = row_bytes(format, k, group);
    std::vector<float> x(static_cast<size_t>(k));
    std::vector<uint8_t> row(static_cast<size_t>(to));
    for (int64_t r = 0; r < rows; ++r) {
        to_floats(source, src + r * from, k, x.data());
        if (!all_finite(x.data(), k) ||
            !quantize_grouped(x.data(), k, bits, group, symmetric, row.data()))
            return r;
        std::memcpy(dst + r * to, row.data(), static_cast<size_t>(to));
    }
    return -1;
}

} // namespace octavo

// The weight formats: sizes, and 16-bit floats.
//
// Included by code that is compiled once a tier, so everything here has internal linkage: a shared
// inline function could be linked in its AVX-512 form into the generic tier.
#pragma once

#include "linear.h"

#include <cstdint>
#include <cstring>

namespace octavo {

struct FormatInfo {
    int64_t block_values; // k must be a multiple of this
    int64_t block_bytes;
    bool quantized;       // activations are prepared as 8-bit groups rather than floats
    bool grouped = false; // the block is of numbers only: scales and zeros are the row's
    bool scaled = false;  // the block is of numbers only: scales are the row's
    int64_t header = 0;   // bytes a row begins with
};

[[maybe_unused]] static constexpr FormatInfo format_info(Format format) {
    switch (format) {
    case Format::F32:
        return {1, 4, false};
    case Format::F16:
    case Format::BF16:
        return {1, 2, false};
    case Format::Q4_0:
        return {32, 18, true};
    case Format::Q4_1:
        return {32, 20, true};
    case Format::Q5_0:
        return {32, 22, true};
    case Format::Q5_1:
        return {32, 24, true};
    case Format::Q8_0:
        return {32, 34, true};
    case Format::Q2_K:
        return {256, 84, true};
    case Format::Q3_K:
        return {256, 110, true};
    case Format::Q4_K:
        return {256, 144, true};
    case Format::Q5_K:
        return {256, 176, true};
    case Format::Q6_K:
        return {256, 210, true};
    case Format::IQ4_NL:
        return {32, 18, true};
    case Format::IQ4_XS:
        return {256, 136, true};
    case Format::MXFP4:
        return {32, 17, true};
    case Format::I2:
        return {32, 8, true, true};
    case Format::I3:
        return {32, 12, true, true};
    case Format::I4:
        return {32, 16, true, true};
    case Format::I8:
        return {32, 32, true, true};
    case Format::T3_IQ1:
    case Format::T3_IQ2:
        return {256, 106, true};
    case Format::T4_IQ3_XXS:
    case Format::T4_IQ3_S:
        return {256, 138, true};
    case Format::NVFP4:
        return {32, 18, true, false, false, 4};
    case Format::E4M3:
        return {1, 1, false, false, true};
    }
    return {1, 0, false};
}

// What groups' inputs must be a multiple of; 0 where a format has no groups of its own.
[[maybe_unused]] static constexpr int64_t group_step(Format format) {
    const FormatInfo info = format_info(format);
    return info.grouped ? info.block_values : info.scaled ? 16 : 0;
}

// Bytes that k weights take as they are handed over; `group` is of the formats that have groups.
[[maybe_unused]] static constexpr int64_t row_bytes(Format format, int64_t k, int64_t group) {
    const FormatInfo info = format_info(format);
    const int64_t groups = info.grouped || info.scaled ? (k + group - 1) / group : 0;
    return info.header + groups * (info.grouped ? 5 : 4) + k / info.block_values * info.block_bytes;
}

[[maybe_unused]] static const char *format_name(Format format) {
    switch (format) {
    case Format::F32:
        return "F32";
    case Format::F16:
        return "F16";
    case Format::BF16:
        return "BF16";
    case Format::Q8_0:
        return "Q8_0";
    case Format::Q4_0:
        return "Q4_0";
    case Format::Q4_1:
        return "Q4_1";
    case Format::Q5_0:
        return "Q5_0";
    case Format::Q5_1:
        return "Q5_1";
    case Format::Q2_K:
        return "Q2_K";
    case Format::Q3_K:
        return "Q3_K";
    case Format::Q4_K:
        return "Q4_K";
    case Format::Q5_K:
        return "Q5_K";
    case Format::Q6_K:
        return "Q6_K";
    case Format::IQ4_NL:
        return "IQ4_NL";
    case Format::IQ4_XS:
        return "IQ4_XS";
    case Format::MXFP4:
        return "MXFP4";
    case Format::I2:
        return "I2";
    case Format::I3:
        return "I3";
    case Format::I4:
        return "I4";
    case Format::I8:
        return "I8";
    case Format::T3_IQ1:
        return "T3_IQ1";
    case Format::T3_IQ2:
        return "T3_IQ2";
    case Format::T4_IQ3_XXS:
        return "T4_IQ3_XXS";
    case Format::T4_IQ3_S:
        return "T4_IQ3_S";
    case Format::NVFP4:
        return "NVFP4";
    case Format::E4M3:
        return "E4M3";
    }
    return "unknown";
}

template <class T> static inline T load_as(const void *from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <class T> static inline void store_as(void *to, T value) {
    std::memcpy(to, &value, sizeof value);
}

// IEEE binary16 to binary32, exact, subnormals, infinities and NaN included.
[[maybe_unused]] static inline float half_to_float(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    uint32_t magnitude = static_cast<uint32_t>(half & 0x7fffu) << 13;
    // Rebias by a multiplication, which normalizes subnormals too; infinity and NaN come out as
    // 2^16 and above, and then need the largest exponent.
    float value = load_as<float>(&magnitude) * 0x1p112f;
    magnitude = load_as<uint32_t>(&value);
    if ((half & 0x7c00u) == 0x7c00u)
        magnitude |= 0x7f800000u;
    magnitude |= sign;
    return load_as<float>(&magnitude);
}

// The binary16 that is 2^−8 of an E4M3 number: exact, subnormals included.
[[maybe_unused]] static inline uint16_t e4m3_to_half(uint8_t code) {
    return static_cast<uint16_t>((code & 0x80) << 8 | (code & 0x7f) << 7);
}

// The nearest binary16, ties to even; NaN stays one.
[[maybe_unused]] static inline uint16_t float_to_half(float value) {
    const auto bits = load_as<uint32_t>(&value);
    const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u)
        return sign | 0x7e00;
    if (magnitude >= 0x477ff000u) // rounds to 2^16
        return sign | 0x7c00;
    if (magnitude < 0x38800000u) {
        // Beside 1/2, a float's last bit is 2^-24, as a subnormal's.
        const float shifted = load_as<float>(&magnitude) + 0.5f;
        return static_cast<uint16_t>(sign | (load_as<uint32_t>(&shifted) - 0x3f000000u));
    }
    const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
    return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

[[maybe_unused]] static inline float bfloat_to_float(uint16_t bfloat) {
    const uint32_t bits = static_cast<uint32_t>(bfloat) << 16;
    return load_as<float>(&bits);
}

// Half of 2^(e − 127), exact: MXFP4's scales, whose numbers are held doubled. Without branches.
[[maybe_unused]] static inline float half_power_of_two(uint8_t e) {
    const int32_t normal = static_cast<int32_t>((e - 1u) << 23); // negative for 0
    const int32_t subnormal = (e > 0 ? 2 : 1) << 21;
    const int32_t bits = normal > subnormal ? normal : subnormal;
    return load_as<float>(&bits);
}

} // namespace octavo

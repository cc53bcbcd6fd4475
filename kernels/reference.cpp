#include "reference.h"

#include "formats.h"

#include <algorithm>
#include <cmath>

namespace octavo::reference {
namespace {

float half(const uint8_t *from) {
    const auto bits = load_as<uint16_t>(from);
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    float value = 0;
    if (exponent == 0)
        value = std::ldexp(static_cast<float>(fraction), -24);
    else if (exponent < 31)
        value = std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
    else
        value = fraction == 0 ? INFINITY : NAN;
    return bits & 0x8000 ? -value : value;
}

// Q4_0, Q4_1, Q5_0, Q5_1: fp16 d, fp16 m (the _1 formats), 4 bytes of fifth bits (the Q5 formats),
// 16 bytes of nibbles. w = d · (q − 8 or 16), or d · q + m.
void dequantize_32(const uint8_t *block, bool with_min, bool with_fifth, float *out) {
    const float d = half(block);
    const float m = with_min ? half(block + 2) : 0;
    const uint8_t *at = block + (with_min ? 4 : 2);
    uint32_t fifth = 0;
    if (with_fifth) {
        fifth = load_as<uint32_t>(at);
        at += 4;
    }
    const int zero = with_min ? 0 : with_fifth ? 16 : 8;
    for (int i = 0; i < 32; ++i) {
        int q = i < 16 ? at[i] & 15 : at[i - 16] >> 4;
        if (fifth >> i & 1)
            q += 16;
        out[i] = static_cast<float>(q - zero) * d;
        if (with_min)
            out[i] += m;
    }
}

// Q4_K, Q5_K: fp16 d, fp16 dmin, 12 bytes of eight 6-bit scales and eight mins, 32 bytes of fifth
// bits (Q5_K), 128 bytes of nibbles. w = d · scale · q − dmin · min.
void dequantize_k(const uint8_t *block, bool with_fifth, float *out) {
    const float d = half(block), dmin = half(block + 2);
    const uint8_t *packed = block + 4;
    const uint8_t *fifth = block + 16;
    const uint8_t *nibbles = block + (with_fifth ? 48 : 16);
    for (int i = 0; i < 256; ++i) {
        const int group = i / 32;
        int scale, min;
        if (group < 4) {
            scale = packed[group] % 64;
            min = packed[group + 4] % 64;
        } else {
            scale = packed[group + 4] % 16 + packed[group - 4] / 64 * 16;
            min = packed[group + 4] / 16 + packed[group] / 64 * 16;
        }
        const uint8_t byte = nibbles[i / 64 * 32 + i % 32];
        int q = group % 2 == 0 ? byte % 16 : byte / 16;
        if (with_fifth && (fifth[i % 32] >> group & 1))
            q += 16;
        out[i] =
            d * static_cast<float>(scale) * static_cast<float>(q) - dmin * static_cast<float>(min);
    }
}

// Q6_K: 128 bytes of low nibbles, 64 bytes of upper pairs of bits, 16 int8 scales, fp16 d.
// w = d · scale · (q − 32).
void dequantize_6k(const uint8_t *block, float *out) {
    const float d = half(block + 208);
    for (int i = 0; i < 256; ++i) {
        const int in_half = i % 128, part = in_half / 32;
        const uint8_t low = block[i / 128 * 64 + in_half % 64];
        const uint8_t high = block[128 + i / 128 * 32 + i % 32];
        const int q = (part < 2 ? low % 16 : low / 16) + (high >> 2 * part & 3) * 16;
        const auto scale = static_cast<int8_t>(block[192 + i / 16]);
        out[i] = d * static_cast<float>(scale) * static_cast<float>(q - 32);
    }
}

// Q2_K: 16 bytes of a 4-bit scale and, above it, a 4-bit min, 64 bytes of pairs of bits, fp16 d,
// fp16 dmin. w = d · scale · q − dmin · min.
void dequantize_2k(const uint8_t *block, float *out) {
    const float d = half(block + 80), dmin = half(block + 82);
    for (int i = 0; i < 256; ++i) {
        const int q = block[16 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3;
        const uint8_t packed = block[i / 16];
        out[i] = d * static_cast<float>(packed % 16) * static_cast<float>(q) -
                 dmin * static_cast<float>(packed / 16);
    }
}

// Q3_K: 32 bytes of third bits, 64 bytes of pairs of bits, 12 bytes of sixteen 6-bit scales, fp16
// d. w = d · (scale − 32) · (q − 4).
void dequantize_3k(const uint8_t *block, float *out) {
    const float d = half(block + 108);
    const uint8_t *packed = block + 96;
    for (int i = 0; i < 256; ++i) {
        int q = block[32 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3;
        if (block[i % 32] >> i / 32 & 1)
            q += 4;
        const int group = i / 16;
        const int scale = (packed[group % 8] >> group / 8 * 4 & 15) +
                          (packed[8 + group % 4] >> group / 4 * 2 & 3) * 16;
        out[i] = d * static_cast<float>(scale - 32) * static_cast<float>(q - 4);
    }
}

// The numbers of IQ4_NL and IQ4_XS, and MXFP4's (E2M1, doubled), by their 4-bit codes.
constexpr int kNonLinear[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                1,    13,   25,  38,  53,  69,  89,  113};
constexpr int kDoubledE2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// 16 bytes of codes: the first 16 in the low nibbles.
void dequantize_codes(const uint8_t *codes, const int *numbers, float d, float *out) {
    for (int i = 0; i < 32; ++i)
        out[i] = d * static_cast<float>(numbers[i < 16 ? codes[i] % 16 : codes[i - 16] / 16]);
}

// IQ4_XS: fp16 d, 2 bytes of eight scales' upper pairs of bits, 4 bytes of their nibbles, 128 bytes
// of codes. w = d · (scale − 32) · number.
void dequantize_4xs(const uint8_t *block, float *out) {
    const auto high = load_as<uint16_t>(block + 2);
    for (int g = 0; g < 8; ++g) {
        const int scale = (block[4 + g / 2] >> g % 2 * 4 & 15) + (high >> 2 * g & 3) * 16;
        dequantize_codes(block + 8 + g * 16, kNonLinear,
                         half(block) * static_cast<float>(scale - 32), out + g * 32);
    }
}

// The number at a place of a stream of `bits` bits each, the lowest first.
int number_at(const uint8_t *stream, int bits, int64_t i) {
    int q = 0;
    for (int b = 0; b < bits; ++b) {
        const int64_t at = i * bits + b;
        q |= (stream[at / 8] >> at % 8 & 1) << b;
    }
    return q;
}

// T3 and T4, in eighths, halves and ones (linear.h).
constexpr int kIq1[8] = {-7, 1, 9, 0, -9, -1, 7, 0};
constexpr int kIq2[8] = {8, 25, 43, 0, -8, -25, -43, 0};
constexpr int kIq3Xxs[16] = {2, 6, 10, 14, 18, 22, 26, 31, -2, -6, -10, -14, -18, -22, -26, -31};
constexpr int kIq3S[16] = {1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15};

void dequantize_t3(const uint8_t *block, const int *numbers, float *out) {
    for (int i = 0; i < 256; ++i) {
        const uint8_t byte = block[2 + i / 32];
        const int scale = 2 * (i % 32 < 16 ? byte % 16 : byte / 16) + 1;
        const int number = scale * numbers[number_at(block + 10, 3, i)];
        out[i] = half(block) * static_cast<float>(number) / 8;
    }
}

void dequantize_t4(const uint8_t *block, const int *numbers, int parts, float *out) {
    for (int i = 0; i < 256; ++i) {
        const auto scale = static_cast<int8_t>(block[2 + i / 32]);
        const int number = numbers[number_at(block + 10, 4, i)];
        out[i] = half(block) * static_cast<float>(scale) * static_cast<float>(number) /
                 static_cast<float>(parts);
    }
}

float e4m3(uint8_t code) {
    const int exponent = code >> 3 & 15, fraction = code & 7;
    const float value = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -9)
                                      : std::ldexp(static_cast<float>(8 + fraction), exponent - 10);
    return code & 0x80 ? -value : value;
}

void dequantize_nvfp4(const uint8_t *block, float scale, float *out) {
    for (int i = 0; i < 32; ++i) {
        const int number = kDoubledE2M1[number_at(block + 2, 4, i)];
        out[i] = e4m3(block[i / 16]) * static_cast<float>(number) / 2 * scale;
    }
}

// fp32 scales, zeros of a byte each, then the numbers, the lowest bit first.
void dequantize_grouped(const uint8_t *row, int bits, int64_t k, int64_t group, float *out) {
    int64_t groups = 0;
    while (groups * group < k)
        ++groups;
    const uint8_t *zeros = row + 4 * groups, *stream = zeros + groups;
    for (int64_t i = 0; i < k; ++i) {
        const auto scale = load_as<float>(row + i / group * 4);
        out[i] = scale * static_cast<float>(number_at(stream, bits, i) - zeros[i / group]);
    }
}

} // namespace

size_t row_bytes(Format format, int64_t k, int64_t group) {
    return static_cast<size_t>(octavo::row_bytes(format, k, group));
}

void dequantize(Format format, const std::byte *row, int64_t k, float *out, int64_t group) {
    const FormatInfo info = format_info(format);
    if (info.grouped) {
        const int bits = static_cast<int>(format) - 1000;
        dequantize_grouped(reinterpret_cast<const uint8_t *>(row), bits, k, group, out);
        return;
    }
    const auto *block = reinterpret_cast<const uint8_t *>(row);
    if (format == Format::E4M3) {
        const uint8_t *codes = block + (k + group - 1) / group * 4;
        for (int64_t i = 0; i < k; ++i)
            out[i] = e4m3(codes[i]) * load_as<float>(block + i / group * 4);
        return;
    }
    block += info.header;
    for (int64_t i = 0; i < k; i += info.block_values, block += info.block_bytes) {
        float *to = out + i;
        switch (format) {
        case Format::F32:
            *to = load_as<float>(block);
            break;
        case Format::F16:
            *to = half(block);
            break;
        case Format::BF16:
            *to = bfloat_to_float(load_as<uint16_t>(block));
            break;
        case Format::Q4_0:
            dequantize_32(block, false, false, to);
            break;
        case Format::Q4_1:
            dequantize_32(block, true, false, to);
            break;
        case Format::Q5_0:
            dequantize_32(block, false, true, to);
            break;
        case Format::Q5_1:
            dequantize_32(block, true, true, to);
            break;
        case Format::Q8_0:
            for (int j = 0; j < 32; ++j)
                to[j] = static_cast<float>(static_cast<int8_t>(block[2 + j])) * half(block);
            break;
        case Format::Q4_K:
            dequantize_k(block, false, to);
            break;
        case Format::Q5_K:
            dequantize_k(block, true, to);
            break;
        case Format::Q6_K:
            dequantize_6k(block, to);
            break;
        case Format::Q2_K:
            dequantize_2k(block, to);
            break;
        case Format::Q3_K:
            dequantize_3k(block, to);
            break;
        case Format::IQ4_NL:
            dequantize_codes(block + 2, kNonLinear, half(block), to);
            break;
        case Format::IQ4_XS:
            dequantize_4xs(block, to);
            break;
        case Format::MXFP4:
            dequantize_codes(block + 1, kDoubledE2M1, std::ldexp(1.0f, block[0] - 128), to);
            break;
        case Format::T3_IQ1:
            dequantize_t3(block, kIq1, to);
            break;
        case Format::T3_IQ2:
            dequantize_t3(block, kIq2, to);
            break;
        case Format::T4_IQ3_XXS:
            dequantize_t4(block, kIq3Xxs, 2, to);
            break;
        case Format::T4_IQ3_S:
            dequantize_t4(block, kIq3S, 1, to);
            break;
        case Format::NVFP4:
            dequantize_nvfp4(block, load_as<float>(row), to);
            break;
        case Format::I2:
        case Format::I3:
        case Format::I4:
        case Format::I8:
        case Format::E4M3:
            break;
        }
    }
}

void round_activations(const float *x, int64_t k, float *out) {
    for (int64_t g = 0; g < k; g += 32) {
        float max = 0;
        for (int64_t i = g; i < g + 32; ++i)
            max = std::max(max, std::fabs(x[i]));
        for (int64_t i = g; i < g + 32; ++i)
            out[i] = max >= 0x1p-120f ? std::nearbyint(x[i] * (127.0f / max)) * (max / 127.0f) : 0;
    }
}

void matmul(const float *x, const float *w, int64_t rows, int64_t n, int64_t k, double *out,
            double *magnitude) {
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < n; ++c) {
            double sum = 0, absolute = 0;
            for (int64_t i = 0; i < k; ++i) {
                const double product =
                    static_cast<double>(x[r * k + i]) * static_cast<double>(w[c * k + i]);
                sum += product;
                absolute += std::fabs(product);
            }
            out[r * n + c] = sum;
            if (magnitude != nullptr)
                magnitude[r * n + c] = absolute;
        }
}

} // namespace octavo::reference

// Tests of the linear kernels of every tier this CPU has, against the scalar references and against
// themselves: the bits of an element must not depend on what is computed beside it.
//
//   linear_test [cases]     random cases for each format and tier (default 6)
#include "formats.h"
#include "reference.h"
#include "tier.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

namespace octavo {
namespace {

constexpr Format kFormats[] = {Format::F32,    Format::F16,    Format::BF16,       Format::Q8_0,
                               Format::Q4_0,   Format::Q4_1,   Format::Q5_0,       Format::Q5_1,
                               Format::Q4_K,   Format::Q5_K,   Format::Q6_K,       Format::Q2_K,
                               Format::Q3_K,   Format::IQ4_NL, Format::IQ4_XS,     Format::MXFP4,
                               Format::I2,     Format::I3,     Format::I4,         Format::I8,
                               Format::T3_IQ1, Format::T3_IQ2, Format::T4_IQ3_XXS, Format::T4_IQ3_S,
                               Format::NVFP4,  Format::E4M3};

int failures = 0;

#define CHECK(condition, ...)                                                                      \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            std::printf("FAILED %s:%d: %s: ", __FILE__, __LINE__, #condition);                     \
            std::printf(__VA_ARGS__);                                                              \
            std::printf("\n");                                                                     \
            if (++failures > 20)                                                                   \
                std::exit(1);                                                                      \
        }                                                                                          \
    } while (false)

using Rng = std::mt19937_64;

int64_t draw(Rng &rng, int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(rng);
}

float normal(Rng &rng) {
    return std::normal_distribution<float>()(rng);
}

// An aligned allocation of zeros of its exact size, so that a sanitizer sees any access outside it.
struct Buffer {
    explicit Buffer(size_t size)
        : data(static_cast<std::byte *>(
                   std::aligned_alloc(64, std::max<size_t>(64, (size + 63) / 64 * 64))),
               std::free) {
        std::memset(data.get(), 0, size);
    }
    std::unique_ptr<std::byte, void (*)(void *)> data;
};

// A random fp16 number of magnitude about 2^-7, now and then subnormal or zero.
uint16_t random_half(Rng &rng) {
    const auto sign = static_cast<uint16_t>(draw(rng, 0, 1) << 15);
    const auto fraction = static_cast<uint16_t>(draw(rng, 0, 1023));
    const int64_t exponent = draw(rng, 0, 19) == 0 ? 0 : draw(rng, 6, 10);
    return static_cast<uint16_t>(sign | exponent << 10 | fraction);
}

// The zero of symmetric grouped formats.
int centre_of(Format format) {
    return format == Format::I2 ? 1 : format == Format::I3 ? 4 : format == Format::I4 ? 8 : 128;
}

int largest_zero(Format format) {
    return format == Format::I2 ? 4 : format == Format::I3 ? 8 : format == Format::I4 ? 16 : 255;
}

// Rows of a grouped format, with zeros at and between both ends or all in the centre, and scales of
// fp16 or bf16 (now and then negative, subnormal or zero), in any relation.
std::vector<std::byte> random_grouped(Format format, int64_t n, int64_t k, int64_t group,
                                      Rng &rng) {
    const size_t row = reference::row_bytes(format, k, group);
    const int64_t groups = (k + group - 1) / group;
    const bool symmetric = draw(rng, 0, 2) == 0, wide = draw(rng, 0, 1) == 0;
    const int top = largest_zero(format);
    std::vector<std::byte> out(static_cast<size_t>(n) * row);
    for (std::byte &each : out)
        each = static_cast<std::byte>(rng());
    for (int64_t c = 0; c < n; ++c)
        for (int64_t g = 0; g < groups; ++g) {
            std::byte *scales = out.data() + static_cast<size_t>(c) * row;
            const float narrow = bfloat_to_float(
                static_cast<uint16_t>(draw(rng, 0x3b80, 0x3c80) | draw(rng, 0, 1) << 15));
            store_as(scales + g * 4, wide ? half_to_float(random_half(rng)) : narrow);
            const int64_t ends[] = {0, top, top / 2, draw(rng, 0, top)};
            scales[groups * 4 + g] =
                static_cast<std::byte>(symmetric ? centre_of(format) : ends[draw(rng, 0, 3)]);
        }
    return out;
}

// Rows of E4M3 numbers: every one but NaN, scales of both signs.
std::vector<std::byte> random_scaled(int64_t n, int64_t k, int64_t group, Rng &rng) {
    const size_t row = reference::row_bytes(Format::E4M3, k, group);
    const auto groups = static_cast<size_t>((k + group - 1) / group);
    std::vector<std::byte> out(static_cast<size_t>(n) * row);
    for (size_t at = 0; at < out.size(); ++at) {
        const auto code = static_cast<std::byte>(rng());
        out[at] = (code & std::byte{0x7f}) == std::byte{0x7f} ? std::byte{0} : code;
    }
    for (size_t c = 0; c < static_cast<size_t>(n); ++c)
        for (size_t g = 0; g < groups; ++g)
            store_as(out.data() + c * row + g * 4, normal(rng) / 64);
    return out;
}

// Random file blocks: every bit pattern of the quants and packed scales, tame fp16 factors.
std::vector<std::byte> random_matrix(Format format, int64_t n, int64_t k, int64_t group, Rng &rng) {
    const FormatInfo info = format_info(format);
    if (info.grouped)
        return random_grouped(format, n, k, group, rng);
    if (info.scaled)
        return random_scaled(n, k, group, rng);
    const size_t row = reference::row_bytes(format, k);
    const auto header = static_cast<size_t>(info.header);
    std::vector<std::byte> out(static_cast<size_t>(n) * row);
    for (size_t at = 0; at < out.size(); at += static_cast<size_t>(info.block_bytes)) {
        if (at % row == 0 && header > 0) {
            store_as(out.data() + at, normal(rng) / 64);
            at += header;
        }
        std::byte *block = out.data() + at;
        if (format == Format::F32) {
            store_as(block, normal(rng));
            continue;
        }
        if (format == Format::F16) {
            store_as(block, random_half(rng));
            continue;
        }
        if (format == Format::BF16) {
            const float value = normal(rng);
            std::memcpy(block, reinterpret_cast<const std::byte *>(&value) + 2, 2);
            continue;
        }
        for (int64_t i = 0; i < info.block_bytes; ++i)
            block[i] = static_cast<std::byte>(rng());
        if (format == Format::MXFP4) { // an exponent; now and then one that makes a subnormal
            block[0] = static_cast<std::byte>(draw(rng, 0, 19) == 0 ? draw(rng, 0, 2)
                                                                    : draw(rng, 116, 124));
            continue;
        }
        if (format == Format::NVFP4) { // scales of both signs and every size but NaN
            for (int64_t i = 0; i < 2; ++i)
                if ((block[i] & std::byte{0x7f}) == std::byte{0x7f})
                    block[i] = std::byte{0x80};
            continue;
        }
        store_as(block + (format == Format::Q6_K   ? 208
                          : format == Format::Q3_K ? 108
                          : format == Format::Q2_K ? 80
                                                   : 0),
                 random_half(rng));
        if (format == Format::Q2_K)
            store_as(block + 82, random_half(rng));
        if (format == Format::Q4_1 || format == Format::Q5_1 || format == Format::Q4_K ||
            format == Format::Q5_K)
            store_as(block + 2, random_half(rng));
    }
    return out;
}

std::vector<float> random_rows(int64_t rows, int64_t k, Rng &rng) {
    std::vector<float> out(static_cast<size_t>(rows * k));
    for (float &x : out)
        x = normal(rng);
    // Groups of very different size, and some that are all zero or next to nothing.
    for (int64_t i = 0; i < rows * k; i += 32)
        if (draw(rng, 0, 7) == 0) {
            const float factors[] = {0.0f, 1e-42f, 1e-30f, 1e4f, 100.0f};
            const float factor = factors[draw(rng, 0, 4)];
            for (int64_t j = i; j < std::min(i + 32, rows * k); ++j)
                out[static_cast<size_t>(j)] *= factor;
        }
    return out;
}

// A packed matrix and what it was made of.
struct Matrix {
    Matrix(const LinearKernels &kernels, Format format, int64_t n, int64_t k, int64_t group,
           Rng &rng)
        : file(random_matrix(format, n, k, group, rng)),
          buffer(kernels.packed_bytes(format, n, k, group)),
          packed{format, n, k, group, buffer.data.get()} {
        const int64_t blocks = (n + kColumns - 1) / kColumns, middle = draw(rng, 0, blocks);
        std::memset(buffer.data.get(), 0xff, kernels.packed_bytes(format, n, k, group));
        kernels.pack(format, file.data(), n, k, group, buffer.data.get(), middle, blocks);
        kernels.pack(format, file.data(), n, k, group, buffer.data.get(), 0, middle);
    }

    std::vector<float> weights() const {
        std::vector<float> out(static_cast<size_t>(packed.n * packed.k));
        for (int64_t c = 0; c < packed.n; ++c)
            reference::dequantize(packed.format, row(c), packed.k, out.data() + c * packed.k,
                                  packed.group);
        return out;
    }

    const std::byte *row(int64_t c) const {
        return file.data() +
               static_cast<size_t>(c) * reference::row_bytes(packed.format, packed.k, packed.group);
    }

    std::vector<std::byte> file;
    Buffer buffer;
    PackedMatrix packed;
};

Buffer prepared(const LinearKernels &kernels, Format format, const std::vector<float> &x,
                int64_t rows, int64_t k) {
    Buffer out(kernels.activation_bytes(format, rows, k));
    kernels.prepare(format, x.data(), k, rows, k, out.data.get(), 0, rows);
    return out;
}

// The product, one row and one column block at a time: what every other way must equal.
std::vector<float> one_by_one(const LinearKernels &kernels, const Matrix &m,
                              const std::byte *activations, int64_t rows) {
    std::vector<float> out(static_cast<size_t>(rows * m.packed.n));
    const int64_t blocks = (m.packed.n + kColumns - 1) / kColumns;
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t b = 0; b < blocks; ++b)
            kernels.matmul(m.packed, activations, rows, r, r + 1, b, b + 1, out.data(), m.packed.n,
                           false);
    return out;
}

bool same_bits(const float *a, const float *b, size_t count) {
    return std::memcmp(a, b, count * sizeof(float)) == 0;
}

struct Shape {
    int64_t rows, n, k, group = 0;
};

Shape random_shape(Format format, Rng &rng) {
    const int64_t ns[] = {1, 15, 16, 17, 48, 71, 130, 200, 576};
    Shape s{draw(rng, 1, 33), ns[draw(rng, 0, 8)], 0};
    const int64_t block = std::max<int64_t>(format_info(format).block_values, 1);
    s.k = block * draw(rng, 1, block == 1 ? 300 : block == 32 ? 24 : 4);
    const int64_t groups[] = {32, 64, 96, 128, 256, s.k, s.k + 32};
    const int64_t step = group_step(format);
    if (step > 0)
        s.group = (groups[draw(rng, 0, 6)] + step - 1) / step * step;
    return s;
}

void test_dequantize(const LinearKernels &kernels, const Matrix &m) {
    const std::vector<float> expected = m.weights();
    std::vector<float> row(static_cast<size_t>(m.packed.k));
    for (int64_t c = 0; c < m.packed.n; ++c) {
        kernels.dequantize_row(m.packed, c, row.data());
        CHECK(same_bits(row.data(), expected.data() + c * m.packed.k, row.size()),
              "%s row %ld of %ld x %ld", format_name(m.packed.format), c, m.packed.n, m.packed.k);
    }
}

bool is_fixed(Format format) {
    return format == Format::Q4_0 || format == Format::Q4_1 || format == Format::Q4_K ||
           format == Format::I2 || format == Format::I3 || format == Format::I4;
}

// A 4-bit group's dequantized weights if all its quants were q.
float with_quants(Format format, const std::byte *block, int64_t part, int q) {
    std::vector<std::byte> copy(block, block + format_info(format).block_bytes);
    const size_t header = format == Format::Q4_0 ? 2 : format == Format::Q4_1 ? 4 : 16;
    for (size_t i = header; i < copy.size(); ++i)
        copy[i] = static_cast<std::byte>(q * 17);
    std::vector<float> out(static_cast<size_t>(format_info(format).block_values));
    reference::dequantize(format, copy.data(), format_info(format).block_values, out.data());
    return out[static_cast<size_t>(part * 32)];
}

// How the kernels take group g of column c apart: w = d (q - its centre) + min.
void terms_of(const Matrix &m, int64_t c, int64_t g, double &d, double &min) {
    const Format format = m.packed.format;
    const std::byte *row = m.row(c);
    if (format_info(format).grouped) {
        const int64_t groups = (m.packed.k + m.packed.group - 1) / m.packed.group;
        const int64_t at = g * 32 / m.packed.group;
        const int off = centre_of(format) - static_cast<int>(row[groups * 4 + at]);
        d = load_as<float>(row + at * 4);
        min = d * off;
        return;
    }
    const int64_t block_groups = format_info(format).block_values / 32;
    const std::byte *block = row + g / block_groups * format_info(format).block_bytes;
    min = with_quants(format, block, g % block_groups, 8);
    d = with_quants(format, block, g % block_groups, 9) - min;
}

// What the fixed-point sums of column c may be off by for a rounded row x, by the error of each
// integer (kernels/tier/linear_layout.h): half a unit for a row's scales A and scaled sums S, one
// for a column's scales D, two for its mins M.
double fixed_point_error(const Matrix &m, int64_t c, const float *w, const float *x) {
    const Format format = m.packed.format;
    const int64_t k = m.packed.k;
    std::vector<double> d(static_cast<size_t>(k / 32)), min(d.size());
    double largest = 0;
    for (size_t g = 0; g < d.size(); ++g) {
        terms_of(m, c, static_cast<int64_t>(g), d[g], min[g]);
        largest = std::max({largest, std::fabs(d[g]), std::fabs(min[g]) / 8});
        if (format == Format::Q4_K) {
            const std::byte *block = m.row(c) + static_cast<int64_t>(g) / 8 * 144;
            const double from_k = 64.0 * std::fabs(half_to_float(load_as<uint16_t>(block))) +
                                  8.0 * std::fabs(half_to_float(load_as<uint16_t>(block + 2)));
            largest = std::max(largest, from_k);
        }
    }
    double error = 0;
    for (int64_t begin = 0; begin < k / 32; begin += 8) {
        const int64_t end = std::min(begin + 8, k / 32);
        float max = 0;
        for (int64_t i = begin * 32; i < end * 32; ++i)
            max = std::max(max, std::fabs(x[i]));
        const double unit = largest * max / 127 / 1024; // of the totals, at most
        for (int64_t g = begin; g < end; ++g) {
            const double scale = d[static_cast<size_t>(g)], base = min[static_cast<size_t>(g)];
            float group_max = 0;
            for (int64_t i = g * 32; i < g * 32 + 32; ++i)
                group_max = std::max(group_max, std::fabs(x[i]));
            double dot = 0, sum = 0; // of the integers; of the numbers
            for (int64_t i = g * 32; i < g * 32 + 32; ++i) {
                const double q = scale == 0 ? 8 : (static_cast<double>(w[i]) - base) / scale;
                dot += group_max == 0 ? 0 : q * static_cast<double>(x[i]) / group_max * 127;
                sum += static_cast<double>(x[i]);
            }
            error += unit * (1.02 * (std::fabs(dot) + 1) + 1);
            if (format != Format::Q4_0)
                error +=
                    0.51 * std::fabs(base) * max / 127 / 2 + 2.02 * std::fabs(sum) * largest / 512;
        }
    }
    return error;
}

float to_bf16(float x) {
    uint32_t bits = load_as<uint32_t>(&x);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
    return load_as<float>(&bits);
}

// Against the reference: with activations rounded alike, within the rounding of fp32 and
// fixed-point sums; without, within half a step of 1/127 of each group's largest activation, or a
// bf16 number's.
void test_against_reference(const LinearKernels &kernels, const Matrix &m,
                            const std::vector<float> &x, const std::vector<float> &out,
                            int64_t rows) {
    const int64_t n = m.packed.n, k = m.packed.k;
    const std::vector<float> w = m.weights();
    const auto count = static_cast<size_t>(rows * n);
    std::vector<double> expected(count), magnitude(count);
    std::vector<float> rounded = x;
    const bool quantized = format_info(m.packed.format).quantized;
    const bool bf16 = !quantized && !kernels.same_activations(Format::F32, m.packed.format);
    if (quantized)
        reference::round_activations(x.data(), rows * k, rounded.data());
    if (bf16)
        std::transform(x.begin(), x.end(), rounded.begin(), to_bf16);
    reference::matmul(rounded.data(), w.data(), rows, n, k, expected.data(), magnitude.data());
    // A format's min and scale terms may be larger than the weight they cancel to.
    const double terms = static_cast<double>(quantized ? k / 32 + 8 : k);
    std::vector<double> rounding(count);
    for (size_t i = 0; i < count; ++i) {
        rounding[i] = 4 * terms * 0x1p-24 * magnitude[i] + 1e-30;
        if (is_fixed(m.packed.format))
            rounding[i] += fixed_point_error(m, static_cast<int64_t>(i) % n,
                                             w.data() + static_cast<int64_t>(i) % n * k,
                                             rounded.data() + static_cast<int64_t>(i) / n * k);
        CHECK(std::fabs(out[i] - expected[i]) <= rounding[i],
              "%s %ld x %ld x %ld at %zu: %.9g instead of %.9g, bound %g",
              format_name(m.packed.format), rows, n, k, i, static_cast<double>(out[i]), expected[i],
              rounding[i]);
    }
    if (!quantized && !bf16)
        return;
    reference::matmul(x.data(), w.data(), rows, n, k, expected.data(), magnitude.data());
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < n; ++c) {
            const auto i = static_cast<size_t>(r * n + c);
            double bound = bf16 ? 0x1.01p-8 * magnitude[i] : 0;
            for (int64_t g = 0; quantized && g < k; g += 32) {
                float max = 0;
                for (int64_t j = g; j < g + 32; ++j)
                    max = std::max(max, std::fabs(x[static_cast<size_t>(r * k + j)]));
                for (int64_t j = g; j < g + 32; ++j)
                    bound += 0.5001 * max / 127 *
                             std::fabs(static_cast<double>(w[static_cast<size_t>(c * k + j)]));
            }
            bound += rounding[i];
            CHECK(std::fabs(out[i] - expected[i]) <= bound, "%s: quantization error %g above %g",
                  format_name(m.packed.format), std::fabs(out[i] - expected[i]), bound);
        }
}

// Random ranges of rows and column blocks, a wider output, and accumulation.
void test_ranges(const LinearKernels &kernels, const Matrix &m, const std::byte *activations,
                 const std::vector<float> &expected, int64_t rows, Rng &rng) {
    const int64_t n = m.packed.n, blocks = (n + kColumns - 1) / kColumns;
    for (int round = 0; round < 6; ++round) {
        const int64_t r0 = draw(rng, 0, rows - 1), r1 = draw(rng, r0, rows);
        const int64_t b0 = draw(rng, 0, blocks - 1), b1 = draw(rng, b0, blocks);
        const int64_t ldo = n + draw(rng, 0, 3);
        const bool accumulate = draw(rng, 0, 1) == 1;
        std::vector<float> before(static_cast<size_t>((rows - 1) * ldo + n));
        for (float &y : before)
            y = normal(rng);
        std::vector<float> out = before;
        kernels.matmul(m.packed, activations, rows, r0, r1, b0, b1, out.data(), ldo, accumulate);
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t c = 0; c < (r + 1 < rows ? ldo : n); ++c) {
                const auto at = static_cast<size_t>(r * ldo + c);
                float want = before[at];
                if (r >= r0 && r < r1 && c >= b0 * kColumns && c < std::min(n, b1 * kColumns)) {
                    const float result = expected[static_cast<size_t>(r * n + c)];
                    want = accumulate ? want + result : result;
                }
                CHECK(same_bits(&out[at], &want, 1),
                      "%s %ld x %ld x %ld rows [%ld, %ld) blocks [%ld, %ld)%s: (%ld, %ld) is %.9g "
                      "instead of %.9g",
                      format_name(m.packed.format), rows, n, m.packed.k, r0, r1, b0, b1,
                      accumulate ? " accumulated" : "", r, c, static_cast<double>(out[at]),
                      static_cast<double>(want));
            }
    }
}

// Rows prepared alone, in a wider matrix, or copied elsewhere are the rows prepared together.
void test_prepare(const LinearKernels &kernels, const Matrix &m, const std::vector<float> &x,
                  const std::vector<float> &expected, int64_t rows, Rng &rng) {
    const int64_t n = m.packed.n, k = m.packed.k, blocks = (n + kColumns - 1) / kColumns;
    const Format format = m.packed.format;
    const int64_t r = draw(rng, 0, rows - 1), ldx = k + draw(rng, 0, 9);
    std::vector<float> wide(static_cast<size_t>(r * ldx + k), NAN);
    std::copy_n(x.data() + r * k, k, wide.data() + r * ldx);
    const Buffer alone(kernels.activation_bytes(format, 1, k));
    kernels.prepare(format, wide.data() + r * ldx, ldx, 1, k, alone.data.get(), 0, 1);
    const Buffer among(kernels.activation_bytes(format, rows, k));
    kernels.prepare(format, wide.data(), ldx, rows, k, among.data.get(), r, r + 1);
    const int64_t places = draw(rng, 1, 20), place = draw(rng, 0, places - 1);
    const Buffer copied(kernels.activation_bytes(format, places, k));
    kernels.copy_prepared(format, k, among.data.get(), rows, r, copied.data.get(), places, place);
    for (const auto &[activations, count, row] :
         {std::tuple{alone.data.get(), int64_t{1}, int64_t{0}},
          std::tuple{among.data.get(), rows, r}, std::tuple{copied.data.get(), places, place}}) {
        std::vector<float> out(static_cast<size_t>((row + 1) * n));
        kernels.matmul(m.packed, activations, count, row, row + 1, 0, blocks, out.data(), n, false);
        CHECK(same_bits(out.data() + row * n, expected.data() + r * n, static_cast<size_t>(n)),
              "%s: row %ld of %ld prepared apart", format_name(format), r, rows);
    }
}

// A row with a NaN or an infinity spoils itself only.
void test_bad_row(const LinearKernels &kernels, const Matrix &m, std::vector<float> x,
                  const std::vector<float> &expected, int64_t rows, Rng &rng) {
    const int64_t n = m.packed.n, k = m.packed.k, bad = draw(rng, 0, rows - 1);
    const float values[] = {NAN, INFINITY, -INFINITY, -NAN};
    x[static_cast<size_t>(bad * k + draw(rng, 0, k - 1))] = values[draw(rng, 0, 3)];
    const Buffer activations = prepared(kernels, m.packed.format, x, rows, k);
    std::vector<float> out(static_cast<size_t>(rows * n));
    kernels.matmul(m.packed, activations.data.get(), rows, 0, rows, 0,
                   (n + kColumns - 1) / kColumns, out.data(), n, false);
    for (int64_t r = 0; r < rows; ++r) {
        if (r != bad) {
            CHECK(same_bits(&out[static_cast<size_t>(r * n)], &expected[static_cast<size_t>(r * n)],
                            static_cast<size_t>(n)),
                  "%s: row %ld changed by row %ld", format_name(m.packed.format), r, bad);
            continue;
        }
        for (int64_t c = 0; c < n; ++c)
            CHECK(!std::isfinite(out[static_cast<size_t>(r * n + c)]),
                  "%s: a NaN or infinity was lost", format_name(m.packed.format));
    }
}

void test_case(const Tier &tier, Format format, Shape s, Rng &rng) {
    const LinearKernels &kernels = tier.linear;
    const Matrix m(kernels, format, s.n, s.k, s.group, rng);
    const std::vector<float> x = random_rows(s.rows, s.k, rng);
    const Buffer activations = prepared(kernels, format, x, s.rows, s.k);
    const std::vector<float> out = one_by_one(kernels, m, activations.data.get(), s.rows);
    test_dequantize(kernels, m);
    test_against_reference(kernels, m, x, out, s.rows);
    test_ranges(kernels, m, activations.data.get(), out, s.rows, rng);
    test_prepare(kernels, m, x, out, s.rows, rng);
    test_bad_row(kernels, m, x, out, s.rows, rng);
}

// Scales of all of fp32 are held to 11 bits, from the smallest normal to the largest; one that is
// no number spoils its column only.
void test_wide_scales(const LinearKernels &kernels, Format format, Rng &rng) {
    constexpr int64_t kInputs = 96, kOutputs = 40;
    std::vector<std::byte> file = random_grouped(format, kOutputs, kInputs, 32, rng);
    const size_t row = reference::row_bytes(format, kInputs, 32);
    const int64_t bad = draw(rng, 0, kOutputs - 1);
    for (int64_t c = 0; c < kOutputs; ++c) {
        const auto exponent = static_cast<int>(draw(rng, -110, 110));
        for (int64_t g = 0; g < 3; ++g) {
            const auto fine = 1 + static_cast<float>(draw(rng, 0, 0x7fffff)) * 0x1p-23f;
            store_as(file.data() + static_cast<size_t>(c) * row + g * 4,
                     c == bad && g == 1 ? NAN
                                        : std::ldexp(fine, exponent - static_cast<int>(3 * g)));
        }
    }
    const Buffer buffer(kernels.packed_bytes(format, kOutputs, kInputs, 32));
    kernels.pack(format, file.data(), kOutputs, kInputs, 32, buffer.data.get(), 0, 3);
    const PackedMatrix packed{format, kOutputs, kInputs, 32, buffer.data.get()};
    const std::vector<float> x(kInputs, 1);
    const Buffer activations = prepared(kernels, format, x, 1, kInputs);
    std::vector<float> sums(kOutputs), held(kInputs), expected(kInputs);
    kernels.matmul(packed, activations.data.get(), 1, 0, 1, 0, 3, sums.data(), kOutputs, false);
    for (int64_t c = 0; c < kOutputs; ++c) {
        CHECK(std::isfinite(sums[static_cast<size_t>(c)]) == (c != bad), "%s column %ld: %g",
              format_name(format), c, static_cast<double>(sums[static_cast<size_t>(c)]));
        if (c == bad)
            continue;
        kernels.dequantize_row(packed, c, held.data());
        reference::dequantize(format, file.data() + static_cast<size_t>(c) * row, kInputs,
                              expected.data(), 32);
        for (size_t i = 0; i < held.size(); ++i)
            CHECK(std::fabs(held[i] - expected[i]) <= 0x1.001p-11f * std::fabs(expected[i]),
                  "%s column %ld: %g instead of %g", format_name(format), c,
                  static_cast<double>(held[i]), static_cast<double>(expected[i]));
    }
}

// Prepared activations are the same in every tier; products are the same in the tiers that fuse,
// and in fixed point in all. (Not those of bf16 numbers, where a tier multiplies them as such.)
void test_across_tiers(const std::vector<const Tier *> &tiers, Format format, Shape s,
                       uint64_t seed) {
    const Tier *first_fused = nullptr;
    std::vector<float> fused;
    std::vector<std::byte> first_activations;
    for (const Tier *tier : tiers) {
        const LinearKernels &kernels = tier->linear;
        if (format == Format::BF16 && !kernels.same_activations(Format::F32, format))
            continue;
        Rng rng(seed);
        const Matrix m(kernels, format, s.n, s.k, s.group, rng);
        const std::vector<float> x = random_rows(s.rows, s.k, rng);
        const Buffer buffer = prepared(kernels, format, x, s.rows, s.k);
        const std::vector<std::byte> activations(
            buffer.data.get(), buffer.data.get() + kernels.activation_bytes(format, s.rows, s.k));
        if (first_activations.empty())
            first_activations = activations;
        CHECK(activations == first_activations, "%s: %s prepares otherwise than %s",
              format_name(format), tier->name, tiers.front()->name);
        if (std::string(tier->name) == "generic" && !is_fixed(format))
            continue;
        const std::vector<float> out = one_by_one(kernels, m, buffer.data.get(), s.rows);
        if (first_fused == nullptr) {
            first_fused = tier;
            fused = out;
        }
        CHECK(same_bits(fused.data(), out.data(), out.size()), "%s: %s differs from %s",
              format_name(format), tier->name, first_fused->name);
    }
}

} // namespace
} // namespace octavo

int main(int argc, char **argv) {
    using namespace octavo;
    const int cases = argc > 1 ? std::atoi(argv[1]) : 6;
    std::vector<const Tier *> tiers;
    for (const char *tier_name : {"generic", "avx2", "avx512", "avx512_bf16"}) {
        try {
            tiers.push_back(&find_tier(tier_name));
        } catch (const std::invalid_argument &error) {
            std::printf("skipped %s: %s\n", tier_name, error.what());
        }
    }
    uint64_t seed = 1;
    for (const Format format : kFormats) {
        const bool grouped = format_info(format).grouped, has_groups = group_step(format) > 0;
        for (const Tier *tier : tiers) {
            for (int i = 0; i < cases; ++i) {
                Rng rng(seed++);
                const Shape s = random_shape(format, rng);
                test_case(*tier, format, s, rng);
            }
            Rng rng(seed++);
            test_case(*tier, format, {2, 17, 16384, has_groups ? 128 : 0}, rng);
            if (grouped)
                test_wide_scales(tier->linear, format, rng);
            if (failures == 0)
                std::printf("passed %s %s\n", tier->name, format_name(format));
        }
        test_across_tiers(tiers, format, {5, 71, 512, has_groups ? 64 : 0}, seed++);
        if (format_info(format).block_values == 32)
            test_across_tiers(tiers, format, {13, 33, 32 * 11, grouped ? 96 : 0}, seed++);
    }
    return failures == 0 ? 0 : 1;
}

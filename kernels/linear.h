// Linear layers over packed weights: the interface between the kernels of one instruction-set tier
// and the runtime. Every tier implements it for every format.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {

// Values equal ggml's type numbers (GGUF specification), but for those from 1000 on.
//
// I2 to I8: integers of so many bits with a scale and a zero for a group of inputs. A row is, one
// after another: a scale, fp32, for each group; a zero, one byte and at most 2^b, for each; the
// numbers as a stream of bits from the lowest of the first byte on. w = scale · (number − zero).
// `group`, everywhere below, is its inputs, a multiple of 32; the last one may be shorter, and
// other formats have 0.
//
// T3 and T4: codes of 3 and 4 bits into a table (tier/linear_layout.h: codebook), for ggml's
// formats whose numbers are points of a grid. A block of 256 is an fp16 d, 8 bytes of scales and
// the codes as a stream of bits. T3: a byte of scales has s of the first 16 of 32 inputs in its low
// nibble and that of the last 16 in its high one; w = d · unit · (2s + 1) · table[code]. T4: a byte
// is the int8 scale of 32 inputs; w = d · unit · scale · table[code].
//
// E4M3: fp8 numbers (OCP 8-bit floating point, E4M3). A row is a scale, fp32, for each group of
// `group` inputs, a multiple of 16, then a byte for each input. w = scale · number. NVFP4: a row is
// an fp32 scale, then for each 32 inputs two E4M3 scales of 16 inputs each and the codes of E2M1
// numbers, two a byte, the first in the low nibble. w = scale · (E4M3 scale · number). A byte that
// is E4M3's NaN is not one of either.
enum class Format : int32_t {
    F32 = 0,
    F16 = 1,
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q2_K = 10,
    Q3_K = 11,
    Q4_K = 12,
    Q5_K = 13,
    Q6_K = 14,
    IQ4_NL = 20,
    IQ4_XS = 23,
    BF16 = 30,
    MXFP4 = 39,
    I2 = 1002,
    I3 = 1003,
    I4 = 1004,
    I8 = 1008,
    T3_IQ1 = 1031,
    T3_IQ2 = 1032,
    T4_IQ3_XXS = 1041,
    T4_IQ3_S = 1042,
    NVFP4 = 1044,
    E4M3 = 1080,
};

// A weight matrix [n outputs, k inputs] repacked for one tier: blocks of kColumns outputs, so that
// vector lanes are outputs and an element's sum runs over k in one fixed order.
inline constexpr int64_t kColumns = 16;

// Prepared activation rows that lie interleaved.
inline constexpr int64_t kPanel = 8;

struct PackedMatrix {
    Format format;
    int64_t n = 0;
    int64_t k = 0;
    int64_t group = 0;
    const std::byte *data = nullptr; // 64-byte aligned
};

struct LinearKernels {
    // Bytes `pack` writes for an [n, k] matrix (n rounded up to kColumns), a multiple of 64.
    size_t (*packed_bytes)(Format, int64_t n, int64_t k, int64_t group);

    // Repacks column blocks [block_begin, block_end) of the file's row-major matrix `src`;
    // lossless, but for grouped formats' scales of more than 11 bits (tier/linear_grouped.h).
    // Padding columns (past n) are zero. Distinct ranges may be packed by distinct
    // threads. Matrices used one after another had better lie one after another in memory: the
    // kernels prefetch past a matrix's end.
    void (*pack)(Format, const std::byte *src, int64_t n, int64_t k, int64_t group, std::byte *dst,
                 int64_t block_begin, int64_t block_end);

    // Bytes of `rows` activation rows of width k prepared for matrices of this format: 8-bit with a
    // scale a group for the quantized formats; bf16 for BF16 where the tier multiplies that; else
    // fp32. Proportional to `rows`. Prepared rows must lie on a 64-byte boundary.
    size_t (*activation_bytes)(Format, int64_t rows, int64_t k);

    // Whether two formats take the same prepared activations (so that q, k and v share them).
    bool (*same_activations)(Format, Format);

    // Prepares rows [row_begin, row_end) of x (row stride ldx floats) into dst, laid out for `rows`
    // rows: panels of kPanel, each interleaved, so that rows from a multiple of kPanel on lie as
    // they would without those above. Each row's result depends on that row alone. Distinct ranges
    // may run on distinct threads.
    void (*prepare)(Format, const float *x, int64_t ldx, int64_t rows, int64_t k, std::byte *dst,
                    int64_t row_begin, int64_t row_end);

    // Copies row `row` of `rows` prepared ones to row `to` of `to_rows`.
    void (*copy_prepared)(Format, int64_t k, const std::byte *src, int64_t rows, int64_t row,
                          std::byte *dst, int64_t to_rows, int64_t to);

    // out[r * ldo + c] (= or, with accumulate, +=) sum over k of activation row r and output c, for
    // r in [row_begin, row_end) and column blocks [block_begin, block_end); columns past n are not
    // written. `rows` is the count given to prepare. The order of operations of every element is
    // the same whatever the ranges.
    void (*matmul)(const PackedMatrix &, const std::byte *activations, int64_t rows,
                   int64_t row_begin, int64_t row_end, int64_t block_begin, int64_t block_end,
                   float *out, int64_t ldo, bool accumulate);

    // Row `index` of the matrix (one output's k weights, dequantized exactly as the format says):
    // the embedding lookup of a tied table.
    void (*dequantize_row)(const PackedMatrix &, int64_t index, float *out);
};

} // namespace octavo

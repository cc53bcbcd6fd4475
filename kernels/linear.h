// Linear layers over packed weights: the interface between the kernels of one instruction-set tier
// and the runtime. Every tier implements it for every format.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {

// Values equal ggml's type numbers (GGUF specification), but for the last three: integers of 3, 4
// and 8 bits with a scale and a zero for a group of inputs. A row of those is, one after another: a
// scale, fp32, for each group; a zero, one byte and at most 2^b, for each; the numbers as a stream
// of bits from the lowest of the first byte on. w = scale · (number − zero). `group`, everywhere
// below, is its inputs, a multiple of 32; the last one may be shorter, and other formats have 0.
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
    I3 = 1003,
    I4 = 1004,
    I8 = 1008,
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

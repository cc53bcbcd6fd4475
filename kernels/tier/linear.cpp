// The linear kernels of one tier: the loops over tiles, and the table.
#include "tier.h"

#include "linear_grouped_pack.h"
#include "linear_pack.h"
#include "linear_tile.h"

namespace octavo {
namespace {

const uint8_t *bytes(const std::byte *from) {
    return reinterpret_cast<const uint8_t *>(from);
}

// Calls f.operator()<F>() for the run-time format.
template <class Function> decltype(auto) with_format(Format format, Function f) {
    switch (format) {
    case Format::F32:
        return f.template operator()<Format::F32>();
    case Format::F16:
        return f.template operator()<Format::F16>();
    case Format::BF16:
        return f.template operator()<Format::BF16>();
    case Format::Q4_0:
        return f.template operator()<Format::Q4_0>();
    case Format::Q4_1:
        return f.template operator()<Format::Q4_1>();
    case Format::Q5_0:
        return f.template operator()<Format::Q5_0>();
    case Format::Q5_1:
        return f.template operator()<Format::Q5_1>();
    case Format::Q8_0:
        return f.template operator()<Format::Q8_0>();
    case Format::Q2_K:
        return f.template operator()<Format::Q2_K>();
    case Format::Q3_K:
        return f.template operator()<Format::Q3_K>();
    case Format::Q4_K:
        return f.template operator()<Format::Q4_K>();
    case Format::Q5_K:
        return f.template operator()<Format::Q5_K>();
    case Format::Q6_K:
        return f.template operator()<Format::Q6_K>();
    case Format::IQ4_NL:
        return f.template operator()<Format::IQ4_NL>();
    case Format::IQ4_XS:
        return f.template operator()<Format::IQ4_XS>();
    case Format::MXFP4:
        return f.template operator()<Format::MXFP4>();
    case Format::I2:
        return f.template operator()<Format::I2>();
    case Format::I3:
        return f.template operator()<Format::I3>();
    case Format::I4:
        return f.template operator()<Format::I4>();
    case Format::I8:
        return f.template operator()<Format::I8>();
    case Format::T3_IQ1:
        return f.template operator()<Format::T3_IQ1>();
    case Format::T3_IQ2:
        return f.template operator()<Format::T3_IQ2>();
    case Format::T4_IQ3_XXS:
        return f.template operator()<Format::T4_IQ3_XXS>();
    case Format::T4_IQ3_S:
        return f.template operator()<Format::T4_IQ3_S>();
    case Format::NVFP4:
        return f.template operator()<Format::NVFP4>();
    case Format::E4M3:
        return f.template operator()<Format::E4M3>();
    }
    __builtin_unreachable();
}

// Whether activations for this format are rounded to bf16.
bool is_bf16(Format format) {
    return kBf16 && format == Format::BF16;
}

// Cells of 16 floats; the last one's rest is zero.
void prepare_floats(const float *x, int64_t k, std::byte *to, int64_t step) {
    constexpr int64_t kFloats = kLine / 4;
    for (; k >= kFloats; k -= kFloats, x += kFloats, to += step)
        std::memcpy(to, x, kLine);
    if (k > 0) {
        std::memset(to, 0, kLine);
        std::memcpy(to, x, static_cast<size_t>(k) * sizeof(float));
    }
}

template <Format F> int64_t block_bytes_of(int64_t k, [[maybe_unused]] int64_t group) {
    if constexpr (format_info(F).grouped)
        return grouped_block_bytes<F>(k, group);
    else if constexpr (format_info(F).scaled)
        return scaled_block_bytes(k, group);
    else
        return column_block_bytes<F>(k);
}

size_t packed_bytes(Format format, int64_t n, int64_t k, int64_t group) {
    const int64_t block_bytes =
        with_format(format, [&]<Format F>() { return block_bytes_of<F>(k, group); });
    return static_cast<size_t>(round_up(n, kColumns) / kColumns * block_bytes);
}

void pack(Format format, const std::byte *src, int64_t n, int64_t k, int64_t group, std::byte *dst,
          int64_t block_begin, int64_t block_end) {
    with_format(format, [&]<Format F>() {
        const int64_t block_bytes = block_bytes_of<F>(k, group);
        for (int64_t b = block_begin; b < block_end; ++b) {
            const int64_t first = b * kColumns;
            const int64_t columns = n - first < kColumns ? n - first : kColumns;
            const uint8_t *from = bytes(src) + first * row_bytes(F, k, group);
            uint8_t *to = reinterpret_cast<uint8_t *>(dst) + b * block_bytes;
            if constexpr (format_info(F).grouped)
                pack_grouped_block<F>(from, columns, k, group, to);
            else if constexpr (format_info(F).scaled)
                pack_scaled_block(from, columns, k, group, to);
            else
                pack_column_block<F>(from, columns, k, to);
        }
    });
}

int64_t cells_of(Format format, int64_t k) {
    return row_cells(format, k, is_bf16(format) ? kLine / 2 : kLine / 4);
}

size_t activation_bytes(Format format, int64_t rows, int64_t k) {
    return static_cast<size_t>(rows * cells_of(format, k) * kLine);
}

bool same_activations(Format a, Format b) {
    return format_info(a).quantized == format_info(b).quantized && is_bf16(a) == is_bf16(b);
}

void prepare(Format format, const float *x, int64_t ldx, int64_t rows, int64_t k, std::byte *dst,
             int64_t row_begin, int64_t row_end) {
    const int64_t cells = cells_of(format, k);
    for (int64_t r = row_begin; r < row_end; ++r) {
        const float *from = x + r * ldx;
        std::byte *to = dst + row_offset(r, cells);
        const int64_t step = cell_step(r, rows);
        if (is_bf16(format))
            prepare_bf16(from, k, to, step);
        else if (format_info(format).quantized)
            for (int64_t g = 0; g < k / kGroup; g += kSpan)
                prepare_span(from + g * kGroup, k / kGroup - g < kSpan ? k / kGroup - g : kSpan,
                             to + g * step, step);
        else
            prepare_floats(from, k, to, step);
    }
}

void copy_prepared(Format format, int64_t k, const std::byte *src, int64_t rows, int64_t row,
                   std::byte *dst, int64_t to_rows, int64_t to) {
    const int64_t cells = cells_of(format, k);
    const int64_t src_step = cell_step(row, rows), dst_step = cell_step(to, to_rows);
    src += row_offset(row, cells);
    dst += row_offset(to, cells);
    for (int64_t cell = 0; cell < cells; ++cell)
        std::memcpy(dst + cell * dst_step, src + cell * src_step, kLine);
}

// Splits [0, rows) of a panel into tiles of R rows and one of the rest.
template <Format F, int R> void panel(Tile tile, int64_t rows, int64_t blocks) {
    // All rows pass over as many column blocks as a tile takes, while those are in the cache.
    constexpr int C = tile_columns<F>(R);
    while (rows >= R) {
        Tile part = tile;
        int64_t left = blocks;
        for (; left >= C; left -= C) {
            compute_tile<F, R, C>(part);
            part.weights += C * part.block_bytes;
            part.out += C * kColumns;
            part.columns -= C * kColumns;
        }
        for (; left > 0; --left) {
            compute_tile<F, R, 1>(part);
            part.weights += part.block_bytes;
            part.out += kColumns;
            part.columns -= kColumns;
        }
        tile.activations += R * kLine;
        tile.out += R * tile.ldo;
        rows -= R;
    }
    if constexpr (R > 1)
        if (rows > 0)
            panel<F, R - 1>(tile, rows, blocks);
}

void matmul(const PackedMatrix &matrix, const std::byte *activations, int64_t rows,
            int64_t row_begin, int64_t row_end, int64_t block_begin, int64_t block_end, float *out,
            int64_t ldo, bool accumulate) {
    with_format(matrix.format, [&]<Format F>() {
        // Column blocks that all rows pass before the next: what a tile of one row takes at most.
        constexpr int64_t kBlocks = 4;
        const int64_t cells = cells_of(F, matrix.k);
        const int64_t block_bytes = block_bytes_of<F>(matrix.k, matrix.group);
        for (int64_t b = block_begin; b < block_end; b += kBlocks) {
            const int64_t blocks = block_end - b < kBlocks ? block_end - b : kBlocks;
            for (int64_t r = row_begin; r < row_end;) {
                const int64_t left = row_end - r, in_panel = kPanel - r % kPanel;
                const int64_t count = left < in_panel ? left : in_panel;
                panel<F, kMaxTileRows>({.weights = bytes(matrix.data) + b * block_bytes,
                                        .block_bytes = block_bytes,
                                        .k = matrix.k,
                                        .group = matrix.group,
                                        .activations = activations + row_offset(r, cells),
                                        .activation_step = cell_step(r, rows),
                                        .out = out + r * ldo + b * kColumns,
                                        .ldo = ldo,
                                        .columns = matrix.n - b * kColumns,
                                        .accumulate = accumulate},
                                       count, blocks);
                r += count;
            }
        }
    });
}

void dequantize_row(const PackedMatrix &matrix, int64_t index, float *out) {
    with_format(matrix.format, [&]<Format F>() {
        const uint8_t *block =
            bytes(matrix.data) + index / kColumns * block_bytes_of<F>(matrix.k, matrix.group);
        if constexpr (format_info(F).grouped)
            dequantize_grouped_lane<F>(block, index % kColumns, matrix.k, matrix.group, out);
        else if constexpr (format_info(F).scaled)
            dequantize_scaled_lane(block, index % kColumns, matrix.k, matrix.group, out);
        else
            dequantize_lane<F>(block, index % kColumns, matrix.k, out);
    });
}

} // namespace

const LinearKernels &OCTAVO_TIERED(linear_kernels)() {
    static constexpr LinearKernels kTable = {packed_bytes,     pack,          activation_bytes,
                                             same_activations, prepare,       copy_prepared,
                                             matmul,           dequantize_row};
    return kTable;
}

} // namespace octavo

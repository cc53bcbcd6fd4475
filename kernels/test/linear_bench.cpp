// Speed of the linear kernels on one thread.
//
//   linear_bench [tier] [n] [k] [MB] [format number …]
//
// Operations a second (a multiplication and an addition for each weight and row) and bytes of
// packed weights a second: the best of many short runs, each over other matrices, of which there
// are MB (default 128) so that one row reads memory rather than cache. 0: one matrix only.
#include "formats.h"
#include "tier.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

using namespace octavo;

namespace {

std::byte *huge_pages(size_t size) {
    constexpr size_t kPage = size_t{2} << 20;
    size = (size + kPage - 1) / kPage * kPage;
    void *memory = std::aligned_alloc(kPage, size);
    madvise(memory, size, MADV_HUGEPAGE);
    return static_cast<std::byte *>(memory);
}

double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

} // namespace

int main(int argc, char **argv) {
    const LinearKernels &kernels = find_tier(argc > 1 ? argv[1] : "").linear;
    const int64_t n = argc > 2 ? std::atol(argv[2]) : 1536;
    const int64_t k = argc > 3 ? std::atol(argv[3]) : 1536;
    const auto total = static_cast<size_t>(argc > 4 ? std::atol(argv[4]) : 128) << 20;
    std::vector<Format> formats;
    for (int i = 5; i < argc; ++i)
        formats.push_back(static_cast<Format>(std::atoi(argv[i])));
    if (formats.empty())
        formats = {Format::Q4_0, Format::Q4_1, Format::Q5_0, Format::Q5_1,
                   Format::Q8_0, Format::Q4_K, Format::Q5_K, Format::Q6_K,
                   Format::F16,  Format::BF16, Format::F32};
    constexpr int64_t kRows[] = {1, 2, 3, 4, 6, 8, 12, 32, 128, 512};
    const int64_t blocks = (n + kColumns - 1) / kColumns;
    std::printf("Gop/s  ");
    for (const int64_t rows : kRows)
        std::printf(" %6ld", rows);
    std::printf("  GB/s at 1  prepare ns/row\n");
    for (const Format format : formats) {
        if (k % format_info(format).block_values != 0)
            continue;
        const size_t size = kernels.packed_bytes(format, n, k);
        const auto matrices = static_cast<int64_t>(std::max<size_t>(1, total / size));
        std::byte *weights = huge_pages(size * static_cast<size_t>(matrices));
        // Any bits will do but a NaN's or a subnormal's.
        for (size_t i = 0; i < size * static_cast<size_t>(matrices); ++i)
            weights[i] = static_cast<std::byte>(i % 2 == 0 ? i * 7 % 256 : 0x2c);
        std::printf("%-7s", format_name(format));
        double one_row = 0, prepare_time = 1e9;
        int64_t next = 0;
        for (const int64_t rows : kRows) {
            std::vector<float> x(static_cast<size_t>(rows * k)), out(static_cast<size_t>(rows * n));
            for (size_t i = 0; i < x.size(); ++i)
                x[i] = static_cast<float>(i % 17) - 8;
            std::byte *activations = huge_pages(kernels.activation_bytes(format, rows, k));
            const int64_t used = std::clamp<int64_t>(16 / rows, 1, matrices);
            double best = 1e9;
            for (int64_t repeat = 0; repeat < std::clamp<int64_t>(512 / rows, 12, 64); ++repeat) {
                double begin = seconds();
                kernels.prepare(format, x.data(), k, rows, k, activations, 0, rows);
                prepare_time =
                    std::min(prepare_time, (seconds() - begin) / static_cast<double>(rows));
                begin = seconds();
                for (int64_t m = 0; m < used; ++m, next = (next + 1) % matrices)
                    kernels.matmul({format, n, k, weights + static_cast<size_t>(next) * size},
                                   activations, rows, 0, rows, 0, blocks, out.data(), n, false);
                best = std::min(best, (seconds() - begin) / static_cast<double>(used));
            }
            if (rows == 1)
                one_row = best;
            std::printf(" %6.1f", 2e-9 * static_cast<double>(n * k * rows) / best);
            std::free(activations);
        }
        std::printf("  %9.1f  %14.0f\n", 1e-9 * static_cast<double>(size) / one_row,
                    prepare_time * 1e9);
        std::fflush(stdout);
        std::free(weights);
    }
}

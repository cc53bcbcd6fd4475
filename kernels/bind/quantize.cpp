// Rounding weights, for loading and for writing.
#include "bind.h"

#include "formats.h"
#include "quantize.h"
#include "thread_pool.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using BytesOut = nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>;

BytesOut quantize(const Bytes &data, int source_number, int64_t rows, int64_t k, int number,
                  int64_t group, bool symmetric, const std::shared_ptr<ThreadPool> &pool) {
    const auto source = static_cast<Format>(source_number), format = static_cast<Format>(number);
    if (!can_quantize(source, format))
        throw std::invalid_argument("no rounding from weight format " +
                                    std::to_string(source_number) + " to " +
                                    std::to_string(number));
    const FormatInfo info = format_info(format);
    if (rows < 1 || k < 1 || k % info.block_values != 0)
        throw std::invalid_argument(std::string("a matrix of ") + format_name(format) +
                                    " cannot be " + std::to_string(rows) + " x " +
                                    std::to_string(k));
    if (group < 1 || group % info.block_values != 0)
        throw std::invalid_argument(std::string("a matrix of ") + format_name(format) +
                                    " cannot have groups of " + std::to_string(group));
    if (int64_t(data.size()) != rows * row_bytes(source, k, 0))
        throw std::invalid_argument("the data's size does not fit the shape");
    const int64_t row = row_bytes(format, k, group);
    auto owned = std::make_unique<uint8_t[]>(size_t(rows * row));
    uint8_t *out = owned.get();
    std::atomic<int64_t> bad{rows};
    {
        nb::gil_scoped_release release;
        const auto work = [&](int64_t, int, int64_t begin, int64_t end) {
            const auto *from = reinterpret_cast<const std::byte *>(data.data());
            const int64_t found = quantize_rows(source, from + begin * row_bytes(source, k, 0),
                                                end - begin, k, format, group, symmetric,
                                                reinterpret_cast<std::byte *>(out) + begin * row);
            int64_t first = bad;
            while (found >= 0 && begin + found < first &&
                   !bad.compare_exchange_weak(first, begin + found)) {
            }
        };
        if (pool) {
            const Job job{rows, std::max<int64_t>(1, rows / (int64_t(pool->size()) * 8))};
            pool->run(&job, 1, work);
        } else {
            work(0, 0, 0, rows);
        }
    }
    if (bad < rows)
        throw std::invalid_argument("row " + std::to_string(bad) + " of " + std::to_string(rows) +
                                    " has a weight that is not finite or too large");
    nb::capsule owner(out, [](void *p) noexcept { delete[] static_cast<uint8_t *>(p); });
    owned.release();
    return {out, {size_t(rows * row)}, owner};
}

} // namespace
} // namespace octavo

void bind_quantize(nb::module_ &m) {
    using namespace octavo;
    m.def(
        "quantize", quantize, "data"_a, "source"_a, "rows"_a, "k"_a, "format"_a, "group"_a,
        "symmetric"_a = false, "pool"_a.none() = nb::none(),
        "Rows [rows, k] of F32, F16 or BF16 weights rounded to nearest into rows of I4 or I8\n"
        "(kernels/quantize.h defines scales and zeros), on the pool's threads or the caller's.\n"
        "Raises ValueError for a shape or format that does not fit, and naming the first row that\n"
        "holds a weight that is not finite, or too large for an fp32 scale.");
}

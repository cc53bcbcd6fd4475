// Linear kernels for tests and planning: packing, products and sizes of single matrices.
#include "bind.h"

#include "formats.h"
#include "runtime.h"
#include "tier.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FloatsOut = nb::ndarray<nb::numpy, float, nb::ndim<2>>;

using Buffer = std::unique_ptr<std::byte, void (*)(void *)>;

Buffer aligned_buffer(size_t size) {
    Buffer buffer(static_cast<std::byte *>(std::aligned_alloc(64, (size + 64) / 64 * 64)),
                  std::free);
    if (!buffer)
        throw std::bad_alloc();
    return buffer;
}

FloatsOut new_floats(int64_t rows, int64_t columns) {
    const auto size = static_cast<size_t>(rows * columns);
    auto values = std::make_unique<float[]>(size);
    float *data = values.get();
    nb::capsule owner(data, [](void *p) noexcept { delete[] static_cast<float *>(p); });
    values.release();
    return {data, {static_cast<size_t>(rows), static_cast<size_t>(columns)}, owner};
}

Format checked_format(int number, int64_t n, int64_t k, int64_t group) {
    const auto format = static_cast<Format>(number);
    const FormatInfo info = format_info(format);
    if (info.block_bytes == 0)
        throw std::invalid_argument("no kernels for weight format " + std::to_string(number));
    if (n <= 0 || k <= 0 || k % info.block_values != 0)
        throw std::invalid_argument(std::string("a matrix of ") + format_name(format) +
                                    " cannot be " + std::to_string(n) + " x " + std::to_string(k));
    const int64_t step = group_step(format);
    if (step > 0 ? group < 1 || group % step != 0 : group != 0)
        throw std::invalid_argument(std::string("a matrix of ") + format_name(format) +
                                    " cannot have groups of " + std::to_string(group));
    return format;
}

struct Packed {
    Packed(const Tier &tier, int number, int64_t n, int64_t k, int64_t group, const Bytes &data)
        : format(checked_format(number, n, k, group)), buffer(nullptr, std::free) {
        if (data.size() != static_cast<size_t>(n * row_bytes(format, k, group)))
            throw std::invalid_argument("the data's size does not fit the shape");
        check_rows(format, reinterpret_cast<const std::byte *>(data.data()), n, k, group);
        buffer = aligned_buffer(tier.linear.packed_bytes(format, n, k, group));
        tier.linear.pack(format, reinterpret_cast<const std::byte *>(data.data()), n, k, group,
                         buffer.get(), 0, (n + kColumns - 1) / kColumns);
        matrix = {format, n, k, group, buffer.get()};
    }
    Format format;
    Buffer buffer;
    PackedMatrix matrix;
};

FloatsOut linear(const Bytes &data, int number, int64_t n, const Floats &x, const std::string &isa,
                 int64_t group) {
    const auto rows = static_cast<int64_t>(x.shape(0)), k = static_cast<int64_t>(x.shape(1));
    const Tier &tier = find_tier(isa);
    const Packed packed(tier, number, n, k, group, data);
    FloatsOut out = new_floats(rows, n);
    const Buffer activations = aligned_buffer(tier.linear.activation_bytes(packed.format, rows, k));
    tier.linear.prepare(packed.format, x.data(), k, rows, k, activations.get(), 0, rows);
    tier.linear.matmul(packed.matrix, activations.get(), rows, 0, rows, 0,
                       (n + kColumns - 1) / kColumns, out.data(), n, false);
    return out;
}

FloatsOut dequantize(const Bytes &data, int number, int64_t n, int64_t k, const std::string &isa,
                     int64_t group) {
    const Tier &tier = find_tier(isa);
    const Packed packed(tier, number, n, k, group, data);
    FloatsOut out = new_floats(n, k);
    for (int64_t c = 0; c < n; ++c)
        tier.linear.dequantize_row(packed.matrix, c, out.data() + c * k);
    return out;
}

size_t packed_bytes(int number, int64_t n, int64_t k, const std::string &isa, int64_t group) {
    return find_tier(isa).linear.packed_bytes(checked_format(number, n, k, group), n, k, group);
}

} // namespace
} // namespace octavo

void bind_linear(nb::module_ &m) {
    using namespace octavo;
    m.def("linear", linear, "data"_a, "format"_a, "n"_a, "x"_a, "isa"_a = "", "group"_a = 0,
          "x [rows, k] times the transpose of a matrix [n, k] given as GGUF blocks, or as rows of\n"
          "a grouped format (kernels/linear.h): [rows, n].\n"
          "Raises ValueError for a shape, a zero or an instruction set that does not fit.");
    m.def("dequantize", dequantize, "data"_a, "format"_a, "n"_a, "k"_a, "isa"_a = "", "group"_a = 0,
          "The numbers [n, k] of a matrix given likewise, by way of its packed form.");
    m.def("packed_bytes", packed_bytes, "format"_a, "n"_a, "k"_a, "isa"_a = "", "group"_a = 0,
          "Bytes a weight matrix [n, k] takes once packed.");
}

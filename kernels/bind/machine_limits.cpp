// The loops that reach the machine's limits, for machine/limits.py to choose among and repeat.
#include "bind.h"

#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>

#include "machine_limits.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace octavo;

namespace {

void check_times(double seconds, int repetitions) {
    if (!(seconds > 0.0 && seconds <= 60.0) || repetitions < 1 || repetitions > 10000)
        throw std::invalid_argument(
            "a repetition takes 0 to 60 seconds, and there is at least one");
}

template <class Loops> const auto &chosen(const Loops &loops, int64_t index) {
    if (index < 0 || index >= int64_t(loops.size()))
        throw std::invalid_argument("there is no loop " + std::to_string(index));
    return loops[size_t(index)];
}

} // namespace

void bind_machine_limits(nb::module_ &m) {
    m.def(
        "peak_loops",
        [] {
            nb::list loops;
            for (const PeakLoop &loop : peak_loops())
                loops.append(nb::make_tuple(loop.arithmetic, loop.name));
            return loops;
        },
        "(arithmetic, instruction) of each loop that this CPU can run.");
    m.def(
        "read_loops",
        [] {
            nb::list loops;
            for (const ReadLoop &loop : read_loops())
                loops.append(nb::make_tuple(loop.name, loop.streams, loop.prefetches));
            return loops;
        },
        "(loads, streams, whether it prefetches) of each loop that this CPU can run.");
    m.def(
        "measure_peak",
        [](ThreadPool &pool, int64_t loop, double seconds, int repetitions) {
            check_times(seconds, repetitions);
            nb::gil_scoped_release release;
            return measure_peak(pool, chosen(peak_loops(), loop), seconds, repetitions);
        },
        "pool"_a, "loop"_a, "seconds"_a, "repetitions"_a,
        "Operations a second, one figure a repetition of about `seconds`.");
    m.def(
        "measure_barrier",
        [](ThreadPool &pool, int jobs, int repetitions) {
            check_times(1.0, repetitions);
            if (jobs < 1 || jobs > 1'000'000)
                throw std::invalid_argument("a run has 1 to 1000000 jobs");
            nb::gil_scoped_release release;
            return measure_barrier(pool, jobs, repetitions);
        },
        "pool"_a, "jobs"_a, "repetitions"_a,
        "Seconds from one empty job to the next, one figure a repetition.");
    nb::class_<ReadBuffer>(m, "ReadBuffer", "kernels/machine_limits.h")
        .def(
            "__init__",
            [](ReadBuffer *self, ThreadPool &pool, int64_t bytes) {
                if (bytes < 1)
                    throw std::invalid_argument("a buffer has at least one byte");
                nb::gil_scoped_release release;
                new (self) ReadBuffer(pool, bytes);
            },
            "pool"_a, "bytes"_a)
        .def_prop_ro("size", &ReadBuffer::size)
        .def(
            "measure",
            [](const ReadBuffer &buffer, ThreadPool &pool, int64_t loop, int64_t ahead,
               int64_t bytes, double seconds, int repetitions) {
                check_times(seconds, repetitions);
                nb::gil_scoped_release release;
                return buffer.measure(pool, chosen(read_loops(), loop), ahead, bytes, seconds,
                                      repetitions);
            },
            "pool"_a, "loop"_a, "ahead"_a, "bytes"_a, "seconds"_a, "repetitions"_a,
            "Bytes a second, one figure a repetition of about `seconds`.");
}

// Loops that reach a machine's limits: arithmetic with nothing to wait for, memory read as fast as
// it comes, and the thread pool with nothing to do.
//
// Several loops of each kind; the best one is this machine's limit. All run on the engine's own
// thread pool, so that a limit is taken on the threads that a step would have.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "memory.h"
#include "thread_pool.h"

namespace octavo {

// Independent multiply-adds on registers, enough of them in flight to hide their latency.
struct PeakLoop {
    const char *arithmetic; // "int8", "bf16" or "fp32"
    const char *name;       // the instruction
    int64_t ops;            // in an iteration; a multiply-add is two
    void (*run)(int64_t iterations);
    bool (*supported)();
};

// Reads a span as `streams` parts side by side; `ahead` bytes ahead are prefetched if it does that.
struct ReadLoop {
    const char *name; // width of the loads
    int streams;
    bool prefetches;
    int64_t (*run)(const std::byte *data, int64_t bytes, int64_t ahead); // bytes read
    bool (*supported)();
};

std::span<const PeakLoop> peak_loops();
std::span<const ReadLoop> read_loops();

// Operations a second on all threads of the pool, one figure a repetition of about `seconds`.
std::vector<double> measure_peak(ThreadPool &pool, const PeakLoop &loop, double seconds,
                                 int repetitions);

// Memory on huge pages that has been written.
class ReadBuffer {
  public:
    ReadBuffer(ThreadPool &pool, int64_t bytes);
    int64_t size() const { return int64_t(memory_.size()); }

    // Bytes a second of reading the first `bytes`, each thread its own share, again and again for
    // about `seconds` (at least once); one figure a repetition.
    std::vector<double> measure(ThreadPool &pool, const ReadLoop &loop, int64_t ahead,
                                int64_t bytes, double seconds, int repetitions) const;

  private:
    Memory memory_;
};

// Seconds from one job to the next in a run of `jobs` empty ones, cut up as a step's are; one
// figure a repetition.
std::vector<double> measure_barrier(ThreadPool &pool, int jobs, int repetitions);

} // namespace octavo

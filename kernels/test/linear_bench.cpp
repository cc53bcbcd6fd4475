// Speed of the linear kernels beside the limits of the machine, both taken in turn in one run.
//
//   linear_bench [tier] [threads] [format name …]
//
// Layers are run as the runtime runs them (kernels/runtime.cpp): a few rows share out column blocks
// over the threads, many rows are shared out in chunks. Each run takes other weights, 256 MB of
// them, so that these come from memory. For each number of rows: operations a second (a multiply-
// add is two), bytes of packed weights a second, and the share of the limit that binds: the time
// that the format's arithmetic at its peak (c) or reading the weights once (m) would have taken,
// whichever is longer, over the time taken. For a single row of a quantized format also bytes a
// second over those of Q4_0, the two in turn. Medians of several rounds; what takes long is left
// out.
#include "formats.h"
#include "machine_limits.h"
#include "memory.h"
#include "thread_pool.h"
#include "tier.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace octavo {
namespace {

constexpr Format kFormats[] = {Format::Q4_0,     Format::Q4_1,   Format::Q4_K,   Format::Q8_0,
                               Format::Q5_0,     Format::Q5_1,   Format::Q5_K,   Format::Q6_K,
                               Format::Q2_K,     Format::Q3_K,   Format::IQ4_NL, Format::IQ4_XS,
                               Format::MXFP4,    Format::I4,     Format::I3,     Format::I8,
                               Format::I2,       Format::T3_IQ1, Format::T3_IQ2, Format::T4_IQ3_XXS,
                               Format::T4_IQ3_S, Format::NVFP4,  Format::E4M3,   Format::BF16,
                               Format::F16,      Format::F32};
constexpr int64_t kGroupInputs = 128; // of the grouped formats, whose zeros are not the centre
constexpr int64_t kRows[] = {1, 4, 8, 32, 64, 512};
struct Shape {
    int64_t k, n;
};
constexpr Shape kShapes[] = {{576, 1536}, {1536, 576}, {2048, 8192}, {8192, 2048}};

constexpr int64_t kWeightBytes = int64_t(256) << 20;
constexpr int64_t kReadBytes = int64_t(256) << 20;
constexpr int64_t kMaxRows = 512;
constexpr int64_t kMaxWidth = 8192;
constexpr int64_t kChunkRows = 32; // a thread's, when rows are shared out
constexpr int kRounds = 7;
constexpr int kPairs = 21;         // rounds of two formats in turn
constexpr double kSeconds = 0.002; // of a measurement, about
constexpr double kLong = 0.1;      // seconds a layer: with more rows it is not measured

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

double median(std::vector<double> values) {
    std::nth_element(values.begin(), values.begin() + std::ssize(values) / 2, values.end());
    return values[values.size() / 2];
}

class Bench {
  public:
    Bench(const Tier &tier, int threads)
        : tier_(tier), pool_(threads), weights_(size_t(kWeightBytes)),
          activations_(size_t(kMaxRows * kMaxWidth * 4)), x_(size_t(kMaxRows * kMaxWidth)),
          out_(size_t(kMaxRows * kMaxWidth)), buffer_(pool_, kReadBytes) {
        // Any bits will do but a NaN's or a subnormal's.
        for (int64_t i = 0; i < kWeightBytes; ++i)
            weights_.data()[i] = static_cast<std::byte>(i % 2 == 0 ? 2 + i * 7 % 252 : 0x2c);
        for (size_t i = 0; i < x_.size(); ++i)
            x_[i] = static_cast<float>(i % 17) - 8;
        choose_read_loop();
    }

    void print_limits() {
        for (const char *arithmetic : {"int8", "bf16", "fp32"})
            if (const PeakLoop *loop = peak_loop(arithmetic))
                std::printf("%s %.0f Gop/s (%s)  ", arithmetic, 1e-9 * peak(*loop), loop->name);
        std::printf("read %.1f GB/s (%s, %d streams, %ld ahead)\n", 1e-9 * bandwidth(),
                    read_loop_->name, read_loop_->streams, read_ahead_);
    }

    void run(Format format, Shape shape) {
        std::printf("%-6s %4ld>%-4ld", format_name(format), shape.k, shape.n);
        double layer = 0;
        for (const int64_t rows : kRows) {
            if (layer > kLong)
                std::printf(" | %5s %4s %3s ", "-", "-", "-");
            else
                layer = run(format, shape, rows);
            if (rows == 1 && format_info(format).quantized)
                std::printf(" %4.2f", beside_q4_0(format, shape));
        }
        std::printf(" %9.2f\n", prepare_time(format, shape.k));
        std::fflush(stdout);
    }

  private:
    // The best loop of the tier's own vectors.
    const PeakLoop *peak_loop(const std::string &arithmetic) const {
        const std::string tier = tier_.name;
        const char *width = tier == "generic" ? "128" : tier == "avx2" ? "256" : "512";
        for (const PeakLoop &loop : peak_loops())
            if (loop.arithmetic == arithmetic && std::strstr(loop.name, width) != nullptr)
                return &loop;
        return nullptr;
    }

    double peak(const PeakLoop &loop) { return median(measure_peak(pool_, loop, kSeconds, 3)); }

    double bandwidth() {
        return median(buffer_.measure(pool_, *read_loop_, read_ahead_, kReadBytes, kSeconds, 1));
    }

    void choose_read_loop() {
        double best = 0;
        for (const ReadLoop &loop : read_loops())
            for (const int64_t ahead : {1024, 2048, 4096, 8192}) {
                const double rate =
                    median(buffer_.measure(pool_, loop, ahead, kReadBytes, kSeconds, 3));
                if (rate > best) {
                    best = rate;
                    read_loop_ = &loop;
                    read_ahead_ = ahead;
                }
                if (!loop.prefetches)
                    break;
            }
    }

    // Seconds a layer, `count` layers one after the other.
    double layers(Format format, Shape shape, int64_t rows, int64_t count) {
        const int64_t group = group_step(format) > 0 ? kGroupInputs : 0;
        const auto size = int64_t(tier_.linear.packed_bytes(format, shape.n, shape.k, group));
        const int64_t blocks = (shape.n + kColumns - 1) / kColumns;
        const bool chunked = rows > kChunkRows * pool_.size();
        const Job job = chunked ? Job{(rows + kPanel - 1) / kPanel, kChunkRows / kPanel}
                                : Job{blocks, std::max<int64_t>(1, blocks / (pool_.size() * 6))};
        const std::vector<Job> jobs(size_t(count), job);
        // On from where the last run, maybe of another format, has read.
        const int64_t slots = kWeightBytes / size, first = (next_ + size - 1) / size;
        const auto work = [&](int64_t layer, int, int64_t begin, int64_t end) {
            const PackedMatrix matrix{format, shape.n, shape.k, group,
                                      weights_.data() + (first + layer) % slots * size};
            if (!chunked) {
                tier_.linear.matmul(matrix, activations_.data(), rows, 0, rows, begin, end,
                                    out_.data(), shape.n, false);
                return;
            }
            for (int64_t row = begin * kPanel; row < end * kPanel; row += kChunkRows)
                tier_.linear.matmul(matrix, activations_.data(), rows, row,
                                    std::min({rows, end * kPanel, row + kChunkRows}), 0, blocks,
                                    out_.data(), shape.n, false);
        };
        const double begin = now();
        pool_.run(jobs.data(), count, work);
        next_ = (first + count) % slots * size;
        return (now() - begin) / double(count);
    }

    double packed_bytes(Format format, Shape shape) const {
        const int64_t group = group_step(format) > 0 ? kGroupInputs : 0;
        return double(tier_.linear.packed_bytes(format, shape.n, shape.k, group));
    }

    // Seconds a layer.
    double run(Format format, Shape shape, int64_t rows) {
        const bool bf16 =
            format == Format::BF16 && !tier_.linear.same_activations(Format::BF16, Format::F32);
        const PeakLoop *loop = peak_loop(format_info(format).quantized ? "int8"
                                         : bf16                        ? "bf16"
                                                                       : "fp32");
        tier_.linear.prepare(format, x_.data(), shape.k, rows, shape.k, activations_.data(), 0,
                             rows);
        const double ops = 2.0 * double(rows) * double(shape.k) * double(shape.n);
        const double bytes = packed_bytes(format, shape);
        const double once = layers(format, shape, rows, 1);
        const int64_t count = std::max<int64_t>(2, int64_t(2 * kSeconds / once));
        std::vector<double> seconds, shares;
        int memory_bound = 0;
        for (int round = 0; round < kRounds; ++round) {
            const double compute = ops / peak(*loop), read = bytes / bandwidth();
            seconds.push_back(layers(format, shape, rows, count));
            shares.push_back(std::max(compute, read) / seconds.back());
            memory_bound += read > compute ? 1 : 0;
        }
        const double time = median(seconds);
        std::printf(" | %5.0f %4.1f %3.0f%c", 1e-9 * ops / time, 1e-9 * bytes / time,
                    100 * median(shares), 2 * memory_bound > kRounds ? 'm' : 'c');
        return time;
    }

    // Bytes a second of one row over those of Q4_0, whose prepared activations are the same.
    double beside_q4_0(Format format, Shape shape) {
        const auto rate = [&](Format each) {
            const double bytes = packed_bytes(each, shape);
            return bytes / layers(each, shape, 1, std::max<int64_t>(2, int64_t(2e7 / bytes)));
        };
        std::vector<double> ratios;
        for (int round = 0; round < kPairs; ++round) {
            const double other = rate(Format::Q4_0);
            ratios.push_back(rate(format) / other);
        }
        return median(ratios);
    }

    // Nanoseconds for 32 numbers of a row, on one thread.
    double prepare_time(Format format, int64_t k) {
        constexpr int64_t kCount = 64;
        std::vector<double> times;
        for (int round = 0; round < 3 * kRounds; ++round) {
            const double begin = now();
            for (int64_t row = 0; row < kCount; ++row)
                tier_.linear.prepare(format, x_.data(), k, kCount, k, activations_.data(), row,
                                     row + 1);
            times.push_back(now() - begin);
        }
        return 1e9 * median(times) / double(kCount * k / 32);
    }

    const Tier &tier_;
    ThreadPool pool_;
    Memory weights_;
    Memory activations_;
    std::vector<float> x_, out_;
    ReadBuffer buffer_;
    const ReadLoop *read_loop_ = nullptr;
    int64_t read_ahead_ = 0;
    int64_t next_ = 0; // of the weights, what is to be read next
};

} // namespace
} // namespace octavo

int main(int argc, char **argv) {
    using namespace octavo;
    try {
        const Tier &tier = find_tier(argc > 1 ? argv[1] : "");
        const int threads = argc > 2 ? std::atoi(argv[2]) : 1;
        Bench bench(tier, threads);
        std::printf("%s, %d thread%s: ", tier.name, threads, threads == 1 ? "" : "s");
        bench.print_limits();
        std::printf("%-16s", "format  k>n");
        for (const int64_t rows : kRows)
            std::printf(" | %3ld: Gop GB/s   %%%s", rows, rows == 1 ? " Q4_0" : "");
        std::printf(" prepare ns\n");
        for (const Format format : kFormats) {
            const auto named = [&](const char *name) {
                return std::strcmp(name, format_name(format)) == 0;
            };
            if (argc > 3 && std::none_of(argv + 3, argv + argc, named))
                continue;
            for (const Shape shape : kShapes)
                if (shape.k % format_info(format).block_values == 0)
                    bench.run(format, shape);
        }
    } catch (const std::exception &error) {
        std::fprintf(stderr, "linear_bench: %s\n", error.what());
        return 1;
    }
}

#include "machine_limits.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <string>

#ifdef OCTAVO_X86
#include <immintrin.h>
#endif

namespace octavo {
namespace {

using Clock = std::chrono::steady_clock;

double since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

bool always() {
    return true;
}

// The compiler must take a vector for unknown from here on (HIDE), or for used (USE).
#if defined(OCTAVO_X86)
#define OCTAVO_VECTOR "v"
#elif defined(__aarch64__)
#define OCTAVO_VECTOR "w"
#else
#define OCTAVO_VECTOR "m"
#endif
#define HIDE(x) asm volatile("" : "+" OCTAVO_VECTOR(x))
#define USE(x) asm volatile("" : : OCTAVO_VECTOR(x))
// Vectors of 16 bytes where a target's own attributes are missing: "v" would mean more registers
// than there are.
#if defined(OCTAVO_X86)
#define HIDE_16(x) asm volatile("" : "+x"(x))
#define USE_16(x) asm volatile("" : : "x"(x))
#else
#define HIDE_16(x) HIDE(x)
#define USE_16(x) USE(x)
#endif

// --- arithmetic ----------------------------------------------------------------------------------

// Twelve accumulators: two instructions a cycle of up to six cycles each are kept busy, and sixteen
// registers hold them with their operands. Their first values are hidden, or the compiler would see
// that they are all alike and compute one. They neither grow without bound nor become subnormal.
constexpr int kChains = 12;

using Floats4 = float __attribute__((vector_size(16)));
using Shorts8 = int16_t __attribute__((vector_size(16)));

void fp32_generic(int64_t iterations) {
    Floats4 sums[kChains];
    Floats4 factor = {0.5f, 0.5f, 0.5f, 0.5f};
    const Floats4 one = {1.0f, 1.0f, 1.0f, 1.0f};
    for (Floats4 &sum : sums) {
        sum = one;
        HIDE_16(sum);
    }
    for (int64_t i = 0; i < iterations; ++i) {
        HIDE_16(factor);
        for (Floats4 &sum : sums)
            sum = sum * factor + one;
    }
    for (Floats4 &sum : sums)
        USE_16(sum);
}

void int8_generic(int64_t iterations) {
    Shorts8 sums[kChains] = {};
    for (Shorts8 &sum : sums)
        HIDE_16(sum);
    Shorts8 x = {1, 2, 3, 4, 5, 6, 7, 8};
    for (int64_t i = 0; i < iterations; ++i) {
        for (Shorts8 &sum : sums) {
            HIDE_16(x);
            sum += x * x;
        }
    }
    for (Shorts8 &sum : sums)
        USE_16(sum);
}

#ifdef OCTAVO_X86

bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
bool has_avx512() {
    return __builtin_cpu_supports("avx512f");
}
bool has_vnni() {
    return has_avx512() && __builtin_cpu_supports("avx512vnni");
}
bool has_bf16() {
    return has_avx512() && __builtin_cpu_supports("avx512bf16");
}

__attribute__((target("avx2,fma"))) void fp32_avx2(int64_t iterations) {
    __m256 sums[kChains];
    __m256 factor = _mm256_set1_ps(0.5f);
    const __m256 one = _mm256_set1_ps(1.0f);
    for (__m256 &sum : sums) {
        sum = one;
        HIDE(sum);
    }
    for (int64_t i = 0; i < iterations; ++i) {
        HIDE(factor);
        for (__m256 &sum : sums)
            sum = _mm256_fmadd_ps(sum, factor, one);
    }
    for (__m256 &sum : sums)
        USE(sum);
}

__attribute__((target("avx512f"))) void fp32_avx512(int64_t iterations) {
    __m512 sums[kChains];
    __m512 factor = _mm512_set1_ps(0.5f);
    const __m512 one = _mm512_set1_ps(1.0f);
    for (__m512 &sum : sums) {
        sum = one;
        HIDE(sum);
    }
    for (int64_t i = 0; i < iterations; ++i) {
        HIDE(factor);
        for (__m512 &sum : sums)
            sum = _mm512_fmadd_ps(sum, factor, one);
    }
    for (__m512 &sum : sums)
        USE(sum);
}

// Eight products of bytes are added in 16 bits before they are widened, as numbers of 4 bits allow.
constexpr int kNarrowSums = 8;

__attribute__((target("avx2"))) void int8_avx2(int64_t iterations) {
    constexpr int kWide = 4;
    __m256i sums[kWide] = {};
    for (__m256i &sum : sums)
        HIDE(sum);
    __m256i x = _mm256_set1_epi8(3);
    const __m256i ones = _mm256_set1_epi16(1);
    for (int64_t i = 0; i < iterations; ++i) {
        for (__m256i &sum : sums) {
            HIDE(x);
            __m256i narrow = _mm256_maddubs_epi16(x, x);
            for (int j = 1; j < kNarrowSums; ++j) {
                HIDE(x);
                narrow = _mm256_add_epi16(narrow, _mm256_maddubs_epi16(x, x));
            }
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(narrow, ones));
        }
    }
    for (__m256i &sum : sums)
        USE(sum);
}

__attribute__((target("avx512f,avx512vnni"))) void int8_avx512(int64_t iterations) {
    __m512i sums[kChains] = {};
    for (__m512i &sum : sums)
        HIDE(sum);
    __m512i x = _mm512_set1_epi8(3);
    for (int64_t i = 0; i < iterations; ++i) {
        HIDE(x);
        for (__m512i &sum : sums)
            sum = _mm512_dpbusd_epi32(sum, x, x);
    }
    for (__m512i &sum : sums)
        USE(sum);
}

__attribute__((target("avx512f,avx512bf16"))) void bf16_avx512(int64_t iterations) {
    __m512 sums[kChains];
    __m512i ones = _mm512_set1_epi32(0x3f803f80);
    const __m512i plus_and_minus = _mm512_set1_epi32(0x3f80bf80);
    for (__m512 &sum : sums) {
        sum = _mm512_set1_ps(1.0f);
        HIDE(sum);
    }
    for (int64_t i = 0; i < iterations; ++i) {
        HIDE(ones);
        for (__m512 &sum : sums)
            sum = _mm512_dpbf16_ps(sum, (__m512bh)ones, (__m512bh)plus_and_minus);
    }
    for (__m512 &sum : sums)
        USE(sum);
}

#endif

// --- reading -------------------------------------------------------------------------------------

constexpr int64_t kLine = 64;
constexpr int64_t kLines = 4; // of a stream, read in one go
constexpr int64_t kStride = kLine * kLines;

// Bytes of each of the parts that are read side by side: an odd number of strides, so that they do
// not all fall into the same sets of the caches.
int64_t part_bytes(int64_t bytes, int streams) {
    const int64_t strides = bytes / streams / kStride;
    return strides == 0 ? 0 : ((strides - 1) | 1) * kStride;
}

// Written once for each width of load: attributes do not reach into templates' arguments.
#define OCTAVO_READ_LOOP(name, attributes, Vector, load, combine, use)                             \
    template <int streams, bool prefetches>                                                        \
    attributes int64_t name(const std::byte *data, int64_t bytes, int64_t ahead) {                 \
        constexpr int64_t kVectors = kLine / int64_t(sizeof(Vector));                              \
        const int64_t part = part_bytes(bytes, streams);                                           \
        Vector seen[kLines] = {};                                                                  \
        for (int64_t i = 0; i < part; i += kStride) {                                              \
            for (int stream = 0; stream < streams; ++stream) {                                     \
                const std::byte *from = data + stream * part + i;                                  \
                for (int64_t line = 0; line < kLines; ++line) {                                    \
                    if constexpr (prefetches)                                                      \
                        __builtin_prefetch(from + ahead + line * kLine);                           \
                    for (int64_t j = 0; j < kVectors; ++j) {                                       \
                        Vector &into = seen[(line * kVectors + j) % kLines];                       \
                        into = combine(into, load(from + line * kLine + j * sizeof(Vector)));      \
                    }                                                                              \
                }                                                                                  \
            }                                                                                      \
        }                                                                                          \
        for (Vector &each : seen)                                                                  \
            use(each);                                                                             \
        return part * streams;                                                                     \
    }

using Words4 = uint32_t __attribute__((vector_size(16)));

inline Words4 load_generic(const std::byte *from) {
    Words4 value;
    std::memcpy(&value, from, sizeof value);
    return value;
}
inline Words4 or_generic(Words4 a, Words4 b) {
    return a | b;
}

OCTAVO_READ_LOOP(read_generic, , Words4, load_generic, or_generic, USE_16)

#ifdef OCTAVO_X86
#define OCTAVO_LOAD_256(from) _mm256_load_si256(reinterpret_cast<const __m256i *>(from))
OCTAVO_READ_LOOP(read_avx2, __attribute__((target("avx2"))), __m256i, OCTAVO_LOAD_256,
                 _mm256_or_si256, USE)
OCTAVO_READ_LOOP(read_avx512, __attribute__((target("avx512f"))), __m512i, _mm512_load_si512,
                 _mm512_or_si512, USE)
#endif

#define OCTAVO_READ_LOOPS(name, read, supported)                                                   \
    ReadLoop{name, 1, false, read<1, false>, supported},                                           \
        ReadLoop{name, 2, false, read<2, false>, supported},                                       \
        ReadLoop{name, 4, false, read<4, false>, supported},                                       \
        ReadLoop{name, 1, true, read<1, true>, supported},                                         \
        ReadLoop{name, 2, true, read<2, true>, supported}, ReadLoop {                              \
        name, 4, true, read<4, true>, supported                                                    \
    }

template <class Loop, size_t size> std::vector<Loop> usable(const Loop (&loops)[size]) {
    std::vector<Loop> result;
    std::copy_if(std::begin(loops), std::end(loops), std::back_inserter(result),
                 [](const Loop &loop) { return loop.supported(); });
    return result;
}

// --- measuring -----------------------------------------------------------------------------------

constexpr int64_t kPieces = 16; // of each thread's share: what one that is held up leaves to others
constexpr int64_t kSmallest = 1 << 20; // bytes of a share that is worth cutting up

template <class Work> double timed(ThreadPool &pool, int64_t items, const Work &work) {
    const Job job{items, 1};
    const auto start = Clock::now();
    pool.run(&job, 1, [&](int64_t, int, int64_t begin, int64_t end) {
        for (int64_t item = begin; item < end; ++item)
            work(item);
    });
    return since(start);
}

} // namespace

std::span<const PeakLoop> peak_loops() {
    static constexpr PeakLoop kLoops[] = {
#ifdef OCTAVO_X86
        {"int8", "vpdpbusd, 512 bits", kChains * 128, int8_avx512, has_vnni},
        {"int8", "vpmaddubsw, 256 bits", 4 * kNarrowSums * 64, int8_avx2, has_avx2},
        {"bf16", "vdpbf16ps, 512 bits", kChains * 64, bf16_avx512, has_bf16},
        {"fp32", "vfmadd, 512 bits", kChains * 32, fp32_avx512, has_avx512},
        {"fp32", "vfmadd, 256 bits", kChains * 16, fp32_avx2, has_avx2},
#endif
        {"int8", "16-bit multiply and add, 128 bits", kChains * 16, int8_generic, always},
        {"fp32", "multiply and add, 128 bits", kChains * 8, fp32_generic, always},
    };
    static const std::vector<PeakLoop> loops = usable(kLoops);
    return loops;
}

std::span<const ReadLoop> read_loops() {
    static constexpr ReadLoop kLoops[] = {
#ifdef OCTAVO_X86
        OCTAVO_READ_LOOPS("512-bit loads", read_avx512, has_avx512),
        OCTAVO_READ_LOOPS("256-bit loads", read_avx2, has_avx2),
#endif
        OCTAVO_READ_LOOPS("128-bit loads", read_generic, always),
    };
    static const std::vector<ReadLoop> loops = usable(kLoops);
    return loops;
}

std::vector<double> measure_peak(ThreadPool &pool, const PeakLoop &loop, double seconds,
                                 int repetitions) {
    // How many iterations a piece takes, found by doubling, which also warms up.
    const double piece = seconds / double(kPieces);
    int64_t iterations = 1024;
    for (double spent = 0.0; spent < piece / 2; iterations *= 2) {
        const auto start = Clock::now();
        loop.run(iterations);
        spent = since(start);
    }
    const int64_t items = pool.size() * kPieces;
    const auto work = [&](int64_t) { loop.run(iterations); };
    timed(pool, items, work);
    std::vector<double> rates;
    for (int i = 0; i < repetitions; ++i)
        rates.push_back(double(items * iterations * loop.ops) / timed(pool, items, work));
    return rates;
}

ReadBuffer::ReadBuffer(ThreadPool &pool, int64_t bytes) : memory_(size_t(bytes)) {
    constexpr int64_t kChunk = 2 << 20;
    timed(pool, (bytes + kChunk - 1) / kChunk, [&](int64_t chunk) {
        const int64_t begin = chunk * kChunk;
        std::memset(memory_.data() + begin, 1, size_t(std::min(kChunk, bytes - begin)));
    });
}

std::vector<double> ReadBuffer::measure(ThreadPool &pool, const ReadLoop &loop, int64_t ahead,
                                        int64_t bytes, double seconds, int repetitions) const {
    const int64_t share = bytes / pool.size();
    const int64_t pieces = share < kPieces * kSmallest ? 1 : kPieces;
    const int64_t piece = share / pieces / kStride * kStride;
    if (bytes > size() || piece < loop.streams * kStride)
        throw std::invalid_argument("cannot read " + std::to_string(bytes) + " bytes of " +
                                    std::to_string(size()) + " on " + std::to_string(pool.size()) +
                                    " threads");
    int64_t passes = 1;
    const auto work = [&](int64_t item) {
        for (int64_t pass = 0; pass < passes; ++pass)
            loop.run(memory_.data() + item * piece, piece, ahead);
    };
    const int64_t items = pool.size() * pieces;
    const int64_t read = items * part_bytes(piece, loop.streams) * loop.streams;
    timed(pool, items, work);
    for (double spent; (spent = timed(pool, items, work)) < seconds / 2;)
        passes *= spent < seconds / 16 ? 8 : 2;
    std::vector<double> rates;
    for (int i = 0; i < repetitions; ++i)
        rates.push_back(double(read * passes) / timed(pool, items, work));
    return rates;
}

std::vector<double> measure_barrier(ThreadPool &pool, int jobs, int repetitions) {
    const std::vector<Job> run(size_t(jobs), Job{pool.size() * 6, 1});
    const auto nothing = [](int64_t, int, int64_t, int64_t) {};
    std::vector<double> seconds;
    for (int i = 0; i <= repetitions; ++i) {
        const auto start = Clock::now();
        pool.run(run.data(), jobs, nothing);
        if (i > 0) // the first wakes the threads
            seconds.push_back(since(start) / double(jobs));
    }
    return seconds;
}

} // namespace octavo

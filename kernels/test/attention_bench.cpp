// Speed of paged attention on all threads, beside the machine's limits measured in between.
//
//   attention_bench [threads] [tier] [fp16|bf16|int8|int4] [decode|prefill|both] [shape number …]
//
// Decode: bytes of keys and values a second, against the bandwidth of reading memory; each of the
// many layers of a step has its own, so that they come from memory. Prefill: operations a second (a
// multiplication and an addition for each dimension of a seen key and of its value), against the
// peak of the arithmetic used. Best of some repetitions.
#include "memory.h"
#include "runtime.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#ifdef OCTAVO_X86
#include <immintrin.h>
#endif

using namespace octavo;

namespace {

struct Shape {
    int64_t heads, kv_heads, dim;
};
constexpr Shape kShapes[] = {{9, 3, 64}, {4, 1, 256}, {32, 8, 64}, {32, 8, 128}, {32, 32, 80}};
constexpr int64_t kBytes = int64_t{160} << 20; // of keys and values in a step: well beyond caches

double best_of(int repeats, const std::function<void()> &work) {
    double best = 1e9;
    for (int i = 0; i < repeats; ++i) {
        const auto begin = std::chrono::steady_clock::now();
        work();
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
        best = std::min(best, took.count());
    }
    return best;
}

void on_all(ThreadPool &pool, const std::function<void(int)> &work) {
    const Job job{pool.size(), 1};
    pool.run(&job, 1, [&](int64_t, int, int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
            work(int(i));
    });
}

volatile float sink;

#ifdef OCTAVO_X86
__attribute__((target("avx512f,avx512bf16"))) void multiply(bool pairs, int64_t times) {
    __m512 total[20];
    for (auto &each : total)
        each = _mm512_setzero_ps();
    __m512 a = _mm512_set1_ps(1.0f), b = _mm512_set1_ps(1e-9f);
    for (int64_t i = 0; i < times; ++i) {
        asm volatile("" : "+v"(a), "+v"(b));
#pragma GCC unroll 20
        for (auto &each : total) {
            each = pairs ? _mm512_dpbf16_ps(each, (__m512bh)a, (__m512bh)b)
                         : _mm512_fmadd_ps(a, b, each);
        }
    }
    __m512 all = total[0];
    for (const auto &each : total)
        all = _mm512_add_ps(all, each);
    sink = _mm512_reduce_add_ps(all);
}

// Gflop/s; 0 where the CPU has no such instruction.
double peak(ThreadPool &pool, bool pairs) {
    if (!__builtin_cpu_supports("avx512f") || (pairs && !__builtin_cpu_supports("avx512bf16")))
        return 0.0;
    constexpr int64_t kTimes = 200'000;
    const double took = best_of(5, [&] { on_all(pool, [&](int) { multiply(pairs, kTimes); }); });
    return 1e-9 * 20 * 32 * (pairs ? 2 : 1) * kTimes * pool.size() / took;
}
#else
double peak(ThreadPool &, bool) {
    return 0.0;
}
#endif

// GB/s of reading memory on all threads: the better of with and without fetching ahead.
double bandwidth(ThreadPool &pool, const Memory &memory) {
    const int64_t share = int64_t(memory.size()) / pool.size() / 4096 * 4096;
    const auto read = [&](int thread, int64_t distance) {
        const std::byte *begin = memory.data() + thread * share;
        uint64_t all[8] = {};
        for (const std::byte *p = begin; p < begin + share; p += 64) {
            __builtin_prefetch(p + distance, 0, 2);
            uint64_t line[8];
            std::memcpy(line, p, sizeof line);
            for (int i = 0; i < 8; ++i)
                all[i] ^= line[i];
        }
        sink = float(std::accumulate(all, all + 8, uint64_t{0}) & 1);
    };
    double best = 1e9;
    for (const int64_t distance : {0, 4096}) {
        best = std::min(
            best, best_of(2, [&] { on_all(pool, [&](int thread) { read(thread, distance); }); }));
    }
    return 1e-9 * double(share * pool.size()) / best;
}

// Sequences of `context` tokens each, of which the last `tokens` are queries.
struct Case {
    RuntimeConfig config;
    std::vector<int32_t> positions, offsets, slots, tables;
    StepBatch batch{};
    std::vector<float> q, out;
    Memory arena;

    Case(const Shape &shape, KvKind kind, int64_t seqs, int64_t context, int64_t tokens)
        : config{} {
        const int64_t blocks = (context + 15) / 16;
        config.max_tokens = config.max_logits_rows = seqs * tokens;
        config.max_seqs = seqs;
        config.max_blocks_per_seq = blocks;
        config.num_blocks = blocks * seqs;
        config.block_size = 16;
        config.num_heads = shape.heads;
        config.kv_kind = kind;
        config.groups = {{1, 0, shape.kv_heads, shape.dim}};
        KvGroup &group = config.groups[0];
        const int64_t layer_bytes = config.group_bytes(group) * config.num_blocks;
        if (tokens == 1)
            group.layers = std::clamp<int64_t>(kBytes / layer_bytes, 1, 1000);
        config.block_bytes = config.group_bytes(group);
        arena = Memory(size_t(layer_bytes * group.layers));
        // Small numbers in either format, and small scales.
        auto *halves = reinterpret_cast<uint16_t *>(arena.data());
        for (size_t i = 0; i < arena.size() / 2; ++i)
            halves[i] = uint16_t((i * 40503 >> 3 & 0x83ff) | 0x3c00);
        for (int64_t s = 0; s < seqs; ++s) {
            slots.push_back(int32_t(s));
            offsets.push_back(int32_t(s * tokens));
            for (int64_t t = context - tokens; t < context; ++t)
                positions.push_back(int32_t(t));
            // As they come when sequences grow together.
            for (int64_t b = 0; b < blocks; ++b)
                tables.push_back(int32_t(b * seqs + s));
        }
        offsets.push_back(int32_t(seqs * tokens));
        q.resize(size_t(seqs * tokens * shape.heads * shape.dim), 0.01f);
        out.resize(q.size());
        batch.positions = positions.data();
        batch.tokens = seqs * tokens;
        batch.seq_offsets = offsets.data();
        batch.seq_slots = slots.data();
        batch.seqs = seqs;
        batch.block_tables = tables.data();
    }

    double seconds(ThreadPool &pool, const Tier &tier, int repeats) {
        PagedAttention attention(tier, config, pool.size());
        attention.plan(batch);
        const std::vector<Job> jobs(size_t(config.groups[0].layers), attention.job(0));
        const int64_t width = config.num_heads * config.groups[0].head_dim;
        return best_of(repeats, [&] {
            pool.run(jobs.data(), int64_t(jobs.size()),
                     [&](int64_t layer, int thread, int64_t begin, int64_t end) {
                         attention.run({0, layer, 0.125f, 0.0f}, q.data(), width, nullptr,
                                       out.data(), width, arena.data(), thread, begin, end);
                     });
        });
    }
};

} // namespace

int main(int argc, char **argv) {
    const int threads = argc > 1 ? std::atoi(argv[1]) : 2;
    const Tier &tier = find_tier(argc > 2 ? argv[2] : "");
    constexpr const char *kKinds[] = {"fp16", "bf16", "int8", "int4"};
    auto kind = KvKind::BF16;
    for (int i = 0; i < 4; ++i) {
        if (argc > 3 && argv[3] == std::string(kKinds[i]))
            kind = KvKind(i);
    }
    const std::string what = argc > 4 ? argv[4] : "both";
    std::vector<size_t> shapes;
    for (int i = 5; i < argc; ++i)
        shapes.push_back(size_t(std::atoi(argv[i])) % std::size(kShapes));
    for (size_t i = 0; shapes.size() < std::size(kShapes) && argc <= 5; ++i)
        shapes.push_back(i);
    ThreadPool pool(threads);
    Memory memory(size_t{192} << 20);
    std::memset(memory.data(), 1, memory.size());
    const bool pairs = kind == KvKind::BF16 && tier.name == std::string("avx512_bf16");
    std::printf("%s, %s cache, %d threads; peaks: fp32 %.0f Gflop/s, bf16 %.0f\n", tier.name,
                kKinds[int(kind)], threads, peak(pool, false), peak(pool, true));
    for (const size_t index : shapes) {
        const Shape &shape = kShapes[index];
        std::printf("%ld heads on %ld of %ld\n", long(shape.heads), long(shape.kv_heads),
                    long(shape.dim));
        for (const int64_t seqs : {1, 16, 32}) {
            for (const int64_t context : {128, 2048, 8192}) {
                Case test(shape, kind, seqs, context, 1);
                if (what == "prefill" || int64_t(test.arena.size()) > int64_t{3} << 30)
                    continue;
                const double before = bandwidth(pool, memory);
                const double took = test.seconds(pool, tier, 3);
                const double limit = std::max(before, bandwidth(pool, memory));
                const double rate = 1e-9 * double(test.arena.size()) / took;
                std::printf(
                    "  decode %2ld at %4ld: %6.2f us a layer, %5.1f of %.1f GB/s (%.0f %%)\n",
                    long(seqs), long(context), 1e6 * took / double(test.config.groups[0].layers),
                    rate, limit, 100 * rate / limit);
                std::fflush(stdout);
            }
        }
        for (const int64_t tokens : {512, 2048, 8192}) {
            Case test(shape, kind, 1, tokens, tokens);
            if (what == "decode")
                continue;
            const double took = test.seconds(pool, tier, tokens > 2048 ? 1 : 3);
            const double operations =
                4.0 * double(tokens) * double(tokens + 1) / 2 * double(shape.heads * shape.dim);
            const double limit = peak(pool, pairs);
            std::printf("  prefill %4ld: %7.2f ms a layer, %5.1f of %.0f Gflop/s (%.0f %%)\n",
                        long(tokens), 1e3 * took, 1e-9 * operations / took, limit,
                        1e-9 * operations / took / limit * 100);
            std::fflush(stdout);
        }
    }
}

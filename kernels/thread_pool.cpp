#include "thread_pool.h"

#include <chrono>
#include <stdexcept>
#include <string>

#include <sched.h>

#ifdef OCTAVO_X86
#include <immintrin.h>
#endif

namespace octavo {
namespace {

inline void pause() {
#ifdef OCTAVO_X86
    _mm_pause();
#endif
}

// A pause takes some 15 to 40 ns, so these spins last some tens of microseconds.
constexpr int kSpinsBeforeYield = 1000;
constexpr int kSpinsBeforeSleep = 2000;

} // namespace

ThreadPool::ThreadPool(int threads) : size_(threads) {
    if (threads < 1 || threads > 1024) {
        throw std::invalid_argument("threads is " + std::to_string(threads) +
                                    ", outside 1 to 1024");
    }
    claims_ = std::make_unique<Claims[]>(size_t(threads));
    workers_.reserve(size_t(threads - 1));
    try {
        for (int i = 1; i < threads; ++i)
            workers_.emplace_back([this, i] { work(i); });
    } catch (...) {
        stopping_ = true;
        runs_.fetch_add(1, std::memory_order_release);
        runs_.notify_all();
        for (std::thread &worker : workers_)
            worker.join();
        throw;
    }
}

ThreadPool::~ThreadPool() {
    stopping_ = true;
    runs_.fetch_add(1, std::memory_order_release);
    runs_.notify_all();
    for (std::thread &worker : workers_)
        worker.join();
}

void ThreadPool::start(Entry entry, void *context) {
    entry_ = entry;
    context_ = context;
    if (size_ > 1) {
        runs_.fetch_add(1, std::memory_order_release);
        runs_.notify_all();
    }
    entry(context, 0);
    barrier();
}

void ThreadPool::work(int thread) {
    for (uint32_t seen = 0;; ++seen) {
        for (int i = 0; i < kSpinsBeforeSleep; ++i) {
            if (runs_.load(std::memory_order_acquire) != seen)
                break;
            pause();
        }
        runs_.wait(seen, std::memory_order_acquire);
        if (stopping_)
            return;
        entry_(context_, thread);
        barrier();
    }
}

void ThreadPool::wait_for_phase_after(uint32_t phase) {
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins) {
        if (spins < kSpinsBeforeYield) {
            pause();
        } else {
            sched_yield(); // the thread waited for may need this core
        }
    }
}

} // namespace octavo

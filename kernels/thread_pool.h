// Threads that run a step together: they meet at barriers some hundred times a step, so waiting
// spins first; between steps they sleep.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace octavo {

class ThreadPool {
  public:
    // The caller of run() is one of the threads. Throws std::system_error.
    explicit ThreadPool(int threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool &) = delete;
    ThreadPool &operator=(const ThreadPool &) = delete;

    int size() const { return size_; }

    // Calls work(thread) on every thread, thread 0 being the caller, and returns when all have
    // returned. `work` must not throw. One run at a time.
    template <class Work> void run(Work &&work) {
        using Type = std::remove_reference_t<Work>;
        start([](void *context, int thread) { (*static_cast<Type *>(context))(thread); },
              const_cast<void *>(static_cast<const void *>(&work)));
    }

    // Within run: returns when every thread is here.
    void barrier() {
        const uint32_t phase = phase_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == uint32_t(size_)) {
            arrived_.store(0, std::memory_order_relaxed);
            phase_.store(phase + 1, std::memory_order_release);
            return;
        }
        wait_for_phase_after(phase);
    }

    // The first item of a thread's share of `items`; the next thread's ends it.
    int64_t share_begin(int thread, int64_t items) const {
        return (items * thread + size_ - 1) / size_;
    }

    // Within run, at most once between two barriers and by every thread with the same arguments:
    // calls body(begin, end) for ranges of at most `grain` items that together are [0, items). Each
    // thread begins with a contiguous share of its own, the same in every step, and then helps
    // those that are behind.
    template <class Body> void share(int thread, int64_t items, int64_t grain, Body &&body) {
        if (size_ == 1) {
            if (items > 0)
                body(int64_t(0), items);
            return;
        }
        const uint64_t phase = phase_.load(std::memory_order_relaxed);
        for (int step = 0; step < size_; ++step) {
            const int owner = (thread + step) % size_;
            const int64_t begin = share_begin(owner, items);
            const int64_t end = share_begin(owner + 1, items);
            for (;;) {
                const int64_t at =
                    begin + claim(owner, phase, (end - begin + grain - 1) / grain) * grain;
                if (at < begin)
                    break;
                body(at, at + grain < end ? at + grain : end);
            }
        }
    }

  private:
    using Entry = void (*)(void *, int);

    void start(Entry entry, void *context);
    void work(int thread);
    void wait_for_phase_after(uint32_t phase);

    // Takes the next of `count` pieces of the owner's share, or returns -1. A count of an earlier
    // phase means that none has been taken in this one.
    int64_t claim(int owner, uint64_t phase, int64_t count) {
        std::atomic<uint64_t> &claims = claims_[size_t(owner)].value;
        uint64_t seen = claims.load(std::memory_order_relaxed);
        for (;;) {
            const auto taken = int64_t((seen >> 32) == phase ? seen & 0xffffffffu : 0);
            if (taken >= count)
                return -1;
            const uint64_t next = phase << 32 | uint64_t(taken + 1);
            if (claims.compare_exchange_weak(seen, next, std::memory_order_relaxed))
                return taken;
        }
    }

    struct alignas(64) Claims {
        std::atomic<uint64_t> value{0};
    };

    const int size_;
    std::unique_ptr<Claims[]> claims_;
    std::vector<std::thread> workers_;
    Entry entry_ = nullptr;
    void *context_ = nullptr;
    bool stopping_ = false;
    alignas(64) std::atomic<uint32_t> runs_{0};
    alignas(64) std::atomic<uint32_t> arrived_{0};
    alignas(64) std::atomic<uint32_t> phase_{1};
};

} // namespace octavo

#include "thread_pool.h"

#include <algorithm>
#include <climits>
#include <stdexcept>
#include <string>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "float_environment.h"

#ifdef OCTAVO_X86
#include <immintrin.h>
#endif

namespace octavo {
namespace {

constexpr uint32_t kOpen = 1u << 31;
constexpr int kClaimBits = 16;
constexpr int64_t kMaxPieces = (1 << kClaimBits) - 1;

// A pause takes 15 to 45 ns, so the longest spin lasts some tens of microseconds.
constexpr int kShortestSpin = 50;
constexpr int kLongestSpin = 1500;
// Between the end of a step and the task behind it: a tenth of a millisecond and more.
constexpr int kExpectingSpin = 6000;

// A worker that for so long neither begins a job of its task nor ends it has no core; what it does
// between two jobs takes a fraction of that. No worker is woken for so many tasks then.
constexpr std::chrono::milliseconds kHeldUpAfter{1};
constexpr int kHeldUp = 64;

// States of a task.
constexpr uint32_t kNone = 0, kWaiting = 1, kRunning = 2;

// Of the thread that this is: its number in its pool, and whether it runs a task.
thread_local int self = 0;
thread_local bool in_task = false;

void pause() {
#ifdef OCTAVO_X86
    _mm_pause();
#endif
}

// Sleeps while the word holds `value`, or returns for no reason.
void futex_wait(std::atomic<uint32_t> &word, uint32_t value) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t> &word) {
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

// Whether the word changed from `value` within the spin. The limit falls when spinning was in vain
// (a core is missing: the thread waited for needs this one) and recovers when it was not.
bool spin_until_changed(const std::atomic<uint32_t> &word, uint32_t value, int &limit) {
    for (int i = 0; i < limit; ++i) {
        if (word.load(std::memory_order_acquire) != value) {
            limit = std::min(kLongestSpin, limit + limit / 8);
            return true;
        }
        pause();
    }
    limit = std::max(kShortestSpin, limit / 2);
    return false;
}

// Sleeps until the word is no longer `value`. Whoever changes it looks at `sleepers` afterwards.
void sleep_until_changed(std::atomic<uint32_t> &word, uint32_t value,
                         std::atomic<uint32_t> &sleepers) {
    sleepers.fetch_add(1);
    while (word.load() == value)
        futex_wait(word, value);
    sleepers.fetch_sub(1);
}

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
        stop();
        throw;
    }
}

ThreadPool::~ThreadPool() {
    stop();
}

void ThreadPool::stop() {
    stopping_ = true;
    runs_.fetch_add(1);
    futex_wake_all(runs_);
    for (std::thread &worker : workers_)
        worker.join();
}

void ThreadPool::run_jobs(const Job *jobs, int64_t count, Entry entry, void *context,
                          Time *finished) {
    const DefaultFloats floats;
    if (size_ == 1) {
        for (int64_t job = 0; job < count; ++job) {
            entry(context, job, 0, 0, jobs[job].items);
            if (finished)
                finished[job] = std::chrono::steady_clock::now();
        }
        return;
    }
    if (!in_task)
        finish();
    if (count == 0)
        return;
    finished_ = finished;
    jobs_ = jobs;
    count_ = count;
    entry_ = entry;
    context_ = context;
    first_phase_ = phase_.load(std::memory_order_relaxed);
    gate_.store(kOpen, std::memory_order_release);
    runs_.fetch_add(1);
    if (idle_.load() > 0)
        futex_wake_all(runs_);
    take_part(self, false);
    // Nobody may read this run any more once it returns.
    int limit = kLongestSpin;
    gate_.fetch_and(~kOpen, std::memory_order_acq_rel);
    while (const uint32_t inside = gate_.load(std::memory_order_acquire)) {
        if (!spin_until_changed(gate_, inside, limit))
            futex_wait(gate_, inside);
    }
    first_tag_ += uint64_t(count);
}

void ThreadPool::work(int thread) {
    const DefaultFloats floats; // a thread starts with its creator's
    self = thread;
    int limit = kLongestSpin;
    for (uint32_t seen = 0;;) {
        if (!spin_until_changed(runs_, seen, limit))
            sleep_until_changed(runs_, seen, idle_);
        limit = expecting_.load(std::memory_order_relaxed) ? kExpectingSpin : kLongestSpin;
        seen = runs_.load(std::memory_order_acquire);
        if (stopping_)
            return;
        take_task();
        if (join())
            take_part(thread, true);
    }
}

void ThreadPool::start(void (*task)(void *), void *context) {
    finish();
    task_ = task;
    task_context_ = context;
    task_state_.store(kWaiting);
    if (size_ == 1)
        return;
    if (held_up_ > 0) {
        --held_up_;
        return;
    }
    runs_.fetch_add(1);
    if (idle_.load() > 0)
        futex_wake_all(runs_);
}

// Runs the task that waits, if one does.
bool ThreadPool::take_task() {
    uint32_t state = kWaiting;
    if (!task_state_.compare_exchange_strong(state, kRunning))
        return false;
    const DefaultFloats floats;
    expecting_.store(false, std::memory_order_relaxed); // this is what was expected
    in_task = true;
    task_(task_context_);
    in_task = false;
    task_state_.store(kNone);
    if (finishing_.load() > 0) {
        runs_.fetch_add(1);
        futex_wake_all(runs_);
    }
    return true;
}

void ThreadPool::finish() {
    int spins = 0; // since there was a job to help with
    for (;;) {
        const uint32_t seen = runs_.load();
        if (task_state_.load() == kNone || take_task())
            return;
        if (join()) {
            take_part(self, true);
            spins = 0;
        } else if (++spins < kLongestSpin) {
            pause();
        } else {
            const Time asleep = std::chrono::steady_clock::now();
            finishing_.fetch_add(1);
            if (task_state_.load() != kNone) // or else its end may have woken nobody
                sleep_until_changed(runs_, seen, idle_);
            finishing_.fetch_sub(1);
            if (std::chrono::steady_clock::now() - asleep > kHeldUpAfter)
                held_up_ = kHeldUp;
            spins = 0;
        }
    }
}

void ThreadPool::cancel(const void *context) {
    if (task_context_ != context)
        return; // the task that came since has seen to the context's
    uint32_t state = kWaiting;
    if (!task_state_.compare_exchange_strong(state, kNone))
        finish();
}

bool ThreadPool::join() {
    uint32_t seen = gate_.load(std::memory_order_relaxed);
    while (seen & kOpen) {
        if (gate_.compare_exchange_weak(seen, seen + 1, std::memory_order_acquire))
            return true;
    }
    return false;
}

void ThreadPool::leave() {
    const bool last_of_closed = gate_.fetch_sub(1, std::memory_order_acq_rel) == 1;
    if (last_of_closed)
        futex_wake_all(gate_);
}

// A worker enters after join() and leaves by itself; the caller stays until the last job is done.
void ThreadPool::take_part(int thread, bool is_worker) {
    int limit = kLongestSpin;
    for (;;) {
        const uint32_t phase = phase_.load(std::memory_order_acquire);
        const auto index = int64_t(phase - first_phase_);
        if (index == count_)
            break;
        const Job &job = jobs_[index];
        const int64_t items = do_items(job, index, thread);
        if (items > 0 && done_.fetch_add(items, std::memory_order_acq_rel) + items == job.items) {
            const bool more = index + 1 < count_;
            // A next job of one item is done by this thread before a sleeper would be awake.
            const bool wake = !more || jobs_[index + 1].items > 1;
            if (finished_)
                finished_[index] = std::chrono::steady_clock::now();
            done_.store(0, std::memory_order_relaxed);
            phase_.store(phase + 1);
            if (wake && waiting_.load() > 0)
                futex_wake_all(phase_);
            continue;
        }
        if (spin_until_changed(phase_, phase, limit))
            continue;
        if (is_worker)
            leave();
        sleep_until_changed(phase_, phase, waiting_);
        if (is_worker && !join())
            return;
    }
    if (is_worker)
        leave();
}

// Does the pieces of a job that this thread can get; returns how many items that were.
int64_t ThreadPool::do_items(const Job &job, int64_t index, int thread) {
    const uint64_t tag = first_tag_ + uint64_t(index);
    int64_t total = 0;
    for (int step = 0; step < size_; ++step) {
        const int owner = (thread + step) % size_;
        const int64_t begin = (job.items * owner + size_ - 1) / size_;
        const int64_t end = (job.items * (owner + 1) + size_ - 1) / size_;
        const int64_t grain = std::max(job.grain, (end - begin + kMaxPieces - 1) / kMaxPieces);
        const int64_t pieces = (end - begin + grain - 1) / grain;
        for (int64_t piece; (piece = claim(owner, tag, pieces)) >= 0;) {
            const int64_t first = begin + piece * grain;
            const int64_t last = std::min(first + grain, end);
            entry_(context_, index, thread, first, last);
            total += last - first;
        }
    }
    return total;
}

// Takes the next piece of the owner's share of the job, or returns -1. An older tag means that none
// has been taken; a newer one, that the job is over and this thread late.
int64_t ThreadPool::claim(int owner, uint64_t tag, int64_t pieces) {
    if (pieces == 0)
        return -1;
    std::atomic<uint64_t> &claims = claims_[size_t(owner)].value;
    uint64_t seen = claims.load(std::memory_order_relaxed);
    for (;;) {
        const uint64_t seen_tag = seen >> kClaimBits;
        if (seen_tag > tag)
            return -1;
        const auto taken = int64_t(seen_tag == tag ? seen & uint64_t(kMaxPieces) : 0);
        if (taken >= pieces)
            return -1;
        const uint64_t next = tag << kClaimBits | uint64_t(taken + 1);
        if (claims.compare_exchange_weak(seen, next, std::memory_order_acq_rel))
            return taken;
    }
}

} // namespace octavo

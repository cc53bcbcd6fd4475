// Threads that run a list of jobs, each cut into items, one job after the other.
//
// A step has some hundred jobs of a few microseconds, so going from one to the next must cost next
// to nothing; and the threads share their cores with others (the HTTP thread, neighbours), so one
// that is not running must not hold up the rest. Therefore a job is over when its items are done,
// not when all threads have come by: whoever runs takes what is left, and a thread that was away
// joins wherever the others are. Waiting spins for some microseconds, then sleeps.
//
// Beside that a worker may be given a task, which runs jobs of its own while the caller goes on.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

namespace octavo {

struct Job {
    int64_t items; // at least 1
    int64_t grain; // items taken at a time, at least 1
};

class ThreadPool {
  public:
    // The caller of run() is one of the threads. Throws std::invalid_argument, std::system_error.
    explicit ThreadPool(int threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool &) = delete;
    ThreadPool &operator=(const ThreadPool &) = delete;

    using Time = std::chrono::steady_clock::time_point;

    int size() const { return size_; }

    // Calls work(job, thread, begin, end) for ranges that together are [0, items) of each job, all
    // of a job before any of the next. A thread begins with a contiguous share of its own, the same
    // in every run, and then helps those that are behind. `work` must not throw. One run at a time.
    // When each job was done goes to `finished`, if given.
    template <class Work>
    void run(const Job *jobs, int64_t count, Work &&work, Time *finished = nullptr) {
        using Type = std::remove_reference_t<Work>;
        const auto call = [](void *context, int64_t job, int thread, int64_t begin, int64_t end) {
            (*static_cast<Type *>(context))(job, thread, begin, end);
        };
        run_jobs(jobs, count, call, const_cast<void *>(static_cast<const void *>(&work)), finished);
    }

    // Hands a task to whichever worker comes first: it runs while the caller goes on, and the jobs
    // that it runs in turn are shared with the others. One that none has taken up by `finish` is
    // run there, as is every one of a single thread. Where a worker was held up with one, its core
    // has other things to do, and none is woken for the next ones. `task` must not throw, and both
    // must live until `finish` or `cancel`. One at a time: `start`, and `run` where there are more
    // threads, finish the one before.
    void start(void (*task)(void *), void *context);
    // Until the task that was started, if any, has been run; helps with its jobs.
    void finish();
    // Until the context's task, if the last that was started is one, runs no more; one that has not
    // begun never will.
    void cancel(const void *context);
    // Whether a task will come soon after the next runs, for which workers had better stay awake:
    // to wake one takes its caller tens of microseconds.
    void expect(bool task) { expecting_.store(task && held_up_ == 0, std::memory_order_relaxed); }

  private:
    using Entry = void (*)(void *, int64_t, int, int64_t, int64_t);

    void run_jobs(const Job *jobs, int64_t count, Entry entry, void *context, Time *finished);
    void work(int thread);
    bool take_task();
    void stop();
    bool join();
    void leave();
    void take_part(int thread, bool is_worker);
    int64_t do_items(const Job &job, int64_t index, int thread);
    int64_t claim(int owner, uint64_t tag, int64_t pieces);

    struct alignas(64) Claims {
        std::atomic<uint64_t> value{0}; // tag of a job, pieces taken of the owner's share (16 bits)
    };

    const int size_;
    std::unique_ptr<Claims[]> claims_;
    std::vector<std::thread> workers_;

    // The run: written while the gate is closed.
    const Job *jobs_ = nullptr;
    int64_t count_ = 0;
    Entry entry_ = nullptr;
    void *context_ = nullptr;
    Time *finished_ = nullptr;
    uint64_t first_tag_ = 1;
    uint32_t first_phase_ = 0;

    // Counts runs, tasks, and those ends of tasks that are waited for; idle threads sleep on it.
    alignas(64) std::atomic<uint32_t> runs_{0};
    std::atomic<uint32_t> idle_{0}; // threads that sleep on runs_
    // Atomic because a thread that an earlier run woke too late reads it while it is written.
    std::atomic<bool> stopping_{false};
    alignas(64) std::atomic<uint32_t> gate_{0}; // open bit, and how many workers are inside
    alignas(64) std::atomic<uint32_t> phase_{
        0};                                    // counts finished jobs; waiting threads sleep on it
    std::atomic<uint32_t> waiting_{0};         // threads that sleep on phase_
    alignas(64) std::atomic<int64_t> done_{0}; // items of the current job

    void (*task_)(void *) = nullptr; // written while none is waiting or running
    void *task_context_ = nullptr;
    alignas(64) std::atomic<uint32_t> task_state_{0};
    std::atomic<uint32_t> finishing_{0}; // threads that sleep until there is a job, or its end
    std::atomic<bool> expecting_{false};
    int held_up_ = 0; // tasks that no worker is woken for; the caller's
};

} // namespace octavo

// The thread pool: every item of every job once, jobs in order, however many threads share however
// few cores.
//
//   thread_pool_test [rounds]
#include "thread_pool.h"

#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

namespace octavo {
namespace {

bool check(ThreadPool &pool, std::mt19937 &random, bool slow) {
    std::vector<Job> jobs;
    for (size_t count = random() % 50; count > 0; --count) {
        const int64_t items = random() % 3 == 0 ? 1 : int64_t(1 + random() % 300);
        jobs.push_back(Job{items, int64_t(1 + random() % 7)});
    }
    std::vector<std::vector<int>> done; // by job and item; plain, so that a race would show
    for (const Job &job : jobs)
        done.emplace_back(size_t(job.items), 0);
    std::vector<int> early(size_t(pool.size()), 0);
    std::vector<ThreadPool::Time> ends(jobs.size());
    const auto work = [&](int64_t job, int thread, int64_t begin, int64_t end) {
        if (job > 0) {
            for (const int times : done[size_t(job - 1)])
                early[size_t(thread)] += times != 1;
        }
        for (int64_t item = begin; item < end; ++item)
            ++done[size_t(job)][size_t(item)];
        if (slow && thread % 2 == 1)
            std::this_thread::sleep_for(std::chrono::microseconds(50));
    };
    pool.run(jobs.data(), int64_t(jobs.size()), work, ends.data());
    bool right = true;
    for (const auto &items : done) {
        for (const int times : items)
            right &= times == 1;
    }
    for (const int times : early)
        right &= times == 0;
    for (size_t i = 1; i < ends.size(); ++i)
        right &= ends[i] >= ends[i - 1];
    return right;
}

// A task whose jobs run while the caller waits for it, runs jobs of its own, starts another's, or
// gives it up; and that does things of its own between them.
struct Task {
    ThreadPool &pool;
    std::mt19937 random;
    bool slow;
    bool right = true;
    int times = 0;

    static void run(void *context) {
        auto &task = *static_cast<Task *>(context);
        ++task.times;
        for (int run = 0; run < 3; ++run) {
            task.right &= check(task.pool, task.random, task.slow);
            if (task.slow) // the caller falls asleep
                std::this_thread::sleep_for(std::chrono::microseconds(task.random() % 3000));
        }
    }
};

bool check_task(ThreadPool &pool, std::mt19937 &random) {
    Task task{pool, std::mt19937(random()), random() % 20 == 0};
    pool.expect(random() % 2 == 0);
    bool right = random() % 2 == 0 || check(pool, random, false);
    pool.start(&Task::run, &task);
    if (random() % 3 == 0)
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
    switch (random() % 4) {
    case 0:
        pool.finish();
        return right && task.right && task.times == 1;
    case 1:
        right &= check(pool, random, false);
        pool.finish(); // where there is but one thread, nothing has waited for it
        return right && task.right && task.times == 1;
    case 2: {
        Task other{pool, std::mt19937(random()), false};
        pool.start(&Task::run, &other);
        pool.cancel(&task); // which has been run: the other's is none of its business
        right &= task.right && task.times == 1;
        pool.finish();
        return right && other.right && other.times == 1;
    }
    default:
        pool.cancel(&task);
        return right && task.right && task.times <= 1;
    }
}

} // namespace
} // namespace octavo

int main(int argc, char **argv) {
    const int rounds = argc > 1 ? std::atoi(argv[1]) : 200;
    std::mt19937 random(7);
    for (const int threads : {1, 2, 3, 8, 17}) {
        octavo::ThreadPool pool(threads);
        for (int round = 0; round < rounds; ++round) {
            // Now and then a pause, so that the threads fall asleep.
            if (round % 50 == 0)
                std::this_thread::sleep_for(std::chrono::milliseconds(2));
            if (!octavo::check(pool, random, round % 20 == 0)) {
                std::printf("thread_pool_test: %d threads, round %d: wrong\n", threads, round);
                return 1;
            }
            if (!octavo::check_task(pool, random)) {
                std::printf("thread_pool_test: %d threads, task %d: wrong\n", threads, round);
                return 1;
            }
        }
    }
    // Pools that end right after a run, while threads it woke may still be on their way.
    for (int round = 0; round < rounds; ++round) {
        octavo::ThreadPool pool(8);
        if (!octavo::check(pool, random, false)) {
            std::printf("thread_pool_test: short-lived pool, round %d: wrong\n", round);
            return 1;
        }
    }
    std::printf("thread_pool_test: fine\n");
    return 0;
}

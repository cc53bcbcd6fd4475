// The rows of a step over the threads of a pool.
#pragma once

#include <memory>
#include <vector>

#include "sampler.h"
#include "thread_pool.h"

namespace octavo {

class BatchSampler {
  public:
    struct Draw {
        const float *logits = nullptr;
        SamplerState *state = nullptr;
        Drawn drawn;
    };
    struct Verification {
        const float *logits = nullptr;
        SamplerState *state = nullptr;
        int32_t guess = -1;       // -1: none
        const float *q = nullptr; // null: certain of the guess
        Drawn drawn;              // no token and no error where a guess before did not stand
    };
    struct Spread {
        const float *logits = nullptr;
        const SamplerState *state = nullptr;
        float *out = nullptr; // [vocab_size]
    };
    struct Lookup {
        const float *logits;
        int32_t token;
        RowError error;
        Logprobs logprobs;
    };

    // Without a pool the caller's thread does everything. Nothing else may run on the pool during
    // a call.
    BatchSampler(int64_t vocab_size, const ScanKernels &scan, std::shared_ptr<ThreadPool> pool);

    int64_t vocab_size() const { return workers_.front().vocab_size(); }

    // A state that comes several times takes its rows in order.
    void draw(std::vector<Draw> &draws);
    // A state that comes several times takes its rows in order, until a token is not the guess.
    void verify(std::vector<Verification> &verifications);
    // Zeros where a row has an error.
    void probabilities(const std::vector<Spread> &rows);
    // Logprob, rank and the `top` likeliest tokens of each row.
    void look_up(std::vector<Lookup> &lookups, int64_t top);

  private:
    // Calls body(sampler of the thread, entry) for the entries of each state in order, until one
    // returns false.
    template <typename Entry, typename Body>
    void for_each_state(std::vector<Entry> &entries, Body body);
    // Calls body(sampler of the thread, item) for all items.
    template <typename Body> void for_each(int64_t items, Body body);

    std::shared_ptr<ThreadPool> pool_;
    std::vector<Sampler> workers_; // one a thread
};

} // namespace octavo

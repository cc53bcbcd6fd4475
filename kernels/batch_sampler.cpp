#include "batch_sampler.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "float_environment.h"

namespace octavo {
namespace {

// Values to scan below which waking other threads costs more than they help.
constexpr int64_t kWorthSharing = 65536;

} // namespace

BatchSampler::BatchSampler(int64_t vocab_size, const ScanKernels &scan,
                           std::shared_ptr<ThreadPool> pool)
    : pool_(std::move(pool)) {
    for (int thread = 0; thread < (pool_ ? pool_->size() : 1); ++thread)
        workers_.emplace_back(vocab_size, scan);
}

void BatchSampler::draw(std::vector<Draw> &draws) {
    for_each_state(draws, [](Sampler &sampler, Draw &draw) {
        draw.drawn = sampler.draw(draw.logits, *draw.state);
        return true;
    });
}

void BatchSampler::verify(std::vector<Verification> &verifications) {
    for_each_state(verifications, [](Sampler &sampler, Verification &entry) {
        entry.drawn = sampler.verify(entry.logits, *entry.state, entry.guess, entry.q);
        return entry.drawn.error == RowError::kNone && entry.drawn.token == entry.guess;
    });
}

void BatchSampler::probabilities(const std::vector<Spread> &rows) {
    for_each(static_cast<int64_t>(rows.size()), [&](Sampler &sampler, int64_t item) {
        const Spread &row = rows[item];
        sampler.probabilities(row.logits, *row.state, row.out);
    });
}

void BatchSampler::look_up(std::vector<Lookup> &lookups, int64_t top) {
    for_each(static_cast<int64_t>(lookups.size()), [&](Sampler &sampler, int64_t item) {
        Lookup &lookup = lookups[item];
        lookup.error = sampler.logprobs(lookup.logits, lookup.token, top, lookup.logprobs);
    });
}

template <typename Entry, typename Body>
void BatchSampler::for_each_state(std::vector<Entry> &entries, Body body) {
    // Entries of one state depend on each other: they are one item, so that one thread does them.
    std::vector<size_t> order(entries.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
        return std::less<>()(entries[a].state, entries[b].state);
    });
    std::vector<size_t> begins; // of items in `order`
    for (size_t i = 0; i < order.size(); ++i)
        if (i == 0 || entries[order[i]].state != entries[order[i - 1]].state)
            begins.push_back(i);
    const auto items = static_cast<int64_t>(begins.size());
    begins.push_back(order.size());
    for_each(items, [&](Sampler &sampler, int64_t item) {
        bool going = true;
        for (size_t i = begins[item]; going && i < begins[item + 1]; ++i)
            going = body(sampler, entries[order[i]]);
    });
}

template <typename Body> void BatchSampler::for_each(int64_t items, Body body) {
    const DefaultFloats floats;
    if (workers_.size() == 1 || items < 2 || items * vocab_size() < kWorthSharing) {
        for (int64_t item = 0; item < items; ++item)
            body(workers_.front(), item);
        return;
    }
    const Job job{items, 1};
    pool_->run(&job, 1, [&](int64_t, int thread, int64_t begin, int64_t end) {
        for (int64_t item = begin; item < end; ++item)
            body(workers_[thread], item);
    });
}

} // namespace octavo

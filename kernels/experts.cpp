#include "experts.h"

#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

namespace octavo {
namespace {

// What a weight costs with few rows, in what it costs a row with many: reading it from memory.
constexpr int64_t kLeastCost = 5;

} // namespace

Routing::Routing(int64_t experts, int64_t chosen, bool renormalize, int64_t max_rows)
    : experts_(experts), chosen_(chosen), renormalize_(renormalize) {
    if (experts < 1 || experts > 4096 || chosen < 1 || chosen > experts) {
        throw std::invalid_argument("a choice of " + std::to_string(chosen) + " of " +
                                    std::to_string(experts) + " experts");
    }
    choices_.resize(size_t(max_rows * chosen));
    next_.resize(size_t(experts));
    crowds_.reserve(size_t(experts));
}

void Routing::choose(int64_t row, const float *logits) {
    Choice *best = choices_.data() + row * chosen_;
    int64_t count = 0;
    bool is_nan = false;
    for (int64_t i = 0; i < experts_; ++i) {
        const float logit = logits[i];
        is_nan |= std::isnan(logit);
        if (count == chosen_ && !(logit > best[count - 1].weight))
            continue;
        int64_t at = count < chosen_ ? count++ : count - 1;
        for (; at > 0 && logit > best[at - 1].weight; --at)
            best[at] = best[at - 1];
        best[at] = Choice{int32_t(i), 0, logit};
    }
    const float largest = best[0].weight;
    for (int64_t j = 0; j < chosen_; ++j)
        best[j].weight = std::exp(best[j].weight - largest);
    float sum = is_nan ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
    if (renormalize_) {
        for (int64_t j = 0; j < chosen_; ++j)
            sum += best[j].weight;
    } else {
        for (int64_t i = 0; i < experts_; ++i)
            sum += std::exp(logits[i] - largest);
    }
    for (int64_t j = 0; j < chosen_; ++j)
        best[j].weight /= sum;
}

void Routing::sort(int64_t rows) {
    std::fill(next_.begin(), next_.end(), 0);
    Choice *const end = choices_.data() + rows * chosen_;
    for (const Choice *choice = choices_.data(); choice != end; ++choice)
        ++next_[size_t(choice->expert)];
    crowds_.clear();
    slots_ = total_cost_ = 0;
    for (int64_t i = 0; i < experts_; ++i) {
        const int64_t count = next_[size_t(i)];
        if (count == 0)
            continue;
        int64_t begin = slots_;
        if (begin % kPanel + count > kPanel)
            begin = (begin + kPanel - 1) / kPanel * kPanel;
        slots_ = begin + count;
        next_[size_t(i)] = int32_t(begin);
        const int64_t cost = std::max(count, kLeastCost);
        crowds_.push_back(Crowd{int32_t(i), begin, slots_, cost, total_cost_});
        total_cost_ += cost;
    }
    for (Choice *choice = choices_.data(); choice != end; ++choice)
        choice->slot = next_[size_t(choice->expert)]++;
}

} // namespace octavo

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

float sigmoid(float x) {
    return 1.0f / (1.0f + std::exp(-x));
}

Routing::Routing(int64_t experts, int64_t chosen, const Gating &gating, int64_t max_rows)
    : experts_(experts), chosen_(chosen), gating_(gating) {
    if (experts < 1 || experts > 4096 || chosen < 1 || chosen > experts) {
        throw std::invalid_argument("a choice of " + std::to_string(chosen) + " of " +
                                    std::to_string(experts) + " experts");
    }
    choices_.resize(size_t(max_rows * chosen));
    next_.resize(size_t(experts));
    crowds_.reserve(size_t(experts));
}

void Routing::choose(int64_t row, const float *logits, const float *bias, const float *factors) {
    float largest = logits[0];
    bool is_nan = false;
    for (int64_t i = 0; i < experts_; ++i) {
        largest = std::max(largest, logits[i]);
        is_nan |= std::isnan(logits[i]);
    }
    // An expert's share but for what all shares are divided by.
    const auto part = [&](float logit) {
        return gating_.sigmoid ? sigmoid(logit) : std::exp(logit - largest);
    };
    float sum = 1.0f;
    if (!gating_.sigmoid && (bias != nullptr || !gating_.renormalize)) {
        sum = 0.0f;
        for (int64_t i = 0; i < experts_; ++i)
            sum += part(logits[i]);
    }
    Choice *best = choices_.data() + row * chosen_;
    int64_t count = 0;
    for (int64_t i = 0; i < experts_; ++i) {
        const float rank = bias == nullptr ? logits[i] : part(logits[i]) / sum + bias[i];
        if (count == chosen_ && !(rank > best[count - 1].weight))
            continue;
        int64_t at = count < chosen_ ? count++ : count - 1;
        for (; at > 0 && rank > best[at - 1].weight; --at)
            best[at] = best[at - 1];
        best[at] = Choice{int32_t(i), 0, rank};
    }
    for (int64_t j = 0; j < chosen_; ++j)
        best[j].weight = part(logits[best[j].expert]);
    if (gating_.renormalize) {
        sum = 0.0f;
        for (int64_t j = 0; j < chosen_; ++j)
            sum += best[j].weight;
        sum += gating_.normalize_eps;
    }
    if (is_nan)
        sum = std::numeric_limits<float>::quiet_NaN();
    for (int64_t j = 0; j < chosen_; ++j) {
        const float factor = factors == nullptr ? 1.0f : factors[best[j].expert];
        best[j].weight = best[j].weight / sum * gating_.scale * factor;
    }
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

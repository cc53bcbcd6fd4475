// Sparse experts: which of them each row of a step goes to, and the threads' shares of their work.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "linear.h"

namespace octavo {

float sigmoid(float x);

// How a router's logits become experts' weights.
struct Gating {
    bool sigmoid;        // an expert's share is the sigmoid of its logit, not their softmax
    bool renormalize;    // shares of the chosen are divided by their sum
    float normalize_eps; // … plus this
    float scale;         // multiplies the weights
};

// The experts of a layer, one layer at a time. Each row is sent to `chosen` of them: its choices.
// Every choice has a slot, where its row is prepared for the expert and where the expert writes.
// The slots of an expert lie side by side in the order of the rows, none in two panels where one
// would do; between the experts a few may be left empty.
class Routing {
  public:
    struct Choice {
        int32_t expert;
        int32_t slot;
        float weight;
    };
    // An expert with rows.
    struct Crowd {
        int32_t expert;
        int64_t begin, end; // slots
        int64_t cost;       // of its unit of work
        int64_t before;     // costs of the crowds before it, added up
    };

    // Throws std::invalid_argument unless 1 <= chosen <= experts.
    Routing(int64_t experts, int64_t chosen, const Gating &gating, int64_t max_rows);

    int64_t experts() const { return experts_; }
    int64_t chosen() const { return chosen_; }
    const Gating &gating() const { return gating_; }
    // Slots that so many rows take at most.
    static int64_t most_slots(int64_t experts, int64_t chosen, int64_t rows) {
        return rows * chosen + std::min(experts, rows * chosen) * (kPanel - 1);
    }

    // Chooses the row's largest logits (with a bias: the largest shares plus biases), the first of
    // equal ones, in descending order, and weighs them by their shares, and by factors of the
    // experts if there are any. If a logit is NaN, so are the weights; the choices are experts
    // whatever the logits are. Distinct rows may be chosen for by distinct threads.
    void choose(int64_t row, const float *logits, const float *bias, const float *factors);
    // Gives the choices of rows [0, rows) their slots.
    void sort(int64_t rows);

    // Row `row`'s, `chosen` of them.
    const Choice *choices(int64_t row) const { return choices_.data() + row * chosen_; }
    // Whose slot it is.
    int64_t expert_of(int64_t slot) const {
        const auto after =
            std::upper_bound(crowds_.begin(), crowds_.end(), slot,
                             [](int64_t at, const Crowd &crowd) { return at < crowd.begin; });
        return (after - 1)->expert;
    }
    // All slots in use, and those left empty among them.
    int64_t slots() const { return slots_; }
    const std::vector<Crowd> &crowds() const { return crowds_; }

    // Where every expert's work is so many units, calls body(crowd, first, last) for the units
    // [first, last) of crowds that are piece `index` of `count`, all of about the same cost.
    template <class Body>
    void piece(int64_t index, int64_t count, int64_t units, Body &&body) const {
        const int64_t low = total_cost_ * units * index / count;
        const int64_t high = total_cost_ * units * (index + 1) / count;
        for (const Crowd &crowd : crowds_) {
            // A unit belongs to the piece in which it begins.
            const int64_t begin = crowd.before * units;
            if (begin >= high)
                break;
            if (begin + crowd.cost * units <= low)
                continue;
            const auto first_from = [&](int64_t at) {
                const int64_t unit =
                    (std::max(at - begin, int64_t(0)) + crowd.cost - 1) / crowd.cost;
                return std::min(unit, units);
            };
            const int64_t first = first_from(low), last = first_from(high);
            if (first < last)
                body(crowd, first, last);
        }
    }

  private:
    const int64_t experts_;
    const int64_t chosen_;
    const Gating gating_;
    std::vector<Choice> choices_; // [max_rows][chosen]
    std::vector<int32_t> next_;   // [experts]: rows, then the next slot
    std::vector<Crowd> crowds_;
    int64_t slots_ = 0;
    int64_t total_cost_ = 0;
};

} // namespace octavo

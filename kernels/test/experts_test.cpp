// Routing: choices against a plain sort, slots, and pieces that cover all work once.
//
//   experts_test [rounds]
#include "experts.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <stdexcept>

namespace octavo {
namespace {

std::mt19937 engine(5);
int failures = 0;

int64_t draw(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(engine);
}

void check(bool right, const char *what) {
    if (right)
        return;
    std::printf("%s\n", what);
    ++failures;
}

// Few distinct values, so that there are ties; now and then a NaN or an infinity.
std::vector<float> logits_of(int64_t experts) {
    std::vector<float> logits(static_cast<size_t>(experts));
    const int64_t distinct = draw(1, 20);
    for (float &logit : logits)
        logit = float(draw(-distinct, distinct)) * 0.5f;
    if (draw(0, 9) == 0) {
        const float odd[] = {NAN, INFINITY, -INFINITY, -NAN};
        logits[size_t(draw(0, experts - 1))] = odd[draw(0, 3)];
    }
    return logits;
}

std::vector<float> vector_of(int64_t experts, float low, float high) {
    std::vector<float> values(static_cast<size_t>(experts));
    for (float &value : values)
        value = std::uniform_real_distribution<float>(low, high)(engine);
    return values;
}

// `bias` and `factors` may be empty.
void check_choices(const Routing &routing, int64_t row, const std::vector<float> &logits,
                   const std::vector<float> &bias, const std::vector<float> &factors) {
    const Routing::Choice *choices = routing.choices(row);
    const auto chosen = size_t(routing.chosen());
    const Gating &gating = routing.gating();
    bool nan = false;
    for (const float logit : logits)
        nan |= std::isnan(logit) || (!gating.sigmoid && logit == INFINITY);
    std::vector<bool> taken(logits.size());
    for (size_t j = 0; j < chosen; ++j) {
        const int32_t expert = choices[j].expert;
        if (expert < 0 || expert >= routing.experts() || taken[size_t(expert)])
            return check(false, "a choice is no expert, or the same as another");
        taken[size_t(expert)] = true;
    }
    if (nan) {
        bool all = true;
        for (size_t j = 0; j < chosen; ++j)
            all &= std::isnan(choices[j].weight);
        return check(all || std::isnan(choices[0].weight), "a NaN or infinity was lost");
    }
    const double most = *std::max_element(logits.begin(), logits.end());
    double all = 0.0;
    for (const float logit : logits)
        all += std::exp(logit - most);
    std::vector<double> shares(logits.size()), ranks(logits.size());
    for (size_t i = 0; i < logits.size(); ++i) {
        shares[i] = gating.sigmoid ? 1.0 / (1.0 + std::exp(-double(logits[i])))
                                   : std::exp(logits[i] - most) / all;
        ranks[i] = bias.empty() ? double(logits[i]) : shares[i] + double(bias[i]);
    }
    double sum = gating.renormalize ? double(gating.normalize_eps) : 1.0;
    for (size_t j = 0; gating.renormalize && j < chosen; ++j)
        sum += shares[size_t(choices[j].expert)];
    for (size_t j = 0; j < chosen; ++j) {
        const auto expert = size_t(choices[j].expert);
        // Those ranked before it, but for roundings of biased shares.
        int64_t before = 0;
        for (size_t i = 0; i < ranks.size(); ++i) {
            const double ahead = ranks[i] - ranks[expert];
            before += bias.empty() ? ahead > 0.0 || (ahead == 0.0 && i < expert) : ahead > 1e-6;
        }
        check(bias.empty() ? before == int64_t(j) : before <= int64_t(j),
              "another expert was chosen");
        const double factor = factors.empty() ? 1.0 : double(factors[expert]);
        const double weight = shares[expert] / sum * double(gating.scale) * factor;
        const bool both_nan = std::isnan(choices[j].weight) && std::isnan(weight); // all -infinity
        check(both_nan || std::abs(choices[j].weight - weight) < 1e-5, "another weight");
    }
}

void check_slots(const Routing &routing, int64_t rows) {
    const int64_t chosen = routing.chosen(), count = rows * chosen;
    const int64_t most = Routing::most_slots(routing.experts(), chosen, rows);
    check(routing.slots() >= count && routing.slots() <= most, "too many slots, or too few");
    std::vector<int64_t> at(size_t(routing.slots()), -1); // the choice of a slot
    for (int64_t i = 0; i < count; ++i) {
        const int64_t slot = routing.choices(0)[i].slot;
        if (slot < 0 || slot >= routing.slots() || at[size_t(slot)] >= 0)
            return check(false, "a slot outside, or of two choices");
        at[size_t(slot)] = i;
    }
    int64_t end = 0, inside = 0;
    for (const Routing::Crowd &crowd : routing.crowds()) {
        check(crowd.begin >= end && crowd.end > crowd.begin, "crowds overlap, or one is empty");
        end = crowd.end;
        const int64_t size = crowd.end - crowd.begin;
        const int64_t panels = (crowd.end - 1) / kPanel - crowd.begin / kPanel + 1;
        check(panels == (size + kPanel - 1) / kPanel, "a crowd in more panels than it needs");
        for (int64_t slot = crowd.begin; slot < crowd.end; ++slot, ++inside) {
            check(at[size_t(slot)] >= 0, "an empty slot in a crowd");
            check(routing.choices(0)[at[size_t(slot)]].expert == crowd.expert, "in another crowd");
            check(slot == crowd.begin || at[size_t(slot)] > at[size_t(slot - 1)], "out of order");
        }
    }
    check(inside == count, "choices without a crowd");
}

void check_pieces(const Routing &routing) {
    const int64_t units = draw(1, 100), pieces = draw(1, 40);
    std::vector<int64_t> next(size_t(routing.experts()), 0);
    int64_t total = 0, longest = 0, unit = 0;
    for (int64_t piece = 0; piece < pieces; ++piece) {
        int64_t cost = 0;
        routing.piece(piece, pieces, units,
                      [&](const Routing::Crowd &crowd, int64_t first, int64_t last) {
                          check(first == next[size_t(crowd.expert)] && last <= units,
                                "units twice, left out, or too many");
                          next[size_t(crowd.expert)] = last;
                          cost += (last - first) * crowd.cost;
                          unit = std::max(unit, crowd.cost);
                      });
        total += cost;
        longest = std::max(longest, cost);
    }
    for (const Routing::Crowd &crowd : routing.crowds())
        check(next[size_t(crowd.expert)] == units, "units left over");
    check(longest <= total / pieces + 1 + unit, "a piece much longer than its share");
}

void round() {
    const int64_t experts = draw(1, draw(1, 70)), chosen = draw(1, std::min<int64_t>(experts, 9));
    const int64_t room = draw(1, 90), rows = draw(1, room);
    const bool sigmoid = draw(0, 1) == 0;
    const Gating gating{sigmoid, draw(0, 1) == 0, sigmoid && draw(0, 1) == 0 ? 1e-3f : 0.0f,
                        draw(0, 1) == 0 ? 1.0f : 1.5f};
    Routing routing(experts, chosen, gating, room);
    const std::vector<float> bias =
        draw(0, 1) == 0 ? std::vector<float>() : vector_of(experts, -0.5f, 0.5f);
    const std::vector<float> factors =
        draw(0, 1) == 0 ? std::vector<float>() : vector_of(experts, 0.5f, 2.0f);
    for (int time = 0; time < 2; ++time) { // what came before leaves no trace
        for (int64_t row = 0; row < rows; ++row) {
            const std::vector<float> logits = logits_of(experts);
            routing.choose(row, logits.data(), bias.empty() ? nullptr : bias.data(),
                           factors.empty() ? nullptr : factors.data());
            check_choices(routing, row, logits, bias, factors);
        }
        routing.sort(rows);
        check_slots(routing, rows);
        check_pieces(routing);
    }
}

void check_refusals() {
    const int64_t bad[][2] = {{0, 1}, {4, 0}, {4, 5}, {1 << 20, 2}, {-1, -1}};
    for (const auto &[experts, chosen] : bad) {
        try {
            Routing(experts, chosen, Gating{}, 8);
            check(false, "a choice that cannot be was taken");
        } catch (const std::invalid_argument &) {
        }
    }
}

} // namespace
} // namespace octavo

int main(int argc, char **argv) {
    const int rounds = argc > 1 ? std::atoi(argv[1]) : 2000;
    for (int i = 0; i < rounds && octavo::failures == 0; ++i)
        octavo::round();
    octavo::check_refusals();
    std::printf("%d failures\n", octavo::failures);
    return octavo::failures == 0 ? 0 : 1;
}

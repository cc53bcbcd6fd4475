// Hostile rows and random options through the sampler, on every tier this CPU has; meant for the
// sanitizers (make sanitize). What is right is tested in Python against a plain implementation;
// here a drawn token must be one that truncation allows, and drawing again must repeat it; and
// verification must give what has a probability, whatever distribution a drafter claims.
//
//   sampler_test [cases]     random cases for each tier (default 2000)
#include "batch_sampler.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

namespace octavo {
namespace {

using Rng = std::mt19937_64;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
int failures = 0;

struct TestedTier {
    const char *name;
    const ScanKernels &scan;
};

// Not by way of find_tier, so that the test builds without the other kernels.
std::vector<TestedTier> tiers() {
    std::vector<TestedTier> found{{"generic", scan_kernels_generic()}};
#ifdef OCTAVO_X86
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        found.push_back({"avx2", scan_kernels_avx2()});
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        found.push_back({"avx512", scan_kernels_avx512()});
#endif
    return found;
}

template <typename T> T pick(Rng &rng, std::initializer_list<T> values) {
    return values.begin()[rng() % values.size()];
}

std::vector<int32_t> random_ids(Rng &rng, int64_t vocab_size, int64_t most) {
    std::vector<int32_t> ids(rng() % (most + 1));
    for (int32_t &id : ids)
        id = static_cast<int32_t>(rng() % vocab_size);
    return ids;
}

SamplingOptions random_options(Rng &rng, int64_t vocab_size) {
    SamplingOptions options;
    options.temperature = pick(rng, {0.0f, 1e-5f, 0.7f, 1.0f, 100.0f});
    options.top_k = pick<int64_t>(rng, {0, 0, 1, 7, vocab_size / 2, vocab_size - 1, vocab_size});
    options.top_p = pick(rng, {1.0f, 1e-30f, 0.5f, 0.99f, 0.9999999f});
    options.min_p = pick(rng, {0.0f, 0.0f, 1e-30f, 0.2f, 1.0f});
    options.top_n_sigma = pick(rng, {0.0, 0.0, -1.0, 1e-300, 1.0, 3.0, 1000.0});
    options.presence_penalty = pick(rng, {0.0f, -2.0f, 2.0f});
    options.frequency_penalty = pick(rng, {0.0f, -2.0f, 2.0f});
    options.repetition_penalty = pick(rng, {1.0f, 0.01f, 100.0f});
    for (const int32_t id : random_ids(rng, vocab_size, 4))
        options.logit_bias.emplace_back(id, pick(rng, {-100.0f, 3.0f, 100.0f}));
    if (auto allowed = random_ids(rng, vocab_size, 3); !allowed.empty())
        options.allowed_token_ids = std::move(allowed);
    options.banned_token_ids = random_ids(rng, vocab_size, 3);
    options.stop_token_ids = random_ids(rng, vocab_size, 3);
    options.min_tokens = static_cast<int64_t>(rng() % 3);
    options.logprobs = pick<int64_t>(rng, {-1, -1, 0, 5, vocab_size + 3});
    options.seed = static_cast<int64_t>(rng());
    return options;
}

void fill(Rng &rng, float *row, int64_t n) {
    std::normal_distribution<float> normal(0, pick(rng, {0.01f, 3.0f, 1e30f}));
    for (int64_t i = 0; i < n; ++i)
        row[i] = normal(rng);
    const int kind = static_cast<int>(rng() % 8);
    if (kind == 0)
        std::fill_n(row, n, pick(rng, {0.0f, -kInfinity, 1e-42f, 3.4e38f}));
    if (kind == 1)
        for (int64_t i = 0; i < n; ++i)
            row[i] = std::round(row[i]) * 0.0f;
    if (kind == 2)
        for (int64_t i = 0; i < n; ++i)
            row[i] = rng() % 4 ? -kInfinity : row[i];
    if (kind == 3)
        row[rng() % n] = pick(rng, {kInfinity, std::nanf(""), -std::nanf("")});
}

// Whether the options leave the token in, give or take rounding.
bool allowed(const float *adjusted, int64_t n, const SamplingOptions &options, int32_t token) {
    if (adjusted[token] == -kInfinity)
        return false;
    std::vector<int32_t> order(n);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return adjusted[a] > adjusted[b]; });
    const int64_t place = std::find(order.begin(), order.end(), token) - order.begin();
    if (options.temperature == 0)
        return place == 0;
    const double greatest = adjusted[order[0]];
    if (options.top_n_sigma > 0) {
        double count = 0, mean = 0, squares = 0; // Welford's way
        for (int64_t i = 0; i < n && adjusted[order[i]] > -kInfinity; ++i) {
            const double off = adjusted[order[i]] - mean;
            mean += off / ++count;
            squares += off * (adjusted[order[i]] - mean);
        }
        const double limit = greatest - options.top_n_sigma * std::sqrt(squares / count);
        if (adjusted[token] < limit - 1e-6 * (std::abs(limit) + std::abs(greatest)))
            return false;
    }
    const auto weight = [&](int64_t i) {
        const double scaled = (adjusted[order[i]] - greatest) / options.temperature;
        return scaled < std::log(options.min_p) - 1e-3 ? 0 : std::exp(scaled);
    };
    const int64_t k = options.top_k > 0 && options.top_k < n ? options.top_k : n;
    double total = 0;
    double before = 0;
    for (int64_t i = 0; i < k; ++i) {
        total += weight(i);
        if (i < place && weight(i) > weight(place) * (1 + 1e-5))
            before += weight(i);
    }
    return place < k && weight(place) > 0 && before <= options.top_p * total * (1 + 1e-4) + 1e-30;
}

void check(bool condition, const char *what, const TestedTier &tier, int number) {
    if (condition)
        return;
    ++failures;
    std::printf("FAILED %s, case %d: %s\n", tier.name, number, what);
}

// What a drafter may claim: the target's own distribution, another, or none at all.
void fill_claim(Rng &rng, const float *p, float *q, int64_t n) {
    const int kind = static_cast<int>(rng() % 4);
    double total = 0;
    for (int64_t i = 0; i < n; ++i) {
        q[i] = static_cast<float>(rng() % 1000);
        total += static_cast<double>(q[i]);
    }
    for (int64_t i = 0; i < n; ++i)
        switch (kind) {
        case 0:
            q[i] = p[i];
            break;
        case 1:
            q[i] = static_cast<float>(static_cast<double>(q[i]) / std::max(total, 1.0));
            break;
        case 2:
            q[i] = 2 * p[i];
            break;
        default:
            q[i] = pick(rng, {0.0f, -1.0f, 1e-45f, 5.0f, kInfinity, -kInfinity, std::nanf("")});
        }
}

// A chain of guesses at each row, up to the first that does not stand, and a draw at its end.
void test_verification(const TestedTier &tier, BatchSampler &sampler, Rng &rng, const float *logits,
                       const std::vector<SamplerState> &states, int number) {
    const int64_t n = sampler.vocab_size();
    constexpr int64_t kGuesses = 3;
    std::vector<SamplerState> before = states;
    std::vector<std::vector<float>> kept; // each as large as needed
    std::vector<BatchSampler::Verification> entries;
    for (size_t row = 0; row < before.size(); ++row)
        for (int64_t at = 0; at <= kGuesses; ++at) {
            BatchSampler::Verification entry{logits + row * n, &before[row], -1, nullptr, {}};
            if (at < kGuesses) {
                entry.guess = static_cast<int32_t>(rng() % n);
                std::vector<float> p(n);
                Sampler alone(n, tier.scan);
                if (alone.probabilities(entry.logits, states[row], p.data()) == RowError::kNone &&
                    rng() % 2)
                    entry.guess =
                        static_cast<int32_t>(std::max_element(p.begin(), p.end()) - p.begin());
                if (rng() % 3) {
                    kept.emplace_back(n);
                    fill_claim(rng, p.data(), kept.back().data(), n);
                    entry.q = kept.back().data();
                }
            }
            entries.push_back(entry);
        }
    sampler.verify(entries);

    for (size_t row = 0; row < before.size(); ++row) {
        SamplerState state = states[row];
        bool going = true;
        for (int64_t at = 0; at <= kGuesses; ++at) {
            const auto &entry = entries[row * (kGuesses + 1) + at];
            const Drawn &drawn = entry.drawn;
            if (!going) {
                check(drawn.token == -1 && drawn.error == RowError::kNone, "ended", tier, number);
                continue;
            }
            std::vector<float> p(n);
            Sampler alone(n, tier.scan);
            const RowError error = alone.probabilities(entry.logits, state, p.data());
            double total = 0;
            for (const float each : p)
                total += static_cast<double>(each);
            check(error == RowError::kNone ? std::abs(total - 1) < 1e-5 : total == 0, "sums to one",
                  tier, number);
            const Drawn again = alone.verify(entry.logits, state, entry.guess, entry.q);
            check(again.token == drawn.token && again.error == drawn.error, "verified alone", tier,
                  number);
            check(drawn.error != RowError::kNone || p[drawn.token] > 0, "probable", tier, number);
            going = drawn.error == RowError::kNone && drawn.token == entry.guess;
        }
        check(before[row].num_generated() == state.num_generated(), "recorded", tier, number);
    }
}

void test_case(const TestedTier &tier, std::shared_ptr<ThreadPool> pool, int number) {
    Rng rng(number);
    const int64_t vocab_size =
        pick<int64_t>(rng, {1, 3, 16, 63, 128, 129, 777, 1024, 1025, 1500, 4000});
    const int64_t rows = 1 + static_cast<int64_t>(rng() % 4);
    // Exactly as large as needed, so that a read past the end is seen.
    const auto logits = std::make_unique<float[]>(rows * vocab_size);
    std::vector<SamplerState> states;
    std::vector<BatchSampler::Draw> draws;
    for (int64_t row = 0; row < rows; ++row) {
        fill(rng, logits.get() + row * vocab_size, vocab_size);
        states.emplace_back(random_options(rng, vocab_size), vocab_size,
                            random_ids(rng, vocab_size, 5));
        for (const int32_t id : random_ids(rng, vocab_size, 3))
            states.back().record(id);
    }
    for (int64_t row = 0; row < rows; ++row)
        draws.push_back({logits.get() + row * vocab_size, &states[row], {}});
    std::vector<SamplerState> before = states;
    BatchSampler sampler(vocab_size, tier.scan, std::move(pool));
    test_verification(tier, sampler, rng, logits.get(), states, number);
    sampler.draw(draws);
    for (int64_t row = 0; row < rows; ++row) {
        const auto &[values, state, drawn] = draws[row];
        const int64_t recorded = state->num_generated() - before[row].num_generated();
        check(recorded == (drawn.error == RowError::kNone), "recorded", tier, number);
        Sampler alone(vocab_size, tier.scan);
        const Drawn again = alone.draw(values, before[row]);
        check(again.token == drawn.token && again.error == drawn.error, "repeats", tier, number);
        if (drawn.error != RowError::kNone) {
            check(drawn.token == -1, "no token with an error", tier, number);
            continue;
        }
        state->rewind(1);
        std::vector<float> adjusted(vocab_size);
        state->adjust(values, adjusted.data());
        check(allowed(adjusted.data(), vocab_size, state->options(), drawn.token), "allowed", tier,
              number);
    }
}

} // namespace
} // namespace octavo

int main(int argc, char **argv) {
    using namespace octavo;
    const int cases = argc > 1 ? std::atoi(argv[1]) : 2000;
    const auto pool = std::make_shared<ThreadPool>(2);
    for (const TestedTier &tier : tiers()) {
        for (int number = 0; number < cases; ++number)
            test_case(tier, number % 2 ? pool : nullptr, number);
        std::printf("%s: %d cases, %d failures so far\n", tier.name, cases, failures);
    }
    return failures == 0 ? 0 : 1;
}

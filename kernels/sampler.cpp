#include "sampler.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>

namespace octavo {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
// Ends a search: so many values are sorted in little time.
constexpr double kFew = 1024;
// A vocabulary this small is sorted as a whole.
constexpr int64_t kSortAll = 1024;

// Floats as integers of the same order, and back. Both zeros, being equal, have the key of 0.
uint32_t key_of(float value) {
    const auto bits = std::bit_cast<uint32_t>(value + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

float value_of(uint32_t key) {
    return std::bit_cast<float>(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// A weight as a probability, where 1 / unit is the weight of all.
float share(float weight, double unit) {
    return static_cast<float>(static_cast<double>(weight) * unit);
}

// What is no probability counts as none.
float claim(float q) {
    return q > 0 ? q : 0;
}

// Keys between which the wanted threshold lies: measure(>= low) >= target > measure(>= high).
struct Interval {
    uint32_t low;
    uint32_t high;
    double at_low;
    double at_high;
};

// Narrows the interval until it is one key or `few` says so. `measure` fills kScanThresholds
// results for as many thresholds.
template <typename Measure, typename Few>
void narrow(Interval &interval, double target, Measure measure, Few few) {
    while (interval.high - interval.low > 1 && !few(interval)) {
        uint32_t keys[kScanThresholds];
        float thresholds[kScanThresholds];
        double results[kScanThresholds];
        const uint64_t width = interval.high - interval.low;
        for (int i = 0; i < kScanThresholds; ++i) {
            keys[i] = interval.low + static_cast<uint32_t>(width * (i + 1) / (kScanThresholds + 1));
            thresholds[i] = value_of(keys[i]);
        }
        measure(thresholds, results);
        for (int i = 0; i < kScanThresholds; ++i) {
            if (results[i] < target) {
                interval.high = keys[i];
                interval.at_high = results[i];
                break;
            }
            interval.low = keys[i];
            interval.at_low = results[i];
        }
    }
}

// The greatest logit of a row less n standard deviations of those that are not -infinity. The
// moments are about that maximum.
float sigma_floor(const Moments &moments, float maximum, double n) {
    const auto count = static_cast<double>(moments.count);
    const double mean = moments.sum / count;
    // The mean lies within sqrt(count - 1) standard deviations of the maximum (Samuelson's
    // inequality), so the difference loses no more digits than count has.
    const double variance = std::max(0.0, moments.squares / count - mean * mean);
    const double floor = static_cast<double>(maximum) - n * std::sqrt(variance);
    constexpr float kLowest = std::numeric_limits<float>::lowest();
    return floor > static_cast<double>(kLowest) ? static_cast<float>(floor) : kLowest;
}

} // namespace

Sampler::Sampler(int64_t vocab_size, const ScanKernels &scan)
    : scan_(scan), vocab_size_(vocab_size), num_blocks_((vocab_size + kScanBlock - 1) / kScanBlock),
      maxima_(num_blocks_), sums_(num_blocks_), ids_(vocab_size) {}

Drawn Sampler::draw(const float *logits, SamplerState &state) {
    return choose(logits, state, [this](const float *row, const SamplerState &before) {
        if (before.options().temperature == 0)
            return first_maximum(row);
        const double noise = before.uniform(before.num_generated());
        return draw_from(truncate(row, before.options()), row, noise);
    });
}

RowError Sampler::probabilities(const float *logits, const SamplerState &state, float *out) {
    const float *row = adjusted(logits, state);
    const RowError error = scan_row(row);
    if (error != RowError::kNone || state.options().temperature == 0)
        std::fill_n(out, vocab_size_, 0.0f);
    if (error != RowError::kNone)
        return error;
    if (state.options().temperature == 0)
        out[first_maximum(row)] = 1;
    else
        spread(truncate(row, state.options()), row, out);
    return error;
}

Drawn Sampler::verify(const float *logits, SamplerState &state, int32_t guess, const float *q) {
    return choose(logits, state, [&](const float *row, const SamplerState &before) {
        const SamplingOptions &options = before.options();
        if (options.temperature == 0)
            return first_maximum(row);
        const int64_t position = before.num_generated();
        const Kept kept = truncate(row, options);
        const double noise = before.uniform(position, Stream::kVerified);
        if (guess < 0)
            return draw_from(kept, row, noise);
        const double certainty = q == nullptr ? 1.0 : claim(q[guess]);
        const double test = before.uniform(position, Stream::kAcceptance);
        if (test * certainty < probability(kept, row, guess))
            return guess;
        return redraw(kept, row, options, guess, q, noise);
    });
}

const float *Sampler::adjusted(const float *logits, const SamplerState &state) {
    if (!state.adjusts())
        return logits;
    adjusted_.resize(vocab_size_);
    state.adjust(logits, adjusted_.data());
    return adjusted_.data();
}

template <typename Pick>
Drawn Sampler::choose(const float *logits, SamplerState &state, Pick pick) {
    Drawn drawn;
    const float *row = adjusted(logits, state);
    drawn.error = scan_row(row);
    if (drawn.error != RowError::kNone)
        return drawn;
    const int32_t token = pick(row, state);
    if (state.options().logprobs >= 0) {
        if (row != logits)
            drawn.error = scan_row(logits);
        if (drawn.error != RowError::kNone)
            return drawn;
        read_logprobs(logits, token, state.options().logprobs, drawn.logprobs);
    }
    state.record(token);
    drawn.token = token;
    return drawn;
}

RowError Sampler::logprobs(const float *logits, int32_t token, int64_t top, Logprobs &out) {
    const RowError error = scan_row(logits);
    if (error == RowError::kNone)
        read_logprobs(logits, token, top, out);
    return error;
}

RowError Sampler::scan_row(const float *logits) {
    if (!scan_.maxima(logits, vocab_size_, maxima_.data()))
        return RowError::kNotFinite;
    maximum_ = *std::max_element(maxima_.begin(), maxima_.end());
    return maximum_ == -kInfinity ? RowError::kNothingAllowed : RowError::kNone;
}

int32_t Sampler::first_maximum(const float *logits) const {
    const auto block = std::find(maxima_.begin(), maxima_.end(), maximum_) - maxima_.begin();
    const float *begin = logits + block * kScanBlock;
    return static_cast<int32_t>(std::find(begin, logits + vocab_size_, maximum_) - logits);
}

// Cuts a scanned row by top_n_sigma, min_p, top_k and top_p.
Sampler::Kept Sampler::truncate(const float *logits, const SamplingOptions &options) {
    const float scale = 1 / options.temperature;
    // min_p's share of the greatest probability, as a logit.
    float floor =
        options.min_p > 0 ? maximum_ + options.temperature * std::log(options.min_p) : -kInfinity;
    if (options.top_n_sigma > 0)
        floor = std::max(floor, sigma_floor(scan_.moments(logits, vocab_size_, maximum_), maximum_,
                                            options.top_n_sigma));
    const int64_t top_k = options.top_k < vocab_size_ ? options.top_k : 0;
    const double top_p = options.top_p;

    if (top_k > 0 && (2 * top_k <= num_blocks_ || vocab_size_ <= kSortAll)) {
        collect(logits, top_k, floor);
        keep_top(top_k);
        weigh_candidates(scale);
        if (top_p < 1)
            keep_mass(top_p * candidate_mass());
        return {Left::kCandidates, scale, floor};
    }
    if (top_k == 0 && top_p == 1) {
        scan_.exponentials(logits, vocab_size_, maximum_, scale, floor, nullptr, sums_.data());
        return {Left::kEverything, scale, floor};
    }
    weights_.resize(vocab_size_);
    if (top_k > 0)
        weigh_top_k(logits, top_k, scale, floor);
    else
        scan_.exponentials(logits, vocab_size_, maximum_, scale, floor, weights_.data(),
                           sums_.data());
    if (top_p < 1) {
        const double mass = top_p * total_weight();
        // The nucleus is usually small. If few tokens miss it by far, it is not.
        for (const int64_t wanted : {int64_t{32}, num_blocks_ / 2}) {
            collect(logits, wanted, floor);
            for (Candidate &candidate : candidates_)
                candidate.value = weights_[candidate.id];
            const double found = candidate_mass();
            if (found >= mass) {
                keep_top(static_cast<int64_t>(candidates_.size()));
                keep_mass(mass);
                return {Left::kCandidates, scale, floor};
            }
            if (found < mass / 2)
                break;
        }
        cut_to_mass(mass);
    }
    return {Left::kWeights, scale, floor};
}

int32_t Sampler::draw_from(const Kept &kept, const float *logits, double noise) {
    if (kept.left == Left::kCandidates)
        return draw_from_candidates(noise);
    return draw_from_row(noise, [&](int64_t begin, int64_t count, float *weights) {
        if (kept.left == Left::kWeights) {
            std::copy_n(weights_.data() + begin, count, weights);
            return;
        }
        float sum;
        scan_.exponentials(logits + begin, count, maximum_, kept.scale, kept.floor, weights, &sum);
    });
}

// The very number that `spread` writes for the token.
float Sampler::probability(const Kept &kept, const float *logits, int32_t token) {
    float weight = 0;
    float sum;
    switch (kept.left) {
    case Left::kCandidates:
        for (const Candidate &candidate : candidates_)
            if (candidate.id == token)
                weight = candidate.value;
        return share(weight, 1 / candidate_mass());
    case Left::kWeights:
        return share(weights_[token], 1 / total_weight());
    case Left::kEverything:
        scan_.exponentials(logits + token, 1, maximum_, kept.scale, kept.floor, &weight, &sum);
    }
    return share(weight, 1 / total_weight());
}

// What truncation left as probabilities, [vocab_size]; `out` may be weights_.
void Sampler::spread(const Kept &kept, const float *logits, float *out) {
    if (kept.left == Left::kCandidates) {
        const double unit = 1 / candidate_mass();
        std::fill_n(out, vocab_size_, 0.0f);
        for (const Candidate &candidate : candidates_)
            out[candidate.id] = share(candidate.value, unit);
        return;
    }
    const double unit = 1 / total_weight();
    const float *weights = weights_.data();
    if (kept.left == Left::kEverything) {
        scan_.exponentials(logits, vocab_size_, maximum_, kept.scale, kept.floor, out,
                           sums_.data());
        weights = out;
    }
    for (int64_t i = 0; i < vocab_size_; ++i)
        out[i] = share(weights[i], unit);
}

// Draws from max(0, p - q) without the rejected guess, where it is 0 if q is a distribution.
int32_t Sampler::redraw(const Kept &kept, const float *logits, const SamplingOptions &options,
                        int32_t guess, const float *q, double noise) {
    if (kept.left == Left::kCandidates) {
        const double unit = 1 / candidate_mass();
        for (Candidate &candidate : candidates_) {
            const float p = candidate.id == guess ? 0 : share(candidate.value, unit);
            candidate.value = q == nullptr ? p : std::max(0.0f, p - claim(q[candidate.id]));
        }
        if (candidate_mass() > 0)
            return draw_from_candidates(noise);
    } else {
        weights_.resize(vocab_size_);
        float *weights = weights_.data();
        spread(kept, logits, weights);
        if (q != nullptr)
            for (int64_t i = 0; i < vocab_size_; ++i)
                weights[i] -= claim(q[i]);
        weights[guess] = 0;
        scan_.cut(weights, vocab_size_, 0, sums_.data()); // zeroes those below 0 and sums
        if (total_weight() > 0)
            return draw_from({Left::kWeights, kept.scale, kept.floor}, logits, noise);
    }
    if (q != nullptr) // nothing is above q but for rounding
        return redraw(truncate(logits, options), logits, options, guess, nullptr, noise);
    return guess; // there is nothing else: q was no distribution
}

// Lists every token with a logit >= floor and >= some threshold that at least `wanted` tokens
// reach: the `wanted`-th greatest of the maxima of twice as many groups of blocks.
void Sampler::collect(const float *logits, int64_t wanted, float floor) {
    float threshold = std::max(floor, std::numeric_limits<float>::lowest());
    if (2 * wanted <= num_blocks_) {
        const int64_t group = num_blocks_ / (2 * wanted);
        scratch_.clear();
        for (int64_t block = 0; block < num_blocks_; block += group)
            scratch_.push_back(*std::max_element(
                maxima_.begin() + block, maxima_.begin() + std::min(block + group, num_blocks_)));
        std::nth_element(scratch_.begin(), scratch_.begin() + (wanted - 1), scratch_.end(),
                         std::greater<>());
        threshold = std::max(threshold, scratch_[wanted - 1]);
    }
    int64_t found = 0;
    for (int64_t block = 0; block < num_blocks_; ++block)
        if (maxima_[block] >= threshold)
            found += scan_.select(logits, block * kScanBlock,
                                  std::min((block + 1) * kScanBlock, vocab_size_), threshold,
                                  kInfinity, ids_.data() + found);
    list_candidates(logits, found);
}

void Sampler::list_candidates(const float *values, int64_t found) {
    candidates_.resize(found);
    for (int64_t i = 0; i < found; ++i)
        candidates_[i] = {values[ids_[i]], ids_[i]};
}

// Sorts the candidates, greatest value first and equal ones by id, and drops those after the k-th.
void Sampler::keep_top(int64_t k) {
    const auto before = [](const Candidate &a, const Candidate &b) {
        return a.value > b.value || (a.value == b.value && a.id < b.id);
    };
    if (k < static_cast<int64_t>(candidates_.size())) {
        std::nth_element(candidates_.begin(), candidates_.begin() + k, candidates_.end(), before);
        candidates_.resize(k);
    }
    std::sort(candidates_.begin(), candidates_.end(), before);
}

// Replaces the candidates' logits by weights.
void Sampler::weigh_candidates(float scale) {
    const auto count = static_cast<int64_t>(candidates_.size());
    scratch_.resize(2 * count + count / kScanBlock + 1);
    float *weights = scratch_.data() + count;
    for (int64_t i = 0; i < count; ++i)
        scratch_[i] = candidates_[i].value;
    scan_.exponentials(scratch_.data(), count, maximum_, scale, -kInfinity, weights,
                       weights + count);
    for (int64_t i = 0; i < count; ++i)
        candidates_[i].value = weights[i];
}

double Sampler::candidate_mass() const {
    double mass = 0;
    for (const Candidate &candidate : candidates_)
        mass += static_cast<double>(candidate.value);
    return mass;
}

// Drops the sorted candidates after the one with which the sum of weights reaches `mass`.
void Sampler::keep_mass(double mass) {
    double sum = 0;
    size_t kept = 0;
    while (kept < candidates_.size() && sum < mass)
        sum += static_cast<double>(candidates_[kept++].value);
    candidates_.resize(std::max<size_t>(kept, 1));
}

int32_t Sampler::draw_from_candidates(double noise) {
    std::sort(candidates_.begin(), candidates_.end(),
              [](const Candidate &a, const Candidate &b) { return a.id < b.id; });
    const double target = noise * candidate_mass();
    double sum = 0;
    for (const Candidate &candidate : candidates_) {
        sum += static_cast<double>(candidate.value);
        if (sum > target)
            return candidate.id;
    }
    return candidates_.back().id; // not reached: noise is below 1 and the sum is the same
}

// Fills the weights, and zeroes them but for the k tokens of the greatest logits.
void Sampler::weigh_top_k(const float *logits, int64_t k, float scale, float floor) {
    const auto target = static_cast<double>(k);
    Interval interval{key_of(std::numeric_limits<float>::lowest()), key_of(maximum_) + 1,
                      static_cast<double>(vocab_size_), 0};
    narrow(
        interval, target,
        [&](const float *thresholds, double *results) {
            int64_t counts[kScanThresholds];
            scan_.count(logits, vocab_size_, thresholds, counts);
            std::copy_n(counts, kScanThresholds, results);
        },
        [](const Interval &now) { return now.at_low - now.at_high <= kFew; });
    list_candidates(logits, scan_.select(logits, 0, vocab_size_, value_of(interval.low),
                                         value_of(interval.high), ids_.data()));
    const int64_t missing = k - static_cast<int64_t>(interval.at_high);
    keep_top(static_cast<int64_t>(candidates_.size()));
    float least = value_of(interval.low);
    if (missing <= static_cast<int64_t>(candidates_.size()))
        least = candidates_[missing - 1].value;
    scan_.exponentials(logits, vocab_size_, maximum_, scale, std::max(floor, least),
                       weights_.data(), sums_.data());
    drop_ties(missing, least);
}

// Zeroes the weights but for the smallest set of the likeliest tokens that has this mass.
void Sampler::cut_to_mass(double mass) {
    const double total = total_weight();
    // What lies below low adds up to less than half of what may be cut.
    const auto low = static_cast<float>((total - mass) / (2 * static_cast<double>(vocab_size_)));
    Interval interval{key_of(low), key_of(1.0f) + 1, total, 0};
    narrow(
        interval, mass,
        [&](const float *thresholds, double *results) {
            scan_.mass(weights_.data(), vocab_size_, thresholds, results);
        },
        [](const Interval &now) {
            return now.at_low - now.at_high <= kFew * static_cast<double>(value_of(now.low));
        });
    list_candidates(weights_.data(),
                    scan_.select(weights_.data(), 0, vocab_size_, value_of(interval.low),
                                 value_of(interval.high), ids_.data()));
    keep_top(static_cast<int64_t>(candidates_.size()));
    double sum = interval.at_high;
    int64_t kept = 0;
    while (kept < static_cast<int64_t>(candidates_.size()) && sum < mass)
        sum += static_cast<double>(candidates_[kept++].value);
    const float least = kept > 0 ? candidates_[kept - 1].value : value_of(interval.high);
    scan_.cut(weights_.data(), vocab_size_, least, sums_.data());
    drop_ties(kept, least);
}

// Of the sorted candidates, those after the first `kept` that equal the last one kept are out too.
void Sampler::drop_ties(int64_t kept, float least) {
    bool any = false;
    for (size_t i = kept; i < candidates_.size() && candidates_[i].value == least; ++i) {
        weights_[candidates_[i].id] = 0;
        any = true;
    }
    if (any)
        scan_.cut(weights_.data(), vocab_size_, 0, sums_.data());
}

double Sampler::total_weight() const {
    double total = 0;
    for (const float sum : sums_)
        total += static_cast<double>(sum);
    return total;
}

// `read` copies the weights of a block. The block is found by the sums, the token within it by its
// weights.
template <typename Read> int32_t Sampler::draw_from_row(double noise, Read read) const {
    const double target = noise * total_weight();
    double sum = 0;
    int64_t block = 0;
    int64_t last = 0; // the last block that has a weight
    for (; block < num_blocks_; ++block) {
        if (sums_[block] > 0)
            last = block;
        const double after = sum + static_cast<double>(sums_[block]);
        if (after > target)
            break;
        sum = after;
    }
    const int64_t begin = last * kScanBlock;
    const int64_t count = std::min(kScanBlock, vocab_size_ - begin);
    float weights[kScanBlock];
    read(begin, count, weights);
    int64_t chosen = 0;
    for (int64_t i = 0; i < count && sum <= target; ++i)
        if (weights[i] > 0) {
            sum += static_cast<double>(weights[i]);
            chosen = i; // stays the last one when rounding leaves the sum short of the target
        }
    return static_cast<int32_t>(begin + chosen);
}

void Sampler::read_logprobs(const float *logits, int32_t token, int64_t top, Logprobs &out) {
    scan_.exponentials(logits, vocab_size_, maximum_, 1, -kInfinity, nullptr, sums_.data());
    const double shift = static_cast<double>(maximum_) + std::log(total_weight());
    const auto logprob = [&](float logit) {
        return static_cast<float>(static_cast<double>(logit) - shift);
    };
    out.logprob = logprob(logits[token]);

    const float own = logits[token];
    int64_t before = 0;
    for (int64_t block = 0; block < num_blocks_; ++block) {
        if (maxima_[block] < own)
            continue;
        const int64_t begin = block * kScanBlock;
        const int64_t found = scan_.select(logits, begin, std::min(begin + kScanBlock, vocab_size_),
                                           own, kInfinity, ids_.data());
        for (int64_t i = 0; i < found; ++i)
            before += logits[ids_[i]] > own || ids_[i] < token;
    }
    out.rank = static_cast<int32_t>(before + 1);

    out.top.clear();
    if (top == 0)
        return;
    collect(logits, top, -kInfinity);
    keep_top(top);
    for (const Candidate &candidate : candidates_)
        out.top.emplace_back(candidate.id, logprob(candidate.value));
}

} // namespace octavo

// What the draws of one sequence depend on besides the logits: parameters, tokens so far, noise.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

namespace octavo {

// Philox4x32-10, a counter-based random number generator: replaces the four counter words by four
// random words. Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011.
void philox(uint32_t (&counter)[4], uint32_t key0, uint32_t key1);

using TokenIds = std::vector<int32_t>;
using LogitBias = std::vector<std::pair<int32_t, float>>;

// How one sequence's tokens are chosen: the fields of Python's SamplingParams, already validated.
// OPTION(type, name, default) of each: the struct below and what Python passes (bind/sampler.cpp)
// are made from this list.
// clang-format off
#define OCTAVO_SAMPLING_OPTIONS(OPTION)                                                            \
    OPTION(float, temperature, 0) /* 0 = greedy */                                                 \
    OPTION(int64_t, top_k, 0) /* 0 = all */                                                        \
    OPTION(float, top_p, 1)                                                                        \
    OPTION(float, min_p, 0)                                                                        \
    OPTION(double, top_n_sigma, 0) /* 0 or below = all; in single precision 1e-50 would be 0 */    \
    OPTION(float, presence_penalty, 0)                                                             \
    OPTION(float, frequency_penalty, 0)                                                            \
    OPTION(float, repetition_penalty, 1)                                                           \
    OPTION(LogitBias, logit_bias, {})                                                              \
    OPTION(std::optional<TokenIds>, allowed_token_ids, {}) /* none = all */                        \
    OPTION(TokenIds, banned_token_ids, {})                                                         \
    OPTION(TokenIds, stop_token_ids, {}) /* not drawn before min_tokens */                         \
    OPTION(int64_t, min_tokens, 0)                                                                 \
    OPTION(int64_t, logprobs, -1) /* alternatives to report; -1 = no logprobs */                   \
    OPTION(int64_t, seed, 0)                                                                       \
    OPTION(uint32_t, choice, 0) /* which of the request's parallel sequences */
// clang-format on

struct SamplingOptions {
#define OCTAVO_FIELD(type, name, otherwise) type name = otherwise;
    OCTAVO_SAMPLING_OPTIONS(OCTAVO_FIELD)
#undef OCTAVO_FIELD
};

// Streams of noise that share no number.
enum class Stream : uint32_t {
    kDraw = 0,       // plain draws, a drafter's too
    kAcceptance = 1, // whether a drafter's guess is accepted
    kVerified = 2,   // draws of the rule that accepts or rejects guesses
};

class SamplerState {
  public:
    // Throws std::invalid_argument if an id is outside the vocabulary.
    SamplerState(SamplingOptions options, int64_t vocab_size, std::span<const int32_t> prompt);

    const SamplingOptions &options() const { return options_; }
    int64_t vocab_size() const { return vocab_size_; }
    int64_t num_generated() const { return static_cast<int64_t>(generated_.size()); }

    // Throws std::invalid_argument if the token is outside the vocabulary.
    void record(int32_t token);
    // Forgets the last tokens. Throws std::invalid_argument if there are fewer.
    void rewind(int64_t count);
    SamplerState fork(uint32_t choice) const;

    // The noise in [0, 1) of the draw at a position: the same whenever it is asked for.
    double uniform(int64_t position, Stream stream = Stream::kDraw) const;

    // Whether the next draw's logits differ from the model's before temperature.
    bool adjusts() const;
    // Applies masks, bias and penalties to a whole row for the next draw.
    void adjust(const float *logits, float *adjusted) const;

  private:
    struct Seen {
        int32_t token;
        int32_t generated; // times
        bool in_prompt;
    };

    void check(int32_t token) const;
    bool penalizes() const;
    Seen &seen(int32_t token);

    SamplingOptions options_;
    int64_t vocab_size_;
    std::vector<int32_t> generated_;
    std::vector<Seen> seen_; // distinct tokens, where a penalty needs them
    std::unordered_map<int32_t, size_t> seen_index_;
};

} // namespace octavo

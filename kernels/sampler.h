// From a row of logits to a token.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "sampler_state.h"
#include "scan.h"

namespace octavo {

struct Logprobs {
    float logprob = 0;
    int32_t rank = 0;                           // 1 = most likely; equals rank by id
    std::vector<std::pair<int32_t, float>> top; // most likely first
};

enum class RowError {
    kNone,
    kNotFinite,      // a logit is not a number or +infinity
    kNothingAllowed, // every logit is -infinity
};

struct Drawn {
    int32_t token = -1;
    RowError error = RowError::kNone;
    Logprobs logprobs; // if the state asks for them
};

// Works on one row at a time, in buffers of its own: one a thread. What it returns depends on the
// row and the state alone.
//
// The draw inverts the cumulative distribution in order of token id: the first id at which the sum
// of weights exceeds noise × total. Only what truncation needs is ever sorted: block maxima give a
// threshold that few values pass, or, where many must stay, a search for the threshold itself.
class Sampler {
  public:
    Sampler(int64_t vocab_size, const ScanKernels &scan);

    int64_t vocab_size() const { return vocab_size_; }

    // Draws a token and records it in the state; records nothing where there is an error.
    Drawn draw(const float *logits, SamplerState &state);

    // The distribution that a draw would come from, [vocab_size]; zeros where there is an error.
    // Records nothing.
    RowError probabilities(const float *logits, const SamplerState &state, float *out);

    // Speculative sampling (Leviathan et al., 2023; Chen et al., 2023), a token at a time. With p
    // that distribution and q the one, [vocab_size], that `guess` was drawn from, accepts the guess
    // with probability min(1, p(guess) / q(guess)) and otherwise draws from max(0, p - q), which
    // never gives the guess; either way the token comes from p. A null q is certain of the guess.
    // Without a guess (-1) the token is drawn from p. Records and fails as `draw` does.
    //
    // A q that is no distribution costs the exactness, but no token comes that p has not. The noise
    // is of streams of its own, so that guesses may be drawn with a copy of the state.
    Drawn verify(const float *logits, SamplerState &state, int32_t guess, const float *q);

    // The logprob and rank of a token in the model's own distribution, and the `top` likeliest
    // tokens.
    RowError logprobs(const float *logits, int32_t token, int64_t top, Logprobs &out);

  private:
    struct Candidate {
        float value; // logit or weight
        int32_t id;
    };

    // Where the weights of what truncation left are.
    enum class Left {
        kCandidates, // in candidates_; they are few
        kWeights,    // in weights_
        kEverything, // to be computed from the logits, but for those below the floor
    };
    struct Kept {
        Left left;
        float scale;
        float floor;
    };

    const float *adjusted(const float *logits, const SamplerState &state);
    // pick(row, state) gives the token, of a row after masks, bias and penalties that was scanned.
    template <typename Pick> Drawn choose(const float *logits, SamplerState &state, Pick pick);
    RowError scan_row(const float *logits);
    int32_t first_maximum(const float *logits) const;

    Kept truncate(const float *logits, const SamplingOptions &options);
    int32_t draw_from(const Kept &kept, const float *logits, double noise);
    float probability(const Kept &kept, const float *logits, int32_t token);
    void spread(const Kept &kept, const float *logits, float *out);
    int32_t redraw(const Kept &kept, const float *logits, const SamplingOptions &options,
                   int32_t guess, const float *q, double noise);

    // Few tokens, as a list.
    void collect(const float *logits, int64_t wanted, float floor);
    void list_candidates(const float *values, int64_t found);
    void keep_top(int64_t k);
    void weigh_candidates(float scale);
    void keep_mass(double mass);
    double candidate_mass() const;
    int32_t draw_from_candidates(double noise);

    // Many tokens, as weights over the whole row.
    void weigh_top_k(const float *logits, int64_t k, float scale, float floor);
    void cut_to_mass(double mass);
    void drop_ties(int64_t kept, float least);
    double total_weight() const;
    template <typename Read> int32_t draw_from_row(double noise, Read read) const;

    void read_logprobs(const float *logits, int32_t token, int64_t top, Logprobs &out);

    const ScanKernels &scan_;
    int64_t vocab_size_;
    int64_t num_blocks_;
    float maximum_ = 0;           // of the row at hand
    std::vector<float> maxima_;   // of its blocks
    std::vector<float> sums_;     // of its blocks' weights
    std::vector<float> weights_;  // exp of the scaled logits; 0 where a token is out
    std::vector<float> adjusted_; // the row after masks, bias and penalties
    std::vector<float> scratch_;
    std::vector<int32_t> ids_;
    std::vector<Candidate> candidates_;
};

} // namespace octavo

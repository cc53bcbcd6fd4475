#include "sampler_state.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

namespace octavo {

void philox(uint32_t (&counter)[4], uint32_t key0, uint32_t key1) {
    for (int round = 0; round < 10; ++round) {
        const uint64_t product0 = uint64_t{0xD2511F53} * counter[0];
        const uint64_t product1 = uint64_t{0xCD9E8D57} * counter[2];
        counter[0] = static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key0;
        counter[1] = static_cast<uint32_t>(product1);
        counter[2] = static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key1;
        counter[3] = static_cast<uint32_t>(product0);
        key0 += 0x9E3779B9;
        key1 += 0xBB67AE85;
    }
}

SamplerState::SamplerState(SamplingOptions options, int64_t vocab_size,
                           std::span<const int32_t> prompt)
    : options_(std::move(options)), vocab_size_(vocab_size) {
    if (options_.allowed_token_ids)
        for (const int32_t id : *options_.allowed_token_ids)
            check(id);
    for (const auto *ids : {&options_.banned_token_ids, &options_.stop_token_ids})
        for (const int32_t id : *ids)
            check(id);
    for (const auto &[id, bias] : options_.logit_bias)
        check(id);
    for (const int32_t id : prompt) {
        check(id);
        if (options_.repetition_penalty != 1)
            seen(id).in_prompt = true;
    }
}

void SamplerState::record(int32_t token) {
    check(token);
    if (penalizes())
        ++seen(token).generated;
    generated_.push_back(token);
}

void SamplerState::rewind(int64_t count) {
    if (count < 0 || count > num_generated())
        throw std::invalid_argument("cannot forget " + std::to_string(count) + " of " +
                                    std::to_string(num_generated()) + " tokens");
    for (; count > 0; --count) {
        if (penalizes())
            --seen(generated_.back()).generated;
        generated_.pop_back();
    }
}

SamplerState SamplerState::fork(uint32_t choice) const {
    SamplerState copy = *this;
    copy.options_.choice = choice;
    return copy;
}

double SamplerState::uniform(int64_t position, Stream stream) const {
    // Key: the seed. Counter: the position, the choice and the stream, so that neither parallel
    // sequences nor streams share a block.
    uint32_t words[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32),
                         options_.choice, static_cast<uint32_t>(stream)};
    const auto seed = static_cast<uint64_t>(options_.seed);
    philox(words, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
    const uint64_t bits = (uint64_t{words[0]} << 32 | words[1]) >> 11;
    return static_cast<double>(bits) * 0x1p-53;
}

bool SamplerState::adjusts() const {
    return options_.allowed_token_ids || !options_.banned_token_ids.empty() ||
           !options_.logit_bias.empty() || num_generated() < options_.min_tokens || penalizes();
}

void SamplerState::adjust(const float *logits, float *adjusted) const {
    constexpr float kOut = -std::numeric_limits<float>::infinity();
    if (options_.allowed_token_ids) {
        std::fill_n(adjusted, vocab_size_, kOut);
        for (const int32_t id : *options_.allowed_token_ids)
            adjusted[id] = logits[id];
    } else {
        std::copy_n(logits, vocab_size_, adjusted);
    }
    for (const int32_t id : options_.banned_token_ids)
        adjusted[id] = kOut;
    for (const auto &[id, bias] : options_.logit_bias)
        adjusted[id] += bias;
    if (num_generated() < options_.min_tokens)
        for (const int32_t id : options_.stop_token_ids)
            adjusted[id] = kOut;
    for (const Seen &seen : seen_) {
        float &value = adjusted[seen.token];
        if (seen.in_prompt || seen.generated > 0)
            value = value > 0 ? value / options_.repetition_penalty
                              : value * options_.repetition_penalty;
        if (seen.generated > 0) {
            value -= options_.frequency_penalty * static_cast<float>(seen.generated);
            value -= options_.presence_penalty;
        }
    }
}

void SamplerState::check(int32_t token) const {
    if (token < 0 || token >= vocab_size_)
        throw std::invalid_argument("token id " + std::to_string(token) +
                                    " is outside the vocabulary of " + std::to_string(vocab_size_));
}

bool SamplerState::penalizes() const {
    return options_.presence_penalty != 0 || options_.frequency_penalty != 0 ||
           options_.repetition_penalty != 1;
}

SamplerState::Seen &SamplerState::seen(int32_t token) {
    const auto [entry, added] = seen_index_.try_emplace(token, seen_.size());
    if (added)
        seen_.push_back({token, 0, false});
    return seen_[entry->second];
}

} // namespace octavo

// The merges that a SentencePiece-style BPE vocabulary implies.
//
// Such a vocabulary lists tokens and their ranks, no merges: any two neighbours whose concatenation
// is a token may merge, best rank first. Of all the cuts of a token in two, only one can ever
// happen: two neighbours that spell token t have formed without a merge across t's edges, so they
// are the last state of the algorithm run on t alone. That one cut is what is computed here: it is
// all that an explicit-merge implementation needs, and less than half of what enumerating the cuts
// would give it.

#include "bind.h"

#include <nanobind/ndarray.h>

#include <cstdint>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

namespace nb = nanobind;

namespace {

constexpr uint32_t kNone = UINT32_MAX;
constexpr uint32_t kCharacterMask = 0x1FFFFF; // code points end at 0x10FFFF
constexpr uint64_t kBase = 0x9E3779B97F4A7C15;

uint64_t mix(uint64_t h) {
    h ^= h >> 32;
    h *= 0xD6E8FEB86659FD93;
    return h ^ (h >> 32);
}

// Tokens by their text; finds substrings of a token by a rolling hash, compared on a hit.
class Vocabulary {
  public:
    Vocabulary(const uint32_t *text, const int64_t *offsets, const uint8_t *usable, size_t count)
        : text_(text), offsets_(offsets), characters_(kCharacterMask + 1) {
        size_t capacity = 16;
        while (capacity < 2 * count)
            capacity *= 2;
        slots_.assign(capacity, kNone);
        present_.resize(8 * capacity);
        powers_.push_back(1);
        for (size_t token = 0; token < count; ++token) {
            const auto length = static_cast<size_t>(offsets[token + 1] - offsets[token]);
            while (powers_.size() <= length)
                powers_.push_back(powers_.back() * kBase);
            if (!usable[token])
                continue;
            if (length == 1)
                characters_[text[offsets[token]] & kCharacterMask] = true;
            prefixes(token);
            const uint64_t hash = mix(prefix_[length]);
            present_[hash & (present_.size() - 1)] = true;
            size_t slot = hash & (capacity - 1);
            while (slots_[slot] != kNone)
                slot = (slot + 1) & (capacity - 1);
            slots_[slot] = static_cast<uint32_t>(token);
        }
    }

    // Sets the token whose substrings `find` looks up.
    void select(size_t token) {
        prefixes(token);
        begin_ = text_ + offsets_[token];
    }

    // Whether the selected token's character at `index` is itself a token.
    bool character(size_t index) const { return characters_[begin_[index] & kCharacterMask]; }

    // The token spelt by characters [from, to) of the selected token, or kNone.
    uint32_t find(size_t from, size_t to) const {
        const uint64_t hash = mix(prefix_[to] - prefix_[from] * powers_[to - from]);
        if (!present_[hash & (present_.size() - 1)])
            return kNone;
        for (size_t slot = hash & (slots_.size() - 1); slots_[slot] != kNone;
             slot = (slot + 1) & (slots_.size() - 1)) {
            const uint32_t token = slots_[slot];
            const int64_t start = offsets_[token];
            if (static_cast<size_t>(offsets_[token + 1] - start) == to - from &&
                std::memcmp(text_ + start, begin_ + from, (to - from) * sizeof(uint32_t)) == 0)
                return token;
        }
        return kNone;
    }

  private:
    void prefixes(size_t token) {
        prefix_.assign(1, 0);
        for (int64_t i = offsets_[token]; i < offsets_[token + 1]; ++i)
            prefix_.push_back(prefix_.back() * kBase + text_[i] + 1);
    }

    const uint32_t *text_;
    const int64_t *offsets_;
    const uint32_t *begin_ = nullptr;
    std::vector<bool> characters_; // by code point
    std::vector<bool> present_;    // hashes that occur: most lookups fail, and fail here, in cache
    std::vector<uint32_t> slots_;
    std::vector<uint64_t> powers_;
    std::vector<uint64_t> prefix_; // hashes of the selected token's prefixes
};

// Neighbours from `from` to `to`, split at `middle`, that spell `token`. Lower merges earlier:
// by rank; then, as among equal scores, longer left and right parts first.
struct Pair {
    uint32_t token = kNone;
    int32_t rank = INT32_MAX;
    size_t from = 0, middle = 0, to = 0;

    auto key() const {
        return std::tuple(rank, -static_cast<int64_t>(middle - from),
                          -static_cast<int64_t>(to - middle), token, from);
    }
};

using Array32 = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Array64 = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ArrayRanks = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ArrayFlags = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Cuts = nb::ndarray<nb::numpy, int32_t, nb::ndim<1>>;

void compute_cuts(const uint32_t *text, const int64_t *offsets, const int32_t *ranks,
                  const uint8_t *usable, size_t count, int32_t *cuts) {
    Vocabulary vocabulary(text, offsets, usable, count);
    std::vector<size_t> edges; // where the symbols begin, and the end
    std::vector<Pair> pairs;   // pairs[i]: symbols i and i + 1
    for (size_t token = 0; token < count; ++token) {
        const auto length = static_cast<size_t>(offsets[token + 1] - offsets[token]);
        if (!usable[token] || length < 2)
            continue;
        vocabulary.select(token);
        const auto pair_at = [&](size_t i) {
            Pair pair{kNone, INT32_MAX, edges[i], edges[i + 1], edges[i + 2]};
            // A single character may be no token; anything longer has been merged from tokens.
            const bool left =
                pair.middle - pair.from > 1 || vocabulary.find(pair.from, pair.middle) != kNone;
            const bool right =
                pair.to - pair.middle > 1 || vocabulary.find(pair.middle, pair.to) != kNone;
            if (left && right)
                pair.token = pair.to - pair.from == length ? static_cast<uint32_t>(token)
                                                           : vocabulary.find(pair.from, pair.to);
            if (pair.token != kNone)
                pair.rank = ranks[pair.token];
            return pair;
        };
        edges.clear();
        for (size_t i = 0; i <= length; ++i)
            edges.push_back(i);
        pairs.clear();
        for (size_t i = 0; i + 1 < length; ++i)
            pairs.push_back(pair_at(i));
        while (pairs.size() > 1) {
            size_t best = 0;
            for (size_t i = 1; i < pairs.size(); ++i)
                if (pairs[i].key() < pairs[best].key())
                    best = i;
            if (pairs[best].token == kNone)
                break;
            edges.erase(edges.begin() + static_cast<int64_t>(best) + 1);
            pairs.erase(pairs.begin() + static_cast<int64_t>(best));
            if (best > 0)
                pairs[best - 1] = pair_at(best - 1);
            if (best < pairs.size())
                pairs[best] = pair_at(best);
        }
        if (pairs.size() == 1 && pairs[0].token != kNone)
            cuts[token] = static_cast<int32_t>(pairs[0].middle);
    }
}

Cuts merge_cuts(const Array32 &text, const Array64 &offsets, const ArrayRanks &ranks,
                const ArrayFlags &usable) {
    const size_t count = ranks.shape(0);
    bool sound = offsets.shape(0) == count + 1 && usable.shape(0) == count && offsets(0) == 0 &&
                 offsets(count) == static_cast<int64_t>(text.shape(0));
    for (size_t i = 0; sound && i < count; ++i)
        sound = offsets(i) <= offsets(i + 1);
    if (!sound)
        throw nb::value_error("offsets, ranks and usable do not describe the same tokens");
    auto *cuts = new int32_t[count + 1]();
    nb::capsule owner(cuts, [](void *p) noexcept { delete[] static_cast<int32_t *>(p); });
    {
        nb::gil_scoped_release release;
        compute_cuts(text.data(), offsets.data(), ranks.data(), usable.data(), count, cuts);
    }
    return Cuts(cuts, {count}, owner);
}

} // namespace

void bind_merges(nb::module_ &m) {
    m.def("merge_cuts", &merge_cuts, nb::arg("text"), nb::arg("offsets"), nb::arg("ranks"),
          nb::arg("usable"),
          "Where each token of a SentencePiece-style BPE vocabulary is cut into the two parts it "
          "merges from: int32 characters before the cut, 0 = it is not merged from others.\n\n"
          "Token i is text[offsets[i]:offsets[i + 1]] in code points (uint32), merged in order of "
          "ranks (int32); tokens that are not usable (uint8) take no part. Time is quadratic in a "
          "token's length.");
}

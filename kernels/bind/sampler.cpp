#include "batch_sampler.h"

#include <algorithm>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind.h"
#include "tier.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

using Logits = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;
using Weights = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Probabilities = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

const char *explain(RowError error) {
    return error == RowError::kNotFinite ? "a logit is not a number or infinite"
                                         : "no token is allowed";
}

// (token id, logprob, rank, ((id, logprob), ...)), the fields of Python's TokenLogprobs.
nb::tuple as_tuple(int32_t token, const Logprobs &logprobs) {
    nb::list top;
    for (const auto &[id, logprob] : logprobs.top)
        top.append(nb::make_tuple(id, logprob));
    return nb::make_tuple(token, logprobs.logprob, logprobs.rank, nb::tuple(top));
}

const float *row_of(const Logits &logits, int64_t row, int64_t vocab_size) {
    if (static_cast<int64_t>(logits.shape(1)) != vocab_size || logits.stride(1) != 1)
        throw std::invalid_argument("logits have rows of " + std::to_string(logits.shape(1)) +
                                    " (stride " + std::to_string(logits.stride(1)) +
                                    "), not of the vocabulary's " + std::to_string(vocab_size));
    if (row < 0 || row >= static_cast<int64_t>(logits.shape(0)))
        throw std::invalid_argument("row " + std::to_string(row) + " is not one of " +
                                    std::to_string(logits.shape(0)));
    return logits.data() + row * logits.stride(0);
}

template <typename T> void read_option(const nb::kwargs &given, const char *name, T &option) {
    if (!given.contains(name))
        throw nb::type_error(("the option " + std::string(name) + " is missing").c_str());
    if (!nb::try_cast(given[name], option))
        throw nb::type_error(("the option " + std::string(name) + " is " +
                              nb::cast<std::string>(nb::repr(given[name])))
                                 .c_str());
}

// Each option of the list has to be given, and no other.
SamplingOptions read_options(const nb::kwargs &given) {
    SamplingOptions options;
#define OCTAVO_READ(type, name, otherwise) read_option(given, #name, options.name);
    OCTAVO_SAMPLING_OPTIONS(OCTAVO_READ)
#undef OCTAVO_READ
#define OCTAVO_NAME(type, name, otherwise) #name,
    constexpr std::string_view kNames[] = {OCTAVO_SAMPLING_OPTIONS(OCTAVO_NAME)};
#undef OCTAVO_NAME
    if (given.size() != std::size(kNames))
        for (nb::handle key : given.keys()) {
            const auto name = nb::cast<std::string>(key);
            if (std::find(std::begin(kNames), std::end(kNames), name) == std::end(kNames))
                throw nb::type_error(("there is no option " + name).c_str());
        }
    return options;
}

// One Entry for each (row, state), its `logits` and `state` set.
template <typename Entry>
std::vector<Entry> pair_up(const BatchSampler &sampler, const Logits &logits,
                           const nb::sequence &rows, const nb::sequence &states) {
    std::vector<Entry> entries;
    entries.reserve(nb::len(states));
    for (nb::handle handle : states) {
        auto &state = nb::cast<SamplerState &>(handle);
        if (state.vocab_size() != sampler.vocab_size())
            throw std::invalid_argument("a state belongs to another vocabulary");
        entries.emplace_back().state = &state;
    }
    if (nb::len(rows) != entries.size())
        throw std::invalid_argument(std::to_string(nb::len(rows)) + " rows for " +
                                    std::to_string(entries.size()) + " states");
    size_t index = 0;
    for (nb::handle row : rows)
        entries[index++].logits = row_of(logits, nb::cast<int64_t>(row), sampler.vocab_size());
    return entries;
}

// (token ids, list of logprobs or None, {index: error}).
template <typename Entry> nb::tuple drawn_of(const std::vector<Entry> &entries) {
    const bool any_logprobs = std::any_of(entries.begin(), entries.end(), [](const Entry &entry) {
        return entry.state->options().logprobs >= 0;
    });
    nb::list tokens;
    nb::list logprobs;
    nb::dict errors;
    size_t index = 0;
    for (const Entry &entry : entries) {
        const Drawn &drawn = entry.drawn;
        tokens.append(drawn.token);
        if (any_logprobs) {
            if (entry.state->options().logprobs >= 0 && drawn.token >= 0)
                logprobs.append(as_tuple(drawn.token, drawn.logprobs));
            else
                logprobs.append(nb::none());
        }
        if (drawn.error != RowError::kNone)
            errors[nb::int_(index)] = explain(drawn.error);
        ++index;
    }
    return nb::make_tuple(tokens, any_logprobs ? nb::object(logprobs) : nb::none(), errors);
}

nb::tuple sample(BatchSampler &sampler, const Logits &logits, const nb::sequence &rows,
                 const nb::sequence &states) {
    auto draws = pair_up<BatchSampler::Draw>(sampler, logits, rows, states);
    {
        nb::gil_scoped_release release;
        sampler.draw(draws);
    }
    return drawn_of(draws);
}

nb::tuple verify(BatchSampler &sampler, const Logits &logits, const nb::sequence &rows,
                 const nb::sequence &states, const TokenIds &guesses,
                 const nb::sequence &drawn_from) {
    auto entries = pair_up<BatchSampler::Verification>(sampler, logits, rows, states);
    if (guesses.size() != entries.size() || nb::len(drawn_from) != entries.size())
        throw std::invalid_argument("as many guesses and distributions as states, or none");
    std::vector<Weights> held; // so that what was converted lives until the end
    size_t index = 0;
    for (nb::handle given : drawn_from) {
        BatchSampler::Verification &entry = entries[index];
        entry.guess = guesses[index++];
        if (entry.guess < -1 || entry.guess >= sampler.vocab_size())
            throw std::invalid_argument("a guess, " + std::to_string(entry.guess) +
                                        ", is outside the vocabulary");
        if (given.is_none())
            continue;
        held.push_back(nb::cast<Weights>(given));
        if (static_cast<int64_t>(held.back().shape(0)) != sampler.vocab_size())
            throw std::invalid_argument("a guess's distribution is not one over the vocabulary");
        entry.q = held.back().data();
    }
    {
        nb::gil_scoped_release release;
        sampler.verify(entries);
    }
    return drawn_of(entries);
}

void probabilities(BatchSampler &sampler, const Logits &logits, const nb::sequence &rows,
                   const nb::sequence &states, const Probabilities &out) {
    auto entries = pair_up<BatchSampler::Spread>(sampler, logits, rows, states);
    if (out.shape(0) != entries.size() ||
        static_cast<int64_t>(out.shape(1)) != sampler.vocab_size())
        throw std::invalid_argument("the result has not a row of the vocabulary for each state");
    for (size_t i = 0; i < entries.size(); ++i)
        entries[i].out = out.data() + i * out.shape(1);
    nb::gil_scoped_release release;
    sampler.probabilities(entries);
}

nb::list prompt_logprobs(BatchSampler &sampler, const Logits &logits, const TokenIds &rows,
                         const TokenIds &tokens, int64_t top) {
    if (rows.size() != tokens.size())
        throw std::invalid_argument(std::to_string(rows.size()) + " rows for " +
                                    std::to_string(tokens.size()) + " tokens");
    std::vector<BatchSampler::Lookup> lookups;
    for (size_t i = 0; i < rows.size(); ++i) {
        if (tokens[i] < 0 || tokens[i] >= sampler.vocab_size())
            throw std::invalid_argument("token id " + std::to_string(tokens[i]) +
                                        " is outside the vocabulary");
        lookups.push_back({row_of(logits, rows[i], sampler.vocab_size()), tokens[i], {}, {}});
    }
    {
        nb::gil_scoped_release release;
        sampler.look_up(lookups, top);
    }
    nb::list result;
    for (size_t i = 0; i < rows.size(); ++i) {
        if (lookups[i].error != RowError::kNone)
            throw std::invalid_argument("prompt position " + std::to_string(i) + ": " +
                                        explain(lookups[i].error));
        result.append(as_tuple(tokens[i], lookups[i].logprobs));
    }
    return result;
}

} // namespace
} // namespace octavo

void bind_sampler(nb::module_ &m) {
    using namespace octavo;
    nb::class_<SamplerState>(m, "SamplerState")
        .def(
            "__init__",
            [](SamplerState *self, int64_t vocab_size, const TokenIds &prompt_token_ids,
               const nb::kwargs &options) {
                new (self) SamplerState(read_options(options), vocab_size, prompt_token_ids);
            },
            nb::kw_only(), "vocab_size"_a, "prompt_token_ids"_a, "options"_a)
        .def_prop_ro("num_generated", &SamplerState::num_generated)
        .def("record", &SamplerState::record, "token_id"_a)
        .def("rewind", &SamplerState::rewind, "count"_a)
        .def("fork", &SamplerState::fork, "choice"_a)
        .def(
            "uniform",
            [](const SamplerState &self, int64_t position, uint32_t stream) {
                return self.uniform(position, static_cast<Stream>(stream));
            },
            "position"_a, "stream"_a = 0);
    nb::class_<BatchSampler>(m, "Sampler")
        .def(
            "__init__",
            [](BatchSampler *self, int64_t vocab_size, const std::string &isa,
               std::shared_ptr<ThreadPool> pool) {
                if (vocab_size < 1)
                    throw std::invalid_argument("a vocabulary has at least one token");
                new (self) BatchSampler(vocab_size, find_tier(isa).scan, std::move(pool));
            },
            "vocab_size"_a, "isa"_a, "pool"_a.none())
        .def("sample", &sample, "logits"_a, "rows"_a, "states"_a)
        .def("verify", &verify, "logits"_a, "rows"_a, "states"_a, "guesses"_a, "drawn_from"_a)
        .def("probabilities", &probabilities, "logits"_a, "rows"_a, "states"_a, "out"_a.noconvert())
        .def("prompt_logprobs", &prompt_logprobs, "logits"_a, "rows"_a, "token_ids"_a, "top"_a);
    m.def(
        "philox",
        [](std::vector<uint32_t> counter, std::vector<uint32_t> key) {
            if (counter.size() != 4 || key.size() != 2)
                throw std::invalid_argument("Philox4x32 takes four counter words and two of key");
            uint32_t words[4] = {counter[0], counter[1], counter[2], counter[3]};
            philox(words, key[0], key[1]);
            return std::vector<uint32_t>(words, words + 4);
        },
        "counter"_a, "key"_a, "Philox4x32-10: four random words.");
}

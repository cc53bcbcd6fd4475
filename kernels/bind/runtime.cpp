#include "bind.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>

#include "runtime.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace octavo;

namespace {

template <int dims> using Ints = nb::ndarray<const int32_t, nb::ndim<dims>, nb::c_contig>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig>;
using ByteRows = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig>;
using FloatRows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig>;
using GroupFields = std::tuple<int64_t, int64_t, int64_t, int64_t>;              // as KvGroup's
using StatePartFields = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>; // as StatePart's
// Pages, bytes of a unit, units of a page, rows of the log, parts.
using StateFields = std::tuple<int64_t, int64_t, int64_t, int64_t, std::vector<StatePartFields>>;
// As StateBatch's (kv_cache/state_batch.py).
using StateArrays = std::tuple<Ints<2>, Ints<1>, Ints<2>, Ints<1>, Ints<1>, Ints<1>>;
using RegionFields = std::tuple<std::string, bool, decltype(Region::work)>;

void check_size(const char *name, size_t size, size_t expected) {
    if (size == expected)
        return;
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(size) +
                                " entries, not " + std::to_string(expected));
}

// Rows in the runtime's own memory.
nb::object rows_of(Runtime &runtime, float *data, int64_t rows, int64_t width) {
    const size_t shape[2] = {size_t(rows), size_t(width)};
    return nb::cast(nb::ndarray<nb::numpy, float, nb::ndim<2>>(data, 2, shape, nb::find(runtime)));
}

nb::object logits(Runtime &runtime) {
    return rows_of(runtime, runtime.logits(), runtime.logits_rows(), runtime.outputs());
}

StateStep state_of(const StateArrays &arrays, const StateConfig &config, size_t seqs,
                   size_t tokens) {
    const auto &[tables, reads, stores, pending_offsets, pending, log] = arrays;
    check_size("state.tables[0]", tables.shape(1), size_t(config.pages));
    check_size("state.reads", reads.size(), seqs);
    check_size("state.stores[0]", stores.shape(1), 3);
    check_size("state.pending_offsets", pending_offsets.size(), seqs + 1);
    check_size("state.log", log.size(), tokens);
    return StateStep{tables.data(),  int64_t(tables.shape(0)), reads.data(),
                     stores.data(),  int64_t(stores.shape(0)), pending_offsets.data(),
                     pending.data(), int64_t(pending.size()),  log.data()};
}

nb::object step(Runtime &runtime, const Ints<1> &token_ids, const Ints<1> &positions,
                const Ints<1> &seq_offsets, const Ints<1> &seq_slots, const Ints<3> &block_tables,
                const Ints<1> &logits_rows, const Ints<2> &copies, int64_t index,
                const std::optional<FloatRows> &rows, const std::optional<StateArrays> &state) {
    const RuntimeConfig &config = runtime.config();
    const Program &program = runtime.program(index);
    const size_t tokens = rows ? rows->shape(0) : token_ids.size();
    if (program.input_width > 0 || rows)
        check_size("rows[0]", rows ? rows->shape(1) : 0, size_t(program.input_width));
    if (program.embeds)
        check_size("token_ids", token_ids.size(), tokens);
    if (program.cached) {
        check_size("positions", positions.size(), tokens);
        check_size("seq_offsets", seq_offsets.size(), seq_slots.size() + 1);
        check_size("block_tables", block_tables.shape(0), config.groups.size());
        check_size("block_tables[0]", block_tables.shape(1), size_t(config.max_seqs));
        check_size("block_tables[0, 0]", block_tables.shape(2), size_t(config.max_blocks_per_seq));
    }
    if (copies.size() > 0)
        check_size("copies[0]", copies.shape(1), 2);
    StepBatch batch{};
    batch.token_ids = token_ids.data();
    batch.rows = rows ? rows->data() : nullptr;
    batch.positions = positions.data();
    batch.tokens = int64_t(tokens);
    batch.seq_offsets = seq_offsets.data();
    batch.seq_slots = seq_slots.data();
    batch.seqs = int64_t(seq_slots.size());
    batch.block_tables = block_tables.data();
    batch.logits_rows = logits_rows.data();
    batch.logits = int64_t(logits_rows.size());
    batch.copies = copies.data();
    batch.num_copies = int64_t(copies.size()) / 2;
    if (state && program.recurrent)
        batch.state = state_of(*state, config.state, seq_slots.size(), tokens);
    {
        nb::gil_scoped_release release;
        runtime.step(batch, index);
    }
    return logits(runtime);
}

// Drafts in the background from the rows of those numbers.
void start_draft(Runtime &runtime, std::vector<int64_t> programs, const FloatRows &rows,
                 const std::vector<int32_t> &numbers, std::vector<int32_t> tokens,
                 std::vector<int32_t> most, float least) {
    check_size("token_ids", tokens.size(), numbers.size());
    check_size("most", most.size(), numbers.size());
    for (const int64_t program : programs)
        check_size("rows[0]", rows.shape(1), size_t(runtime.program(program).input_width));
    DraftAhead ahead{.programs = std::move(programs),
                     .tokens = std::move(tokens),
                     .most = std::move(most),
                     .least = least};
    for (const int32_t number : numbers) {
        if (number < 0 || size_t(number) >= rows.shape(0))
            throw std::invalid_argument("there is no row " + std::to_string(number));
        const float *row = rows.data() + size_t(number) * rows.shape(1);
        ahead.rows.insert(ahead.rows.end(), row, row + rows.shape(1));
    }
    runtime.start_draft(std::move(ahead));
}

// The tokens of each sequence's draft and the probability of the first; None: there is none.
nb::object finish_draft(Runtime &runtime) {
    const DraftAhead *ahead = nullptr;
    {
        nb::gil_scoped_release release;
        ahead = runtime.finish_draft();
    }
    if (ahead == nullptr)
        return nb::none();
    nb::list drafts;
    for (size_t sequence = 0; sequence < ahead->tokens.size(); ++sequence) {
        const size_t first = sequence * size_t(ahead->depth);
        nb::list tokens;
        for (size_t at = first; at < first + size_t(ahead->depth) && ahead->drafted[at] >= 0; ++at)
            tokens.append(ahead->drafted[at]);
        drafts.append(nb::make_tuple(tokens, ahead->depth > 0 ? ahead->chances[first] : 0.0f));
    }
    return std::move(drafts);
}

// Copies blocks between the arena and `rows`, a block a row.
void transfer(Runtime &runtime, const Ints<1> &blocks, ByteRows &rows, bool to_arena) {
    const auto block_bytes = size_t(runtime.block_bytes());
    check_size("data", rows.shape(0), blocks.size());
    check_size("data[0]", rows.shape(1), block_bytes);
    for (size_t i = 0; i < blocks.size(); ++i) {
        const int32_t block = blocks.data()[i];
        if (block < 0 || block >= runtime.config().num_blocks) {
            throw std::invalid_argument("block " + std::to_string(block) + " is outside 0 to " +
                                        std::to_string(runtime.config().num_blocks - 1));
        }
    }
    nb::gil_scoped_release release;
    for (size_t i = 0; i < blocks.size(); ++i) {
        std::byte *inside = runtime.block(blocks.data()[i]);
        uint8_t *outside = rows.data() + i * block_bytes;
        if (to_arena) {
            std::memcpy(inside, outside, block_bytes);
        } else {
            std::memcpy(outside, inside, block_bytes);
        }
    }
}

} // namespace

void bind_runtime(nb::module_ &m) {
    nb::class_<Value>(m, "Value", "kernels/runtime.h")
        .def(nb::init<int64_t, int64_t, bool, int64_t>(), "offset"_a, "stride"_a, "local"_a,
             "first"_a);
    nb::class_<Prepared>(m, "Prepared", "kernels/runtime.h")
        .def(nb::init<int64_t, bool>(), "offset"_a, "local"_a);

    nb::class_<EmbedStep>(m, "EmbedStep")
        .def(nb::init<int64_t, Value, float>(), "matrix"_a, "out"_a, "scale"_a);
    nb::class_<InputStep>(m, "InputStep").def(nb::init<Value, int64_t>(), "out"_a, "width"_a);
    nb::class_<FunctionStep>(m, "FunctionStep")
        .def(
            "__init__",
            [](FunctionStep *self, std::string name, std::vector<Value> inputs,
               std::vector<int64_t> weights, std::vector<float> numbers, const Value &out,
               int64_t width, int64_t group) {
                new (self) FunctionStep{std::move(name),
                                        std::move(inputs),
                                        std::move(weights),
                                        std::move(numbers),
                                        out,
                                        width,
                                        group};
            },
            "name"_a, "inputs"_a, "weights"_a, "numbers"_a, "out"_a, "width"_a, "group"_a);
    nb::class_<PrepareStep>(m, "PrepareStep")
        .def(nb::init<Value, int64_t, int64_t, Prepared, int64_t>(), "x"_a, "format"_a, "k"_a,
             "out"_a, "order"_a);
    nb::class_<AngleStep>(m, "AngleStep")
        .def(nb::init<int64_t, Value, int64_t>(), "rope"_a, "out"_a, "ahead"_a);
    nb::class_<RopeStoreStep>(m, "RopeStoreStep")
        .def(nb::init<Value, Value, Value, Value, int64_t, int64_t, int64_t>(), "q"_a, "k"_a, "v"_a,
             "angles"_a, "rope"_a, "group"_a, "layer"_a);
    nb::class_<RotateStep>(m, "RotateStep")
        .def(nb::init<Value, Value, int64_t, int64_t, int64_t>(), "q"_a, "angles"_a, "rope"_a,
             "heads"_a, "head_dim"_a);
    nb::class_<ScaleByPositionStep>(m, "ScaleByPositionStep")
        .def(nb::init<Value, Value, int64_t, double, int64_t>(), "x"_a, "out"_a, "width"_a,
             "beta"_a, "original"_a);
    nb::class_<GatherStep>(m, "GatherStep")
        .def(nb::init<Value, Value, int64_t>(), "x"_a, "out"_a, "width"_a);
    nb::class_<ConcatStep>(m, "ConcatStep")
        .def(nb::init<Value, Value, Value, int64_t>(), "x"_a, "y"_a, "out"_a, "width"_a);
    nb::class_<KeepStep>(m, "KeepStep").def(nb::init<Value, int64_t>(), "x"_a, "width"_a);
    nb::class_<GateStep>(m, "GateStep")
        .def(nb::init<Value, Value, Value, int64_t, int64_t>(), "x"_a, "gate"_a, "out"_a, "width"_a,
             "group"_a);
    nb::class_<RouteStep>(m, "RouteStep")
        .def(nb::init<Value, int64_t, int64_t, int64_t>(), "logits"_a, "routing"_a, "bias"_a,
             "factors"_a);
    nb::class_<SpreadStep>(m, "SpreadStep")
        .def(nb::init<Prepared, int64_t, int64_t, int64_t, Prepared>(), "rows"_a, "format"_a, "k"_a,
             "routing"_a, "slots"_a);
    nb::class_<PrepareEachStep>(m, "PrepareEachStep")
        .def(nb::init<Value, bool, int64_t, int64_t, int64_t, std::vector<int64_t>, Prepared>(),
             "x"_a, "of_slots"_a, "format"_a, "k"_a, "routing"_a, "orders"_a, "slots"_a);
    nb::class_<CombineStep>(m, "CombineStep")
        .def(nb::init<Value, int64_t, Value, int64_t>(), "slots"_a, "routing"_a, "out"_a,
             "width"_a);

    nb::class_<RowsRegion>(m, "RowsRegion").def(nb::init<std::vector<RowStep>>(), "steps"_a);
    nb::class_<LinearPart>(m, "LinearPart")
        .def(nb::init<int64_t, Prepared, Value, int64_t>(), "matrix"_a, "activations"_a, "out"_a,
             "bias"_a);
    nb::class_<LinearRegion>(m, "LinearRegion")
        .def(
            "__init__",
            [](LinearRegion *self, std::vector<LinearPart> parts, bool accumulate) {
                new (self) LinearRegion{std::move(parts), accumulate};
            },
            "parts"_a, "accumulate"_a);
    nb::class_<AttentionRegion>(m, "AttentionRegion")
        .def(
            "__init__",
            [](AttentionRegion *self, Value q, Value out, int64_t group, int64_t layer, float scale,
               float softcap, int64_t sinks, int64_t heads) {
                new (self) AttentionRegion{q, out, {group, layer, scale, softcap, 0}, sinks, heads};
            },
            "q"_a, "out"_a, "group"_a, "layer"_a, "scale"_a, "softcap"_a, "sinks"_a, "heads"_a);
    nb::class_<ShortConvShape>(m, "ShortConvShape").def(nb::init<>());
    nb::class_<DeltaShape>(m, "DeltaShape")
        .def(nb::init<int64_t, int64_t, int64_t, int64_t, bool>(), "key_heads"_a, "value_heads"_a,
             "key_dim"_a, "value_dim"_a, "tiled"_a);
    nb::class_<MambaShape>(m, "MambaShape")
        .def(nb::init<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>(), "heads"_a,
             "head_dim"_a, "state"_a, "groups"_a, "a"_a, "d"_a);
    nb::class_<RecurrentLayer>(m, "RecurrentLayer")
        .def(nb::init<RecurrenceShape, int64_t, int64_t, Value, std::vector<Value>, int64_t,
                      int64_t>(),
             "shape"_a, "inputs"_a, "matrix"_a, "x"_a, "gates"_a, "weight"_a, "bias"_a);
    nb::class_<RecurrentRegion>(m, "RecurrentRegion")
        .def(nb::init<RecurrentLayer, Value>(), "layer"_a, "out"_a);
    nb::class_<HistoryRegion>(m, "HistoryRegion").def(nb::init<RecurrentLayer>(), "layer"_a);
    nb::class_<LogitsRegion>(m, "LogitsRegion")
        .def(nb::init<int64_t, Prepared, float>(), "matrix"_a, "activations"_a, "softcap"_a);
    nb::class_<SortRegion>(m, "SortRegion").def(nb::init<int64_t>(), "routing"_a);
    nb::class_<SlotsRegion>(m, "SlotsRegion")
        .def(nb::init<int64_t, std::vector<RowStep>>(), "routing"_a, "steps"_a);
    nb::class_<ExpertsPart>(m, "ExpertsPart")
        .def(nb::init<std::vector<int64_t>, Prepared, Value, std::vector<int64_t>>(), "matrices"_a,
             "activations"_a, "out"_a, "biases"_a);
    nb::class_<ExpertsRegion>(m, "ExpertsRegion")
        .def(
            "__init__",
            [](ExpertsRegion *self, int64_t routing, std::vector<ExpertsPart> parts) {
                new (self) ExpertsRegion{routing, std::move(parts)};
            },
            "routing"_a, "parts"_a);

    nb::class_<ThreadPool>(m, "ThreadPool", "kernels/thread_pool.h")
        .def(nb::init<int>(), "threads"_a)
        .def_prop_ro("size", &ThreadPool::size);
    nb::class_<Runtime>(m, "Runtime", "kernels/runtime.h")
        .def(
            "__init__",
            [](Runtime *self, const std::string &isa, std::shared_ptr<ThreadPool> pool,
               int64_t max_tokens, int64_t max_logits_rows, int64_t logits_slice, int64_t max_seqs,
               int64_t max_blocks_per_seq, int64_t num_blocks, int64_t vocab_size,
               const std::vector<GroupFields> &groups, int64_t block_size, int64_t block_bytes,
               int64_t num_heads, int kv_kind, const std::optional<StateFields> &state) {
                StateConfig states;
                if (state) {
                    const auto &[pages, unit_bytes, units_per_page, log_rows, parts] = *state;
                    states = {pages, unit_bytes, units_per_page, log_rows, {}};
                    for (const auto &[heads, depth, width, first_unit, tiles_per_unit] : parts)
                        states.parts.push_back({heads, depth, width, first_unit, tiles_per_unit});
                }
                std::vector<KvGroup> kinds;
                for (const auto &[layers, window, kv_heads, head_dim] : groups)
                    kinds.push_back(KvGroup{layers, window, kv_heads, head_dim});
                new (self)
                    Runtime(find_tier(isa),
                            RuntimeConfig{max_tokens, max_logits_rows, logits_slice, max_seqs,
                                          max_blocks_per_seq, num_blocks, vocab_size,
                                          std::move(kinds), block_size, block_bytes, num_heads,
                                          KvKind(kv_kind), std::move(states)},
                            std::move(pool));
            },
            nb::kw_only(), "isa"_a, "pool"_a, "max_tokens"_a, "max_logits_rows"_a, "logits_slice"_a,
            "max_seqs"_a, "max_blocks_per_seq"_a, "num_blocks"_a, "vocab_size"_a, "groups"_a,
            "block_size"_a, "block_bytes"_a, "num_heads"_a, "kv_kind"_a, "state"_a.none())
        .def_prop_ro("pool", &Runtime::pool)
        .def_prop_ro("isa", [](const Runtime &runtime) { return runtime.tier().name; })
        .def_prop_ro("block_bytes", &Runtime::block_bytes)
        .def_prop_ro("weight_bytes", &Runtime::weight_bytes)
        .def_prop_ro("arena_bytes", &Runtime::arena_bytes)
        .def("activation_bytes",
             [](const Runtime &runtime, int format, int64_t k) {
                 return runtime.tier().linear.activation_bytes(Format(format), 1, k);
             })
        .def("same_activations",
             [](const Runtime &runtime, int a, int b) {
                 return runtime.tier().linear.same_activations(Format(a), Format(b));
             })
        .def("packed_bytes",
             [](const Runtime &runtime, int format, int64_t n, int64_t k, int64_t group) {
                 return Runtime::aligned(
                     runtime.tier().linear.packed_bytes(Format(format), n, k, group));
             })
        .def("allocate_weights", &Runtime::allocate_weights)
        .def("add_matrix",
             [](Runtime &runtime, int format, int64_t n, int64_t k, int64_t group) {
                 return runtime.add_matrix(Format(format), n, k, group);
             })
        .def("pack_rows",
             [](Runtime &runtime, int64_t matrix, int64_t first, int64_t last, const Bytes &data) {
                 nb::gil_scoped_release release;
                 runtime.pack_rows(matrix, first, last,
                                   reinterpret_cast<const std::byte *>(data.data()),
                                   int64_t(data.size()));
             })
        .def("add_order", &Runtime::add_order)
        .def("add_vector", &Runtime::add_vector)
        .def("scale_vector", &Runtime::scale_vector)
        .def("add_rope", &Runtime::add_rope)
        .def("add_routing",
             [](Runtime &runtime, int64_t experts, int64_t chosen, bool sigmoid, bool renormalize,
                float normalize_eps, float scale) {
                 return runtime.add_routing(experts, chosen,
                                            Gating{sigmoid, renormalize, normalize_eps, scale});
             })
        .def("slots_row_bytes", &Runtime::slots_row_bytes)
        .def("allocate_activations", &Runtime::allocate_activations)
        .def("add_program",
             [](Runtime &runtime, std::vector<RegionFields> fields, std::vector<int32_t> ids) {
                 std::vector<Region> regions;
                 for (auto &[name, selected, work] : fields)
                     regions.push_back(Region{std::move(name), selected, std::move(work)});
                 return runtime.add_program(std::move(regions), std::move(ids));
             })
        .def("drop_program", &Runtime::drop_program)
        .def("step", &step, "token_ids"_a.noconvert(), "positions"_a.noconvert(),
             "seq_offsets"_a.noconvert(), "seq_slots"_a.noconvert(), "block_tables"_a.noconvert(),
             "logits_rows"_a.noconvert(), "copies"_a.noconvert(), "program"_a,
             "rows"_a.noconvert().none(), "state"_a.noconvert().none())
        .def("start_draft", &start_draft, "programs"_a, "rows"_a.noconvert(), "numbers"_a,
             "token_ids"_a, "most"_a, "least"_a)
        .def("finish_draft", &finish_draft)
        .def("cancel_draft", &Runtime::cancel_draft, nb::call_guard<nb::gil_scoped_release>())
        .def("hidden",
             [](Runtime &runtime) {
                 return rows_of(runtime, runtime.hidden(), runtime.kept_rows(),
                                runtime.hidden_width());
             })
        .def(
            "logits",
            [](Runtime &runtime, int64_t first) {
                {
                    nb::gil_scoped_release release;
                    runtime.compute_logits(first);
                }
                return logits(runtime);
            },
            "first"_a)
        .def("transfer", &transfer, "blocks"_a.noconvert(), "data"_a.noconvert(), "to_arena"_a)
        .def_prop_ro("num_jobs", &Runtime::num_jobs)
        .def_prop_ro("last_meeting", &Runtime::last_meeting)
        .def("set_profiling", &Runtime::set_profiling)
        .def("reset_profile", &Runtime::reset_profile)
        .def(
            "profile",
            [](Runtime &runtime, int64_t program) {
                runtime.cancel_draft(); // it would go on counting
                nb::list regions;
                for (const Region &region : runtime.program(program).regions)
                    regions.append(nb::make_tuple(region.name, region.seconds));
                return regions;
            },
            "program"_a);
}

#include "runtime.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "checks.h"
#include "formats.h"

namespace octavo {
namespace {

constexpr int64_t kFine = 64; // positions in the fine part of a rope table
// Rows that a thread takes through a stretch at once: whole panels of the linear kernels, and what
// they need stays in its own cache.
constexpr int64_t kChunkRows = 32;
static_assert(kChunkRows % kPanel == 0);
// Column blocks of an expert that a thread takes at least: with one row, the kernels do as many at
// a time.
constexpr int64_t kExpertBlocks = 4;
// Pieces a thread of the experts' work, for the balance.
constexpr int64_t kExpertPieces = 12;

const RuntimeConfig &checked(const RuntimeConfig &config) {
    check_range("max_tokens", config.max_tokens, 1, 1 << 24);
    check_range("max_logits_rows", config.max_logits_rows, 1, config.max_tokens);
    check_range("logits_slice", config.logits_slice, 1, config.max_logits_rows);
    if (config.logits_slice % kPanel != 0 && config.logits_slice != config.max_logits_rows)
        refuse("logits_slice is " + text(config.logits_slice) + ", not a multiple of " +
               text(kPanel));
    check_range("max_seqs", config.max_seqs, 1, 1 << 20);
    check_range("max_blocks_per_seq", config.max_blocks_per_seq, 1, 1 << 24);
    check_range("num_blocks", config.num_blocks, 1, INT32_MAX);
    check_range("vocab_size", config.vocab_size, 1, 1 << 24);
    check_range("block_size", config.block_size, 1, 4096);
    check_range("num_heads", config.num_heads, 1, 1024);
    check_range("kv_kind", int64_t(config.kv_kind), 0, 3);
    check_range("positions", config.max_blocks_per_seq * config.block_size, 1, 1 << 30);
    if (config.block_size % kTokenTile != 0) {
        refuse("block_size is " + text(config.block_size) + ", not a multiple of " +
               text(kTokenTile));
    }
    if (config.groups.empty())
        refuse("there is no KV group");
    for (const KvGroup &group : config.groups) {
        check_range("layers of a KV group", group.layers, 1, 1024);
        check_range("window", group.window, 0, int64_t(1) << 62);
        check_range("num_kv_heads", group.kv_heads, 1, 1024);
        check_range("head_dim", group.head_dim, 2, 1024);
        if (group.head_dim % 2 != 0)
            refuse("head_dim is " + text(group.head_dim) + ", not even");
        if (config.num_heads % group.kv_heads != 0) {
            refuse("num_heads " + text(config.num_heads) + " is not a multiple of num_kv_heads " +
                   text(group.kv_heads));
        }
        check_range("bytes of a block", config.block_bytes, config.group_bytes(group),
                    int64_t(1) << 40);
    }
    check_range("num_blocks", config.num_blocks, 1, (int64_t(1) << 46) / config.block_bytes);
    return config;
}

// How many items are taken at a time: a thread that is held up can be helped with what is left of
// its share, and taking costs nothing beside the work.
int64_t grain_for(int64_t items, int threads) {
    return std::max<int64_t>(1, items / (int64_t(threads) * 6));
}

void check_group(Format format, int64_t group) {
    const int64_t step = group_step(format);
    if (step == 0)
        check_range("group of a format without one", group, 0, 0);
    else if (group < 1 || group % step != 0)
        refuse("groups of " + text(group) + " inputs are not whole blocks of " + text(step));
}

int64_t column_blocks(int64_t n) {
    return (n + kColumns - 1) / kColumns;
}

int64_t expert_units(int64_t n) {
    return (column_blocks(n) + kExpertBlocks - 1) / kExpertBlocks;
}

} // namespace

void check_rows(Format format, const std::byte *data, int64_t n, int64_t k, int64_t group) {
    const int64_t row = row_bytes(format, k, group);
    const auto is_nan = [](std::byte code) { return (code & std::byte{0x7f}) == std::byte{0x7f}; };
    for (int64_t i = 0; i < n; ++i, data += row) {
        if (format == Format::E4M3) {
            if (std::any_of(data + row - k, data + row, is_nan))
                refuse("a number of row " + text(i) + " is NaN");
        } else if (format == Format::NVFP4) {
            for (int64_t at = format_info(format).header; at < row; at += 18)
                if (is_nan(data[at]) || is_nan(data[at + 1]))
                    refuse("a scale of row " + text(i) + " is NaN");
        } else if (format == Format::I2 || format == Format::I3 || format == Format::I4) {
            const int64_t groups = (k + group - 1) / group;
            const int64_t most = format == Format::I2 ? 4 : format == Format::I3 ? 8 : 16;
            for (int64_t g = 0; g < groups; ++g)
                check_range("zero of a group", int64_t(data[groups * 4 + g]), 0, most);
        }
    }
}

Runtime::Runtime(const Tier &tier, const RuntimeConfig &config, std::shared_ptr<ThreadPool> pool)
    : tier_(tier), config_(checked(config)), shared_pool_(std::move(pool)), pool_(*shared_pool_),
      ordered_(size_t(pool_.size())), shared_rows_(kChunkRows * pool_.size()),
      logits_(size_t(config.logits_slice * config.vocab_size) * sizeof(float)),
      arena_(size_t(config.num_blocks) * size_t(config.block_bytes)),
      attention_(tier, config_, pool_.size()), recurrence_(tier, config_, pool_.size()),
      token_seqs_(size_t(config.max_tokens)), slot_seen_(size_t(config.max_seqs)) {}

size_t Runtime::weight_bytes() const {
    size_t total = 0;
    for (const Memory &arena : weights_)
        total += arena.size();
    for (const auto &vector : vectors_)
        total += vector.size() * sizeof(float);
    return total;
}

// Building

void Runtime::allocate_weights(size_t bytes) {
    weights_.emplace_back(bytes);
    weights_used_ = 0;
}

int64_t Runtime::add_matrix(Format format, int64_t n, int64_t k, int64_t group) {
    check_range("matrix rows", n, 1, 1 << 24);
    check_range("matrix columns", k, 1, 1 << 24);
    const FormatInfo info = format_info(format);
    if (info.block_bytes == 0)
        refuse("unknown weight format " + text(int64_t(format)));
    if (k % info.block_values != 0) {
        refuse(text(k) + " columns are not whole blocks of " + text(info.block_values));
    }
    check_group(format, group);
    const size_t packed = aligned(tier_.linear.packed_bytes(format, n, k, group));
    if (weights_.empty() || packed > weights_.back().size() - weights_used_)
        refuse("packed weights exceed their arena");
    matrices_.push_back(PackedMatrix{format, n, k, group, weights_.back().data() + weights_used_});
    weights_used_ += packed;
    return int64_t(matrices_.size()) - 1;
}

void Runtime::pack_rows(int64_t matrix, int64_t first, int64_t last, const std::byte *data,
                        int64_t bytes) {
    check_range("matrix", matrix, 0, int64_t(matrices_.size()) - 1);
    const auto &[format, n, k, group, packed] = matrices_[size_t(matrix)];
    check_range("first row", first, 0, n - 1);
    check_range("last row", last, first + 1, n);
    const std::string rows = "rows " + text(first) + " to " + text(last);
    if (first % kColumns != 0 || (last % kColumns != 0 && last != n))
        refuse(rows + " are not whole blocks of " + text(kColumns));
    const int64_t needed = octavo::row_bytes(format, k, group) * (last - first);
    if (bytes != needed) {
        refuse(rows + " of " + text(k) + " numbers have " + text(bytes) + " bytes of data, not " +
               text(needed));
    }
    check_rows(format, data, last - first, k, group);
    // It lies in an arena of ours, and nothing runs meanwhile.
    std::byte *to =
        const_cast<std::byte *>(packed) + tier_.linear.packed_bytes(format, first, k, group);
    const Job job{column_blocks(last - first), 4};
    pool_.run(&job, 1, [&](int64_t, int, int64_t begin, int64_t end) {
        tier_.linear.pack(format, data, last - first, k, group, to, begin, end);
    });
}

int64_t Runtime::add_order(std::vector<int32_t> order) {
    for (const int32_t element : order)
        check_range("element of an order", element, 0, int64_t(order.size()) - 1);
    for (std::vector<float> &scratch : ordered_)
        scratch.resize(std::max(scratch.size(), order.size()));
    orders_.push_back(std::move(order));
    return int64_t(orders_.size()) - 1;
}

int64_t Runtime::add_vector(std::vector<float> values) {
    vectors_.push_back(std::move(values));
    return int64_t(vectors_.size()) - 1;
}

int64_t Runtime::scale_vector(int64_t vector, float factor) {
    check_range("vector", vector, 0, int64_t(vectors_.size()) - 1);
    std::vector<float> scaled = vectors_[size_t(vector)];
    for (float &value : scaled)
        value *= factor;
    return add_vector(std::move(scaled));
}

int64_t Runtime::add_rope(int64_t dim, bool interleaved, const std::vector<double> &frequencies,
                          double magnitude) {
    check_range("rope dim", dim, 2, 1024);
    if (dim % 2 != 0 || int64_t(frequencies.size()) * 2 != dim) {
        refuse("rope dim " + text(dim) + " with " + text(int64_t(frequencies.size())) +
               " frequencies");
    }
    RopeTable rope{dim, interleaved, {}, {}};
    const int64_t positions = config_.max_blocks_per_seq * config_.block_size;
    const auto fill = [&](std::vector<double> &table, int64_t count, int64_t step, double scale) {
        table.reserve(size_t(count * dim));
        for (int64_t i = 0; i < count; ++i) {
            for (const double frequency : frequencies) {
                table.push_back(scale * std::cos(double(i * step) * frequency));
                table.push_back(scale * std::sin(double(i * step) * frequency));
            }
        }
    };
    fill(rope.coarse, positions / kFine + 1, kFine, magnitude); // and one position ahead
    fill(rope.fine, kFine, 1, 1.0);
    ropes_.push_back(std::move(rope));
    return int64_t(ropes_.size()) - 1;
}

int64_t Runtime::add_routing(int64_t experts, int64_t chosen, const Gating &gating) {
    routings_.emplace_back(experts, chosen, gating, config_.max_tokens);
    return int64_t(routings_.size()) - 1;
}

void Runtime::allocate_activations(int64_t row_bytes, int64_t local_row_bytes) {
    cancel_draft();
    check_range("activation bytes", row_bytes, 0, int64_t(1) << 30);
    check_range("local activation bytes", local_row_bytes, 0, int64_t(1) << 30);
    if (row_bytes % 64 != 0 || local_row_bytes % 64 != 0)
        refuse("activation rows are not whole cache lines");
    if (row_bytes > row_bytes_)
        activations_ = Memory(size_t(row_bytes * config_.max_tokens));
    if (local_row_bytes > local_row_bytes_)
        local_activations_ = Memory(size_t(local_row_bytes * shared_rows_));
    row_bytes_ = std::max(row_bytes, row_bytes_);
    local_row_bytes_ = std::max(local_row_bytes, local_row_bytes_);
}

void Runtime::check_value(const Value &value, int64_t width, const char *what) const {
    const int64_t end = value.offset + value.stride * int64_t(sizeof(float));
    if (value.offset < 0 || value.offset % 64 != 0 || value.first < 0 || width < 1 ||
        value.stride < width || value.first > value.stride - width || value.stride % 16 != 0 ||
        end > (value.local ? local_row_bytes_ : row_bytes_)) {
        refuse(std::string(what) + " does not fit the activation arena");
    }
}

void Runtime::check_prepared(const Prepared &rows, Format format, int64_t k) const {
    const int64_t end = rows.offset + int64_t(tier_.linear.activation_bytes(format, 1, k));
    if (rows.offset < 0 || rows.offset % 64 != 0 ||
        end > (rows.local ? local_row_bytes_ : row_bytes_)) {
        refuse("prepared rows do not fit the activation arena");
    }
}

void Runtime::check_order(int64_t order, int64_t k) const {
    check_range("order", order, -1, int64_t(orders_.size()) - 1);
    if (order >= 0)
        check_range("elements of an order", int64_t(orders_[size_t(order)].size()), k, k);
}

void Runtime::check_matrix(int64_t index) const {
    check_range("matrix", index, 0, int64_t(matrices_.size()) - 1);
}

void Runtime::check_vector(int64_t index, int64_t size) const {
    check_range("vector", index, 0, int64_t(vectors_.size()) - 1);
    check_range("vector size", int64_t(vectors_[size_t(index)].size()), size, size);
}

const KvGroup &Runtime::checked_group(int64_t group, int64_t layer) const {
    check_range("KV group", group, 0, int64_t(config_.groups.size()) - 1);
    check_range("layer of a KV group", layer, 0, config_.groups[size_t(group)].layers - 1);
    return config_.groups[size_t(group)];
}

void Runtime::check_rope(int64_t rope, int64_t head_dim) const {
    check_range("rope", rope, 0, int64_t(ropes_.size()) - 1);
    check_range("rope dim", ropes_[size_t(rope)].dim, 2, head_dim);
}

void Runtime::check_routing(int64_t index) const {
    check_range("routing", index, 0, int64_t(routings_.size()) - 1);
}

void Runtime::check_slots(const Value &value, int64_t width, int64_t routing,
                          const char *what) const {
    check_value(value, width, what);
    const Routing &each = routings_[size_t(routing)];
    const int64_t slots = Routing::most_slots(each.experts(), each.chosen(), config_.max_tokens);
    const int64_t bytes = slots * value.stride * int64_t(sizeof(float));
    if (value.local || bytes > (row_bytes_ - value.offset) * config_.max_tokens)
        refuse(std::string(what) + " of slots does not fit the activation arena");
}

void Runtime::check_slots(const Prepared &slots, Format format, int64_t k, int64_t routing) const {
    check_prepared(slots, format, k);
    const Routing &each = routings_[size_t(routing)];
    const int64_t count = Routing::most_slots(each.experts(), each.chosen(), config_.max_tokens);
    const auto bytes = int64_t(tier_.linear.activation_bytes(format, count, k));
    if (slots.local || bytes > (row_bytes_ - slots.offset) * config_.max_tokens)
        refuse("prepared slots do not fit the activation arena");
}

void Runtime::check_function(FunctionStep &step) const {
    for (size_t i = 0; i < tier_.row.num_functions; ++i) {
        const RowFunction &function = tier_.row.functions[i];
        if (step.name == function.name && step.inputs.size() == function.inputs &&
            step.weights.size() == function.weights)
            step.function = &function;
    }
    if (step.function == nullptr || step.numbers.size() != step.function->numbers)
        refuse("function '" + step.name + "' of " + text(int64_t(step.inputs.size())) + " rows, " +
               text(int64_t(step.weights.size())) + " weights and " +
               text(int64_t(step.numbers.size())) + " numbers, which there is not");
    check_range("group of a function", step.group, 1, step.width);
    if (step.width % step.group != 0)
        refuse("groups of a function do not divide the width");
    if (!step.weights.empty()) {
        check_range("vector", step.weights[0], 0, int64_t(vectors_.size()) - 1);
        step.wide = int64_t(vectors_[size_t(step.weights[0])].size()) == step.width;
    }
    for (const int64_t weight : step.weights)
        check_vector(weight, step.function->scalar ? 1 : step.wide ? step.width : step.group);
}

void Runtime::check_slots(RowStep &step, int64_t routing) const {
    if (auto *function = std::get_if<FunctionStep>(&step)) {
        check_function(*function);
        for (const Value &input : function->inputs)
            check_slots(input, function->width, routing, "input of a function");
        check_slots(function->out, function->width, routing, "output of a function");
    } else if (const auto *prepare = std::get_if<PrepareStep>(&step)) {
        check_slots(prepare->x, prepare->k, routing, "experts' input");
        check_slots(prepare->out, Format(prepare->format), prepare->k, routing);
        check_order(prepare->order, prepare->k);
    } else if (const auto *each = std::get_if<PrepareEachStep>(&step);
               each != nullptr && each->of_slots && each->routing == routing) {
        check_slots(each->x, each->k, routing, "experts' input");
        check_each(*each);
    } else {
        refuse("slots take functions and preparations only");
    }
}

void Runtime::check_each(const PrepareEachStep &step) const {
    check_routing(step.routing);
    const int64_t experts = routings_[size_t(step.routing)].experts();
    check_range("orders of experts", int64_t(step.orders.size()), experts, experts);
    for (const int64_t order : step.orders)
        check_order(order, step.k);
    check_slots(step.slots, Format(step.format), step.k, step.routing);
}

void Runtime::check_recurrence(const RecurrentLayer &layer, bool selected) {
    recurrence_.add(layer.shape, layer.inputs, layer.matrix);
    const StatePart &inputs = config_.state.parts[size_t(layer.inputs)];
    check_value(layer.x, inputs.width, "input of a recurrent layer");
    check_range("gates of a recurrent layer", int64_t(layer.gates.size()),
                int64_t(Recurrence::gates(layer.shape)), int64_t(Recurrence::gates(layer.shape)));
    bool local = layer.x.local;
    for (const Value &gate : layer.gates) {
        check_value(gate, Recurrence::gate_width(layer.shape), "gate of a recurrent layer");
        local |= gate.local;
    }
    check_vector(layer.weight, (inputs.depth + 1) * inputs.width);
    if (layer.bias >= 0)
        check_vector(layer.bias, inputs.width);
    if (const auto *mamba = std::get_if<MambaShape>(&layer.shape)) {
        check_vector(mamba->a, mamba->heads);
        check_vector(mamba->d, mamba->heads);
    }
    if (selected || local)
        refuse("a recurrent layer of selected rows only, or of a thread's");
}

void Runtime::check_experts(ExpertsRegion &region) const {
    check_routing(region.routing);
    const int64_t experts = routings_[size_t(region.routing)].experts();
    for (const ExpertsPart &part : region.parts) {
        check_range("matrices of experts", int64_t(part.matrices.size()), experts, experts);
        for (const int64_t index : part.matrices)
            check_matrix(index);
        const PackedMatrix &first = matrices_[size_t(part.matrices[0])];
        for (const int64_t index : part.matrices) {
            const PackedMatrix &matrix = matrices_[size_t(index)];
            if (matrix.n != first.n || matrix.k != first.k ||
                !tier_.linear.same_activations(matrix.format, first.format))
                refuse("experts that differ in shape, or in what they are prepared for");
        }
        check_slots(part.out, first.n, region.routing, "experts' output");
        check_slots(part.activations, first.format, first.k, region.routing);
        if (!part.biases.empty())
            check_range("biases of experts", int64_t(part.biases.size()), experts, experts);
        for (const int64_t bias : part.biases)
            check_vector(bias, first.n);
        region.units += expert_units(first.n);
    }
}

int64_t Runtime::add_program(std::vector<Region> regions, std::vector<int32_t> ids) {
    cancel_draft();
    Program program;
    program.regions = std::move(regions);
    for (Region &region : program.regions)
        check_region(region, program);
    if (program.outputs == 0)
        refuse("a program without logits");
    if (!ids.empty()) {
        check_range("tokens that logits stand for", int64_t(ids.size()), program.outputs,
                    program.outputs);
    }
    for (const int32_t id : ids)
        check_range("token", id, 0, config_.vocab_size - 1);
    program.ids = std::move(ids);
    const size_t count = program.regions.size();
    programs_.push_back(std::move(program));
    if (program_ == nullptr)
        program_ = &programs_.front();
    jobs_.reserve(count + 1);
    spans_.reserve(count + 1);
    job_ends_.resize(std::max(job_ends_.size(), count + 1));
    chunk_seconds_.resize(std::max(chunk_seconds_.size(), count * size_t(pool_.size())));
    return int64_t(programs_.size()) - 1;
}

void Runtime::drop_program() {
    cancel_draft();
    if (programs_.size() < 2)
        refuse("there is no program to drop");
    if (program_ == &programs_.back())
        program_ = &programs_.front();
    programs_.pop_back();
}

size_t Runtime::checked_program(int64_t index) const {
    check_range("program", index, 0, int64_t(programs_.size()) - 1);
    return size_t(index);
}

// Whether a region is in order, and what it says of its program.
void Runtime::check_region(Region &region, Program &program) {
    const bool selected = region.selected;
    const auto value = [&](const Value &v, int64_t width, const char *what) {
        check_value(v, width, what);
    };
    const auto check_step = [&](auto &step) {
        using Step = std::decay_t<decltype(step)>;
        if constexpr (std::is_same_v<Step, EmbedStep>) {
            check_matrix(step.matrix);
            const PackedMatrix &matrix = matrices_[size_t(step.matrix)];
            check_range("embedding rows", matrix.n, config_.vocab_size, config_.vocab_size);
            value(step.out, matrix.k, "embedding");
            program.embeds = true;
        } else if constexpr (std::is_same_v<Step, InputStep>) {
            value(step.out, step.width, "input");
            if (selected || (program.input_width > 0 && program.input_width != step.width))
                refuse("an input of selected rows only, or of several widths");
            program.input_width = step.width;
        } else if constexpr (std::is_same_v<Step, FunctionStep>) {
            check_function(step);
            for (const Value &input : step.inputs)
                value(input, step.width, "input of a function");
            value(step.out, step.width, "output of a function");
        } else if constexpr (std::is_same_v<Step, PrepareStep>) {
            value(step.x, step.k, "linear input");
            check_prepared(step.out, Format(step.format), step.k);
            check_order(step.order, step.k);
        } else if constexpr (std::is_same_v<Step, AngleStep>) {
            check_range("rope", step.rope, 0, int64_t(ropes_.size()) - 1);
            check_range("positions ahead", step.ahead, 0, 1);
            value(step.out, 2 * ropes_[size_t(step.rope)].dim, "angles");
            program.cached = true;
        } else if constexpr (std::is_same_v<Step, RopeStoreStep>) {
            const KvGroup &group = checked_group(step.group, step.layer);
            check_rope(step.rope, group.head_dim);
            value(step.q, config_.num_heads * group.head_dim, "q");
            value(step.k, group.kv_heads * group.head_dim, "k");
            value(step.v, group.kv_heads * group.head_dim, "v");
            value(step.angles, 2 * ropes_[size_t(step.rope)].dim, "angles");
            program.cached = true;
            if (selected)
                refuse("keys of selected rows only");
        } else if constexpr (std::is_same_v<Step, RotateStep>) {
            check_range("head_dim", step.head_dim, 2, 1024);
            check_range("num_heads", step.heads, 1, 1024);
            check_rope(step.rope, step.head_dim);
            value(step.q, step.heads * step.head_dim, "q");
            value(step.angles, 2 * ropes_[size_t(step.rope)].dim, "angles");
            if (selected)
                refuse("queries of selected rows only");
        } else if constexpr (std::is_same_v<Step, ScaleByPositionStep>) {
            check_range("original context", step.original, 1, std::numeric_limits<int32_t>::max());
            value(step.x, step.width, "input scaled by position");
            value(step.out, step.width, "output scaled by position");
            if (selected)
                refuse("scaling of selected rows only");
        } else if constexpr (std::is_same_v<Step, ConcatStep>) {
            value(step.x, step.width, "first half");
            value(step.y, step.width, "second half");
            value(step.out, 2 * step.width, "halves together");
        } else if constexpr (std::is_same_v<Step, KeepStep>) {
            value(step.x, step.width, "kept rows");
            const int64_t rows = selected ? config_.max_logits_rows : config_.max_tokens;
            if (hidden_width_ == 0) {
                hidden_ = Memory(size_t(rows * step.width) * sizeof(float));
                hidden_width_ = step.width;
                hidden_rows_ = rows;
            }
            if (hidden_width_ != step.width || hidden_rows_ < rows)
                refuse("keeping wider or more rows than the first program that keeps any");
            program.keeps = true;
            program.keeps_all = !selected;
        } else if constexpr (std::is_same_v<Step, GateStep>) {
            check_range("group of a gate", step.group, 1, step.width);
            if (step.width % step.group != 0)
                refuse("groups of a gate do not divide the width");
            value(step.x, step.width, "gated input");
            value(step.gate, step.width / step.group, "gate");
            value(step.out, step.width, "gated output");
        } else if constexpr (std::is_same_v<Step, RouteStep>) {
            check_routing(step.routing);
            const int64_t experts = routings_[size_t(step.routing)].experts();
            value(step.logits, experts, "router's logits");
            for (const int64_t vector : {step.bias, step.factors})
                if (vector >= 0)
                    check_vector(vector, experts);
        } else if constexpr (std::is_same_v<Step, SpreadStep>) {
            check_routing(step.routing);
            check_prepared(step.rows, Format(step.format), step.k);
            check_slots(step.slots, Format(step.format), step.k, step.routing);
        } else if constexpr (std::is_same_v<Step, PrepareEachStep>) {
            value(step.x, step.k, "experts' input");
            check_each(step);
            if (step.of_slots)
                refuse("slots among rows");
        } else if constexpr (std::is_same_v<Step, CombineStep>) {
            check_routing(step.routing);
            check_slots(step.slots, step.width, step.routing, "experts' output");
            value(step.out, step.width, "combined output");
        } else {
            static_assert(std::is_same_v<Step, GatherStep>);
            value(step.x, step.width, "gathered input");
            value(step.out, step.width, "gathered output");
            if (!selected || step.x.local)
                refuse("gathering for all rows, or from a thread's");
        }
    };
    if (auto *rows = std::get_if<RowsRegion>(&region.work)) {
        for (RowStep &step : rows->steps)
            std::visit(check_step, step);
    } else if (auto *linear = std::get_if<LinearRegion>(&region.work)) {
        for (const LinearPart &part : linear->parts) {
            check_matrix(part.matrix);
            const PackedMatrix &matrix = matrices_[size_t(part.matrix)];
            value(part.out, matrix.n, "linear output");
            check_prepared(part.activations, matrix.format, matrix.k);
            if (part.bias >= 0)
                check_vector(part.bias, matrix.n);
            linear->blocks += column_blocks(matrix.n);
        }
    } else if (auto *attention = std::get_if<AttentionRegion>(&region.work)) {
        PagedAttention::Layer &layer = attention->layer;
        const KvGroup &group = checked_group(layer.group, layer.index);
        check_range("num_heads", attention->heads, 1, 1024);
        if (attention->heads % group.kv_heads != 0)
            refuse("num_heads is not a multiple of num_kv_heads");
        const int64_t width = attention->heads * group.head_dim;
        value(attention->q, width, "q");
        value(attention->out, width, "attention output");
        if (attention->sinks >= 0)
            check_vector(attention->sinks, attention->heads);
        layer.plan = attention_.plan_of(layer.group, attention->heads);
        program.cached = true;
        if (selected || attention->q.local || attention->out.local)
            refuse("attention of selected rows only, or of a thread's");
    } else if (const auto *recurrent = std::get_if<RecurrentRegion>(&region.work)) {
        check_recurrence(recurrent->layer, selected);
        const StatePart &inputs = config_.state.parts[size_t(recurrent->layer.inputs)];
        value(recurrent->out, Recurrence::out_width(recurrent->layer.shape, inputs),
              "output of a recurrent layer");
        if (recurrent->out.local)
            refuse("a recurrent layer's output of a thread's");
        program.cached = program.recurrent = true;
    } else if (const auto *history = std::get_if<HistoryRegion>(&region.work)) {
        check_recurrence(history->layer, selected);
        program.cached = program.recurrent = true;
    } else if (const auto *logits = std::get_if<LogitsRegion>(&region.work)) {
        check_matrix(logits->matrix);
        const PackedMatrix &matrix = matrices_[size_t(logits->matrix)];
        check_range("logits matrix rows", matrix.n, 1, config_.vocab_size);
        if (program.outputs > 0)
            refuse("logits twice");
        program.outputs = matrix.n;
        check_prepared(logits->activations, matrix.format, matrix.k);
        if (!selected || logits->activations.local)
            refuse("logits of all rows, or of a thread's");
    } else if (const auto *sort = std::get_if<SortRegion>(&region.work)) {
        check_routing(sort->routing);
    } else if (auto *slots = std::get_if<SlotsRegion>(&region.work)) {
        check_routing(slots->routing);
        for (RowStep &step : slots->steps)
            check_slots(step, slots->routing);
    } else if (auto *experts = std::get_if<ExpertsRegion>(&region.work)) {
        check_experts(*experts);
    }
}

void Runtime::reset_profile() {
    cancel_draft();
    for (Program &program : programs_)
        for (Region &region : program.regions)
            region.seconds = 0.0;
}

// A step

void Runtime::validate(const StepBatch &batch, const Program &program) const {
    check_range("number of tokens", batch.tokens, 0, config_.max_tokens);
    check_range("number of logits rows", batch.logits, 0, config_.max_logits_rows);
    for (int64_t t = 0; program.embeds && t < batch.tokens; ++t) {
        if (batch.token_ids[t] < 0 || batch.token_ids[t] >= config_.vocab_size) {
            refuse("token " + text(t) + " has id " + text(batch.token_ids[t]) +
                   ", outside a vocabulary of " + text(config_.vocab_size));
        }
    }
    for (int64_t i = 0; i < batch.logits; ++i) {
        const int64_t low = i == 0 ? 0 : batch.logits_rows[i - 1] + int64_t(1);
        if (batch.logits_rows[i] < low || batch.logits_rows[i] >= batch.tokens) {
            refuse("logits_rows[" + text(i) + "] is " + text(batch.logits_rows[i]) + ", outside " +
                   text(low) + " to " + text(batch.tokens - 1));
        }
    }
    for (int64_t i = 0; i < 2 * batch.num_copies; ++i) {
        check_range("copied block", batch.copies[i], 0, config_.num_blocks - 1);
    }
    if (program.cached)
        validate_sequences(batch);
    if (program.recurrent)
        recurrence_.validate(batch);
}

void Runtime::validate_sequences(const StepBatch &batch) const {
    check_range("number of sequences", batch.seqs, 0, config_.max_seqs);
    const int64_t positions = config_.max_blocks_per_seq * config_.block_size;
    if (batch.seq_offsets[0] != 0 || batch.seq_offsets[batch.seqs] != batch.tokens) {
        refuse("seq_offsets run from " + text(batch.seq_offsets[0]) + " to " +
               text(batch.seq_offsets[batch.seqs]) + ", not over " + text(batch.tokens) +
               " tokens");
    }
    for (int64_t s = 0; s < batch.seqs; ++s) {
        check_range("sequence slot", batch.seq_slots[s], 0, config_.max_seqs - 1);
        const int64_t begin = batch.seq_offsets[s];
        const int64_t end = batch.seq_offsets[s + 1];
        if (begin < 0 || end <= begin || end > batch.tokens) {
            refuse("sequence " + text(s) + " has tokens " + text(begin) + " to " + text(end));
        }
        const int64_t first = batch.positions[begin];
        const int64_t last = first + end - begin - 1;
        if (first < 0 || last >= positions) {
            refuse("sequence " + text(s) + " has positions " + text(first) + " to " + text(last) +
                   ", outside 0 to " + text(positions - 1));
        }
        for (int64_t t = begin; t < end; ++t) {
            if (batch.positions[t] != first + t - begin) {
                refuse("positions of sequence " + text(s) + " are not consecutive");
            }
        }
        for (size_t g = 0; g < config_.groups.size(); ++g) {
            const int64_t window = config_.groups[g].window;
            const int64_t low = window > 0 ? std::max<int64_t>(0, first - window + 1) : 0;
            const int32_t *blocks =
                batch.block_tables +
                (int64_t(g) * config_.max_seqs + batch.seq_slots[s]) * config_.max_blocks_per_seq;
            for (int64_t i = low / config_.block_size; i <= last / config_.block_size; ++i) {
                if (blocks[i] < 0 || blocks[i] >= config_.num_blocks) {
                    refuse("block " + text(i) + " of sequence " + text(s) + " in group " +
                           text(int64_t(g)) + " is " + text(blocks[i]) + ", outside 0 to " +
                           text(config_.num_blocks - 1));
                }
            }
        }
    }
    int64_t twice = -1;
    for (int64_t s = 0; s < batch.seqs; ++s) {
        uint8_t &seen = slot_seen_[size_t(batch.seq_slots[s])];
        if (seen)
            twice = batch.seq_slots[s];
        seen = 1;
    }
    for (int64_t s = 0; s < batch.seqs; ++s)
        slot_seen_[size_t(batch.seq_slots[s])] = 0;
    if (twice >= 0)
        refuse("slot " + text(twice) + " is in the batch twice");
}

void Runtime::step(const StepBatch &batch, int64_t program) {
    cancel_draft();
    pool_.expect(std::exchange(drafted_, false));
    run_step(batch, program);
}

void Runtime::run_step(const StepBatch &batch, int64_t program) {
    Program &running = programs_[checked_program(program)];
    validate(batch, running);
    program_ = &running;
    batch_ = batch;
    first_logits_ = 0;
    if (running.cached) {
        for (int64_t s = 0; s < batch_.seqs; ++s) {
            std::fill(token_seqs_.begin() + batch_.seq_offsets[s],
                      token_seqs_.begin() + batch_.seq_offsets[s + 1], int32_t(s));
        }
        attention_.plan(batch_);
    }
    if (running.recurrent)
        recurrence_.plan(batch_);
    plan_jobs();
    const ThreadPool::Time start =
        profiling_ ? std::chrono::steady_clock::now() : ThreadPool::Time{};
    const auto work = [this](int64_t job, int thread, int64_t begin, int64_t end) {
        const Span &span = spans_[size_t(job)];
        if (span.first == span.last)
            return copy_blocks(begin, end);
        if (!span.chunked)
            return run_items(span.first, thread, begin, end);
        const int64_t rows = row_count(program_->regions[span.first].selected);
        std::byte *local = local_activations_.data() + thread * kChunkRows * local_row_bytes_;
        for (int64_t row = begin * kPanel; row < end * kPanel; row += kChunkRows) {
            const int64_t last = std::min({rows, end * kPanel, row + kChunkRows});
            run_chunk(span, thread,
                      Scope{row, last, local, kChunkRows, ordered_[size_t(thread)].data()});
        }
    };
    pool_.run(jobs_.data(), int64_t(jobs_.size()), work, profiling_ ? job_ends_.data() : nullptr);
    if (profiling_)
        account(start);
}

void Runtime::compute_logits(int64_t first) {
    cancel_draft();
    slice_logits(first);
}

void Runtime::slice_logits(int64_t first) {
    check_range("row of logits", first, 0, batch_.logits - 1);
    if (first % kPanel != 0)
        refuse("row of logits " + text(first) + " is not the first of a panel of " + text(kPanel));
    first_logits_ = first;
    for (Region &region : program_->regions) {
        const auto *logits = std::get_if<LogitsRegion>(&region.work);
        if (logits == nullptr)
            continue;
        const ThreadPool::Time start =
            profiling_ ? std::chrono::steady_clock::now() : ThreadPool::Time{};
        const Job job = job_of(*logits, logits_rows());
        const auto work = [&](int64_t, int, int64_t begin, int64_t end) {
            run(*logits, begin, end);
        };
        ThreadPool::Time end;
        pool_.run(&job, 1, work, profiling_ ? &end : nullptr);
        if (profiling_)
            region.seconds += std::chrono::duration<double>(end - start).count();
    }
}

// Drafts

void Runtime::validate(const std::vector<int64_t> &programs, const DraftBatch &batch) const {
    if (programs.empty())
        refuse("no program to draft with");
    for (const int64_t index : programs) {
        const Program &program = programs_[checked_program(index)];
        if (program.cached || program.input_width == 0 ||
            program.input_width != programs_[size_t(programs[0])].input_width ||
            (program.keeps && hidden_width_ != program.input_width))
            refuse("drafting with a program of other rows, or of sequences");
        if (program.ids.empty())
            refuse("drafting with a program whose logits stand for no tokens");
    }
    for (int64_t i = 0; i < batch.sequences; ++i)
        check_range("token", batch.tokens[i], 0, config_.vocab_size - 1);
}

int64_t Runtime::draft_depth(const std::vector<int32_t> &most) const {
    check_range("sequences to draft for", int64_t(most.size()), 0,
                std::min(config_.max_tokens, config_.max_logits_rows));
    const int64_t longest = config_.max_blocks_per_seq * config_.block_size;
    int64_t depth = 0;
    for (const int32_t count : most) {
        check_range("tokens to draft", count, 0, longest);
        depth = std::max(depth, int64_t(count));
    }
    return depth;
}

void Runtime::start_draft(DraftAhead ahead) {
    cancel_draft();
    ahead.depth = draft_depth(ahead.most);
    ahead.drafted.assign(ahead.tokens.size() * size_t(ahead.depth), -1);
    ahead.chances.resize(ahead.drafted.size());
    validate(ahead.programs, ahead.batch());
    ahead_ = std::move(ahead);
    drafting_ = drafted_ = true;
    const auto task = [](void *context) {
        auto &runtime = *static_cast<Runtime *>(context);
        try {
            runtime.draft_rows(runtime.ahead_.programs, runtime.ahead_.batch());
        } catch (...) {
            runtime.ahead_.failure = std::current_exception();
        }
    };
    pool_.start(task, this);
}

const DraftAhead *Runtime::finish_draft() {
    if (!drafting_)
        return nullptr;
    drafting_ = false;
    pool_.finish();
    if (ahead_.failure)
        std::rethrow_exception(ahead_.failure);
    return &ahead_;
}

void Runtime::cancel_draft() {
    if (drafting_)
        pool_.cancel(this);
    drafting_ = false;
}

void Runtime::draft_rows(const std::vector<int64_t> &programs, const DraftBatch &batch) {
    std::fill_n(batch.drafted, batch.sequences * batch.depth, -1);
    std::fill_n(batch.chances, batch.sequences * batch.depth, 0.0f);
    const int64_t width = programs_[size_t(programs[0])].input_width;
    const size_t row_bytes = size_t(width) * sizeof(float);
    std::vector<int64_t> going; // sequences
    std::vector<int32_t> tokens, wanted;
    std::vector<float> rows, products;
    for (int64_t i = 0; i < batch.sequences; ++i) {
        if (batch.most[i] == 0)
            continue;
        wanted.push_back(int32_t(going.size()));
        going.push_back(i);
        tokens.push_back(batch.tokens[i]);
        products.push_back(1.0f);
        rows.insert(rows.end(), batch.rows + i * width, batch.rows + (i + 1) * width);
    }
    for (int64_t at = 0; at < batch.depth && !going.empty(); ++at) {
        const int64_t program = programs[size_t(std::min(at, int64_t(programs.size()) - 1))];
        StepBatch one{};
        one.token_ids = tokens.data();
        one.rows = rows.data();
        one.tokens = one.logits = int64_t(going.size());
        one.logits_rows = wanted.data();
        run_step(one, program);
        const float *kept = program_->keeps ? hidden() : nullptr;
        size_t left = 0; // that go on, moved to the front
        for (int64_t first = 0; first < one.tokens; first += config_.logits_slice) {
            if (first > 0)
                slice_logits(first);
            const int64_t count = logits_rows();
            for (int64_t r = 0; r < count; ++r) {
                const auto from = size_t(first + r);
                const auto [best, chance] = likeliest(logits() + r * outputs(), outputs());
                if (best < 0)
                    continue;
                const int64_t sequence = going[from];
                const int64_t place = sequence * batch.depth + at;
                batch.drafted[place] = program_->ids[size_t(best)];
                batch.chances[place] = chance;
                const float product = products[from] * chance;
                if (at + 1 == batch.most[sequence] || product <= batch.least)
                    continue;
                if (kept != nullptr)
                    std::memcpy(rows.data() + left * size_t(width), kept + from * size_t(width),
                                row_bytes);
                else if (left != from)
                    std::memcpy(rows.data() + left * size_t(width),
                                rows.data() + from * size_t(width), row_bytes);
                going[left] = sequence;
                tokens[left] = batch.drafted[place];
                products[left] = product;
                ++left;
            }
        }
        going.resize(left);
        tokens.resize(left);
        products.resize(left);
        wanted.resize(left);
    }
}

// The place of the greatest logit, of equals the first, and its probability; none (-1) where one is
// no number.
std::pair<int64_t, float> Runtime::likeliest(const float *logits, int64_t count) {
    const int64_t blocks = (count + kScanBlock - 1) / kScanBlock;
    scan_.resize(size_t(blocks));
    if (!tier_.scan.maxima(logits, count, scan_.data()))
        return {-1, 0.0f};
    const int64_t block = std::max_element(scan_.begin(), scan_.end()) - scan_.begin();
    const float greatest = scan_[size_t(block)];
    int64_t best = block * kScanBlock;
    while (logits[best] != greatest)
        ++best;
    tier_.scan.exponentials(logits, count, greatest, 1.0f, -std::numeric_limits<float>::infinity(),
                            nullptr, scan_.data());
    return {best, 1.0f / std::accumulate(scan_.begin(), scan_.end(), 0.0f)};
}

// Adds the times of the jobs to their regions'. Regions done without meeting share their job's time
// in proportion to what they took on all threads together.
void Runtime::account(ThreadPool::Time before) {
    std::vector<Region> &regions = program_->regions;
    const auto of_all_threads = [&](size_t index) {
        double seconds = 0.0;
        for (int thread = 0; thread < pool_.size(); ++thread)
            seconds += chunk_seconds_[size_t(thread) * regions.size() + index];
        return seconds;
    };
    for (size_t job = 0; job < jobs_.size(); ++job) {
        const double seconds = std::chrono::duration<double>(job_ends_[job] - before).count();
        before = job_ends_[job];
        const Span &span = spans_[job];
        double total = 0.0;
        for (size_t i = span.first; i < span.last; ++i)
            total += of_all_threads(i);
        for (size_t i = span.first; i < span.last; ++i)
            regions[i].seconds += span.chunked ? seconds * of_all_threads(i) / total : seconds;
    }
    std::fill(chunk_seconds_.begin(), chunk_seconds_.end(), 0.0);
}

bool Runtime::is_row_wise(size_t region) const {
    const auto &work = program_->regions[region].work;
    return std::holds_alternative<RowsRegion>(work) || std::holds_alternative<LinearRegion>(work);
}

Job Runtime::job_of(size_t index, int64_t rows) const {
    return std::visit([&](const auto &each) { return job_of(each, rows); },
                      program_->regions[index].work);
}

void Runtime::plan_jobs() {
    const std::vector<Region> &regions = program_->regions;
    jobs_.clear();
    spans_.clear();
    if (batch_.num_copies > 0) {
        const int64_t bytes = config_.block_bytes;
        jobs_.push_back(Job{bytes, std::max<int64_t>(64, bytes / 32 / 64 * 64)});
        spans_.push_back(Span{0, 0, false});
    }
    for (size_t i = 0; i < regions.size();) {
        const bool selected = regions[i].selected;
        const int64_t rows = row_count(selected);
        Span span{i, i + 1, rows > shared_rows_ && is_row_wise(i)};
        Job job{(rows + kPanel - 1) / kPanel, kChunkRows / kPanel};
        if (span.chunked) {
            while (span.last < regions.size() && regions[span.last].selected == selected &&
                   is_row_wise(span.last))
                ++span.last;
        } else if (rows > 0) {
            job = job_of(i, rows);
        }
        i = span.last;
        if (job.items == 0)
            continue;
        jobs_.push_back(job);
        spans_.push_back(span);
    }
}

// All threads share a region.
void Runtime::run_items(size_t index, int thread, int64_t begin, int64_t end) {
    const Region &region = program_->regions[index];
    const Scope scope{0, row_count(region.selected), local_activations_.data(), shared_rows_,
                      ordered_[size_t(thread)].data()};
    if (const auto *rows = std::get_if<RowsRegion>(&region.work)) {
        run(*rows, scope, begin, end);
    } else if (const auto *linear = std::get_if<LinearRegion>(&region.work)) {
        run(*linear, scope, begin, end);
    } else if (const auto *attention = std::get_if<AttentionRegion>(&region.work)) {
        run(*attention, thread, begin, end);
    } else if (const auto *recurrent = std::get_if<RecurrentRegion>(&region.work)) {
        recurrence_.run(layer_of(recurrent->layer), row_of(recurrent->out, 0),
                        recurrent->out.stride, arena_.data(), thread, begin, end);
    } else if (const auto *history = std::get_if<HistoryRegion>(&region.work)) {
        recurrence_.store_history(layer_of(history->layer), arena_.data(), begin, end);
    } else if (const auto *sort = std::get_if<SortRegion>(&region.work)) {
        routings_[size_t(sort->routing)].sort(scope.end);
    } else if (const auto *slots = std::get_if<SlotsRegion>(&region.work)) {
        run(*slots, thread, begin, end);
    } else if (const auto *experts = std::get_if<ExpertsRegion>(&region.work)) {
        run(*experts, begin, end);
    } else {
        run(std::get<LogitsRegion>(region.work), begin, end);
    }
}

// One thread does regions one after the other for some rows.
void Runtime::run_chunk(const Span &span, int thread, const Scope &scope) {
    ThreadPool::Time before;
    if (profiling_)
        before = std::chrono::steady_clock::now();
    for (size_t i = span.first; i < span.last; ++i) {
        const Region &region = program_->regions[i];
        if (const auto *rows = std::get_if<RowsRegion>(&region.work)) {
            run(*rows, scope, scope.begin, scope.end);
        } else {
            const auto &linear = std::get<LinearRegion>(region.work);
            run(linear, scope, 0, linear.blocks);
        }
        if (!profiling_)
            continue;
        const ThreadPool::Time now = std::chrono::steady_clock::now();
        chunk_seconds_[size_t(thread) * program_->regions.size() + i] +=
            std::chrono::duration<double>(now - before).count();
        before = now;
    }
}

// Bytes [begin, end) of every copied block, in order, so that chains of copies come out as if made
// one after the other.
void Runtime::copy_blocks(int64_t begin, int64_t end) {
    for (int64_t i = 0; i < batch_.num_copies; ++i) {
        const int32_t *pair = batch_.copies + 2 * i;
        std::memmove(block(pair[1]) + begin, block(pair[0]) + begin, size_t(end - begin));
    }
}

// Row by row

Job Runtime::job_of(const RowsRegion &, int64_t rows) const {
    return Job{rows, grain_for(rows, pool_.size())};
}

void Runtime::run(const RowsRegion &region, const Scope &scope, int64_t begin, int64_t end) {
    // Row by row, but keys and values of all rows together: they lie in the cache by tiles.
    for (size_t first = 0, i = 0; i < region.steps.size(); ++i) {
        const auto *keys = std::get_if<RopeStoreStep>(&region.steps[i]);
        if (keys == nullptr && i + 1 < region.steps.size())
            continue;
        for (int64_t row = begin; row < end; ++row) {
            for (size_t s = first; s <= i; ++s)
                std::visit([&](const auto &each) { run(each, row, scope); }, region.steps[s]);
        }
        if (keys != nullptr)
            store(*keys, scope, begin, end);
        first = i + 1;
    }
}

void Runtime::run(const EmbedStep &step, int64_t row, const Scope &scope) {
    const PackedMatrix &matrix = matrices_[size_t(step.matrix)];
    float *out = row_of(step.out, row, scope);
    tier_.linear.dequantize_row(matrix, batch_.token_ids[row], out);
    if (step.scale != 1.0f)
        tier_.row.scale(out, step.scale, matrix.k);
}

void Runtime::run(const InputStep &step, int64_t row, const Scope &scope) {
    std::memcpy(row_of(step.out, row, scope), batch_.rows + row * step.width,
                size_t(step.width) * sizeof(float));
}

void Runtime::run(const FunctionStep &step, int64_t row, const Scope &scope) {
    const float *inputs[RowArguments::kInputs];
    for (size_t i = 0; i < step.inputs.size(); ++i)
        inputs[i] = row_of(step.inputs[i], row, scope);
    float *out = row_of(step.out, row, scope);
    RowArguments arguments{};
    arguments.numbers = step.numbers.data();
    arguments.n = step.group;
    for (size_t i = 0; i < step.weights.size(); ++i)
        arguments.weights[i] = vectors_[size_t(step.weights[i])].data();
    for (int64_t at = 0; at < step.width; at += step.group) {
        for (size_t i = 0; i < step.inputs.size(); ++i)
            arguments.inputs[i] = inputs[i] + at;
        for (size_t i = 0; step.wide && i < step.weights.size(); ++i)
            arguments.weights[i] = vectors_[size_t(step.weights[i])].data() + at;
        arguments.out = out + at;
        step.function->run(arguments);
    }
}

void Runtime::run(const PrepareStep &step, int64_t row, const Scope &scope) {
    const auto format = Format(step.format);
    const size_t bytes = tier_.linear.activation_bytes(format, 1, step.k);
    const float *x = in_order(row_of(step.x, row, scope), step.order, scope);
    tier_.linear.prepare(format, x, 0, scope.end - scope.begin, step.k,
                         row_of(step.out, scope.begin, bytes, scope), row - scope.begin,
                         row - scope.begin + 1);
}

const float *Runtime::in_order(const float *row, int64_t order, const Scope &scope) const {
    if (order < 0)
        return row;
    const std::vector<int32_t> &elements = orders_[size_t(order)];
    for (size_t i = 0; i < elements.size(); ++i)
        scope.ordered[i] = row[elements[i]];
    return scope.ordered;
}

void Runtime::run(const AngleStep &step, int64_t row, const Scope &scope) {
    const RopeTable &rope = ropes_[size_t(step.rope)];
    const int64_t position = batch_.positions[row] + step.ahead;
    const double *coarse = rope.coarse.data() + position / kFine * rope.dim;
    const double *fine = rope.fine.data() + position % kFine * rope.dim;
    float *cosines = row_of(step.out, row, scope);
    float *sines = cosines + rope.dim;
    for (int64_t i = 0; i < rope.dim / 2; ++i) {
        const double c = coarse[2 * i] * fine[2 * i] - coarse[2 * i + 1] * fine[2 * i + 1];
        const double s = coarse[2 * i + 1] * fine[2 * i] + coarse[2 * i] * fine[2 * i + 1];
        if (rope.interleaved) {
            cosines[2 * i] = cosines[2 * i + 1] = float(c);
            sines[2 * i] = float(-s);
            sines[2 * i + 1] = float(s);
        } else {
            cosines[i] = float(c);
            sines[i] = float(s);
        }
    }
}

void Runtime::run(const RopeStoreStep &step, int64_t row, const Scope &scope) {
    const RopeTable &rope = ropes_[size_t(step.rope)];
    const KvGroup &group = config_.groups[size_t(step.group)];
    const float *angles = row_of(step.angles, row, scope);
    rotate(rope, angles, row_of(step.q, row, scope), config_.num_heads, group.head_dim);
    rotate(rope, angles, row_of(step.k, row, scope), group.kv_heads, group.head_dim);
}

void Runtime::run(const RotateStep &step, int64_t row, const Scope &scope) {
    rotate(ropes_[size_t(step.rope)], row_of(step.angles, row, scope), row_of(step.q, row, scope),
           step.heads, step.head_dim);
}

// Every head of a row, by its token's cosines and sines.
void Runtime::rotate(const RopeTable &rope, const float *angles, float *x, int64_t heads,
                     int64_t head_dim) const {
    const auto rotate = rope.interleaved ? tier_.row.rope_pairs : tier_.row.rope_halves;
    for (int64_t h = 0; h < heads; ++h)
        rotate(x + h * head_dim, angles, angles + rope.dim, rope.dim);
}

void Runtime::store(const RopeStoreStep &step, const Scope &scope, int64_t begin, int64_t end) {
    const KvGroup &group = config_.groups[size_t(step.group)];
    const int64_t used = config_.group_bytes(group);
    for (int64_t row = begin; row < end;) {
        const int32_t seq = token_seqs_[size_t(row)];
        const int64_t position = batch_.positions[row];
        const int64_t rows = std::min(
            {end - row, batch_.seq_offsets[seq + 1] - row, kTokenTile - position % kTokenTile});
        const int32_t index = table(step.group, seq)[position / config_.block_size];
        const int64_t slot = position % config_.block_size;
        attention_.store({step.group, step.layer, 0.0f, 0.0f, step.group}, slot, rows,
                         row_of(step.k, row, scope), step.k.stride, row_of(step.v, row, scope),
                         step.v.stride, block(index));
        // What the group leaves over of the block may hold what another has had there.
        if (slot == 0 && step.layer + 1 == group.layers)
            std::memset(block(index) + used, 0, size_t(config_.block_bytes - used));
        row += rows;
    }
}

void Runtime::run(const ScaleByPositionStep &step, int64_t row, const Scope &scope) {
    const double times = double(batch_.positions[row] / step.original);
    const float *x = row_of(step.x, row, scope);
    float *out = row_of(step.out, row, scope);
    if (out != x)
        std::memcpy(out, x, size_t(step.width) * sizeof(float));
    tier_.row.scale(out, float(1.0 + step.beta * std::log1p(times)), step.width);
}

void Runtime::run(const GatherStep &step, int64_t row, const Scope &scope) {
    std::memcpy(row_of(step.out, row, scope), row_of(step.x, batch_.logits_rows[row]),
                size_t(step.width) * sizeof(float));
}

void Runtime::run(const GateStep &step, int64_t row, const Scope &scope) {
    const float *x = row_of(step.x, row, scope), *gate = row_of(step.gate, row, scope);
    float *out = row_of(step.out, row, scope);
    for (int64_t i = 0; i < step.width / step.group; ++i) {
        const float share = sigmoid(gate[i]); // before the output, which may be the gate
        std::memmove(out + i * step.group, x + i * step.group, size_t(step.group) * sizeof(float));
        tier_.row.scale(out + i * step.group, share, step.group);
    }
}

void Runtime::run(const ConcatStep &step, int64_t row, const Scope &scope) {
    const size_t bytes = size_t(step.width) * sizeof(float);
    float *out = row_of(step.out, row, scope);
    std::memcpy(out, row_of(step.x, row, scope), bytes);
    std::memcpy(out + step.width, row_of(step.y, row, scope), bytes);
}

void Runtime::run(const KeepStep &step, int64_t row, const Scope &scope) {
    std::memcpy(hidden() + row * step.width, row_of(step.x, row, scope),
                size_t(step.width) * sizeof(float));
}

// Linear layers

Job Runtime::job_of(const LinearRegion &region, int64_t) const {
    return Job{region.blocks, grain_for(region.blocks, pool_.size())};
}

// Column blocks [begin, end) of all parts together.
void Runtime::run(const LinearRegion &region, const Scope &scope, int64_t begin, int64_t end) {
    const int64_t rows = scope.end - scope.begin;
    int64_t base = 0;
    for (const LinearPart &part : region.parts) {
        const PackedMatrix &matrix = matrices_[size_t(part.matrix)];
        const int64_t count = column_blocks(matrix.n);
        const int64_t low = std::max(begin - base, int64_t(0));
        const int64_t high = std::min(end - base, count);
        base += count;
        if (low >= high)
            continue;
        float *out = row_of(part.out, scope.begin, scope);
        tier_.linear.matmul(matrix, row_of(part.activations, scope.begin, row_bytes(matrix), scope),
                            rows, 0, rows, low, high, out, part.out.stride, region.accumulate);
        if (part.bias < 0)
            continue;
        const float *bias = vectors_[size_t(part.bias)].data() + low * kColumns;
        const int64_t width = std::min(matrix.n, high * kColumns) - low * kColumns;
        for (int64_t row = 0; row < rows; ++row) {
            float *to = out + row * part.out.stride + low * kColumns;
            tier_.row.add(to, bias, to, width);
        }
    }
}

Job Runtime::job_of(const LogitsRegion &region, int64_t) const {
    const int64_t blocks = column_blocks(matrices_[size_t(region.matrix)].n);
    return Job{blocks, grain_for(blocks, pool_.size())};
}

void Runtime::run(const LogitsRegion &region, int64_t begin, int64_t end) {
    const PackedMatrix &matrix = matrices_[size_t(region.matrix)];
    const int64_t rows = logits_rows();
    const std::byte *activations = activations_.data() +
                                   region.activations.offset * config_.max_tokens +
                                   first_logits_ * int64_t(row_bytes(matrix));
    tier_.linear.matmul(matrix, activations, rows, 0, rows, begin, end, logits(), matrix.n, false);
    if (region.softcap == 0.0f)
        return;
    const int64_t width = std::min(matrix.n, end * kColumns) - begin * kColumns;
    for (int64_t row = 0; row < rows; ++row) {
        tier_.row.softcap(logits() + row * matrix.n + begin * kColumns, region.softcap, width);
    }
}

// Attention

Job Runtime::job_of(const AttentionRegion &region, int64_t) const {
    return attention_.job(region.layer.plan);
}

void Runtime::run(const AttentionRegion &region, int thread, int64_t begin, int64_t end) {
    const float *sinks = region.sinks < 0 ? nullptr : vectors_[size_t(region.sinks)].data();
    attention_.run(region.layer, row_of(region.q, 0), region.q.stride, sinks, row_of(region.out, 0),
                   region.out.stride, arena_.data(), thread, begin, end);
}

// Recurrent layers

Job Runtime::job_of(const RecurrentRegion &region, int64_t) const {
    return recurrence_.job(layer_of(region.layer));
}

Job Runtime::job_of(const HistoryRegion &region, int64_t) const {
    return recurrence_.history_job(layer_of(region.layer));
}

Recurrence::Layer Runtime::layer_of(const RecurrentLayer &layer) const {
    const auto vector = [&](int64_t index) {
        return index < 0 ? nullptr : vectors_[size_t(index)].data();
    };
    Recurrence::Layer found;
    found.shape = layer.shape;
    found.inputs = layer.inputs;
    found.matrix = layer.matrix;
    found.x = {row_of(layer.x, 0), layer.x.stride};
    for (size_t i = 0; i < layer.gates.size(); ++i)
        found.gates[i] = {row_of(layer.gates[i], 0), layer.gates[i].stride};
    found.weight = vector(layer.weight);
    found.bias = vector(layer.bias);
    if (const auto *mamba = std::get_if<MambaShape>(&layer.shape)) {
        found.a = vector(mamba->a);
        found.d = vector(mamba->d);
    }
    return found;
}

// Experts

void Runtime::run(const RouteStep &step, int64_t row, const Scope &scope) {
    const auto vector = [&](int64_t index) {
        return index < 0 ? nullptr : vectors_[size_t(index)].data();
    };
    routings_[size_t(step.routing)].choose(row, row_of(step.logits, row, scope), vector(step.bias),
                                           vector(step.factors));
}

void Runtime::run(const SpreadStep &step, int64_t row, const Scope &scope) {
    const Routing &routing = routings_[size_t(step.routing)];
    const auto format = Format(step.format);
    const size_t bytes = tier_.linear.activation_bytes(format, 1, step.k);
    const std::byte *rows = row_of(step.rows, scope.begin, bytes, scope);
    const Routing::Choice *choices = routing.choices(row);
    for (int64_t j = 0; j < routing.chosen(); ++j) {
        tier_.linear.copy_prepared(format, step.k, rows, scope.end - scope.begin, row - scope.begin,
                                   base_of(step.slots), routing.slots(), choices[j].slot);
    }
}

void Runtime::run(const PrepareEachStep &step, int64_t row, const Scope &scope) {
    const Routing &routing = routings_[size_t(step.routing)];
    const float *x = row_of(step.x, row, scope);
    const auto prepare = [&](int64_t expert, int64_t slot) {
        tier_.linear.prepare(Format(step.format), in_order(x, step.orders[size_t(expert)], scope),
                             0, routing.slots(), step.k, base_of(step.slots), slot, slot + 1);
    };
    if (step.of_slots)
        return prepare(routing.expert_of(row), row);
    const Routing::Choice *choices = routing.choices(row);
    for (int64_t j = 0; j < routing.chosen(); ++j)
        prepare(choices[j].expert, choices[j].slot);
}

void Runtime::run(const CombineStep &step, int64_t row, const Scope &scope) {
    const Routing &routing = routings_[size_t(step.routing)];
    const Routing::Choice *choices = routing.choices(row);
    float *out = row_of(step.out, row, scope);
    std::fill(out, out + step.width, 0.0f);
    for (int64_t j = 0; j < routing.chosen(); ++j) {
        const float *slot = row_of(step.slots, choices[j].slot);
        tier_.row.add_scaled(slot, choices[j].weight, out, step.width);
    }
}

Job Runtime::job_of(const SortRegion &, int64_t) const {
    return Job{1, 1};
}

// An item is a choice.
Job Runtime::job_of(const SlotsRegion &region, int64_t rows) const {
    const int64_t choices = rows * routings_[size_t(region.routing)].chosen();
    return Job{choices, grain_for(choices, pool_.size())};
}

void Runtime::run(const SlotsRegion &region, int thread, int64_t begin, int64_t end) {
    const Routing &routing = routings_[size_t(region.routing)];
    const Scope scope{0, routing.slots(), nullptr, 0, ordered_[size_t(thread)].data()};
    for (int64_t choice = begin; choice < end; ++choice) {
        const int64_t slot = routing.choices(0)[choice].slot;
        for (const RowStep &step : region.steps)
            std::visit([&](const auto &each) { run(each, slot, scope); }, step);
    }
}

// How the rows spread over the experts is known only when it is reached, so an item is a share of
// whatever there is to do.
Job Runtime::job_of(const ExpertsRegion &, int64_t) const {
    return Job{kExpertPieces * pool_.size(), 1};
}

void Runtime::run(const ExpertsRegion &region, int64_t begin, int64_t end) {
    const Routing &routing = routings_[size_t(region.routing)];
    const auto units = [&](const Routing::Crowd &crowd, int64_t first, int64_t last) {
        int64_t base = 0;
        for (const ExpertsPart &part : region.parts) {
            const PackedMatrix &matrix = matrices_[size_t(part.matrices[size_t(crowd.expert)])];
            const int64_t count = expert_units(matrix.n);
            const int64_t low = std::max(first - base, int64_t(0));
            const int64_t high = std::min(last - base, count);
            base += count;
            if (low >= high)
                continue;
            tier_.linear.matmul(matrix, base_of(part.activations), routing.slots(), crowd.begin,
                                crowd.end, low * kExpertBlocks,
                                std::min(high * kExpertBlocks, column_blocks(matrix.n)),
                                row_of(part.out, 0), part.out.stride, false);
            if (part.biases.empty())
                continue;
            const float *bias = vectors_[size_t(part.biases[size_t(crowd.expert)])].data();
            const int64_t from = low * kExpertBlocks * kColumns;
            const int64_t width = std::min(matrix.n, high * kExpertBlocks * kColumns) - from;
            for (int64_t slot = crowd.begin; slot < crowd.end; ++slot) {
                float *to = row_of(part.out, slot) + from;
                tier_.row.add(to, bias + from, to, width);
            }
        }
    };
    for (int64_t item = begin; item < end; ++item)
        routing.piece(item, kExpertPieces * pool_.size(), region.units, units);
}

} // namespace octavo

#include "recurrence.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "checks.h"
#include "runtime.h"

namespace octavo {
namespace {

constexpr int64_t kPiece = 64;         // tokens whose convolution is held at a time
constexpr int64_t kConvChannels = 128; // of an item that does nothing else
constexpr int64_t kMambaHeads = 2;     // of an item, which repeats the convolution of b and c
constexpr int64_t kTilesAtOnce = 2;    // that go through a stretch of tokens together
constexpr int64_t kItemsAThread = 16;  // wanted of a job, so that the threads end together
constexpr int64_t kMaxTaps = 16;
constexpr int64_t kAlignment = 64; // bytes

int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

// Floats that a row of n takes in whole vectors.
int64_t padded(int64_t n) {
    return ceil_div(n, kStateLanes) * kStateLanes;
}

// What a layer's items need room for.
struct ItemSize {
    int64_t widest;   // channels at a time
    int64_t channels; // padded
    int64_t gates;
    int64_t tiles;
};

ItemSize item_size(const ShortConvShape &) {
    return {kConvChannels, 0, 0, 0};
}

ItemSize item_size(const DeltaShape &shape) {
    const int64_t tiles = padded(shape.value_dim) / kStateLanes * shape.ratio();
    return {std::max(shape.key_dim, shape.value_dim),
            2 * padded(shape.key_dim) + tiles * kStateLanes, 2 * shape.ratio() + 1, tiles};
}

ItemSize item_size(const MambaShape &shape) {
    const int64_t tiles = padded(shape.head_dim) / kStateLanes * kMambaHeads;
    return {std::max(shape.state, shape.head_dim), 2 * padded(shape.state) + tiles * kStateLanes,
            kMambaHeads, tiles};
}

void check_shape(const RecurrenceShape &shape, const StatePart &inputs, const StatePart *matrix) {
    int64_t channels = inputs.width;
    StatePart wanted{};
    if (const auto *delta = std::get_if<DeltaShape>(&shape)) {
        const auto &[key_heads, value_heads, key_dim, value_dim, tiled] = *delta;
        if (key_heads < 1 || value_heads % key_heads != 0)
            refuse("value heads that are not a multiple of the key heads");
        channels = 2 * key_heads * key_dim + value_heads * value_dim;
        wanted = {value_heads, key_dim, value_dim, 0, 0};
    } else if (const auto *mamba = std::get_if<MambaShape>(&shape)) {
        if (mamba->groups < 1 || mamba->heads % mamba->groups != 0)
            refuse("heads that are not a multiple of their groups");
        channels = mamba->heads * mamba->head_dim + 2 * mamba->groups * mamba->state;
        wanted = {mamba->heads, mamba->state, mamba->head_dim, 0, 0};
    }
    const bool same = matrix == nullptr
                          ? wanted.heads == 0
                          : matrix->heads == wanted.heads && matrix->depth == wanted.depth &&
                                matrix->width == wanted.width;
    if (inputs.heads != 1 || inputs.width != channels || !same)
        refuse("a recurrent layer of another shape than its state");
}

} // namespace

Recurrence::Recurrence(const Tier &tier, const RuntimeConfig &config, int threads)
    : tier_(tier), config_(config), state_(config.state), threads_(threads),
      scratch_(size_t(threads)), logs_(state_.parts.size()), log_width_(state_.parts.size()),
      page_marks_(state_.pages > 0 ? size_t(config.num_blocks) : 0),
      log_marks_(size_t(std::max<int64_t>(state_.log_rows, 0))) {
    if (state_.pages == 0)
        return;
    check_range("pages of a state", state_.pages, 1, config.num_blocks);
    check_range("bytes of a state's unit", state_.unit_bytes, kAlignment, config.block_bytes);
    if (state_.unit_bytes % kAlignment != 0 || config.block_bytes % kAlignment != 0)
        refuse("units of a state are not whole cache lines");
    check_range("units of a page", state_.units_per_page, 1,
                config.block_bytes / state_.unit_bytes);
    check_range("rows of the log", state_.log_rows, 0, 1 << 24);
    const int64_t units = state_.pages * state_.units_per_page;
    for (const StatePart &part : state_.parts) {
        check_range("heads of a state", part.heads, 1, 1 << 16);
        check_range("depth of a state", part.depth, 1, 1 << 16);
        check_range("width of a state", part.width, 1, 1 << 20);
        check_range("tiles of a unit", part.tiles_per_unit, 1,
                    state_.unit_bytes / (part.tile_floats() * int64_t(sizeof(float))));
        check_range("first unit of a state", part.first_unit, 0,
                    units - ceil_div(part.tiles(), part.tiles_per_unit));
    }
}

void Recurrence::add(const RecurrenceShape &shape, int64_t inputs, int64_t matrix) {
    check_range("part of a state", inputs, 0, int64_t(state_.parts.size()) - 1);
    check_range("part of a state", matrix, -1, int64_t(state_.parts.size()) - 1);
    const StatePart &part = state_.parts[size_t(inputs)];
    const StatePart *matrices = matrix < 0 ? nullptr : &state_.parts[size_t(matrix)];
    check_range("taps of a convolution", part.depth + 1, 2, kMaxTaps);
    check_shape(shape, part, matrices);
    const int64_t width = part.width + int64_t(gates(shape)) * gate_width(shape);
    if (log_width_[size_t(inputs)] == 0) {
        log_width_[size_t(inputs)] = width;
        logs_[size_t(inputs)] = Memory(size_t(state_.log_rows * width) * sizeof(float));
    }
    if (log_width_[size_t(inputs)] != width)
        refuse("recurrent layers of several shapes with one state");
    const ItemSize size = std::visit([](const auto &each) { return item_size(each); }, shape);
    const auto grow = [](auto &room, int64_t size) {
        room.resize(std::max(room.size(), size_t(size)));
    };
    for (Scratch &scratch : scratch_) {
        grow(scratch.rows, kMaxTaps + kPiece);
        grow(scratch.history, part.depth * padded(size.widest));
        grow(scratch.conv, kPiece * size.channels);
        grow(scratch.gates, kPiece * size.gates);
        const int64_t floats = matrices == nullptr ? 0 : size.tiles * matrices->tile_floats();
        const size_t bytes = size_t(floats) * sizeof(float);
        if (bytes > scratch.tiles.size())
            scratch.tiles = Memory(bytes);
    }
}

size_t Recurrence::gates(const RecurrenceShape &shape) {
    if (std::holds_alternative<DeltaShape>(shape))
        return 2; // decay and beta
    return std::holds_alternative<MambaShape>(shape) ? 1 : 0;
}

int64_t Recurrence::gate_width(const RecurrenceShape &shape) {
    if (const auto *delta = std::get_if<DeltaShape>(&shape))
        return delta->value_heads;
    if (const auto *mamba = std::get_if<MambaShape>(&shape))
        return mamba->heads;
    return 0;
}

int64_t Recurrence::out_width(const RecurrenceShape &shape, const StatePart &inputs) {
    if (const auto *delta = std::get_if<DeltaShape>(&shape))
        return delta->value_heads * delta->value_dim;
    if (const auto *mamba = std::get_if<MambaShape>(&shape))
        return mamba->heads * mamba->head_dim;
    return inputs.width;
}

// A step

void Recurrence::validate(const StepBatch &batch) const {
    const StateStep &step = batch.state;
    if (step.tables == nullptr)
        refuse("the program has recurrent layers, and the batch no states");
    const int64_t pages = state_.pages;
    if (step.pending_offsets[0] != 0 || step.pending_offsets[batch.seqs] != step.num_pending)
        refuse("pending_offsets do not run over all pending rows");
    for (int64_t i = 0; i < step.num_pending; ++i)
        check_range("pending row of the log", step.pending[i], 0, state_.log_rows - 1);
    for (int64_t t = 0; t < batch.tokens; ++t)
        check_range("row of the log", step.log[t], -1, state_.log_rows - 1);
    // Several sequences that go on from one state apply the same rows; none may be written
    // meanwhile.
    bool twice = false;
    for (int64_t i = 0; i < step.num_pending; ++i)
        log_marks_[size_t(step.pending[i])] = 1;
    for (int64_t t = 0; t < batch.tokens; ++t)
        if (step.log[t] >= 0)
            twice |= std::exchange(log_marks_[size_t(step.log[t])], 1) != 0;
    std::fill(log_marks_.begin(), log_marks_.end(), uint8_t(0));
    if (twice)
        refuse("a row of the log is written twice, or written and applied");
    for (int64_t s = 0; s < batch.seqs; ++s) {
        const std::string sequence = "sequence " + text(s);
        const int64_t pending = int64_t(step.pending_offsets[s + 1]) - step.pending_offsets[s];
        if (pending < 0)
            refuse(sequence + " has " + text(pending) + " pending rows");
        check_range("state that is read", step.reads[s], -1, step.rows - 1);
        const int64_t stored = batch.positions[batch.seq_offsets[s]] - pending;
        if (step.reads[s] < 0 && stored != 0)
            refuse(sequence + " reads no state at position " + text(stored));
    }
    for (int64_t i = 0; i < step.rows * pages; ++i)
        check_range("page of a state", step.tables[i], 0, config_.num_blocks - 1);
    const int32_t *before = nullptr;
    for (int64_t i = 0; i < step.num_stores; ++i) {
        const int32_t *store = step.stores + 3 * i;
        check_range("sequence of a stored state", store[0], 0, batch.seqs - 1);
        const int64_t s = store[0];
        const int64_t total = step.pending_offsets[s + 1] - step.pending_offsets[s] +
                              batch.seq_offsets[s + 1] - batch.seq_offsets[s];
        check_range("tokens of a stored state", store[1], 0, total);
        check_range("place of a stored state", store[2], 0, step.rows - 1);
        if (before != nullptr && std::pair(before[0], before[1]) > std::pair(store[0], store[1]))
            refuse("stored states are not in order");
        before = store;
    }
    // Pages that a sequence writes are its alone, and page i of one state is page i of any other.
    bool shared = false;
    const auto mark = [&](int64_t s, int64_t row, bool written) {
        for (int64_t i = 0; i < pages; ++i) {
            int64_t &seen = page_marks_[size_t(step.tables[row * pages + i])];
            const int64_t own = s * pages + i + 1;
            shared |= seen != 0 && seen != own;
            seen = written ? own : seen;
        }
    };
    for (int64_t i = 0; i < step.num_stores; ++i)
        mark(step.stores[3 * i], step.stores[3 * i + 2], true);
    for (int64_t s = 0; s < batch.seqs; ++s)
        if (step.reads[s] >= 0)
            mark(s, step.reads[s], false);
    for (int64_t i = 0; i < step.rows * pages; ++i)
        page_marks_[size_t(step.tables[i])] = 0;
    if (shared)
        refuse("a page of a stored state is another one's, too");
}

void Recurrence::plan(const StepBatch &batch) {
    batch_ = &batch;
    const StateStep &step = batch.state;
    spans_.clear();
    const int32_t *store = step.stores, *end = step.stores + 3 * step.num_stores;
    for (int64_t s = 0; s < batch.seqs; ++s) {
        Span span{};
        span.seq = s;
        span.token = batch.seq_offsets[s];
        span.pending = step.pending_offsets[s + 1] - step.pending_offsets[s];
        span.pending_rows = step.pending + step.pending_offsets[s];
        span.total = span.pending + batch.seq_offsets[s + 1] - batch.seq_offsets[s];
        span.read = step.reads[s];
        span.stores = store;
        while (store < end && store[0] == s)
            store += 3;
        span.num_stores = (store - span.stores) / 3;
        spans_.push_back(span);
    }
}

int64_t Recurrence::units(const Layer &layer) const {
    if (const auto *delta = std::get_if<DeltaShape>(&layer.shape))
        return delta->key_heads;
    if (const auto *mamba = std::get_if<MambaShape>(&layer.shape))
        return mamba->groups * ceil_div(mamba->group_heads(), kMambaHeads);
    return ceil_div(state_.parts[size_t(layer.inputs)].width, kConvChannels);
}

// Of one unit all sequences come first, so that a long one's items are spread over the threads.
Job Recurrence::job(const Layer &layer) const {
    const int64_t items = units(layer) * int64_t(spans_.size());
    return Job{items, std::max<int64_t>(1, items / (threads_ * kItemsAThread))};
}

void Recurrence::run(const Layer &layer, float *out, int64_t ldo, std::byte *arena, int thread,
                     int64_t begin, int64_t end) {
    const auto spans = int64_t(spans_.size());
    for (int64_t item = begin; item < end; ++item) {
        const auto run = [&](const auto &shape) {
            run_item(layer, shape, spans_[size_t(item % spans)], item / spans, out, ldo, arena,
                     scratch_[size_t(thread)]);
        };
        std::visit(run, layer.shape);
    }
}

// The inputs of a token of a span: x, then the gates.
const float *Recurrence::row(const Layer &layer, const Span &span, int64_t index) const {
    if (index >= span.pending)
        return layer.x.data + (span.token + index - span.pending) * layer.x.stride;
    const auto part = size_t(layer.inputs);
    return reinterpret_cast<const float *>(logs_[part].data()) +
           span.pending_rows[index] * log_width_[part];
}

// A head's gate of tokens [begin, end).
void Recurrence::gather_gate(const Layer &layer, const Span &span, int64_t begin, int64_t end,
                             size_t gate, int64_t head, float *out) const {
    const int64_t logged =
        state_.parts[size_t(layer.inputs)].width + int64_t(gate) * gate_width(layer.shape) + head;
    const Rows &rows = layer.gates[gate];
    for (int64_t index = begin; index < end; ++index) {
        *out++ = index < span.pending
                     ? row(layer, span, index)[logged]
                     : rows.data[(span.token + index - span.pending) * rows.stride + head];
    }
}

std::byte *Recurrence::unit_at(int64_t table_row, int64_t unit, std::byte *arena) const {
    const int32_t page =
        batch_->state.tables[table_row * state_.pages + unit / state_.units_per_page];
    return arena + page * config_.block_bytes + unit % state_.units_per_page * state_.unit_bytes;
}

float *Recurrence::tile_at(const StatePart &part, int64_t table_row, int64_t tile,
                           std::byte *arena) const {
    std::byte *unit = unit_at(table_row, part.first_unit + tile / part.tiles_per_unit, arena);
    return reinterpret_cast<float *>(unit) + tile % part.tiles_per_unit * part.tile_floats();
}

// Bytes behind a tile that are no tile's are zeros, so that equal states have equal pages.
void Recurrence::clear_after(const StatePart &part, int64_t table_row, int64_t tile,
                             std::byte *arena) const {
    const int64_t within = tile % part.tiles_per_unit + 1;
    if (tile + 1 < part.tiles() && within < part.tiles_per_unit)
        return;
    const int64_t unit = part.first_unit + tile / part.tiles_per_unit;
    const int64_t used = within * part.tile_floats() * int64_t(sizeof(float));
    int64_t end = state_.unit_bytes;
    const bool last = &part == &state_.parts.back() && tile + 1 == part.tiles();
    const int64_t place = unit % state_.units_per_page;
    if (last || place + 1 == state_.units_per_page)
        end = config_.block_bytes - place * state_.unit_bytes;
    std::memset(unit_at(table_row, unit, arena) + used, 0, size_t(end - used));
}

// Results of tokens [begin, end) for some channels.
void Recurrence::convolve(const Layer &layer, const Span &span, int64_t begin, int64_t end,
                          int64_t first, int64_t count, bool silu, float *out, int64_t ldo,
                          std::byte *arena, Scratch &scratch) const {
    const StatePart &part = state_.parts[size_t(layer.inputs)];
    const int64_t old = std::clamp<int64_t>(part.depth - begin, 0, part.depth); // in the state
    const int64_t stride = padded(count);
    for (int64_t i = 0; i < part.depth + end - begin; ++i)
        scratch.rows[size_t(i)] = i < old ? scratch.history.data() + i * stride
                                          : row(layer, span, begin - part.depth + i) + first;
    for (int64_t at = 0; old > 0 && at < count;) {
        const int64_t lane = (first + at) % kStateLanes;
        const int64_t lanes = std::min(kStateLanes - lane, count - at);
        const float *tile = nullptr; // zeros
        if (span.read >= 0)
            tile = tile_at(part, span.read, (first + at) / kStateLanes, arena) + lane;
        for (int64_t i = 0; i < old; ++i) {
            float *to = scratch.history.data() + i * stride + at;
            if (tile == nullptr)
                std::fill_n(to, lanes, 0.0f);
            else
                std::copy_n(tile + (begin + i) * kStateLanes, lanes, to);
        }
        at += lanes;
    }
    ConvArguments conv{};
    conv.rows = scratch.rows.data();
    conv.tokens = end - begin;
    conv.taps = part.depth + 1;
    conv.weight = layer.weight + first;
    conv.ldw = part.width;
    conv.bias = layer.bias == nullptr ? nullptr : layer.bias + first;
    conv.silu = silu;
    conv.n = count;
    conv.out = out;
    conv.ldo = ldo;
    tier_.recurrence.conv(conv);
}

template <class F>
void Recurrence::advance(const StatePart &part, const Span &span, int64_t first, int64_t count,
                         float *own, int64_t begin, int64_t end, std::byte *arena,
                         F &&apply) const {
    const auto bytes = size_t(part.tile_floats()) * sizeof(float);
    // Between two stores a tile is already where the second will have it.
    const auto place = [&](int64_t stretch, int64_t i) {
        return stretch == span.num_stores
                   ? own + i * part.tile_floats()
                   : tile_at(part, span.stores[3 * stretch + 2], first + i, arena);
    };
    for (int64_t stretch = 0; stretch <= span.num_stores; ++stretch) {
        const bool stored = stretch < span.num_stores;
        const int64_t from = stretch == 0 ? 0 : span.stores[3 * stretch - 2];
        const int64_t to = stored ? span.stores[3 * stretch + 1] : span.total;
        const bool at_end = from == end && end == span.total && stored;
        if (to < begin || (from >= end && !at_end) || (!stored && from == to))
            continue;
        float *tiles[kTilesAtOnce];
        for (int64_t i = 0; i < count; ++i) {
            tiles[i] = place(stretch, i);
            if (from < begin)
                continue;
            const float *source = nullptr;
            if (stretch > 0)
                source = place(stretch - 1, i);
            else if (span.read >= 0)
                source = tile_at(part, span.read, first + i, arena);
            if (source == nullptr)
                std::memset(tiles[i], 0, bytes);
            else if (source != tiles[i])
                std::memcpy(tiles[i], source, bytes);
            if (stored && source != tiles[i])
                clear_after(part, span.stores[3 * stretch + 2], first + i, arena);
        }
        int64_t at = std::max(from, begin);
        const int64_t until = std::min(to, end);
        // Nobody asks for what the pending tokens find.
        for (const int64_t bound : {std::min(until, span.pending), until}) {
            if (at < bound) {
                apply(tiles, at, bound);
                at = bound;
            }
        }
    }
}

void Recurrence::run_item(const Layer &layer, const ShortConvShape &, const Span &span,
                          int64_t unit, float *out, int64_t ldo, std::byte *arena,
                          Scratch &scratch) const {
    const StatePart &part = state_.parts[size_t(layer.inputs)];
    const int64_t first = unit * kConvChannels;
    const int64_t count = std::min(kConvChannels, part.width - first);
    for (int64_t at = span.pending; at < span.total; at += kPiece) {
        float *to = out + (span.token + at - span.pending) * ldo + first;
        convolve(layer, span, at, std::min(span.total, at + kPiece), first, count, false, to, ldo,
                 arena, scratch);
    }
}

void Recurrence::run_item(const Layer &layer, const DeltaShape &shape, const Span &span,
                          int64_t unit, float *out, int64_t ldo, std::byte *arena,
                          Scratch &scratch) const {
    const StatePart &part = state_.parts[size_t(layer.matrix)];
    const int64_t ratio = shape.ratio(), key_dim = shape.key_dim, value_dim = shape.value_dim;
    const int64_t keys = padded(key_dim), values = padded(value_dim);
    const int64_t width = 2 * keys + ratio * values;
    const auto value_head = [&](int64_t i) {
        return shape.tiled ? unit + i * shape.key_heads : unit * ratio + i;
    };
    float *q = scratch.conv.data(), *k = q + keys, *v = k + keys;
    float *kq = scratch.gates.data();
    float unwanted[kTilesAtOnce * kStateLanes];
    for (int64_t begin = 0; begin < span.total; begin += kPiece) {
        const int64_t end = std::min(span.total, begin + kPiece);
        const auto read = [&](int64_t first, int64_t count, float *to) {
            convolve(layer, span, begin, end, first, count, true, to, width, arena, scratch);
        };
        read(unit * key_dim, key_dim, q);
        read((shape.key_heads + unit) * key_dim, key_dim, k);
        for (int64_t i = 0; i < ratio; ++i)
            read(2 * shape.key_heads * key_dim + value_head(i) * value_dim, value_dim,
                 v + i * values);
        for (int64_t t = 0; t < end - begin; ++t) {
            tier_.recurrence.unit(q + t * width, key_dim, 1.0f / std::sqrt(float(key_dim)));
            tier_.recurrence.unit(k + t * width, key_dim, 1.0f);
            kq[t] = tier_.recurrence.dot(k + t * width, q + t * width, key_dim);
        }
        for (int64_t i = 0; i < ratio; ++i) {
            const int64_t head = value_head(i);
            float *decay = kq + (1 + 2 * i) * kPiece, *beta = decay + kPiece;
            gather_gate(layer, span, begin, end, 0, head, decay);
            gather_gate(layer, span, begin, end, 1, head, beta);
            for (int64_t j = 0; j < part.head_tiles(); j += kTilesAtOnce) {
                const int64_t count = std::min(kTilesAtOnce, part.head_tiles() - j);
                const int64_t column = j * kStateLanes;
                const int64_t lanes = std::min(count * kStateLanes, value_dim - column);
                float *own = reinterpret_cast<float *>(scratch.tiles.data()) +
                             (i * part.head_tiles() + j) * part.tile_floats();
                const auto apply = [&](float *const *tiles, int64_t from, int64_t to) {
                    const int64_t at = from - begin;
                    const DeltaRows rows{q + at * width, k + at * width,
                                         width,          v + at * width + i * values + column,
                                         width,          decay + at,
                                         beta + at,      kq + at};
                    const bool wanted = from >= span.pending;
                    float *found = wanted ? out + (span.token + from - span.pending) * ldo +
                                                head * value_dim + column
                                          : unwanted;
                    tier_.recurrence.delta(tiles, key_dim, to - from, rows, lanes, found,
                                           wanted ? ldo : 0);
                };
                advance(part, span, head * part.head_tiles() + j, count, own, begin, end, arena,
                        apply);
            }
        }
    }
}

void Recurrence::run_item(const Layer &layer, const MambaShape &shape, const Span &span,
                          int64_t unit, float *out, int64_t ldo, std::byte *arena,
                          Scratch &scratch) const {
    const StatePart &part = state_.parts[size_t(layer.matrix)];
    const int64_t head_dim = shape.head_dim, states = shape.state;
    const int64_t group_units = ceil_div(shape.group_heads(), kMambaHeads);
    const int64_t group = unit / group_units;
    const int64_t within = unit % group_units * kMambaHeads;
    const int64_t first_head = group * shape.group_heads() + within;
    const int64_t heads = std::min(kMambaHeads, shape.group_heads() - within);
    const int64_t inputs = padded(head_dim), depth = padded(states);
    const int64_t width = 2 * depth + kMambaHeads * inputs;
    float *b = scratch.conv.data(), *c = b + depth, *x = c + depth;
    float unwanted[kStateLanes];
    for (int64_t begin = 0; begin < span.total; begin += kPiece) {
        const int64_t end = std::min(span.total, begin + kPiece);
        const auto read = [&](int64_t first, int64_t count, float *to) {
            convolve(layer, span, begin, end, first, count, true, to, width, arena, scratch);
        };
        const int64_t of_groups = shape.heads * head_dim;
        read(of_groups + group * states, states, b);
        read(of_groups + (shape.groups + group) * states, states, c);
        for (int64_t i = 0; i < heads; ++i) {
            const int64_t head = first_head + i;
            read(head * head_dim, head_dim, x + i * inputs);
            float *dt = scratch.gates.data() + i * kPiece;
            gather_gate(layer, span, begin, end, 0, head, dt);
            for (int64_t j = 0; j < part.head_tiles(); ++j) {
                const int64_t column = j * kStateLanes;
                const int64_t lanes = std::min(kStateLanes, head_dim - column);
                float *own = reinterpret_cast<float *>(scratch.tiles.data()) +
                             (i * part.head_tiles() + j) * part.tile_floats();
                const auto apply = [&](float *const *tiles, int64_t from, int64_t to) {
                    const int64_t at = from - begin;
                    const MambaRows rows{x + at * width + i * inputs + column,
                                         width,
                                         b + at * width,
                                         c + at * width,
                                         width,
                                         dt + at,
                                         layer.a[head],
                                         layer.d[head]};
                    const bool wanted = from >= span.pending;
                    float *found = wanted ? out + (span.token + from - span.pending) * ldo +
                                                head * head_dim + column
                                          : unwanted;
                    tier_.recurrence.mamba(tiles[0], states, to - from, rows, lanes, found,
                                           wanted ? ldo : 0);
                };
                advance(part, span, head * part.head_tiles() + j, 1, own, begin, end, arena, apply);
            }
        }
    }
}

// What the convolution has read last

Job Recurrence::history_job(const Layer &layer) const {
    const int64_t channels = state_.parts[size_t(layer.inputs)].width;
    const int64_t items = ceil_div(channels, kConvChannels) * int64_t(spans_.size());
    return Job{items, std::max<int64_t>(1, items / (threads_ * kItemsAThread))};
}

void Recurrence::store_history(const Layer &layer, std::byte *arena, int64_t begin, int64_t end) {
    const StatePart &part = state_.parts[size_t(layer.inputs)];
    const auto spans = int64_t(spans_.size());
    const size_t tile_bytes = size_t(part.tile_floats()) * sizeof(float);
    const auto store = [&](const Span &span, int64_t tile) {
        const int64_t first = tile * kStateLanes;
        const auto lanes = size_t(std::min(kStateLanes, part.width - first));
        float old[kMaxTaps * kStateLanes] = {};
        if (span.read >= 0 && span.num_stores > 0)
            std::memcpy(old, tile_at(part, span.read, tile, arena), tile_bytes);
        for (int64_t i = 0; i < span.num_stores; ++i) {
            const int32_t *entry = span.stores + 3 * i;
            float *to = tile_at(part, entry[2], tile, arena);
            for (int64_t time = 0; time < part.depth; ++time) {
                const int64_t index = entry[1] - part.depth + time;
                float *row_to = to + time * kStateLanes;
                if (index < 0) {
                    std::copy_n(old + (index + part.depth) * kStateLanes, kStateLanes, row_to);
                } else {
                    std::copy_n(row(layer, span, index) + first, lanes, row_to);
                    std::fill(row_to + lanes, row_to + kStateLanes, 0.0f);
                }
            }
            clear_after(part, entry[2], tile, arena);
        }
    };
    const auto log = [&](const Span &span, int64_t first, int64_t count) {
        for (int64_t index = span.pending; index < span.total; ++index) {
            const int64_t token = span.token + index - span.pending;
            const int32_t place = batch_->state.log[token];
            if (place < 0)
                continue;
            float *to = reinterpret_cast<float *>(logs_[size_t(layer.inputs)].data()) +
                        place * log_width_[size_t(layer.inputs)];
            std::copy_n(row(layer, span, index) + first, count, to + first);
            if (first > 0)
                continue;
            to += part.width;
            for (size_t gate = 0; gate < gates(layer.shape); ++gate) {
                const float *values = layer.gates[gate].data + token * layer.gates[gate].stride;
                to = std::copy_n(values, gate_width(layer.shape), to);
            }
        }
    };
    for (int64_t item = begin; item < end; ++item) {
        const Span &span = spans_[size_t(item % spans)];
        const int64_t first = item / spans * kConvChannels;
        const int64_t count = std::min(kConvChannels, part.width - first);
        for (int64_t tile = first / kStateLanes; tile * kStateLanes < first + count; ++tile)
            store(span, tile);
        log(span, first, count);
    }
}

} // namespace octavo

#include "paged_attention.h"

#include <algorithm>

#include "runtime.h"

namespace octavo {
namespace {

constexpr int64_t kTileRows = 60;     // queries of one KV head that are taken at once
constexpr int64_t kItemsAThread = 16; // wanted of a job, so that the threads end together
constexpr int64_t kFewRows = 16;      // of a tile of several tokens that is split all the same

int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

} // namespace

PagedAttention::PagedAttention(const Tier &tier, const RuntimeConfig &config, int threads)
    : tier_(tier), config_(config), threads_(threads),
      least_items_(threads > 1 ? threads * kItemsAThread : 0) {
    for (size_t group = 0; group < config.groups.size(); ++group)
        add_plan(int64_t(group), config.num_heads);
}

int64_t PagedAttention::plan_of(int64_t group, int64_t heads) {
    const auto same = std::find_if(plans_.begin(), plans_.end(), [&](const Plan &plan) {
        return plan.group == group && plan.group_heads * plan.kv_heads == heads;
    });
    if (same != plans_.end())
        return same - plans_.begin();
    add_plan(group, heads);
    return int64_t(plans_.size()) - 1;
}

void PagedAttention::add_plan(int64_t index, int64_t query_heads) {
    const KvGroup &group = config_.groups[size_t(index)];
    Plan plan{};
    plan.group = index;
    plan.window = group.window;
    plan.kv_heads = group.kv_heads;
    plan.head_dim = group.head_dim;
    plan.group_heads = query_heads / group.kv_heads;
    plan.head_bytes = config_.head_bytes(group);
    plan.tile_tokens = std::max<int64_t>(1, kTileRows / plan.group_heads);
    const int64_t tiles = config_.max_tokens / plan.tile_tokens + config_.max_seqs;
    // Of single tokens, what is split has more than a least_items_-th of all chunks, so there
    // are fewer of them. Tiles of several tokens take as many slots as these have left (plan).
    const int64_t heads = tiles * plan.kv_heads;
    const int64_t split = std::min(least_items_, heads);
    plan.num_slots = split * ceil_div(config_.max_blocks_per_seq * config_.block_size, kChunk);
    const auto same = std::find_if(tilings_.begin(), tilings_.end(), [&](const Tiling &tiling) {
        return tiling.tile_tokens == plan.tile_tokens;
    });
    plan.tiling = size_t(same - tilings_.begin());
    if (same == tilings_.end()) {
        tilings_.push_back(Tiling{plan.tile_tokens, {}});
        tilings_.back().tiles.reserve(size_t(tiles));
    }
    plan.first_item.reserve(size_t(tiles + 1));
    plan.first_slot.reserve(size_t(tiles));

    AttentionShape shape{};
    shape.heads_per_kv = plan.group_heads;
    shape.head_dim = group.head_dim;
    const int64_t rows = plan.tile_tokens * shape.heads_per_kv;
    const int64_t floats = ceil_div(shape.state_floats(rows) + shape.scratch_floats(rows), 16) * 16;
    const int64_t slots = plan.num_slots * shape.state_floats(shape.heads_per_kv);
    if (floats > thread_floats_)
        thread_space_ = Memory(size_t(floats * threads_) * sizeof(float));
    if (slots > slot_floats_)
        slots_ = Memory(size_t(slots) * sizeof(float));
    if (heads > most_heads_)
        done_ = std::make_unique<std::atomic<int32_t>[]>(size_t(heads));
    thread_floats_ = std::max(thread_floats_, floats);
    slot_floats_ = std::max(slot_floats_, slots);
    most_heads_ = std::max(most_heads_, heads);
    plans_.push_back(std::move(plan));
}

AttentionShape PagedAttention::shape_of(const Layer &layer) const {
    const Plan &plan = plans_[size_t(layer.plan)];
    AttentionShape shape{};
    shape.heads_per_kv = plan.group_heads;
    shape.head_dim = plan.head_dim;
    shape.block_size = config_.block_size;
    shape.block_bytes = config_.block_bytes;
    shape.kind = config_.kv_kind;
    shape.scale = layer.scale;
    shape.softcap = layer.softcap;
    shape.window = plan.window;
    return shape;
}

AttentionQuery PagedAttention::query_of(int64_t group, const Tile &tile) const {
    AttentionQuery query{};
    query.position = batch_->positions[tile.token];
    query.tokens = tile.tokens;
    query.blocks = batch_->block_tables + (group * config_.max_seqs + batch_->seq_slots[tile.seq]) *
                                              config_.max_blocks_per_seq;
    return query;
}

void PagedAttention::plan(const StepBatch &batch) {
    batch_ = &batch;
    for (Tiling &tiling : tilings_) {
        tiling.tiles.clear();
        for (int32_t seq = 0; seq < int32_t(batch.seqs); ++seq) {
            // The last first: they see the most keys.
            const int32_t begin = batch.seq_offsets[seq];
            for (int32_t end = batch.seq_offsets[seq + 1]; end > begin;) {
                const int32_t token = std::max(begin, end - int32_t(tiling.tile_tokens));
                tiling.tiles.push_back(Tile{seq, token, end - token});
                end = token;
            }
        }
    }
    for (Plan &plan : plans_) {
        const std::vector<Tile> &tiles = tiles_of(plan);
        const int64_t heads = plan.kv_heads;
        const auto chunks_of = [&](const Tile &tile) {
            const AttentionQuery query = query_of(plan.group, tile);
            return query.end_chunk() - query.first_chunk(plan.window);
        };
        plan.first_item.clear();
        plan.first_slot.clear();
        int64_t chunks = 0;
        for (const Tile &tile : tiles)
            chunks += chunks_of(tile) * tile.tokens * heads;
        plan.piece = least_items_ > 0 ? ceil_div(chunks, least_items_) : chunks;
        int64_t items = 0;
        int64_t slots = 0;
        for (const Tile &tile : tiles) {
            plan.first_item.push_back(items);
            plan.first_slot.push_back(slots);
            const int64_t seen = chunks_of(tile);
            const int64_t states = seen * tile.tokens * heads;
            const bool few = tile.tokens == 1 || tile.tokens * plan.group_heads <= kFewRows;
            const bool split =
                few && seen > plan.piece_of(tile) && slots + states <= plan.num_slots;
            items += (split ? ceil_div(seen, plan.piece_of(tile)) : 1) * heads;
            slots += split ? states : 0;
        }
        plan.first_item.push_back(items);
    }
}

Job PagedAttention::job(int64_t plan) const {
    const int64_t items = plans_[size_t(plan)].first_item.back();
    return Job{items, std::max<int64_t>(1, items / (threads_ * kItemsAThread))};
}

PagedAttention::Item PagedAttention::item_at(const Layer &layer, int64_t item, int64_t tile) const {
    const Plan &plan = plans_[size_t(layer.plan)];
    const Tile &of = tiles_of(plan)[size_t(tile)];
    const int64_t within = item - plan.first_item[size_t(tile)];
    Item out{};
    out.tile = tile;
    out.pieces =
        (plan.first_item[size_t(tile) + 1] - plan.first_item[size_t(tile)]) / plan.kv_heads;
    out.head = within / out.pieces;
    out.piece = within % out.pieces;
    out.span.query = query_of(layer.group, of);
    out.first_chunk = out.span.query.first_chunk(plan.window);
    const int64_t piece = plan.piece_of(of);
    out.span.begin = out.first_chunk + out.piece * piece;
    out.span.end = out.span.query.end_chunk();
    if (out.pieces > 1)
        out.span.end = std::min(out.span.end, out.span.begin + piece);
    return out;
}

void PagedAttention::run(const Layer &layer, const float *q, int64_t ldq, const float *sinks,
                         float *out, int64_t ldo, const std::byte *arena, int thread, int64_t begin,
                         int64_t end) {
    const AttentionKernels &kernels = tier_.attention;
    const AttentionShape shape = shape_of(layer);
    const Plan &plan = plans_[size_t(layer.plan)];
    const std::vector<Tile> &tiles = tiles_of(plan);
    const int64_t heads = plan.kv_heads;
    const int64_t group_heads = plan.group_heads;
    const int64_t width = group_heads * plan.head_dim;
    float *state = reinterpret_cast<float *>(thread_space_.data()) + thread * thread_floats_;
    float *scratch = state + shape.state_floats(plan.tile_tokens * group_heads);
    const auto at = [&](int64_t item, int64_t tile) {
        Item found = item_at(layer, item, tile);
        found.span.query.q = q + tiles[size_t(tile)].token * ldq + found.head * width;
        found.span.query.ldq = ldq;
        found.span.query.head = arena + (layer.index * heads + found.head) * plan.head_bytes;
        return found;
    };
    const auto after = std::upper_bound(plan.first_item.begin(), plan.first_item.end(), begin);
    Item here = at(begin, after - plan.first_item.begin() - 1);
    for (int64_t item = begin; item < end; ++item) {
        Item next{};
        const bool more = item + 1 < plan.first_item.back();
        if (more) {
            const bool same = item + 1 < plan.first_item[size_t(here.tile) + 1];
            next = at(item + 1, same ? here.tile : here.tile + 1);
        }
        const AttentionSpan *ahead = more ? &next.span : nullptr;
        const Tile &tile = tiles[size_t(here.tile)];
        float *to = out + tile.token * ldo + here.head * width;
        const float *own = sinks == nullptr ? nullptr : sinks + here.head * group_heads;
        if (here.pieces == 1) {
            kernels.attend(shape, here.span, ahead, false, state, scratch);
            kernels.finish(shape, own, tile.tokens, state, to, ldo);
        } else {
            const int64_t chunks = here.span.query.end_chunk() - here.first_chunk;
            const int64_t slot =
                plan.first_slot[size_t(here.tile)] + here.head * chunks * tile.tokens;
            const int64_t rows = tile.tokens * group_heads;
            float *slots =
                reinterpret_cast<float *>(slots_.data()) + slot * shape.state_floats(group_heads);
            kernels.attend(shape, here.span, ahead, true,
                           slots + (here.span.begin - here.first_chunk) * shape.state_floats(rows),
                           scratch);
            std::atomic<int32_t> &done = done_[size_t(here.tile * heads + here.head)];
            if (done.fetch_add(1, std::memory_order_acq_rel) + 1 == here.pieces) {
                done.store(0, std::memory_order_relaxed);
                kernels.fold(shape, rows, chunks, slots, state);
                kernels.finish(shape, own, tile.tokens, state, to, ldo);
            }
        }
        here = next;
    }
}

void PagedAttention::store(const Layer &layer, int64_t slot, int64_t tokens, const float *k,
                           int64_t ldk, const float *v, int64_t ldv, std::byte *block) const {
    const AttentionShape shape = shape_of(layer);
    const Plan &plan = plans_[size_t(layer.plan)];
    const int64_t heads = plan.kv_heads;
    for (int64_t h = 0; h < heads; ++h) {
        tier_.attention.store(shape, slot, tokens, k + h * plan.head_dim, ldk,
                              v + h * plan.head_dim, ldv,
                              block + (layer.index * heads + h) * plan.head_bytes);
    }
}

} // namespace octavo

// Paged attention of a step: its queries cut into items, and the threads' work on them.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "memory.h"
#include "thread_pool.h"
#include "tier.h"

namespace octavo {

struct RuntimeConfig;
struct StepBatch;

// An item is a tile of queries (consecutive tokens of one sequence) on one KV head, with all the
// keys they see; or, for a single token that sees far more keys than a thread's share, some chunks
// of them. Whoever completes a token's last piece puts the pieces together.
class PagedAttention {
  public:
    struct Layer {
        int64_t group; // KV group
        int64_t index; // within the group
        float scale;
        float softcap; // 0: none
        int64_t plan;  // plan_of its group and query heads
    };

    PagedAttention(const Tier &tier, const RuntimeConfig &config, int threads);

    // How a step's queries are cut for layers of a group with so many query heads, a multiple of
    // its KV heads. Those of the model's own number have the group's number.
    int64_t plan_of(int64_t group, int64_t heads);
    // Cuts the batch, which must stay as it is until the next plan.
    void plan(const StepBatch &batch);
    Job job(int64_t plan) const;
    // Items [begin, end) of a layer's job. Row t of q and out is token t's, all heads; rows are ldq
    // and ldo floats apart. `sinks` are the layer's, if it has any; `arena` is the KV cache.
    void run(const Layer &layer, const float *q, int64_t ldq, const float *sinks, float *out,
             int64_t ldo, const std::byte *arena, int thread, int64_t begin, int64_t end);

    // Puts tokens' keys and values (all heads) into consecutive slots of one tile of a block of the
    // arena. Rows are ldk and ldv floats apart.
    void store(const Layer &layer, int64_t slot, int64_t tokens, const float *k, int64_t ldk,
               const float *v, int64_t ldv, std::byte *block) const;

  private:
    struct Tile {
        int32_t seq;
        int32_t token;
        int32_t tokens;
    };
    // Layers of a KV group with as many query heads, and their items: of each tile, all pieces of
    // its first head, and so on.
    struct Plan {
        int64_t group;
        int64_t window;
        int64_t kv_heads;
        int64_t head_dim;
        int64_t group_heads; // query heads of a KV head
        int64_t head_bytes;  // of a block: keys and values of one head
        int64_t tile_tokens;
        size_t tiling;                   // that its tiles are of
        int64_t num_slots;               // that its layers may use
        int64_t piece = 0;               // most chunks of an item, times its tokens
        std::vector<int64_t> first_item; // of each tile, and past the last
        std::vector<int64_t> first_slot; // of each tile, among the states that wait to be merged

        // Most chunks of an item of a tile. Several tokens' states are more to write and merge.
        int64_t piece_of(const Tile &tile) const {
            return tile.tokens == 1 ? piece : std::max<int64_t>(4, piece / tile.tokens);
        }
    };
    // The batch in tiles of so many tokens: groups with as many query heads a KV head share them.
    struct Tiling {
        int64_t tile_tokens;
        std::vector<Tile> tiles;
    };
    struct Item {
        int64_t tile;
        int64_t head;
        int64_t piece;
        int64_t pieces;
        int64_t first_chunk; // of all pieces
        AttentionSpan span;
    };

    void add_plan(int64_t group, int64_t heads);
    AttentionShape shape_of(const Layer &layer) const;
    AttentionQuery query_of(int64_t group, const Tile &tile) const;
    const std::vector<Tile> &tiles_of(const Plan &plan) const {
        return tilings_[plan.tiling].tiles;
    }
    Item item_at(const Layer &layer, int64_t item, int64_t tile) const;

    const Tier &tier_;
    const RuntimeConfig &config_;
    const int threads_;
    const int64_t least_items_; // wanted of a job; 0: nothing is split

    const StepBatch *batch_ = nullptr;
    std::vector<Tiling> tilings_;
    std::vector<Plan> plans_;
    std::unique_ptr<std::atomic<int32_t>[]> done_; // pieces, [tiles][KV heads]; zero between jobs
    int64_t thread_floats_ = 0, slot_floats_ = 0, most_heads_ = 0;
    Memory thread_space_; // a thread's state and scratch
    Memory slots_;        // states of single chunks, of a token's queries on one KV head
};

} // namespace octavo

// Recurrent layers of a step: its sequences cut into items, and the threads' work on them. States
// lie in pages, which are blocks of the KV cache (kv_cache/state_layout.py).
#pragma once

#include <variant>
#include <vector>

#include "memory.h"
#include "thread_pool.h"
#include "tier.h"

namespace octavo {

struct RuntimeConfig;
struct StepBatch;

// An array [heads, depth, width] of a layer's state, in tiles [depth][kStateLanes].
struct StatePart {
    int64_t heads;
    int64_t depth;
    int64_t width;
    int64_t first_unit;
    int64_t tiles_per_unit;

    int64_t head_tiles() const { return (width + kStateLanes - 1) / kStateLanes; }
    int64_t tiles() const { return heads * head_tiles(); }
    int64_t tile_floats() const { return depth * kStateLanes; }
};

struct StateConfig {
    int64_t pages = 0; // of a state; 0: no layer is recurrent
    int64_t unit_bytes = 0;
    int64_t units_per_page = 0;
    int64_t log_rows = 0; // tokens whose inputs can be kept
    std::vector<StatePart> parts;
};

// What a step reads and writes of states (kv_cache/state_batch.py); nothing is trusted.
struct StateStep {
    const int32_t *tables; // [rows, pages]; null: the step has no states
    int64_t rows;
    const int32_t *reads;  // [sequences]
    const int32_t *stores; // [num_stores][3]
    int64_t num_stores;
    const int32_t *pending_offsets; // [sequences + 1]
    const int32_t *pending;         // [num_pending]
    int64_t num_pending;
    const int32_t *log; // [tokens]
};

// What a layer does with its convolution's results (models/recurrence_shape.py).
struct ShortConvShape {};
struct DeltaShape {
    int64_t key_heads;
    int64_t value_heads;
    int64_t key_dim;
    int64_t value_dim;
    bool tiled;

    int64_t ratio() const { return value_heads / key_heads; }
};
struct MambaShape {
    int64_t heads;
    int64_t head_dim;
    int64_t state;
    int64_t groups;
    int64_t a, d; // vectors: a number a head

    int64_t group_heads() const { return heads / groups; }
};
using RecurrenceShape = std::variant<ShortConvShape, DeltaShape, MambaShape>;

// The convolution, and what reads its results, are one item's work: all channels that some heads
// need, for all tokens of a sequence. The convolution's last inputs are stored apart, when all
// items have read the old ones.
class Recurrence {
  public:
    static constexpr size_t kGates = 2; // most values beside the convolution's inputs

    struct Rows {
        const float *data;
        int64_t stride; // floats
    };
    struct Layer {
        RecurrenceShape shape;
        int64_t inputs = 0;  // part of the state: what the convolution has read last
        int64_t matrix = -1; // part of the state; -1: none
        Rows x{};            // the convolution's inputs
        Rows gates[kGates]{};
        const float *weight = nullptr; // [taps][channels]
        const float *bias = nullptr;   // null: none
        const float *a = nullptr, *d = nullptr;
    };

    Recurrence(const Tier &tier, const RuntimeConfig &config, int threads);

    // Makes room for a layer. Throws std::invalid_argument for a shape that is not its state's.
    void add(const RecurrenceShape &shape, int64_t inputs, int64_t matrix);
    // Values beside the convolution's inputs, and how wide each of them is.
    static size_t gates(const RecurrenceShape &shape);
    static int64_t gate_width(const RecurrenceShape &shape);
    static int64_t out_width(const RecurrenceShape &shape, const StatePart &inputs);

    // Throws std::invalid_argument naming what is wrong with a step's states.
    void validate(const StepBatch &batch) const;
    // Takes the batch, which must stay as it is until the next plan.
    void plan(const StepBatch &batch);

    Job job(const Layer &layer) const;
    // Items [begin, end) of a layer's job. Row t of out is token t's; `arena` is the KV cache.
    void run(const Layer &layer, float *out, int64_t ldo, std::byte *arena, int thread,
             int64_t begin, int64_t end);
    Job history_job(const Layer &layer) const;
    // Stores what the convolution has read last, and logs the inputs of tokens that may have to be
    // applied again.
    void store_history(const Layer &layer, std::byte *arena, int64_t begin, int64_t end);

  private:
    // A sequence's tokens: those that are pending, then the step's.
    struct Span {
        int64_t seq;
        int64_t token; // the first of the step
        int64_t pending;
        const int32_t *pending_rows;
        int64_t total; // pending and the step's
        int64_t read;  // row of the tables; -1: zeros
        const int32_t *stores;
        int64_t num_stores;
    };
    struct Scratch {
        std::vector<const float *> rows;
        std::vector<float> history; // of the channels that are convolved at a time
        std::vector<float> conv;    // [kPiece], results of all channels of an item
        std::vector<float> gates;   // [kPiece] for each
        Memory tiles;               // of an item, behind its last store
    };

    int64_t units(const Layer &layer) const;
    const float *row(const Layer &layer, const Span &span, int64_t index) const;
    void gather_gate(const Layer &layer, const Span &span, int64_t begin, int64_t end, size_t gate,
                     int64_t head, float *out) const;
    std::byte *unit_at(int64_t table_row, int64_t unit, std::byte *arena) const;
    float *tile_at(const StatePart &part, int64_t table_row, int64_t tile, std::byte *arena) const;
    void clear_after(const StatePart &part, int64_t table_row, int64_t tile,
                     std::byte *arena) const;
    void convolve(const Layer &layer, const Span &span, int64_t begin, int64_t end, int64_t first,
                  int64_t count, bool silu, float *out, int64_t ldo, std::byte *arena,
                  Scratch &scratch) const;
    // Takes `count` tiles through tokens [begin, end) of a span: copies them to where they are
    // stored and calls apply(tiles, from, to) in between. `own` is their place behind the last
    // store.
    template <class F>
    void advance(const StatePart &part, const Span &span, int64_t first, int64_t count, float *own,
                 int64_t begin, int64_t end, std::byte *arena, F &&apply) const;
    void run_item(const Layer &layer, const ShortConvShape &, const Span &span, int64_t unit,
                  float *out, int64_t ldo, std::byte *arena, Scratch &scratch) const;
    void run_item(const Layer &layer, const DeltaShape &, const Span &span, int64_t unit,
                  float *out, int64_t ldo, std::byte *arena, Scratch &scratch) const;
    void run_item(const Layer &layer, const MambaShape &, const Span &span, int64_t unit,
                  float *out, int64_t ldo, std::byte *arena, Scratch &scratch) const;

    const Tier &tier_;
    const RuntimeConfig &config_;
    const StateConfig &state_;
    const int threads_;
    std::vector<Scratch> scratch_;   // of each thread
    std::vector<Memory> logs_;       // by part of a convolution: [log_rows, channels and gates]
    std::vector<int64_t> log_width_; // floats; 0: no such layer yet
    // Of each block and each row of the log, all zero between steps.
    mutable std::vector<int64_t> page_marks_;
    mutable std::vector<uint8_t> log_marks_;

    const StepBatch *batch_ = nullptr;
    std::vector<Span> spans_;
};

} // namespace octavo

// A model's step on packed weights and a paged KV cache: the ops of a lowered Program, run over a
// batch by a thread pool, in one call.
#pragma once

#include <string>
#include <variant>
#include <vector>

#include "memory.h"
#include "thread_pool.h"
#include "tier.h"

namespace octavo {

struct RuntimeConfig {
    int threads;
    int64_t max_tokens;
    int64_t max_logits_rows;
    int64_t max_seqs;
    int64_t max_blocks_per_seq;
    int64_t num_blocks;
    int64_t vocab_size;
    std::vector<int64_t> windows; // one a KV group; 0: none
    int64_t layers_per_group;
    int64_t block_size;
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;
    HalfKind kv_kind;
};

// A matrix [tokens, width] in the activation arena; rows are `stride` floats apart.
struct Value {
    int64_t offset; // bytes
    int64_t stride;
};

// Row-wise steps: each reads and writes one token's rows only.
struct EmbedStep {
    int64_t matrix;
    Value out;
    float scale;
};
struct NormStep {
    Value x;
    int64_t weight;
    Value out;
    int64_t width;
    int64_t group; // elements normed together
    float eps;
};
struct AddStep {
    Value x, y, out;
    int64_t width;
};
struct GateStep {
    Value gate, up, out;
    int64_t width;
    bool gelu;
};
// Prepares a row for linear layers of a format. `offset` is that of the prepared activations.
struct PrepareStep {
    Value x;
    int64_t format;
    int64_t k;
    int64_t offset;
};
// Fills a row of cosines and sines (dim each) for the token's position.
struct AngleStep {
    int64_t rope;
    Value out;
};
struct RopeStoreStep {
    Value q, k, v, angles;
    int64_t rope;
    int64_t group; // of KV blocks
    int64_t layer; // within the group
};
// Row r of out = row logits_rows[r] of x.
struct GatherStep {
    Value x, out;
    int64_t width;
};
using RowStep = std::variant<EmbedStep, NormStep, AddStep, GateStep, PrepareStep, AngleStep,
                             RopeStoreStep, GatherStep>;

// Regions: each begins when the one before is done.
struct RowsRegion {
    std::vector<RowStep> steps;
};
struct LinearPart {
    int64_t matrix;
    int64_t activations; // offset of the prepared activations
    Value out;
    int64_t bias; // a vector, or -1
};
struct LinearRegion {
    std::vector<LinearPart> parts;
    bool accumulate;
    int64_t blocks = 0; // column blocks of all parts
    int64_t chunk = 0;  // rows that pass by all weights before the next
};
struct AttentionRegion {
    Value q, out;
    int64_t group;
    int64_t layer;
    float scale;
    float softcap;
    bool split = false; // in this step, partitions go to different threads and are merged after
};
// Follows an attention region.
struct MergeRegion {};
struct LogitsRegion {
    int64_t matrix;
    int64_t activations;
    float softcap;
};

struct Region {
    std::string name;
    bool selected; // over the rows that want logits only
    std::variant<RowsRegion, LinearRegion, AttentionRegion, MergeRegion, LogitsRegion> work;
    double seconds = 0.0;
};

// One step's arrays (execute/batch.py); nothing is trusted.
struct StepBatch {
    const int32_t *token_ids;
    const int32_t *positions;
    int64_t tokens;
    const int32_t *seq_offsets;
    const int32_t *seq_slots;
    int64_t seqs;
    const int32_t *block_tables; // [groups, max_seqs, max_blocks_per_seq]
    const int32_t *logits_rows;
    int64_t logits;
    const int32_t *copies; // [copies][2]
    int64_t num_copies;
};

class Runtime {
  public:
    Runtime(const Tier &tier, const RuntimeConfig &config);

    // For others to run on between steps; may outlive the runtime.
    std::shared_ptr<ThreadPool> pool() const { return shared_pool_; }
    const Tier &tier() const { return tier_; }
    const RuntimeConfig &config() const { return config_; }
    int64_t block_bytes() const { return block_bytes_; }
    size_t weight_bytes() const;
    size_t arena_bytes() const { return arena_.size(); }
    std::byte *block(int64_t index) const { return arena_.data() + index * block_bytes_; }

    // Building, once: weights, whose packed sizes are known beforehand, then regions over an
    // activation arena. All throw std::invalid_argument for what could make a step go out of
    // bounds.
    static size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }
    void allocate_weights(size_t bytes);
    int64_t add_matrix(Format format, const std::byte *data, int64_t bytes, int64_t n, int64_t k);
    int64_t add_vector(std::vector<float> values);
    // A rotation of the leading `dim` elements of a head by position * frequencies[i].
    int64_t add_rope(int64_t dim, bool interleaved, const std::vector<double> &frequencies);
    void allocate_activations(int64_t bytes);
    void add_region(Region region);

    // Throws std::invalid_argument naming what is wrong with the batch; nothing has run then.
    void step(const StepBatch &batch);
    // [logits, vocab_size] of the last step.
    float *logits() const { return reinterpret_cast<float *>(logits_.data()); }

    void set_profiling(bool on) { profiling_ = on; }
    const std::vector<Region> &regions() const { return regions_; }
    void reset_profile();

  private:
    // Positions are split as coarse * kFine + fine, and the angles added in double, so that the
    // tables stay small at any context length and every position's values are exact.
    struct RopeTable {
        int64_t dim;
        bool interleaved;
        std::vector<double> coarse; // [positions / kFine][dim / 2][cos, sin]
        std::vector<double> fine;   // [kFine][dim / 2][cos, sin]
    };
    // Consecutive query tokens of one sequence that attention takes at once.
    struct QueryTile {
        int32_t seq;
        int32_t token;
        int32_t tokens;
    };

    void validate(const StepBatch &batch) const;
    void make_tiles();
    void plan_jobs();
    void copy_blocks(int64_t begin, int64_t end);

    // A region's items in this step (0: nothing to do), and the work on a range of them.
    Job job_of(const RowsRegion &region, int64_t rows) const;
    Job job_of(const LinearRegion &region, int64_t rows) const;
    Job job_of(const LogitsRegion &region, int64_t rows) const;
    Job job_of(AttentionRegion &region, int64_t rows) const;
    void run(const RowsRegion &region, int64_t rows, int thread, int64_t begin, int64_t end);
    void run(const LinearRegion &region, int64_t rows, int thread, int64_t begin, int64_t end);
    void run(const LogitsRegion &region, int64_t rows, int thread, int64_t begin, int64_t end);
    void run(const AttentionRegion &region, int64_t rows, int thread, int64_t begin, int64_t end);
    void merge(const AttentionRegion &region, int64_t begin, int64_t end);

    AttentionShape shape_of(const AttentionRegion &region) const;
    AttentionQuery query_of(const AttentionRegion &region, const QueryTile &tile,
                            int64_t head) const;
    int64_t pieces_of(const AttentionRegion &region, const QueryTile &tile) const;
    void finish(const AttentionRegion &region, const QueryTile &tile, int64_t head,
                const float *state) const;
    float *slot(int64_t item) const;

    void run(const EmbedStep &step, int64_t row, int64_t rows);
    void run(const NormStep &step, int64_t row, int64_t rows);
    void run(const AddStep &step, int64_t row, int64_t rows);
    void run(const GateStep &step, int64_t row, int64_t rows);
    void run(const PrepareStep &step, int64_t row, int64_t rows);
    void run(const AngleStep &step, int64_t row, int64_t rows);
    void run(const RopeStoreStep &step, int64_t row, int64_t rows);
    void run(const GatherStep &step, int64_t row, int64_t rows);

    float *row_of(const Value &value, int64_t row) const {
        return reinterpret_cast<float *>(activations_.data() + value.offset) + row * value.stride;
    }
    int64_t row_count(bool selected) const { return selected ? batch_.logits : batch_.tokens; }
    const int32_t *table(int64_t group, int64_t seq) const {
        return batch_.block_tables +
               (group * config_.max_seqs + batch_.seq_slots[seq]) * config_.max_blocks_per_seq;
    }
    int64_t head_bytes() const { return config_.head_dim * config_.block_size * 2; }

    void check_value(const Value &value, int64_t width, bool selected, const char *what) const;
    void check_matrix(int64_t index) const;
    void check_vector(int64_t index, int64_t size) const;
    void check_activations(int64_t offset, Format format, int64_t k, bool selected) const;
    void check_layer(int64_t group, int64_t layer) const;

    const Tier &tier_;
    const RuntimeConfig config_;
    const int64_t block_bytes_;
    std::shared_ptr<ThreadPool> shared_pool_;
    ThreadPool &pool_;
    Memory weights_;
    size_t weights_used_ = 0;
    std::vector<PackedMatrix> matrices_;
    std::vector<std::vector<float>> vectors_;
    std::vector<RopeTable> ropes_;
    std::vector<Region> regions_;
    std::vector<Job> jobs_;            // of this step
    std::vector<int64_t> job_regions_; // the region of each; -1: the copies
    std::vector<ThreadPool::Time> job_ends_;
    Memory activations_;
    Memory logits_;
    Memory arena_;

    // Attention's work space: states of partitions that wait to be merged, and each thread's own.
    int64_t tile_tokens_;
    int64_t split_below_; // items; with fewer, single tokens' partitions are spread over threads
    int64_t thread_floats_;
    Memory partial_states_;
    Memory thread_space_;

    // The step being run.
    StepBatch batch_{};
    std::vector<int32_t> token_seqs_; // [max_tokens]
    std::vector<QueryTile> tiles_;
    int64_t num_tiles_ = 0;
    mutable std::vector<uint8_t> slot_seen_; // [max_seqs], all zero between steps
    bool profiling_ = false;
};

} // namespace octavo

// A model's step on packed weights and a paged KV cache: the ops of a lowered Program, run over a
// batch by a thread pool, in one call. Further Programs may share weights, cache and threads.
#pragma once

#include <algorithm>
#include <chrono>
#include <deque>
#include <exception>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "experts.h"
#include "memory.h"
#include "paged_attention.h"
#include "recurrence.h"
#include "thread_pool.h"
#include "tier.h"

namespace octavo {

// Layers whose keys and values lie in the same blocks, in their order.
struct KvGroup {
    int64_t layers;
    int64_t window; // 0: none
    int64_t kv_heads;
    int64_t head_dim;
};

struct RuntimeConfig {
    int64_t max_tokens;
    int64_t max_logits_rows;
    int64_t logits_slice; // rows whose logits are held at a time: whole panels, or all
    int64_t max_seqs;
    int64_t max_blocks_per_seq;
    int64_t num_blocks;
    int64_t vocab_size;
    std::vector<KvGroup> groups;
    int64_t block_size;  // tokens
    int64_t block_bytes; // of any group: what the largest takes, or more
    int64_t num_heads;
    KvKind kv_kind;
    StateConfig state;

    // Of a group's block: keys and values of one head of one layer, and of all.
    int64_t head_bytes(const KvGroup &group) const {
        return block_size / kTokenTile * KvTileBytes::of(kv_kind, group.head_dim).total();
    }
    int64_t group_bytes(const KvGroup &group) const {
        return group.layers * group.kv_heads * head_bytes(group);
    }
};

// A matrix [rows, width] of floats in an activation arena, which has room for some number of rows:
// it begins at offset times that number, and its rows are `stride` floats apart.
struct Value {
    int64_t offset; // bytes a row of the arena
    int64_t stride;
    bool local;        // lives between two meetings of the threads only: in the thread's own arena
    int64_t first = 0; // element of each row that it begins with: it is part of a wider one
};
// Rows prepared for linear layers, laid out likewise.
struct Prepared {
    int64_t offset;
    bool local;
};

// Row-wise steps: each reads and writes one token's rows only.
struct EmbedStep {
    int64_t matrix;
    Value out;
    float scale;
};
// Takes over the row that the batch brings.
struct InputStep {
    Value out;
    int64_t width;
};
// Computes a function of the tier (kernels.h), `group` elements of a row at a time.
struct FunctionStep {
    std::string name;
    std::vector<Value> inputs;
    std::vector<int64_t> weights;
    std::vector<float> numbers;
    Value out;
    int64_t width;
    int64_t group;
    const RowFunction *function = nullptr; // of the tier, when checked
    bool wide = false;                     // weights are as wide as a row, when checked
};
// Prepares a row for linear layers of a format, its elements in an order that was added, or as they
// come (-1).
struct PrepareStep {
    Value x;
    int64_t format;
    int64_t k;
    Prepared out;
    int64_t order;
};
// Fills a row of cosines and sines (dim each) for the token's position.
struct AngleStep {
    int64_t rope;
    Value out;
    int64_t ahead; // positions by which the token counts as a later one: 0 or 1
};
struct RopeStoreStep {
    Value q, k, v, angles;
    int64_t rope;
    int64_t group; // of KV blocks
    int64_t layer; // within the group
};
// Rotates the queries of a layer that stores no keys.
struct RotateStep {
    Value q, angles;
    int64_t rope;
    int64_t heads;
    int64_t head_dim;
};
// Multiplies a row by 1 + beta * log(1 + floor(position / original)).
struct ScaleByPositionStep {
    Value x, out;
    int64_t width;
    double beta;
    int64_t original;
};
// Row r of out = row logits_rows[r] of x.
struct GatherStep {
    Value x, out;
    int64_t width;
};
// Row r of out = row r of x, then that of y, which are as wide.
struct ConcatStep {
    Value x, y, out;
    int64_t width; // of one
};
// Puts a row by for the caller (hidden()).
struct KeepStep {
    Value x;
    int64_t width;
};
// Multiplies `group` elements of a row at a time by the sigmoid of one gate.
struct GateStep {
    Value x, gate, out;
    int64_t width;
    int64_t group;
};
// Chooses the row's experts by its logits.
struct RouteStep {
    Value logits;
    int64_t routing;
    int64_t bias, factors; // vectors of an element an expert, or -1
};
// Copies a prepared row to the slots of its choices.
struct SpreadStep {
    Prepared rows;
    int64_t format;
    int64_t k;
    int64_t routing;
    Prepared slots;
};
// Prepares rows for experts that each take the elements in an order of their own, or as they come
// (-1): a row for all its choices, or a slot's own row.
struct PrepareEachStep {
    Value x;
    bool of_slots;
    int64_t format;
    int64_t k;
    int64_t routing;
    std::vector<int64_t> orders; // of the experts
    Prepared slots;
};
// The sum of what the row's experts have made of it, by their weights.
struct CombineStep {
    Value slots;
    int64_t routing;
    Value out;
    int64_t width;
};
using RowStep =
    std::variant<EmbedStep, InputStep, FunctionStep, PrepareStep, AngleStep, RopeStoreStep,
                 RotateStep, ScaleByPositionStep, GatherStep, ConcatStep, KeepStep, GateStep,
                 RouteStep, SpreadStep, PrepareEachStep, CombineStep>;

// Regions: each begins when the one before is done.
struct RowsRegion {
    std::vector<RowStep> steps;
};
struct LinearPart {
    int64_t matrix;
    Prepared activations;
    Value out;
    int64_t bias; // a vector, or -1
};
struct LinearRegion {
    std::vector<LinearPart> parts;
    bool accumulate;
    int64_t blocks = 0; // column blocks of all parts
};
struct AttentionRegion {
    Value q, out;
    PagedAttention::Layer layer;
    int64_t sinks; // a vector of a score a head, or -1
    int64_t heads; // of queries
};
struct RecurrentLayer {
    RecurrenceShape shape;
    int64_t inputs; // parts of the state: the convolution's last inputs,
    int64_t matrix; // and matrices, or -1
    Value x;        // the convolution's inputs
    std::vector<Value> gates;
    int64_t weight; // a vector [taps][channels]
    int64_t bias;   // a vector, or -1
};
struct RecurrentRegion {
    RecurrentLayer layer;
    Value out;
};
// Follows a layer's RecurrentRegion.
struct HistoryRegion {
    RecurrentLayer layer;
};
struct LogitsRegion {
    int64_t matrix;
    Prepared activations;
    float softcap;
};
// Gives the choices of all rows their slots. One item.
struct SortRegion {
    int64_t routing;
};
// Steps of slots: their values have a row a slot, and room for as many as rows can take.
struct SlotsRegion {
    int64_t routing;
    std::vector<RowStep> steps; // functions and preparations
};
// Linear layers of each expert on its slots.
struct ExpertsPart {
    std::vector<int64_t> matrices; // of the experts, alike
    Prepared activations;
    Value out;
    std::vector<int64_t> biases; // vectors of the experts, or none
};
struct ExpertsRegion {
    int64_t routing;
    std::vector<ExpertsPart> parts;
    int64_t units = 0; // of column blocks, of all parts of an expert
};

struct Region {
    std::string name;
    bool selected; // over the rows that want logits only
    std::variant<RowsRegion, LinearRegion, AttentionRegion, RecurrentRegion, HistoryRegion,
                 LogitsRegion, SortRegion, SlotsRegion, ExpertsRegion>
        work;
    double seconds = 0.0;
};

// Regions that run one after the other.
struct Program {
    std::vector<Region> regions;
    bool embeds = false;      // its tokens have ids
    bool cached = false;      // … and are of sequences, which have a place in the KV cache
    bool recurrent = false;   // … and have a state
    bool keeps = false;       // it puts rows by for the caller
    bool keeps_all = false;   // … and not those that want logits only
    int64_t input_width = 0;  // its tokens bring rows of this width; 0: none
    int64_t outputs = 0;      // logits a row
    std::vector<int32_t> ids; // the tokens that they stand for, where it is drafted with
};

// One step's arrays (executor/base.py); nothing is trusted.
struct StepBatch {
    const int32_t *token_ids;
    const float *rows; // [tokens, input_width]
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
    StateStep state;
};

// Rows to guess tokens from, and room for what is guessed; nothing is trusted.
struct DraftBatch {
    const float *rows;     // [sequences, width]
    const int32_t *tokens; // the last one of each sequence
    const int32_t *most;   // tokens to guess for each, at most `depth`
    int64_t sequences;
    int64_t depth;
    float least;      // a draft less probable than this, as a whole, ends
    int32_t *drafted; // [sequences, depth]; -1: none
    float *chances;   // [sequences, depth]; of each token, those before it given
};

// A draft that is made while its caller goes on: with arrays of its own.
struct DraftAhead {
    std::vector<int64_t> programs;
    std::vector<float> rows;
    std::vector<int32_t> tokens, most;
    int64_t depth = 0; // the runtime says
    float least = 0.0f;
    std::vector<int32_t> drafted;
    std::vector<float> chances;
    std::exception_ptr failure;

    DraftBatch batch() {
        return {rows.data(), tokens.data(), most.data(),    int64_t(tokens.size()),
                depth,       least,         drafted.data(), chances.data()};
    }
};

class Runtime {
  public:
    // `pool` may be another runtime's, if no two ever run at the same time.
    Runtime(const Tier &tier, const RuntimeConfig &config, std::shared_ptr<ThreadPool> pool);
    ~Runtime() { cancel_draft(); }

    // For others to run on between steps; may outlive the runtime.
    std::shared_ptr<ThreadPool> pool() const { return shared_pool_; }
    const Tier &tier() const { return tier_; }
    const RuntimeConfig &config() const { return config_; }
    int64_t block_bytes() const { return config_.block_bytes; }
    size_t weight_bytes() const;
    size_t arena_bytes() const { return arena_.size(); }
    std::byte *block(int64_t index) const { return arena_.data() + index * config_.block_bytes; }

    // Building, for one program after the other: weights, whose packed sizes are known beforehand,
    // then regions over an activation arena, which all programs share. A matrix's rows are packed
    // from file blocks, in whole column blocks and any order. All throw std::invalid_argument for
    // what could make a step go out of bounds.
    static size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }
    void allocate_weights(size_t bytes);
    int64_t add_matrix(Format format, int64_t n, int64_t k, int64_t group);
    void pack_rows(int64_t matrix, int64_t first, int64_t last, const std::byte *data,
                   int64_t bytes);
    // Input i of the matrices that are prepared for with it is element order[i] of a row.
    int64_t add_order(std::vector<int32_t> order);
    int64_t add_vector(std::vector<float> values);
    // Another vector times a factor.
    int64_t scale_vector(int64_t vector, float factor);
    // A rotation of the leading `dim` elements of a head by position * frequencies[i], which also
    // multiplies them by `magnitude`.
    int64_t add_rope(int64_t dim, bool interleaved, const std::vector<double> &frequencies,
                     double magnitude);
    int64_t add_routing(int64_t experts, int64_t chosen, const Gating &gating);
    // Bytes a row of the arena that a value of slots takes, with so many bytes a slot.
    int64_t slots_row_bytes(int64_t experts, int64_t chosen, int64_t slot_bytes) const {
        const int64_t most = Routing::most_slots(experts, chosen, config_.max_tokens);
        return (most * slot_bytes + config_.max_tokens - 1) / config_.max_tokens;
    }
    // At least so many bytes for a row in the arena of all rows, and in those of the threads.
    void allocate_activations(int64_t row_bytes, int64_t local_row_bytes);
    // Its logits stand for the tokens `ids`, if any are given: one that is not drafted with needs
    // none.
    int64_t add_program(std::vector<Region> regions, std::vector<int32_t> ids);
    // The last one, which is not the only one.
    void drop_program();

    // Throws std::invalid_argument naming what is wrong with the batch; nothing has run then.
    void step(const StepBatch &batch, int64_t program);
    // Guesses tokens one behind another, each the likeliest by the logits of programs[i] (of the
    // last one from there on), which takes rows and has no attention, from a row and the token
    // before. A program that puts its rows by has the next one go on from them. Throws
    // std::invalid_argument for what does not fit together; nothing has run then. Drafting runs
    // while the caller goes on. Whatever else is computed, measured or added here cancels it first.
    void start_draft(DraftAhead ahead);
    // What was started, done; null if nothing was, or it was cancelled. Throws what went wrong.
    const DraftAhead *finish_draft();
    // What was started is lost; one that is under way, which uses all that a step does, is waited
    // for.
    void cancel_draft();
    // Logits [rows, outputs] of as many of the wanted rows, from `first` on, as a slice holds;
    // `step` computes those from 0. Throws std::invalid_argument for a row that the last step did
    // not want, or that is not the first of a panel (kernels/linear.h).
    void compute_logits(int64_t first);
    float *logits() const { return reinterpret_cast<float *>(logits_.data()); }
    int64_t logits_rows() const {
        return std::min(config_.logits_slice, batch_.logits - first_logits_);
    }
    int64_t outputs() const { return program_->outputs; }
    // The rows [kept_rows, hidden_width] that were put by; a width of 0: no program does so.
    float *hidden() const { return reinterpret_cast<float *>(hidden_.data()); }
    int64_t hidden_width() const { return hidden_width_; }
    int64_t kept_rows() const { return program_->keeps_all ? batch_.tokens : batch_.logits; }

    // Of the last step: how many times the threads met, and (if it was profiled) the last time, in
    // seconds of the steady clock.
    int64_t num_jobs() const { return int64_t(jobs_.size()); }
    double last_meeting() const {
        const auto time = jobs_.empty() ? ThreadPool::Time{} : job_ends_[jobs_.size() - 1];
        return std::chrono::duration<double>(time.time_since_epoch()).count();
    }

    void set_profiling(bool on) {
        cancel_draft();
        profiling_ = on;
    }
    const Program &program(int64_t index) const { return programs_[checked_program(index)]; }
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
    // Rows that run by themselves, and where the local values of the first of them are.
    struct Scope {
        int64_t begin, end;
        std::byte *local;
        int64_t capacity; // rows for which `local` is laid out
        float *ordered;   // the thread's, for a row in another order
    };
    // A job: regions [first, last) that threads do one after the other without meeting, a chunk of
    // rows at a time, or one region shared by its own kind of item.
    struct Span {
        size_t first, last;
        bool chunked;
    };

    size_t checked_program(int64_t index) const;
    void validate(const StepBatch &batch, const Program &program) const;
    void validate_sequences(const StepBatch &batch) const;
    // How deep the longest draft is. Throws std::invalid_argument for one longer than a sequence
    // can be, or too many of them: room is made only then.
    int64_t draft_depth(const std::vector<int32_t> &most) const;
    void validate(const std::vector<int64_t> &programs, const DraftBatch &batch) const;
    void draft_rows(const std::vector<int64_t> &programs, const DraftBatch &batch);
    void run_step(const StepBatch &batch, int64_t program);
    void slice_logits(int64_t first);
    std::pair<int64_t, float> likeliest(const float *logits, int64_t count);
    void check_region(Region &region, Program &program);
    void plan_jobs();
    void copy_blocks(int64_t begin, int64_t end);

    bool is_row_wise(size_t region) const;
    Job job_of(size_t index, int64_t rows) const;
    // A region's items in this step (0: nothing to do), and the work on a range of them.
    Job job_of(const RowsRegion &region, int64_t rows) const;
    Job job_of(const LinearRegion &region, int64_t rows) const;
    Job job_of(const LogitsRegion &region, int64_t rows) const;
    Job job_of(const AttentionRegion &region, int64_t rows) const;
    Job job_of(const RecurrentRegion &region, int64_t rows) const;
    Job job_of(const HistoryRegion &region, int64_t rows) const;
    Recurrence::Layer layer_of(const RecurrentLayer &layer) const;
    Job job_of(const SortRegion &region, int64_t rows) const;
    Job job_of(const SlotsRegion &region, int64_t rows) const;
    Job job_of(const ExpertsRegion &region, int64_t rows) const;
    void account(ThreadPool::Time start);
    void run_items(size_t index, int thread, int64_t begin, int64_t end);
    void run_chunk(const Span &span, int thread, const Scope &scope);
    void run(const RowsRegion &region, const Scope &scope, int64_t begin, int64_t end);
    void run(const LinearRegion &region, const Scope &scope, int64_t begin, int64_t end);
    void run(const LogitsRegion &region, int64_t begin, int64_t end);
    void run(const AttentionRegion &region, int thread, int64_t begin, int64_t end);
    void run(const SlotsRegion &region, int thread, int64_t begin, int64_t end);
    void run(const ExpertsRegion &region, int64_t begin, int64_t end);
    void run(const EmbedStep &step, int64_t row, const Scope &scope);
    void run(const InputStep &step, int64_t row, const Scope &scope);
    void run(const FunctionStep &step, int64_t row, const Scope &scope);
    void run(const PrepareStep &step, int64_t row, const Scope &scope);
    void run(const AngleStep &step, int64_t row, const Scope &scope);
    void run(const RopeStoreStep &step, int64_t row, const Scope &scope);
    void run(const RotateStep &step, int64_t row, const Scope &scope);
    void rotate(const RopeTable &rope, const float *angles, float *x, int64_t heads,
                int64_t head_dim) const;
    void store(const RopeStoreStep &step, const Scope &scope, int64_t begin, int64_t end);
    void run(const ScaleByPositionStep &step, int64_t row, const Scope &scope);
    void run(const GatherStep &step, int64_t row, const Scope &scope);
    void run(const ConcatStep &step, int64_t row, const Scope &scope);
    void run(const KeepStep &step, int64_t row, const Scope &scope);
    void run(const GateStep &step, int64_t row, const Scope &scope);
    void run(const RouteStep &step, int64_t row, const Scope &scope);
    void run(const SpreadStep &step, int64_t row, const Scope &scope);
    void run(const PrepareEachStep &step, int64_t row, const Scope &scope);
    void run(const CombineStep &step, int64_t row, const Scope &scope);

    // Row `row` of a value; a local one is of the scope's rows.
    float *row_of(const Value &value, int64_t row, const Scope &scope) const {
        std::byte *base = value.local ? scope.local + value.offset * scope.capacity
                                      : activations_.data() + value.offset * config_.max_tokens;
        return reinterpret_cast<float *>(base) +
               (row - (value.local ? scope.begin : 0)) * value.stride + value.first;
    }
    // The row, or its copy in an order.
    const float *in_order(const float *row, int64_t order, const Scope &scope) const;
    // A value that is not local.
    float *row_of(const Value &value, int64_t row) const {
        return reinterpret_cast<float *>(activations_.data() + value.offset * config_.max_tokens) +
               row * value.stride + value.first;
    }
    // Prepared rows that are not local.
    std::byte *base_of(const Prepared &rows) const {
        return activations_.data() + rows.offset * config_.max_tokens;
    }
    // Row `row` of prepared rows.
    std::byte *row_of(const Prepared &rows, int64_t row, size_t row_bytes,
                      const Scope &scope) const {
        std::byte *base = rows.local ? scope.local + rows.offset * scope.capacity : base_of(rows);
        return base + (row - (rows.local ? scope.begin : 0)) * int64_t(row_bytes);
    }
    size_t row_bytes(const PackedMatrix &matrix) const {
        return tier_.linear.activation_bytes(matrix.format, 1, matrix.k);
    }
    int64_t row_count(bool selected) const { return selected ? batch_.logits : batch_.tokens; }
    const int32_t *table(int64_t group, int64_t seq) const {
        return batch_.block_tables +
               (group * config_.max_seqs + batch_.seq_slots[seq]) * config_.max_blocks_per_seq;
    }

    void check_value(const Value &value, int64_t width, const char *what) const;
    void check_order(int64_t order, int64_t k) const;
    void check_function(FunctionStep &step) const;
    void check_each(const PrepareEachStep &step) const;
    void check_matrix(int64_t index) const;
    void check_vector(int64_t index, int64_t size) const;
    void check_prepared(const Prepared &rows, Format format, int64_t k) const;
    const KvGroup &checked_group(int64_t group, int64_t layer) const;
    void check_rope(int64_t rope, int64_t head_dim) const;
    void check_routing(int64_t index) const;
    // Of slots.
    void check_slots(const Value &value, int64_t width, int64_t routing, const char *what) const;
    void check_slots(const Prepared &slots, Format format, int64_t k, int64_t routing) const;
    void check_slots(RowStep &step, int64_t routing) const;
    void check_experts(ExpertsRegion &region) const;
    void check_recurrence(const RecurrentLayer &layer, bool selected);

    const Tier &tier_;
    const RuntimeConfig config_;
    std::shared_ptr<ThreadPool> shared_pool_;
    ThreadPool &pool_;
    std::vector<Memory> weights_;
    size_t weights_used_ = 0; // of the last
    std::vector<PackedMatrix> matrices_;
    std::vector<std::vector<float>> vectors_;
    std::vector<std::vector<int32_t>> orders_;
    std::vector<std::vector<float>> ordered_; // [threads], as long as the longest order
    std::vector<RopeTable> ropes_;
    std::vector<Routing> routings_;
    std::deque<Program> programs_;
    Program *program_ = nullptr; // that ran last
    std::vector<Job> jobs_;      // of this step
    std::vector<Span> spans_;    // the regions of each; none: the copies
    std::vector<ThreadPool::Time> job_ends_;
    std::vector<double> chunk_seconds_; // [threads][regions], of this step, while profiling
    int64_t row_bytes_ = 0;             // a row's, in the arena of all rows
    int64_t local_row_bytes_ = 0;
    // With no more rows than this, threads share out columns, not rows, and their arenas are one.
    const int64_t shared_rows_;
    Memory activations_;
    Memory local_activations_;
    Memory logits_;
    int64_t first_logits_ = 0; // the row that logits_ begins with
    Memory hidden_;
    int64_t hidden_width_ = 0, hidden_rows_ = 0;
    std::vector<float> scan_; // of blocks of a row of logits
    DraftAhead ahead_;
    bool drafting_ = false; // ahead
    bool drafted_ = false;  // since the last step
    Memory arena_;
    PagedAttention attention_;
    Recurrence recurrence_;

    // The step being run.
    StepBatch batch_{};
    std::vector<int32_t> token_seqs_;        // [max_tokens]
    mutable std::vector<uint8_t> slot_seen_; // [max_seqs], all zero between steps
    bool profiling_ = false;
};

// Throws std::invalid_argument unless n rows are as the kernels count on (linear.h): zeros of
// grouped formats in their range, and no E4M3 number NaN.
void check_rows(Format format, const std::byte *data, int64_t n, int64_t k, int64_t group);

} // namespace octavo

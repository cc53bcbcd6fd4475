// What one instruction-set tier offers besides linear layers: row-wise kernels and attention.
// Functions here are always inlined, so that no tier's copy of one is linked into another.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {

enum class HalfKind : int32_t { F16 = 0, BF16 = 1 };

// The order of operations of every output element depends on the sizes given and on nothing else.
struct RowKernels {
    // out = x / sqrt(mean(x²) + eps) * weight; out may be x.
    void (*rms_norm)(const float *x, const float *weight, float *out, int64_t n, float eps);
    // out = x + y; out may be either.
    void (*add)(const float *x, const float *y, float *out, int64_t n);
    // x *= scale.
    void (*scale)(float *x, float scale, int64_t n);
    // out = silu(gate) * up; out may be either.
    void (*silu)(const float *gate, const float *up, float *out, int64_t n);
    // out = gelu(gate) * up with the tanh approximation; out may be either.
    void (*gelu_tanh)(const float *gate, const float *up, float *out, int64_t n);
    // x = cap * tanh(x / cap).
    void (*softcap)(float *x, float cap, int64_t n);
    // Rotates the pairs (i, i + dim / 2) of one head; cos and sin have dim / 2 values.
    void (*rope_halves)(float *head, const float *cos, const float *sin, int64_t dim);
    // Rotates the pairs (2i, 2i + 1); cos and sin have a value an element (each pair's twice), the
    // sine of the even elements negated.
    void (*rope_pairs)(float *head, const float *cos, const float *sin, int64_t dim);
    // Rounds to 16 bits (nearest, ties to even; beyond f16's range: its largest), every
    // `stride`-th element of out.
    void (*to_half)(HalfKind kind, const float *x, uint16_t *out, int64_t n, int64_t stride);
};

// Attention walks a query's keys in chunks of kChunk positions with an online softmax (Milakov and
// Gimelshein, 2018), and starts afresh every kPartition positions, so that a long context can be
// split over threads: the partitions' results are merged in order, whoever computed them. Both
// boundaries are absolute positions.
inline constexpr int64_t kTokenTile = 16; // tokens in the lanes of a tile of keys
inline constexpr int64_t kChunk = 64;
inline constexpr int64_t kPartition = 256;

struct AttentionShape {
    int64_t heads_per_kv;
    int64_t head_dim;
    int64_t block_size; // tokens, a multiple of kTokenTile
    int64_t block_bytes;
    HalfKind kind;
    float scale;
    float softcap;  // 0: none
    int64_t window; // 0: none

    [[gnu::always_inline]] int64_t padded_dim() const { return (head_dim + 15) / 16 * 16; }
    // Floats of the running maximum, sum and weighted values of `rows` rows (a query of one head).
    [[gnu::always_inline]] int64_t state_floats(int64_t rows) const {
        return rows * (padded_dim() + 2);
    }
    [[gnu::always_inline]] int64_t scratch_floats(int64_t rows) const {
        return rows * (head_dim + 16) + state_floats(rows) + 16 * kChunk;
    }
};

// Queries of consecutive tokens of one sequence, on one KV head.
struct AttentionQuery {
    const float *q; // head g of token t: q + t * ldq + g * head_dim
    int64_t ldq;
    int64_t position; // of the first token
    int64_t tokens;
    const int32_t *blocks; // the sequence's block table
    // Keys [block_size / 16][head_dim][16] and values [block_size][head_dim] of this layer and head
    // in block 0; a block further is block_bytes further.
    const std::byte *keys;
    const std::byte *values;

    // First and one past the last partition that any of the tokens sees.
    [[gnu::always_inline]] int64_t first_partition(int64_t window) const {
        const int64_t low = position - window + 1;
        return window > 0 && low > 0 ? low / kPartition : 0;
    }
    [[gnu::always_inline]] int64_t end_partition() const {
        return (position + tokens - 1) / kPartition + 1;
    }
};

struct AttentionKernels {
    // state = the partitions [begin, end) of all rows (token by token, head by head), merged in
    // order.
    void (*attend)(const AttentionShape &, const AttentionQuery &, int64_t begin, int64_t end,
                   float *state, float *scratch);
    // state = state merged with the next partition's.
    void (*merge)(const AttentionShape &, int64_t rows, float *state, const float *next);
    // out of head g of token t: out + t * ldo + g * head_dim.
    void (*finish)(const AttentionShape &, int64_t tokens, const float *state, float *out,
                   int64_t ldo);
};

} // namespace octavo

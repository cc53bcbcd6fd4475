// What one instruction-set tier offers besides linear layers: row-wise kernels and attention.
// Functions here are always inlined, so that no tier's copy of one is linked into another.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {

// Numbers of the KV cache. I8 and I4 are codes with a scale (I4: and a least value) for each token
// and head.
enum class KvKind : int32_t { F16 = 0, BF16 = 1, I8 = 2, I4 = 3 };

// Of a function of rows: `n` elements of each input, of each weight and of the output, which may be
// an input.
struct RowArguments {
    static constexpr size_t kInputs = 2, kWeights = 2;
    const float *inputs[kInputs];   // null: not given
    const float *weights[kWeights]; // null: not given
    const float *numbers;
    float *out;
    int64_t n;
};
// A function of rows, which programs know by its name and how many rows and weights it takes.
struct RowFunction {
    const char *name;
    size_t inputs, weights, numbers; // how many
    void (*run)(const RowArguments &);
    bool scalar = false; // its weights are single numbers, not one an element
};

// The order of operations of every output element depends on the sizes given and on nothing else.
struct RowKernels {
    // out = x + y; out may be either.
    void (*add)(const float *x, const float *y, float *out, int64_t n);
    // out += scale * x.
    void (*add_scaled)(const float *x, float scale, float *out, int64_t n);
    // x *= scale.
    void (*scale)(float *x, float scale, int64_t n);
    // x = cap * tanh(x / cap).
    void (*softcap)(float *x, float cap, int64_t n);
    // Rotates the pairs (i, i + dim / 2) of one head; cos and sin have dim / 2 values.
    void (*rope_halves)(float *head, const float *cos, const float *sin, int64_t dim);
    // Rotates the pairs (2i, 2i + 1); cos and sin have a value an element (each pair's twice), the
    // sine of the even elements negated.
    void (*rope_pairs)(float *head, const float *cos, const float *sin, int64_t dim);
    const RowFunction *functions;
    size_t num_functions;
};

// Attention over cached keys and values. It takes a query's keys in chunks of kChunk positions:
// each chunk has a softmax of its own, and the chunks' results are merged in order (the online
// softmax of Milakov and Gimelshein, 2018). The boundaries are absolute positions, so a context may
// be split over threads between any two chunks, and the bits are the same.
//
// A block holds, head by head, the keys, the values and (of codes) the scales of its tokens, in
// tiles of 16 tokens. A word is 32 bits.
//   16 bits: keys [head_dim / 2][16 tokens] words of two dimensions; values [8][head_dim] words of
//     two tokens: as the products of bf16 pairs take them. Where a tier has these and the cache is
//     bf16, queries and softmax weights are rounded to bf16 too; otherwise all arithmetic is fp32.
//   I8: keys [head_dim / 4, rounded up][16 tokens] words of four dimensions; values [4][head_dim]
//     words of four tokens; scales of keys [16], of values [16]. A number is (code - 128) * scale.
//   I4: as I8 with two codes a byte. Keys: word i has dimensions 4i … 4i + 3 in its low halves and
//     those half of a row (head_dim, rounded up to a multiple of 8) further in its high halves;
//     values: word d has dimension d and that of head_dim / 2 further. So a byte is one token's,
//     as different threads may write neighbours. Scales and least values of keys, then of values,
//     each [16]. A number is code * scale + least.
// Scales and least values are bf16, rounded so that the range covers the row. Codes are of rotated
// rows: a Walsh-Hadamard transform of each group of dimensions (as many as the largest power of two
// that divides head_dim) spreads the few large ones over all, and queries and results are rotated
// too (QuaRot: Ashkboos et al., 2024, section 4). Where a tier has dot products of bytes, queries
// (of their largest) and weighted scales (of the chunk's) are rounded to 16 bits; sums are exact.
inline constexpr int64_t kTokenTile = 16; // tokens in the lanes of a tile of keys
inline constexpr int64_t kChunk = 64;

// Bytes of a tile of tokens on one head.
struct KvTileBytes {
    int64_t keys;
    int64_t values;
    int64_t scales;

    [[gnu::always_inline]] static KvTileBytes of(KvKind kind, int64_t head_dim) {
        switch (kind) {
        case KvKind::I8:
            return {(head_dim + 3) / 4 * 4 * kTokenTile, head_dim * kTokenTile, 4 * kTokenTile};
        case KvKind::I4:
            return {(head_dim + 7) / 8 * 4 * kTokenTile, head_dim / 2 * kTokenTile, 8 * kTokenTile};
        default:
            return {head_dim * 2 * kTokenTile, head_dim * 2 * kTokenTile, 0};
        }
    }
    [[gnu::always_inline]] int64_t total() const { return keys + values + scales; }
};

struct AttentionShape {
    int64_t heads_per_kv;
    int64_t head_dim;   // even
    int64_t block_size; // tokens, a multiple of kTokenTile
    int64_t block_bytes;
    KvKind kind;
    float scale;
    float softcap;  // 0: none
    int64_t window; // 0: none

    [[gnu::always_inline]] bool quantized() const {
        return kind == KvKind::I8 || kind == KvKind::I4;
    }
    [[gnu::always_inline]] KvTileBytes tile_bytes() const {
        return KvTileBytes::of(kind, head_dim);
    }
    // Keys, values and scales of a block on one head.
    [[gnu::always_inline]] int64_t head_bytes() const {
        return block_size / kTokenTile * tile_bytes().total();
    }
    [[gnu::always_inline]] int64_t padded_dim() const { return (head_dim + 15) / 16 * 16; }
    // Floats of a row's sums: of the weights, lane by lane, and of the weighted values.
    [[gnu::always_inline]] int64_t state_stride() const { return padded_dim() + 16; }
    // Floats of the state of `rows` rows (a query of one head each).
    [[gnu::always_inline]] int64_t state_floats(int64_t rows) const {
        return rows * (state_stride() + 1);
    }
    [[gnu::always_inline]] int64_t scratch_floats(int64_t rows) const {
        return rows * (padded_dim() + 16) + state_floats(16) + 16 * kChunk +
               kChunk * (head_dim + padded_dim());
    }
};

// Queries of consecutive tokens of one sequence, on one KV head.
struct AttentionQuery {
    const float *q; // head g of token t: q + t * ldq + g * head_dim
    int64_t ldq;
    int64_t position; // of the first token
    int64_t tokens;
    const int32_t *blocks; // the sequence's block table
    const std::byte *head; // of the layer, in block 0; a block further is block_bytes further

    // First and one past the last chunk that any of the tokens sees.
    [[gnu::always_inline]] int64_t first_chunk(int64_t window) const {
        const int64_t low = position - window + 1;
        return window > 0 && low > 0 ? low / kChunk : 0;
    }
    [[gnu::always_inline]] int64_t end_chunk() const {
        return (position + tokens - 1) / kChunk + 1;
    }
};

// Some of the chunks that a query sees.
struct AttentionSpan {
    AttentionQuery query;
    int64_t begin;
    int64_t end;
};

struct AttentionKernels {
    // Rounds keys and values to the slots [slot, slot + tokens) of one tile of a block, whose part
    // of this head is given (nearest, ties to even; beyond f16's range: its largest). Token t's
    // are at keys + t * ldk and values + t * ldv. Nothing of other slots is written.
    void (*store)(const AttentionShape &, int64_t slot, int64_t tokens, const float *keys,
                  int64_t ldk, const float *values, int64_t ldv, std::byte *head);
    // One state of all rows (token by token, head by head) over all chunks of the span; `apart`
    // (for a single token): one for each. What `next`, if any, begins with is fetched into the
    // cache meanwhile.
    void (*attend)(const AttentionShape &, const AttentionSpan &, const AttentionSpan *next,
                   bool apart, float *states, float *scratch);
    // The state over all chunks from the `count` states of each.
    void (*fold)(const AttentionShape &, int64_t rows, int64_t count, float *states, float *state);
    // out of head g of token t: out + t * ldo + g * head_dim. `sinks` (null: none) has a score a
    // head, in its softmax beside those of the keys, with a value of zero.
    void (*finish)(const AttentionShape &, const float *sinks, int64_t tokens, float *state,
                   float *out, int64_t ldo);
};

// Recurrent layers (models/recurrence.py), one token after the other in fp32: what a token leaves
// depends on the state that it finds and on its own row, so a sequence may be cut anywhere.
//
// The matrix of a head lies in tiles of kStateLanes columns, [depth][kStateLanes] floats each.
inline constexpr int64_t kStateLanes = 16;

// A causal convolution of n channels.
struct ConvArguments {
    const float *const *rows; // of the taps - 1 tokens before, the oldest first, then the tokens'
    int64_t tokens;
    int64_t taps;
    const float *weight; // of tap j and channel i: weight[j * ldw + i]
    int64_t ldw;
    const float *bias; // null: none
    bool silu;         // of the result
    int64_t n;
    float *out; // [tokens], ldo floats apart: n, and zeros to the next multiple of 16
    int64_t ldo;
};

// Tokens of a value head of a gated delta net.
struct DeltaRows {
    const float *q, *k; // [depth] each, `ldk` floats apart, normalised
    int64_t ldk;
    const float *v; // [kStateLanes] each for each tile, `ldv` floats apart
    int64_t ldv;
    const float *decay, *beta, *kq; // numbers; kq is the product of k and q
};

// Tokens of a head of Mamba-2.
struct MambaRows {
    const float *x; // [kStateLanes] each, `ldx` floats apart
    int64_t ldx;
    const float *b, *c; // [depth] each, `ldb` floats apart
    int64_t ldb;
    const float *dt; // numbers
    float a, d;      // of the head
};

struct RecurrenceKernels {
    void (*conv)(const ConvArguments &);
    // x *= scale / sqrt(sum of x² + 1e-6).
    void (*unit)(float *x, int64_t n, float scale);
    float (*dot)(const float *x, const float *y, int64_t n);
    // Both change a tile of the state (`delta`: as many, side by side, as `lanes` needs) by the
    // tokens and give the first `lanes` columns of what each token finds (delta net: S = g S + k d,
    // with d = (v - g Sᵀk) beta, and finds Sᵀq; Mamba-2: S = e^(dt a) S + b (dt x), and finds
    // Sᵀc + d x). Rows of out are ldo floats apart.
    void (*delta)(float *const *tiles, int64_t depth, int64_t tokens, const DeltaRows &,
                  int64_t lanes, float *out, int64_t ldo);
    void (*mamba)(float *tile, int64_t depth, int64_t tokens, const MambaRows &, int64_t lanes,
                  float *out, int64_t ldo);
};

} // namespace octavo

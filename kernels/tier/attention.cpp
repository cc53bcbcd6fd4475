#include "simd.h"
#include "tier.h"

namespace octavo {
namespace OCTAVO_TIER {
namespace {

constexpr int64_t kTilesPerChunk = kChunk / kTokenTile;

// Rows that share each load of keys and values, and the accumulators (of sixteen floats) that the
// registers hold beside the operands.
#if defined(__AVX512F__)
constexpr int64_t kMaxRows = 6;
constexpr int64_t kAccumulators = 24;
#elif defined(__AVX2__)
constexpr int64_t kMaxRows = 6;
constexpr int64_t kAccumulators = 6;
#else
constexpr int64_t kMaxRows = 2;
constexpr int64_t kAccumulators = 2;
#endif

constexpr float kLaneNumbers[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// How many vectors wide a tile of `rows` rows is.
constexpr int64_t width_for(int64_t rows) {
    return rows * 4 <= kAccumulators ? 4 : rows * 2 <= kAccumulators ? 2 : 1;
}

// The running maximum, sum and weighted values of some rows.
struct State {
    float *maximum;
    float *sum;
    float *values; // [rows][padded_dim]

    State(int64_t rows, float *floats)
        : maximum(floats), sum(floats + rows), values(floats + 2 * rows) {}
};

// The keys or values of a chunk, tile by tile.
struct Chunk {
    const uint16_t *keys[kTilesPerChunk];
    const uint16_t *values[kTilesPerChunk];
};

// scores[r][t] = q row r · keys of tile first + t, for `width` tiles; dimensions in order.
template <HalfKind kind, int64_t rows, int64_t width>
void score_tiles(const float *q, int64_t head_dim, const uint16_t *const *keys, float *scores) {
    Vec total[rows][width];
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t t = 0; t < width; ++t)
            total[r][t] = Vec::set(0.0f);
    }
    for (int64_t d = 0; d < head_dim; ++d) {
        Vec key[width];
        for (int64_t t = 0; t < width; ++t)
            key[t] = Vec::load_half<kind>(keys[t] + d * kTokenTile);
        for (int64_t r = 0; r < rows; ++r) {
            const Vec query = Vec::set(q[r * head_dim + d]);
            for (int64_t t = 0; t < width; ++t)
                total[r][t] = fma(query, key[t], total[r][t]);
        }
    }
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t t = 0; t < width; ++t)
            total[r][t].store(scores + r * kChunk + t * kTokenTile);
    }
}

template <HalfKind kind, int64_t rows>
void score(const float *q, int64_t head_dim, const Chunk &chunk, int64_t tile_begin,
           int64_t tile_end, float *scores) {
    constexpr int64_t width = width_for(rows);
    int64_t t = tile_begin;
    for (; t + width <= tile_end; t += width) {
        score_tiles<kind, rows, width>(q, head_dim, chunk.keys + t, scores + t * kTokenTile);
    }
    if constexpr (width > 2) {
        for (; t + 2 <= tile_end; t += 2)
            score_tiles<kind, rows, 2>(q, head_dim, chunk.keys + t, scores + t * kTokenTile);
    }
    for (; t < tile_end; ++t) {
        score_tiles<kind, rows, 1>(q, head_dim, chunk.keys + t, scores + t * kTokenTile);
    }
}

// values[r] = values[r] * decay[r] + sum over keys [begin, end) of the chunk, in order, of
// weight[r][key] * value[key], for `width` vectors of dimensions from `dim` (only `count` lanes of
// them where partial).
template <HalfKind kind, int64_t rows, int64_t width, bool partial>
void weigh_columns(const float *weights, const float *decay, const AttentionShape &shape,
                   const Chunk &chunk, int64_t begin, int64_t end, int64_t dim, float *values) {
    const int64_t stride = shape.padded_dim();
    Vec total[rows][width];
    for (int64_t r = 0; r < rows; ++r) {
        const Vec factor = Vec::set(decay[r]);
        for (int64_t v = 0; v < width; ++v) {
            total[r][v] = Vec::load(values + r * stride + dim + v * kLanes) * factor;
        }
    }
    for (int64_t tile = begin / kTokenTile; tile * kTokenTile < end; ++tile) {
        const int64_t base = tile * kTokenTile;
        const int64_t first = begin > base ? begin - base : 0;
        const int64_t last = end - base < kTokenTile ? end - base : kTokenTile;
        const uint16_t *row = chunk.values[tile] + first * shape.head_dim + dim;
        for (int64_t key = first; key < last; ++key, row += shape.head_dim) {
            Vec value[width];
            for (int64_t v = 0; v < width; ++v) {
                if constexpr (partial) {
                    value[v] = load_half_first<kind>(row, shape.head_dim - dim);
                } else {
                    value[v] = Vec::load_half<kind>(row + v * kLanes);
                }
            }
            for (int64_t r = 0; r < rows; ++r) {
                const Vec weight = Vec::set(weights[r * kChunk + base + key]);
                for (int64_t v = 0; v < width; ++v)
                    total[r][v] = fma(weight, value[v], total[r][v]);
            }
        }
    }
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t v = 0; v < width; ++v) {
            total[r][v].store(values + r * stride + dim + v * kLanes);
        }
    }
}

template <HalfKind kind, int64_t rows>
void weigh(const float *weights, const float *decay, const AttentionShape &shape,
           const Chunk &chunk, int64_t begin, int64_t end, float *values) {
    constexpr int64_t width = width_for(rows);
    int64_t dim = 0;
    for (; dim + width * kLanes <= shape.head_dim; dim += width * kLanes) {
        weigh_columns<kind, rows, width, false>(weights, decay, shape, chunk, begin, end, dim,
                                                values);
    }
    for (; dim + kLanes <= shape.head_dim; dim += kLanes) {
        weigh_columns<kind, rows, 1, false>(weights, decay, shape, chunk, begin, end, dim, values);
    }
    if (dim < shape.head_dim) {
        weigh_columns<kind, rows, 1, true>(weights, decay, shape, chunk, begin, end, dim, values);
    }
}

// One chunk for `rows` rows that all see its keys [begin, end), of which there is at least one.
// Scores and weights of the others are -inf and 0; their keys' tiles are read only where a seen key
// shares them, their values never.
template <HalfKind kind, int64_t rows>
void attend_rows(const AttentionShape &shape, const float *q, const Chunk &chunk, int64_t begin,
                 int64_t end, float *maximum, float *lane_sums, float *values, float *weights) {
    const int64_t tile_begin = begin / kTokenTile;
    const int64_t tile_end = (end + kTokenTile - 1) / kTokenTile;
    score<kind, rows>(q, shape.head_dim, chunk, tile_begin, tile_end, weights);

    const Vec lowest = Vec::set(-__builtin_inff());
    float change[kLanes] = {};
    for (int64_t r = 0; r < rows; ++r) {
        Vec top = lowest;
        for (int64_t t = 0; t < kTilesPerChunk; ++t) {
            float *scores = weights + r * kChunk + t * kTokenTile;
            Vec s = lowest;
            if (t >= tile_begin && t < tile_end) {
                s = Vec::load(scores);
                if (shape.softcap > 0.0f)
                    s = softcapped(s, shape.softcap);
                const int64_t low = begin - t * kTokenTile;
                const int64_t high = end - t * kTokenTile;
                if (low > 0 || high < kTokenTile) {
                    const Vec lane = Vec::load(kLaneNumbers);
                    s = where_ge(lane, Vec::set(float(low)), s, lowest);
                    s = where_ge(lane, Vec::set(float(high)), lowest, s);
                }
            }
            s.store(scores);
            top = max(top, s);
        }
        const float before = maximum[r];
        const float highest = largest(top);
        maximum[r] = before > highest ? before : highest;
        change[r] = before - maximum[r];
    }
    float decay[kLanes];
    exp_of_negative(Vec::load(change)).store(decay);
    for (int64_t r = 0; r < rows; ++r) {
        const Vec offset = Vec::set(maximum[r]);
        Vec part[kTilesPerChunk];
        for (int64_t t = 0; t < kTilesPerChunk; ++t) {
            float *scores = weights + r * kChunk + t * kTokenTile;
            part[t] = exp_of_negative(Vec::load(scores) - offset);
            part[t].store(scores);
        }
        const Vec added = (part[0] + part[1]) + (part[2] + part[3]);
        fma(Vec::load(lane_sums + r * kLanes), Vec::set(decay[r]), added)
            .store(lane_sums + r * kLanes);
    }
    weigh<kind, rows>(weights, decay, shape, chunk, begin, end, values);
}

template <HalfKind kind, int64_t rows = 1>
void attend_group(int64_t count, const AttentionShape &shape, const float *q, const Chunk &chunk,
                  int64_t begin, int64_t end, float *maximum, float *lane_sums, float *values,
                  float *weights) {
    if constexpr (rows < kMaxRows) {
        if (count > rows) {
            return attend_group<kind, rows + 1>(count, shape, q, chunk, begin, end, maximum,
                                                lane_sums, values, weights);
        }
    }
    attend_rows<kind, rows>(shape, q, chunk, begin, end, maximum, lane_sums, values, weights);
}

int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}
int64_t larger(int64_t a, int64_t b) {
    return a > b ? a : b;
}

// The keys of the chunk at `base` that a query at `position` sees: [begin, end) relative to base.
struct Seen {
    int64_t begin;
    int64_t end;

    Seen(const AttentionShape &shape, int64_t position, int64_t base)
        : begin(shape.window > 0 ? larger(position - shape.window + 1 - base, 0) : 0),
          end(smaller(position + 1 - base, kChunk)) {}

    bool any() const { return begin < end; }
    bool all() const { return begin == 0 && end == kChunk; }
};

Chunk find_chunk(const AttentionShape &shape, const AttentionQuery &query, int64_t base,
                 int64_t begin, int64_t end) {
    Chunk chunk{};
    const int64_t tiles_per_block = shape.block_size / kTokenTile;
    const int64_t tile_bytes = shape.head_dim * kTokenTile * int64_t(sizeof(uint16_t));
    for (int64_t t = begin / kTokenTile; t * kTokenTile < end; ++t) {
        const int64_t tile = base / kTokenTile + t;
        const int64_t offset = query.blocks[tile / tiles_per_block] * shape.block_bytes +
                               tile % tiles_per_block * tile_bytes;
        chunk.keys[t] = reinterpret_cast<const uint16_t *>(query.keys + offset);
        chunk.values[t] = reinterpret_cast<const uint16_t *>(query.values + offset);
    }
    return chunk;
}

template <HalfKind kind>
void attend_partition(const AttentionShape &shape, const AttentionQuery &query, const float *q,
                      int64_t partition, State state, float *lane_sums, float *weights) {
    const int64_t group = shape.heads_per_kv;
    const int64_t rows = query.tokens * group;
    const int64_t dim = shape.padded_dim();
    for (int64_t r = 0; r < rows; ++r)
        state.maximum[r] = -__builtin_inff();
    std::memset(lane_sums, 0, size_t(rows * kLanes) * sizeof(float));
    std::memset(state.values, 0, size_t(rows * dim) * sizeof(float));

    const int64_t last = query.position + query.tokens - 1;
    for (int64_t base = partition * kPartition; base < (partition + 1) * kPartition;
         base += kChunk) {
        const Seen first_seen(shape, query.position, base);
        const Seen last_seen(shape, last, base);
        if (last_seen.end <= 0 || first_seen.begin >= kChunk)
            continue;
        const Chunk chunk = find_chunk(shape, query, base, first_seen.begin, last_seen.end);
        const auto run = [&](int64_t row, int64_t end_row, Seen seen) {
            for (; row < end_row; row += kMaxRows) {
                attend_group<kind>(smaller(end_row - row, kMaxRows), shape,
                                   q + row * shape.head_dim, chunk, seen.begin, seen.end,
                                   state.maximum + row, lane_sums + row * kLanes,
                                   state.values + row * dim, weights);
            }
        };
        // Tokens that see all of the chunk are tiled together; the others go one by one.
        for (int64_t token = 0; token < query.tokens;) {
            const Seen seen(shape, query.position + token, base);
            int64_t next = token + 1;
            if (seen.all()) {
                while (next < query.tokens && Seen(shape, query.position + next, base).all()) {
                    ++next;
                }
            }
            if (seen.any())
                run(token * group, next * group, seen);
            token = next;
        }
    }
    for (int64_t r = 0; r < rows; ++r)
        state.sum[r] = sum(Vec::load(lane_sums + r * kLanes));
}

// A row that sees nothing of a partition has the sum 0 there, and passes through unchanged.
void merge(const AttentionShape &shape, int64_t rows, float *into, const float *next) {
    State a(rows, into);
    const State b(rows, const_cast<float *>(next));
    const int64_t dim = shape.padded_dim();
    for (int64_t r = 0; r < rows; ++r) {
        if (b.sum[r] == 0.0f)
            continue;
        float *to = a.values + r * dim;
        const float *from = b.values + r * dim;
        if (a.sum[r] == 0.0f) {
            a.maximum[r] = b.maximum[r];
            a.sum[r] = b.sum[r];
            std::memcpy(to, from, size_t(dim) * sizeof(float));
            continue;
        }
        const float top = a.maximum[r] > b.maximum[r] ? a.maximum[r] : b.maximum[r];
        float factors[kLanes] = {a.maximum[r] - top, b.maximum[r] - top};
        exp_of_negative(Vec::load(factors)).store(factors);
        a.maximum[r] = top;
        a.sum[r] = a.sum[r] * factors[0] + b.sum[r] * factors[1];
        for (int64_t d = 0; d < dim; d += kLanes) {
            const Vec scaled = Vec::load(to + d) * Vec::set(factors[0]);
            fma(Vec::load(from + d), Vec::set(factors[1]), scaled).store(to + d);
        }
    }
}

template <HalfKind kind>
void attend_kind(const AttentionShape &shape, const AttentionQuery &query, int64_t begin,
                 int64_t end, float *state, float *scratch) {
    const int64_t group = shape.heads_per_kv;
    const int64_t rows = query.tokens * group;
    float *q = scratch;
    float *lane_sums = q + rows * shape.head_dim;
    float *weights = lane_sums + rows * kLanes;
    float *next = weights + kMaxRows * kChunk;
    for (int64_t token = 0; token < query.tokens; ++token) {
        const float *from = query.q + token * query.ldq;
        float *to = q + token * group * shape.head_dim;
        for (int64_t i = 0; i < group * shape.head_dim; ++i)
            to[i] = from[i] * shape.scale;
    }
    for (int64_t partition = begin; partition < end; ++partition) {
        float *target = partition == begin ? state : next;
        attend_partition<kind>(shape, query, q, partition, State(rows, target), lane_sums, weights);
        if (partition != begin)
            merge(shape, rows, state, next);
    }
}

void attend(const AttentionShape &shape, const AttentionQuery &query, int64_t begin, int64_t end,
            float *state, float *scratch) {
    if (shape.kind == HalfKind::F16) {
        attend_kind<HalfKind::F16>(shape, query, begin, end, state, scratch);
    } else {
        attend_kind<HalfKind::BF16>(shape, query, begin, end, state, scratch);
    }
}

void finish(const AttentionShape &shape, int64_t tokens, const float *state, float *out,
            int64_t ldo) {
    const int64_t group = shape.heads_per_kv;
    const int64_t dim = shape.padded_dim();
    const State from(tokens * group, const_cast<float *>(state));
    for (int64_t r = 0; r < tokens * group; ++r) {
        float *to = out + r / group * ldo + r % group * shape.head_dim;
        const float factor = 1.0f / from.sum[r];
        for (int64_t d = 0; d < shape.head_dim; ++d)
            to[d] = from.values[r * dim + d] * factor;
    }
}

constexpr AttentionKernels kKernels{attend, merge, finish};

} // namespace
} // namespace OCTAVO_TIER

const AttentionKernels &OCTAVO_TIERED(attention_kernels)() {
    return OCTAVO_TIER::kKernels;
}

} // namespace octavo

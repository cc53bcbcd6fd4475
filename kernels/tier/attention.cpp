#include "attention_chunk.h"
#include "attention_codes.h"
#include "kv_store.h"
#include "tier.h"

namespace octavo {
namespace OCTAVO_TIER {
namespace {

// How many vectors wide a tile of `rows` rows is.
template <class A> constexpr int64_t width_for(int64_t rows) {
    return rows * 4 <= A::kAccumulators ? 4 : rows * 2 <= A::kAccumulators ? 2 : 1;
}

// The arithmetics: what words the sums run over, sixteen side by side. `Stored` are words of keys
// and values; `Word` are those of queries and of weights.

// Keys and values unpacked to fp32.
struct Floats {
    using Word = float;
    using Stored = float;
    static constexpr bool kDecoded = true;
    static constexpr bool kCodes = false;
    static constexpr int64_t kPack = 1;
    static constexpr int64_t kAccumulators = OCTAVO_TIER::kAccumulators;

    using Operand = Vec;
    static Operand load(const Stored *p) { return Vec::load(p); }
    static Operand broadcast(Word word) { return Vec::set(word); }
    template <uint32_t> static Vec multiply_add(Operand a, Operand b, Vec c) {
        return fma(a, b, c);
    }

    // Of rows of values, which are padded to whole vectors.
    static Operand load_last(const Stored *p, int64_t) { return load(p); }
    static int64_t value_stride(const AttentionShape &shape) { return shape.padded_dim(); }

    static int64_t query_words(int64_t dim) { return dim; }
    static void prepare(const float *q, float factor, Word *out, int64_t n) {
        for (int64_t i = 0; i < n; ++i)
            out[i] = q[i] * factor;
    }
    // The weights of two tiles; returns their sums lane by lane, added to `sums`.
    static Vec put_weights(Vec first, Vec second, Word *out, Vec sums) {
        first.store(out);
        second.store(out + kLanes);
        return sums + (first + second);
    }
};

// The same operations in the same order, on pairs as they lie in the cache: for few rows.
template <KvKind kind> struct Halves {
    struct Word {
        float first, second;
    };
    using Stored = uint32_t;
    static constexpr bool kDecoded = false;
    static constexpr bool kCodes = false;
    static constexpr int64_t kPack = 2;
    static constexpr int64_t kAccumulators = kFewerAccumulators;

    struct Operand {
        Vec first, second;
    };
    static Operand load(const Stored *p) {
        Operand out;
        load_pairs<kind>(reinterpret_cast<const uint16_t *>(p), out.first, out.second);
        return out;
    }
    static Operand broadcast(Word word) { return {Vec::set(word.first), Vec::set(word.second)}; }
    // Only with the halves `keep` of b: the others may be anything.
    template <uint32_t keep> static Vec multiply_add(Operand a, Operand b, Vec c) {
        if constexpr ((keep & 0xffffu) != 0)
            c = fma(a.first, b.first, c);
        if constexpr (keep >> 16 != 0)
            c = fma(a.second, b.second, c);
        return c;
    }

    static Operand load_last(const Stored *p, int64_t count) {
        Operand out;
        load_pairs_first<kind>(reinterpret_cast<const uint16_t *>(p), count, out.first, out.second);
        return out;
    }
    static int64_t value_stride(const AttentionShape &shape) { return shape.head_dim; }

    static int64_t query_words(int64_t dim) { return dim / kPack; }
    static void prepare(const float *q, float factor, Word *out, int64_t n) {
        Floats::prepare(q, factor, &out->first, n);
    }
    static Vec put_weights(Vec first, Vec second, Word *out, Vec sums) {
        return Floats::put_weights(first, second, &out->first, sums);
    }
};

#if defined(__AVX512BF16__)
// Pairs of bf16, whose products are both added to an fp32 sum at once.
struct Bf16Pairs {
    using Word = uint32_t;
    using Stored = uint32_t;
    static constexpr bool kDecoded = false;
    static constexpr bool kCodes = false;
    static constexpr int64_t kPack = 2;
    static constexpr int64_t kAccumulators = OCTAVO_TIER::kAccumulators;

    using Operand = __m512i;
    static Operand load(const Stored *p) { return _mm512_loadu_si512(p); }
    static Operand broadcast(Word word) { return _mm512_set1_epi32(int(word)); }
    template <uint32_t keep> static Vec multiply_add(Operand a, Operand b, Vec c) {
        if constexpr (keep != ~0u)
            b = _mm512_and_si512(b, broadcast(keep));
        return {_mm512_dpbf16_ps(c.v, (__m512bh)a, (__m512bh)b)};
    }

    static Operand load_last(const Stored *p, int64_t count) {
        return _mm512_maskz_loadu_epi32(__mmask16((1u << count) - 1), p);
    }
    static int64_t value_stride(const AttentionShape &shape) { return shape.head_dim; }

    static int64_t query_words(int64_t dim) { return dim / kPack; }
    static void prepare(const float *q, float factor, Word *out, int64_t n) {
        for (int64_t i = 0; i < n; i += kLanes) {
            const auto mask = __mmask16((1u << smaller(n - i, kLanes)) - 1);
            const __m512 scaled =
                _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, q + i), _mm512_set1_ps(factor));
            _mm256_mask_storeu_epi32(out + i / 2, __mmask8((1u << smaller(n - i, kLanes) / 2) - 1),
                                     (__m256i)_mm512_cvtneps_pbh(scaled));
        }
    }
    // The sums are those of the rounded weights, so that the weights used add up to one.
    static Vec put_weights(Vec first, Vec second, Word *out, Vec sums) {
        const auto pairs = (__m512i)_mm512_cvtne2ps_pbh(second.v, first.v);
        _mm512_storeu_si512(out, pairs);
        return multiply_add<~0u>(pairs, broadcast(0x3f803f80u), sums); // times one
    }
};
#endif

// Fetches what there is of the next chunk where this one has nothing in its place.
void fetch_tile(const KvTileBytes &bytes, const Tiles &tiles, int64_t t) {
    for (int64_t i = 0; i < bytes.keys; i += 64)
        fetch(tiles.keys[t] + i);
    for (int64_t i = 0; i < bytes.values; i += 64)
        fetch(tiles.values[t] + i);
    for (int64_t i = 0; i < bytes.scales; i += 64)
        fetch(tiles.scales[t] + i);
}

void fetch_others(const AttentionShape &shape, Seen here, Seen next, const Tiles &ahead) {
    const KvTileBytes bytes = shape.tile_bytes();
    for (int64_t t = next.first_tile(); t < next.end_tile(); ++t) {
        if (t >= here.first_tile() && t < here.end_tile())
            continue;
        fetch_tile(bytes, ahead, t);
    }
}

// scores[r][t] = q row r · keys of tile first + t, for `width` tiles; dimensions in order.
template <class A, int64_t rows, int64_t width>
void score_tiles(const typename A::Word *q, int64_t steps, const Chunk<A> &chunk, int64_t first,
                 float *scores) {
    Vec total[rows][width];
    OCTAVO_UNROLLED
    for (int64_t r = 0; r < rows; ++r) {
        OCTAVO_UNROLLED
        for (int64_t t = 0; t < width; ++t)
            total[r][t] = Vec::set(0.0f);
    }
    for (int64_t i = 0; i < steps; ++i) {
        typename A::Operand key[width];
        OCTAVO_UNROLLED
        for (int64_t t = 0; t < width; ++t) {
            key[t] = A::load(chunk.keys[first + t] + i * kLanes);
            if constexpr (A::kPack > 1)
                fetch(chunk.ahead.keys[first + t] + i * 64);
        }
        OCTAVO_UNROLLED
        for (int64_t r = 0; r < rows; ++r) {
            const auto query = A::broadcast(q[r * steps + i]);
            OCTAVO_UNROLLED
            for (int64_t t = 0; t < width; ++t)
                total[r][t] = A::template multiply_add<~0u>(query, key[t], total[r][t]);
        }
    }
    OCTAVO_UNROLLED
    for (int64_t r = 0; r < rows; ++r) {
        OCTAVO_UNROLLED
        for (int64_t t = 0; t < width; ++t)
            total[r][t].store(scores + r * kChunk + (first + t) * kTokenTile);
    }
}

template <class A, int64_t rows>
void score(const typename A::Word *q, int64_t steps, const Chunk<A> &chunk, int64_t tile,
           int64_t tile_end, float *scores) {
    constexpr int64_t width = width_for<A>(rows);
    for (; tile + width <= tile_end; tile += width)
        score_tiles<A, rows, width>(q, steps, chunk, tile, scores);
    if constexpr (width > 2) {
        for (; tile + 2 <= tile_end; tile += 2)
            score_tiles<A, rows, 2>(q, steps, chunk, tile, scores);
    }
    for (; tile < tile_end; ++tile)
        score_tiles<A, rows, 1>(q, steps, chunk, tile, scores);
}

// The weights of the seen keys of a chunk, in words; in those that they share with unseen keys,
// these have the weight 0. Returns the highest score.
template <class A>
float weights_of(const AttentionShape &shape, const float *scores, Seen seen,
                 typename A::Word *weights, float *lane_sums) {
    Vec weight[kTilesPerChunk];
    const float highest = exponentials(shape, scores, seen, weight);
    Vec sums = Vec::set(0.0f);
    for (int64_t t = 0; t < kTilesPerChunk; t += 2) {
        if (t + 2 <= seen.first_tile() || t >= seen.end_tile())
            continue;
        sums = A::put_weights(weight[t], weight[t + 1], weights + t * kTokenTile / A::kPack, sums);
    }
    sums.store(lane_sums);
    return highest;
}

// sums[r] (or 0 where fresh) += weight[r][key] * value[key] over the keys of words [word, end) of
// the chunk, in order, for `width` vectors of dimensions from `dim`, the last of them of `last`
// dimensions. Only the halves `keep` of the values are taken: the others may be anything.
template <class A, int64_t rows, int64_t width, uint32_t keep>
void weigh_columns(const typename A::Word *weights, const Chunk<A> &chunk, int64_t word,
                   int64_t end, int64_t value_stride, int64_t dim, int64_t last, bool fresh,
                   float *sums, int64_t stride) {
    constexpr uint64_t words_per_tile = kTokenTile / A::kPack;
    Vec total[rows][width];
    OCTAVO_UNROLLED
    for (int64_t r = 0; r < rows; ++r) {
        OCTAVO_UNROLLED
        for (int64_t v = 0; v < width; ++v) {
            total[r][v] = fresh ? Vec::set(0.0f) : Vec::load(sums + r * stride + dim + v * kLanes);
        }
    }
    for (; word < end; ++word) {
        const uint64_t tile = uint64_t(word) / words_per_tile;
        const int64_t offset = int64_t(uint64_t(word) % words_per_tile) * value_stride + dim;
        const typename A::Stored *values = chunk.values[tile] + offset;
        typename A::Operand value[width];
        OCTAVO_UNROLLED
        for (int64_t v = 0; v < width; ++v) {
            const typename A::Stored *from = values + v * kLanes;
            value[v] = v + 1 < width ? A::load(from) : A::load_last(from, last);
            if constexpr (A::kPack > 1)
                fetch(chunk.ahead.values[tile] + (offset + v * kLanes) * 4);
        }
        OCTAVO_UNROLLED
        for (int64_t r = 0; r < rows; ++r) {
            const auto weight = A::broadcast(weights[r * kChunk / A::kPack + word]);
            OCTAVO_UNROLLED
            for (int64_t v = 0; v < width; ++v)
                total[r][v] = A::template multiply_add<keep>(weight, value[v], total[r][v]);
        }
    }
    OCTAVO_UNROLLED
    for (int64_t r = 0; r < rows; ++r) {
        OCTAVO_UNROLLED
        for (int64_t v = 0; v < width; ++v)
            total[r][v].store(sums + r * stride + dim + v * kLanes);
    }
}

template <class A, int64_t rows, uint32_t keep>
void weigh_words(const typename A::Word *weights, const AttentionShape &shape,
                 const Chunk<A> &chunk, int64_t word, int64_t end, bool fresh, float *sums) {
    constexpr int64_t width = width_for<A>(rows);
    int64_t dim = 0;
    const auto columns = [&]<int64_t count>() {
        const int64_t last = smaller(shape.head_dim - dim - (count - 1) * kLanes, kLanes);
        weigh_columns<A, rows, count, keep>(weights, chunk, word, end, A::value_stride(shape), dim,
                                            last, fresh, sums, shape.state_stride());
        dim += count * kLanes;
    };
    while (dim + (width - 1) * kLanes < shape.head_dim)
        columns.template operator()<width>();
    if constexpr (width > 2) {
        if (dim + kLanes < shape.head_dim)
            columns.template operator()<2>();
    }
    while (dim < shape.head_dim)
        columns.template operator()<1>();
}

// The same over keys [begin, end). A key outside has no part in it even where it shares a word.
template <class A, int64_t rows>
void weigh(const typename A::Word *weights, const AttentionShape &shape, const Chunk<A> &chunk,
           int64_t begin, int64_t end, bool fresh, float *sums) {
    if constexpr (A::kPack > 1) {
        if (begin % 2 != 0 && begin < end) {
            weigh_words<A, rows, 0xffff0000u>(weights, shape, chunk, begin / 2, begin / 2 + 1,
                                              fresh, sums);
            fresh = false;
            ++begin;
        }
    }
    if (begin / A::kPack < end / A::kPack || fresh) {
        weigh_words<A, rows, ~0u>(weights, shape, chunk, begin / A::kPack, end / A::kPack, fresh,
                                  sums);
    }
    if constexpr (A::kPack > 1) {
        if (end % 2 != 0 && begin < end)
            weigh_words<A, rows, 0x0000ffffu>(weights, shape, chunk, end / 2, end / 2 + 1, false,
                                              sums);
    }
}

// One chunk, by itself, for `rows` rows that each see a key of it, in order of position. Per row:
// the highest score, and [16 lanes of the sum of weights][weighted values].
template <class A, int64_t rows>
void attend_rows(const AttentionShape &shape, const typename A::Word *q, const Chunk<A> &chunk,
                 const Seen *seen, float *maximum, float *sums, float *space) {
    const int64_t stride = shape.state_stride();
    const int64_t words = kChunk / A::kPack;
    auto *weights = reinterpret_cast<typename A::Word *>(space);
    float *scores = space + kMaxRows * kChunk;
    score<A, rows>(q, shape.head_dim / A::kPack, chunk, seen[0].first_tile(),
                   seen[rows - 1].end_tile(), scores);
    for (int64_t r = 0; r < rows; ++r) {
        maximum[r] = weights_of<A>(shape, scores + r * kChunk, seen[r], weights + r * words,
                                   sums + r * stride);
    }
    // Together from where the last begins to where the first ends; what is before and after that,
    // row by row.
    float *values = sums + kLanes;
    const int64_t begin = (seen[rows - 1].begin + A::kPack - 1) / A::kPack * A::kPack;
    const int64_t end = seen[0].end / A::kPack * A::kPack;
    const auto alone = [&](int64_t r, int64_t from, int64_t to, bool fresh) {
        weigh<A, 1>(weights + r * words, shape, chunk, from, to, fresh, values + r * stride);
    };
    if (seen[0].begin == seen[rows - 1].begin && seen[0].end == seen[rows - 1].end) {
        weigh<A, rows>(weights, shape, chunk, seen[0].begin, seen[0].end, true, values);
    } else if (begin >= end) {
        for (int64_t r = 0; r < rows; ++r)
            alone(r, seen[r].begin, seen[r].end, true);
    } else {
        const bool fresh = seen[0].begin >= begin;
        for (int64_t r = 0; r < rows && !fresh; ++r)
            alone(r, seen[r].begin, begin, true);
        weigh<A, rows>(weights, shape, chunk, begin, end, fresh, values);
        for (int64_t r = 0; r < rows; ++r) {
            if (seen[r].end > end)
                alone(r, end, seen[r].end, false);
        }
    }
}

template <class A, int64_t rows = 1>
void attend_group(int64_t count, const AttentionShape &shape, const typename A::Word *q,
                  const Chunk<A> &chunk, const Seen *seen, float *maximum, float *sums,
                  float *space) {
    if constexpr (rows < kMaxRows) {
        if (count > rows) {
            return attend_group<A, rows + 1>(count, shape, q, chunk, seen, maximum, sums, space);
        }
    }
    if constexpr (A::kCodes) {
        A::template attend_rows<rows>(shape, q, chunk, seen, maximum, sums, space);
    } else {
        attend_rows<A, rows>(shape, q, chunk, seen, maximum, sums, space);
    }
}

// A state: each row's highest score, then each row's sums as above.
struct State {
    float *maximum;
    float *sums;

    State(int64_t rows, float *floats) : maximum(floats), sums(floats + rows) {}

    State from(const AttentionShape &shape, int64_t row) const {
        State rest = *this;
        rest.maximum += row;
        rest.sums += row * shape.state_stride();
        return rest;
    }
};

void clear_maxima(int64_t rows, float *state) {
    for (int64_t r = 0; r < rows; ++r)
        state[r] = -__builtin_inff();
}

void clear(const AttentionShape &shape, int64_t rows, float *state) {
    clear_maxima(rows, state);
    std::memset(state + rows, 0, size_t(rows * shape.state_stride()) * sizeof(float));
}

// into = into and the next chunk's, for at most kLanes rows. A row that has seen nothing of a chunk
// passes unchanged.
void merge(const AttentionShape &shape, int64_t rows, State into, const State &next) {
    const int64_t stride = shape.state_stride();
    const Vec before = load_first(into.maximum, rows);
    const Vec added = load_first(next.maximum, rows);
    const Vec top = max(before, added);
    float old_factor[kLanes], new_factor[kLanes];
    exp2_of_negative(before - top).store(old_factor);
    exp2_of_negative(added - top).store(new_factor);
    for (int64_t r = 0; r < rows; ++r) {
        if (next.maximum[r] == -__builtin_inff())
            continue;
        float *to = into.sums + r * stride;
        const float *from = next.sums + r * stride;
        const Vec old = Vec::set(old_factor[r]);
        const Vec fresh = Vec::set(new_factor[r]);
        for (int64_t i = 0; i < stride; i += kLanes)
            fma(Vec::load(from + i), fresh, Vec::load(to + i) * old).store(to + i);
    }
    store_first(top, into.maximum, rows);
}

// Where the tiles [seen.first_tile(), seen.end_tile()) of the chunk at `base` lie; the others are
// left alone.
void locate(const AttentionShape &shape, const AttentionQuery &query, int64_t base, Seen seen,
            Tiles &tiles) {
    const int64_t tiles_per_block = shape.block_size / kTokenTile;
    const KvTileBytes bytes = shape.tile_bytes();
    for (int64_t t = seen.first_tile(); t < seen.end_tile(); ++t) {
        const int64_t tile = base / kTokenTile + t;
        const int64_t within = tile % tiles_per_block;
        const std::byte *head =
            query.head + query.blocks[tile / tiles_per_block] * shape.block_bytes;
        const std::byte *values = head + tiles_per_block * bytes.keys;
        tiles.keys[t] = head + within * bytes.keys;
        tiles.values[t] = values + within * bytes.values;
        tiles.scales[t] = values + tiles_per_block * bytes.values + within * bytes.scales;
    }
}

// What the query's tokens together see of a chunk.
Seen seen_of(const AttentionShape &shape, const AttentionQuery &query, int64_t chunk) {
    Seen seen(shape, query.position, chunk * kChunk);
    seen.end = Seen(shape, query.position + query.tokens - 1, chunk * kChunk).end;
    return seen;
}

// Pairs of the cache as fp32: keys [tile][dim][16], values [token][padded dim].
template <KvKind kind>
void unpack(const AttentionShape &shape, Seen seen, const Tiles &here, const Tiles &ahead,
            float *space, Chunk<Floats> &chunk) {
    const int64_t dim = shape.head_dim;
    const int64_t padded = shape.padded_dim();
    float *values = space + kChunk * dim;
    for (int64_t t = seen.first_tile(); t < seen.end_tile(); ++t) {
        float *key = space + t * kTokenTile * dim;
        chunk.keys[t] = key;
        chunk.values[t] = values + t * kTokenTile * padded;
        for (int64_t d = 0; d < dim; d += 2, key += 2 * kTokenTile) {
            fetch(ahead.keys[t] + d * 32);
            Vec low, high;
            load_pairs<kind>(reinterpret_cast<const uint16_t *>(here.keys[t]) + d * kTokenTile, low,
                             high);
            low.store(key);
            high.store(key + kTokenTile);
        }
    }
    for (int64_t token = seen.begin / 2 * 2; token < seen.end; token += 2) {
        const int64_t t = token / kTokenTile;
        const int64_t offset = token % kTokenTile * dim;
        const auto *from = reinterpret_cast<const uint16_t *>(here.values[t]) + offset;
        float *to = values + token * padded;
        for (int64_t d = 0; d < dim; d += kLanes) {
            fetch(ahead.values[t] + (offset + 2 * d) * 2);
            Vec low, high;
            if (d + kLanes <= dim) {
                load_pairs<kind>(from + 2 * d, low, high);
            } else {
                load_pairs_first<kind>(from + 2 * d, dim - d, low, high);
            }
            low.store(to + d);
            high.store(to + padded + d);
        }
    }
}

// Codes of the cache as fp32, likewise.
template <KvKind kind>
void decode(const AttentionShape &shape, Seen seen, const Tiles &here, const Tiles &ahead,
            float *space, Chunk<Floats> &chunk) {
    const int64_t dim = shape.head_dim;
    const int64_t padded = shape.padded_dim();
    for (int64_t t = seen.first_tile(); t < seen.end_tile(); ++t) {
        float *keys = space + t * kTokenTile * dim;
        float *values = space + kChunk * dim + t * kTokenTile * padded;
        chunk.keys[t] = keys;
        chunk.values[t] = values;
        fetch_tile(shape.tile_bytes(), ahead, t);
        decode_keys<kind>(here.keys[t], here.scales[t], dim, keys);
        decode_values<kind>(here.values[t], here.scales[t], dim,
                            larger(seen.begin - t * kTokenTile, 0),
                            smaller(seen.end - t * kTokenTile, kTokenTile), padded, values);
    }
}

template <class A>
Chunk<A> chunk_of(const AttentionShape &shape, Seen seen, const Tiles &here, const Tiles &ahead,
                  float *space) {
    Chunk<A> chunk{};
    if constexpr (A::kDecoded) {
        switch (shape.kind) {
        case KvKind::F16:
            unpack<KvKind::F16>(shape, seen, here, ahead, space, chunk);
            break;
        case KvKind::BF16:
            unpack<KvKind::BF16>(shape, seen, here, ahead, space, chunk);
            break;
        case KvKind::I8:
            decode<KvKind::I8>(shape, seen, here, ahead, space, chunk);
            break;
        case KvKind::I4:
            decode<KvKind::I4>(shape, seen, here, ahead, space, chunk);
            break;
        }
    } else {
        const KvTileBytes bytes = shape.tile_bytes();
        for (int64_t t = seen.first_tile(); t < seen.end_tile(); ++t) {
            chunk.keys[t] = reinterpret_cast<const typename A::Stored *>(here.keys[t]);
            chunk.values[t] = reinterpret_cast<const typename A::Stored *>(here.values[t]);
            chunk.scales[t] = here.scales[t];
            for (int64_t i = 0; i < bytes.scales; i += 64)
                fetch(ahead.scales[t] + i);
        }
        chunk.ahead = ahead;
    }
    return chunk;
}

// The chunks [span.begin, span.end), in order, the rows of each in tiles of kMaxRows. `apart`: each
// chunk's state goes to a place of its own in `states`; otherwise all are merged to one.
template <class A>
void attend_in(const AttentionShape &shape, const AttentionSpan &span, const AttentionSpan *next,
               bool apart, float *states, float *scratch) {
    const AttentionQuery &query = span.query;
    const int64_t group = shape.heads_per_kv;
    const int64_t all_rows = query.tokens * group;
    const int64_t dim = shape.head_dim;
    auto *q = reinterpret_cast<typename A::Word *>(scratch);
    const State part(kLanes, scratch + all_rows * (shape.padded_dim() + 16));
    float *space = part.sums + kMaxRows * shape.state_stride();
    float *unpacked = space + 2 * kMaxRows * kChunk;
    const int64_t q_words = A::query_words(dim);
    for (int64_t row = 0; row < all_rows; ++row) {
        const float *from = query.q + row / group * query.ldq + row % group * dim;
        float rotated[kMaxHeadDim];
        if (shape.quantized()) {
            rotate(from, rotated, dim);
            from = rotated;
        }
        A::prepare(from, shape.scale * kLog2E, q + row * q_words, dim);
    }
    if (!apart)
        clear(shape, all_rows, states);

    Seen seen = seen_of(shape, query, span.begin);
    Tiles here{};
    locate(shape, query, span.begin * kChunk, seen, here);
    for (int64_t c = span.begin; c < span.end; ++c) {
        const int64_t base = c * kChunk;
        Tiles ahead = here;
        Seen seen_ahead;
        if (c + 1 < span.end) {
            seen_ahead = seen_of(shape, query, c + 1);
            locate(shape, query, base + kChunk, seen_ahead, ahead);
        } else if (next != nullptr) {
            seen_ahead = seen_of(shape, next->query, next->begin);
            locate(shape, next->query, next->begin * kChunk, seen_ahead, ahead);
        }
        fetch_others(shape, seen, seen_ahead, ahead);
        Chunk<A> chunk = chunk_of<A>(shape, seen, here, ahead, unpacked);

        // The tokens that see a key of the chunk are consecutive.
        const int64_t first = larger(0, base - query.position) * group;
        const int64_t end_token =
            shape.window > 0 ? base + kChunk - 1 + shape.window - query.position : query.tokens;
        const int64_t rows = smaller(end_token, query.tokens) * group - first;
        const int64_t tiles = (rows + kMaxRows - 1) / kMaxRows;
        float *state = apart ? states + (c - span.begin) * shape.state_floats(all_rows) : states;
        if (apart) // Those of the other tokens are not written.
            clear_maxima(all_rows, state);
        for (int64_t tile = 0; tile < tiles; ++tile) {
            const int64_t row = first + tile * rows / tiles;
            const int64_t count = first + (tile + 1) * rows / tiles - row;
            Seen row_seen[kMaxRows];
            for (int64_t r = 0; r < count; ++r)
                row_seen[r] = Seen(shape, query.position + (row + r) / group, base);
            const State to = apart ? State(all_rows, state).from(shape, row) : part;
            attend_group<A>(count, shape, q + row * q_words, chunk, row_seen, to.maximum, to.sums,
                            space);
            if (!apart)
                merge(shape, count, State(all_rows, state).from(shape, row), part);
            chunk.ahead = here; // once is enough
        }
        here = ahead;
        seen = seen_ahead;
    }
}

void attend(const AttentionShape &shape, const AttentionSpan &span, const AttentionSpan *next,
            bool apart, float *states, float *scratch) {
#if defined(__AVX512BF16__)
    if (shape.kind == KvKind::BF16)
        return attend_in<Bf16Pairs>(shape, span, next, apart, states, scratch);
#endif
#if defined(__AVX512VNNI__)
    if (shape.kind == KvKind::I8)
        return attend_in<Codes<KvKind::I8>>(shape, span, next, apart, states, scratch);
    if (shape.kind == KvKind::I4)
        return attend_in<Codes<KvKind::I4>>(shape, span, next, apart, states, scratch);
#endif
    if (shape.quantized() || span.query.tokens * shape.heads_per_kv > 2 * kMaxRows)
        return attend_in<Floats>(shape, span, next, apart, states, scratch);
    if (shape.kind == KvKind::F16) {
        attend_in<Halves<KvKind::F16>>(shape, span, next, apart, states, scratch);
    } else {
        attend_in<Halves<KvKind::BF16>>(shape, span, next, apart, states, scratch);
    }
}

void fold(const AttentionShape &shape, int64_t rows, int64_t count, float *states, float *state) {
    clear(shape, rows, state);
    for (int64_t c = 0; c < count; ++c) {
        for (int64_t r = 0; r < rows; r += kLanes) {
            merge(shape, smaller(kLanes, rows - r), State(rows, state).from(shape, r),
                  State(rows, states + c * shape.state_floats(rows)).from(shape, r));
        }
    }
}

// What weighted values are multiplied by where a sink has a part of the softmax. Maxima and scores
// are of powers of two.
float factor_beside(float sink, float maximum, float total) {
    const float scores[2] = {maximum, sink * 1.44269504f};
    const Vec powers = load_first(scores, 2);
    const Vec top = Vec::set(scores[scores[1] > scores[0]]);
    float parts[kLanes];
    exp2_of_negative(powers - top).store(parts);
    return parts[0] / (total * parts[0] + parts[1]);
}

void finish(const AttentionShape &shape, const float *sinks, int64_t tokens, float *state,
            float *out, int64_t ldo) {
    const int64_t group = shape.heads_per_kv;
    const int64_t rows = tokens * group;
    for (int64_t r = 0; r < rows; ++r) {
        const State from = State(rows, state).from(shape, r);
        float *to = out + r / group * ldo + r % group * shape.head_dim;
        const float total = sum(Vec::load(from.sums));
        const float factor =
            sinks == nullptr ? 1.0f / total : factor_beside(sinks[r % group], *from.maximum, total);
        float *values = from.sums + kLanes;
        if (shape.quantized())
            rotate(values, values, shape.head_dim);
        for (int64_t d = 0; d < shape.head_dim; ++d)
            to[d] = values[d] * factor;
    }
}

constexpr AttentionKernels kKernels{store, attend, fold, finish};

} // namespace
} // namespace OCTAVO_TIER

const AttentionKernels &OCTAVO_TIERED(attention_kernels)() {
    return OCTAVO_TIER::kKernels;
}

} // namespace octavo

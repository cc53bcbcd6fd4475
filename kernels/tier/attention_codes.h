// Attention on codes as they lie in the cache (the kinds I8 and I4), by dot products of unsigned
// and signed bytes. Queries, and softmax weights times the scales of values, become whole numbers
// of 16 bits: 256 * high + low, two signed bytes. Sums are exact, so that the order of their terms
// and terms of weight 0 change nothing.
#pragma once

#include "attention_chunk.h"
#include "kv_codes.h"

#if defined(__AVX512VNNI__)

namespace octavo::OCTAVO_TIER {

// The largest whole number whose parts are signed bytes.
inline constexpr float kLargestSplit = 127.0f * 256.0f + 127.0f;

// Whole numbers of up to kLargestSplit in their parts. Their order is that of saturating packs: of
// four vectors, word 4i + k has the bytes of numbers 4i … 4i + 3 of vector k.
struct Split {
    __m512i high, low;
    __m512i sums; // sums of the numbers are sums of these lanes

    explicit Split(const Vec (&x)[4]) {
        const __m512i ab = _mm512_packs_epi32(whole(x[0]), whole(x[1]));
        const __m512i cd = _mm512_packs_epi32(whole(x[2]), whole(x[3]));
        high = _mm512_packs_epi16(upper(ab), upper(cd));
        const __m512i byte = _mm512_set1_epi16(255);
        low = _mm512_packus_epi16(_mm512_and_si512(ab, byte), _mm512_and_si512(cd, byte));
        const __m512i one = _mm512_set1_epi16(1);
        sums = _mm512_add_epi32(_mm512_madd_epi16(ab, one), _mm512_madd_epi16(cd, one));
    }

  private:
    static __m512i whole(Vec x) { return _mm512_cvtps_epi32(x.v); }
    static __m512i upper(__m512i x) {
        return _mm512_srai_epi16(_mm512_add_epi16(x, _mm512_set1_epi16(128)), 8);
    }
};

template <KvKind kind> struct Codes {
    using Word = int32_t; // four signed bytes
    using Stored = uint32_t;
    static constexpr bool kDecoded = false;
    static constexpr bool kCodes = true;
    static constexpr int64_t kParts = kind == KvKind::I4 ? 2 : 1; // codes a byte
    static constexpr int64_t kSums = 2 * kParts;                  // products with a stored word

    static int64_t key_words(int64_t dim) { return key_bytes<kind>(dim) / 4; }

    // A query: for each word of keys and each of its parts, the high and the low bytes; then, as
    // floats, what a unit is worth, and all of the query times that.
    static int64_t query_words(int64_t dim) { return key_words(dim) * kSums + 2; }
    static void prepare(const float *q, float factor, Word *out, int64_t n) {
        int8_t high[kMaxHeadDim], low[kMaxHeadDim];
        Vec top = Vec::set(0.0f);
        Vec poison = top;
        for (int64_t i = 0; i < n; i += kLanes) {
            const Vec x = Vec::load(q + i);
            top = max(top, {_mm512_abs_ps(x.v)});
            poison = fma(x, Vec::set(0.0f), poison);
        }
        const float highest = largest(top);
        const float inverse = highest > 0.0f ? kLargestSplit / highest : 0.0f;
        const float unit = highest / kLargestSplit * factor + sum(poison);
        __m512i total = _mm512_setzero_si512();
        for (int64_t i = 0; i < n; i += 4 * kLanes) {
            Vec x[4];
            for (int64_t k = 0; k < 4; ++k) {
                const int64_t at = i + k * kLanes;
                x[k] = at < n ? Vec::load(q + at) * Vec::set(inverse) : Vec::set(0.0f);
            }
            const Split parts(x);
            total = _mm512_add_epi32(total, parts.sums);
            for (int64_t word = 0; word < 16; ++word) {
                const int64_t at = i + word % 4 * kLanes + word / 4 * 4;
                std::memcpy(high + at, reinterpret_cast<const int32_t *>(&parts.high) + word, 4);
                std::memcpy(low + at, reinterpret_cast<const int32_t *>(&parts.low) + word, 4);
            }
        }
        const int64_t words = key_words(n);
        for (int64_t i = 0; i < words * kParts; ++i) {
            Word *to = out + i % words * kSums + i / words * 2;
            std::memcpy(to, high + 4 * i, 4);
            std::memcpy(to + 1, low + 4 * i, 4);
        }
        const float tail[] = {unit, unit * float(_mm512_reduce_add_epi32(total))};
        std::memcpy(out + words * kSums, tail, sizeof tail);
    }

    // As attend_rows of the other arithmetics (attention.cpp): one chunk, by itself.
    template <int64_t rows>
    static void attend_rows(const AttentionShape &shape, const Word *q, const Chunk<Codes> &chunk,
                            const Seen *seen, float *maximum, float *sums, float *scores);
};

// Codes of a chunk are few enough for the nearest cache.
inline void fetch_near(const void *p) {
    __builtin_prefetch(p, 0, 3);
}

// Sixteen words of codes; the second codes of bytes where there are two.
template <KvKind kind> struct CodeOperand {
    __m512i first, second;

    static CodeOperand load(const uint32_t *p) {
        const __m512i words = _mm512_loadu_si512(p);
        if constexpr (kind == KvKind::I8)
            return {words, words};
        const __m512i four_bits = _mm512_set1_epi8(15);
        return {_mm512_and_si512(words, four_bits),
                _mm512_and_si512(_mm512_srli_epi16(words, 4), four_bits)};
    }
};

// sum += codes * four signed bytes, lane by lane. As in linear_avx512.h, written out because GCC 12
// would keep its own intrinsic's sums in memory.
inline void dot(__m512i &sum, __m512i codes, __m512i bytes) {
#ifdef __SANITIZE_ADDRESS__
    sum = _mm512_dpbusd_epi32(sum, codes, bytes);
#else
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(bytes));
#endif
}

// scores[r][t] = q row r · keys of tile first + t, for `width` tiles.
template <KvKind kind, int64_t rows, int64_t width>
void score_codes(const int32_t *q, int64_t words, const Chunk<Codes<kind>> &chunk, int64_t first,
                 float *scores) {
    using A = Codes<kind>;
    const int64_t stride = words * A::kSums + 2;
    __m512i high[rows][width], low[rows][width];
    OCTAVO_UNROLLED
    for (int64_t r = 0; r < rows; ++r) {
        OCTAVO_UNROLLED
        for (int64_t t = 0; t < width; ++t)
            high[r][t] = low[r][t] = _mm512_setzero_si512();
    }
    for (int64_t i = 0; i < words; ++i) {
        CodeOperand<kind> key[width];
        OCTAVO_UNROLLED
        for (int64_t t = 0; t < width; ++t) {
            key[t] = CodeOperand<kind>::load(chunk.keys[first + t] + i * kLanes);
            fetch_near(chunk.ahead.keys[first + t] + i * 64);
        }
        OCTAVO_UNROLLED
        for (int64_t r = 0; r < rows; ++r) {
            const int32_t *query = q + r * stride + i * A::kSums;
            const __m512i upper = _mm512_set1_epi32(query[0]);
            const __m512i lower = _mm512_set1_epi32(query[1]);
            OCTAVO_UNROLLED
            for (int64_t t = 0; t < width; ++t) {
                dot(high[r][t], key[t].first, upper);
                dot(low[r][t], key[t].first, lower);
                if constexpr (kind == KvKind::I4) {
                    dot(high[r][t], key[t].second, _mm512_set1_epi32(query[2]));
                    dot(low[r][t], key[t].second, _mm512_set1_epi32(query[3]));
                }
            }
        }
    }
    OCTAVO_UNROLLED
    for (int64_t t = 0; t < width; ++t) {
        const TileScales tile = load_scales<kind>(chunk.scales[first + t], 0);
        OCTAVO_UNROLLED
        for (int64_t r = 0; r < rows; ++r) {
            float tail[2];
            std::memcpy(tail, q + r * stride + words * A::kSums, sizeof tail);
            const Vec total = fma({_mm512_cvtepi32_ps(high[r][t])}, Vec::set(256.0f),
                                  {_mm512_cvtepi32_ps(low[r][t])});
            fma(total, tile.scale * Vec::set(tail[0]), tile.least * Vec::set(tail[1]))
                .store(scores + r * kChunk + (first + t) * kTokenTile);
        }
    }
}

// A row's weights of a chunk, four tokens a word, as Split has them.
struct CodeWeights {
    int32_t high[kChunk / 4];
    int32_t low[kChunk / 4];
    float unit;  // what one is worth
    float least; // what codes of 0 would give
};

// The scales of the values that a row sees of a chunk, and 0 of the others, which may be anything.
template <KvKind kind> struct ValueScales {
    // Codes count from the middle of their range: what rounding does to a weight then matters less.
    static constexpr float kMiddle = kind == KvKind::I4 ? 8.0f : 128.0f;

    Vec scale[kTilesPerChunk]; // in units
    Vec middle[kTilesPerChunk];
    float unit; // the largest scale has kLargestSplit of them

    ValueScales(const Chunk<Codes<kind>> &chunk, Seen seen) {
        Vec top = Vec::set(0.0f);
        for (int64_t t = 0; t < kTilesPerChunk; ++t) {
            scale[t] = middle[t] = Vec::set(0.0f);
            if (t < seen.first_tile() || t >= seen.end_tile())
                continue;
            const int64_t low = larger(seen.begin - t * kTokenTile, 0);
            const int64_t high = smaller(seen.end - t * kTokenTile, kTokenTile);
            const auto lanes = __mmask16((1u << high) - (1u << low));
            const TileScales tile = load_scales<kind>(chunk.scales[t], 1);
            scale[t].v = _mm512_maskz_mov_ps(lanes, tile.scale.v);
            middle[t].v =
                _mm512_maskz_mov_ps(lanes, fma(tile.scale, Vec::set(kMiddle), tile.least).v);
            top = max(top, scale[t]);
        }
        const float highest = largest(top);
        const Vec inverse = Vec::set(highest > 1e-30f ? kLargestSplit / highest : 0.0f);
        unit = highest / kLargestSplit;
        for (Vec &each : scale)
            each = each * inverse;
    }
};

// Returns the highest score.
template <KvKind kind>
float code_weights(const AttentionShape &shape, const ValueScales<kind> &scales,
                   const float *scores, Seen seen, CodeWeights &out, float *lane_sums) {
    Vec weight[kTilesPerChunk];
    const float highest = exponentials(shape, scores, seen, weight);
    (weight[0] + weight[1] + (weight[2] + weight[3])).store(lane_sums);
    Vec middles = Vec::set(0.0f);
    for (int64_t t = 0; t < kTilesPerChunk; ++t) {
        middles = fma(weight[t], scales.middle[t], middles);
        weight[t] = weight[t] * scales.scale[t];
    }
    const Split parts(weight);
    _mm512_storeu_si512(out.high, parts.high);
    _mm512_storeu_si512(out.low, parts.low);
    out.unit = scales.unit;
    out.least = sum(fma({_mm512_cvtepi32_ps(parts.sums)},
                        Vec::set(-ValueScales<kind>::kMiddle * out.unit), middles));
    return highest;
}

// values[r] = weight[r][key] * value[key] summed over the keys of words [word, end) of the chunk,
// for `width` vectors of the words of a row from `column` on.
template <KvKind kind, int64_t rows, int64_t width>
void weigh_codes(const CodeWeights *weights, const Chunk<Codes<kind>> &chunk, int64_t word,
                 int64_t end, int64_t row_words, int64_t column, float *values, int64_t stride) {
    constexpr int64_t kWordsPerTile = kTokenTile / 4;
    // Of the first codes of bytes, and of the second.
    __m512i high[rows][width], low[rows][width], high_2[rows][width], low_2[rows][width];
    OCTAVO_UNROLLED
    for (int64_t r = 0; r < rows; ++r) {
        OCTAVO_UNROLLED
        for (int64_t v = 0; v < width; ++v)
            high[r][v] = low[r][v] = high_2[r][v] = low_2[r][v] = _mm512_setzero_si512();
    }
    for (; word < end; ++word) {
        const int64_t tile = word / kWordsPerTile;
        const int64_t offset = word % kWordsPerTile * row_words + column;
        CodeOperand<kind> value[width];
        OCTAVO_UNROLLED
        for (int64_t v = 0; v < width; ++v) {
            // A row's last vector goes on into what follows it in the block: lanes not stored.
            value[v] = CodeOperand<kind>::load(chunk.values[tile] + offset + v * kLanes);
            fetch_near(chunk.ahead.values[tile] + (offset + v * kLanes) * 4);
        }
        OCTAVO_UNROLLED
        for (int64_t r = 0; r < rows; ++r) {
            const int64_t at = word % kWordsPerTile * kTilesPerChunk + tile;
            const __m512i upper = _mm512_set1_epi32(weights[r].high[at]);
            const __m512i lower = _mm512_set1_epi32(weights[r].low[at]);
            OCTAVO_UNROLLED
            for (int64_t v = 0; v < width; ++v) {
                dot(high[r][v], value[v].first, upper);
                dot(low[r][v], value[v].first, lower);
                if constexpr (kind == KvKind::I4) {
                    dot(high_2[r][v], value[v].second, upper);
                    dot(low_2[r][v], value[v].second, lower);
                }
            }
        }
    }
    OCTAVO_UNROLLED
    for (int64_t r = 0; r < rows; ++r) {
        const Vec unit = Vec::set(weights[r].unit), least = Vec::set(weights[r].least);
        OCTAVO_UNROLLED
        for (int64_t v = 0; v < width; ++v) {
            const int64_t at = column + v * kLanes;
            const auto lanes = __mmask16((1u << smaller(row_words - at, kLanes)) - 1);
            const auto put = [&](__m512i upper, __m512i lower, float *to) {
                const __m512i total = _mm512_add_epi32(_mm512_slli_epi32(upper, 8), lower);
                const Vec value = fma({_mm512_cvtepi32_ps(total)}, unit, least);
                _mm512_mask_storeu_ps(to, lanes, value.v);
            };
            put(high[r][v], low[r][v], values + r * stride + at);
            if constexpr (kind == KvKind::I4)
                put(high_2[r][v], low_2[r][v], values + r * stride + row_words + at);
        }
    }
}

// How many vectors wide a tile of `rows` rows is, with so many sums each, in 24 registers.
constexpr int64_t code_width(int64_t rows, int64_t sums) {
    return rows * sums * 4 <= 24 ? 4 : rows * sums * 2 <= 24 ? 2 : 1;
}

template <KvKind kind>
template <int64_t rows>
void Codes<kind>::attend_rows(const AttentionShape &shape, const Word *q, const Chunk<Codes> &chunk,
                              const Seen *seen, float *maximum, float *sums, float *scores) {
    const int64_t stride = shape.state_stride();
    const int64_t words = key_words(shape.head_dim);
    // What the rows see together: a row's weights of what it does not see are 0.
    Seen all = seen[0];
    all.end = seen[rows - 1].end;
    constexpr int64_t kTiles = code_width(rows, kSums);
    int64_t tile = all.first_tile();
    for (; tile + kTiles <= all.end_tile(); tile += kTiles)
        score_codes<kind, rows, kTiles>(q, words, chunk, tile, scores);
    for (; tile < all.end_tile(); ++tile)
        score_codes<kind, rows, 1>(q, words, chunk, tile, scores);

    CodeWeights weights[rows];
    ValueScales<kind> scales(chunk, seen[0]);
    for (int64_t r = 0; r < rows; ++r) {
        if (r > 0 && (seen[r].begin != seen[r - 1].begin || seen[r].end != seen[r - 1].end))
            scales = ValueScales<kind>(chunk, seen[r]);
        maximum[r] = code_weights<kind>(shape, scales, scores + r * kChunk, seen[r], weights[r],
                                        sums + r * stride);
    }
    const int64_t row_words = value_bytes<kind>(shape.head_dim);
    const int64_t begin = all.begin / 4, end = (all.end + 3) / 4;
    constexpr int64_t kColumns = code_width(rows, kSums);
    int64_t column = 0;
    for (; column + (kColumns - 1) * kLanes < row_words; column += kColumns * kLanes) {
        weigh_codes<kind, rows, kColumns>(weights, chunk, begin, end, row_words, column,
                                          sums + kLanes, stride);
    }
    for (; column < row_words; column += kLanes) {
        weigh_codes<kind, rows, 1>(weights, chunk, begin, end, row_words, column, sums + kLanes,
                                   stride);
    }
}

} // namespace octavo::OCTAVO_TIER

#endif

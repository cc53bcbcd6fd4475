// What the arithmetics of attention share: a chunk of keys as a query sees it, where it lies, and
// the softmax of its scores.
#pragma once

#include "simd.h"

namespace octavo::OCTAVO_TIER {

inline constexpr int64_t kTilesPerChunk = kChunk / kTokenTile;

// Rows that share each load of keys and values, and the accumulators (of sixteen floats) that the
// registers hold beside the operands, or beside operands of two vectors each.
#if defined(__AVX512F__)
inline constexpr int64_t kMaxRows = 6;
inline constexpr int64_t kAccumulators = 24;
inline constexpr int64_t kFewerAccumulators = 16;
#elif defined(__AVX2__)
inline constexpr int64_t kMaxRows = 6;
inline constexpr int64_t kAccumulators = 6;
inline constexpr int64_t kFewerAccumulators = 4;
#else
inline constexpr int64_t kMaxRows = 2;
inline constexpr int64_t kAccumulators = 2;
inline constexpr int64_t kFewerAccumulators = 2;
#endif

// Without it GCC 12 unrolls so late that the accumulators stay in memory.
#define OCTAVO_UNROLLED _Pragma("GCC unroll 8")

inline constexpr float kLaneNumbers[kLanes] = {0, 1, 2,  3,  4,  5,  6,  7,
                                               8, 9, 10, 11, 12, 13, 14, 15};

inline int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}
inline int64_t larger(int64_t a, int64_t b) {
    return a > b ? a : b;
}

// The keys of the chunk at `base` that a query at `position` sees: [begin, end) relative to base.
struct Seen {
    int64_t begin = 0;
    int64_t end = 0;

    Seen() = default;
    Seen(const AttentionShape &shape, int64_t position, int64_t base)
        : begin(shape.window > 0 ? larger(position - shape.window + 1 - base, 0) : 0),
          end(smaller(position + 1 - base, kChunk)) {}

    int64_t first_tile() const { return begin / kTokenTile; }
    int64_t end_tile() const { return (end + kTokenTile - 1) / kTokenTile; }
};

// Where the tiles of a chunk lie in the cache.
struct Tiles {
    const std::byte *keys[kTilesPerChunk];
    const std::byte *values[kTilesPerChunk];
    const std::byte *scales[kTilesPerChunk];
};

// A chunk's keys [tile][dim / pack][16 tokens] and values [tile][16 / pack tokens][stride], and the
// next chunk's tiles, to be fetched meanwhile: this one's own where there is no next, for nothing.
template <class A> struct Chunk {
    const typename A::Stored *keys[kTilesPerChunk];
    const typename A::Stored *values[kTilesPerChunk];
    const std::byte *scales[kTilesPerChunk];
    Tiles ahead;
};

inline void fetch(const void *p) {
    __builtin_prefetch(p, 0, 2);
}

// The weights e^(score - highest score) of the seen keys of a chunk (scores are in units of ln 2),
// and 0 of the others. Returns the highest score.
inline float exponentials(const AttentionShape &shape, const float *scores, Seen seen,
                          Vec (&weight)[kTilesPerChunk]) {
    const Vec lowest = Vec::set(-__builtin_inff());
    const int64_t first = seen.first_tile();
    const int64_t end = seen.end_tile();
    Vec score[kTilesPerChunk] = {lowest, lowest, lowest, lowest};
    for (int64_t t = 0; t < kTilesPerChunk; ++t) {
        if (t < first || t >= end)
            continue;
        score[t] = Vec::load(scores + t * kTokenTile);
        if (shape.softcap > 0.0f)
            score[t] = softcapped(score[t], shape.softcap * kLog2E);
        const int64_t low = seen.begin - t * kTokenTile;
        const int64_t high = seen.end - t * kTokenTile;
        if (low > 0 || high < kTokenTile) {
            const Vec lane = Vec::load(kLaneNumbers);
            score[t] = where_ge(lane, Vec::set(float(low)), score[t], lowest);
            score[t] = where_ge(lane, Vec::set(float(high)), lowest, score[t]);
        }
    }
    const float highest = largest(max(max(score[0], score[1]), max(score[2], score[3])));
    const Vec offset = Vec::set(highest);
    for (int64_t t = 0; t < kTilesPerChunk; t += 2) {
        const bool some = t + 2 > first && t < end;
        weight[t] = some ? exp2_of_negative(score[t] - offset) : Vec::set(0.0f);
        weight[t + 1] = some ? exp2_of_negative(score[t + 1] - offset) : Vec::set(0.0f);
    }
    return highest;
}

} // namespace octavo::OCTAVO_TIER

#include <algorithm>

#include "simd.h"
#include "tier.h"

namespace octavo {
namespace OCTAVO_TIER {
namespace {

static_assert(kStateLanes == kLanes);

constexpr int64_t kPartials = 4; // sums of rows i, i + 4, …, which hide the latency of a sum
constexpr int64_t kMaxTaps = 16;
// Rows lie kilobytes apart, so no prefetcher of the processor follows them.
constexpr int64_t kRowsAhead = 6;
constexpr float kUnitEps = 1e-6f;

// A vector of channels from `at` on; with `Taps` known its weights stay in registers.
template <int64_t Taps> void conv_channels(const ConvArguments &a, int64_t at, int64_t count) {
    const int64_t taps = Taps > 0 ? Taps : a.taps;
    Vec weight[Taps > 0 ? Taps : kMaxTaps];
    for (int64_t j = 0; j < taps; ++j)
        weight[j] = load_part(a.weight + j * a.ldw + at, count);
    const Vec bias = a.bias == nullptr ? Vec::set(0.0f) : load_part(a.bias + at, count);
    for (int64_t t = 0; t < a.tokens; ++t) {
        if (t + kRowsAhead < a.tokens)
            __builtin_prefetch(a.rows[t + kRowsAhead + taps - 1] + at);
        Vec sum = bias;
        for (int64_t j = 0; j < taps; ++j)
            sum = fma(weight[j], load_part(a.rows[t + j] + at, count), sum);
        (a.silu ? silu_of(sum) : sum).store(a.out + t * a.ldo + at);
    }
}

void conv(const ConvArguments &a) {
    for_vectors(a.n, [&](int64_t at, int64_t count) {
        switch (a.taps) {
        case 3:
            return conv_channels<3>(a, at, count);
        case 4:
            return conv_channels<4>(a, at, count);
        default:
            return conv_channels<0>(a, at, count);
        }
    });
}

void unit(float *x, int64_t n, float scale) {
    const float norm = __builtin_sqrtf(dot_product(x, x, n) + kUnitEps);
    const Vec factor = Vec::set(scale * (1.0f / norm));
    for_vectors(n, [&](int64_t at, int64_t count) {
        store_part(load_part(x + at, count) * factor, x + at, count);
    });
}

struct Sums {
    Vec parts[kPartials] = {Vec::set(0.0f), Vec::set(0.0f), Vec::set(0.0f), Vec::set(0.0f)};

    Vec total() const { return (parts[0] + parts[1]) + (parts[2] + parts[3]); }
};

// Calls f(i, partial) for each row of a tile.
template <class F> void for_rows(int64_t depth, F &&f) {
    int64_t i = 0;
    for (; i + kPartials <= depth; i += kPartials) {
        f(i, 0);
        f(i + 1, 1);
        f(i + 2, 2);
        f(i + 3, 3);
    }
    for (int64_t j = 0; i + j < depth; ++j)
        f(i + j, j);
}

// Tiles that are changed together share what is loaded of keys and queries, and one's sums fill the
// time in which another's are joined. More than these have no place for their sums in registers.
#if defined(__AVX512F__)
constexpr int64_t kTilesAtOnce = 2;
#else
constexpr int64_t kTilesAtOnce = 1;
#endif

// The update by a token is one pass with what the next one looks for, Sᵀk and Sᵀq.
template <int64_t Tiles>
void delta_tiles(float *const *places, int64_t depth, int64_t tokens, const DeltaRows &rows,
                 int64_t lanes, float *out, int64_t ldo) {
    float *tiles[Tiles]; // in registers: what is stored could change the places
    std::copy_n(places, Tiles, tiles);
    Sums of_key[Tiles], of_query[Tiles];
    const auto look_for = [&](int64_t c, int64_t j, Vec state, Vec key, Vec query) {
        of_key[c].parts[j] = fma(state, key, of_key[c].parts[j]);
        of_query[c].parts[j] = fma(state, query, of_query[c].parts[j]);
    };
    for_rows(depth, [&](int64_t i, int64_t j) {
        const Vec key = Vec::set(rows.k[i]), query = Vec::set(rows.q[i]);
        for (int64_t c = 0; c < Tiles; ++c)
            look_for(c, j, Vec::load(tiles[c] + i * kLanes), key, query);
    });
    for (int64_t t = 0; t < tokens; ++t) {
        const Vec decay = Vec::set(rows.decay[t]), beta = Vec::set(rows.beta[t]);
        const Vec kq = Vec::set(rows.kq[t]);
        Vec change[Tiles];
        for (int64_t c = 0; c < Tiles; ++c) {
            const Vec value = Vec::load(rows.v + t * rows.ldv + c * kLanes);
            change[c] = (value - decay * of_key[c].total()) * beta;
            const Vec found = fma(change[c], kq, decay * of_query[c].total());
            store_part(found, out + t * ldo + c * kLanes, std::min(kLanes, lanes - c * kLanes));
        }
        const float *k = rows.k + t * rows.ldk;
        // All rows are read before one is written: tiles lie whole pages apart, and a processor
        // that compares the ends of addresses would take one's row for another's.
        Vec row[Tiles];
        const auto update = [&](int64_t i) {
            const Vec key = Vec::set(k[i]);
            for (int64_t c = 0; c < Tiles; ++c)
                row[c] = fma(key, change[c], decay * Vec::load(tiles[c] + i * kLanes));
            for (int64_t c = 0; c < Tiles; ++c)
                row[c].store(tiles[c] + i * kLanes);
        };
        if (t + 1 == tokens) {
            for_rows(depth, [&](int64_t i, int64_t) { update(i); });
            return;
        }
        const float *next_k = k + rows.ldk, *next_q = rows.q + (t + 1) * rows.ldk;
        for (int64_t c = 0; c < Tiles; ++c)
            of_key[c] = of_query[c] = Sums();
        for_rows(depth, [&](int64_t i, int64_t j) {
            update(i);
            const Vec key = Vec::set(next_k[i]), query = Vec::set(next_q[i]);
            for (int64_t c = 0; c < Tiles; ++c)
                look_for(c, j, row[c], key, query);
        });
    }
}

void delta(float *const *tiles, int64_t depth, int64_t tokens, const DeltaRows &rows, int64_t lanes,
           float *out, int64_t ldo) {
    DeltaRows of_tiles = rows;
    for (int64_t done = 0; done < lanes;) {
        const int64_t left = (lanes - done + kLanes - 1) / kLanes;
        const int64_t count = std::min(left, kTilesAtOnce);
        const auto change = count == kTilesAtOnce ? delta_tiles<kTilesAtOnce> : delta_tiles<1>;
        of_tiles.v = rows.v + done;
        change(tiles + done / kLanes, depth, tokens, of_tiles, lanes - done, out + done, ldo);
        done += count * kLanes;
    }
}

void mamba(float *tile, int64_t depth, int64_t tokens, const MambaRows &rows, int64_t lanes,
           float *out, int64_t ldo) {
    for (int64_t t = 0; t < tokens; ++t) {
        const Vec dt = Vec::set(rows.dt[t]);
        const Vec decay = exp(dt * Vec::set(rows.a));
        const Vec x = Vec::load(rows.x + t * rows.ldx);
        const Vec input = dt * x;
        const float *b = rows.b + t * rows.ldb, *c = rows.c + t * rows.ldb;
        Sums found;
        for_rows(depth, [&](int64_t i, int64_t j) {
            const Vec state = Vec::load(tile + i * kLanes);
            const Vec next = fma(Vec::set(b[i]), input, decay * state);
            next.store(tile + i * kLanes);
            found.parts[j] = fma(next, Vec::set(c[i]), found.parts[j]);
        });
        store_part(fma(Vec::set(rows.d), x, found.total()), out + t * ldo, lanes);
    }
}

constexpr RecurrenceKernels kKernels{conv, unit, dot_product, delta, mamba};

} // namespace
} // namespace OCTAVO_TIER

const RecurrenceKernels &OCTAVO_TIERED(recurrence_kernels)() {
    return OCTAVO_TIER::kKernels;
}

} // namespace octavo

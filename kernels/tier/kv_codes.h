// Rows of keys and values as integer codes (the kinds I8 and I4 of kernels/kernels.h): rotation,
// rounding, and codes as fp32 again.
#pragma once

#include "simd.h"

namespace octavo::OCTAVO_TIER {

inline constexpr int64_t kMaxHeadDim = 1024;

template <KvKind kind> inline constexpr int64_t kCodeBits = kind == KvKind::I4 ? 4 : 8;

// Dimensions that a rotation mixes: the largest power of two that divides head_dim.
inline int64_t rotated_together(int64_t dim) {
    return dim & -dim;
}

// Codes of a row in a tile's words: of keys, padded to whole words of four or (I4) twice four.
template <KvKind kind> inline int64_t key_bytes(int64_t dim) {
    return kind == KvKind::I4 ? (dim + 7) / 8 * 4 : (dim + 3) / 4 * 4;
}
template <KvKind kind> inline int64_t value_bytes(int64_t dim) {
    return kind == KvKind::I4 ? dim / 2 : dim;
}

template <int distance> inline Vec butterfly(Vec x) {
    // Lane i + lane i ^ distance where the bit is clear, their difference where it is set.
    constexpr float kSigns[] = {1, -1};
    float signs[kLanes];
    for (int64_t i = 0; i < kLanes; ++i)
        signs[i] = kSigns[(i & distance) != 0];
    return fma(x, Vec::load(signs), swap_lanes<distance>(x));
}

// out = the Walsh-Hadamard transform of x, group by group, which is its own inverse. `out` has the
// padded length; what is past `dim` is set to zero. They may be the same.
inline void rotate(const float *x, float *out, int64_t dim) {
    const int64_t size = rotated_together(dim);
    const float norm = 1.0f / __builtin_sqrtf(float(size));
    for (int64_t i = 0; i < dim; i += kLanes) {
        Vec lanes = dim - i >= kLanes ? Vec::load(x + i) : load_first(x + i, dim - i);
        if (size > 1)
            lanes = butterfly<1>(lanes);
        if (size > 2)
            lanes = butterfly<2>(lanes);
        if (size > 4)
            lanes = butterfly<4>(lanes);
        if (size > 8)
            lanes = butterfly<8>(lanes);
        (lanes * Vec::set(norm)).store(out + i);
    }
    for (int64_t half = kLanes; half < size; half *= 2) {
        for (int64_t i = 0; i < dim; i += kLanes) {
            if ((i & half) != 0)
                continue;
            const Vec a = Vec::load(out + i), b = Vec::load(out + i + half);
            (a + b).store(out + i);
            (a - b).store(out + i + half);
        }
    }
}

// bf16 at least and at most x; NaN stays NaN.
inline uint16_t bf16_above(float x) {
    const uint32_t bits = bits_of(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return 0x7fc0u;
    return uint16_t((bits + ((bits >> 31) != 0 ? 0u : 0xffffu)) >> 16);
}
inline uint16_t bf16_below(float x) {
    return uint16_t(bf16_above(-x) ^ 0x8000u);
}

struct CodeScale {
    uint16_t scale;
    uint16_t least; // I4
};

// A row of codes, a byte each; `row` has the padded length, and what is past `dim` is overwritten.
// A row that holds an infinity or NaN gets the scale NaN.
template <KvKind kind> inline CodeScale encode(float *row, int64_t dim, uint8_t *codes) {
    for (int64_t i = dim; i % kLanes != 0; ++i)
        row[i] = row[0];
    Vec top = Vec::load(row);
    Vec bottom = top;
    Vec poison = Vec::set(0.0f);
    for (int64_t i = 0; i < dim; i += kLanes) {
        const Vec x = Vec::load(row + i);
        top = max(top, x);
        bottom = min(bottom, x);
        poison = fma(x, Vec::set(0.0f), poison);
    }
    const float highest = largest(top);
    const float lowest = -largest(Vec::set(0.0f) - bottom);
    CodeScale out{};
    float offset;
    float limit;
    if constexpr (kind == KvKind::I8) {
        const float largest_size = highest > -lowest ? highest : -lowest;
        out.scale = bf16_above(largest_size * (1.0f / 127.0f) + sum(poison));
        offset = 128.0f;
        limit = 255.0f;
    } else {
        out.least = bf16_below(lowest);
        const float range = highest - bfloat_to_float(out.least);
        out.scale = bf16_above(range * (1.0f / 15.0f) + sum(poison));
        offset = 0.0f;
        limit = 15.0f;
    }
    const float scale = bfloat_to_float(out.scale);
    const Vec inverse = Vec::set(scale > 0.0f ? 1.0f / scale : 0.0f);
    const Vec least = Vec::set(bfloat_to_float(out.least));
    for (int64_t i = 0; i < dim; i += kLanes) {
        const Vec steps = (Vec::load(row + i) - least) * inverse;
        // The bound is what NaN becomes.
        const Vec bounded = min(max(steps, Vec::set(-offset)), Vec::set(limit - offset));
        store_bytes(round(bounded) + Vec::set(offset), codes + i);
    }
    return out;
}

// Two codes a byte: those of the second half of a row in the high bits.
inline void pack_halves(const uint8_t *codes, int64_t half, uint8_t *out) {
    for (int64_t i = 0; i < half; ++i)
        out[i] = uint8_t(codes[i] | codes[half + i] << 4);
}

// Scales and least values of a tile of tokens, as fp32.
struct TileScales {
    Vec scale;
    Vec least;
};

// `which`: 0 of the keys, 1 of the values.
template <KvKind kind> inline TileScales load_scales(const std::byte *scales, int64_t which) {
    const auto *from = reinterpret_cast<const uint16_t *>(scales);
    if constexpr (kind == KvKind::I8) {
        const Vec scale = load_bf16(from + which * kTokenTile);
        return {scale, scale * Vec::set(-128.0f)};
    } else {
        from += which * 2 * kTokenTile;
        return {load_bf16(from), load_bf16(from + kTokenTile)};
    }
}

// A tile of keys as fp32: [dim][16 tokens].
template <KvKind kind>
inline void decode_keys(const std::byte *keys, const std::byte *scales, int64_t dim, float *out) {
    const TileScales tile = load_scales<kind>(scales, 0);
    const auto *words = reinterpret_cast<const uint32_t *>(keys);
    const int64_t half = key_bytes<KvKind::I4>(dim);
    for (int64_t d = 0; d < dim; ++d) {
        const bool high = kind == KvKind::I4 && d >= half;
        const int64_t at = high ? d - half : d;
        const int shift = int(at % 4 * 8 + (high ? 4 : 0));
        const Vec code =
            load_fields(words + at / 4 * kTokenTile, shift, (1u << kCodeBits<kind>)-1u);
        fma(code, tile.scale, tile.least).store(out + d * kTokenTile);
    }
}

// Tokens [begin, end) of a tile of values as fp32: [token][stride].
template <KvKind kind>
inline void decode_values(const std::byte *values, const std::byte *scales, int64_t dim,
                          int64_t begin, int64_t end, int64_t stride, float *out) {
    float scale[kTokenTile], least[kTokenTile];
    const TileScales tile = load_scales<kind>(scales, 1);
    tile.scale.store(scale);
    tile.least.store(least);
    const auto *words = reinterpret_cast<const uint32_t *>(values);
    const int64_t width = value_bytes<kind>(dim);
    for (int64_t token = begin; token < end; ++token) {
        const uint32_t *from = words + token / 4 * width;
        float *to = out + token * stride;
        const auto decode = [&](int64_t d, int shift) {
            const Vec code = load_fields(from + d, shift, (1u << kCodeBits<kind>)-1u);
            return fma(code, Vec::set(scale[token]), Vec::set(least[token]));
        };
        // A vector's last lanes are what follows the tile's words: numbers that nobody uses.
        const int shift = int(token % 4 * 8);
        for (int64_t d = 0; d < width; d += kLanes) {
            const int64_t count = width - d < kLanes ? width - d : kLanes;
            store_first(decode(d, shift), to + d, kind == KvKind::I8 ? kLanes : count);
            if constexpr (kind == KvKind::I4)
                store_first(decode(d, shift + 4), to + width + d, count);
        }
    }
}

} // namespace octavo::OCTAVO_TIER

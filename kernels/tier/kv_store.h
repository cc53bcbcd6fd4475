// Keys and values of consecutive tokens into a tile of the KV cache (kernels/kernels.h has the
// layout). Rows become words and bytes first; a whole line of the tile is then written at once, as
// far as its tokens are there.
#pragma once

#include "kv_codes.h"

namespace octavo::OCTAVO_TIER {

#if defined(__AVX512F__)
// Lane j of row i goes to lane i of row j.
inline void transpose(__m512i (&rows)[16]) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        a[i] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0x88);
        a[i + 4] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0xdd);
        a[i + 8] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0x88);
        a[i + 12] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; ++i) {
        rows[i] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0x88);
        rows[i + 8] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0xdd);
        rows[i + 4] = _mm512_shuffle_i32x4(a[i + 4], a[i + 12], 0x88);
        rows[i + 12] = _mm512_shuffle_i32x4(a[i + 4], a[i + 12], 0xdd);
    }
}
#endif

// Rows of words [token][words] to the lanes [first, first + tokens) of [words][16].
inline void put_key_words(const void *rows, int64_t words, int64_t tokens, int64_t first,
                          uint32_t *to) {
    int64_t w = 0;
#if defined(__AVX512F__)
    for (; tokens > 2 && w < words; w += 16) {
        const int64_t count = words - w < 16 ? words - w : 16;
        const auto columns = __mmask16((1u << count) - 1);
        const auto lanes = __mmask16(((1u << tokens) - 1) << first);
        __m512i tile[16];
        for (int64_t t = 0; t < 16; ++t) {
            const int64_t token = t - first;
            tile[t] = token >= 0 && token < tokens
                          ? _mm512_maskz_loadu_epi32(columns, static_cast<const uint32_t *>(rows) +
                                                                  token * words + w)
                          : _mm512_setzero_si512();
        }
        transpose(tile);
        for (int64_t i = 0; i < count; ++i) {
            if (tokens == kTokenTile) {
                _mm512_storeu_si512(to + (w + i) * kTokenTile, tile[i]);
            } else {
                _mm512_mask_storeu_epi32(to + (w + i) * kTokenTile, lanes, tile[i]);
            }
        }
    }
#endif
    for (; w < words; ++w) {
        for (int64_t t = 0; t < tokens; ++t) {
            std::memcpy(to + w * kTokenTile + first + t,
                        static_cast<const std::byte *>(rows) + (t * words + w) * 4, 4);
        }
    }
}

// Rows of values [token][width], of bytes or halves, to words of as many tokens as such fit one:
// [token / pack][width][pack].
template <class Piece>
inline void put_value_words(const Piece *rows, int64_t width, int64_t tokens, int64_t first,
                            Piece *to) {
    constexpr int64_t kPack = int64_t(sizeof(uint32_t) / sizeof(Piece));
    for (int64_t t = 0; t < tokens;) {
        const Piece *row = rows + t * width;
        const int64_t slot = first + t;
        Piece *at = to + slot / kPack * kPack * width + slot % kPack;
        if (slot % kPack == 0 && tokens - t >= kPack) {
            for (int64_t d = 0; d < width; ++d) {
                for (int64_t i = 0; i < kPack; ++i)
                    at[d * kPack + i] = row[i * width + d];
            }
            t += kPack;
        } else {
            for (int64_t d = 0; d < width; ++d)
                at[d * kPack] = row[d];
            ++t;
        }
    }
}

template <KvKind kind> inline void halves_of(const float *row, int64_t dim, uint16_t *out) {
    int64_t d = 0;
    for (; d + kLanes <= dim; d += kLanes)
        store_half<kind>(Vec::load(row + d), out + d);
    if (d < dim) {
        uint16_t last[kLanes];
        store_half<kind>(load_first(row + d, dim - d), last);
        std::memcpy(out + d, last, size_t(dim - d) * sizeof(uint16_t));
    }
}

template <KvKind kind>
inline void store_halves(const AttentionShape &shape, int64_t slot, int64_t tokens,
                         const float *keys, int64_t ldk, const float *values, int64_t ldv,
                         std::byte *head) {
    const int64_t dim = shape.head_dim;
    const int64_t tiles = shape.block_size / kTokenTile;
    const KvTileBytes bytes = shape.tile_bytes();
    const int64_t tile = slot / kTokenTile;
    alignas(64) uint16_t rows[kTokenTile * kMaxHeadDim];
    for (int64_t t = 0; t < tokens; ++t)
        halves_of<kind>(keys + t * ldk, dim, rows + t * dim);
    put_key_words(rows, dim / 2, tokens, slot % kTokenTile,
                  reinterpret_cast<uint32_t *>(head + tile * bytes.keys));
    for (int64_t t = 0; t < tokens; ++t)
        halves_of<kind>(values + t * ldv, dim, rows + t * dim);
    put_value_words(rows, dim, tokens, slot % kTokenTile,
                    reinterpret_cast<uint16_t *>(head + tiles * bytes.keys + tile * bytes.values));
}

template <KvKind kind>
inline void store_codes(const AttentionShape &shape, int64_t slot, int64_t tokens,
                        const float *keys, int64_t ldk, const float *values, int64_t ldv,
                        std::byte *head) {
    const int64_t dim = shape.head_dim;
    const int64_t tiles = shape.block_size / kTokenTile;
    const KvTileBytes bytes = shape.tile_bytes();
    const int64_t tile = slot / kTokenTile;
    const int64_t first = slot % kTokenTile;
    auto *scales = reinterpret_cast<uint16_t *>(head + tiles * (bytes.keys + bytes.values) +
                                                tile * bytes.scales);
    alignas(64) uint8_t rows[kTokenTile * kMaxHeadDim];
    // The row's codes, a byte each, with room to pad them.
    const auto encode_row = [&](const float *from, uint8_t *codes, uint16_t *to) {
        alignas(64) float row[kMaxHeadDim];
        rotate(from, row, dim);
        const CodeScale scale = encode<kind>(row, dim, codes);
        to[0] = scale.scale;
        if constexpr (kind == KvKind::I4)
            to[kTokenTile] = scale.least;
    };
    uint8_t codes[kMaxHeadDim + kLanes];
    const int64_t key_width = key_bytes<kind>(dim);
    for (int64_t t = 0; t < tokens; ++t) {
        encode_row(keys + t * ldk, codes, scales + first + t);
        std::memset(codes + dim, 0, 8);
        if constexpr (kind == KvKind::I4) {
            pack_halves(codes, key_width, rows + t * key_width);
        } else {
            std::memcpy(rows + t * key_width, codes, size_t(key_width));
        }
    }
    put_key_words(rows, key_width / 4, tokens, first,
                  reinterpret_cast<uint32_t *>(head + tile * bytes.keys));
    const int64_t value_width = value_bytes<kind>(dim);
    scales += bytes.scales / 4; // half the tile's
    for (int64_t t = 0; t < tokens; ++t) {
        encode_row(values + t * ldv, codes, scales + first + t);
        if constexpr (kind == KvKind::I4) {
            pack_halves(codes, value_width, rows + t * value_width);
        } else {
            std::memcpy(rows + t * value_width, codes, size_t(value_width));
        }
    }
    put_value_words(rows, value_width, tokens, first,
                    reinterpret_cast<uint8_t *>(head + tiles * bytes.keys + tile * bytes.values));
}

inline void store(const AttentionShape &shape, int64_t slot, int64_t tokens, const float *keys,
                  int64_t ldk, const float *values, int64_t ldv, std::byte *head) {
    switch (shape.kind) {
    case KvKind::F16:
        return store_halves<KvKind::F16>(shape, slot, tokens, keys, ldk, values, ldv, head);
    case KvKind::BF16:
        return store_halves<KvKind::BF16>(shape, slot, tokens, keys, ldk, values, ldv, head);
    case KvKind::I8:
        return store_codes<KvKind::I8>(shape, slot, tokens, keys, ldk, values, ldv, head);
    case KvKind::I4:
        return store_codes<KvKind::I4>(shape, slot, tokens, keys, ldk, values, ldv, head);
    }
}

} // namespace octavo::OCTAVO_TIER

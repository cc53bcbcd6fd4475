// One tile of a matrix product: R activation rows by C column blocks, over all of k.
//
// The order of operations of an element, the same in every tile shape and (up to fused rounding) in
// every tier. Quantized formats, for each group in order, with the integer dot product exact:
//
//   sum += (float(dot) · scale) · activation.scale          (multiplication, then fused add)
//   sum += min · activation.scaled_sum                      (formats with a min; fused)
//
// where scale = d or d·sc and min = m or −dmin·m, in fp32. Q6_K, whose scales cover 16 inputs:
//
//   sum += (float(dot_b) · scale_b + float(dot_a) · scale_a) · activation.scale
//
// Float formats: sum += weight · x for each input in order, in fp32 (bf16 products too: activations
// are not rounded to bf16). With `accumulate`, out + sum at the end.
#pragma once

#include "linear_layout.h"

namespace octavo {
namespace {

struct Tile {
    const uint8_t *weights; // first column block
    int64_t block_bytes;    // of a column block
    int64_t k;
    const std::byte *activations; // first row: ActivationGroup or float
    int64_t activation_stride;    // of a row, in bytes
    float *out;
    int64_t ldo;
    int64_t columns; // to write, of the tile's C · 16
    bool accumulate;
};

} // namespace
} // namespace octavo

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#include "linear_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "linear_avx2.h"
#else
#include "linear_generic.h"
#endif

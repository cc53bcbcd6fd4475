// One tile of a matrix product: R activation rows by C column blocks, over all of k.
//
// The order of operations of an element, the same in every tile shape and (up to fused rounding) in
// every tier. Q4_0, Q4_1, Q4_K, in fixed point (linear_layout.h): for each span of 8 groups in
// order, with the integer total exact,
//
//   sum += float(total) · unit                              (exact product)
//
// and at the end sum · 2^−f. The total needs no multiplications in floating point for each group,
// which is what held these formats back: a processor multiplies floats where it does its integer
// dot products. 5- and 8-bit and coded formats, for each group in order, with the integer dot
// product exact:
//
//   sum += (float(dot) · scale) · activation.scale          (multiplication, then fused add)
//   sum += min · activation.scaled_sum                      (formats with a min; fused)
//
// where scale = d or d·sc and min = m or −dmin·m, in fp32. I2, I3 and I4 are summed like the 4-bit
// formats, I8 like the 8-bit ones with min = (128 − zero)·d, left out of a group of inputs where
// none of the 16 outputs has one (linear_grouped.h). Q6_K, whose scales cover 16 inputs:
//
//   sum += (float(dot_b) · scale_b + float(dot_a) · scale_a) · activation.scale
//
// Q2_K and Q3_K, whose scales of 16 inputs are small enough for whole sums, for each file block of
// 8 groups in order:
//
//   product += float(dot_a · sc_a + dot_b · sc_b) · activation.scale     (a group; exact; fused)
//   min −= float(m_a · sum_a + m_b · sum_b) · activation.scale           (Q2_K; the same)
//   sum += product · d, sum += min · dmin                                (the block; fused)
//
// T3 and NVFP4 are summed like Q6_K, T4 like IQ4_XS, and NVFP4's sum is multiplied by its column's
// scale at the end.
//
// Float formats: sum += weight · x for each input in order, in fp32; E4M3 by groups that have a
// scale (linear_scaled.h). BF16 where the processor multiplies bf16 numbers (the avx512_bf16 tier):
// x rounded to bf16, two inputs at a time, as vdpbf16ps does it; elsewhere like the other float
// formats, activations not rounded. With `accumulate`, out + sum at the end.
#pragma once

#include "linear_layout.h"

namespace octavo {
namespace {

struct Tile {
    const uint8_t *weights; // first column block
    int64_t block_bytes;    // of a column block
    int64_t k;
    int64_t group;                // of a grouped format
    const std::byte *activations; // first cell of the first row; then those of the rows below it
    int64_t activation_step;      // bytes from a row's cell to its next
    float *out;
    int64_t ldo;
    int64_t columns; // to write, of the tile's C · 16
    bool accumulate;
};

} // namespace
} // namespace octavo

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#include "linear_grouped_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "linear_grouped_avx2.h"
#else
#include "linear_grouped_generic.h"
#endif

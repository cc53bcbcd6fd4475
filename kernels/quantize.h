// Rounding of float weights to nearest, each by itself, into the grouped formats I4 and I8
// (linear.h).
//
// For each group of a row, with L = 2^bits − 1:
//
//   asymmetric: low = min(0, smallest weight), high = max(0, largest); scale = (high − low) / L and
//               zero = rint(−low / scale), clipped to 0 … L; 0 is on the grid
//   symmetric:  scale = 2 · (largest magnitude) / L, zero = 2^(bits − 1)
//
// number = rint(w / scale + zero), clipped to 0 … L. Scales are rounded to 11 significant bits,
// which is what the kernels hold, before anything is divided by them. A group of zeros has scale 0.
// All in fp32, ties to even.
#pragma once

#include "linear.h"

namespace octavo {

// Whether there is rounding from `source` (F32, F16 or BF16) to `format` (I4 or I8).
bool can_quantize(Format source, Format format);

// Rounds `rows` rows of k weights (a multiple of 32) into rows of `format`, one after another.
// Returns -1, or the first row that holds an infinity or a NaN, or whose scales are beyond fp32;
// that row and those below it are not written.
int64_t quantize_rows(Format source, const std::byte *src, int64_t rows, int64_t k, Format format,
                      int64_t group, bool symmetric, std::byte *dst);

} // namespace octavo

// Scalar references of every weight format, written from the block definitions of the GGUF
// specification (linear.h for the grouped formats) and sharing nothing with the packed kernels:
// what those are tested against.
#pragma once

#include "linear.h"

#include <cstddef>
#include <cstdint>

namespace octavo::reference {

// Bytes of k weights (a whole number of blocks) in the file.
size_t row_bytes(Format format, int64_t k, int64_t group = 0);

// k weights of a file row, exactly as the format defines them in fp32.
void dequantize(Format format, const std::byte *row, int64_t k, float *out, int64_t group = 0);

// One row of activations rounded as `LinearKernels::prepare` does for quantized formats: 8 bits a
// group of 32, scale = max |x| / 127, ties to even; zero where max |x| < 2^-120.
void round_activations(const float *x, int64_t k, float *out);

// out[r * n + c] = sum over k of x[r * k + i] * w[c * k + i], summed in double. `magnitude`, if not
// null, gets the same sum over absolute values, to which rounding errors are proportional.
void matmul(const float *x, const float *w, int64_t rows, int64_t n, int64_t k, double *out,
            double *magnitude);

} // namespace octavo::reference

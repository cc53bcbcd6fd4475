// The instruction-set tiers: one table of kernels each, chosen once at load.
#pragma once

#include "linear.h"

namespace octavo {

const LinearKernels &linear_kernels_generic();
const LinearKernels &linear_kernels_avx2();
const LinearKernels &linear_kernels_avx512();

} // namespace octavo

// The instruction-set tiers: one table of kernels each, chosen once at load.
//
// Everything under kernels/tier/ is compiled once a tier, with OCTAVO_TIER set to its name. To keep
// the linker from mixing tiers, code there lives in namespace octavo::OCTAVO_TIER (or an anonymous
// one) and instantiates nothing from the standard library.
#pragma once

#include <string_view>

#include "kernels.h"
#include "linear.h"
#include "scan.h"

#define OCTAVO_JOIN_(a, b) a##_##b
#define OCTAVO_JOIN(a, b) OCTAVO_JOIN_(a, b)
// OCTAVO_TIERED(linear_kernels) is linear_kernels_avx2 in the AVX2 tier.
#define OCTAVO_TIERED(name) OCTAVO_JOIN(name, OCTAVO_TIER)

namespace octavo {

const LinearKernels &linear_kernels_generic();
const LinearKernels &linear_kernels_avx2();
const LinearKernels &linear_kernels_avx512();
const LinearKernels &linear_kernels_avx512_bf16();

const RowKernels &row_kernels_generic();
const RowKernels &row_kernels_avx2();
const RowKernels &row_kernels_avx512();
const RowKernels &row_kernels_avx512_bf16();

const AttentionKernels &attention_kernels_generic();
const AttentionKernels &attention_kernels_avx2();
const AttentionKernels &attention_kernels_avx512();
const AttentionKernels &attention_kernels_avx512_bf16();

const RecurrenceKernels &recurrence_kernels_generic();
const RecurrenceKernels &recurrence_kernels_avx2();
const RecurrenceKernels &recurrence_kernels_avx512();
const RecurrenceKernels &recurrence_kernels_avx512_bf16();

struct Tier {
    const char *name;
    const LinearKernels &linear;
    const RowKernels &row;
    const AttentionKernels &attention;
    const RecurrenceKernels &recurrence;
    const ScanKernels &scan;
};

// The tier of that name ("generic", "avx2", "avx512", "avx512_bf16"); "" means the best this CPU
// has. Throws std::invalid_argument naming the tier when there is none or this CPU (or its system)
// lacks it.
const Tier &find_tier(std::string_view name);

} // namespace octavo

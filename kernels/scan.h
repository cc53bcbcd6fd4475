// Passes over a row of logits: the interface between the kernels of one instruction-set tier and
// the sampler. A row is scanned in blocks; what is kept a block lets later passes skip most of it.
// Every sum has one fixed order: 16 lanes within a block, then a tree, then the blocks in order.
#pragma once

#include <cstdint>

namespace octavo {

inline constexpr int64_t kScanBlock = 128;

// Thresholds tried in one pass of a search.
inline constexpr int kScanThresholds = 4;

// Of the values x of a row that are not -infinity.
struct Moments {
    int64_t count;
    double sum;     // of shift - x
    double squares; // of (shift - x)²
};

struct ScanKernels {
    // maxima[b] = the greatest value of block b. False if a value is NaN or +infinity (the maxima
    // are then unspecified).
    bool (*maxima)(const float *x, int64_t n, float *maxima);

    // sums[b] = the sum over block b of w = exp((x - shift) * scale), where values below `floor`
    // count nothing. Requires shift >= every x, scale >= 0. Stores every w unless `weights` is
    // null.
    void (*exponentials)(const float *x, int64_t n, float shift, float scale, float floor,
                         float *weights, float *sums);

    // out[i] = how many values are >= thresholds[i].
    void (*count)(const float *x, int64_t n, const float *thresholds, int64_t *out);

    // out[i] = the sum of the weights that are >= thresholds[i].
    void (*mass)(const float *weights, int64_t n, const float *thresholds, double *out);

    // Writes the indices i of [begin, end) with least <= x[i] < below to `ids`, ascending; returns
    // how many.
    int64_t (*select)(const float *x, int64_t begin, int64_t end, float least, float below,
                      int32_t *ids);

    // Zeroes the weights below `least` and sums the blocks anew.
    void (*cut)(float *weights, int64_t n, float least, float *sums);

    // Requires a finite shift, and values that are finite or -infinity. In double precision and
    // without a fused multiply-add: the same bits in every tier.
    Moments (*moments)(const float *x, int64_t n, float shift);
};

const ScanKernels &scan_kernels_generic();
const ScanKernels &scan_kernels_avx2();
const ScanKernels &scan_kernels_avx512();
const ScanKernels &scan_kernels_avx512_bf16();

} // namespace octavo

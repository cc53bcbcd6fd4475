#include "scan.h"

#include <cstring>

#if defined(__FMA__)
#include <immintrin.h>
#endif

#include "tier.h"

namespace octavo::OCTAVO_TIER {
namespace {

// Sums and maxima run in kLanes lanes whatever the width of a register, so that the order of
// operations is the same in every tier (results differ only where the CPU lacks a fused
// multiply-add).
constexpr int kLanes = 16;
#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif
constexpr int kParts = kLanes / kWidth; // registers that hold kLanes values
constexpr int kSteps = kScanBlock / kLanes;
constexpr float kInfinity = __builtin_inff();

using Floats = float __attribute__((vector_size(kWidth * 4)));
using Ints = int32_t __attribute__((vector_size(kWidth * 4)));
using Words = uint32_t __attribute__((vector_size(kWidth * 4)));
// A register of doubles, and as many floats.
using Doubles = double __attribute__((vector_size(kWidth * 4)));
using HalfFloats = float __attribute__((vector_size(kWidth * 2)));
using HalfInts = int32_t __attribute__((vector_size(kWidth * 2)));

inline Floats load(const float *from) {
    Floats value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

inline void store(float *to, Floats value) {
    std::memcpy(to, &value, sizeof value);
}

inline Floats splat(float value) {
    return Floats{} + value;
}

inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

// Bit i is lane i's truth.
inline uint32_t truth(Ints comparison) {
#if defined(__AVX512F__)
    return _mm512_movepi32_mask((__m512i)comparison);
#elif defined(__AVX2__)
    return static_cast<uint32_t>(_mm256_movemask_ps((__m256)comparison));
#else
    uint32_t bits = 0;
    for (int lane = 0; lane < kWidth; ++lane)
        bits |= (comparison[lane] & 1u) << lane;
    return bits;
#endif
}

inline Floats greater(Floats a, Floats b) {
    return a > b ? a : b;
}

// kLanes values.
struct Lanes {
    Floats part[kParts];

    static Lanes of(float value) {
        Lanes lanes;
        for (Floats &part : lanes.part)
            part = splat(value);
        return lanes;
    }
    template <typename Combine> float reduced(Combine combine) const {
        float values[kLanes];
        std::memcpy(values, part, sizeof values);
        for (int width = kLanes / 2; width > 0; width /= 2)
            for (int lane = 0; lane < width; ++lane)
                values[lane] = combine(values[lane], values[lane + width]);
        return values[0];
    }
    float sum() const {
        return reduced([](float a, float b) { return a + b; });
    }
    float maximum() const {
        return reduced([](float a, float b) { return a > b ? a : b; });
    }
};

// exp(x) for x <= 0, 0 below -87 (where float32 loses precision); relative error below 2e-7.
// x = n ln 2 + r with ln 2 in two parts (Cody and Waite, 1980), then the Taylor series of exp(r),
// |r| <= ln 2 / 2, whose first omitted term is below 6e-9.
inline Floats exponential(Floats x) {
    const Floats least = splat(-87.0f);
    const Floats magic = splat(12582912.0f); // 1.5 * 2^23: adding it leaves n in the low bits
    const Floats shifted = multiply_add(greater(x, least), splat(1.44269504f), magic);
    const Floats n = shifted - magic;
    Floats r = multiply_add(n, splat(-0.693359375f), greater(x, least));
    r = multiply_add(n, splat(2.12194440e-4f), r);
    Floats p = splat(1.0f / 5040);
    for (const float coefficient : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        p = multiply_add(p, r, splat(coefficient));
    const Floats scaled = (Floats)((Words)p + ((Words)shifted << 23));
    return x > least ? scaled : Floats{};
}

// Calls body(block, its kScanBlock values, how many of them there are); the last one is padded.
template <typename Body> inline void for_blocks(const float *x, int64_t n, float pad, Body body) {
    int64_t block = 0;
    for (; (block + 1) * kScanBlock <= n; ++block)
        body(block, x + block * kScanBlock, kScanBlock);
    const int64_t start = block * kScanBlock;
    if (start < n) {
        float padded[kScanBlock];
        for (int64_t i = 0; i < kScanBlock; ++i)
            padded[i] = start + i < n ? x[start + i] : pad;
        body(block, padded, n - start);
    }
}

bool maxima(const float *x, int64_t n, float *out) {
    Words magnitude[kParts] = {}; // bits without the sign; those of NaN exceed infinity's
    float greatest = -kInfinity;
    for_blocks(x, n, -kInfinity, [&](int64_t block, const float *values, int64_t) {
        Lanes top;
        for (int part = 0; part < kParts; ++part)
            top.part[part] = splat(-kInfinity);
        for (int step = 0; step < kSteps; ++step)
            for (int part = 0; part < kParts; ++part) {
                const Floats value = load(values + step * kLanes + part * kWidth);
                top.part[part] = greater(value, top.part[part]);
                const Words twice = (Words)value << 1;
                magnitude[part] = twice > magnitude[part] ? twice : magnitude[part];
            }
        out[block] = top.maximum();
        greatest = out[block] > greatest ? out[block] : greatest;
    });
    bool finite = greatest < kInfinity;
    for (const Words &part : magnitude)
        for (int lane = 0; lane < kWidth; ++lane)
            finite = finite && part[lane] <= 0xff000000u;
    return finite;
}

template <bool kStore>
void exponentials_of(const float *x, int64_t n, float shift, float scale, float floor,
                     float *weights, float *sums) {
    for_blocks(x, n, -kInfinity, [&](int64_t block, const float *values, int64_t count) {
        float terms[kScanBlock];
        Lanes total = Lanes::of(0.0f);
        for (int step = 0; step < kSteps; ++step)
            for (int part = 0; part < kParts; ++part) {
                const int64_t at = step * kLanes + part * kWidth;
                const Floats value = load(values + at);
                const Floats weight = exponential((value - shift) * scale);
                const Floats kept = value >= floor ? weight : Floats{};
                total.part[part] += kept;
                if constexpr (kStore)
                    store(terms + at, kept);
            }
        if constexpr (kStore)
            std::memcpy(weights + block * kScanBlock, terms, count * sizeof(float));
        sums[block] = total.sum();
    });
}

void exponentials(const float *x, int64_t n, float shift, float scale, float floor, float *weights,
                  float *sums) {
    if (weights != nullptr)
        exponentials_of<true>(x, n, shift, scale, floor, weights, sums);
    else
        exponentials_of<false>(x, n, shift, scale, floor, weights, sums);
}

void count(const float *x, int64_t n, const float *thresholds, int64_t *out) {
    Ints lanes[kScanThresholds][kParts] = {};
    for_blocks(x, n, -kInfinity, [&](int64_t, const float *values, int64_t) {
        for (int step = 0; step < kSteps; ++step)
            for (int part = 0; part < kParts; ++part) {
                const Floats value = load(values + step * kLanes + part * kWidth);
                for (int t = 0; t < kScanThresholds; ++t)
                    lanes[t][part] -= value >= thresholds[t]; // true is -1
            }
    });
    for (int t = 0; t < kScanThresholds; ++t) {
        out[t] = 0;
        for (const Ints &part : lanes[t])
            for (int lane = 0; lane < kWidth; ++lane)
                out[t] += part[lane];
    }
}

void mass(const float *weights, int64_t n, const float *thresholds, double *out) {
    for (int t = 0; t < kScanThresholds; ++t)
        out[t] = 0;
    // Single-precision sums stay short, so that a small share is not lost in rounding.
    constexpr int64_t kStretch = 32 * kScanBlock;
    for (int64_t begin = 0; begin < n; begin += kStretch) {
        Lanes lanes[kScanThresholds];
        for (Lanes &total : lanes)
            total = Lanes::of(0.0f);
        for_blocks(weights + begin, n - begin < kStretch ? n - begin : kStretch, 0.0f,
                   [&](int64_t, const float *values, int64_t) {
                       for (int step = 0; step < kSteps; ++step)
                           for (int part = 0; part < kParts; ++part) {
                               const Floats value = load(values + step * kLanes + part * kWidth);
                               for (int t = 0; t < kScanThresholds; ++t)
                                   lanes[t].part[part] += value >= thresholds[t] ? value : Floats{};
                           }
                   });
        for (int t = 0; t < kScanThresholds; ++t)
            out[t] += static_cast<double>(lanes[t].sum());
    }
}

int64_t select(const float *x, int64_t begin, int64_t end, float least, float below, int32_t *ids) {
    int64_t found = 0;
    int64_t i = begin;
    for (; i + kWidth <= end; i += kWidth) {
        const Floats value = load(x + i);
        for (uint32_t hits = truth((value >= least) & (value < below)); hits; hits &= hits - 1)
            ids[found++] = static_cast<int32_t>(i + __builtin_ctz(hits));
    }
    for (; i < end; ++i)
        if (x[i] >= least && x[i] < below)
            ids[found++] = static_cast<int32_t>(i);
    return found;
}

void cut(float *weights, int64_t n, float least, float *sums) {
    for_blocks(weights, n, 0.0f, [&](int64_t block, const float *values, int64_t count) {
        float terms[kScanBlock];
        Lanes total = Lanes::of(0.0f);
        for (int step = 0; step < kSteps; ++step)
            for (int part = 0; part < kParts; ++part) {
                const int64_t at = step * kLanes + part * kWidth;
                const Floats value = load(values + at);
                const Floats kept = value >= least ? value : Floats{};
                total.part[part] += kept;
                store(terms + at, kept);
            }
        std::memcpy(weights + block * kScanBlock, terms, count * sizeof(float));
        sums[block] = total.sum();
    });
}

// Lane i of the row is lane i % kLanes of the sums.
Moments moments(const float *x, int64_t n, float shift) {
    constexpr int kHalf = kWidth / 2;
    constexpr int kDoubles = kLanes / kHalf; // registers that hold kLanes doubles
    Doubles sums[kDoubles] = {};
    Doubles squares[kDoubles] = {};
    HalfInts counts[kDoubles] = {};
    const HalfFloats top = HalfFloats{} + shift;
    const Doubles wide_top = Doubles{} + static_cast<double>(shift);
    for_blocks(x, n, -kInfinity, [&](int64_t, const float *values, int64_t) {
        for (int step = 0; step < kSteps; ++step)
            for (int part = 0; part < kDoubles; ++part) {
                HalfFloats value;
                std::memcpy(&value, values + step * kLanes + part * kHalf, sizeof value);
                const HalfInts there = value > -kInfinity; // true is -1
                const HalfFloats kept = there ? value : top;
                const Doubles below = wide_top - __builtin_convertvector(kept, Doubles);
                counts[part] -= there;
                sums[part] += below;
                squares[part] += below * below;
            }
    });
    double sum[kLanes];
    double square[kLanes];
    std::memcpy(sum, sums, sizeof sum);
    std::memcpy(square, squares, sizeof square);
    for (int width = kLanes / 2; width > 0; width /= 2)
        for (int lane = 0; lane < width; ++lane) {
            sum[lane] += sum[lane + width];
            square[lane] += square[lane + width];
        }
    int64_t count = 0;
    for (const HalfInts &part : counts)
        for (int lane = 0; lane < kHalf; ++lane)
            count += part[lane];
    return {count, sum[0], square[0]};
}

constexpr ScanKernels kKernels{maxima, exponentials, count, mass, select, cut, moments};

} // namespace
} // namespace octavo::OCTAVO_TIER

namespace octavo {

const ScanKernels &OCTAVO_TIERED(scan_kernels)() {
    return OCTAVO_TIER::kKernels;
}

} // namespace octavo

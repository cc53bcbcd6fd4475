#include "simd.h"
#include "tier.h"

namespace octavo {
namespace OCTAVO_TIER {
namespace {

// Calls f(i, count) for each full vector and then for what is left, if anything.
template <class F> void for_vectors(int64_t n, F &&f) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
        f(i, kLanes);
    if (i < n)
        f(i, n - i);
}

Vec load_part(const float *p, int64_t count) {
    return count == kLanes ? Vec::load(p) : load_first(p, count);
}

void store_part(Vec x, float *p, int64_t count) {
    if (count == kLanes) {
        x.store(p);
    } else {
        store_first(x, p, count);
    }
}

void rms_norm(const float *x, const float *weight, float *out, int64_t n, float eps) {
    Vec squares[4] = {Vec::set(0.0f), Vec::set(0.0f), Vec::set(0.0f), Vec::set(0.0f)};
    int64_t i = 0;
    for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
        for (int64_t j = 0; j < 4; ++j) {
            const Vec value = Vec::load(x + i + j * kLanes);
            squares[j] = fma(value, value, squares[j]);
        }
    }
    for_vectors(n - i, [&](int64_t offset, int64_t count) {
        const Vec value = load_part(x + i + offset, count);
        squares[0] = fma(value, value, squares[0]);
    });
    const float total = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
    const Vec factor = Vec::set(1.0f / __builtin_sqrtf(total / float(n) + eps));
    for_vectors(n, [&](int64_t at, int64_t count) {
        store_part(load_part(x + at, count) * factor * load_part(weight + at, count), out + at,
                   count);
    });
}

void add(const float *x, const float *y, float *out, int64_t n) {
    for_vectors(n, [&](int64_t i, int64_t count) {
        store_part(load_part(x + i, count) + load_part(y + i, count), out + i, count);
    });
}

void add_scaled(const float *x, float factor, float *out, int64_t n) {
    for_vectors(n, [&](int64_t i, int64_t count) {
        const Vec sum = load_part(out + i, count);
        store_part(fma(load_part(x + i, count), Vec::set(factor), sum), out + i, count);
    });
}

void scale(float *x, float factor, int64_t n) {
    for_vectors(n, [&](int64_t i, int64_t count) {
        store_part(load_part(x + i, count) * Vec::set(factor), x + i, count);
    });
}

// x times the factors from i on, if there are any.
Vec times(Vec x, const float *factors, int64_t i, int64_t count) {
    return factors == nullptr ? x : x * load_part(factors + i, count);
}

void silu(const float *gate, const float *up, float *out, int64_t n) {
    const Vec one = Vec::set(1.0f);
    for_vectors(n, [&](int64_t i, int64_t count) {
        const Vec x = load_part(gate + i, count);
        const Vec activated = x / (one + exp(Vec::set(0.0f) - x));
        store_part(times(activated, up, i, count), out + i, count);
    });
}

// 0.5 x (1 + tanh(u)) = x / (1 + e^(-2u)) with u = sqrt(2 / pi) (x + 0.044715 x³)
// (Hendrycks and Gimpel, 2016); the right-hand form loses nothing where tanh nears -1.
void gelu_tanh(const float *gate, const float *up, float *out, int64_t n) {
    const Vec one = Vec::set(1.0f);
    const Vec factor = Vec::set(-2.0f * 0.7978845608f);
    for_vectors(n, [&](int64_t i, int64_t count) {
        const Vec x = load_part(gate + i, count);
        const Vec inner = fma(x * x * x, Vec::set(0.044715f), x);
        const Vec activated = x / (one + exp(inner * factor));
        store_part(times(activated, up, i, count), out + i, count);
    });
}

void softcap(float *x, float cap, int64_t n) {
    for_vectors(n, [&](int64_t i, int64_t count) {
        store_part(softcapped(load_part(x + i, count), cap), x + i, count);
    });
}

void rope_halves(float *head, const float *cos, const float *sin, int64_t dim) {
    float *second = head + dim / 2;
    for_vectors(dim / 2, [&](int64_t i, int64_t count) {
        const Vec x = load_part(head + i, count);
        const Vec y = load_part(second + i, count);
        const Vec c = load_part(cos + i, count);
        const Vec s = load_part(sin + i, count);
        store_part(x * c - y * s, head + i, count);
        store_part(y * c + x * s, second + i, count);
    });
}

void rope_pairs(float *head, const float *cos, const float *sin, int64_t dim) {
    for_vectors(dim, [&](int64_t i, int64_t count) {
        const Vec x = load_part(head + i, count);
        const Vec c = load_part(cos + i, count);
        const Vec s = load_part(sin + i, count);
        store_part(x * c + swap_pairs(x) * s, head + i, count);
    });
}

template <auto activate> void activated(const RowArguments &a) {
    activate(a.inputs[0], a.inputs[1], a.out, a.n);
}

// rms_norm: x / sqrt(mean(x²) + number) * weight. silu and gelu_tanh (the tanh approximation): of
// the first input, times the second if there is one.
constexpr RowFunction kFunctions[] = {
    {"rms_norm", 1, 1, 1,
     [](const RowArguments &a) { rms_norm(a.inputs[0], a.weights[0], a.out, a.n, a.numbers[0]); }},
    {"add", 2, 0, 0, [](const RowArguments &a) { add(a.inputs[0], a.inputs[1], a.out, a.n); }},
    {"silu", 1, 0, 0, activated<silu>},
    {"silu", 2, 0, 0, activated<silu>},
    {"gelu_tanh", 1, 0, 0, activated<gelu_tanh>},
    {"gelu_tanh", 2, 0, 0, activated<gelu_tanh>},
};

constexpr RowKernels kKernels{
    add,         add_scaled, scale,      softcap,
    rope_halves, rope_pairs, kFunctions, sizeof(kFunctions) / sizeof(kFunctions[0])};

} // namespace
} // namespace OCTAVO_TIER

const RowKernels &OCTAVO_TIERED(row_kernels)() {
    return OCTAVO_TIER::kKernels;
}

} // namespace octavo

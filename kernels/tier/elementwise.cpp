#include "simd.h"
#include "tier.h"

namespace octavo {
namespace OCTAVO_TIER {
namespace {

// x times the factors from i on, if there are any.
Vec times(Vec x, const float *factors, int64_t i, int64_t count) {
    return factors == nullptr ? x : x * load_part(factors + i, count);
}

void rms_norm(const float *x, const float *weight, float *out, int64_t n, float eps) {
    const float total = dot_product(x, x, n);
    const Vec factor = Vec::set(1.0f / __builtin_sqrtf(total / float(n) + eps));
    for_vectors(n, [&](int64_t at, int64_t count) {
        store_part(times(load_part(x + at, count) * factor, weight, at, count), out + at, count);
    });
}

// Sums of four partial vectors, added in `rms_norm`'s order: of x, then of (x - mean)².
void layer_norm(const float *x, const float *weight, float *out, int64_t n, float eps) {
    const auto total = [&](auto &&added) {
        Vec sums[4] = {Vec::set(0.0f), Vec::set(0.0f), Vec::set(0.0f), Vec::set(0.0f)};
        int64_t i = 0;
        for (; i + 4 * kLanes <= n; i += 4 * kLanes)
            for (int64_t j = 0; j < 4; ++j)
                sums[j] = added(sums[j], i + j * kLanes, kLanes);
        for_vectors(n - i, [&](int64_t offset, int64_t count) {
            sums[0] = added(sums[0], i + offset, count);
        });
        return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
    };
    const float mean =
        total([&](Vec sum, int64_t at, int64_t count) { return sum + load_part(x + at, count); }) /
        float(n);
    const auto centred = [&](int64_t at, int64_t count) {
        return load_part(x + at, count) - Vec::set(mean);
    };
    const float squares = total([&](Vec sum, int64_t at, int64_t count) {
        Vec value = centred(at, count);
        if (count < kLanes) { // the lanes behind the row's end count for nothing
            float row[kLanes];
            value.store(row);
            value = load_first(row, count);
        }
        return fma(value, value, sum);
    });
    const Vec factor = Vec::set(1.0f / __builtin_sqrtf(squares / float(n) + eps));
    for_vectors(n, [&](int64_t at, int64_t count) {
        store_part(centred(at, count) * factor * load_part(weight + at, count), out + at, count);
    });
}

void add(const float *x, const float *y, float *out, int64_t n) {
    for_vectors(n, [&](int64_t i, int64_t count) {
        store_part(load_part(x + i, count) + load_part(y + i, count), out + i, count);
    });
}

void multiply(const float *x, const float *y, float *out, int64_t n) {
    for_vectors(n, [&](int64_t i, int64_t count) {
        store_part(load_part(x + i, count) * load_part(y + i, count), out + i, count);
    });
}

void add_scaled(const float *x, float factor, float *out, int64_t n) {
    for_vectors(n, [&](int64_t i, int64_t count) {
        const Vec sum = load_part(out + i, count);
        store_part(fma(load_part(x + i, count), Vec::set(factor), sum), out + i, count);
    });
}

void multiply(const float *x, float factor, float *out, int64_t n) {
    for_vectors(n, [&](int64_t i, int64_t count) {
        store_part(load_part(x + i, count) * Vec::set(factor), out + i, count);
    });
}

void scale(float *x, float factor, int64_t n) {
    multiply(x, factor, x, n);
}

void silu(const float *gate, const float *up, float *out, int64_t n) {
    for_vectors(n, [&](int64_t i, int64_t count) {
        const Vec activated = silu_of(load_part(gate + i, count));
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

// gpt-oss's gate: g sigmoid(alpha g) (u + 1) of the gate, at most the limit, and of up within it.
void swiglu_clamped(const RowArguments &a) {
    const Vec one = Vec::set(1.0f), zero = Vec::set(0.0f);
    const Vec alpha = Vec::set(a.numbers[0]), limit = Vec::set(a.numbers[1]);
    for_vectors(a.n, [&](int64_t i, int64_t count) {
        const Vec gate = load_part(a.inputs[0] + i, count), up = load_part(a.inputs[1] + i, count);
        // A NaN stands first in neither: it comes out as it is.
        const Vec g = min(limit, gate), u = max(zero - limit, min(limit, up));
        store_part(g / (one + exp(zero - alpha * g)) * (u + one), a.out + i, count);
    });
}

void sigmoid(const float *gate, const float *up, float *out, int64_t n) {
    for_vectors(n, [&](int64_t i, int64_t count) {
        const Vec activated = sigmoid_of(load_part(gate + i, count));
        store_part(times(activated, up, i, count), out + i, count);
    });
}

// log(1 + e^(x + bias)).
void softplus(const float *x, const float *bias, float *out, int64_t n) {
    for_vectors(n, [&](int64_t i, int64_t count) {
        const Vec shifted = load_part(x + i, count) + load_part(bias + i, count);
        store_part(softplus_of(shifted), out + i, count);
    });
}

// e^(a log(1 + e^(x + bias))).
void decay(const float *x, const float *bias, const float *a, float *out, int64_t n) {
    for_vectors(n, [&](int64_t i, int64_t count) {
        const Vec shifted = load_part(x + i, count) + load_part(bias + i, count);
        store_part(exp(load_part(a + i, count) * softplus_of(shifted)), out + i, count);
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

void normalized(const RowArguments &a) {
    rms_norm(a.inputs[0], a.weights[0], a.out, a.n, a.numbers[0]);
}

// rms_norm: x / sqrt(mean(x²) + number), times the weight if there is one. layer_norm: the same of
// x - mean(x). scale: x times the weight, a number. silu, gelu_tanh (the tanh approximation) and
// sigmoid: of the first input, times the second if there is one.
constexpr RowFunction kFunctions[] = {
    {"rms_norm", 1, 0, 1, normalized},
    {"rms_norm", 1, 1, 1, normalized},
    {"layer_norm", 1, 1, 1,
     [](const RowArguments &a) {
         layer_norm(a.inputs[0], a.weights[0], a.out, a.n, a.numbers[0]);
     }},
    {"scale", 1, 1, 0,
     [](const RowArguments &a) { multiply(a.inputs[0], *a.weights[0], a.out, a.n); }, true},
    {"add", 2, 0, 0, [](const RowArguments &a) { add(a.inputs[0], a.inputs[1], a.out, a.n); }},
    {"multiply", 2, 0, 0,
     [](const RowArguments &a) { multiply(a.inputs[0], a.inputs[1], a.out, a.n); }},
    {"silu", 1, 0, 0, activated<silu>},
    {"silu", 2, 0, 0, activated<silu>},
    {"gelu_tanh", 1, 0, 0, activated<gelu_tanh>},
    {"gelu_tanh", 2, 0, 0, activated<gelu_tanh>},
    {"swiglu_clamped", 2, 0, 2, swiglu_clamped},
    {"sigmoid", 1, 0, 0, activated<sigmoid>},
    {"sigmoid", 2, 0, 0, activated<sigmoid>},
    {"softplus", 1, 1, 0,
     [](const RowArguments &a) { softplus(a.inputs[0], a.weights[0], a.out, a.n); }},
    {"decay", 1, 2, 0,
     [](const RowArguments &a) { decay(a.inputs[0], a.weights[0], a.weights[1], a.out, a.n); }},
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

// Row-wise kernels, attention and recurrences of every tier this CPU has, against plain double
// arithmetic, over odd shapes. Every buffer has exactly the size the kernel may touch, for the
// address sanitizer.
//
//   kernels_test [cases]    random cases a tier (default 100)
#include "kernels.h"
#include "tier.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace octavo {
namespace {

using Floats = std::vector<float>;

std::mt19937 engine(11);
int failures = 0;

int64_t draw(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(engine);
}

Floats normal(int64_t n, float deviation = 1.0f) {
    std::normal_distribution<float> distribution(0.0f, deviation);
    Floats values(static_cast<size_t>(n));
    for (float &value : values)
        value = distribution(engine);
    return values;
}

void expect(const Tier &tier, const char *what, double got, double wanted, double tolerance) {
    if (std::abs(got - wanted) <= tolerance * std::max(1.0, std::abs(wanted)))
        return;
    if (std::isnan(got) && std::isnan(wanted))
        return;
    std::printf("%s %s: %.9g, not %.9g\n", tier.name, what, got, wanted);
    ++failures;
}

float from_f16(uint16_t half) {
    const int exponent = (half >> 10) & 31;
    const int mantissa = half & 1023;
    const double magnitude = exponent == 0    ? std::ldexp(mantissa, -24)
                             : exponent == 31 ? (mantissa ? std::nan("") : INFINITY)
                                              : std::ldexp(1024 + mantissa, exponent - 25);
    return float(half & 0x8000 ? -magnitude : magnitude);
}

float from_half(KvKind kind, uint16_t half) {
    if (kind == KvKind::F16)
        return from_f16(half);
    const uint32_t bits = uint32_t(half) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Computes a function of rows by its name; `y` null: it has one input.
void apply(const Tier &tier, const std::string &name, const float *x, const float *y, float *out,
           int64_t n, const float *weight = nullptr, const Floats &numbers = {0.0f}) {
    const std::span functions(tier.row.functions, tier.row.num_functions);
    const auto function = std::ranges::find_if(functions, [&](const RowFunction &each) {
        return name == each.name && each.inputs == (y ? 2 : 1) && each.weights == (weight ? 1 : 0);
    });
    if (function == functions.end()) {
        expect(tier, name.c_str(), 1, 0, 0);
        return;
    }
    function->run({{x, y}, {weight}, numbers.data(), out, n});
}

void test_rows(const Tier &tier) {
    const RowKernels &row = tier.row;
    const int64_t n = draw(1, 100);
    const Floats x = normal(n, 3.0f), y = normal(n);
    Floats out(x.size());

    apply(tier, "rms_norm", x.data(), nullptr, out.data(), n, y.data(), {1e-5f});
    double squares = 0.0;
    for (const float value : x)
        squares += double(value) * value;
    for (size_t i = 0; i < x.size(); ++i) {
        const double wanted = x[i] / std::sqrt(squares / double(n) + 1e-5) * y[i];
        expect(tier, "rms_norm", out[i], wanted, 2e-6);
    }
    Floats plain(x.size());
    apply(tier, "rms_norm", x.data(), nullptr, plain.data(), n, nullptr, {1e-5f});
    for (size_t i = 0; i < x.size(); ++i)
        expect(tier, "rms_norm without a weight", plain[i] * y[i], out[i], 0);
    apply(tier, "scale", x.data(), nullptr, plain.data(), n, y.data());
    for (size_t i = 0; i < x.size(); ++i)
        expect(tier, "scale", plain[i], x[i] * y[0], 0);

    Floats sum = y;
    row.add_scaled(x.data(), 0.7f, sum.data(), n);
    for (size_t i = 0; i < x.size(); ++i)
        expect(tier, "add_scaled", sum[i], double(y[i]) + double(x[i]) * 0.7f, 3e-7);

    Floats in_place = x;
    apply(tier, "rms_norm", in_place.data(), nullptr, in_place.data(), n, y.data(), {1e-5f});
    if (in_place != out)
        expect(tier, "rms_norm in place", 1, 0, 0);

    apply(tier, "layer_norm", x.data(), nullptr, out.data(), n, y.data(), {1e-5f});
    const double mean = std::accumulate(x.begin(), x.end(), 0.0) / double(n);
    double variance = 0.0;
    for (const float value : x)
        variance += (value - mean) * (value - mean) / double(n);
    for (size_t i = 0; i < x.size(); ++i)
        expect(tier, "layer_norm", out[i], (x[i] - mean) / std::sqrt(variance + 1e-5) * y[i], 4e-6);
    in_place = x;
    apply(tier, "layer_norm", in_place.data(), nullptr, in_place.data(), n, y.data(), {1e-5f});
    if (in_place != out)
        expect(tier, "layer_norm in place", 1, 0, 0);

    row.add(x.data(), y.data(), out.data(), n);
    for (size_t i = 0; i < x.size(); ++i)
        expect(tier, "add", out[i], x[i] + y[i], 0);
    apply(tier, "multiply", x.data(), y.data(), out.data(), n);
    for (size_t i = 0; i < x.size(); ++i)
        expect(tier, "multiply", out[i], x[i] * y[i], 0);
    apply(tier, "silu", x.data(), y.data(), out.data(), n);
    for (size_t i = 0; i < x.size(); ++i) {
        expect(tier, "silu", out[i], x[i] / (1.0 + std::exp(-double(x[i]))) * y[i], 1e-6);
    }
    apply(tier, "gelu_tanh", x.data(), y.data(), out.data(), n);
    for (size_t i = 0; i < x.size(); ++i) {
        const double v = x[i];
        const double inner = std::sqrt(2.0 / M_PI) * (v + 0.044715 * v * v * v);
        expect(tier, "gelu", out[i], 0.5 * v * (1.0 + std::tanh(inner)) * y[i], 2e-6);
    }
    apply(tier, "swiglu_clamped", x.data(), y.data(), out.data(), n, nullptr, {1.702f, 1.5f});
    for (size_t i = 0; i < x.size(); ++i) {
        const double gate = std::min(double(x[i]), 1.5);
        const double up = std::clamp(double(y[i]), -1.5, 1.5);
        const double wanted = (up + 1.0) * gate / (1.0 + std::exp(-1.702 * gate));
        expect(tier, "swiglu_clamped", out[i], wanted, 2e-6);
    }
    apply(tier, "sigmoid", x.data(), y.data(), out.data(), n);
    for (size_t i = 0; i < x.size(); ++i)
        expect(tier, "sigmoid", out[i], y[i] / (1.0 + std::exp(-double(x[i]))), 1e-6);
    // Where the exponential is beyond its range, and just before.
    const Floats edges = {-1e30f, -200.0f, -104.0f, -89.1f, -88.75f, -88.7f, -87.4f, -87.3f,
                          -0.0f,  87.3f,   87.4f,   88.7f,  88.75f,  89.1f,  200.0f, 1e30f};
    const Floats ones(edges.size(), 1.0f);
    Floats gated = ones;
    apply(tier, "silu", edges.data(), ones.data(), gated.data(), int64_t(edges.size()));
    for (size_t i = 0; i < edges.size(); ++i)
        expect(tier, "silu", gated[i], edges[i] / (1.0 + std::exp(-double(edges[i]))), 1e-6);
    // Nothing to multiply by is as good as ones.
    const Floats many(x.size(), 1.0f);
    for (const char *activation : {"silu", "gelu_tanh", "sigmoid"}) {
        Floats alone = x;
        apply(tier, activation, x.data(), many.data(), out.data(), n);
        apply(tier, activation, alone.data(), nullptr, alone.data(), n);
        if (alone != out)
            expect(tier, "an activation alone", 1, 0, 0);
    }
    Floats unknown = {NAN};
    apply(tier, "silu", unknown.data(), ones.data(), unknown.data(), 1);
    if (!std::isnan(unknown[0]))
        expect(tier, "silu of NaN", 1, 0, 0);
    for (const bool up : {false, true}) {
        const float *gate = up ? ones.data() : unknown.data();
        Floats clamped(1);
        apply(tier, "swiglu_clamped", gate, up ? unknown.data() : ones.data(), clamped.data(), 1,
              nullptr, {1.702f, 7.0f});
        if (!std::isnan(clamped[0]))
            expect(tier, "swiglu_clamped of NaN", 1, 0, 0);
    }

    Floats capped = x;
    row.softcap(capped.data(), 2.5f, n);
    for (size_t i = 0; i < x.size(); ++i) {
        expect(tier, "softcap", capped[i], 2.5 * std::tanh(x[i] / 2.5), 2e-6);
    }

    const int64_t dim = 2 * draw(1, 40);
    const Floats head = normal(dim), cosines = normal(dim / 2), sines = normal(dim / 2);
    Floats halves = head;
    row.rope_halves(halves.data(), cosines.data(), sines.data(), dim);
    Floats pairs = head, wide_cosines, wide_sines;
    for (size_t i = 0; i < cosines.size(); ++i) {
        wide_cosines.insert(wide_cosines.end(), {cosines[i], cosines[i]});
        wide_sines.insert(wide_sines.end(), {-sines[i], sines[i]});
    }
    row.rope_pairs(pairs.data(), wide_cosines.data(), wide_sines.data(), dim);
    const size_t half = cosines.size();
    for (size_t i = 0; i < half; ++i) {
        const double c = cosines[i], s = sines[i];
        expect(tier, "rope", halves[i], head[i] * c - head[i + half] * s, 2e-6);
        expect(tier, "rope", halves[i + half], head[i] * s + head[i + half] * c, 2e-6);
        expect(tier, "rope", pairs[2 * i], head[2 * i] * c - head[2 * i + 1] * s, 2e-6);
        expect(tier, "rope", pairs[2 * i + 1], head[2 * i] * s + head[2 * i + 1] * c, 2e-6);
    }
}

// The Walsh-Hadamard transform by its definition, group by group.
std::vector<double> rotated(const std::vector<double> &x) {
    const size_t size = x.size() & -x.size();
    std::vector<double> out(x.size());
    for (size_t i = 0; i < x.size(); ++i) {
        const size_t base = i / size * size;
        for (size_t j = 0; j < size; ++j) {
            const bool minus = __builtin_popcountll((i - base) & j) % 2 != 0;
            out[i] += (minus ? -1.0 : 1.0) / std::sqrt(double(size)) * x[base + j];
        }
    }
    return out;
}

// A token's part of a block on one head, read number by number. Codes stay rotated.
struct StoredRow {
    const AttentionShape &shape;
    const uint8_t *head;
    bool values; // or keys
    int64_t slot;
    std::vector<size_t> *touched; // bytes that are read

    bool quantized() const { return shape.kind == KvKind::I8 || shape.kind == KvKind::I4; }

    uint16_t half(size_t at) const {
        if (touched != nullptr)
            touched->insert(touched->end(), {at, at + 1});
        return uint16_t(head[at] | head[at + 1] << 8);
    }
    double number(int64_t d) const {
        const auto tiles = size_t(shape.block_size / 16), tile = size_t(slot / 16);
        const auto token = size_t(slot % 16), at = size_t(d), dim = size_t(shape.head_dim);
        if (!quantized()) {
            const size_t word =
                values ? slot / 2 * dim + at : (tile * dim / 2 + at / 2) * 16 + token;
            const size_t part = values ? token % 2 : at % 2;
            return from_half(shape.kind,
                             half((values ? dim * 32 * tiles : 0) + word * 4 + part * 2));
        }
        const bool four = shape.kind == KvKind::I4;
        const size_t key_words = four ? (dim + 7) / 8 : (dim + 3) / 4; // of a token
        const size_t key_bytes = key_words * 64 * tiles;
        const size_t width = four ? dim / 2 : dim;
        const size_t row = !four ? dim : values ? width : key_words * 4; // in one half of the bytes
        const bool high = at >= row;
        const size_t place = at % row;
        const size_t byte = values ? key_bytes + (slot / 4 * width + place) * 4 + token % 4
                                   : (tile * key_words + place / 4) * 64 + token * 4 + place % 4;
        if (touched != nullptr)
            touched->push_back(byte);
        const uint8_t code = four ? uint8_t(high ? head[byte] >> 4 : head[byte] & 15) : head[byte];
        return (four ? double(code) : double(code) - 128.0) * scale() + (four ? least() : 0.0);
    }
    size_t scales_at() const {
        const auto tiles = size_t(shape.block_size / 16), dim = size_t(shape.head_dim);
        const bool four = shape.kind == KvKind::I4;
        const size_t data = four ? (dim + 7) / 8 * 64 + dim * 8 : (dim + 3) / 4 * 64 + dim * 16;
        return data * tiles + size_t(slot / 16) * (four ? 128 : 64) +
               (values ? (four ? 64 : 32) : 0) + size_t(slot % 16) * 2;
    }
    double scale() const { return from_half(KvKind::BF16, half(scales_at())); }
    double least() const { return from_half(KvKind::BF16, half(scales_at() + 32)); }
    std::vector<double> numbers() const {
        std::vector<double> out;
        for (int64_t d = 0; d < shape.head_dim; ++d)
            out.push_back(number(d));
        return out;
    }
};

KvKind draw_kind() {
    return KvKind(draw(0, 3));
}

int64_t head_bytes(const AttentionShape &shape) {
    const int64_t dim = shape.head_dim;
    const int64_t of_token = shape.kind == KvKind::I8   ? (dim + 3) / 4 * 4 + dim + 4
                             : shape.kind == KvKind::I4 ? (dim + 7) / 8 * 4 + dim / 2 + 8
                                                        : 4 * dim;
    return shape.block_size * of_token;
}

// Rounding: values of every magnitude, the special ones among them; nothing beside the slots is
// written; and tokens together are stored as one by one.
void test_store(const Tier &tier) {
    AttentionShape shape{};
    shape.head_dim = 2 * draw(1, 50);
    shape.block_size = kTokenTile * draw(1, 3);
    shape.kind = draw_kind();
    const int64_t dim = shape.head_dim;
    const int64_t slot = draw(0, shape.block_size - 1);
    const int64_t tokens = draw(1, kTokenTile - slot % kTokenTile);
    const int64_t stride[2] = {dim + draw(0, 3), dim + draw(0, 3)};
    Floats x[2];
    for (int which = 0; which < 2; ++which) {
        x[which] = normal((tokens - 1) * stride[which] + dim);
        const auto spread = int(draw(0, 12));
        const auto centre = int(draw(-30, 20));
        for (float &value : x[which])
            value = std::ldexp(value, centre + int(draw(-spread, spread)));
        for (int64_t t = 0; t < tokens; ++t) {
            float &first = x[which][size_t(t * stride[which])];
            const int64_t special = draw(0, 11);
            if (special < 8) {
                first = std::vector<float>{0.0f, -0.0f,    INFINITY, -INFINITY,
                                           NAN,  65504.0f, 65520.0f, 1e30f}[size_t(special)];
            } else if (special == 8) {
                std::fill_n(&first, dim, draw(0, 1) == 0 ? 0.0f : first);
            }
        }
    }
    const auto untouched = uint8_t(draw(0, 0xff));
    std::vector<uint8_t> stored(size_t(head_bytes(shape)), untouched), single = stored;
    tier.attention.store(shape, slot, tokens, x[0].data(), stride[0], x[1].data(), stride[1],
                         reinterpret_cast<std::byte *>(stored.data()));
    for (int64_t t = 0; t < tokens; ++t) {
        tier.attention.store(shape, slot + t, 1, x[0].data() + t * stride[0], stride[0],
                             x[1].data() + t * stride[1], stride[1],
                             reinterpret_cast<std::byte *>(single.data()));
    }
    if (stored != single) {
        std::printf("%s store: tokens together differ (kind %d, dim %ld)\n", tier.name,
                    int(shape.kind), long(dim));
        ++failures;
    }
    std::vector<size_t> touched;
    for (int which = 0; which < 2; ++which) {
        for (int64_t t = 0; t < tokens; ++t) {
            const float *row = x[which].data() + t * stride[which];
            const StoredRow found{shape, stored.data(), which == 1, slot + t, &touched};
            const std::vector<double> got = found.numbers();
            std::vector<double> wanted(row, row + dim);
            double step = 0.0;
            const bool finite =
                std::all_of(row, row + dim, [](float value) { return std::isfinite(value); });
            if (found.quantized()) {
                wanted = rotated(wanted);
                const auto [low, high] = std::minmax_element(wanted.begin(), wanted.end());
                // The steps cover the row and are no coarser than they need to be; fp32 rotates.
                const double top = std::max(-*low, *high);
                const bool four = shape.kind == KvKind::I4;
                const double range = four ? *high - *low + top * 0x1p-7 : top;
                const double finest = range / (four ? 15.0 : 127.0);
                if (finite && !(found.scale() <= finest * (1 + 0x1p-6) + top * 1e-6 + 1e-40))
                    expect(tier, "scale", found.scale(), finest, 0);
                step = 0.5 * found.scale() * 1.0001 + top * 2e-6;
            }
            for (int64_t d = 0; d < dim; ++d) {
                double to = wanted[size_t(d)];
                if (found.quantized()) {
                    if (std::isnan(got[size_t(d)]) == finite ||
                        (finite && std::abs(got[size_t(d)] - to) > step))
                        expect(tier, "stored codes", got[size_t(d)], to, 0);
                    continue;
                }
                if (shape.kind == KvKind::F16 && !std::isnan(to))
                    to = std::clamp(to, -65504.0, 65504.0);
                if (std::isinf(to) && got[size_t(d)] == to)
                    continue;
                step = shape.kind == KvKind::F16 ? std::max(std::abs(to) * 0x1p-11, 0x1p-25)
                                                 : std::abs(to) * 0x1p-8;
                if (std::isnan(to) != std::isnan(got[size_t(d)]) ||
                    std::abs(got[size_t(d)] - to) > step)
                    expect(tier, "store", got[size_t(d)], to, 0);
            }
        }
    }
    // Dimensions that pad a row of keys to whole words may be written too.
    for (int64_t t = 0; t < tokens && shape.kind >= KvKind::I8; ++t) {
        const bool four = shape.kind == KvKind::I4;
        const int64_t words = four ? (dim + 7) / 8 : (dim + 3) / 4;
        const int64_t place = slot + t;
        for (int64_t i = 0; i < 4 * words; ++i) {
            touched.push_back(size_t((place / 16 * words + i / 4) * 64 + place % 16 * 4 + i % 4));
        }
    }
    for (const size_t at : touched)
        stored[at] = untouched;
    for (const uint8_t each : stored) {
        if (each != untouched)
            expect(tier, "store: another slot", each, untouched, 0);
    }
}

float to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & ~0xffffu;
    std::memcpy(&value, &bits, sizeof bits);
    return value;
}

// Sequences over blocks that are separate allocations would need a common base, so the arena is one
// allocation of exactly the blocks in use; unseen slots hold NaN, and unused table entries are -1.
void test_attention(const Tier &tier) {
    AttentionShape shape{};
    shape.heads_per_kv = draw(0, 9) == 0 ? draw(10, 40) : draw(1, 9);
    shape.head_dim = draw(0, 3) == 0
                         ? std::vector<int64_t>{64, 80, 96, 128, 256}[size_t(draw(0, 4))]
                         : 2 * draw(1, 50);
    shape.block_size = kTokenTile * draw(1, 3);
    shape.kind = draw_kind();
    const int64_t heads = draw(1, 2), head = draw(0, heads - 1); // KV heads of a block
    shape.block_bytes = heads * head_bytes(shape);
    shape.scale = 0.2f;
    shape.softcap = draw(0, 2) == 0 ? 4.0f : 0.0f;
    shape.window = draw(0, 1) == 0 ? 0 : draw(1, draw(0, 1) == 0 ? 80 : 400);
    const int64_t tokens = draw(0, 4) == 0 ? draw(20, 80) : draw(1, 12);
    const int64_t position = draw(0, 1) == 0 ? draw(0, 70) : draw(0, 700);
    const int64_t length = position + tokens;
    const int64_t dim = shape.head_dim, group = shape.heads_per_kv;
    const int64_t low = shape.window > 0 ? std::max<int64_t>(0, position - shape.window + 1) : 0;

    std::vector<int32_t> table(size_t((length - 1) / shape.block_size + 1), -1);
    std::vector<int32_t> order;
    for (int64_t i = low / shape.block_size; i < int64_t(table.size()); ++i) {
        order.push_back(int32_t(order.size()));
    }
    std::shuffle(order.begin(), order.end(), engine);
    for (size_t i = 0; i < order.size(); ++i) {
        table[size_t(low / shape.block_size) + i] = order[i];
    }
    std::vector<uint8_t> arena(order.size() * size_t(shape.block_bytes), 0xff);
    std::vector<std::vector<double>> keys{size_t(low), std::vector<double>(size_t(dim))};
    std::vector<std::vector<double>> values = keys; // as stored
    const Floats new_keys = normal(length * dim), new_values = normal(length * dim);
    for (int64_t p = low; p < length;) {
        const int64_t count =
            std::min(draw(1, 20), std::min(length - p, kTokenTile - p % kTokenTile));
        uint8_t *stored =
            arena.data() + size_t(table[size_t(p / shape.block_size)] * shape.block_bytes +
                                  head * head_bytes(shape));
        tier.attention.store(shape, p % shape.block_size, count, new_keys.data() + p * dim, dim,
                             new_values.data() + p * dim, dim,
                             reinterpret_cast<std::byte *>(stored));
        for (const int64_t end = p + count; p < end; ++p) {
            const int64_t slot = p % shape.block_size;
            keys.push_back(StoredRow{shape, stored, false, slot, nullptr}.numbers());
            values.push_back(StoredRow{shape, stored, true, slot, nullptr}.numbers());
        }
    }
    const bool codes = shape.kind >= KvKind::I8;
    if (codes) {
        for (auto *rows : {&keys, &values}) {
            for (auto &row : *rows)
                row = rotated(row);
        }
    }
    const int64_t stride = group * dim + draw(0, 5);
    const Floats q = normal((tokens - 1) * stride + group * dim);
    const auto *base = reinterpret_cast<const std::byte *>(arena.data()) + head * head_bytes(shape);
    const AttentionQuery query{q.data(), stride, position, tokens, table.data(), base};

    const Floats sinks = normal(group, 3.0f);
    const float *const beside = draw(0, 1) == 0 ? nullptr : sinks.data();
    const auto run = [&](const AttentionQuery &part, bool apart) {
        const int64_t rows = part.tokens * group;
        const int64_t begin = part.first_chunk(shape.window), end = part.end_chunk();
        Floats state(size_t(shape.state_floats(rows))), scratch(size_t(shape.scratch_floats(rows)));
        Floats out(size_t((part.tokens - 1) * stride + group * dim));
        if (!apart) {
            const AttentionSpan next{query, query.first_chunk(shape.window), query.end_chunk()};
            tier.attention.attend(shape, {part, begin, end}, draw(0, 1) == 0 ? &next : nullptr,
                                  false, state.data(), scratch.data());
        } else {
            // What stands there before must not matter.
            Floats states(size_t(shape.state_floats(rows) * (end - begin)), NAN);
            for (int64_t c = begin; c < end;) {
                const int64_t to = std::min(end, c + draw(1, 3));
                float *at = states.data() + shape.state_floats(rows) * (c - begin);
                tier.attention.attend(shape, {part, c, to}, nullptr, true, at, scratch.data());
                c = to;
            }
            tier.attention.fold(shape, rows, end - begin, states.data(), state.data());
        }
        tier.attention.finish(shape, beside, part.tokens, state.data(), out.data(), stride);
        return out;
    };
    // Queries and weights are rounded to bf16 where the products are of bf16.
    const bool pairs = shape.kind == KvKind::BF16 && tier.name == std::string("avx512_bf16");
    const float factor = shape.scale * 1.44269504f;
    const Floats out = run(query, false);
    const Floats merged_late = run(query, true);
    for (int64_t t = 0; t < tokens; ++t) {
        if (std::memcmp(merged_late.data() + t * stride, out.data() + t * stride,
                        size_t(group * dim) * sizeof(float)) != 0) {
            std::printf("%s attention: other bits in pieces (position %ld, window %ld)\n",
                        tier.name, long(position + t), long(shape.window));
            ++failures;
        }
        AttentionQuery single = query;
        single.q += t * stride;
        single.position += t;
        single.tokens = 1;
        const Floats alone = run(single, draw(0, 1) == 0);
        if (std::memcmp(alone.data(), out.data() + t * stride, alone.size() * sizeof(float)) != 0) {
            std::printf("%s attention: other bits alone (position %ld, window %ld)\n", tier.name,
                        long(position + t), long(shape.window));
            ++failures;
        }
        const int64_t first =
            shape.window > 0 ? std::max<int64_t>(0, position + t - shape.window + 1) : 0;
        for (int64_t g = 0; g < group; ++g) {
            const float *row = q.data() + t * stride + g * dim;
            std::vector<double> scores;
            double top = -INFINITY;
            for (int64_t p = first; p <= position + t; ++p) {
                double score = 0.0;
                for (int64_t d = 0; d < dim; ++d) {
                    const double x = pairs ? to_bf16(row[d] * factor) : row[d] * factor;
                    score += x * keys[size_t(p)][size_t(d)];
                }
                score *= M_LN2;
                if (shape.softcap > 0)
                    score = shape.softcap * std::tanh(score / shape.softcap);
                scores.push_back(score);
                top = std::max(top, score);
            }
            double total = 0.0;
            if (beside != nullptr) {
                top = std::max(top, double(sinks[size_t(g)]));
                total = std::exp(sinks[size_t(g)] - top);
            }
            for (double &score : scores)
                total += score = std::exp(score - top);
            for (int64_t d = 0; d < dim; ++d) {
                double wanted = 0.0;
                for (size_t i = 0; i < scores.size(); ++i)
                    wanted += scores[i] / total * values[size_t(first) + i][size_t(d)];
                // Errors of rounded weights are independent, so their squares add up. With codes,
                // queries and weights of 16 bits are off by some 2^-17 of the largest.
                double squares = 0.0;
                for (size_t i = 0; i < scores.size(); ++i) {
                    const double off = values[size_t(first) + i][size_t(d)] - wanted;
                    squares += std::pow(scores[i] / total * off, 2);
                }
                expect(tier, "attention", out[size_t(t * stride + g * dim + d)], wanted,
                       1e-5 + (pairs   ? 0x1p-6 * std::sqrt(squares)
                               : codes ? 2e-3
                                       : 0.0));
            }
        }
    }
}

// Softplus and what decays by it, at the edges of the exponential too.
void test_softplus(const Tier &tier) {
    Floats x = normal(draw(1, 40), 8.0f);
    for (const float edge : {-1e30f, -104.0f, -87.4f, -17.0f, 0.0f, 17.0f, 88.8f, 1e30f})
        x.push_back(edge);
    const auto n = int64_t(x.size());
    const Floats bias = normal(n), a = normal(n);
    Floats out(x.size());
    apply(tier, "softplus", x.data(), nullptr, out.data(), n, bias.data());
    std::vector<double> wanted;
    for (size_t i = 0; i < x.size(); ++i) {
        const double shifted = x[i] + bias[i];
        wanted.push_back(std::max(shifted, 0.0) + std::log1p(std::exp(-std::abs(shifted))));
        expect(tier, "softplus", out[i], wanted[i], 5e-7);
    }
    for (const RowFunction &each : std::span(tier.row.functions, tier.row.num_functions)) {
        if (each.name != std::string("decay"))
            continue;
        each.run({{x.data()}, {bias.data(), a.data()}, nullptr, out.data(), n});
        for (size_t i = 0; i < x.size(); ++i) {
            const double exponent = double(a[i]) * wanted[i];
            if (exponent < 80.0)
                expect(tier, "decay", out[i], std::exp(exponent), 1e-6 * (1 + std::abs(exponent)));
        }
        return;
    }
    expect(tier, "decay", 1, 0, 0);
}

// `n` rows as the kernels take them: each padded to whole vectors, with zeros.
struct PaddedRows {
    int64_t n, width, stride;
    Floats values;

    PaddedRows(int64_t rows, int64_t columns)
        : n(rows), width(columns), stride((columns + 15) / 16 * 16 + 16 * draw(0, 1)),
          values(size_t(n * stride)) {
        for (int64_t t = 0; t < n; ++t) {
            const Floats row = normal(width, 0.5f);
            std::copy(row.begin(), row.end(), values.begin() + t * stride);
        }
    }
    const float *row(int64_t t) const { return values.data() + t * stride; }
};

void test_convolution(const Tier &tier) {
    const int64_t taps = draw(2, 9), tokens = draw(1, 20), n = draw(1, 70);
    const int64_t padded = (n + 15) / 16 * 16, ldo = padded + 16 * draw(0, 1);
    const Floats weight = normal(taps * n), bias = normal(n);
    std::vector<Floats> inputs;
    std::vector<const float *> rows;
    for (int64_t t = 0; t < taps - 1 + tokens; ++t)
        inputs.push_back(normal(n));
    for (const Floats &row : inputs)
        rows.push_back(row.data());
    const bool silu = draw(0, 1) == 1, biased = draw(0, 1) == 1;
    Floats out(size_t((tokens - 1) * ldo + padded), NAN);
    tier.recurrence.conv({rows.data(), tokens, taps, weight.data(), n,
                          biased ? bias.data() : nullptr, silu, n, out.data(), ldo});
    for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t i = 0; i < padded; ++i) {
            double wanted = i < n && biased ? bias[size_t(i)] : 0.0;
            for (int64_t j = 0; i < n && j < taps; ++j)
                wanted += double(weight[size_t(j * n + i)]) * inputs[size_t(t + j)][size_t(i)];
            if (silu)
                wanted /= 1.0 + std::exp(-wanted);
            expect(tier, "convolution", out[size_t(t * ldo + i)], wanted, 3e-6);
        }
        Floats alone(static_cast<size_t>(padded));
        tier.recurrence.conv({rows.data() + t, 1, taps, weight.data(), n,
                              biased ? bias.data() : nullptr, silu, n, alone.data(), padded});
        expect(tier, "convolution of one token",
               std::memcmp(alone.data(), out.data() + t * ldo, size_t(padded) * 4), 0, 0);
    }
}

void test_unit(const Tier &tier) {
    const int64_t n = draw(1, 200);
    Floats x = normal(n);
    const Floats before = x, y = normal(n);
    tier.recurrence.unit(x.data(), n, 0.5f);
    double squares = 0.0, product = 0.0, magnitude = 0.0;
    for (size_t i = 0; i < x.size(); ++i) {
        squares += double(before[i]) * before[i];
        product += double(before[i]) * y[i];
        magnitude += std::abs(double(before[i]) * y[i]);
    }
    for (size_t i = 0; i < x.size(); ++i)
        expect(tier, "unit", x[i], 0.5 * before[i] / std::sqrt(squares + 1e-6), 1e-6);
    expect(tier, "dot", tier.recurrence.dot(before.data(), y.data(), n), product, 1e-6 * magnitude);
}

// Takes a tile through tokens at once and in pieces: the same bits.
template <class Run>
Floats in_pieces(const Tier &tier, const char *what, Floats &tile, int64_t tokens, int64_t lanes,
                 Run &&run) {
    const auto through = [&](Floats &state, auto &&next) {
        Floats out(size_t(tokens * lanes), NAN);
        for (int64_t at = 0; at < tokens;) {
            const int64_t count = next(tokens - at);
            run(state.data(), at, count, out.data() + at * lanes);
            at += count;
        }
        return out;
    };
    Floats other = tile;
    const Floats out = through(tile, [](int64_t left) { return left; });
    const Floats pieces = through(other, [](int64_t left) { return draw(1, left); });
    if (std::memcmp(out.data(), pieces.data(), out.size() * 4) != 0 ||
        std::memcmp(tile.data(), other.data(), tile.size() * 4) != 0)
        expect(tier, what, 1, 0, 0);
    return out;
}

void test_delta(const Tier &tier) {
    const int64_t depth = draw(1, 140), tokens = draw(1, 12), lanes = draw(1, 5 * kStateLanes);
    const int64_t tiles = (lanes + kStateLanes - 1) / kStateLanes;
    const PaddedRows q(tokens, depth), v(tokens, tiles * kStateLanes);
    PaddedRows k = q;
    k.values = normal(int64_t(k.values.size()), 0.1f);
    const Floats kq = normal(tokens);
    Floats decay = normal(tokens), beta = normal(tokens);
    for (size_t t = 0; t < decay.size(); ++t) {
        decay[t] = 1.0f / (1.0f + std::exp(decay[t]));
        beta[t] = 1.0f / (1.0f + std::exp(beta[t]));
    }
    Floats tile = normal(tiles * depth * kStateLanes);
    std::vector<double> state(tile.begin(), tile.end());
    const auto run = [&](float *at, int64_t first, int64_t count, float *out) {
        std::vector<float *> places;
        for (int64_t i = 0; i < tiles; ++i)
            places.push_back(at + i * depth * kStateLanes);
        const DeltaRows rows{q.row(first),        k.row(first),     q.stride,
                             v.row(first),        v.stride,         decay.data() + first,
                             beta.data() + first, kq.data() + first};
        tier.recurrence.delta(places.data(), depth, count, rows, lanes, out, lanes);
    };
    const Floats out = in_pieces(tier, "delta in pieces", tile, tokens, lanes, run);
    for (int64_t t = 0; t < tokens; ++t) {
        const double g = decay[size_t(t)];
        for (int64_t lane = 0; lane < tiles * kStateLanes; ++lane) {
            const auto place = [&](int64_t i) {
                return size_t((lane / kStateLanes * depth + i) * kStateLanes + lane % kStateLanes);
            };
            double of_key = 0.0, of_query = 0.0;
            for (int64_t i = 0; i < depth; ++i) {
                of_key += state[place(i)] * k.row(t)[i];
                of_query += state[place(i)] * q.row(t)[i];
            }
            const double change = (v.row(t)[lane] - g * of_key) * beta[size_t(t)];
            if (lane < lanes)
                expect(tier, "delta", out[size_t(t * lanes + lane)],
                       g * of_query + change * kq[size_t(t)], 2e-5);
            for (int64_t i = 0; i < depth; ++i) {
                double &entry = state[place(i)];
                entry = g * entry + k.row(t)[i] * change;
            }
        }
    }
    for (size_t i = 0; i < tile.size(); ++i)
        expect(tier, "delta's state", tile[i], state[i], 1e-5);
}

void test_mamba(const Tier &tier) {
    const int64_t depth = draw(1, 140), tokens = draw(1, 12), lanes = draw(1, kStateLanes);
    const PaddedRows x(tokens, kStateLanes), b(tokens, depth);
    PaddedRows c = b;
    c.values = normal(int64_t(c.values.size()), 0.5f);
    Floats dt = normal(tokens);
    for (float &value : dt)
        value = std::exp(value);
    const float a = -0.5f, d = 0.7f;
    Floats tile = normal(depth * kStateLanes);
    std::vector<double> state(tile.begin(), tile.end());
    const auto run = [&](float *at, int64_t first, int64_t count, float *out) {
        const MambaRows rows{
            x.row(first), x.stride, b.row(first), c.row(first), b.stride, dt.data() + first, a, d};
        tier.recurrence.mamba(at, depth, count, rows, lanes, out, lanes);
    };
    const Floats out = in_pieces(tier, "mamba in pieces", tile, tokens, lanes, run);
    for (int64_t t = 0; t < tokens; ++t) {
        const double decay = std::exp(double(dt[size_t(t)]) * a);
        for (int64_t lane = 0; lane < kStateLanes; ++lane) {
            const double input = x.row(t)[lane];
            double found = d * input;
            for (int64_t i = 0; i < depth; ++i) {
                double &entry = state[size_t(i * kStateLanes + lane)];
                entry = decay * entry + b.row(t)[i] * dt[size_t(t)] * input;
                found += entry * c.row(t)[i];
            }
            if (lane < lanes)
                expect(tier, "mamba", out[size_t(t * lanes + lane)], found, 2e-5);
        }
    }
    for (size_t i = 0; i < tile.size(); ++i)
        expect(tier, "mamba's state", tile[i], state[i], 1e-5);
}

} // namespace
} // namespace octavo

int main(int argc, char **argv) {
    using namespace octavo;
    const int cases = argc > 1 ? std::atoi(argv[1]) : 100;
    for (const char *name : {"generic", "avx2", "avx512", "avx512_bf16"}) {
        try {
            const Tier &tier = find_tier(name);
            for (int i = 0; i < cases; ++i) {
                test_rows(tier);
                test_store(tier);
                test_attention(tier);
                test_softplus(tier);
                test_convolution(tier);
                test_unit(tier);
                test_delta(tier);
                test_mamba(tier);
            }
        } catch (const std::invalid_argument &error) {
            std::printf("kernels_test: %s\n", error.what());
        }
    }
    std::printf("kernels_test: %d failures\n", failures);
    return failures != 0;
}

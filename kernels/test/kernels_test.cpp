// Row-wise kernels and attention of every tier this CPU has, against plain double arithmetic, over
// odd shapes. Every buffer has exactly the size the kernel may touch, for the address sanitizer.
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
#include <random>
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

float from_half(HalfKind kind, uint16_t half) {
    if (kind == HalfKind::F16)
        return from_f16(half);
    const uint32_t bits = uint32_t(half) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

void test_rows(const Tier &tier) {
    const RowKernels &row = tier.row;
    const int64_t n = draw(1, 100);
    const Floats x = normal(n, 3.0f), y = normal(n);
    Floats out(x.size());

    row.rms_norm(x.data(), y.data(), out.data(), n, 1e-5f);
    double squares = 0.0;
    for (const float value : x)
        squares += double(value) * value;
    for (size_t i = 0; i < x.size(); ++i) {
        const double wanted = x[i] / std::sqrt(squares / double(n) + 1e-5) * y[i];
        expect(tier, "rms_norm", out[i], wanted, 2e-6);
    }
    Floats sum = y;
    row.add_scaled(x.data(), 0.7f, sum.data(), n);
    for (size_t i = 0; i < x.size(); ++i)
        expect(tier, "add_scaled", sum[i], double(y[i]) + double(x[i]) * 0.7f, 3e-7);

    Floats in_place = x;
    row.rms_norm(in_place.data(), y.data(), in_place.data(), n, 1e-5f);
    if (in_place != out)
        expect(tier, "rms_norm in place", 1, 0, 0);

    row.add(x.data(), y.data(), out.data(), n);
    for (size_t i = 0; i < x.size(); ++i)
        expect(tier, "add", out[i], x[i] + y[i], 0);
    row.silu(x.data(), y.data(), out.data(), n);
    for (size_t i = 0; i < x.size(); ++i) {
        expect(tier, "silu", out[i], x[i] / (1.0 + std::exp(-double(x[i]))) * y[i], 1e-6);
    }
    row.gelu_tanh(x.data(), y.data(), out.data(), n);
    for (size_t i = 0; i < x.size(); ++i) {
        const double v = x[i];
        const double inner = std::sqrt(2.0 / M_PI) * (v + 0.044715 * v * v * v);
        expect(tier, "gelu", out[i], 0.5 * v * (1.0 + std::tanh(inner)) * y[i], 2e-6);
    }
    // Where the exponential is beyond its range, and just before.
    const Floats edges = {-1e30f, -200.0f, -104.0f, -89.1f, -88.75f, -88.7f, -87.4f, -87.3f,
                          -0.0f,  87.3f,   87.4f,   88.7f,  88.75f,  89.1f,  200.0f, 1e30f};
    const Floats ones(edges.size(), 1.0f);
    Floats gated = ones;
    row.silu(edges.data(), ones.data(), gated.data(), int64_t(edges.size()));
    for (size_t i = 0; i < edges.size(); ++i)
        expect(tier, "silu", gated[i], edges[i] / (1.0 + std::exp(-double(edges[i]))), 1e-6);
    Floats unknown = {NAN};
    row.silu(unknown.data(), ones.data(), unknown.data(), 1);
    if (!std::isnan(unknown[0]))
        expect(tier, "silu of NaN", 1, 0, 0);

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

// Where element d of the token in `slot` lies in a block's keys and values of one head.
size_t key_at(int64_t dim, int64_t slot, int64_t d) {
    return size_t((slot / kTokenTile * dim / 2 + d / 2) * 2 * kTokenTile + slot % kTokenTile * 2 +
                  d % 2);
}
size_t value_at(int64_t dim, int64_t slot, int64_t d) {
    return size_t((slot / 2 * dim + d) * 2 + slot % 2);
}

// Rounding to 16 bits: values of every magnitude, the special ones among them, and nothing beside
// the slot is written.
void test_store(const Tier &tier) {
    AttentionShape shape{};
    shape.head_dim = 2 * draw(1, 50);
    shape.block_size = kTokenTile * draw(1, 3);
    shape.kind = draw(0, 1) == 0 ? HalfKind::F16 : HalfKind::BF16;
    const int64_t dim = shape.head_dim;
    const int64_t slot = draw(0, shape.block_size - 1);
    Floats x[2] = {normal(dim), normal(dim)};
    for (Floats &each : x) {
        for (float &value : each)
            value = std::ldexp(value, int(draw(-30, 20)));
        each[0] = std::vector<float>{0.0f, -0.0f,    INFINITY, -INFINITY,
                                     NAN,  65504.0f, 65520.0f, 1e30f}[size_t(draw(0, 7))];
    }
    const auto untouched = uint16_t(draw(0, 0xffff));
    std::vector<uint16_t> stored[2];
    for (auto &each : stored)
        each.assign(size_t(dim * shape.block_size), untouched);
    tier.attention.store(shape, slot, x[0].data(), x[1].data(),
                         reinterpret_cast<std::byte *>(stored[0].data()),
                         reinterpret_cast<std::byte *>(stored[1].data()));
    for (int which = 0; which < 2; ++which) {
        for (int64_t d = 0; d < dim; ++d) {
            const size_t at = which == 0 ? key_at(dim, slot, d) : value_at(dim, slot, d);
            double wanted = x[which][size_t(d)];
            if (shape.kind == HalfKind::F16 && !std::isnan(wanted))
                wanted = std::clamp(wanted, -65504.0, 65504.0);
            const double got = from_half(shape.kind, stored[which][at]);
            stored[which][at] = untouched;
            if (std::isinf(wanted) && got == wanted)
                continue;
            const double step = shape.kind == HalfKind::F16
                                    ? std::max(std::abs(wanted) * 0x1p-11, 0x1p-25)
                                    : std::abs(wanted) * 0x1p-8;
            if (std::isnan(wanted) != std::isnan(got) || std::abs(got - wanted) > step)
                expect(tier, "store", got, wanted, 0);
        }
        for (const uint16_t each : stored[which]) {
            if (each != untouched)
                expect(tier, "store: another slot", each, untouched, 0);
        }
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
    shape.block_bytes = 2 * shape.head_dim * shape.block_size * 2;
    shape.kind = draw(0, 1) == 0 ? HalfKind::F16 : HalfKind::BF16;
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
    const size_t values_at = size_t(dim * shape.block_size);
    std::vector<uint16_t> arena(order.size() * values_at * 2, 0xffff);
    std::vector<Floats> keys, values; // as stored
    for (int64_t p = 0; p < length; ++p) {
        const Floats key = normal(dim), value = normal(dim);
        keys.emplace_back(key.size());
        values.emplace_back(value.size());
        if (p < low)
            continue;
        const int64_t slot = p % shape.block_size;
        uint16_t *block =
            arena.data() + size_t(table[size_t(p / shape.block_size)]) * values_at * 2;
        tier.attention.store(shape, slot, key.data(), value.data(),
                             reinterpret_cast<std::byte *>(block),
                             reinterpret_cast<std::byte *>(block + values_at));
        for (int64_t d = 0; d < dim; ++d) {
            keys.back()[size_t(d)] = from_half(shape.kind, block[key_at(dim, slot, d)]);
            values.back()[size_t(d)] =
                from_half(shape.kind, block[values_at + value_at(dim, slot, d)]);
        }
    }
    const int64_t stride = group * dim + draw(0, 5);
    const Floats q = normal((tokens - 1) * stride + group * dim);
    const auto *base = reinterpret_cast<const std::byte *>(arena.data());
    const AttentionQuery query{
        q.data(), stride, position, tokens, table.data(), base, base + values_at * 2};

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
            Floats states(size_t(shape.state_floats(rows) * (end - begin)));
            for (int64_t c = begin; c < end;) {
                const int64_t to = std::min(end, c + draw(1, 3));
                float *at = states.data() + shape.state_floats(rows) * (c - begin);
                tier.attention.attend(shape, {part, c, to}, nullptr, true, at, scratch.data());
                c = to;
            }
            tier.attention.fold(shape, rows, end - begin, states.data(), state.data());
        }
        tier.attention.finish(shape, part.tokens, state.data(), out.data(), stride);
        return out;
    };
    // Queries and weights are rounded to bf16 where the products are of bf16.
    const bool pairs = shape.kind == HalfKind::BF16 && tier.name == std::string("avx512_bf16");
    const float factor = shape.scale * 1.44269504f;
    const Floats out = run(query, false);
    for (int64_t t = 0; t < tokens; ++t) {
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
                    score += x * double(keys[size_t(p)][size_t(d)]);
                }
                score *= M_LN2;
                if (shape.softcap > 0)
                    score = shape.softcap * std::tanh(score / shape.softcap);
                scores.push_back(score);
                top = std::max(top, score);
            }
            double total = 0.0;
            for (double &score : scores)
                total += score = std::exp(score - top);
            for (int64_t d = 0; d < dim; ++d) {
                double wanted = 0.0;
                for (size_t i = 0; i < scores.size(); ++i)
                    wanted += scores[i] / total * values[size_t(first) + i][size_t(d)];
                // Errors of rounded weights are independent, so their squares add up.
                double squares = 0.0;
                for (size_t i = 0; i < scores.size(); ++i) {
                    const double off = values[size_t(first) + i][size_t(d)] - wanted;
                    squares += std::pow(scores[i] / total * off, 2);
                }
                expect(tier, "attention", out[size_t(t * stride + g * dim + d)], wanted,
                       1e-5 + (pairs ? 0x1p-6 * std::sqrt(squares) : 0.0));
            }
        }
    }
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
            }
        } catch (const std::invalid_argument &error) {
            std::printf("kernels_test: %s\n", error.what());
        }
    }
    std::printf("kernels_test: %d failures\n", failures);
    return failures != 0;
}

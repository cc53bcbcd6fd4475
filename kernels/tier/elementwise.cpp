#include "tier.h"

namespace octavo::OCTAVO_TIER {

void add(const float *x, const float *y, float *out, int64_t n);

void add(const float *x, const float *y, float *out, int64_t n) {
    for (int64_t i = 0; i < n; ++i) out[i] = x[i] + y[i];
}

} // namespace octavo::OCTAVO_TIER

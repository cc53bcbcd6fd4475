#include "bind.h"

// Weak until every part is in place.
[[gnu::weak]] void bind_runtime(nanobind::module_ &m);
[[gnu::weak]] void bind_linear(nanobind::module_ &m);
[[gnu::weak]] void bind_sampler(nanobind::module_ &m);

NB_MODULE(_native, m) {
    m.doc() = "Octavo's C++ kernels.";
    if (bind_linear)
        bind_linear(m);
    bind_merges(m);
    if (bind_sampler)
        bind_sampler(m);
    if (bind_runtime)
        bind_runtime(m);
}

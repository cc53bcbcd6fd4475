#include "bind.h"

NB_MODULE(_native, m) {
    // An LLM that lives until the interpreter exits is no leak.
    nanobind::set_leak_warnings(false);
    m.doc() = "Octavo's C++ kernels.";
    bind_machine_limits(m);
    bind_linear(m);
    bind_merges(m);
    bind_quantize(m);
    bind_runtime(m);
    bind_sampler(m);
}

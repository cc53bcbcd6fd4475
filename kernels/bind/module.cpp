#include "bind.h"

NB_MODULE(_native, m) {
    m.doc() = "Octavo's C++ kernels.";
    bind_linear(m);
    bind_merges(m);
    bind_runtime(m);
    bind_sampler(m);
}

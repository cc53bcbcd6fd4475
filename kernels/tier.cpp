#include "tier.h"

#include <array>
#include <stdexcept>
#include <string>

namespace octavo {
namespace {

#ifdef OCTAVO_X86
// libgcc's and compiler-rt's tests include whether the system saves the registers (XGETBV).
bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
}

bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
}

bool has_avx512_bf16() {
    return has_avx512() && __builtin_cpu_supports("avx512bf16");
}
#endif

struct Entry {
    Tier tier;
    bool (*supported)();
    const char *needs;
};

#define OCTAVO_TABLE(name)                                                                         \
    {#name,                                                                                        \
     linear_kernels_##name(),                                                                      \
     row_kernels_##name(),                                                                         \
     attention_kernels_##name(),                                                                   \
     recurrence_kernels_##name(),                                                                  \
     scan_kernels_##name()}

// Best first.
const auto &entries() {
    static const std::array table{
#ifdef OCTAVO_X86
        Entry{OCTAVO_TABLE(avx512_bf16), has_avx512_bf16, "AVX-512 F, BW, DQ, VL, VNNI and BF16"},
        Entry{OCTAVO_TABLE(avx512), has_avx512, "AVX-512 F, BW, DQ, VL and VNNI"},
        Entry{OCTAVO_TABLE(avx2), has_avx2, "AVX2, FMA and F16C"},
#endif
        Entry{OCTAVO_TABLE(generic), [] { return true; }, "nothing"},
    };
    return table;
}

} // namespace

const Tier &find_tier(std::string_view name) {
    std::string known;
    for (const Entry &entry : entries()) {
        if (name.empty() && entry.supported())
            return entry.tier;
        if (name == entry.tier.name) {
            if (entry.supported())
                return entry.tier;
            throw std::invalid_argument("instruction set " + std::string(name) + " needs " +
                                        entry.needs + ", which this CPU does not offer");
        }
        known += (known.empty() ? "" : ", ") + std::string(entry.tier.name);
    }
    throw std::invalid_argument("unknown instruction set '" + std::string(name) +
                                "'; this build has " + known);
}

} // namespace octavo

#include "thermocline/isa.h"

#include <cstring>

#include "amx_permission.h"

namespace thermocline {

namespace portable { extern const KernelSet kSet; }
#if defined(__x86_64__)
namespace avx2 { extern const KernelSet kSet; }
namespace avxvnni { extern const KernelSet kSet; }
namespace avx512 { extern const KernelSet kSet; }
namespace amx { extern const TileKernels kTiles; }
namespace amx_emulated { extern const TileKernels kTiles; }
#elif defined(__aarch64__)
namespace neon { extern const KernelSet kSet; }
#endif

namespace {

#if defined(__x86_64__)
bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avxvnni() { return has_avx2() && __builtin_cpu_supports("avxvnni"); }
bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
}
bool has_amx() { return has_avx512() && has_bf16_tiles() && ask_for_tiles(); }
#endif

}  // namespace

const SetChoice* kernel_sets(size_t& count) {
#if defined(__x86_64__)
    // Tiles are for prompts; all else is what AVX-512 does.
    static const KernelSet amx_set{"amx", avx512::kSet.gemm, &amx::kTiles};
    static const KernelSet emulated_set{"amx_emulated", avx512::kSet.gemm, &amx_emulated::kTiles};
#endif
    static const SetChoice sets[] = {
        {&portable::kSet, true},
#if defined(__x86_64__)
        {&avx2::kSet, has_avx2()},
        {&avxvnni::kSet, has_avxvnni()},
        {&avx512::kSet, has_avx512()},
        {&amx_set, has_amx()},
        {&emulated_set, has_avx512(), true},
#elif defined(__aarch64__)
        {&neon::kSet, true},
#endif
    };
    count = sizeof sets / sizeof sets[0];
    return sets;
}

const SetChoice* find_kernel_set(const char* name) {
    size_t count = 0;
    const SetChoice* sets = kernel_sets(count);
    for (size_t i = 0; i < count; ++i)
        if (std::strcmp(sets[i].set->name, name) == 0) return &sets[i];
    return nullptr;
}

}  // namespace thermocline

#include "thermocline/isa.h"

#include <cstring>

#include "amx_permission.h"

namespace thermocline {

namespace portable { extern const GemmKernels gemm_kernels; }
#if defined(__x86_64__)
namespace avx2 { extern const GemmKernels gemm_kernels; }
namespace avxvnni { extern const GemmKernels gemm_kernels; }
namespace avx512 { extern const GemmKernels gemm_kernels; }
namespace amx { extern const TileKernels tile_kernels; }
namespace amx_emulated { extern const TileKernels tile_kernels; }
#elif defined(__aarch64__)
namespace neon { extern const GemmKernels gemm_kernels; }
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
    static const SetChoice sets[] = {
        {{"portable", &portable::gemm_kernels, &portable::dense_kernels}, true},
#if defined(__x86_64__)
        {{"avx2", &avx2::gemm_kernels, &avx2::dense_kernels}, has_avx2()},
        {{"avxvnni", &avxvnni::gemm_kernels, &avx2::dense_kernels}, has_avxvnni()},
        {{"avx512", &avx512::gemm_kernels, &avx512::dense_kernels}, has_avx512()},
        // Tiles are for prompts; all else is what AVX-512 does.
        {{"amx", &avx512::gemm_kernels, &avx512::dense_kernels, &amx::tile_kernels}, has_amx()},
        {{"amx_emulated", &avx512::gemm_kernels, &avx512::dense_kernels, &amx_emulated::tile_kernels},
         has_avx512(),
         true},
#elif defined(__aarch64__)
        {{"neon", &neon::gemm_kernels, &neon::dense_kernels}, true},
#endif
    };
    count = sizeof sets / sizeof sets[0];
    return sets;
}

const SetChoice* find_kernel_set(const char* name) {
    size_t count = 0;
    const SetChoice* sets = kernel_sets(count);
    for (size_t i = 0; i < count; ++i)
        if (std::strcmp(sets[i].set.name, name) == 0) return &sets[i];
    return nullptr;
}

}  // namespace thermocline

#include "thermocline/isa.h"

#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

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

// Entries of codebooks are put together by shuffles. Intel's processors have fewer units for such of 512 bits than for
// those of 256, and take long to move a register's parts to general ones: there the narrower form is faster, by up to
// four fifths for long indices. The results are equal to the bit.
bool is_narrow_on_intel(int type_id) {
    switch (type_id) {
        case 17:  // IQ2_XS
        case 19:  // IQ1_S
        case 21:  // IQ3_S
        case 22:  // IQ2_S
        case 29: return true;  // IQ1_M
        default: return false;
    }
}
RowsFn find_rows_on_intel(int type_id, const QuantForm& form, int64_t tokens) {
    const GemmKernels& kernels = is_narrow_on_intel(type_id) ? avx2::gemm_kernels : avx512::gemm_kernels;
    return kernels.find_rows(type_id, form, tokens);
}
void pack_on_intel(int type_id, const PackSource& from, int group, int strip, QuantPanel& panel) {
    const GemmKernels& kernels = is_narrow_on_intel(type_id) ? avx2::gemm_kernels : avx512::gemm_kernels;
    kernels.pack(type_id, from, group, strip, panel);
}

// Whether few tokens' weights come faster by the nearest cache, close ahead of their use, and left out of the others. Measured
// on a Zen 5: 5 to 25 % more from memory than by the second-level cache, with every set. Elsewhere not tried.
bool asks_nearest() {
    constexpr unsigned kZen5 = 0x1a;
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__builtin_cpu_is("amd") || !__get_cpuid(1, &a, &b, &c, &d)) return false;
    const unsigned family = (a >> 8 & 15) + (a >> 20 & 255);
    return family >= kZen5;
}

const GemmKernels* avx512_gemm() {
    static const GemmKernels on_intel = [] {
        GemmKernels kernels = avx512::gemm_kernels;
        kernels.find_rows = find_rows_on_intel;
        kernels.pack = pack_on_intel;
        return kernels;
    }();
    return __builtin_cpu_is("intel") ? &on_intel : &avx512::gemm_kernels;
}
#endif

}  // namespace

const SetChoice* kernel_sets(size_t& count) {
#if defined(__x86_64__)
    static const bool nearest = asks_nearest();
#endif
    static const SetChoice sets[] = {
        {{"portable", &portable::gemm_kernels, &portable::dense_kernels}, true},
#if defined(__x86_64__)
        {{"avx2", &avx2::gemm_kernels, &avx2::dense_kernels, nullptr, nearest}, has_avx2()},
        {{"avxvnni", &avxvnni::gemm_kernels, &avx2::dense_kernels, nullptr, nearest}, has_avxvnni()},
        {{"avx512", avx512_gemm(), &avx512::dense_kernels, nullptr, nearest}, has_avx512()},
        // Tiles are for prompts; all else is what AVX-512 does.
        {{"amx", avx512_gemm(), &avx512::dense_kernels, &amx::tile_kernels, nearest}, has_amx()},
        {{"amx_emulated", avx512_gemm(), &avx512::dense_kernels, &amx_emulated::tile_kernels, nearest},
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

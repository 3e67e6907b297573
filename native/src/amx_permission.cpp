#include "amx_permission.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cstdint>

namespace thermocline {

#if defined(__x86_64__) && defined(__linux__)
namespace {

// State components of tiles: their configuration and their contents.
constexpr unsigned kTileConfig = 17, kTileData = 18;

bool bit(unsigned word, int index) { return (word >> index & 1u) != 0; }

uint64_t saved_state() {
    uint32_t low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return static_cast<uint64_t>(high) << 32 | low;
}

bool request() {
    constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
    return syscall(SYS_arch_prctl, kRequestPermission, static_cast<long>(kTileData)) == 0;
}

}  // namespace

bool has_bf16_tiles() {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !bit(c, 27)) return false;  // OSXSAVE
    const uint64_t wanted = 1ull << kTileConfig | 1ull << kTileData;
    if ((saved_state() & wanted) != wanted) return false;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    const bool tiles = bit(d, 22) && bit(d, 24) && bit(d, 25);  // amx-bf16, amx-tile, amx-int8
    const bool bytes = bit(c, 1);                               // avx512-vbmi
    return tiles && bytes && a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && bit(a, 5);  // avx512-bf16
}

bool ask_for_tiles() {
    static const bool granted = request();
    return granted;
}

#else

bool has_bf16_tiles() { return false; }
bool ask_for_tiles() { return false; }

#endif

}  // namespace thermocline

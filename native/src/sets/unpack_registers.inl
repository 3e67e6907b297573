// What unpack.inl is made of: loads, and the few steps for which each instruction set has its own way.
// Registers hold 16 or 32 bytes; the compiler splits them where it must.
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace thermocline::THERMOCLINE_SET {
namespace {
namespace unpacking {

#define THERMOCLINE_INLINE inline __attribute__((always_inline))

typedef uint64_t Run16 __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint64_t Run32 __attribute__((vector_size(32), aligned(1), may_alias));
typedef int8_t Sixteen __attribute__((vector_size(16), aligned(1), may_alias));

// Byte j of the result is the byte of `x` that the j-th of sixteen constants names.
#if defined(__clang__)
#define THERMOCLINE_PICK16(x, ...) __builtin_shufflevector(x, x, __VA_ARGS__)
#else
#define THERMOCLINE_PICK16(x, ...) __builtin_shuffle(x, Sixteen{__VA_ARGS__})
#endif

constexpr uint64_t kEach = 0x0101010101010101;  // times a byte: that byte eight times
constexpr uint64_t kLow4 = 15 * kEach;

THERMOCLINE_INLINE Run16& run16(uint8_t* p) { return *reinterpret_cast<Run16*>(p); }
THERMOCLINE_INLINE const Run16& run16(const uint8_t* p) { return *reinterpret_cast<const Run16*>(p); }
THERMOCLINE_INLINE Run32& run32(uint8_t* p) { return *reinterpret_cast<Run32*>(p); }
THERMOCLINE_INLINE const Run32& run32(const uint8_t* p) { return *reinterpret_cast<const Run32*>(p); }

template <typename T>
THERMOCLINE_INLINE T load(const uint8_t* p) {
    T value;
    std::memcpy(&value, p, sizeof value);
    return value;
}

// IEEE half to float; exact for subnormals.
THERMOCLINE_INLINE float half(uint16_t bits) {
#if defined(__F16C__)
    return _cvtsh_ss(bits);
#else
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
    const uint32_t rest = static_cast<uint32_t>(bits & 0x7fffu) << 13;
    if (rest < 0x400u << 13) {
        const float tiny = static_cast<float>(bits & 0x3ffu) * 0x1p-24f;
        return __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, tiny) | sign);
    }
    const uint32_t rebias = rest >= 0x7c00u << 13 ? 224u << 23 : 112u << 23;
    return __builtin_bit_cast(float, sign | (rest + rebias));
#endif
}

THERMOCLINE_INLINE float half_at(const uint8_t* p) { return half(load<uint16_t>(p)); }

// Two halves: scale[0] = scale[1] = the first, minimum[0] = minimum[1] = minus the second.
THERMOCLINE_INLINE void scale_and_minimum(const uint8_t* p, float* scale, float* minimum) {
#if defined(__F16C__)
    const __m128 both = _mm_cvtph_ps(_mm_cvtsi32_si128(load<int32_t>(p)));
    _mm_storel_pi(reinterpret_cast<__m64*>(scale), _mm_moveldup_ps(both));
    _mm_storel_pi(reinterpret_cast<__m64*>(minimum), _mm_xor_ps(_mm_movehdup_ps(both), _mm_set1_ps(-0.0f)));
#else
    scale[0] = scale[1] = half_at(p);
    minimum[0] = minimum[1] = -half_at(p + 2);
#endif
}

// out[j] = d * x[j].
THERMOCLINE_INLINE void times16(float d, const Sixteen& x, float* out) {
#if defined(__AVX2__)
    const __m256 factor = _mm256_set1_ps(d);
    const auto low = reinterpret_cast<__m128i>(x);
    const __m128i parts[2] = {low, _mm_unpackhi_epi64(low, low)};
    for (int j = 0; j < 2; ++j) {
        const __m256 y = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(parts[j]));
        _mm256_storeu_ps(out + 8 * j, _mm256_mul_ps(factor, y));
    }
#else
    float y[16];
    for (int j = 0; j < 16; ++j) y[j] = d * static_cast<float>(x[j]);
    std::memcpy(out, y, sizeof y);
#endif
}

// Byte j of the result is table[byte j of x], for bytes below 16.
THERMOCLINE_INLINE Run16 look_up16(const uint8_t* table, Run16 x) {
#if defined(__SSSE3__)
    const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return reinterpret_cast<Run16>(_mm_shuffle_epi8(values, reinterpret_cast<__m128i>(x)));
#elif defined(__aarch64__)
    return reinterpret_cast<Run16>(vqtbl1q_u8(vld1q_u8(table), reinterpret_cast<uint8x16_t>(x)));
#else
    uint8_t bytes[16];
    run16(bytes) = x;
    for (int j = 0; j < 16; ++j) bytes[j] = table[bytes[j]];
    return run16(bytes);
#endif
}

// Byte j of `mask` becomes 255 where bit j of `bits` is set, else 0.
THERMOCLINE_INLINE void bits_to_masks(uint32_t bits, Run32& mask) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    mask = reinterpret_cast<Run32>(_mm256_movm_epi8(bits));
#elif defined(__AVX2__)
    const __m256i byte_of = _mm256_set_epi64x(3 * kEach, 2 * kEach, kEach, 0);
    const __m256i bit_of = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
    const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(bits)), byte_of);
    mask = reinterpret_cast<Run32>(_mm256_cmpeq_epi8(_mm256_and_si256(spread, bit_of), bit_of));
#else
    Run16 halves[2];
    for (auto& half_mask : halves) {
        const Run16 bit_of = {0x8040201008040201, 0x8040201008040201};
        const Run16 spread = {(bits & 255u) * kEach, ((bits >> 8) & 255u) * kEach};
        half_mask = reinterpret_cast<Run16>(reinterpret_cast<Sixteen>(spread & bit_of) ==
                                            reinterpret_cast<Sixteen>(bit_of));
        bits >>= 16;
    }
    mask = Run32{halves[0][0], halves[0][1], halves[1][0], halves[1][1]};
#endif
}

}  // namespace unpacking
}  // namespace
}  // namespace thermocline::THERMOCLINE_SET

// GGUF blocks to float32, one decoder per type. Source of the layouts: the ggml block definitions as
// documented by the gguf package, which is also the oracle in the tests.
#include <bit>
#include <cstring>

#include "thermocline/dot.h"
#include "thermocline/kernels.h"

namespace thermocline {
namespace {

inline uint16_t load_u16(const uint8_t* p) {
    uint16_t v;
    std::memcpy(&v, p, 2);
    return v;
}

// IEEE half to float without branches, so that a loop over it vectorises; subnormals are exact.
inline __attribute__((always_inline)) float half_to_float(uint16_t h) {
    constexpr uint32_t kExponent = 0x7c00u << 13;
    uint32_t bits = static_cast<uint32_t>(h & 0x7fffu) << 13;
    const uint32_t exponent = bits & kExponent;
    bits += (127u - 15u) << 23;
    const uint32_t infinite = bits + ((128u - 16u) << 23);
    const float tiny = std::bit_cast<float>(bits + (1u << 23)) - std::bit_cast<float>(113u << 23);
    bits = exponent == kExponent ? infinite : bits;
    bits = exponent == 0 ? std::bit_cast<uint32_t>(tiny) : bits;
    return std::bit_cast<float>(bits | (static_cast<uint32_t>(h & 0x8000u) << 16));
}

THERMOCLINE_CLONES void decode_f16(const uint8_t* src, float* dst, int64_t count) {
    for (int64_t i = 0; i < count; ++i) dst[i] = half_to_float(load_u16(src + 2 * i));
}

THERMOCLINE_CLONES void decode_bf16(const uint8_t* src, float* dst, int64_t count) {
    for (int64_t i = 0; i < count; ++i)
        dst[i] = std::bit_cast<float>(static_cast<uint32_t>(load_u16(src + 2 * i)) << 16);
}

THERMOCLINE_CLONES void decode_q8_0(const uint8_t* src, float* dst, int64_t count) {
    for (int64_t b = 0; b < count; b += 32, src += 34, dst += 32) {
        const float d = half_to_float(load_u16(src));
        const auto* q = reinterpret_cast<const int8_t*>(src + 2);
        for (int j = 0; j < 32; ++j) dst[j] = d * static_cast<float>(q[j]);
    }
}

THERMOCLINE_CLONES void decode_q4_0(const uint8_t* src, float* dst, int64_t count) {
    for (int64_t b = 0; b < count; b += 32, src += 18, dst += 32) {
        const float d = half_to_float(load_u16(src));
        const uint8_t* q = src + 2;
        for (int j = 0; j < 16; ++j) dst[j] = d * static_cast<float>((q[j] & 15) - 8);
        for (int j = 0; j < 16; ++j) dst[j + 16] = d * static_cast<float>((q[j] >> 4) - 8);
    }
}

// Scale and minimum of sub-block j (of 8) from the 12 packed bytes that Q4_K and Q5_K share.
inline void scale_and_min(const uint8_t* packed, int j, float& scale, float& minimum) {
    int s, m;
    if (j < 4) {
        s = packed[j] & 63;
        m = packed[j + 4] & 63;
    } else {
        s = (packed[j + 4] & 15) | ((packed[j - 4] >> 6) << 4);
        m = (packed[j + 4] >> 4) | ((packed[j] >> 6) << 4);
    }
    scale = static_cast<float>(s);
    minimum = static_cast<float>(m);
}

THERMOCLINE_CLONES void decode_q4_k(const uint8_t* src, float* dst, int64_t count) {
    for (int64_t b = 0; b < count; b += 256, src += 144, dst += 256) {
        const float d = half_to_float(load_u16(src)), dmin = half_to_float(load_u16(src + 2));
        for (int j = 0; j < 8; ++j) {
            float scale, minimum;
            scale_and_min(src + 4, j, scale, minimum);
            const float ds = d * scale, dm = dmin * minimum;
            const uint8_t* q = src + 16 + (j / 2) * 32;
            const int shift = (j & 1) * 4;
            float* y = dst + j * 32;
            for (int l = 0; l < 32; ++l) y[l] = ds * static_cast<float>((q[l] >> shift) & 15) - dm;
        }
    }
}

THERMOCLINE_CLONES void decode_q5_k(const uint8_t* src, float* dst, int64_t count) {
    for (int64_t b = 0; b < count; b += 256, src += 176, dst += 256) {
        const float d = half_to_float(load_u16(src)), dmin = half_to_float(load_u16(src + 2));
        const uint8_t* high = src + 16;
        for (int j = 0; j < 8; ++j) {
            float scale, minimum;
            scale_and_min(src + 4, j, scale, minimum);
            const float ds = d * scale, dm = dmin * minimum;
            const uint8_t* q = src + 48 + (j / 2) * 32;
            const int shift = (j & 1) * 4;
            float* y = dst + j * 32;
            for (int l = 0; l < 32; ++l)
                y[l] = ds * static_cast<float>(((q[l] >> shift) & 15) | (((high[l] >> j) & 1) << 4)) - dm;
        }
    }
}

THERMOCLINE_CLONES void decode_q6_k(const uint8_t* src, float* dst, int64_t count) {
    for (int64_t b = 0; b < count; b += 256, src += 210, dst += 256) {
        const float d = half_to_float(load_u16(src + 208));
        const auto* scales = reinterpret_cast<const int8_t*>(src + 192);
        for (int j = 0; j < 8; ++j) {  // 32 elements each: half j / 4, quarter j % 4 of that half
            const uint8_t* low = src + (j / 4) * 64 + (j & 1) * 32;
            const uint8_t* high = src + 128 + (j / 4) * 32;
            const int low_shift = ((j >> 1) & 1) * 4, high_shift = (j & 3) * 2;
            const float first = d * static_cast<float>(scales[j * 2]);
            const float second = d * static_cast<float>(scales[j * 2 + 1]);
            float* y = dst + j * 32;
            for (int l = 0; l < 32; ++l) {
                const int q = ((low[l] >> low_shift) & 15) | (((high[l] >> high_shift) & 3) << 4);
                y[l] = (l < 16 ? first : second) * static_cast<float>(q - 32);
            }
        }
    }
}

}  // namespace

bool format_info(int type_id, FormatInfo& info) {
    switch (static_cast<Format>(type_id)) {
        case Format::F32: info = {1, 4}; return true;
        case Format::F16: info = {1, 2}; return true;
        case Format::BF16: info = {1, 2}; return true;
        case Format::Q4_0: info = {32, 18}; return true;
        case Format::Q8_0: info = {32, 34}; return true;
        case Format::Q4_K: info = {256, 144}; return true;
        case Format::Q5_K: info = {256, 176}; return true;
        case Format::Q6_K: info = {256, 210}; return true;
    }
    return false;
}

void decode(Format format, const uint8_t* src, float* dst, int64_t count) {
    switch (format) {
        case Format::F32: std::memcpy(dst, src, static_cast<size_t>(count) * 4); return;
        case Format::F16: return decode_f16(src, dst, count);
        case Format::BF16: return decode_bf16(src, dst, count);
        case Format::Q8_0: return decode_q8_0(src, dst, count);
        case Format::Q4_0: return decode_q4_0(src, dst, count);
        case Format::Q4_K: return decode_q4_k(src, dst, count);
        case Format::Q5_K: return decode_q5_k(src, dst, count);
        case Format::Q6_K: return decode_q6_k(src, dst, count);
    }
}

}  // namespace thermocline

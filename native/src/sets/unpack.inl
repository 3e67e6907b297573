// Quantised blocks to the form of thermocline/unpack.h. Compiled once per instruction set.
//
// Shifts work on 64-bit words, since no x86 set shifts bytes; the masks after them drop what came from
// the neighbouring byte.
#include "thermocline/unpack.h"
#include "unpack_registers.inl"

namespace thermocline::THERMOCLINE_SET {
namespace {
namespace unpacking {

// 16 bytes, low nibbles first, to q[32].
THERMOCLINE_INLINE void nibbles16(const uint8_t* src, uint8_t* q) {
    run16(q) = run16(src) & kLow4;
    run16(q + 16) = (run16(src) >> 4) & kLow4;
}

// The same, with bit j of the four bytes at `high` as fifth bit of q[j].
THERMOCLINE_INLINE void five_bits32(const uint8_t* high, const uint8_t* low, uint8_t* q) {
    Run32 fifth;
    bits_to_masks(load<uint32_t>(high), fifth);
    const Run16 x = run16(low), y = x >> 4;
    const Run32 both = {x[0], x[1], y[0], y[1]};
    run32(q) = (both & kLow4) | (fifth & (16 * kEach));
}

// 64 bytes to q[256]: of each half, the pairs of bits from the lowest up, 32 columns each.
THERMOCLINE_INLINE void bit_pairs256(const uint8_t* src, uint8_t* q) {
    for (int part = 0; part < 2; ++part, src += 32, q += 128)
        for (int j = 0; j < 4; ++j) run32(q + 32 * j) = (run32(src) >> (2 * j)) & (3 * kEach);
}

void q4_0(const uint8_t* src, int64_t count, uint8_t* q, float* scale, float*) {
    for (int64_t k = 0; k < count; k += 32, src += 18, q += 32, scale += 2) {
        scale[0] = scale[1] = half_at(src);
        nibbles16(src + 2, q);
    }
}

void q4_1(const uint8_t* src, int64_t count, uint8_t* q, float* scale, float* minimum) {
    for (int64_t k = 0; k < count; k += 32, src += 20, q += 32, scale += 2, minimum += 2) {
        scale_and_minimum(src, scale, minimum);
        nibbles16(src + 4, q);
    }
}

void q5_0(const uint8_t* src, int64_t count, uint8_t* q, float* scale, float*) {
    for (int64_t k = 0; k < count; k += 32, src += 22, q += 32, scale += 2) {
        scale[0] = scale[1] = half_at(src);
        five_bits32(src + 2, src + 6, q);
    }
}

void q5_1(const uint8_t* src, int64_t count, uint8_t* q, float* scale, float* minimum) {
    for (int64_t k = 0; k < count; k += 32, src += 24, q += 32, scale += 2, minimum += 2) {
        scale_and_minimum(src, scale, minimum);
        five_bits32(src + 4, src + 8, q);
    }
}

void q8_0(const uint8_t* src, int64_t count, uint8_t* q, float* scale, float*) {
    for (int64_t k = 0; k < count; k += 32, src += 34, q += 32, scale += 2) {
        scale[0] = scale[1] = half_at(src);
        run32(q) = run32(src + 2) ^ (128 * kEach);
    }
}

// 16 bytes of 4-bit scales (low) and minimums (high), 64 of q, then d and dmin.
void q2_k(const uint8_t* src, int64_t count, uint8_t* q, float* scale, float* minimum) {
    for (int64_t k = 0; k < count; k += 256, src += 84, q += 256, scale += 16, minimum += 16) {
        const Run16 x = run16(src);
        times16(half_at(src + 80), reinterpret_cast<Sixteen>(x & kLow4), scale);
        times16(half_at(src + 82), reinterpret_cast<Sixteen>((x >> 4) & kLow4), minimum);
        bit_pairs256(src + 16, q);
    }
}

// 32 bytes of third bits, 64 of bit pairs, 12 of scales, d. Scale j (of 16, less 32) has its low four
// bits in byte j % 8, nibble j / 8, and its high two in byte 8 + j % 4, pair j / 4.
void q3_k(const uint8_t* src, int64_t count, uint8_t* q, float* scale, float*) {
    for (int64_t k = 0; k < count; k += 256, src += 110, q += 256, scale += 16) {
        const auto low = load<uint64_t>(src + 96);
        const uint64_t tail = load<uint32_t>(src + 104);
        const uint64_t high = tail | (tail >> 2) << 32;
        const Run16 multiples = {(low & kLow4) | (high & (3 * kEach)) << 4,
                                 ((low >> 4) & kLow4) | (high & (48 * kEach))};
        times16(half_at(src + 108), reinterpret_cast<Sixteen>(multiples) - 32, scale);

        const Run32 third = run32(src);
        for (int part = 0; part < 2; ++part) {
            const Run32 pairs = run32(src + 32 + 32 * part);
            for (int j = 0; j < 4; ++j)
                run32(q + 128 * part + 32 * j) = ((pairs >> (2 * j)) & (3 * kEach)) |
                                                 (((third >> (4 * part + j)) << 2) & (4 * kEach));
        }
    }
}

// The 12 bytes of eight 6-bit scales and minimums that Q4_K and Q5_K share: the first four scales, the
// first four minimums, then the low nibbles of the last four of both, whose high two bits are on top of
// the first eight bytes.
THERMOCLINE_INLINE void six_bit_scales(const uint8_t* src, float* scale, float* minimum) {
    const auto a = load<uint32_t>(src + 4), b = load<uint32_t>(src + 8), c = load<uint32_t>(src + 12);
    const uint64_t scale_tail = (c & 0x0f0f0f0fu) | ((a >> 2) & 0x30303030u);
    const uint64_t minimum_tail = ((c >> 4) & 0x0f0f0f0fu) | ((b >> 2) & 0x30303030u);
    // One per 32 columns, wanted per 16.
    const Run16 x = {(a & 0x3f3f3f3fu) | scale_tail << 32, (b & 0x3f3f3f3fu) | minimum_tail << 32};
    const auto bytes = reinterpret_cast<Sixteen>(x);
    const Sixteen scales =
        THERMOCLINE_PICK16(bytes, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    const Sixteen minimums =
        THERMOCLINE_PICK16(bytes, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15);
    times16(half_at(src), scales, scale);
    times16(half_at(src + 2), minimums, minimum);
}

void q4_k(const uint8_t* src, int64_t count, uint8_t* q, float* scale, float* minimum) {
    for (int64_t k = 0; k < count; k += 256, src += 144, q += 256, scale += 16, minimum += 16) {
        six_bit_scales(src, scale, minimum);
        for (int j = 0; j < 4; ++j) {
            const Run32 x = run32(src + 16 + 32 * j);
            run32(q + 64 * j) = x & kLow4;
            run32(q + 64 * j + 32) = (x >> 4) & kLow4;
        }
    }
}

void q5_k(const uint8_t* src, int64_t count, uint8_t* q, float* scale, float* minimum) {
    for (int64_t k = 0; k < count; k += 256, src += 176, q += 256, scale += 16, minimum += 16) {
        six_bit_scales(src, scale, minimum);
        const Run32 fifth = run32(src + 16);
        for (int j = 0; j < 4; ++j) {
            const Run32 x = run32(src + 48 + 32 * j);
            run32(q + 64 * j) = (x & kLow4) | (((fifth >> (2 * j)) << 4) & (16 * kEach));
            run32(q + 64 * j + 32) =
                ((x >> 4) & kLow4) | (((fifth >> (2 * j + 1)) << 4) & (16 * kEach));
        }
    }
}

void q6_k(const uint8_t* src, int64_t count, uint8_t* q, float* scale, float*) {
    for (int64_t k = 0; k < count; k += 256, src += 210, scale += 16) {
        times16(half_at(src + 208), reinterpret_cast<Sixteen>(run16(src + 192)), scale);
        for (int part = 0; part < 2; ++part, q += 128) {
            const Run32 a = run32(src + 64 * part), b = run32(src + 64 * part + 32);
            const Run32 high = run32(src + 128 + 32 * part);
            run32(q) = (a & kLow4) | ((high << 4) & (48 * kEach));
            run32(q + 32) = (b & kLow4) | ((high << 2) & (48 * kEach));
            run32(q + 64) = ((a >> 4) & kLow4) | (high & (48 * kEach));
            run32(q + 96) = ((b >> 4) & kLow4) | ((high >> 2) & (48 * kEach));
        }
    }
}

// Each byte is a fraction of 256 whose first digits in base three are the weights: q[j * stride + i] is
// digit j of byte i. What is left after a digit is three times the byte, modulo 256.
template <int width>
THERMOCLINE_INLINE void base_three(const uint8_t* src, int digits, int stride, uint8_t* q) {
    typedef uint8_t Fractions __attribute__((vector_size(width)));
    typedef int8_t Signed __attribute__((vector_size(width)));
    Fractions x;
    std::memcpy(&x, src, width);
    for (int j = 0; j < digits; ++j, q += stride) {
        // A third of 256 is passed at 86, two at 171; only signed bytes compare well on x86.
        const Signed moved = reinterpret_cast<Signed>(x ^ 128);
        const Signed digit = -((moved > 85 - 128) + (moved > 170 - 128));
        std::memcpy(q, &digit, width);
        x = x + x + x;
    }
}

void tq1_0(const uint8_t* src, int64_t count, uint8_t* q, float* scale, float*) {
    for (int64_t k = 0; k < count; k += 256, src += 54, q += 256, scale += 16) {
        base_three<16>(src, 5, 32, q);
        base_three<16>(src + 16, 5, 32, q + 16);
        base_three<16>(src + 32, 5, 16, q + 160);
        base_three<4>(src + 48, 4, 4, q + 240);
        const float d = half_at(src + 52);
        for (int j = 0; j < 16; ++j) scale[j] = d;
    }
}

void tq2_0(const uint8_t* src, int64_t count, uint8_t* q, float* scale, float*) {
    for (int64_t k = 0; k < count; k += 256, src += 66, q += 256, scale += 16) {
        bit_pairs256(src, q);
        const float d = half_at(src + 64);
        for (int j = 0; j < 16; ++j) scale[j] = d;
    }
}

// Twice the value of an E2M1 code, plus 12: the doubling makes it whole, the scales are halved.
constexpr uint8_t kE2M1[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
// The levels of IQ4_NL and IQ4_XS, plus 128.
constexpr uint8_t kUneven[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

THERMOCLINE_INLINE void coded_nibbles16(const uint8_t* table, const uint8_t* src, uint8_t* q) {
    run16(q) = look_up16(table, run16(src) & kLow4);
    run16(q + 16) = look_up16(table, (run16(src) >> 4) & kLow4);
}

void mxfp4(const uint8_t* src, int64_t count, uint8_t* q, float* scale, float*) {
    for (int64_t k = 0; k < count; k += 32, src += 17, q += 32, scale += 2) {
        // Half of 2^(e - 127); the two smallest are subnormal.
        const uint32_t e = src[0], bits = e < 2 ? 0x00200000u << e : (e - 1) << 23;
        scale[0] = scale[1] = __builtin_bit_cast(float, bits);
        coded_nibbles16(kE2M1, src + 1, q);
    }
}

// Half of an unsigned E4M3 number (bias 7); 0x7f is no number and reads as 0, the sign bit is ignored
// (but 0xff is a number: the gguf package, and ggml, test the whole byte).
THERMOCLINE_INLINE float half_of_e4m3(uint8_t byte) {
    const uint32_t bits = byte & 0x7fu;
    const float tiny = static_cast<float>(bits) * 0x1p-10f;
    const float normal = __builtin_bit_cast(float, (bits << 20) + ((127u - 8u) << 23));
    return byte == 0x7f ? 0.0f : bits < 8 ? tiny : normal;
}

// Four scales, then 8 bytes per 16 columns: the low nibbles, then the high ones.
void nvfp4(const uint8_t* src, int64_t count, uint8_t* q, float* scale, float*) {
    for (int64_t k = 0; k < count; k += 64, src += 36, q += 64, scale += 4) {
        for (int j = 0; j < 4; ++j) scale[j] = half_of_e4m3(src[j]);
        for (int j = 0; j < 2; ++j) {
            const Run16 low = look_up16(kE2M1, run16(src + 4 + 16 * j) & kLow4);
            const Run16 high = look_up16(kE2M1, (run16(src + 4 + 16 * j) >> 4) & kLow4);
            run32(q + 32 * j) = Run32{low[0], high[0], low[1], high[1]};
        }
    }
}

void iq4_nl(const uint8_t* src, int64_t count, uint8_t* q, float* scale, float*) {
    for (int64_t k = 0; k < count; k += 32, src += 18, q += 32, scale += 2) {
        scale[0] = scale[1] = half_at(src);
        coded_nibbles16(kUneven, src + 2, q);
    }
}

// d, 2 bytes of the high and 4 of the low bits of eight 6-bit scales (less 32), 128 of nibbles.
void iq4_xs(const uint8_t* src, int64_t count, uint8_t* q, float* scale, float*) {
    for (int64_t k = 0; k < count; k += 256, src += 136, scale += 16) {
        const uint32_t low = load<uint32_t>(src + 4), h = load<uint16_t>(src + 2);
        const uint32_t high = (h & 15u) | (h & 0xf0u) << 4 | (h & 0xf00u) << 8 | (h & 0xf000u) << 12;
        // Scales 0, 2, 4, 6, then 1, 3, 5, 7; each wanted twice.
        const uint64_t even = (low & 0x0f0f0f0fu) | (high & 0x03030303u) << 4;
        const uint64_t odd = ((low >> 4) & 0x0f0f0f0fu) | (high & 0x0c0c0c0cu) << 2;
        const Run16 x = {even | odd << 32, 0};
        const auto bytes = reinterpret_cast<Sixteen>(x);
        const Sixteen multiples =
            THERMOCLINE_PICK16(bytes, 0, 0, 4, 4, 1, 1, 5, 5, 2, 2, 6, 6, 3, 3, 7, 7);
        times16(half_at(src), multiples - 32, scale);
        for (int j = 0; j < 8; ++j, q += 32) coded_nibbles16(kUneven, src + 8 + 16 * j, q);
    }
}

}  // namespace unpacking
}  // namespace
}  // namespace thermocline::THERMOCLINE_SET

#include "unpack_grids.inl"

namespace thermocline::THERMOCLINE_SET {
namespace {

// The function for a type; nullptr where unpack_info has nothing.
inline UnpackFn find_unpack(int type_id) {
    switch (type_id) {
        case 2: return unpacking::q4_0;
        case 3: return unpacking::q4_1;
        case 6: return unpacking::q5_0;
        case 7: return unpacking::q5_1;
        case 8: return unpacking::q8_0;
        case 10: return unpacking::q2_k;
        case 11: return unpacking::q3_k;
        case 12: return unpacking::q4_k;
        case 13: return unpacking::q5_k;
        case 14: return unpacking::q6_k;
        case 16: return unpacking::iq2_xxs;
        case 17: return unpacking::iq2_xs;
        case 18: return unpacking::iq3_xxs;
        case 19: return unpacking::iq1_s;
        case 20: return unpacking::iq4_nl;
        case 21: return unpacking::iq3_s;
        case 22: return unpacking::iq2_s;
        case 23: return unpacking::iq4_xs;
        case 29: return unpacking::iq1_m;
        case 34: return unpacking::tq1_0;
        case 35: return unpacking::tq2_0;
        case 39: return unpacking::mxfp4;
        case 40: return unpacking::nvfp4;
    }
    return nullptr;
}

}  // namespace
}  // namespace thermocline::THERMOCLINE_SET

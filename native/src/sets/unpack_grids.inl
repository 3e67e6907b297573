// The second half of unpack.inl: types whose weights are entries of a codebook, eight weights a step.
// IQ2 and IQ3 entries are magnitudes, with a sign bit a weight: q = offset + magnitude or
// offset - magnitude. IQ1 entries are -1, 0, 1, moved by an eighth up or down: in eighths, plus 9.
#include "thermocline/codebooks.h"

namespace thermocline::THERMOCLINE_SET {
namespace {
namespace unpacking {

// q[32] = offset plus magnitudes, minus where the bit of `signs` is set.
THERMOCLINE_INLINE void store_signed32(uint64_t offset, const Run32& magnitudes, uint32_t signs, uint8_t* q) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    const __m256i start = _mm256_set1_epi64x(static_cast<int64_t>(offset * kEach));
    const auto x = reinterpret_cast<__m256i>(magnitudes);
    run32(q) = reinterpret_cast<Run32>(_mm256_mask_sub_epi8(_mm256_add_epi8(start, x), signs, start, x));
#else
    Run32 minus;
    bits_to_masks(signs, minus);
    // No byte carries into the next: magnitudes are below 64, and not above the offset.
    run32(q) = offset * kEach + magnitudes - ((magnitudes & minus) << 1);
#endif
}

// The 28 low bits of `word` are four times seven signs; the eighth of each makes their number even.
THERMOCLINE_INLINE uint32_t even_signs(uint32_t word) {
    const uint32_t sevens = (word & 0x7fu) | (word & 0x3f80u) << 1 | (word & 0x1fc000u) << 2 |
                            (word & 0xfe00000u) << 3;
    uint32_t odd = sevens ^ (sevens >> 4);
    odd ^= odd >> 2;
    odd ^= odd >> 1;
    return sevens | (odd & 0x01010101u) << 7;
}

THERMOCLINE_INLINE uint64_t entry8(const uint8_t* grid, uint32_t index) {
    return load<uint64_t>(grid + 8 * index);
}

THERMOCLINE_INLINE uint64_t two_entries4(const uint8_t* grid, uint32_t first, uint32_t second) {
    return load<uint32_t>(grid + 4 * first) | static_cast<uint64_t>(load<uint32_t>(grid + 4 * second)) << 32;
}

// d, then per 32 columns four indices and a word: four times seven signs, and the scale on top.
void iq2_xxs(const uint8_t* src, int64_t count, uint8_t* q, float* scale, float*) {
    const uint8_t* grid = codebook(16);
    for (int64_t k = 0; k < count; k += 256, src += 66, scale += 16) {
        const float d = half_at(src);
        for (int j = 0; j < 8; ++j, q += 32) {
            const uint8_t* index = src + 2 + 8 * j;
            const auto word = load<uint32_t>(index + 4);
            scale[2 * j] = scale[2 * j + 1] = d * (0.5f + static_cast<float>(word >> 28)) * 0.25f;
            const Run32 magnitudes = {entry8(grid, index[0]), entry8(grid, index[1]),
                                      entry8(grid, index[2]), entry8(grid, index[3])};
            store_signed32(64, magnitudes, even_signs(word), q);
        }
    }
}

// Sixteen nibbles as the scales d * (0.5 + nibble) * 0.25.
THERMOCLINE_INLINE void quarter_scales(float d, const uint8_t* nibbles, float* scale) {
    for (int j = 0; j < 8; ++j) {
        scale[2 * j] = d * (0.5f + static_cast<float>(nibbles[j] & 15)) * 0.25f;
        scale[2 * j + 1] = d * (0.5f + static_cast<float>(nibbles[j] >> 4)) * 0.25f;
    }
}

// d, 32 words of a 9-bit index and seven signs, 8 bytes of scales.
void iq2_xs(const uint8_t* src, int64_t count, uint8_t* q, float* scale, float*) {
    const uint8_t* grid = codebook(17);
    for (int64_t k = 0; k < count; k += 256, src += 74, scale += 16) {
        quarter_scales(half_at(src), src + 66, scale);
        for (int j = 0; j < 8; ++j, q += 32) {
            const auto words = load<uint64_t>(src + 2 + 8 * j);
            const uint32_t a = words & 0xffff, b = (words >> 16) & 0xffff, c = (words >> 32) & 0xffff;
            const auto d = static_cast<uint32_t>(words >> 48);
            const Run32 magnitudes = {entry8(grid, a & 511u), entry8(grid, b & 511u),
                                      entry8(grid, c & 511u), entry8(grid, d & 511u)};
            const uint32_t sevens = a >> 9 | (b >> 9) << 7 | (c >> 9) << 14 | (d >> 9) << 21;
            store_signed32(64, magnitudes, even_signs(sevens), q);
        }
    }
}

// d, 32 bytes of index, 32 of signs, 8 of two more index bits each, 8 of scales.
void iq2_s(const uint8_t* src, int64_t count, uint8_t* q, float* scale, float*) {
    const uint8_t* grid = codebook(22);
    for (int64_t k = 0; k < count; k += 256, src += 82, scale += 16) {
        quarter_scales(half_at(src), src + 74, scale);
        for (int j = 0; j < 8; ++j, q += 32) {
            const uint8_t* index = src + 2 + 4 * j;
            const uint32_t high = src[66 + j];
            const Run32 magnitudes = {entry8(grid, index[0] | (high & 3u) << 8),
                                      entry8(grid, index[1] | (high & 12u) << 6),
                                      entry8(grid, index[2] | (high & 48u) << 4),
                                      entry8(grid, index[3] | (high & 192u) << 2)};
            store_signed32(64, magnitudes, load<uint32_t>(src + 34 + 4 * j), q);
        }
    }
}

// d, 64 bytes of index, then per 32 columns a word as in IQ2_XXS.
void iq3_xxs(const uint8_t* src, int64_t count, uint8_t* q, float* scale, float*) {
    const uint8_t* grid = codebook(18);
    for (int64_t k = 0; k < count; k += 256, src += 98, scale += 16) {
        const float d = half_at(src);
        for (int j = 0; j < 8; ++j, q += 32) {
            const uint8_t* index = src + 2 + 8 * j;
            const auto word = load<uint32_t>(src + 66 + 4 * j);
            scale[2 * j] = scale[2 * j + 1] = d * (0.5f + static_cast<float>(word >> 28)) * 0.5f;
            const Run32 magnitudes = {
                two_entries4(grid, index[0], index[1]), two_entries4(grid, index[2], index[3]),
                two_entries4(grid, index[4], index[5]), two_entries4(grid, index[6], index[7])};
            store_signed32(64, magnitudes, even_signs(word), q);
        }
    }
}

// d, 64 bytes of index, 8 of a ninth index bit each, 32 of signs, 4 of scales.
void iq3_s(const uint8_t* src, int64_t count, uint8_t* q, float* scale, float*) {
    const uint8_t* grid = codebook(21);
    for (int64_t k = 0; k < count; k += 256, src += 110, scale += 16) {
        const float d = half_at(src);
        for (int j = 0; j < 8; ++j, q += 32) {
            const int nibble = (src[106 + j / 2] >> (4 * (j % 2))) & 15;
            scale[2 * j] = scale[2 * j + 1] = d * static_cast<float>(1 + 2 * nibble);
            const uint8_t* index = src + 2 + 8 * j;
            const uint32_t h = src[66 + j];
            const Run32 magnitudes = {
                two_entries4(grid, index[0] | (h & 1u) << 8, index[1] | (h & 2u) << 7),
                two_entries4(grid, index[2] | (h & 4u) << 6, index[3] | (h & 8u) << 5),
                two_entries4(grid, index[4] | (h & 16u) << 4, index[5] | (h & 32u) << 3),
                two_entries4(grid, index[6] | (h & 64u) << 2, index[7] | (h & 128u) << 1)};
            store_signed32(16, magnitudes, load<uint32_t>(src + 74 + 4 * j), q);
        }
    }
}

// An eighth of a step up, or down where bit 0 of `down` is set; entries hold 8 * (value + 1).
THERMOCLINE_INLINE uint64_t eighths_plus_9(uint64_t entry, uint32_t down) {
    return entry + ((static_cast<uint64_t>(down & 1u) - 1) & (2 * kEach));  // no branch: the bits are random
}

// d, 32 bytes of index, then per 32 columns a word: four times three index bits, scale, direction.
void iq1_s(const uint8_t* src, int64_t count, uint8_t* q, float* scale, float*) {
    const uint8_t* grid = codebook(19);
    for (int64_t k = 0; k < count; k += 256, src += 50, scale += 16) {
        const float d = half_at(src);
        for (int j = 0; j < 8; ++j, q += 32) {
            const uint32_t word = load<uint16_t>(src + 34 + 2 * j);
            const float step = d * static_cast<float>(2 * ((word >> 12) & 7u) + 1);
            scale[2 * j] = scale[2 * j + 1] = step * 0.125f;
            const uint8_t* index = src + 2 + 4 * j;
            const Run32 entries = {entry8(grid, index[0] | (word & 7u) << 8),
                                   entry8(grid, index[1] | (word & 56u) << 5),
                                   entry8(grid, index[2] | (word & 448u) << 2),
                                   entry8(grid, index[3] | ((word >> 9) & 7u) << 8)};
            run32(q) = entries + (word >> 15 ? 0 : 2 * kEach);
        }
    }
}

// 32 bytes of index, 16 of nibbles (three index bits, direction), four words of four 3-bit scales whose
// top nibbles, first word lowest, are d.
void iq1_m(const uint8_t* src, int64_t count, uint8_t* q, float* scale, float*) {
    const uint8_t* grid = codebook(29);
    for (int64_t k = 0; k < count; k += 256, src += 56, scale += 16) {
        const auto words = load<uint64_t>(src + 48);
        const uint64_t d_bits = (words >> 12 & 0xf) | (words >> 24 & 0xf0) | (words >> 36 & 0xf00) |
                                (words >> 48 & 0xf000);
        const float d = half(static_cast<uint16_t>(d_bits));
        for (int j = 0; j < 16; ++j) {
            const auto multiple = static_cast<int>(2 * ((words >> (16 * (j / 4) + 3 * (j % 4))) & 7u) + 1);
            scale[j] = d * static_cast<float>(multiple) * 0.125f;
        }
        for (int j = 0; j < 8; ++j, q += 32) {
            const uint8_t* index = src + 4 * j;
            const uint32_t h = load<uint16_t>(src + 32 + 2 * j);
            const Run32 entries = {eighths_plus_9(entry8(grid, index[0] | (h & 7u) << 8), h >> 3),
                                   eighths_plus_9(entry8(grid, index[1] | (h & 0x70u) << 4), h >> 7),
                                   eighths_plus_9(entry8(grid, index[2] | (h & 0x700u)), h >> 11),
                                   eighths_plus_9(entry8(grid, index[3] | (h & 0x7000u) >> 4), h >> 15)};
            run32(q) = entries;
        }
    }
}

}  // namespace unpacking
}  // namespace
}  // namespace thermocline::THERMOCLINE_SET

// The types that most files are made of, unpacked and transposed in registers: 16 rows at a time, and
// the packed bytes are transposed before they are unpacked, so that each shuffle moves two weights or more
// per byte.

inline __m512 halves_to_floats(__m512i low_words) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(low_words)); }

inline __m512i byte_of(__m512i words, int index) {
    return _mm512_and_si512(_mm512_srli_epi32(words, static_cast<unsigned>(8 * index)), _mm512_set1_epi32(0xff));
}

inline __m512i nibbles(__m512i bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi8(15)); }
inline __m512i high_nibbles(__m512i bytes) { return nibbles(_mm512_srli_epi32(bytes, 4)); }

// Stores the value of one group of 32 columns, once or for both halves.
inline void store_group32(float (*to)[kStripRows], int group, int index, __m512 value) {
    if (group == 32) {
        _mm512_store_ps(to[index], value);
    } else {
        _mm512_store_ps(to[2 * index], value);
        _mm512_store_ps(to[2 * index + 1], value);
    }
}

// Q4_K and Q5_K begin alike: d, dmin, then 8 scales and 8 minima of six bits in 12 bytes.
inline void k_header(const RowPointers& rows, int group, float (*scale_of)[kStripRows],
                     float (*minimum_of)[kStripRows]) {
    __m512i words[4];
    transpose16(rows, 0, words);
    const __m512 d = halves_to_floats(words[0]);
    const __m512 dmin = halves_to_floats(_mm512_srli_epi32(words[0], 16));
    const __m512i six = _mm512_set1_epi8(0x3f), top = _mm512_set1_epi8(0x30);
    const __m512i scales[2] = {
        _mm512_and_si512(words[1], six),
        _mm512_or_si512(nibbles(words[3]), _mm512_and_si512(_mm512_srli_epi32(words[1], 2), top))};
    const __m512i minima[2] = {
        _mm512_and_si512(words[2], six),
        _mm512_or_si512(high_nibbles(words[3]), _mm512_and_si512(_mm512_srli_epi32(words[2], 2), top))};
    for (int g = 0; g < 8; ++g) {
        const __m512 scale = _mm512_cvtepi32_ps(byte_of(scales[g / 4], g % 4));
        const __m512 minimum = _mm512_cvtepi32_ps(byte_of(minima[g / 4], g % 4));
        store_group32(scale_of, group, g, _mm512_mul_ps(d, scale));
        store_group32(minimum_of, group, g, _mm512_mul_ps(dmin, minimum));
    }
}

void pack_q4_k(const RowPointers& rows, int group, int strip, QuantPanel& panel) {
    k_header(rows, group, panel.scale[strip], panel.minimum[strip]);
#pragma GCC unroll 8
    for (int column = 0; column < 8; ++column) {  // 16 bytes hold 16 low and 16 high nibbles
        __m512i bytes[4];
        transpose16(rows, 16 + 16 * column, bytes);
        const int first = column / 2 * 16 + column % 2 * 4;
        for (int i = 0; i < 4; ++i) {
            _mm512_store_si512(panel.q[strip][first + i], nibbles(bytes[i]));
            _mm512_store_si512(panel.q[strip][first + 8 + i], high_nibbles(bytes[i]));
        }
    }
}

void pack_q5_k(const RowPointers& rows, int group, int strip, QuantPanel& panel) {
    k_header(rows, group, panel.scale[strip], panel.minimum[strip]);
    __m512i high[8];
    transpose16(rows, 16, high);
    transpose16(rows, 32, high + 4);
    const __m512i bit = _mm512_set1_epi8(16);
#pragma GCC unroll 8
    for (int column = 0; column < 8; ++column) {
        __m512i bytes[4];
        transpose16(rows, 48 + 16 * column, bytes);
        const int chunk = column / 2, first = chunk * 16 + column % 2 * 4;
        for (int i = 0; i < 4; ++i) {
            // Bit 2 * chunk belongs to the low nibbles, the next to the high ones; both go to bit 4.
            const __m512i h = _mm512_srli_epi32(high[column % 2 * 4 + i], static_cast<unsigned>(2 * chunk));
            const __m512i low_bit = _mm512_and_si512(_mm512_slli_epi32(h, 4), bit);
            const __m512i high_bit = _mm512_and_si512(_mm512_slli_epi32(h, 3), bit);
            _mm512_store_si512(panel.q[strip][first + i], _mm512_or_si512(nibbles(bytes[i]), low_bit));
            _mm512_store_si512(panel.q[strip][first + 8 + i], _mm512_or_si512(high_nibbles(bytes[i]), high_bit));
        }
    }
}

// The float16 at `src` of each row.
inline __m512 row_halves(const RowPointers& rows, int64_t at) {
    alignas(32) uint16_t halves[kStripRows];
    for (int r = 0; r < kStripRows; ++r) __builtin_memcpy(&halves[r], rows.p0 + at + r * rows.stride, 2);
    return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(halves)));
}

inline void q6_k_scales(const RowPointers& rows, float (*scale_of)[kStripRows]) {
    const __m512 d = row_halves(rows, 208);
    __m512i words[4];
    transpose16(rows, 192, words);
    for (int g = 0; g < 16; ++g) {
        const __m512i signed_scale = _mm512_srai_epi32(
            _mm512_slli_epi32(words[g / 4], static_cast<unsigned>(24 - 8 * (g % 4))), 24);
        _mm512_store_ps(scale_of[g], _mm512_mul_ps(d, _mm512_cvtepi32_ps(signed_scale)));
    }
}

void pack_q6_k(const RowPointers& rows, int strip, QuantPanel& panel) {
    q6_k_scales(rows, panel.scale[strip]);
    const __m512i pair = _mm512_set1_epi8(0x30);
#pragma GCC unroll 4
    for (int column = 0; column < 4; ++column) {  // 16 of the 64 bytes of high bit pairs
        const int half = column / 2, part = column % 2;
        __m512i high[4], low[4], low32[4];
        transpose16(rows, 128 + 16 * column, high);
        transpose16(rows, 64 * half + 16 * part, low);
        transpose16(rows, 64 * half + 32 + 16 * part, low32);
        uint8_t(*q)[kStripRows][4] = &panel.q[strip][half * 32 + part * 4];
        for (int i = 0; i < 4; ++i) {
            const __m512i h = high[i];
            const auto joined = [&](__m512i nibble, __m512i shifted) {
                return _mm512_or_si512(nibble, _mm512_and_si512(shifted, pair));
            };
            _mm512_store_si512(q[i], joined(nibbles(low[i]), _mm512_slli_epi32(h, 4)));
            _mm512_store_si512(q[i + 8], joined(nibbles(low32[i]), _mm512_slli_epi32(h, 2)));
            _mm512_store_si512(q[i + 16], joined(high_nibbles(low[i]), h));
            _mm512_store_si512(q[i + 24], joined(high_nibbles(low32[i]), _mm512_srli_epi32(h, 2)));
        }
    }
}

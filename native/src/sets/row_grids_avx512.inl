// The second half of row_formats_avx512.inl: types whose weights are entries of a codebook. Knows no order of rows either.
// Entries are loaded one by one: gathers are slower for most types, and everywhere where processors are protected from
// what leaks through them.

// Eight entries of eight bytes; index_of(i): which.
template <typename IndexOf>
THERMOCLINE_FORCED __m512i entries8(const uint8_t* grid, const IndexOf& index_of) {
    const auto two = [&](int i) {
        const auto at = [&](int k) { return reinterpret_cast<const double*>(grid + 8 * static_cast<size_t>(index_of(k))); };
        return _mm_castpd_si128(_mm_loadh_pd(_mm_load_sd(at(i)), at(i + 1)));
    };
    const auto four = [&](int i) { return _mm256_inserti128_si256(_mm256_castsi128_si256(two(i)), two(i + 2), 1); };
    return two_blocks(four(0), four(4));
}
// Sixteen entries of four bytes.
template <typename Index>
THERMOCLINE_FORCED __m512i entries4(const uint8_t* grid, const Index* index) {
    const auto entry = [&](int i) { return _mm_loadu_si32(grid + 4 * static_cast<size_t>(index[i])); };
    const auto four = [&](int i) {
        __m128i all = entry(i);
        all = _mm_mask_broadcastd_epi32(all, 2, entry(i + 1)), all = _mm_mask_broadcastd_epi32(all, 4, entry(i + 2));
        return _mm_mask_broadcastd_epi32(all, 8, entry(i + 3));
    };
    const auto eight = [&](int i) { return _mm256_inserti128_si256(_mm256_castsi128_si256(four(i)), four(i + 4), 1); };
    return two_blocks(eight(0), eight(8));
}

THERMOCLINE_FORCED __mmask64 mask_at(const uint8_t* signs) {
    uint64_t bits;
    __builtin_memcpy(&bits, signs, 8);
    return _cvtu64_mask64(bits);
}

// Seven bits of each byte, and an eighth that makes their number even.
THERMOCLINE_FORCED __m512i made_even(__m512i sevens) {
    __m512i odd = _mm512_xor_si512(sevens, _mm512_srli_epi64(sevens, 4));
    odd = _mm512_xor_si512(odd, _mm512_srli_epi64(odd, 2));
    odd = _mm512_xor_si512(odd, _mm512_srli_epi64(odd, 1));
    return or_masked(sevens, _mm512_slli_epi64(odd, 7), _mm512_set1_epi8(-128));
}
// The four times seven low bits of each 32 become the low bits of four bytes.
THERMOCLINE_FORCED __m512i sevens_apart(__m512i words) {
    const auto moved = [&](__m512i to, int by, int mask) {
        return or_masked(to, _mm512_slli_epi32(words, static_cast<unsigned>(by)), _mm512_set1_epi32(mask));
    };
    const __m512i first = _mm512_and_si512(words, _mm512_set1_epi32(0x7f));
    return moved(moved(moved(first, 1, 0x7f00), 2, 0x7f0000), 3, 0x7f000000);
}

// Bits: of a weight, without a sign.
template <int Bytes, int Bits>
struct GridRows {
    static constexpr int kBytes = Bytes;
    static constexpr bool kMinimum = false, kBlocks32 = false, kNibbles = false, kGrid = true;
    static THERMOCLINE_FORCED __m512i add_up(const __m512i (&dots)[4]) { return add_fours<dot_bits(Bits)>(dots); }
};

// Magnitudes and where they are negative, for all of which Offset is to be added where weights have no sign.
template <int Bytes, int Bits, int Offset>
struct SignedRows : GridRows<Bytes, Bits> {
    static constexpr bool kSigned = true;
    static THERMOCLINE_FORCED __m512i unsigned_of(__m512i magnitudes, __mmask64 negative) {
        const __m512i start = _mm512_set1_epi8(Offset);
        return _mm512_mask_sub_epi8(_mm512_add_epi8(start, magnitudes), negative, start, magnitudes);
    }
};

// d * (0.5 + nibble) * step of each row
THERMOCLINE_FORCED __m512 nibble_scale(__m512 d, __m512i nibble, float step) {
    const __m512 multiple = _mm512_add_ps(_mm512_set1_ps(0.5f), _mm512_cvtepi32_ps(nibble));
    return _mm512_mul_ps(_mm512_mul_ps(d, multiple), _mm512_set1_ps(step));
}
// Those of 16 groups, whose nibbles lie in two words.
THERMOCLINE_FORCED void quarter_scales(__m512 d, const __m512i* words, float (*scale)[kStripRows]) {
    for (unsigned g = 0; g < 16; ++g) {
        const __m512i nibble = _mm512_and_si512(_mm512_srli_epi32(words[g / 8], 4 * (g % 8)), _mm512_set1_epi32(15));
        _mm512_store_ps(scale[g], nibble_scale(d, nibble, 0.25f));
    }
}

template <>
struct RowFormat<16> : SignedRows<66, 6, 64> {  // IQ2_XXS: d, then eight times four indices and a word of signs and scale
    static THERMOCLINE_FORCED void unpack(const uint8_t* p, __m512i* q, __mmask64* negative, const uint8_t* grid) {
        alignas(32) uint8_t signs[32];
        const __m512i words = _mm512_srli_epi64(_mm512_loadu_si512(p + 2), 32);
        _mm256_store_si256(reinterpret_cast<__m256i*>(signs), _mm512_cvtepi64_epi32(made_even(sevens_apart(words))));
        for (int i = 0; i < 4; ++i) {
            q[i] = entries8(grid, [&](int k) { return p[2 + 16 * i + k / 4 * 8 + k % 4]; });
            negative[i] = mask_at(signs + 8 * i);
        }
    }
    static THERMOCLINE_FORCED void scales(const RowPointers& rows, int group, float (*scale)[kStripRows],
                                          float (*)[kStripRows]) {
        const __m512 d = row_halves(rows, 0);
        for (int j = 0; j < 8; ++j)
            store_group32(scale, group, j, nibble_scale(d, _mm512_srli_epi32(row_words(rows, 6 + 8 * j), 28), 0.25f));
    }
};

template <>
struct RowFormat<17> : SignedRows<74, 6, 64> {  // IQ2_XS: d, 32 times nine bits of index and seven signs, 8 bytes of scales
    static THERMOCLINE_FORCED void unpack(const uint8_t* p, __m512i* q, __mmask64* negative, const uint8_t* grid) {
        alignas(64) uint16_t index[32];
        alignas(32) uint8_t signs[32];
        const __m512i words = _mm512_loadu_si512(p + 2);
        _mm512_store_si512(index, _mm512_and_si512(words, _mm512_set1_epi16(511)));
        const __m512i sevens = _mm512_srli_epi16(words, 9);
        _mm256_store_si256(reinterpret_cast<__m256i*>(signs), _mm512_cvtepi16_epi8(made_even(sevens)));
        for (int i = 0; i < 4; ++i) {
            q[i] = entries8(grid, [&](int k) { return index[8 * i + k]; });
            negative[i] = mask_at(signs + 8 * i);
        }
    }
    static THERMOCLINE_FORCED void scales(const RowPointers& rows, int, float (*scale)[kStripRows],
                                          float (*)[kStripRows]) {
        __m512i words[4];
        transpose16(rows, 58, words);
        quarter_scales(row_halves(rows, 0), words + 2, scale);
    }
};

// 32 indices of eight bits at p and more bits above them: those of four indices lie together in one of `high`.
template <int Bits>
THERMOCLINE_FORCED __m512i longer_indices(const uint8_t* p, __m512i high, int step) {
    const __m512i low = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    const auto moved = [&](__m512i to, int k) {
        const __m512i mask = _mm512_set1_epi64(((1ll << Bits) - 1) << (16 * k + 8));
        return or_masked(to, _mm512_slli_epi64(high, static_cast<unsigned>(16 * k + 8 - step * k)), mask);
    };
    return moved(moved(moved(moved(low, 0), 1), 2), 3);
}

template <>
struct RowFormat<22> : SignedRows<82, 6, 64> {  // IQ2_S: d, 32 bytes of index, 32 of signs, 8 of more index bits, 8 of scales
    static THERMOCLINE_FORCED void unpack(const uint8_t* p, __m512i* q, __mmask64* negative, const uint8_t* grid) {
        alignas(64) uint16_t index[32];
        const __m512i high = _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 66)));
        _mm512_store_si512(index, longer_indices<2>(p + 2, high, 2));
        for (int i = 0; i < 4; ++i) {
            q[i] = entries8(grid, [&](int k) { return index[8 * i + k]; });
            negative[i] = mask_at(p + 34 + 8 * i);
        }
    }
    static THERMOCLINE_FORCED void scales(const RowPointers& rows, int, float (*scale)[kStripRows],
                                          float (*)[kStripRows]) {
        __m512i words[4];
        transpose16(rows, 66, words);
        quarter_scales(row_halves(rows, 0), words + 2, scale);
    }
};

template <>
struct RowFormat<18> : SignedRows<98, 6, 64> {  // IQ3_XXS: d, 64 bytes of index, eight words of signs and scale
    static THERMOCLINE_FORCED void unpack(const uint8_t* p, __m512i* q, __mmask64* negative, const uint8_t* grid) {
        alignas(32) uint8_t signs[32];
        const __m512i words = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 66)));
        _mm256_store_si256(reinterpret_cast<__m256i*>(signs), _mm512_castsi512_si256(made_even(sevens_apart(words))));
        for (int i = 0; i < 4; ++i) {
            q[i] = entries4(grid, p + 2 + 16 * i);
            negative[i] = mask_at(signs + 8 * i);
        }
    }
    static THERMOCLINE_FORCED void scales(const RowPointers& rows, int group, float (*scale)[kStripRows],
                                          float (*)[kStripRows]) {
        const __m512 d = row_halves(rows, 0);
        for (int half = 0; half < 2; ++half) {
            __m512i words[4];
            transpose16(rows, 66 + 16 * half, words);
            for (int j = 0; j < 4; ++j)
                store_group32(scale, group, 4 * half + j, nibble_scale(d, _mm512_srli_epi32(words[j], 28), 0.5f));
        }
    }
};

template <>
struct RowFormat<21> : SignedRows<110, 4, 16> {  // IQ3_S: d, 64 bytes of index, 8 of ninth bits, 32 of signs, 4 of scales
    static THERMOCLINE_FORCED void unpack(const uint8_t* p, __m512i* q, __mmask64* negative, const uint8_t* grid) {
        alignas(64) uint16_t index[64];
        for (int half = 0; half < 2; ++half) {
            uint32_t ninth;
            __builtin_memcpy(&ninth, p + 66 + 4 * half, 4);
            const auto low = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 2 + 32 * half)));
            _mm512_store_si512(index + 32 * half, _mm512_mask_add_epi16(low, _cvtu32_mask32(ninth), low, _mm512_set1_epi16(256)));
        }
        for (int i = 0; i < 4; ++i) {
            q[i] = entries4(grid, index + 16 * i);
            negative[i] = mask_at(p + 74 + 8 * i);
        }
    }
    static THERMOCLINE_FORCED void scales(const RowPointers& rows, int group, float (*scale)[kStripRows],
                                          float (*)[kStripRows]) {
        const __m512 d = row_halves(rows, 0);
        const __m512i word = row_words(rows, 106);
        for (unsigned j = 0; j < 8; ++j) {
            const __m512i twice = _mm512_and_si512(j == 0 ? _mm512_slli_epi32(word, 1) : _mm512_srli_epi32(word, 4 * j - 1), _mm512_set1_epi32(30));
            const __m512 multiple = _mm512_cvtepi32_ps(_mm512_add_epi32(twice, _mm512_set1_epi32(1)));
            store_group32(scale, group, static_cast<int>(j), _mm512_mul_ps(d, multiple));
        }
    }
};

// d * (2 * the low three bits + 1) / 8 of each row
THERMOCLINE_FORCED __m512 eighth_scale(__m512 d, __m512i bits) {
    const __m512i twice = _mm512_slli_epi32(_mm512_and_si512(bits, _mm512_set1_epi32(7)), 1);
    const __m512 multiple = _mm512_cvtepi32_ps(_mm512_add_epi32(twice, _mm512_set1_epi32(1)));
    return _mm512_mul_ps(_mm512_mul_ps(d, multiple), _mm512_set1_ps(0.125f));
}

template <>
struct RowFormat<19> : GridRows<50, 5> {  // IQ1_S: d, 32 bytes of index, eight words: index bits, scale, direction
    static THERMOCLINE_FORCED void unpack(const uint8_t* p, __m512i* q, const uint8_t* grid) {
        alignas(64) uint16_t index[32];
        const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 34));
        _mm512_store_si512(index, longer_indices<3>(p + 2, _mm512_cvtepu16_epi64(words), 3));
        const __m512i two = _mm512_set1_epi8(2);
        const uint64_t up = _cvtmask8_u32(_mm_cmpge_epi16_mask(words, _mm_setzero_si128()));
        for (int i = 0; i < 4; ++i) {
            const auto both = static_cast<__mmask8>((up >> (2 * i) & 1) * 15 | (up >> (2 * i + 1) & 1) * 240);
            const __m512i entries = entries8(grid, [&](int k) { return index[8 * i + k]; });
            q[i] = _mm512_add_epi8(entries, _mm512_maskz_mov_epi64(both, two));
        }
    }
    static THERMOCLINE_FORCED void scales(const RowPointers& rows, int group, float (*scale)[kStripRows],
                                          float (*)[kStripRows]) {
        const __m512 d = row_halves(rows, 0);
        __m512i words[4];
        transpose16(rows, 34, words);
        for (int j = 0; j < 8; ++j)
            store_group32(scale, group, j, eighth_scale(d, _mm512_srli_epi32(words[j / 2], j % 2 == 0 ? 12u : 28u)));
    }
};

template <>
struct RowFormat<29> : GridRows<56, 5> {  // IQ1_M: 32 bytes of index, 32 nibbles of bits and direction, scales
    static THERMOCLINE_FORCED void unpack(const uint8_t* p, __m512i* q, const uint8_t* grid) {
        alignas(64) uint16_t index[32];
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 32)), top = _mm_set1_epi8(8);
        _mm512_store_si512(index, longer_indices<3>(p, _mm512_cvtepu16_epi64(bytes), 4));
        const __m128i other = _mm_srli_epi16(bytes, 4);
        const uint32_t down = _mm_test_epi8_mask(_mm_unpacklo_epi8(bytes, other), top) |
                              static_cast<uint32_t>(_mm_test_epi8_mask(_mm_unpackhi_epi8(bytes, other), top)) << 16;
        for (int i = 0; i < 4; ++i) {
            const auto up = static_cast<__mmask8>(~down >> (8 * i));
            q[i] = _mm512_add_epi8(entries8(grid, [&](int k) { return index[8 * i + k]; }), _mm512_maskz_set1_epi64(up, 0x0202020202020202));
        }
    }
    // Sixteen times three bits in the low twelve of four halves, whose top nibbles, first half lowest, are d.
    static THERMOCLINE_FORCED void scales(const RowPointers& rows, int, float (*scale)[kStripRows],
                                          float (*)[kStripRows]) {
        __m512i words[4];
        transpose16(rows, 40, words);
        const auto nibble = [&](int n) {
            const __m512i top = n % 2 == 0 ? _mm512_srli_epi32(words[2 + n / 2], 12) : _mm512_srli_epi32(words[2 + n / 2], 28);
            return _mm512_slli_epi32(_mm512_and_si512(top, _mm512_set1_epi32(15)), static_cast<unsigned>(4 * n));
        };
        const __m512 d = halves_to_floats(_mm512_or_si512(_mm512_or_si512(nibble(0), nibble(1)), _mm512_or_si512(nibble(2), nibble(3))));
        for (unsigned j = 0; j < 16; ++j) {
            const __m512i bits = _mm512_srli_epi32(words[2 + j / 8], 16 * (j / 4 % 2) + 3 * (j % 4));
            _mm512_store_ps(scale[j], eighth_scale(d, bits));
        }
    }
};

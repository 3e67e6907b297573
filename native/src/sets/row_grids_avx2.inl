// The second half of row_formats_avx2.inl: types whose weights are entries of a codebook. Indices and signs of a row's span
// are laid out once, in the nearest cache; entries are loaded one by one, since gathers are slow on many processors.

// Of one row's span: 32 or 64 indices, where they are longer than bytes; and for each 32 columns 32 signs, or four bytes
// that are added to eight columns each.
struct alignas(32) GridRow {
    union {
        uint16_t index[64];
        uint8_t bytes[64];
    };
    uint32_t bits[8];
    THERMOCLINE_FORCED void store_index(int n, __m256i sixteen) {
        _mm256_store_si256(reinterpret_cast<__m256i*>(index + 16 * n), sixteen);
    }
    // Indices of eight bits are copied, too: one row's are found by one pointer for all rows, then.
    THERMOCLINE_FORCED void copy_bytes(const uint8_t* from) {
        for (int i = 0; i < 2; ++i) store_index(i, load32(from + 32 * i));
    }
    THERMOCLINE_FORCED void store_bits(__m256i all) { _mm256_store_si256(reinterpret_cast<__m256i*>(bits), all); }
};

// Four entries of eight bytes, eight of four; index_of(i): which.
template <typename IndexOf>
THERMOCLINE_FORCED __m256i entries8(const uint8_t* grid, const IndexOf& index_of) {
    const auto two = [&](int i) {
        const auto at = [&](int k) { return reinterpret_cast<const double*>(grid + 8 * static_cast<size_t>(index_of(k))); };
        return _mm_castpd_si128(_mm_loadh_pd(_mm_load_sd(at(i)), at(i + 1)));
    };
    return _mm256_inserti128_si256(_mm256_castsi128_si256(two(0)), two(2), 1);
}
template <typename IndexOf>
THERMOCLINE_FORCED __m256i entries4(const uint8_t* grid, const IndexOf& index_of) {
    const auto four = [&](int i) {
        const auto entry = [&](int k) { return number_at<int32_t>(grid + 4 * static_cast<size_t>(index_of(i + k))); };
        const __m128i all = _mm_insert_epi32(_mm_cvtsi32_si128(entry(0)), entry(1), 1);
        return _mm_insert_epi32(_mm_insert_epi32(all, entry(2), 2), entry(3), 3);
    };
    return _mm256_inserti128_si256(_mm256_castsi128_si256(four(0)), four(4), 1);
}

// Each of four bytes eight times.
THERMOCLINE_FORCED __m256i eight_each(uint32_t four) {
    const int64_t first = 0x0101010101010101;
    const __m256i byte_of = _mm256_set_epi64x(3 * first, 2 * first, first, 0);
    return _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(four)), byte_of);
}
// All bits where one of 32 is set.
THERMOCLINE_FORCED __m256i mask_of(uint32_t bits) {
    const __m256i bit_of = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
    return _mm256_cmpeq_epi8(_mm256_and_si256(eight_each(bits), bit_of), bit_of);
}

// Seven bits of each byte, and an eighth that makes their number even.
THERMOCLINE_FORCED __m256i made_even(__m256i sevens) {
    __m256i odd = _mm256_xor_si256(sevens, _mm256_srli_epi64(sevens, 4));
    odd = _mm256_xor_si256(odd, _mm256_srli_epi64(odd, 2));
    odd = _mm256_xor_si256(odd, _mm256_srli_epi64(odd, 1));
    return _mm256_or_si256(sevens, only(_mm256_slli_epi64(odd, 7), 128));
}
// The four times seven low bits of each 32 become the low bits of four bytes.
THERMOCLINE_FORCED __m256i sevens_apart(__m256i words) {
    const auto moved = [&](int by, int mask) { return _mm256_and_si256(_mm256_slli_epi32(words, by), _mm256_set1_epi32(mask)); };
    return _mm256_or_si256(_mm256_or_si256(moved(0, 0x7f), moved(1, 0x7f00)), _mm256_or_si256(moved(2, 0x7f0000), moved(3, 0x7f000000)));
}
// Sixteen indices of eight bits at p and more bits above them: those of four indices lie together in one of `high`.
template <int Bits>
THERMOCLINE_FORCED __m256i longer_indices(const uint8_t* p, __m256i high, int step) {
    __m256i all = _mm256_cvtepu8_epi16(load16(p));
    for (int k = 0; k < 4; ++k) {
        const __m256i mask = _mm256_set1_epi64x(((1ll << Bits) - 1) << (16 * k + 8));
        all = _mm256_or_si256(all, _mm256_and_si256(_mm256_slli_epi64(high, 16 * k + 8 - step * k), mask));
    }
    return all;
}

// Types with magnitudes and signs (kSigned; kOffset is added to them where weights have no sign), and types with
// unsigned weights. `entries` gives those of 32 columns, number n of the span.
template <int Bytes, int Largest>
struct GridRows {
    static constexpr int kBytes = Bytes, kLargest = Largest, kUnrolled = 1, kTogether = 1;
    static constexpr bool kMinimum = false, kNibbles = false, kGrid = true;
};
template <int Bytes, int Largest, int Offset>
struct SignedRows : GridRows<Bytes, Largest> {
    static constexpr bool kSigned = true;
    static constexpr int kOffset = Offset;
    static THERMOCLINE_FORCED uint32_t signs(const uint8_t*, const GridRow& row, int n) { return row.bits[n]; }
};

// d * (0.5 + nibble) * step of each row
THERMOCLINE_FORCED __m256 nibble_scale(__m256 d, __m256i nibble, float step) {
    const __m256 multiple = _mm256_add_ps(_mm256_set1_ps(0.5f), _mm256_cvtepi32_ps(nibble));
    return _mm256_mul_ps(_mm256_mul_ps(d, multiple), _mm256_set1_ps(step));
}
// Those of 16 groups, whose nibbles lie in the last eight of the 16 bytes at `at`, and d at the row's beginning.
THERMOCLINE_FORCED void quarter_scales(const uint8_t* p, int64_t at, int64_t row_bytes, RowScales& to) {
    __m256i words[4];
    words_of_rows(p + at, row_bytes, words);
    const __m256 d = to_floats(halves_of_rows(p, row_bytes));
    for (int g = 0; g < 16; ++g) {
        const __m256i nibble = _mm256_and_si256(_mm256_srli_epi32(words[2 + g / 8], 4 * (g % 8)), _mm256_set1_epi32(15));
        _mm256_store_ps(to.scale[g], nibble_scale(d, nibble, 0.25f));
    }
}

template <>
struct RowFormat<16> : SignedRows<66, 63, 64> {  // IQ2_XXS: d, then eight times four indices and a word of signs and scale
    static THERMOCLINE_FORCED void prepare(const uint8_t* p, GridRow& to) {
        to.copy_bytes(p + 2);
        const __m256 a = _mm256_castsi256_ps(load32(p + 2)), b = _mm256_castsi256_ps(load32(p + 34));
        const __m256i words = _mm256_permute4x64_epi64(_mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xdd)), 0xd8);
        to.store_bits(made_even(sevens_apart(words)));
    }
    static THERMOCLINE_FORCED __m256i entries(const uint8_t*, const GridRow& row, const uint8_t* grid, int n) {
        return entries8(grid, [&](int k) { return row.bytes[8 * n + k]; });
    }
    static THERMOCLINE_FORCED void scales(const uint8_t* p, int64_t row_bytes, int, RowScales& to) {
        const __m256 d = to_floats(halves_of_rows(p, row_bytes));
        for (int i = 0; i < 4; ++i) {
            __m256i words[4];
            words_of_rows(p + 2 + 16 * i, row_bytes, words);
            for (int j = 0; j < 2; ++j)
                _mm256_store_ps(to.scale[2 * i + j], nibble_scale(d, _mm256_srli_epi32(words[2 * j + 1], 28), 0.25f));
        }
    }
};

template <>
struct RowFormat<17> : SignedRows<74, 63, 64> {  // IQ2_XS: d, 32 times nine bits of index and seven signs, 8 bytes of scales
    static constexpr bool kSixteens = true;
    static THERMOCLINE_FORCED void prepare(const uint8_t* p, GridRow& to) {
        const __m256i words[2] = {load32(p + 2), load32(p + 34)};
        for (int i = 0; i < 2; ++i) to.store_index(i, _mm256_and_si256(words[i], _mm256_set1_epi16(511)));
        const __m256i sevens = _mm256_packus_epi16(_mm256_srli_epi16(words[0], 9), _mm256_srli_epi16(words[1], 9));
        to.store_bits(made_even(_mm256_permute4x64_epi64(sevens, 0xd8)));
    }
    static THERMOCLINE_FORCED __m256i entries(const uint8_t*, const GridRow& row, const uint8_t* grid, int n) {
        return entries8(grid, [&](int k) { return row.index[4 * n + k]; });
    }
    static THERMOCLINE_FORCED void scales(const uint8_t* p, int64_t row_bytes, int, RowScales& to) {
        quarter_scales(p, 58, row_bytes, to);
    }
};

template <>
struct RowFormat<22> : SignedRows<82, 63, 64> {  // IQ2_S: d, 32 bytes of index, 32 of signs, 8 of more index bits, 8 of scales
    static constexpr bool kSixteens = true;
    static THERMOCLINE_FORCED void prepare(const uint8_t* p, GridRow& to) {
        for (int i = 0; i < 2; ++i) {
            const __m256i high = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(number_at<int32_t>(p + 66 + 4 * i)));
            to.store_index(i, longer_indices<2>(p + 2 + 16 * i, high, 2));
        }
    }
    static THERMOCLINE_FORCED uint32_t signs(const uint8_t* p, const GridRow&, int n) {
        return static_cast<uint32_t>(number_at<int32_t>(p + 34 + 4 * n));
    }
    static THERMOCLINE_FORCED __m256i entries(const uint8_t*, const GridRow& row, const uint8_t* grid, int n) {
        return entries8(grid, [&](int k) { return row.index[4 * n + k]; });
    }
    static THERMOCLINE_FORCED void scales(const uint8_t* p, int64_t row_bytes, int, RowScales& to) {
        quarter_scales(p, 66, row_bytes, to);
    }
};

template <>
struct RowFormat<18> : SignedRows<98, 63, 64> {  // IQ3_XXS: d, 64 bytes of index, eight words of signs and scale
    static THERMOCLINE_FORCED void prepare(const uint8_t* p, GridRow& to) {
        to.copy_bytes(p + 2);
        to.store_bits(made_even(sevens_apart(load32(p + 66))));
    }
    static THERMOCLINE_FORCED __m256i entries(const uint8_t*, const GridRow& row, const uint8_t* grid, int n) {
        return entries4(grid, [&](int k) { return row.bytes[8 * n + k]; });
    }
    static THERMOCLINE_FORCED void scales(const uint8_t* p, int64_t row_bytes, int, RowScales& to) {
        const __m256 d = to_floats(halves_of_rows(p, row_bytes));
        for (int half = 0; half < 2; ++half) {
            __m256i words[4];
            words_of_rows(p + 66 + 16 * half, row_bytes, words);
            for (int j = 0; j < 4; ++j)
                _mm256_store_ps(to.scale[4 * half + j], nibble_scale(d, _mm256_srli_epi32(words[j], 28), 0.5f));
        }
    }
};

template <>
struct RowFormat<21> : SignedRows<110, 15, 16> {  // IQ3_S: d, 64 bytes of index, 8 of ninth bits, 32 of signs, 4 of scales
    static THERMOCLINE_FORCED void prepare(const uint8_t* p, GridRow& to) {
        const __m256i bit_of = _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, -32768);
        for (int i = 0; i < 4; ++i) {
            const __m256i ninth = _mm256_set1_epi16(static_cast<int16_t>(number_at<uint16_t>(p + 66 + 2 * i)));
            const __m256i is_set = _mm256_cmpeq_epi16(_mm256_and_si256(ninth, bit_of), bit_of);
            const __m256i low = _mm256_cvtepu8_epi16(load16(p + 2 + 16 * i));
            to.store_index(i, _mm256_or_si256(low, _mm256_and_si256(is_set, _mm256_set1_epi16(256))));
        }
    }
    static THERMOCLINE_FORCED uint32_t signs(const uint8_t* p, const GridRow&, int n) {
        return static_cast<uint32_t>(number_at<int32_t>(p + 74 + 4 * n));
    }
    static THERMOCLINE_FORCED __m256i entries(const uint8_t*, const GridRow& row, const uint8_t* grid, int n) {
        return entries4(grid, [&](int k) { return row.index[8 * n + k]; });
    }
    static THERMOCLINE_FORCED void scales(const uint8_t* p, int64_t row_bytes, int, RowScales& to) {
        const __m256 d = to_floats(halves_of_rows(p, row_bytes));
        const __m256i word = pairs_of_rows(p + 106, row_bytes), one = _mm256_set1_epi32(1);
        for (int j = 0; j < 8; ++j) {
            const __m256i nibble = _mm256_and_si256(_mm256_srli_epi32(word, 4 * j), _mm256_set1_epi32(15));
            const __m256 multiple = _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_slli_epi32(nibble, 1), one));
            _mm256_store_ps(to.scale[j], _mm256_mul_ps(d, multiple));
        }
    }
};

// d * (2 * the low three bits + 1) / 8 of each row
THERMOCLINE_FORCED __m256 eighth_scale(__m256 d, __m256i bits) {
    const __m256i twice = _mm256_slli_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(7)), 1);
    const __m256 multiple = _mm256_cvtepi32_ps(_mm256_add_epi32(twice, _mm256_set1_epi32(1)));
    return _mm256_mul_ps(_mm256_mul_ps(d, multiple), _mm256_set1_ps(0.125f));
}

template <>
struct RowFormat<19> : GridRows<50, 18> {  // IQ1_S: d, 32 bytes of index, eight words: index bits, scale, direction
    static THERMOCLINE_FORCED void prepare(const uint8_t* p, GridRow& to) {
        const __m128i words = load16(p + 34);
        to.store_index(0, longer_indices<3>(p + 2, _mm256_cvtepu16_epi64(words), 3));
        to.store_index(1, longer_indices<3>(p + 18, _mm256_cvtepu16_epi64(_mm_srli_si128(words, 8)), 3));
        const __m256i down = _mm256_cvtepi16_epi32(_mm_srai_epi16(words, 15));
        to.store_bits(_mm256_andnot_si256(down, _mm256_set1_epi8(2)));
    }
    static THERMOCLINE_FORCED __m256i entries(const uint8_t*, const GridRow& row, const uint8_t* grid, int n) {
        const __m256i found = entries8(grid, [&](int k) { return row.index[4 * n + k]; });
        return _mm256_add_epi8(found, _mm256_set1_epi32(static_cast<int>(row.bits[n])));
    }
    static THERMOCLINE_FORCED void scales(const uint8_t* p, int64_t row_bytes, int, RowScales& to) {
        const __m256 d = to_floats(halves_of_rows(p, row_bytes));
        __m256i words[4];
        words_of_rows(p + 34, row_bytes, words);
        for (int j = 0; j < 8; ++j)
            _mm256_store_ps(to.scale[j], eighth_scale(d, _mm256_srli_epi32(words[j / 2], j % 2 == 0 ? 12 : 28)));
    }
};

template <>
struct RowFormat<29> : GridRows<56, 18> {  // IQ1_M: 32 bytes of index, 32 nibbles of bits and direction, scales
    static constexpr bool kSixteens = true;
    static THERMOCLINE_FORCED void prepare(const uint8_t* p, GridRow& to) {
        const __m128i bytes = load16(p + 32), other = _mm_srli_epi16(bytes, 4);
        to.store_index(0, longer_indices<3>(p, _mm256_cvtepu16_epi64(bytes), 4));
        to.store_index(1, longer_indices<3>(p + 16, _mm256_cvtepu16_epi64(_mm_srli_si128(bytes, 8)), 4));
        const __m256i nibbles = _mm256_set_m128i(_mm_unpackhi_epi8(bytes, other), _mm_unpacklo_epi8(bytes, other));
        const __m256i up = _mm256_cmpeq_epi8(only(nibbles, 8), _mm256_setzero_si256());
        to.store_bits(only(up, 2));
    }
    static THERMOCLINE_FORCED __m256i entries(const uint8_t*, const GridRow& row, const uint8_t* grid, int n) {
        return _mm256_add_epi8(entries8(grid, [&](int k) { return row.index[4 * n + k]; }), eight_each(row.bits[n]));
    }
    // Sixteen times three bits in the low twelve of four halves, whose top nibbles, first half lowest, are d.
    static THERMOCLINE_FORCED void scales(const uint8_t* p, int64_t row_bytes, int, RowScales& to) {
        __m256i words[4];
        words_of_rows(p + 40, row_bytes, words);
        const __m256i* at = words + 2;
        const auto nibble = [&](int n) {
            const __m256i top = _mm256_srli_epi32(at[n / 2], n % 2 == 0 ? 12 : 28);
            return _mm256_slli_epi32(_mm256_and_si256(top, _mm256_set1_epi32(15)), 4 * n);
        };
        const __m256 d = low_halves(_mm256_or_si256(_mm256_or_si256(nibble(0), nibble(1)), _mm256_or_si256(nibble(2), nibble(3))));
        for (int j = 0; j < 16; ++j)
            _mm256_store_ps(to.scale[j], eighth_scale(d, _mm256_srli_epi32(at[j / 8], 16 * (j / 4 % 2) + 3 * (j % 4))));
    }
};

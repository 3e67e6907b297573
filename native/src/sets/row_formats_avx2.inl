// How the bytes of eight rows become weights of eight bits and scales, per type: for products of rows as they lie, and
// for packing them into panels. Knows neither.

constexpr int kTreeRows = 8;

// Four units of four bytes at `at` of each of eight rows, rows as lanes.
THERMOCLINE_FORCED void words_of_rows(const uint8_t* at, int64_t row_bytes, __m256i (&words)[4]) {
    const auto load = [&](int row) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at + row * row_bytes)); };
    __m256i in[4];
    for (int i = 0; i < 4; ++i) in[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(load(i)), load(i + 4), 1);
    const __m256i a = _mm256_unpacklo_epi32(in[0], in[1]), b = _mm256_unpackhi_epi32(in[0], in[1]);
    const __m256i c = _mm256_unpacklo_epi32(in[2], in[3]), d = _mm256_unpackhi_epi32(in[2], in[3]);
    words[0] = _mm256_unpacklo_epi64(a, c);
    words[1] = _mm256_unpackhi_epi64(a, c);
    words[2] = _mm256_unpacklo_epi64(b, d);
    words[3] = _mm256_unpackhi_epi64(b, d);
}

// A number at `at` of each of eight rows, put in place one by one: what is written in small pieces to memory can not
// be read back in a large one before it has reached the cache.
template <typename Number>
THERMOCLINE_FORCED int number_at(const uint8_t* at) {
    Number number;
    __builtin_memcpy(&number, at, sizeof number);
    return static_cast<int>(number);
}
THERMOCLINE_FORCED __m128i bytes_of_rows(const uint8_t* at, int64_t row_bytes) {
    const auto byte = [&](int row) { return number_at<uint8_t>(at + row * row_bytes); };
    __m128i all = _mm_cvtsi32_si128(byte(0));
    all = _mm_insert_epi8(all, byte(1), 1), all = _mm_insert_epi8(all, byte(2), 2), all = _mm_insert_epi8(all, byte(3), 3);
    all = _mm_insert_epi8(all, byte(4), 4), all = _mm_insert_epi8(all, byte(5), 5), all = _mm_insert_epi8(all, byte(6), 6);
    return _mm_insert_epi8(all, byte(7), 7);
}
THERMOCLINE_FORCED __m128i halves_of_rows(const uint8_t* at, int64_t row_bytes) {
    const auto half = [&](int row) { return number_at<uint16_t>(at + row * row_bytes); };
    __m128i all = _mm_cvtsi32_si128(half(0));
    all = _mm_insert_epi16(all, half(1), 1), all = _mm_insert_epi16(all, half(2), 2), all = _mm_insert_epi16(all, half(3), 3);
    all = _mm_insert_epi16(all, half(4), 4), all = _mm_insert_epi16(all, half(5), 5), all = _mm_insert_epi16(all, half(6), 6);
    return _mm_insert_epi16(all, half(7), 7);
}
THERMOCLINE_FORCED __m256i pairs_of_rows(const uint8_t* at, int64_t row_bytes) {
    const auto pair = [&](int row) { return number_at<int32_t>(at + row * row_bytes); };
    __m128i low = _mm_cvtsi32_si128(pair(0)), high = _mm_cvtsi32_si128(pair(4));
    low = _mm_insert_epi32(low, pair(1), 1), low = _mm_insert_epi32(low, pair(2), 2), low = _mm_insert_epi32(low, pair(3), 3);
    high = _mm_insert_epi32(high, pair(5), 1), high = _mm_insert_epi32(high, pair(6), 2), high = _mm_insert_epi32(high, pair(7), 3);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}

THERMOCLINE_FORCED __m256 to_floats(__m128i halves) { return _mm256_cvtph_ps(halves); }
// The low and the high float16 of 32 bits.
THERMOCLINE_FORCED __m256 low_halves(__m256i words) {
    const __m256i low = _mm256_and_si256(words, _mm256_set1_epi32(0xffff));
    return to_floats(_mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1)));
}
THERMOCLINE_FORCED __m256 high_halves(__m256i words) { return low_halves(_mm256_srli_epi32(words, 16)); }

// The scales of eight rows' span, and the minima of types that have one: rows as lanes.
struct alignas(32) RowScales {
    float scale[kMaxGroups][kTreeRows], minimum[kMaxGroups][kTreeRows];
};

THERMOCLINE_FORCED __m128i load16(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
THERMOCLINE_FORCED __m256i load32(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
THERMOCLINE_FORCED __m256i low4(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
template <int Bits>
THERMOCLINE_FORCED __m256i down(__m256i x) { return _mm256_srli_epi16(x, Bits); }
THERMOCLINE_FORCED __m256i only(__m256i x, int mask) { return _mm256_and_si256(x, _mm256_set1_epi8(static_cast<char>(mask))); }

// What an unpacking reads: 32 bytes of a row, or the first or last 16 of these of two rows, one row in each 128 bits.
// The products of two rows meet in one register that way, and their sums of 16 columns in one addition.
struct OneRow {
    const uint8_t* p;
    THERMOCLINE_FORCED __m256i at(int64_t offset) const { return load32(p + offset); }
};
struct TwoRows {
    const uint8_t *a, *b;
    THERMOCLINE_FORCED __m256i at(int64_t offset) const {
        return _mm256_inserti128_si256(_mm256_castsi128_si256(load16(a + offset)), load16(b + offset), 1);
    }
};
template <int Half>
struct HalfOfTwo {
    const TwoRows& rows;
    THERMOCLINE_FORCED __m256i at(int64_t offset) const { return rows.at(offset + 16 * Half); }
};

// The low or the high nibbles of the 16 bytes at `offset`.
template <int Half, typename From>
THERMOCLINE_FORCED __m256i nibbles(const From& from, int64_t offset) { return low4(down<4 * Half>(from.at(offset))); }
// 16 where bit 16 * Half + j of the four bytes at `offset` is set, else 0.
template <int Half>
THERMOCLINE_FORCED __m256i fifth_bits(const TwoRows& from, int64_t offset) {
    int32_t a, b;
    __builtin_memcpy(&a, from.a + offset, 4);
    __builtin_memcpy(&b, from.b + offset, 4);
    const __m256i bits = _mm256_blend_epi32(_mm256_set1_epi32(a), _mm256_set1_epi32(b), 0xf0);
    const int64_t first = 0x0202020202020202 * Half, second = first + 0x0101010101010101;
    const __m256i byte_of = _mm256_set_epi64x(second, first, second, first);
    const __m256i bit_of = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
    const __m256i spread = _mm256_shuffle_epi8(bits, byte_of);
    return only(_mm256_cmpeq_epi8(_mm256_and_si256(spread, bit_of), bit_of), 16);
}
// The levels that four bits name, as products_of wants eight bits.
template <int Half, typename From>
THERMOCLINE_FORCED __m256i uneven_levels(const From& from, int64_t offset) {
    const __m128i levels = _mm_xor_si128(load16(unpacking::kUneven), _mm_set1_epi8(static_cast<char>(kEightBitShift)));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(levels), nibbles<Half>(from, offset));
}
// Byte number `index` of each 32 bits, as their lowest or their highest byte; the other three are 0.
THERMOCLINE_FORCED __m256i low_byte(__m256i words, int index) {
    const __m256i place = _mm256_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12);
    return _mm256_shuffle_epi8(words, _mm256_or_si256(place, _mm256_set1_epi32(static_cast<int>(0x80808000u) | index)));
}
THERMOCLINE_FORCED __m256i high_byte(__m256i words, int index) {
    const __m256i place = _mm256_setr_epi32(0, 4 << 24, 8 << 24, 12 << 24, 0, 4 << 24, 8 << 24, 12 << 24);
    return _mm256_shuffle_epi8(words, _mm256_or_si256(place, _mm256_set1_epi32(index << 24 | 0x00808080)));
}

// Of each type: the bytes of a span, the largest weight (255 stands for eight bits, which are signed where
// kEightBitShift says so), and how 32 columns become bytes in their order: number kUnrolled * i + N of the span that
// `from` begins at. kTogether of them share what they read. Types of blocks of 32 have kUnrolled 1, and any number of
// blocks. Those with kNibbles have the first 16 columns in low nibbles and the last 16 in high ones, and give half N.
// Those with kSixteens have a scale per 16 columns, others one per 32.
template <int TypeId>
struct RowFormat;

struct KRows {
    static constexpr bool kMinimum = true, kNibbles = false;
    static constexpr int kTogether = 2;
    static THERMOCLINE_FORCED void scales(const uint8_t* p, int64_t row_bytes, int, RowScales& to) {
        __m256i words[4];
        words_of_rows(p, row_bytes, words);
        const __m256 d = low_halves(words[0]), dmin = high_halves(words[0]);
        const auto tails = [&](__m256i nibbles, __m256i tops) {
            return _mm256_or_si256(low4(nibbles), only(down<2>(tops), 0x30));
        };
        const __m256i scales[2] = {only(words[1], 0x3f), tails(words[3], words[1])};
        const __m256i minima[2] = {only(words[2], 0x3f), tails(down<4>(words[3]), words[2])};
#pragma GCC unroll 8
        for (int g = 0; g < 8; ++g) {
            _mm256_store_ps(to.scale[g], _mm256_mul_ps(d, _mm256_cvtepi32_ps(low_byte(scales[g / 4], g % 4))));
            _mm256_store_ps(to.minimum[g], _mm256_mul_ps(dmin, _mm256_cvtepi32_ps(low_byte(minima[g / 4], g % 4))));
        }
    }
};

template <>
struct RowFormat<12> : KRows {  // Q4_K
    static constexpr int kBytes = 144, kLargest = 15, kUnrolled = 2;
    template <int N, typename From>
    static THERMOCLINE_FORCED __m256i unpack(const From& from, int i) {
        return low4(down<4 * N>(from.at(16 + 32 * i)));
    }
};

template <>
struct RowFormat<13> : KRows {  // Q5_K
    static constexpr int kBytes = 176, kLargest = 31, kUnrolled = 8;
    template <int N, typename From>
    static THERMOCLINE_FORCED __m256i unpack(const From& from, int) {
        const __m256i high = from.at(16);
        const __m256i fifth = N < 4 ? _mm256_slli_epi16(high, N < 4 ? 4 - N : 0) : down<N < 4 ? 0 : N - 4>(high);
        return _mm256_or_si256(low4(down<N % 2 * 4>(from.at(48 + 32 * (N / 2)))), only(fifth, 16));
    }
};

template <>
struct RowFormat<14> {  // Q6_K
    static constexpr bool kMinimum = false, kNibbles = false, kSixteens = true;
    static constexpr int kBytes = 210, kLargest = 63, kUnrolled = 4, kTogether = 4;
    template <int N, typename From>
    static THERMOCLINE_FORCED __m256i unpack(const From& from, int i) {
        const __m256i low = low4(down<N / 2 * 4>(from.at(64 * i + 32 * (N % 2))));
        const __m256i high = from.at(128 + 32 * i);
        const __m256i top = N < 2 ? _mm256_slli_epi16(high, N < 2 ? 4 - 2 * N : 0) : down<N < 2 ? 0 : 2 * N - 4>(high);
        return _mm256_or_si256(low, only(top, 48));
    }
    static THERMOCLINE_FORCED void scales(const uint8_t* p, int64_t row_bytes, int, RowScales& to) {
        __m256i words[4];
        words_of_rows(p + 192, row_bytes, words);
        // A power of two changes no digit: the signed byte is taken as the highest of 32 bits.
        const __m256 d = _mm256_mul_ps(to_floats(halves_of_rows(p + 208, row_bytes)), _mm256_set1_ps(0x1p-24f));
#pragma GCC unroll 16
        for (int g = 0; g < 16; ++g)
            _mm256_store_ps(to.scale[g], _mm256_mul_ps(d, _mm256_cvtepi32_ps(high_byte(words[g / 4], g % 4))));
    }
};

template <>
struct RowFormat<10> {  // Q2_K
    static constexpr bool kMinimum = true, kNibbles = false, kSixteens = true;
    static constexpr int kBytes = 84, kLargest = 3, kUnrolled = 4, kTogether = 4;
    template <int N, typename From>
    static THERMOCLINE_FORCED __m256i unpack(const From& from, int i) {
        return only(down<2 * N>(from.at(16 + 32 * i)), 3);
    }
    static THERMOCLINE_FORCED void scales(const uint8_t* p, int64_t row_bytes, int, RowScales& to) {
        const __m256i both = pairs_of_rows(p + 80, row_bytes);
        const __m256 d = low_halves(both), dmin = high_halves(both);
        __m256i words[4];
        words_of_rows(p, row_bytes, words);
#pragma GCC unroll 16
        for (int g = 0; g < 16; ++g) {
            const __m256i scales = low4(words[g / 4]), minima = low4(down<4>(words[g / 4]));
            _mm256_store_ps(to.scale[g], _mm256_mul_ps(d, _mm256_cvtepi32_ps(low_byte(scales, g % 4))));
            _mm256_store_ps(to.minimum[g], _mm256_mul_ps(dmin, _mm256_cvtepi32_ps(low_byte(minima, g % 4))));
        }
    }
};

template <>
struct RowFormat<11> {  // Q3_K
    static constexpr bool kMinimum = false, kNibbles = false, kSixteens = true;
    static constexpr int kBytes = 110, kLargest = 7, kUnrolled = 8, kTogether = 4;
    template <int N, typename From>
    static THERMOCLINE_FORCED __m256i unpack(const From& from, int) {
        const __m256i low = only(down<2 * (N % 4)>(from.at(32 + 32 * (N / 4))), 3), high = from.at(0);
        const __m256i third = N < 2 ? _mm256_slli_epi16(high, N < 2 ? 2 - N : 0) : down<N < 2 ? 0 : N - 2>(high);
        return _mm256_or_si256(low, only(third, 4));
    }
    // Scale j (of 16, less 32) has its low four bits in byte j % 8, nibble j / 8, and its high two in byte 8 + j % 4, pair j / 4.
    static THERMOCLINE_FORCED void scales(const uint8_t* p, int64_t row_bytes, int, RowScales& to) {
        __m256i w[4];
        words_of_rows(p + 94, row_bytes, w);  // two bytes early: a row's last are d
        const auto joined = [](__m256i before, __m256i after) {
            return _mm256_or_si256(_mm256_srli_epi32(before, 16), _mm256_slli_epi32(after, 16));
        };
        const __m256i low[2] = {joined(w[0], w[1]), joined(w[1], w[2])}, tail = joined(w[2], w[3]);
        const __m256 d = high_halves(w[3]);
        for (int quarter = 0; quarter < 4; ++quarter) {
            const __m256i four = low4(quarter < 2 ? low[quarter] : down<4>(low[quarter - 2]));
            const __m256i pair = quarter < 2 ? _mm256_slli_epi16(tail, 4 - 2 * quarter) : _mm256_srli_epi16(tail, 2 * quarter - 4);
            const __m256i six = _mm256_or_si256(four, only(pair, 0x30));
            for (int i = 0; i < 4; ++i) {
                const __m256i multiple = _mm256_sub_epi32(low_byte(six, i), _mm256_set1_epi32(32));
                _mm256_store_ps(to.scale[4 * quarter + i], _mm256_mul_ps(d, _mm256_cvtepi32_ps(multiple)));
            }
        }
    }
};

// Blocks whose first 16 columns are low nibbles and whose last 16 are high ones.
struct NibbleRows {
    static constexpr bool kNibbles = true;
    static constexpr int kUnrolled = 1, kTogether = 1;
};

template <>
struct RowFormat<23> : NibbleRows {  // IQ4_XS
    static constexpr bool kMinimum = false;
    static constexpr int kBytes = 136, kLargest = 255;
    template <int Half, typename From>
    static THERMOCLINE_FORCED __m256i unpack(const From& from, int i) { return uneven_levels<Half>(from, 8 + 16 * i); }
    static THERMOCLINE_FORCED void scales(const uint8_t* p, int64_t row_bytes, int, RowScales& to) {
        __m256i words[4];
        words_of_rows(p, row_bytes, words);
        const __m256 d = low_halves(words[0]);
        const __m256i tops = _mm256_srli_epi32(words[0], 16);
#pragma GCC unroll 8
        for (int g = 0; g < 8; ++g) {
            const __m256i low = _mm256_and_si256(_mm256_srli_epi32(words[1], 4 * g), _mm256_set1_epi32(15));
            const __m256i top = _mm256_and_si256(_mm256_srli_epi32(tops, 2 * g), _mm256_set1_epi32(3));
            const __m256i six = _mm256_or_si256(low, _mm256_slli_epi32(top, 4));
            const __m256 number = _mm256_cvtepi32_ps(_mm256_sub_epi32(six, _mm256_set1_epi32(32)));
            _mm256_store_ps(to.scale[g], _mm256_mul_ps(d, number));
        }
    }
};

// Blocks of 32 that begin with a float16.
template <int Block>
struct HalfRows {
    static constexpr bool kMinimum = false;
    static constexpr int kBytes = 8 * Block;
    static THERMOCLINE_FORCED void scales(const uint8_t* p, int64_t row_bytes, int blocks, RowScales& to) {
        for (int b = 0; b < blocks; ++b) _mm256_store_ps(to.scale[b], to_floats(halves_of_rows(p + Block * b, row_bytes)));
    }
};

// Blocks of 32 that begin with a scale and the negative of a minimum.
template <int Block>
struct PairRows {
    static constexpr bool kMinimum = true;
    static constexpr int kBytes = 8 * Block;
    static THERMOCLINE_FORCED void scales(const uint8_t* p, int64_t row_bytes, int blocks, RowScales& to) {
        for (int b = 0; b < blocks; ++b) {
            const __m256i both = pairs_of_rows(p + Block * b, row_bytes);
            _mm256_store_ps(to.scale[b], low_halves(both));
            _mm256_store_ps(to.minimum[b], _mm256_xor_ps(high_halves(both), _mm256_set1_ps(-0.0f)));
        }
    }
};

template <>
struct RowFormat<2> : HalfRows<18>, NibbleRows {  // Q4_0
    static constexpr int kLargest = 15;
    template <int Half, typename From>
    static THERMOCLINE_FORCED __m256i unpack(const From& from, int i) { return nibbles<Half>(from, 18 * i + 2); }
};

template <>
struct RowFormat<3> : PairRows<20>, NibbleRows {  // Q4_1
    static constexpr int kLargest = 15;
    template <int Half, typename From>
    static THERMOCLINE_FORCED __m256i unpack(const From& from, int i) { return nibbles<Half>(from, 20 * i + 4); }
};

template <>
struct RowFormat<6> : HalfRows<22>, NibbleRows {  // Q5_0
    static constexpr int kLargest = 31;
    template <int Half>
    static THERMOCLINE_FORCED __m256i unpack(const TwoRows& from, int i) {
        return _mm256_or_si256(nibbles<Half>(from, 22 * i + 6), fifth_bits<Half>(from, 22 * i + 2));
    }
};

template <>
struct RowFormat<7> : PairRows<24>, NibbleRows {  // Q5_1
    static constexpr int kLargest = 31;
    template <int Half>
    static THERMOCLINE_FORCED __m256i unpack(const TwoRows& from, int i) {
        return _mm256_or_si256(nibbles<Half>(from, 24 * i + 8), fifth_bits<Half>(from, 24 * i + 4));
    }
};

template <>
struct RowFormat<8> : HalfRows<34> {  // Q8_0
    static constexpr bool kNibbles = false;
    static constexpr int kLargest = 255, kUnrolled = 1, kTogether = 1;
    template <int N, typename From>
    static THERMOCLINE_FORCED __m256i unpack(const From& from, int i) {
        return _mm256_xor_si256(from.at(34 * i + 2), _mm256_set1_epi8(static_cast<char>(128 - kEightBitShift)));
    }
};

template <>
struct RowFormat<20> : HalfRows<18>, NibbleRows {  // IQ4_NL
    static constexpr int kLargest = 255;
    template <int Half, typename From>
    static THERMOCLINE_FORCED __m256i unpack(const From& from, int i) { return uneven_levels<Half>(from, 18 * i + 2); }
};

template <>
struct RowFormat<39> : NibbleRows {  // MXFP4
    static constexpr bool kMinimum = false;
    static constexpr int kBytes = 8 * 17, kLargest = 24;
    template <int Half, typename From>
    static THERMOCLINE_FORCED __m256i unpack(const From& from, int i) {
        const __m256i levels = _mm256_broadcastsi128_si256(load16(unpacking::kE2M1));
        return _mm256_shuffle_epi8(levels, nibbles<Half>(from, 17 * i + 1));
    }
    // Half of 2^(e - 127) of each row's byte e; the two smallest are subnormal, and all of them as numbers of 32 bits
    // the larger of two.
    static THERMOCLINE_FORCED void scales(const uint8_t* p, int64_t row_bytes, int blocks, RowScales& to) {
        const __m256i one = _mm256_set1_epi32(1), two = _mm256_set1_epi32(2);
        for (int b = 0; b < blocks; ++b) {
            const __m256i e = _mm256_cvtepu8_epi32(bytes_of_rows(p + 17 * b, row_bytes));
            const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, one), 23);
            const __m256i tiny = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), _mm256_min_epi32(e, two));
            _mm256_store_ps(to.scale[b], _mm256_castsi256_ps(_mm256_max_epi32(normal, tiny)));
        }
    }
};

// Half of an unsigned E4M3 number in each lane's low byte; 0x7f alone is no number and is 0.
THERMOCLINE_FORCED __m256 halves_of_e4m3(__m256i byte) {
    const __m256i bits = _mm256_and_si256(byte, _mm256_set1_epi32(0x7f));
    const __m256 tiny = _mm256_mul_ps(_mm256_cvtepi32_ps(bits), _mm256_set1_ps(0x1p-10f));
    const __m256i normal = _mm256_add_epi32(_mm256_slli_epi32(bits, 20), _mm256_set1_epi32((127 - 8) << 23));
    const __m256i is_tiny = _mm256_cmpgt_epi32(_mm256_set1_epi32(8), bits);
    const __m256i value = _mm256_blendv_epi8(normal, _mm256_castps_si256(tiny), is_tiny);
    return _mm256_castsi256_ps(_mm256_andnot_si256(_mm256_cmpeq_epi32(byte, _mm256_set1_epi32(0x7f)), value));
}

template <>
struct RowFormat<40> {  // NVFP4: blocks of 64 with four scales; eight bytes are 16 columns, low nibbles first
    static constexpr bool kMinimum = false, kNibbles = false, kSixteens = true, kEights = true;
    static constexpr int kBytes = 4 * 36, kLargest = 24, kUnrolled = 1, kTogether = 1;
    // Low or high nibbles of 16 bytes.
    template <int Half, typename From>
    static THERMOCLINE_FORCED __m256i unpack(const From& from, int i) {
        const __m256i levels = _mm256_broadcastsi128_si256(load16(unpacking::kE2M1));
        return _mm256_shuffle_epi8(levels, nibbles<Half>(from, 36 * (i / 2) + 4 + 16 * (i % 2)));
    }
    // 32 columns in order.
    template <int N>
    static THERMOCLINE_FORCED __m256i unpack(const OneRow& from, int i) {
        const __m256i twice = _mm256_permute4x64_epi64(_mm256_castsi128_si256(load16(from.p + 36 * (i / 2) + 4 + 16 * (i % 2))), 0x50);
        const __m256i levels = _mm256_broadcastsi128_si256(load16(unpacking::kE2M1));
        return _mm256_shuffle_epi8(levels, low4(_mm256_srlv_epi64(twice, _mm256_setr_epi64x(0, 4, 0, 4))));
    }
    static THERMOCLINE_FORCED void scales(const uint8_t* p, int64_t row_bytes, int blocks, RowScales& to) {
        for (int b = 0; b < blocks / 2; ++b) {
            const __m256i four = pairs_of_rows(p + 36 * b, row_bytes);
            for (int g = 0; g < 4; ++g) _mm256_store_ps(to.scale[4 * b + g], halves_of_e4m3(low_byte(four, g)));
        }
    }
};

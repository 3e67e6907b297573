// How the bytes of rows become weights of eight bits, sums of their products and scales, per type: for products of rows
// as they lie. Knows no order of rows and columns.

THERMOCLINE_FORCED __m512i both_halves(const uint8_t* p) {
    return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
THERMOCLINE_FORCED __m512i halves64(int64_t low, int64_t high) {
    return _mm512_set_epi64(high, high, high, high, low, low, low, low);
}
// a | (b & mask)
THERMOCLINE_FORCED __m512i or_masked(__m512i a, __m512i b, __m512i mask) {
    return _mm512_ternarylogic_epi64(a, b, mask, 0xf8);
}
THERMOCLINE_FORCED __m512i dots_of(__m512i sum, __m512i q, const uint8_t* x) {
    return _mm512_dpbusd_epi32(sum, q, _mm512_loadu_si512(x));
}

// The 16 bytes of a 128-bit lane of Q4_K hold half of one group of 32 in their low nibbles and half of the next
// in their high ones. Both are wanted side by side; the high ones stay where they are, 16 times too large.
THERMOCLINE_FORCED __m512i nibble_lanes(const uint8_t* p, int half) {
    const __m512i which = half == 0 ? _mm512_set_epi64(5, 4, 5, 4, 1, 0, 1, 0)
                                    : _mm512_set_epi64(7, 6, 7, 6, 3, 2, 3, 2);
    const __m512i low = _mm512_set1_epi64(0x0f0f0f0f0f0f0f0f);
    const __m512i mask = _mm512_mask_slli_epi64(low, 0xcc, low, 4);
    return _mm512_and_si512(_mm512_permutexvar_epi64(which, _mm512_loadu_si512(p)), mask);
}
THERMOCLINE_FORCED __m512i drop_high(__m512i sums) {
    return _mm512_srav_epi32(sums, _mm512_set_epi32(4, 4, 4, 4, 0, 0, 0, 0, 4, 4, 4, 4, 0, 0, 0, 0));
}
// 256 activations in the order in which nibble_lanes has the weights.
THERMOCLINE_FORCED void turn_activations(const uint8_t* x, uint8_t* to) {
    for (int h = 0; h < 2; ++h, x += 128, to += 128) {
        const __m512i a = _mm512_loadu_si512(x), b = _mm512_loadu_si512(x + 64);
        _mm512_store_si512(to, _mm512_shuffle_i64x2(a, b, 0x88));
        _mm512_store_si512(to + 64, _mm512_shuffle_i64x2(a, b, 0xdd));
    }
}

// Of each type: 256 columns of a row as four registers of bytes, and their products' sums per 16 columns. In
// order, lane 4j + i is the sum of columns 16 (4i + j) on; the order of Q4_K is that of nibble_lanes: it is
// that of the group of 32 with number 4 (i / 2) + j, its half i % 2.
template <int TypeId>
struct RowFormat;

struct KHeader {
    static constexpr bool kMinimum = true, kBlocks32 = false;
    static THERMOCLINE_FORCED void scales(const RowPointers& rows, int group, float (*scale)[kStripRows],
                                          float (*minimum)[kStripRows]) {
        k_header(rows, group, scale, minimum);
    }
};

template <>
struct RowFormat<12> : KHeader {  // Q4_K
    static constexpr int kBytes = 144;
    static constexpr bool kNibbles = true;
    static THERMOCLINE_FORCED void unpack(const uint8_t* p, __m512i* q) {
        for (int i = 0; i < 4; ++i) q[i] = nibble_lanes(p + 16 + 64 * (i / 2), i % 2);
    }
    static THERMOCLINE_FORCED __m512i lanes(const uint8_t* p, int part, int half) {
        return nibble_lanes(p + 16 + 64 * part, half);
    }
    static THERMOCLINE_FORCED __m512i add_up(const __m512i (&dots)[4]) { return drop_high(add_fours<32>(dots)); }
    static THERMOCLINE_FORCED __m512i add_halves(const __m512i (&dots)[4]) { return add_up(dots); }
};

template <>
struct RowFormat<13> : KHeader {  // Q5_K
    static constexpr int kBytes = 176;
    static constexpr bool kNibbles = false;
    static THERMOCLINE_FORCED void unpack(const uint8_t* p, __m512i* q) {
        const __m512i shift = halves64(0, 4), low = _mm512_set1_epi8(15), fifth = _mm512_set1_epi8(16);
        const __m512i high = both_halves(p + 16);
        // Bits 2i and 2i + 1 of each byte go to bit 4.
        const __m512i turn[4] = {halves64(4, 3), halves64(2, 1), halves64(0, 63), halves64(62, 61)};
        for (int i = 0; i < 4; ++i)
            q[i] = or_masked(_mm512_and_si512(_mm512_srlv_epi64(both_halves(p + 48 + 32 * i), shift), low),
                             _mm512_rolv_epi64(high, turn[i]), fifth);
    }
    static THERMOCLINE_FORCED __m512i add_up(const __m512i (&dots)[4]) { return add_fours<dot_bits(5)>(dots); }
};

template <>
struct RowFormat<14> {  // Q6_K
    static constexpr int kBytes = 210;
    static constexpr bool kMinimum = false, kBlocks32 = false, kNibbles = false;
    static THERMOCLINE_FORCED void unpack(const uint8_t* p, __m512i* q) {
        const __m512i low = _mm512_set1_epi8(15), pair = _mm512_set1_epi8(48);
        const __m512i left = halves64(4, 2), right = halves64(0, 2);
        for (int i = 0; i < 2; ++i) {
            const __m512i x = _mm512_loadu_si512(p + 64 * i), high = both_halves(p + 128 + 32 * i);
            q[2 * i] = or_masked(_mm512_and_si512(x, low), _mm512_sllv_epi64(high, left), pair);
            q[2 * i + 1] = or_masked(_mm512_and_si512(_mm512_srli_epi64(x, 4), low),
                                     _mm512_srlv_epi64(high, right), pair);
        }
    }
    static THERMOCLINE_FORCED __m512i add_up(const __m512i (&dots)[4]) { return add_fours<dot_bits(6)>(dots); }
    static THERMOCLINE_FORCED void scales(const RowPointers& rows, int, float (*scale)[kStripRows],
                                          float (*)[kStripRows]) {
        q6_k_scales(rows, scale);
    }
};

// 16 bytes twice: their low nibbles, then their high ones.
THERMOCLINE_FORCED __m256i nibbles_twice(const uint8_t* p) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
THERMOCLINE_FORCED __m512i two_blocks(__m256i a, __m256i b) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
}
// The nibbles of two blocks of 32 in order: p is the first block's 16 bytes.
THERMOCLINE_FORCED __m512i block_nibbles(const uint8_t* p, int64_t block_bytes) {
    const __m512i shift = _mm512_set_epi64(4, 4, 0, 0, 4, 4, 0, 0), low = _mm512_set1_epi8(15);
    return _mm512_and_si512(_mm512_srlv_epi64(two_blocks(nibbles_twice(p), nibbles_twice(p + block_bytes)), shift), low);
}
// 16 more where a bit of the four bytes at p, and those of the next block, is set.
THERMOCLINE_FORCED __m512i with_fifth_bits(__m512i nibbles, const uint8_t* p, int64_t block_bytes) {
    uint32_t a, b;
    __builtin_memcpy(&a, p, 4);
    __builtin_memcpy(&b, p + block_bytes, 4);
    const __mmask64 set = a | static_cast<uint64_t>(b) << 32;
    return _mm512_mask_add_epi8(nibbles, set, nibbles, _mm512_set1_epi8(16));
}
THERMOCLINE_FORCED __m512i levels_of(const uint8_t* table, __m512i nibbles) {
    const __m128i levels = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(levels), nibbles);
}

// Four blocks of 32 whose nibbles lie 16 bytes together: a block is a lane, of its first columns or of its last.
THERMOCLINE_FORCED __m512i block_lanes(const uint8_t* p, int64_t block_bytes, int half) {
    const auto block = [&](int64_t n) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + n * block_bytes)); };
    // Measured: inserting one after another takes half as long again.
    const auto two = [&](int64_t n) { return _mm256_inserti128_si256(_mm256_castsi128_si256(block(n)), block(n + 1), 1); };
    const __m512i all = two_blocks(two(0), two(2));
    return _mm512_and_si512(half == 0 ? all : _mm512_srli_epi16(all, 4), _mm512_set1_epi8(15));
}

// The first bytes of four blocks of 17, of each of 16 rows: a block is a lane, a row a byte of it. Block i of a row
// that is read r bytes earlier has its byte at i + r of lane i, so rows need not be turned one by one.
THERMOCLINE_FORCED __m512i first_bytes_17(const uint8_t* p, int64_t row_bytes) {
    constexpr uint64_t kFirst = 1 | 1ull << 17 | 1ull << 34 | 1ull << 51;
    __m512i low = _mm512_setzero_si512(), high = low;
#pragma GCC unroll 8
    for (int r = 0; r < 8; ++r) {
        const __mmask64 at = _cvtu64_mask64(kFirst << r);
        low = _mm512_mask_loadu_epi8(low, at, p + r * row_bytes - r);
        high = _mm512_mask_loadu_epi8(high, at, p + (r + 8) * row_bytes - r);
    }
    const __m128i ascending = _mm_set_epi8(7, 6, 5, 4, 3, 2, 1, 0, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i lane = _mm512_set_epi64(0x0303030303030303, 0x0303030303030303, 0x0202020202020202, 0x0202020202020202,
                                          0x0101010101010101, 0x0101010101010101, 0, 0);
    const __m512i from = _mm512_add_epi8(_mm512_broadcast_i32x4(ascending), lane);
    return _mm512_mask_blend_epi64(0xaa, _mm512_shuffle_epi8(low, from), _mm512_shuffle_epi8(high, from));
}

// The same of the float16 that begin four blocks of 18: of rows 0 to 7 and of the others, eight to a lane.
THERMOCLINE_FORCED void first_halves_18(const uint8_t* p, int64_t row_bytes, __m512i (&halves)[2]) {
    constexpr uint64_t kFirst = 3 | 3ull << 18 | 3ull << 36 | 3ull << 54;
    __m512i fours[4] = {};
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
        const __mmask64 at = _cvtu64_mask64(kFirst << (2 * r));
#pragma GCC unroll 4
        for (int four = 0; four < 4; ++four)
            fours[four] = _mm512_mask_loadu_epi8(fours[four], at, p + (4 * four + r) * row_bytes - 2 * r);
    }
    const __m128i ascending = _mm_set_epi8(7, 6, 5, 4, 3, 2, 1, 0, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i lane = _mm512_set_epi64(0x0606060606060606, 0x0606060606060606, 0x0404040404040404, 0x0404040404040404,
                                          0x0202020202020202, 0x0202020202020202, 0, 0);
    const __m512i from = _mm512_add_epi8(_mm512_broadcast_i32x4(ascending), lane);
    for (int i = 0; i < 2; ++i)
        halves[i] = _mm512_mask_blend_epi64(0xaa, _mm512_shuffle_epi8(fours[2 * i], from), _mm512_shuffle_epi8(fours[2 * i + 1], from));
}

// Blocks of 32 that begin with a float16. kBits: of a weight, without a sign.
template <int Block, int Bits>
struct HalfBlocks {
    static constexpr int kBytes = 8 * Block;
    static constexpr bool kMinimum = false, kBlocks32 = true, kNibbles = false;
    static THERMOCLINE_FORCED __m512i add_up(const __m512i (&dots)[4]) { return add_fours<dot_bits(Bits)>(dots); }
    static THERMOCLINE_FORCED void scales(const RowPointers& rows, int group, float (*scale)[kStripRows],
                                          float (*)[kStripRows]) {
        if constexpr (Block == 18) {
            alignas(64) __m128i of[2][2][4];  // half a span, rows below 8, block
            for (int part = 0; part < 2; ++part) {
                __m512i halves[2];
                first_halves_18(rows.p0 + 4 * Block * part, rows.stride, halves);
                for (int i = 0; i < 2; ++i) _mm512_store_si512(of[part][i], halves[i]);
            }
            for (int block = 0; block < kSpan / 32; ++block) {
                const auto rows8 = [&](int i) { return _mm_load_si128(&of[block / 4][i][block % 4]); };
                store_group32(scale, group, block, _mm512_cvtph_ps(_mm256_set_m128i(rows8(1), rows8(0))));
            }
        } else {
            for (int block = 0; block < kSpan / 32; ++block) store_group32(scale, group, block, row_halves(rows, block * Block));
        }
    }
};

// Blocks of 32 that begin with a scale and the negative of a minimum.
template <int Block, int Bits>
struct PairBlocks {
    static constexpr int kBytes = 8 * Block;
    static constexpr bool kMinimum = true, kBlocks32 = true, kNibbles = false;
    static THERMOCLINE_FORCED __m512i add_up(const __m512i (&dots)[4]) { return add_fours<dot_bits(Bits)>(dots); }
    static THERMOCLINE_FORCED void scales(const RowPointers& rows, int group, float (*scale)[kStripRows],
                                          float (*minimum)[kStripRows]) {
        const __m512i sign = _mm512_set1_epi32(INT32_MIN);
        for (int block = 0; block < kSpan / 32; ++block) {
            alignas(64) uint32_t pairs[kStripRows];
            for (int r = 0; r < kStripRows; ++r) __builtin_memcpy(&pairs[r], rows.p0 + block * Block + r * rows.stride, 4);
            const __m512i both = _mm512_load_si512(pairs);
            const __m512 m = halves_to_floats(_mm512_srli_epi32(both, 16));
            store_group32(scale, group, block, halves_to_floats(both));
            store_group32(minimum, group, block, _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(m), sign)));
        }
    }
};

template <>
struct RowFormat<2> : HalfBlocks<18, 4> {  // Q4_0
    static THERMOCLINE_FORCED void unpack(const uint8_t* p, __m512i* q) {
        for (int i = 0; i < 4; ++i) q[i] = block_nibbles(p + 36 * i + 2, 18);
    }
    static constexpr bool kLanes = true;
    static THERMOCLINE_FORCED __m512i lanes(const uint8_t* p, int part, int half) { return block_lanes(p + 72 * part + 2, 18, half); }
    static THERMOCLINE_FORCED __m512i add_halves(const __m512i (&dots)[4]) { return add_fours<dot_bits(4) + 1>(dots); }
};

template <>
struct RowFormat<3> : PairBlocks<20, 4> {  // Q4_1
    static THERMOCLINE_FORCED void unpack(const uint8_t* p, __m512i* q) {
        for (int i = 0; i < 4; ++i) q[i] = block_nibbles(p + 40 * i + 4, 20);
    }
    static constexpr bool kLanes = true;
    static THERMOCLINE_FORCED __m512i lanes(const uint8_t* p, int part, int half) { return block_lanes(p + 80 * part + 4, 20, half); }
    static THERMOCLINE_FORCED __m512i add_halves(const __m512i (&dots)[4]) { return add_fours<dot_bits(4) + 1>(dots); }
};

template <>
struct RowFormat<6> : HalfBlocks<22, 5> {  // Q5_0
    static THERMOCLINE_FORCED void unpack(const uint8_t* p, __m512i* q) {
        for (int i = 0; i < 4; ++i) q[i] = with_fifth_bits(block_nibbles(p + 44 * i + 6, 22), p + 44 * i + 2, 22);
    }
};

template <>
struct RowFormat<7> : PairBlocks<24, 5> {  // Q5_1
    static THERMOCLINE_FORCED void unpack(const uint8_t* p, __m512i* q) {
        for (int i = 0; i < 4; ++i) q[i] = with_fifth_bits(block_nibbles(p + 48 * i + 8, 24), p + 48 * i + 4, 24);
    }
};

template <>
struct RowFormat<8> : HalfBlocks<34, 8> {  // Q8_0
    static THERMOCLINE_FORCED void unpack(const uint8_t* p, __m512i* q) {
        const auto block = [&](int64_t n) {
            return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 34 * n + 2));
        };
        for (int i = 0; i < 4; ++i)
            q[i] = _mm512_xor_si512(two_blocks(block(2 * i), block(2 * i + 1)), _mm512_set1_epi8(-128));
    }
};

template <>
struct RowFormat<20> : HalfBlocks<18, 8> {  // IQ4_NL
    static THERMOCLINE_FORCED void unpack(const uint8_t* p, __m512i* q) {
        for (int i = 0; i < 4; ++i) q[i] = levels_of(unpacking::kUneven, block_nibbles(p + 36 * i + 2, 18));
    }
    static constexpr bool kLanes = true;
    static THERMOCLINE_FORCED __m512i lanes(const uint8_t* p, int part, int half) { return levels_of(unpacking::kUneven, block_lanes(p + 72 * part + 2, 18, half)); }
    static THERMOCLINE_FORCED __m512i add_halves(const __m512i (&dots)[4]) { return add_fours<dot_bits(8) + 1>(dots); }
};

template <>
struct RowFormat<23> {  // IQ4_XS
    static constexpr int kBytes = 136;
    static constexpr bool kMinimum = false, kBlocks32 = false, kNibbles = false;
    static THERMOCLINE_FORCED void unpack(const uint8_t* p, __m512i* q) {
        for (int i = 0; i < 4; ++i) q[i] = levels_of(unpacking::kUneven, block_nibbles(p + 8 + 32 * i, 16));
    }
    static THERMOCLINE_FORCED __m512i add_up(const __m512i (&dots)[4]) { return add_fours<dot_bits(8)>(dots); }
    static constexpr bool kLanes = true;
    static THERMOCLINE_FORCED __m512i lanes(const uint8_t* p, int part, int half) {
        const __m512i all = _mm512_loadu_si512(p + 8 + 64 * part);
        return levels_of(unpacking::kUneven, _mm512_and_si512(half == 0 ? all : _mm512_srli_epi16(all, 4), _mm512_set1_epi8(15)));
    }
    static THERMOCLINE_FORCED __m512i add_halves(const __m512i (&dots)[4]) { return add_fours<dot_bits(8) + 1>(dots); }
    // Eight scales of six bits, less 32: the low four in the second word, the high two in the first one's upper half.
    static THERMOCLINE_FORCED void scales(const RowPointers& rows, int group, float (*scale)[kStripRows],
                                          float (*)[kStripRows]) {
        __m512i words[4];
        transpose16(rows, 0, words);
        const __m512 d = halves_to_floats(words[0]);
        for (unsigned g = 0; g < 8; ++g) {
            const __m512i low = _mm512_and_si512(_mm512_srli_epi32(words[1], 4 * g), _mm512_set1_epi32(15));
            const __m512i top = _mm512_and_si512(_mm512_srli_epi32(words[0], 16 + 2 * g), _mm512_set1_epi32(3));
            const __m512i six = _mm512_or_si512(low, _mm512_slli_epi32(top, 4));
            const __m512 number = _mm512_cvtepi32_ps(_mm512_sub_epi32(six, _mm512_set1_epi32(32)));
            store_group32(scale, group, static_cast<int>(g), _mm512_mul_ps(d, number));
        }
    }
};

template <>
struct RowFormat<39> {  // MXFP4
    static constexpr int kBytes = 8 * 17;
    static constexpr bool kMinimum = false, kBlocks32 = true, kNibbles = false, kLanes = true;
    static THERMOCLINE_FORCED void unpack(const uint8_t* p, __m512i* q) {
        for (int i = 0; i < 4; ++i) q[i] = levels_of(unpacking::kE2M1, block_nibbles(p + 34 * i + 1, 17));
    }
    static THERMOCLINE_FORCED __m512i lanes(const uint8_t* p, int part, int half) {
        return levels_of(unpacking::kE2M1, block_lanes(p + 68 * part + 1, 17, half));
    }
    static THERMOCLINE_FORCED __m512i add_up(const __m512i (&dots)[4]) { return add_fours<dot_bits(5)>(dots); }
    static THERMOCLINE_FORCED __m512i add_halves(const __m512i (&dots)[4]) { return add_fours<dot_bits(5) + 1>(dots); }
    // Half of 2^(e - 127) of each row's byte e; the two smallest are subnormal.
    static THERMOCLINE_FORCED void scales(const RowPointers& rows, int group, float (*scale)[kStripRows],
                                          float (*)[kStripRows]) {
        const __m512i one = _mm512_set1_epi32(1);
        alignas(64) uint8_t bytes[kSpan / 32][kStripRows];
        for (int part = 0; part < 2; ++part) _mm512_store_si512(bytes[4 * part], first_bytes_17(rows.p0 + 68 * part, rows.stride));
        for (int block = 0; block < kSpan / 32; ++block) {
            const __m512i e = _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes[block])));
            const __m512i normal = _mm512_slli_epi32(_mm512_sub_epi32(e, one), 23);
            const __m512i tiny = _mm512_sllv_epi32(_mm512_set1_epi32(0x00200000), e);
            const __m512i bits = _mm512_mask_mov_epi32(normal, _mm512_cmple_epu32_mask(e, one), tiny);
            store_group32(scale, group, block, _mm512_castsi512_ps(bits));
        }
    }
};

// The four bytes at `at` of each row, rows as lanes.
inline __m512i row_words(const RowPointers& rows, int64_t at) {
    alignas(64) uint32_t words[kStripRows];
    for (int r = 0; r < kStripRows; ++r) __builtin_memcpy(&words[r], rows.p0 + at + r * rows.stride, 4);
    return _mm512_load_si512(words);
}

// 64 columns of two bits each from 32 bytes that hold those of four times 32: the low or the high two pairs of a byte.
THERMOCLINE_FORCED __m512i two_pairs_of_bits(const uint8_t* p, int which) {
    const __m512i shift = which == 0 ? halves64(0, 2) : halves64(4, 6);
    return _mm512_and_si512(_mm512_srlv_epi64(both_halves(p), shift), _mm512_set1_epi8(3));
}

template <>
struct RowFormat<10> {  // Q2_K
    static constexpr int kBytes = 84;
    static constexpr bool kMinimum = true, kBlocks32 = false, kNibbles = false;
    static THERMOCLINE_FORCED void unpack(const uint8_t* p, __m512i* q) {
        for (int i = 0; i < 4; ++i) q[i] = two_pairs_of_bits(p + 16 + 32 * (i / 2), i % 2);
    }
    static THERMOCLINE_FORCED __m512i add_up(const __m512i (&dots)[4]) { return add_fours<dot_bits(2)>(dots); }
    static THERMOCLINE_FORCED void scales(const RowPointers& rows, int, float (*scale)[kStripRows],
                                          float (*minimum)[kStripRows]) {
        const __m512i both = row_words(rows, 80), fifteen = _mm512_set1_epi32(15);
        const __m512 d = halves_to_floats(both), dmin = halves_to_floats(_mm512_srli_epi32(both, 16));
        __m512i words[4];
        transpose16(rows, 0, words);
        for (int g = 0; g < 16; ++g) {
            const __m512i byte = byte_of(words[g / 4], g % 4);
            _mm512_store_ps(scale[g], _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_and_si512(byte, fifteen))));
            _mm512_store_ps(minimum[g], _mm512_mul_ps(dmin, _mm512_cvtepi32_ps(_mm512_srli_epi32(byte, 4))));
        }
    }
};

template <>
struct RowFormat<11> {  // Q3_K
    static constexpr int kBytes = 110;
    static constexpr bool kMinimum = false, kBlocks32 = false, kNibbles = false;
    static THERMOCLINE_FORCED void unpack(const uint8_t* p, __m512i* q) {
        const __m512i high = both_halves(p), third = _mm512_set1_epi8(4);
        // Bits 2i and 2i + 1 of each byte go to bit 2.
        const __m512i turn[4] = {halves64(2, 1), halves64(0, 63), halves64(62, 61), halves64(60, 59)};
        for (int i = 0; i < 4; ++i)
            q[i] = or_masked(two_pairs_of_bits(p + 32 + 32 * (i / 2), i % 2), _mm512_rolv_epi64(high, turn[i]), third);
    }
    static THERMOCLINE_FORCED __m512i add_up(const __m512i (&dots)[4]) { return add_fours<dot_bits(3)>(dots); }
    // Scale j (of 16, less 32) has its low four bits in byte j % 8, nibble j / 8, and its high two in byte 8 + j % 4, pair j / 4.
    static THERMOCLINE_FORCED void scales(const RowPointers& rows, int, float (*scale)[kStripRows],
                                          float (*)[kStripRows]) {
        __m512i w[4];
        transpose16(rows, 94, w);  // two bytes early: a row's last are d
        const auto joined = [](__m512i before, __m512i after) {
            return _mm512_or_si512(_mm512_srli_epi32(before, 16), _mm512_slli_epi32(after, 16));
        };
        const __m512i low[2] = {joined(w[0], w[1]), joined(w[1], w[2])}, tail = joined(w[2], w[3]);
        const __m512 d = halves_to_floats(_mm512_srli_epi32(w[3], 16));
        const __m512i top = _mm512_set1_epi8(0x30);
        for (int quarter = 0; quarter < 4; ++quarter) {
            const __m512i four = quarter < 2 ? nibbles(low[quarter]) : high_nibbles(low[quarter - 2]);
            const __m512i six = or_masked(four, _mm512_rolv_epi32(tail, _mm512_set1_epi32((36 - 2 * quarter) % 32)), top);
            for (int i = 0; i < 4; ++i) {
                const __m512i multiple = _mm512_sub_epi32(byte_of(six, i), _mm512_set1_epi32(32));
                _mm512_store_ps(scale[4 * quarter + i], _mm512_mul_ps(d, _mm512_cvtepi32_ps(multiple)));
            }
        }
    }
};

// Half of an unsigned E4M3 number in each lane's low byte; 0x7f alone is no number and is 0.
THERMOCLINE_FORCED __m512 halves_of_e4m3(__m512i byte) {
    const __m512i bits = _mm512_and_si512(byte, _mm512_set1_epi32(0x7f));
    const __m512i tiny = _mm512_castps_si512(_mm512_mul_ps(_mm512_cvtepi32_ps(bits), _mm512_set1_ps(0x1p-10f)));
    const __m512i normal = _mm512_add_epi32(_mm512_slli_epi32(bits, 20), _mm512_set1_epi32((127 - 8) << 23));
    const __m512i value = _mm512_mask_mov_epi32(normal, _mm512_cmplt_epi32_mask(bits, _mm512_set1_epi32(8)), tiny);
    return _mm512_castsi512_ps(_mm512_maskz_mov_epi32(_mm512_cmpneq_epi32_mask(byte, _mm512_set1_epi32(0x7f)), value));
}

template <>
struct RowFormat<40> {  // NVFP4: blocks of 64 with four scales; eight bytes are 16 columns
    static constexpr int kBytes = 4 * 36;
    static constexpr bool kMinimum = false, kBlocks32 = true, kNibbles = false;
    static THERMOCLINE_FORCED void unpack(const uint8_t* p, __m512i* q) {
        const __m512i twice = _mm512_set_epi64(3, 3, 2, 2, 1, 1, 0, 0), shift = _mm512_set_epi64(4, 0, 4, 0, 4, 0, 4, 0);
        for (int i = 0; i < 4; ++i) {
            const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 36 * i + 4));
            const __m512i moved = _mm512_srlv_epi64(_mm512_permutexvar_epi64(twice, _mm512_castsi256_si512(bytes)), shift);
            q[i] = levels_of(unpacking::kE2M1, _mm512_and_si512(moved, _mm512_set1_epi8(15)));
        }
    }
    static THERMOCLINE_FORCED __m512i add_up(const __m512i (&dots)[4]) { return add_fours<dot_bits(5)>(dots); }
    static THERMOCLINE_FORCED void scales(const RowPointers& rows, int, float (*scale)[kStripRows],
                                          float (*)[kStripRows]) {
        for (int block = 0; block < 4; ++block) {
            const __m512i four = row_words(rows, 36 * block);
            for (int g = 0; g < 4; ++g) _mm512_store_ps(scale[4 * block + g], halves_of_e4m3(byte_of(four, g)));
        }
    }
};

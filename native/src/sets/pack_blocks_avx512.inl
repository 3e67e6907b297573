// Weight rows into panels: the types that pack_avx512.inl has not, by the ways of row_formats_avx512.inl. Packed bytes are turned
// before they are unpacked, so that four columns of 16 rows lie in a register. Knows no products.

// 32 columns whose nibbles lie in 16 bytes, the first 16 in the low ones: where those bytes are, and how nibbles become weights.
template <int TypeId>
struct NibbleBlocks;

template <int Block, int At, int Fifth = 0>
struct PlainNibbles {
    static constexpr int kBlock = Block, kAt = At, kFifth = Fifth;
    static THERMOCLINE_FORCED __m512i weights(__m512i nibbles) { return nibbles; }
};
template <int Block, int At, const uint8_t* Levels>
struct LevelNibbles {
    static constexpr int kBlock = Block, kAt = At, kFifth = 0;
    static THERMOCLINE_FORCED __m512i weights(__m512i nibbles) { return levels_of(Levels, nibbles); }
};

template <> struct NibbleBlocks<2> : PlainNibbles<18, 2> {};                       // Q4_0
template <> struct NibbleBlocks<3> : PlainNibbles<20, 4> {};                       // Q4_1
template <> struct NibbleBlocks<6> : PlainNibbles<22, 6, 2> {};                    // Q5_0
template <> struct NibbleBlocks<7> : PlainNibbles<24, 8, 4> {};                    // Q5_1
template <> struct NibbleBlocks<20> : LevelNibbles<18, 2, unpacking::kUneven> {};  // IQ4_NL
template <> struct NibbleBlocks<23> : LevelNibbles<16, 8, unpacking::kUneven> {};  // IQ4_XS: a header, then nibbles alone
template <> struct NibbleBlocks<39> : LevelNibbles<17, 1, unpacking::kE2M1> {};    // MXFP4

// Bit 4 of byte j of each row's lane: bit 4 * four + j of the row's word.
template <int Four>
THERMOCLINE_FORCED __m512i with_fifth_bit(__m512i nibbles, __m512i word) {
    constexpr int kByte = Four / 2, kBits = Four % 2 == 0 ? 0x08040201 : static_cast<int>(0x80402010);
    const __m512i from = _mm512_set4_epi32(0x0c0c0c0c + 0x01010101 * kByte, 0x08080808 + 0x01010101 * kByte,
                                           0x04040404 + 0x01010101 * kByte, 0x01010101 * kByte);
    const __mmask64 is_set = _mm512_test_epi8_mask(_mm512_shuffle_epi8(word, from), _mm512_set1_epi32(kBits));
    return _mm512_mask_add_epi8(nibbles, is_set, nibbles, _mm512_set1_epi8(16));
}

template <int TypeId>
void pack_nibbles(const RowPointers& rows, int group, int strip, QuantPanel& panel) {
    using Blocks = NibbleBlocks<TypeId>;
    RowFormat<TypeId>::scales(rows, group, panel.scale[strip], panel.minimum[strip]);
#pragma GCC unroll 8
    for (int block = 0; block < kSpan / 32; ++block) {
        const int64_t at = block * Blocks::kBlock;
        __m512i bytes[4];
        transpose16(rows, at + Blocks::kAt, bytes);
        uint8_t(*q)[kStripRows][4] = &panel.q[strip][8 * block];
        __m512i low[4], high[4];
        for (int i = 0; i < 4; ++i) {
            low[i] = Blocks::weights(nibbles(bytes[i]));
            high[i] = Blocks::weights(high_nibbles(bytes[i]));
        }
        if constexpr (Blocks::kFifth != 0) {
            const __m512i word = row_words(rows, at + Blocks::kFifth);
            low[0] = with_fifth_bit<0>(low[0], word), low[1] = with_fifth_bit<1>(low[1], word);
            low[2] = with_fifth_bit<2>(low[2], word), low[3] = with_fifth_bit<3>(low[3], word);
            high[0] = with_fifth_bit<4>(high[0], word), high[1] = with_fifth_bit<5>(high[1], word);
            high[2] = with_fifth_bit<6>(high[2], word), high[3] = with_fifth_bit<7>(high[3], word);
        }
        for (int i = 0; i < 4; ++i) {
            _mm512_store_si512(q[i], low[i]);
            _mm512_store_si512(q[4 + i], high[i]);
        }
    }
}

void pack_q8_0(const RowPointers& rows, int group, int strip, QuantPanel& panel) {
    RowFormat<8>::scales(rows, group, panel.scale[strip], panel.minimum[strip]);
    const __m512i sign = _mm512_set1_epi8(-128);
    for (int64_t block = 0; block < kSpan / 32; ++block) {
        for (int part = 0; part < 2; ++part) {
            __m512i bytes[4];
            transpose16(rows, block * 34 + 2 + 16 * part, bytes);
            for (int i = 0; i < 4; ++i)
                _mm512_store_si512(panel.q[strip][block * 8 + part * 4 + i], _mm512_xor_si512(bytes[i], sign));
        }
    }
}

// Of bytes that hold four weights each, of columns 32 apart: the weights of one of the four.
THERMOCLINE_FORCED __m512i pair_of_bits(__m512i bytes, int which) {
    return _mm512_and_si512(_mm512_srli_epi32(bytes, static_cast<unsigned>(2 * which)), _mm512_set1_epi8(3));
}

void pack_q2_k(const RowPointers& rows, int strip, QuantPanel& panel) {
    RowFormat<10>::scales(rows, kGroupMin, panel.scale[strip], panel.minimum[strip]);
#pragma GCC unroll 4
    for (int column = 0; column < 4; ++column) {
        __m512i bytes[4];
        transpose16(rows, 16 + 16 * column, bytes);
        uint8_t(*q)[kStripRows][4] = &panel.q[strip][column / 2 * 32 + column % 2 * 4];
        for (int i = 0; i < 4; ++i)
            for (int j = 0; j < 4; ++j) _mm512_store_si512(q[8 * j + i], pair_of_bits(bytes[i], j));
    }
}

void pack_q3_k(const RowPointers& rows, int strip, QuantPanel& panel) {
    RowFormat<11>::scales(rows, kGroupMin, panel.scale[strip], panel.minimum[strip]);
    const __m512i third = _mm512_set1_epi8(4);
#pragma GCC unroll 2
    for (int part = 0; part < 2; ++part) {
        __m512i high[4];
        transpose16(rows, 16 * part, high);
        for (int half = 0; half < 2; ++half) {
            __m512i bytes[4];
            transpose16(rows, 32 + 32 * half + 16 * part, bytes);
            uint8_t(*q)[kStripRows][4] = &panel.q[strip][32 * half + 4 * part];
            for (int i = 0; i < 4; ++i)
                for (int j = 0; j < 4; ++j) {
                    const __m512i moved = _mm512_rolv_epi32(high[i], _mm512_set1_epi32((34 - 4 * half - j) % 32));
                    _mm512_store_si512(q[8 * j + i], or_masked(pair_of_bits(bytes[i], j), moved, third));
                }
        }
    }
}

void pack_nvfp4(const RowPointers& rows, int strip, QuantPanel& panel) {
    RowFormat<40>::scales(rows, kGroupMin, panel.scale[strip], panel.minimum[strip]);
#pragma GCC unroll 4
    for (int block = 0; block < 4; ++block) {
        for (int half = 0; half < 2; ++half) {
            __m512i bytes[4];
            transpose16(rows, 36 * block + 4 + 16 * half, bytes);
            uint8_t(*q)[kStripRows][4] = &panel.q[strip][16 * block + 8 * half];
            for (int i = 0; i < 4; ++i) {  // eight bytes are 16 columns
                _mm512_store_si512(q[i / 2 * 4 + i % 2], levels_of(unpacking::kE2M1, nibbles(bytes[i])));
                _mm512_store_si512(q[i / 2 * 4 + 2 + i % 2], levels_of(unpacking::kE2M1, high_nibbles(bytes[i])));
            }
        }
    }
}

// Entries of a codebook: row by row, then turned.
template <int TypeId>
void pack_entries(const RowPointers& rows, int group, int strip, QuantPanel& panel) {
    using Format = RowFormat<TypeId>;
    Format::scales(rows, group, panel.scale[strip], panel.minimum[strip]);
    const uint8_t* grid = codebook(TypeId);
    alignas(64) uint8_t q[kStripRows][kSpan];
    for (int r = 0; r < kStripRows; ++r) {
        __m512i of[4];
        if constexpr (HasSigns<Format>) {
            __mmask64 negative[4];
            Format::unpack(rows.p0 + r * rows.stride, of, negative, grid);
            for (int i = 0; i < 4; ++i) of[i] = Format::unsigned_of(of[i], negative[i]);
        } else {
            Format::unpack(rows.p0 + r * rows.stride, of, grid);
        }
        for (int i = 0; i < 4; ++i) _mm512_store_si512(q[r] + 64 * i, of[i]);
    }
    for (int k = 0; k < kSpan; k += 16) transpose16(&q[0][k], kSpan, &panel.q[strip][k / 4][0][0]);
}

// A whole span of 16 rows; false for types that have no form here.
bool pack_span(int type_id, const RowPointers& rows, int group, int strip, QuantPanel& panel) {
    switch (type_id) {
        case 2: pack_nibbles<2>(rows, group, strip, panel); return true;
        case 3: pack_nibbles<3>(rows, group, strip, panel); return true;
        case 6: pack_nibbles<6>(rows, group, strip, panel); return true;
        case 7: pack_nibbles<7>(rows, group, strip, panel); return true;
        case 8: pack_q8_0(rows, group, strip, panel); return true;
        case 10: pack_q2_k(rows, strip, panel); return true;
        case 11: pack_q3_k(rows, strip, panel); return true;
        case 12: pack_q4_k(rows, group, strip, panel); return true;
        case 13: pack_q5_k(rows, group, strip, panel); return true;
        case 14: pack_q6_k(rows, strip, panel); return true;
        case 16: pack_entries<16>(rows, group, strip, panel); return true;
        case 17: pack_entries<17>(rows, group, strip, panel); return true;
        case 18: pack_entries<18>(rows, group, strip, panel); return true;
        case 19: pack_entries<19>(rows, group, strip, panel); return true;
        case 20: pack_nibbles<20>(rows, group, strip, panel); return true;
        case 21: pack_entries<21>(rows, group, strip, panel); return true;
        case 22: pack_entries<22>(rows, group, strip, panel); return true;
        case 23: pack_nibbles<23>(rows, group, strip, panel); return true;
        case 29: pack_entries<29>(rows, group, strip, panel); return true;
        case 39: pack_nibbles<39>(rows, group, strip, panel); return true;
        case 40: pack_nvfp4(rows, strip, panel); return true;
        default: return false;
    }
}

// A row's last columns, where they are no whole span: the rest is zeros, which nobody multiplies.
bool pack_rest(int type_id, const PackSource& from, int group, int strip, QuantPanel& panel) {
    constexpr int64_t kStride = 320;  // at least a span of any type of small blocks
    alignas(64) uint8_t padded[kStripRows * kStride] = {};
    UnpackInfo info{};
    unpack_info(type_id, info);
    if (kSpan / info.block_elements * info.block_bytes > kStride) return false;
    const auto bytes = static_cast<size_t>(from.count / info.block_elements * info.block_bytes);
    for (int r = 0; r < kStripRows; ++r) __builtin_memcpy(padded + r * kStride, from.src + r * from.row_bytes, bytes);
    return pack_span(type_id, RowPointers(padded, kStride), group, strip, panel);
}

void pack(int type_id, const PackSource& from, int group, int strip, QuantPanel& panel) {
    if (from.rows == kStripRows) {
        if (from.count == kSpan ? pack_span(type_id, RowPointers(from.src, from.row_bytes), group, strip, panel)
                                : pack_rest(type_id, from, group, strip, panel))
            return;
    }
    pack_any(type_id, from, group, strip, panel);
}

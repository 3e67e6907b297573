// Weight rows to bfloat16, of types of four bits whose 32 columns share a scale: a table of the 16 possible weights of two
// groups, as for Q4_K in tile_decode.inl. A group has 16 bytes, whose low nibbles are its first half.
//
// scale * level is exact in float32 (11 + 8 bits, or 17 + 7), so that the bits are those of RowsOfAny.

// Scales of eight groups, from memory one by one.
struct alignas(64) GroupScales {
    float v[8];
};

inline __m512 levels_of(const int8_t (&levels)[16]) {
    return _mm512_cvtepi32_ps(load16_signed(levels));
}

// Word 9 * i of 128 bytes: the halves that begin blocks of 18 bytes.
inline __m256 halves18(const uint8_t* src) {
    const __m512i which = _mm512_castsi128_si512(_mm_set_epi16(63, 54, 45, 36, 27, 18, 9, 0));
    const __m512i words = _mm512_permutex2var_epi16(_mm512_loadu_si512(src), which, _mm512_loadu_si512(src + 64));
    return _mm256_cvtph_ps(_mm512_castsi512_si128(words));
}

constexpr int8_t kFromMinus8[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
constexpr int8_t kTwiceE2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
constexpr int8_t kUnevenLevels[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// Blocks of 32 columns, each with a half as its scale.
template <const int8_t (&Levels)[16]>
struct HalfBlocks {
    static constexpr int kBytes = 18;
    static __m512 levels() { return levels_of(Levels); }
    static const uint8_t* nibbles(const uint8_t* src, int group) { return src + kBytes * group + 2; }
    static constexpr int place(int group) { return group; }
    static void all(const uint8_t* src, GroupScales& scales) { _mm256_store_ps(scales.v, halves18(src)); }
    static void some(const uint8_t* src, int groups, GroupScales& scales) {
        for (int g = 0; g < groups; ++g) scales.v[g] = half_at(src + kBytes * g);
    }
};

// Blocks of 32 columns, each with an exponent.
struct ExponentBlocks {
    static constexpr int kBytes = 17;
    static __m512 levels() { return levels_of(kTwiceE2M1); }
    static const uint8_t* nibbles(const uint8_t* src, int group) { return src + kBytes * group + 1; }
    static constexpr int place(int group) { return group; }
    // Half of 2^(e - 127); the two smallest are subnormal.
    static __m256 halved(__m256i e) {
        const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
        const __m256i tiny = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
        return _mm256_castsi256_ps(_mm256_mask_mov_epi32(normal, _mm256_cmplt_epu32_mask(e, _mm256_set1_epi32(2)), tiny));
    }
    static void all(const uint8_t* src, GroupScales& scales) {
        const __m512i which = _mm512_castsi128_si512(_mm_cvtsi64_si128(0x7766554433221100));
        const __m512i bytes = pick_of_two(which, _mm512_loadu_si512(src), _mm512_loadu_si512(src + 64));
        _mm256_store_ps(scales.v, halved(_mm256_cvtepu8_epi32(_mm512_castsi512_si128(bytes))));
    }
    static void some(const uint8_t* src, int groups, GroupScales& scales) {
        uint8_t exponents[16] = {};
        for (int g = 0; g < groups; ++g) exponents[g] = src[kBytes * g];
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(exponents));
        _mm256_store_ps(scales.v, halved(_mm256_cvtepu8_epi32(bytes)));
    }
};

// Blocks of 256 columns: d, then two bytes of the high and four of the low bits of eight scales of six bits, less 32.
struct SixBitBlocks {
    static __m512 levels() { return levels_of(kUnevenLevels); }
    static const uint8_t* nibbles(const uint8_t* src, int group) { return src + 8 + 16 * group; }
    static constexpr int place(int group) { return group / 2 + group % 2 * 4; }  // even groups first
    static void all(const uint8_t* src, GroupScales& scales) {
        uint32_t low;
        uint16_t h;
        __builtin_memcpy(&low, src + 4, 4);
        __builtin_memcpy(&h, src + 2, 2);
        const uint32_t high = (h & 15u) | (h & 0xf0u) << 4 | (h & 0xf00u) << 8 | (h & 0xf000u) << 12;
        const uint64_t even = (low & 0x0f0f0f0fu) | (high & 0x03030303u) << 4;
        const uint64_t odd = ((low >> 4) & 0x0f0f0f0fu) | (high & 0x0c0c0c0cu) << 2;
        const __m256i six = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(even | odd << 32)));
        const __m256 multiple = _mm256_cvtepi32_ps(_mm256_sub_epi32(six, _mm256_set1_epi32(32)));
        _mm256_store_ps(scales.v, _mm256_mul_ps(multiple, _mm256_set1_ps(half_at(src))));
    }
    static void some(const uint8_t* src, int, GroupScales& scales) { all(src, scales); }
};

template <typename Form>
struct RowsOfNibbles {
    static constexpr int kGroups = static_cast<int>(kSpan / kTileColumns);
    static_assert(kGroups == 8 && kTileColumns == 32);
    const __m512 levels = Form::levels();
    const __m512i right = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
    const __m512i nibble = _mm512_set1_epi16(15), second_half = _mm512_set1_epi16(16);

    inline __attribute__((always_inline)) __m512 weights(const GroupScales& scales, int group) const {
        return _mm512_mul_ps(_mm512_set1_ps(scales.v[Form::place(group)]), levels);
    }

    // The low nibbles' words, then the high ones'; what is above them is not cleared.
    inline __attribute__((always_inline)) __m512i words(const uint8_t* nibbles) const {
        const __m256i bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(nibbles)));
        return _mm512_srlv_epi16(_mm512_cvtepu8_epi16(bytes), right);
    }

    inline __attribute__((always_inline)) void pair(const uint8_t* src, const GroupScales& scales, int group,
                                                    uint16_t* out) const {
        const __m512i table = to_bf16(weights(scales, group), weights(scales, group + 1));
        const __m512i low = _mm512_and_si512(words(Form::nibbles(src, group)), nibble);
        const __m512i high = _mm512_or_si512(words(Form::nibbles(src, group + 1)), second_half);
        put_tile_row(out, group, _mm512_permutexvar_epi16(low, table));
        put_tile_row(out, group + 1, _mm512_permutexvar_epi16(high, table));
    }

    THERMOCLINE_ROW void row(const TileMatrix&, const uint8_t* src, int64_t count, uint16_t* out) const {
        GroupScales scales;
        if (count == kSpan) {
            Form::all(src, scales);
            in_memory(scales);
#pragma GCC unroll 4
            for (int g = 0; g < kGroups; g += 2) pair(src, scales, g, out);
            return;
        }
        const int groups = static_cast<int>(count / kTileColumns);
        Form::some(src, groups, scales);
        in_memory(scales);
        for (int g = 0; g + 1 < groups; g += 2) pair(src, scales, g, out);
        if (groups % 2 == 0) return;
        const __m512 last = weights(scales, groups - 1);
        const __m512i low = words(Form::nibbles(src, groups - 1));
        put_tile_row(out, groups - 1, _mm512_permutexvar_epi16(low, to_bf16(last, last)));
    }
};

using RowsOfQ40 = RowsOfNibbles<HalfBlocks<kFromMinus8>>;
using RowsOfIQ4NL = RowsOfNibbles<HalfBlocks<kUnevenLevels>>;
using RowsOfMXFP4 = RowsOfNibbles<ExponentBlocks>;
using RowsOfIQ4XS = RowsOfNibbles<SixBitBlocks>;

// Decodes `count` columns of the row that begins at `src`.
template <typename Rows>
void decode_row(const TileMatrix& matrix, const uint8_t* src, int64_t count, uint16_t* out) {
    Rows().row(matrix, src, count, out);
}

using DecodeTileRow = void (*)(const TileMatrix&, const uint8_t* src, int64_t count, uint16_t* out);

inline DecodeTileRow find_decode(int type_id) {
    switch (type_id) {
        case kBF16: return decode_row<RowsOfBF16>;
        case 2: return decode_row<RowsOfQ40>;
        case 8: return decode_row<RowsOfQ80>;
        case 12: return decode_row<RowsOfQ4K>;
        case 13: return decode_row<RowsOfQ5K>;
        case 14: return decode_row<RowsOfQ6K>;
        case 20: return decode_row<RowsOfIQ4NL>;
        case 23: return decode_row<RowsOfIQ4XS>;
        case 39: return decode_row<RowsOfMXFP4>;
        default: return decode_row<RowsOfAny>;
    }
}

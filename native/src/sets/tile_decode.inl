// Weight rows to bfloat16: up to kSpan columns of some rows at a time, each row written to its place in the
// left tiles of those columns, which lie one after the other.
//
// The value is scale * (q - offset) - minimum in float32, rounded to nearest even. In the types with code
// of their own scale * (q - offset) is exact in float32 (the factors have 11 + 8 + 5 bits or fewer), so that a
// fused subtraction gives the same bits. What bounds them is the two ports of the vector unit, of which one
// does all shuffles, and not memory: numbers are spread over the lanes by loads, which is free.

// Between products, always: with so many types the compiler calls some otherwise, which takes a tenth longer.
#define THERMOCLINE_ROW inline __attribute__((always_inline))

constexpr int64_t kTileWords = kStripRows * kTileColumns;  // from a row's place in a tile to that in the next

inline void put_tile_row(uint16_t* out, int64_t tile, __m512i weights) {
    _mm512_store_si512(out + tile * kTileWords, weights);
}

inline __m512i load16_words(const void* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
inline __m512i load16_signed(const void* p) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
inline __m512i load32_words(const void* p) {
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
}

// In the low half; the other is not looked at.
inline __m512i load32(const uint8_t* p) {
    return _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

inline float half_at(const uint8_t* p) {
    uint16_t bits;
    __builtin_memcpy(&bits, p, 2);
    return _cvtsh_ss(bits);
}

// Makes the compiler load what was just stored; it would rather pick lanes from the register.
template <typename T>
inline __attribute__((always_inline)) void in_memory(T& value) {
    asm("" : "+m"(value));
}

// 0, 1, ... 15, plus `first`, times `step`.
inline __m512i counting(int first, int step = 1) {
    const __m512i from = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return _mm512_mullo_epi32(_mm512_add_epi32(from, _mm512_set1_epi32(first)), _mm512_set1_epi32(step));
}

// The head of a block of Q4_K or Q5_K: d, dmin, then six bits of eight scales and eight minima.
struct alignas(64) KHead {
    float scale[8];
    float minimum[8];

    inline __attribute__((always_inline)) explicit KHead(const uint8_t* src) {
        uint32_t a, b, c;
        __builtin_memcpy(&a, src + 4, 4);
        __builtin_memcpy(&b, src + 8, 4);
        __builtin_memcpy(&c, src + 12, 4);
        uint64_t scales = (a & 0x3f3f3f3fu) |
                          static_cast<uint64_t>((c & 0x0f0f0f0fu) | ((a >> 2) & 0x30303030u)) << 32;
        uint64_t minima = (b & 0x3f3f3f3fu) |
                          static_cast<uint64_t>(((c >> 4) & 0x0f0f0f0fu) | ((b >> 2) & 0x30303030u)) << 32;
        asm("" : "+r"(scales), "+r"(minima));  // computed beside the vector unit, which has enough to do
        const __m512i whole =
            _mm512_cvtepu8_epi32(_mm_set_epi64x(static_cast<int64_t>(minima), static_cast<int64_t>(scales)));
        const __m128 d = _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(src)));
        const __m512i which = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
        const __m512 factor = _mm512_permutexvar_ps(which, _mm512_castps128_ps512(d));
        _mm512_store_ps(scale, _mm512_mul_ps(factor, _mm512_cvtepi32_ps(whole)));
        in_memory(*this);
    }

    // The weights of group `g` whose q are in `q`.
    inline __m512 weights(int g, __m512 q) const {
        return _mm512_fmsub_ps(q, _mm512_set1_ps(scale[g]), _mm512_set1_ps(minimum[g]));
    }
};

// A table of the 16 possible weights of two groups, 64 bytes; one look-up of bytes gives 32 weights.
struct RowsOfQ4K {
    // Nibble n of group g becomes the bytes 2n + 32g and 2n + 1 + 32g.
    const __m512 q = _mm512_cvtepi32_ps(counting(0));
    const __m512i twice = counting(0, 0x02020202);  // of bytes below: each byte in two places
    const __m512i doubled = _mm512_add_epi32(twice, _mm512_set1_epi32(0x01010000));
    const __m512i nibble = _mm512_set1_epi16(0x1e1e);
    const __m512i first = _mm512_set1_epi16(0x0100), second = _mm512_set1_epi16(0x2120);

    THERMOCLINE_ROW void row(const TileMatrix&, const uint8_t* src, int64_t, uint16_t* out) const {
        constexpr int kAndOr = 0xea;  // (first and second) or third
        const KHead head(src);
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            const __m512i table = to_bf16(head.weights(2 * j, q), head.weights(2 * j + 1, q));
            const __m512i bytes = pick_bytes(doubled, load32(src + 16 + 32 * j));
            const __m512i low = _mm512_ternarylogic_epi32(_mm512_slli_epi16(bytes, 1), nibble, first, kAndOr);
            const __m512i high = _mm512_ternarylogic_epi32(_mm512_srli_epi16(bytes, 3), nibble, second, kAndOr);
            put_tile_row(out, 2 * j, pick_bytes(low, table));
            put_tile_row(out, 2 * j + 1, pick_bytes(high, table));
        }
    }
};

// A table of 32 weights for each group. A look-up of words takes five bits of the index: four from the nibble,
// the fifth from the byte of high bits, whose other bits need not be cleared.
struct RowsOfQ5K {
    const __m512 q = _mm512_cvtepi32_ps(counting(0)), q16 = _mm512_cvtepi32_ps(counting(16));
    const __m512i low = _mm512_set1_epi16(15);

    template <int Group>
    inline __attribute__((always_inline)) __m512i group(const KHead& head, __m512i nibbles, __m512i fifth) const {
        constexpr int kSelect = 0xca;  // first ? second : third, bit by bit
        constexpr unsigned kLeft = Group < 4 ? 4 - Group : 0, kRight = Group < 4 ? 0 : Group - 4;
        const __m512i high = _mm512_srli_epi16(_mm512_slli_epi16(fifth, kLeft), kRight);
        return _mm512_permutexvar_epi16(_mm512_ternarylogic_epi32(low, nibbles, high, kSelect),
                                        to_bf16(head.weights(Group, q), head.weights(Group, q16)));
    }

    template <int Pair>
    inline __attribute__((always_inline)) void pair(const KHead& head, const uint8_t* from, __m512i fifth,
                                                    uint16_t* out) const {
        const __m512i bytes = load32_words(from + 32 * Pair);
        put_tile_row(out, 2 * Pair, group<2 * Pair>(head, bytes, fifth));
        put_tile_row(out, 2 * Pair + 1, group<2 * Pair + 1>(head, _mm512_srli_epi16(bytes, 4), fifth));
    }

    THERMOCLINE_ROW void row(const TileMatrix&, const uint8_t* src, int64_t, uint16_t* out) const {
        const KHead head(src);
        const __m512i fifth = load32_words(src + 16);
        pair<0>(head, src + 48, fifth, out);
        pair<1>(head, src + 48, fifth, out);
        pair<2>(head, src + 48, fifth, out);
        pair<3>(head, src + 48, fifth, out);
    }
};

// Each 16 columns have a scale, too few for a table. A byte of q below 128 in the third byte of 128.0f makes it
// 128 + q; both scale * (128 + q) - scale * 160 and scale * 160 are exact.
struct RowsOfQ6K {
    const __m512i nibble = _mm512_set1_epi8(15), pair = _mm512_set1_epi8(0x30);
    const __m512i left = _mm512_inserti64x4(_mm512_set1_epi16(4), _mm256_set1_epi16(2), 1);
    const __m512i right = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(2), 1);
    const __m512i base = _mm512_castps_si512(_mm512_set1_ps(128.0f));
    const __m512i place[4] = {counting(0, 0x10000), counting(16, 0x10000), counting(32, 0x10000),
                              counting(48, 0x10000)};

    struct alignas(64) Scales {
        float scale[16];
        float middle[16];
    };

    inline void put64(const Scales& scales, int tile, __m512i q, uint16_t* out) const {
        const auto weights = [&](int part) {
            const int g = 2 * tile + part;
            return _mm512_fmsub_ps(_mm512_castsi512_ps(pick_third_bytes(base, place[part], q)),
                                   _mm512_set1_ps(scales.scale[g]), _mm512_set1_ps(scales.middle[g]));
        };
        put_tile_row(out, tile, to_bf16(weights(0), weights(1)));
        put_tile_row(out, tile + 1, to_bf16(weights(2), weights(3)));
    }

    THERMOCLINE_ROW void row(const TileMatrix&, const uint8_t* src, int64_t, uint16_t* out) const {
        constexpr int kAndOr = 0xea;
        Scales scales;
        const __m512 scale =
            _mm512_mul_ps(_mm512_cvtepi32_ps(load16_signed(src + 192)), _mm512_set1_ps(half_at(src + 208)));
        _mm512_store_ps(scales.scale, scale);
        _mm512_store_ps(scales.middle, _mm512_mul_ps(scale, _mm512_set1_ps(160.0f)));
        in_memory(scales);
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            const __m512i nibbles = _mm512_loadu_si512(src + 64 * half);
            const __m512i high = _mm512_broadcast_i64x4(
                _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + 128 + 32 * half)));
            put64(scales, 4 * half,
                  _mm512_ternarylogic_epi32(_mm512_sllv_epi16(high, left), pair, _mm512_and_si512(nibbles, nibble),
                                            kAndOr),
                  out);
            put64(scales, 4 * half + 2,
                  _mm512_ternarylogic_epi32(_mm512_srlv_epi16(high, right), pair,
                                            _mm512_and_si512(_mm512_srli_epi16(nibbles, 4), nibble), kAndOr),
                  out);
        }
    }
};

struct RowsOfQ80 {
    THERMOCLINE_ROW void row(const TileMatrix&, const uint8_t* src, int64_t count, uint16_t* out) const {
        for (int64_t block = 0; block < count / 32; ++block, src += 34) {
            uint16_t half;
            __builtin_memcpy(&half, src, 2);
            const __m512 d = _mm512_cvtph_ps(_mm256_set1_epi16(static_cast<int16_t>(half)));
            put_tile_row(out, block, to_bf16(_mm512_mul_ps(_mm512_cvtepi32_ps(load16_signed(src + 2)), d),
                                             _mm512_mul_ps(_mm512_cvtepi32_ps(load16_signed(src + 18)), d)));
        }
    }
};

// Weights of this type are taken as they are; columns past the last are zero.
struct RowsOfBF16 {
    THERMOCLINE_ROW void row(const TileMatrix&, const uint8_t* src, int64_t count, uint16_t* out) const {
        for (int64_t k = 0; k < count; k += kTileColumns) {
            const auto filled = count - k < kTileColumns ? (1u << (count - k)) - 1u : 0xffffffffu;
            put_tile_row(out, k / kTileColumns, _mm512_maskz_loadu_epi16(filled, src + 2 * k));
        }
    }
};

struct RowsOfAny {
    inline void row(const TileMatrix& matrix, const uint8_t* src, int64_t count, uint16_t* out) const {
        alignas(64) uint8_t q[kSpan];
        float scale[kMaxGroups], minimum[kMaxGroups];
        matrix.unpack(src, count, q, scale, minimum);
        const __m512i offset = _mm512_set1_epi32(matrix.info.offset);
        const auto weights = [&](int64_t k) {
            const __m512 whole = _mm512_cvtepi32_ps(_mm512_sub_epi32(load16_words(q + k), offset));
            const __m512 value = _mm512_mul_ps(_mm512_set1_ps(scale[k / 16]), whole);
            return matrix.info.has_minimum ? _mm512_sub_ps(value, _mm512_set1_ps(minimum[k / 16])) : value;
        };
        for (int64_t k = 0; k < count; k += kTileColumns)
            put_tile_row(out, k / kTileColumns, to_bf16(weights(k), weights(k + 16)));
    }
};

// Weight rows to bfloat16: one row of up to kSpan columns at a time, written to its place in the left tiles
// of those columns, which lie one after the other.
//
// The value is scale * (q - offset) - minimum in float32, rounded to nearest even. In the types with code
// of their own scale * (q - offset) is exact in float32 (the factors have 11 + 6 + 5 bits or fewer), so that a
// fused subtraction of the minimum gives the same bits. Every decoder works within one 32-column step as the
// columns lie: the vector unit's shuffles and multiplications, not memory, are what bounds it.

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

inline float half_at(const uint8_t* p) {
    uint16_t bits;
    __builtin_memcpy(&bits, p, 2);
    return _cvtsh_ss(bits);
}

// Makes the compiler read what it just wrote, or a constant: a load that repeats a number in every lane is
// free, while lanes picked from a register take the one port that all shuffles share.
template <typename T>
inline __attribute__((always_inline)) void in_memory(const T& value) {
    asm volatile("" : : "r"(&value) : "memory");
}

// 0, 1, ... 15, plus `first`.
inline __m512 counting(int first) {
    const __m512i from = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return _mm512_cvtepi32_ps(_mm512_add_epi32(from, _mm512_set1_epi32(first)));
}

// The head of a block of Q4_K or Q5_K: d, dmin, then six bits of eight scales and eight minima.
struct alignas(64) KHead {
    float scale[8];
    float minimum[8];

    explicit KHead(const uint8_t* src) {
        uint32_t a, b, c;
        __builtin_memcpy(&a, src + 4, 4);
        __builtin_memcpy(&b, src + 8, 4);
        __builtin_memcpy(&c, src + 12, 4);
        uint64_t scales = (a & 0x3f3f3f3fu) |
                          static_cast<uint64_t>((c & 0x0f0f0f0fu) | ((a >> 2) & 0x30303030u)) << 32;
        uint64_t minima = (b & 0x3f3f3f3fu) |
                          static_cast<uint64_t>(((c >> 4) & 0x0f0f0f0fu) | ((b >> 2) & 0x30303030u)) << 32;
        asm("" : "+r"(scales), "+r"(minima));  // computed beside the vector unit, which has enough to do
        const __m512i whole = _mm512_cvtepu8_epi32(
            _mm_set_epi64x(static_cast<int64_t>(minima), static_cast<int64_t>(scales)));
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

// A table of the 16 possible weights of two groups; one look-up gives 32 weights.
void decode_q4_k(const TileMatrix&, const uint8_t* src, int64_t, uint16_t* out) {
    const KHead head(src);
    const __m512 q = counting(0);
    const __m512i low = _mm512_set1_epi16(15), second = _mm512_set1_epi16(16);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        const __m512i table = to_bf16(head.weights(2 * j, q), head.weights(2 * j + 1, q));
        const __m512i bytes = load32_words(src + 16 + 32 * j);
        const __m512i upper = _mm512_or_si512(_mm512_srli_epi16(bytes, 4), second);
        put_tile_row(out, 2 * j, _mm512_permutexvar_epi16(_mm512_and_si512(bytes, low), table));
        put_tile_row(out, 2 * j + 1, _mm512_permutexvar_epi16(upper, table));
    }
}

// A table of 32 weights for each group. A look-up takes five bits of the index: four from the nibble, the
// fifth from the byte of high bits, whose other bits need not be cleared.
template <int Group>
inline __m512i q5_k_group(const KHead& head, __m512i nibbles, __m512i fifth) {
    const __m512i table = to_bf16(head.weights(Group, counting(0)), head.weights(Group, counting(16)));
    constexpr int kSelect = 0xca;  // first ? second : third, bit by bit
    const __m512i high = Group < 4 ? _mm512_slli_epi16(fifth, 4 - (Group & 3))
                                   : _mm512_srli_epi16(fifth, Group < 4 ? 0 : Group - 4);
    return _mm512_permutexvar_epi16(
        _mm512_ternarylogic_epi32(_mm512_set1_epi16(15), nibbles, high, kSelect), table);
}

template <int Pair>
inline void q5_k_pair(const KHead& head, const uint8_t* q, __m512i fifth, uint16_t* out) {
    const __m512i bytes = load32_words(q + 32 * Pair);
    put_tile_row(out, 2 * Pair, q5_k_group<2 * Pair>(head, bytes, fifth));
    put_tile_row(out, 2 * Pair + 1, q5_k_group<2 * Pair + 1>(head, _mm512_srli_epi16(bytes, 4), fifth));
}

void decode_q5_k(const TileMatrix&, const uint8_t* src, int64_t, uint16_t* out) {
    const KHead head(src);
    const __m512i fifth = load32_words(src + 16);
    q5_k_pair<0>(head, src + 48, fifth, out);
    q5_k_pair<1>(head, src + 48, fifth, out);
    q5_k_pair<2>(head, src + 48, fifth, out);
    q5_k_pair<3>(head, src + 48, fifth, out);
}

// The weights of 16 signed bytes of one scale.
inline __m512 scaled16(const void* q, float scale) {
    return _mm512_mul_ps(_mm512_cvtepi32_ps(load16_signed(q)), _mm512_set1_ps(scale));
}

// Each 16 columns have a scale, too few for a table.
void decode_q6_k(const TileMatrix&, const uint8_t* src, int64_t, uint16_t* out) {
    alignas(64) float scale[16];
    alignas(64) int8_t q[256];
    _mm512_store_ps(scale, _mm512_mul_ps(_mm512_cvtepi32_ps(load16_signed(src + 192)), _mm512_set1_ps(half_at(src + 208))));
    in_memory(scale);
    const __m512i low = _mm512_set1_epi8(15), pair = _mm512_set1_epi8(0x30), offset = _mm512_set1_epi8(32);
    const __m512i left = _mm512_inserti64x4(_mm512_set1_epi16(4), _mm256_set1_epi16(2), 1);
    const __m512i right = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(2), 1);
    constexpr int kAndOr = 0xea;  // (first and second) or third
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
        const __m512i nibbles = _mm512_loadu_si512(src + 64 * half);
        const __m512i high = _mm512_broadcast_i64x4(
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + 128 + 32 * half)));
        const __m512i first = _mm512_ternarylogic_epi32(_mm512_sllv_epi16(high, left), pair,
                                                        _mm512_and_si512(nibbles, low), kAndOr);
        const __m512i second = _mm512_ternarylogic_epi32(
            _mm512_srlv_epi16(high, right), pair, _mm512_and_si512(_mm512_srli_epi16(nibbles, 4), low), kAndOr);
        _mm512_store_si512(q + 128 * half, _mm512_sub_epi8(first, offset));
        _mm512_store_si512(q + 128 * half + 64, _mm512_sub_epi8(second, offset));
    }
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g)
        put_tile_row(out, g, to_bf16(scaled16(q + 32 * g, scale[2 * g]), scaled16(q + 32 * g + 16, scale[2 * g + 1])));
}

void decode_q8_0(const TileMatrix&, const uint8_t* src, int64_t count, uint16_t* out) {
    for (int64_t block = 0; block < count / 32; ++block, src += 34) {
        const float d = half_at(src);
        put_tile_row(out, block, to_bf16(scaled16(src + 2, d), scaled16(src + 18, d)));
    }
}

// Weights of this type are taken as they are; columns past the last are zero.
void decode_bf16(const TileMatrix&, const uint8_t* src, int64_t count, uint16_t* out) {
    for (int64_t k = 0; k < count; k += kTileColumns) {
        const auto filled = count - k < kTileColumns ? (1u << (count - k)) - 1u : 0xffffffffu;
        put_tile_row(out, k / kTileColumns, _mm512_maskz_loadu_epi16(filled, src + 2 * k));
    }
}

void decode_any(const TileMatrix& matrix, const uint8_t* src, int64_t count, uint16_t* out) {
    alignas(64) uint8_t q[kSpan];
    float scale[kMaxGroups], minimum[kMaxGroups];
    matrix.unpack(src, count, q, scale, minimum);
    const __m512i offset = _mm512_set1_epi32(matrix.info.offset);
    const auto weights = [&](int64_t k) {
        const __m512 whole = _mm512_cvtepi32_ps(_mm512_sub_epi32(load16_words(q + k), offset));
        const __m512 value = _mm512_mul_ps(_mm512_set1_ps(scale[k / 16]), whole);
        return matrix.info.has_minimum ? _mm512_sub_ps(value, _mm512_set1_ps(minimum[k / 16])) : value;
    };
    for (int64_t k = 0; k < count; k += kTileColumns) put_tile_row(out, k / kTileColumns, to_bf16(weights(k), weights(k + 16)));
}

using DecodeTileRow = void (*)(const TileMatrix&, const uint8_t* src, int64_t count, uint16_t* out);

inline DecodeTileRow find_decode(int type_id) {
    switch (type_id) {
        case kBF16: return decode_bf16;
        case 8: return decode_q8_0;
        case 12: return decode_q4_k;
        case 13: return decode_q5_k;
        case 14: return decode_q6_k;
        default: return decode_any;
    }
}

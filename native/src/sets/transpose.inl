// 16 rows of 16 bytes, `stride` apart, to 4 columns of 16 four-byte units: dst[column][row][4].
#if defined(__AVX512F__)

// The addresses of 16 rows in six registers.
struct RowPointers {
    const uint8_t *p0, *p4, *p8, *p12;
    int64_t stride, stride3;

    RowPointers(const uint8_t* src, int64_t row_bytes)
        : p0(src),
          p4(src + 4 * row_bytes),
          p8(src + 8 * row_bytes),
          p12(src + 12 * row_bytes),
          stride(row_bytes),
          stride3(3 * row_bytes) {}
};

inline __m128i load16(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }

// 128-bit lane n is 16 bytes of row 4n + i, where `skip` is i rows.
inline __m512i load_lanes(const RowPointers& rows, int64_t skip) {
    __m512i v = _mm512_castsi128_si512(load16(rows.p0 + skip));
    v = _mm512_inserti32x4(v, load16(rows.p4 + skip), 1);
    v = _mm512_inserti32x4(v, load16(rows.p8 + skip), 2);
    return _mm512_inserti32x4(v, load16(rows.p12 + skip), 3);
}

// The 16 bytes at `at` of each row, kept in registers.
inline __attribute__((always_inline)) void transpose16(const RowPointers& rows, int64_t at, __m512i out[4]) {
    const __m512i r0 = load_lanes(rows, at), r1 = load_lanes(rows, at + rows.stride);
    const __m512i r2 = load_lanes(rows, at + 2 * rows.stride), r3 = load_lanes(rows, at + rows.stride3);
    const __m512i a = _mm512_unpacklo_epi32(r0, r1), b = _mm512_unpackhi_epi32(r0, r1);
    const __m512i c = _mm512_unpacklo_epi32(r2, r3), d = _mm512_unpackhi_epi32(r2, r3);
    out[0] = _mm512_unpacklo_epi64(a, c);
    out[1] = _mm512_unpackhi_epi64(a, c);
    out[2] = _mm512_unpacklo_epi64(b, d);
    out[3] = _mm512_unpackhi_epi64(b, d);
}

inline void transpose16(const uint8_t* src, int64_t stride, uint8_t* dst) {
    __m512i columns[4];
    transpose16(RowPointers(src, stride), 0, columns);
    for (int i = 0; i < 4; ++i) _mm512_storeu_si512(dst + 64 * i, columns[i]);
}

#elif defined(__AVX2__)

inline void transpose16(const uint8_t* src, int64_t stride, uint8_t* dst) {
    for (int half = 0; half < 2; ++half, src += 8 * stride, dst += 32) {
        __m256i in[4];
        for (int i = 0; i < 4; ++i) {  // 128-bit lane n of in[i] is row 4n + i
            const uint8_t* row = src + i * stride;
            in[i] = _mm256_inserti128_si256(
                _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row))),
                _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + 4 * stride)), 1);
        }
        const __m256i a = _mm256_unpacklo_epi32(in[0], in[1]), b = _mm256_unpackhi_epi32(in[0], in[1]);
        const __m256i c = _mm256_unpacklo_epi32(in[2], in[3]), d = _mm256_unpackhi_epi32(in[2], in[3]);
        const __m256i columns[4] = {_mm256_unpacklo_epi64(a, c), _mm256_unpackhi_epi64(a, c),
                                    _mm256_unpacklo_epi64(b, d), _mm256_unpackhi_epi64(b, d)};
        for (int i = 0; i < 4; ++i)
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + 64 * i), columns[i]);
    }
}

#else

inline void transpose16(const uint8_t* src, int64_t stride, uint8_t* dst) {
    for (int row = 0; row < 16; ++row)
        for (int column = 0; column < 4; ++column)
            __builtin_memcpy(dst + 64 * column + 4 * row, src + row * stride + 4 * column, 4);
}

#endif

// 16 rows of 16 four-byte units, rows and columns exchanged.
inline void turn16(const void* src, void* dst) {
    for (int part = 0; part < 4; ++part)
        transpose16(static_cast<const uint8_t*>(src) + 16 * part, 64, static_cast<uint8_t*>(dst) + 256 * part);
}

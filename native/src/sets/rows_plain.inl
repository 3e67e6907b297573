// Products of rows of F16, BF16 or F32 with one token, straight from the file's bytes: some columns of sixteen rows are
// turned as they lie, and numbers of 16 bits widened last. Each lane adds over the columns in order, as the panel form
// does: the results are equal to the bit.

#if defined(__AVX512F__)

// Sixteen rows in a register. Words of 32 bits are turned, which hold one number of F32 or two of 16 bits; those of BF16 are
// the upper half of a float.
template <int TypeId>
struct PlainColumns {
    static constexpr int kBytes = TypeId == kF32 ? 4 : 2;
    __m512 total = _mm512_setzero_ps();

    THERMOCLINE_FORCED void add(__m512 column, const float* x) {
        total = _mm512_fmadd_ps(column, _mm512_set1_ps(*x), total);
    }
    static THERMOCLINE_FORCED void widen(__m512i words, __m512& first, __m512& second) {
        if constexpr (TypeId == kBF16) {
            first = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
            second = _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(-65536)));
        } else {
            const __m512i apart = _mm512_permutexvar_epi16(
                _mm512_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1,  //
                                 30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0), words);
            first = _mm512_cvtph_ps(_mm512_castsi512_si256(apart));
            second = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(apart, 1));
        }
    }
    THERMOCLINE_FORCED void add_line(const uint8_t (&near)[kStripRows][64], const float* x, int64_t columns) {
        const RowPointers rows(near[0], sizeof near[0]);
#pragma GCC unroll 4
        for (int64_t part = 0; part < 4; ++part) {
            __m512i words[4];
            transpose16(rows, 16 * part, words);
#pragma GCC unroll 4
            for (int64_t i = 0; i < 4; ++i) {
                const int64_t column = (4 * part + i) * 4 / kBytes;
                if (column >= columns) return;
                if constexpr (TypeId == kF32) {
                    add(_mm512_castsi512_ps(words[i]), x + column);
                } else {
                    __m512 first, second;
                    widen(words[i], first, second);
                    add(first, x + column);
                    if (column + 1 >= columns) return;
                    add(second, x + column + 1);
                }
            }
        }
    }
    void store(float* c) const { _mm512_storeu_ps(c, total); }
};

#else

// Columns as rows: out[k] is column k of rows 0 to 7 (low half) and 8 to 15 (high half).
THERMOCLINE_FORCED void turn_eight_columns(const uint8_t* src, int64_t row_bytes, __m256i (&out)[8]) {
    const auto load = [&](int row) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + row * row_bytes)); };
    __m256i in[8], twos[8], fours[8];
    for (int r = 0; r < 8; ++r) in[r] = _mm256_inserti128_si256(_mm256_castsi128_si256(load(r)), load(r + 8), 1);
    for (int i = 0; i < 4; ++i) {
        twos[i] = _mm256_unpacklo_epi16(in[2 * i], in[2 * i + 1]);  // columns 0 to 3 of rows 2i and 2i + 1
        twos[i + 4] = _mm256_unpackhi_epi16(in[2 * i], in[2 * i + 1]);
    }
    for (int i = 0; i < 8; i += 4)  // columns i on of rows 0 to 3, then of rows 4 to 7
        for (int rows = 0; rows < 2; ++rows) {
            fours[i + rows] = _mm256_unpacklo_epi32(twos[i + 2 * rows], twos[i + 2 * rows + 1]);
            fours[i + rows + 2] = _mm256_unpackhi_epi32(twos[i + 2 * rows], twos[i + 2 * rows + 1]);
        }
    for (int i = 0; i < 8; i += 2) {
        out[i] = _mm256_unpacklo_epi64(fours[i], fours[i + 1]);
        out[i + 1] = _mm256_unpackhi_epi64(fours[i], fours[i + 1]);
    }
}

template <int TypeId>
THERMOCLINE_FORCED __m256 widen_plain(__m128i numbers) {
    if constexpr (TypeId == kF16) return _mm256_cvtph_ps(numbers);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(numbers), 16));
}

// totals[i]: of rows 8 * i on. Eight columns from number `at` of each row, or as many as there are.
template <int TypeId>
THERMOCLINE_FORCED void add_eight_columns(const uint8_t* src, int64_t row_bytes, const float* x, int64_t columns,
                                          __m256 (&totals)[2]) {
    __m256i turned[8];
    turn_eight_columns(src, row_bytes, turned);
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) {
        if (k >= columns) break;
        const __m256 a = _mm256_broadcast_ss(x + k);
        totals[0] = _mm256_fmadd_ps(widen_plain<TypeId>(_mm256_castsi256_si128(turned[k])), a, totals[0]);
        totals[1] = _mm256_fmadd_ps(widen_plain<TypeId>(_mm256_extracti128_si256(turned[k], 1)), a, totals[1]);
    }
}

template <>
THERMOCLINE_FORCED void add_eight_columns<kF32>(const uint8_t* src, int64_t row_bytes, const float* x, int64_t columns,
                                                __m256 (&totals)[2]) {
    for (int half = 0; half < 2; ++half, src += 8 * row_bytes) {
        const auto load = [&](int row) { return _mm256_loadu_ps(reinterpret_cast<const float*>(src + row * row_bytes)); };
        __m256 twos[8], fours[8];
        for (int i = 0; i < 8; i += 2) {
            twos[i] = _mm256_unpacklo_ps(load(i), load(i + 1));  // columns 0, 1 and 4, 5 of rows i and i + 1
            twos[i + 1] = _mm256_unpackhi_ps(load(i), load(i + 1));
        }
        for (int i = 0; i < 8; i += 4)
            for (int k = 0; k < 2; ++k) {  // columns 2k and 2k + 4, then 2k + 1 and 2k + 5, of rows i to i + 3
                fours[i + 2 * k] = _mm256_shuffle_ps(twos[i + k], twos[i + k + 2], 0x44);
                fours[i + 2 * k + 1] = _mm256_shuffle_ps(twos[i + k], twos[i + k + 2], 0xee);
            }
#pragma GCC unroll 8
        for (int k = 0; k < 8; ++k) {
            if (k >= columns) break;
            const __m256 turned = k < 4 ? _mm256_permute2f128_ps(fours[k % 4], fours[k % 4 + 4], 0x20)
                                        : _mm256_permute2f128_ps(fours[k % 4], fours[k % 4 + 4], 0x31);
            totals[half] = _mm256_fmadd_ps(turned, _mm256_broadcast_ss(x + k), totals[half]);
        }
    }
}

// Sixteen rows in two registers, which eight columns are added to at a time.
template <int TypeId>
struct PlainColumns {
    static constexpr int kBytes = TypeId == kF32 ? 4 : 2;
    __m256 totals[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};

    // A cache line of each row, of whose numbers `columns` count.
    THERMOCLINE_FORCED void add_line(const uint8_t (&near)[kStripRows][64], const float* x, int64_t columns) {
        for (int64_t at = 0; at < columns; at += 8)
            add_eight_columns<TypeId>(near[0] + kBytes * at, sizeof near[0], x + at, columns - at, totals);
    }
    void store(float* c) const {
        _mm256_storeu_ps(c, totals[0]);
        _mm256_storeu_ps(c + 8, totals[1]);
    }
};

#endif

// Several strips take turns, since each one's additions wait for one another.
template <int TypeId, int Strips>
void multiply_plain_strips(const PackSource* from, const float* x, float* c) {
    using Columns = PlainColumns<TypeId>;
    constexpr int64_t kColumns = 64 / Columns::kBytes;
    Columns sums[Strips];
    // Read a cache line of each row at a time: rows of a power of two of bytes push each other out of the nearest cache.
    alignas(64) uint8_t near[kStripRows][64];
    const uint8_t *asked[Strips], *wanted[Strips];
    for (int s = 0; s < Strips; ++s) asked[s] = wanted[s] = from[s].ahead.from;
    const int64_t count = from[0].count;
    int64_t column = 0;
    for (; column + kColumns <= count; column += kColumns)
#pragma GCC unroll 2
        for (int s = 0; s < Strips; ++s) {
            if (from[s].ahead.bytes > 0)
                for (wanted[s] += sizeof near; asked[s] < wanted[s];) asked[s] = ask_for_lines<1>(asked[s], from[s].ahead.nearest);
#pragma GCC unroll 16
            for (int r = 0; r < kStripRows; ++r)
                __builtin_memcpy(near[r], from[s].src + r * from[s].row_bytes + Columns::kBytes * column, sizeof near[r]);
            sums[s].add_line(near, x + column, kColumns);
        }
    if (const int64_t left = count - column; left > 0)
        for (int s = 0; s < Strips; ++s) {
            __builtin_memset(near, 0, sizeof near);
            for (int r = 0; r < kStripRows; ++r)
                __builtin_memcpy(near[r], from[s].src + r * from[s].row_bytes + Columns::kBytes * column,
                                 static_cast<size_t>(Columns::kBytes * left));
            sums[s].add_line(near, x + column, left);
        }
    for (int s = 0; s < Strips; ++s) sums[s].store(c + s * kStripRows);
}

template <int TypeId>
void multiply_plain_rows(const PackSource* from, int strips, const float* x, float* c) {
    if (strips == 2) return multiply_plain_strips<TypeId, 2>(from, x, c);
    for (int s = 0; s < strips; ++s) multiply_plain_strips<TypeId, 1>(from + s, x, c + s * kStripRows);
}

PlainRowsFn find_plain_rows(int type_id) {
    switch (type_id) {
        case kF16: return multiply_plain_rows<kF16>;
        case kBF16: return multiply_plain_rows<kBF16>;
        case kF32: return multiply_plain_rows<kF32>;
        default: return nullptr;
    }
}

// Products of a strip's rows of F16, BF16 or F32 with one token, straight from the file's bytes: eight columns of
// sixteen rows are turned as they lie, and numbers of 16 bits widened last. Each lane adds over the columns in order, as
// the panel form does: the results are equal to the bit.

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

template <int TypeId>
void multiply_plain_rows(const PackSource& from, const float* x, float* c) {
    __m256 totals[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    // Read a cache line of each row at a time: rows of a power of two of bytes push each other out of the nearest cache.
    constexpr int64_t kBytes = TypeId == kF32 ? 4 : 2, kColumns = 64 / kBytes;
    alignas(64) uint8_t near[kStripRows][64];
    const uint8_t *asked = from.ahead, *wanted = from.ahead;
    const int64_t step_bytes = from.ahead_bytes > 0 ? sizeof near : 0;
    int64_t column = 0;
    for (; column + kColumns <= from.count; column += kColumns, x += kColumns) {
        for (wanted += step_bytes; asked < wanted;) asked = ask_for_lines<1>(asked, from.nearest);
#pragma GCC unroll 16
        for (int r = 0; r < kStripRows; ++r) __builtin_memcpy(near[r], from.src + r * from.row_bytes + kBytes * column, sizeof near[r]);
        for (int64_t at = 0; at < kColumns; at += 8)
            add_eight_columns<TypeId>(near[0] + kBytes * at, sizeof near[0], x + at, 8, totals);
    }
    if (column < from.count) {
        const int64_t left = from.count - column;
        __builtin_memset(near, 0, sizeof near);
        for (int r = 0; r < kStripRows; ++r)
            __builtin_memcpy(near[r], from.src + r * from.row_bytes + kBytes * column, static_cast<size_t>(kBytes * left));
        for (int64_t at = 0; at < left; at += 8)
            add_eight_columns<TypeId>(near[0] + kBytes * at, sizeof near[0], x + at, left - at, totals);
    }
    _mm256_storeu_ps(c, totals[0]);
    _mm256_storeu_ps(c + 8, totals[1]);
}

PlainRowsFn find_plain_rows(int type_id) {
    switch (type_id) {
        case kF16: return multiply_plain_rows<kF16>;
        case kBF16: return multiply_plain_rows<kBF16>;
        case kF32: return multiply_plain_rows<kF32>;
        default: return nullptr;
    }
}

// Products of a strip's rows of F16 or BF16 with one token, straight from the file's bytes: eight columns of sixteen
// rows are turned as they lie, in 16 bits, and widened last. Each lane adds over the columns in order, as the panel
// form does: the results are equal to the bit.

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

template <int TypeId>
void multiply_plain_rows(const PackSource& from, const float* x, float* c) {
    __m256 low = _mm256_setzero_ps(), high = low;
    // Read a cache line of each row at a time: rows of a power of two of bytes push each other out of the nearest cache.
    constexpr int64_t kColumns = 32;
    alignas(64) uint8_t near[kStripRows][2 * kColumns];
    const auto add_columns = [&](int64_t at, int64_t columns) {
        __m256i turned[8];
        turn_eight_columns(near[0] + 2 * at, sizeof near[0], turned);
#pragma GCC unroll 8
        for (int k = 0; k < 8; ++k) {
            if (k >= columns) break;
            const __m256 a = _mm256_broadcast_ss(x + at + k);
            low = _mm256_fmadd_ps(widen_plain<TypeId>(_mm256_castsi256_si128(turned[k])), a, low);
            high = _mm256_fmadd_ps(widen_plain<TypeId>(_mm256_extracti128_si256(turned[k], 1)), a, high);
        }
    };
    const uint8_t *asked = from.ahead, *wanted = from.ahead;
    const int64_t step_bytes = from.ahead_bytes > 0 ? sizeof near : 0;
    int64_t column = 0;
    for (; column + kColumns <= from.count; column += kColumns, x += kColumns) {
        for (wanted += step_bytes; asked < wanted; asked += 64) __builtin_prefetch(asked, 0, 2);
#pragma GCC unroll 16
        for (int r = 0; r < kStripRows; ++r) __builtin_memcpy(near[r], from.src + r * from.row_bytes + 2 * column, sizeof near[r]);
        for (int64_t at = 0; at < kColumns; at += 8) add_columns(at, 8);
    }
    if (column < from.count) {
        const int64_t left = from.count - column;
        __builtin_memset(near, 0, sizeof near);
        for (int r = 0; r < kStripRows; ++r)
            __builtin_memcpy(near[r], from.src + r * from.row_bytes + 2 * column, static_cast<size_t>(2 * left));
        for (int64_t at = 0; at < left; at += 8) add_columns(at, left - at);
    }
    _mm256_storeu_ps(c, low);
    _mm256_storeu_ps(c + 8, high);
}

PlainRowsFn find_plain_rows(int type_id) {
    return type_id == kF16 ? multiply_plain_rows<kF16> : type_id == kBF16 ? multiply_plain_rows<kBF16> : nullptr;
}

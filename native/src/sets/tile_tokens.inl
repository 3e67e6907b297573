// Tokens on their way into right tiles and sums on their way out.

inline __mmask16 first_lanes(int64_t count) {
    return static_cast<__mmask16>(count >= 16 ? 0xffff : count <= 0 ? 0 : (1 << count) - 1);
}

// What rounding to bfloat16 took from 16 numbers; `words` has them as bits 0 to 15 of each lane.
inline __m512 rest_of(__m512 x, __m256i words) {
    const __m512 rounded = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
    return _mm512_sub_ps(x, rounded);
}
// The next part of 32 numbers, which become what it leaves of them.
inline __m512i take_part(__m512& low, __m512& high) {
    const __m512i words = to_bf16(low, high);
    low = rest_of(low, _mm512_castsi512_si256(words));
    high = rest_of(high, _mm512_extracti64x4_epi64(words, 1));
    return words;
}

// Words 0 to 15 and 16 to 31 by turns.
inline __m512i weave_words(__m512i words) {
    const __m512i weave = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,  //
                                           23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(weave, words);
}

void pack_tokens(const float* const* x, int tokens, int64_t cols, int parts, RightTile* out) {
    alignas(64) uint16_t flat[kMostParts][kTileTokens][kTileColumns] = {};
    const int64_t depth = tiles_of(cols);
    for (int64_t k = 0; k < cols; k += kTileColumns, ++out) {
        const __mmask16 first = first_lanes(cols - k), second = first_lanes(cols - k - 16);
        for (int t = 0; t < tokens; ++t) {
            __m512 low = _mm512_maskz_loadu_ps(first, x[t] + k), high = _mm512_maskz_loadu_ps(second, x[t] + k + 16);
            for (int p = 0; p < parts; ++p) _mm512_store_si512(flat[p][t], take_part(low, high));
        }
        for (int p = 0; p < parts; ++p) turn16(flat[p], out[p * depth].pair);
    }
}

template <typename Activate>
inline void pack_activated(const Activate& activate, const SumTile& gate, const SumTile& up, int half, int parts,
                           RightTile* out, int64_t stride) {
    for (int i = 0; i < kStripRows / 2; ++i) {
        const auto row = [&](int r) { return activate(_mm512_load_ps(gate.v[r]), _mm512_load_ps(up.v[r])); };
        __m512 even = row(2 * i), odd = row(2 * i + 1);
        const int to = half * (kStripRows / 2) + i;
        for (int p = 0; p < parts; ++p)
            _mm512_store_si512(out[p * stride].pair[to], weave_words(take_part(even, odd)));
    }
}

void pack_inner(ExpertActivation activation, SiluLimits limits, const SumTile& gate, const SumTile& up, int half,
                int parts, RightTile* out, int64_t stride) {
    const auto pack = [&](const auto& activate) { pack_activated(activate, gate, up, half, parts, out, stride); };
    switch (activation) {
        case ExpertActivation::Silu: return pack([](Vec g, Vec u) { return silu_times(g, u); });
        case ExpertActivation::ClampedSilu: return pack([](Vec g, Vec u) { return clamped_silu_times(g, u); });
        case ExpertActivation::Gelu: return pack([](Vec g, Vec u) { return gelu_times(g, u); });
        case ExpertActivation::SquaredRelu: return pack([](Vec, Vec u) { return relu_square(u); });
        case ExpertActivation::Relu: return pack([](Vec g, Vec u) { return relu_times(g, u); });
        case ExpertActivation::LimitedSilu: return pack([&](Vec g, Vec u) { return limited_silu_times(g, u, limits); });
    }
}

void turn(const SumTile& sums, int tokens, const float* scale, float* out, int64_t stride) {
    alignas(64) float turned[kTileTokens][kStripRows];
    turn16(sums.v, turned);
    for (int t = 0; t < tokens; ++t) {
        const __m512 row = _mm512_load_ps(turned[t]);
        _mm512_storeu_ps(out + t * stride,
                         scale == nullptr ? row : _mm512_mul_ps(_mm512_set1_ps(scale[t]), row));
    }
}

// Products of a strip's rows with one or two tokens, for any type: a row's columns are unpacked into the nearest
// cache and multiplied there, with columns as lanes. As in rows_avx512.inl, whose types have forms of their own, the
// sums are integers and the floating-point part is that of the panel form: the results are equal to the bit.

#define THERMOCLINE_FORCED inline __attribute__((always_inline))

// sums[g] = sum over columns 16g .. 16g + 15 of the span of (q - kEightBitShift, if it needs eight bits) * x.
#if defined(__AVX512F__)

inline Ints load_ints(const int32_t* p) { return {_mm512_loadu_si512(p)}; }

// Sums of two neighbours each: within 128 bits, two of `a`, then two of `b`. Numbers of up to 16 bits, their
// sign included, are added by one instruction.
template <int Bits>
THERMOCLINE_FORCED __m512i add_pairs(__m512i a, __m512i b) {
    if constexpr (Bits <= 16) return _mm512_madd_epi16(_mm512_packs_epi32(a, b), _mm512_set1_epi16(1));
    const __m512 x = _mm512_castsi512_ps(a), y = _mm512_castsi512_ps(b);
    return _mm512_add_epi32(_mm512_castps_si512(_mm512_shuffle_ps(x, y, 0x88)),
                            _mm512_castps_si512(_mm512_shuffle_ps(x, y, 0xdd)));
}
// The four numbers of each 128 bits added up: within 128 bits, of a, b, c and d.
template <int Bits>
THERMOCLINE_FORCED __m512i add_fours(const __m512i (&of)[4]) {
    return add_pairs<Bits + 1>(add_pairs<Bits>(of[0], of[1]), add_pairs<Bits>(of[2], of[3]));
}
// Bits, with a sign, of the sum of four products of a weight of `bits` and an activation of at most 127.
constexpr int dot_bits(int bits) { return bits + 7 + 2 + 1; }

template <bool SevenBits>
inline void sums_of_16(const uint8_t* q, const uint8_t* x, int32_t* sums) {
    __m512i fours[4];
    for (int i = 0; i < 4; ++i)
        fours[i] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_load_si512(q + 64 * i),
                                       _mm512_loadu_si512(x + 64 * i));
    // Lane 4j + i is the sum of group 4i + j.
    const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    _mm512_store_si512(sums, _mm512_permutexvar_epi32(order, add_fours<dot_bits(SevenBits ? 7 : 8)>(fours)));
}

#else

inline Ints load_ints(const int32_t* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}

template <bool SevenBits>
inline void sums_of_16(const uint8_t* q, const uint8_t* x, int32_t* sums) {
    __m256i fours[8];
    for (int i = 0; i < 8; ++i) {
        const __m256i w = _mm256_load_si256(reinterpret_cast<const __m256i*>(q + 32 * i));
        const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + 32 * i));
#if defined(__AVXVNNI__)
        fours[i] = _mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), w, a);
#else
        fours[i] = dot4<SevenBits>(_mm256_setzero_si256(), w, a);
#endif
    }
    for (int half = 0; half < 2; ++half) {  // each register holds two groups, one per 128 bits
        const __m256i* f = fours + 4 * half;
        const __m256i all = _mm256_hadd_epi32(_mm256_hadd_epi32(f[0], f[1]), _mm256_hadd_epi32(f[2], f[3]));
        // Lanes 0 to 3 are groups 0, 2, 4, 6 of this half, lanes 4 to 7 the odd ones.
        const __m256i order = _mm256_set_epi32(7, 3, 6, 2, 5, 1, 4, 0);
        _mm256_store_si256(reinterpret_cast<__m256i*>(sums + 8 * half), _mm256_permutevar8x32_epi32(all, order));
    }
}

#endif

// What `groups` groups of a span, from the row's `first_group` on, add to a strip's totals: in the order of the panel
// form. dot_of(g) is the integer sum of group g, without its start if it has one; its scale and minimum are number Step * g.
template <int Step, bool Minimum, bool Start, typename DotOf>
THERMOCLINE_FORCED Floats add_span(int groups, Floats total, const DotOf& dot_of, const float (*scale)[kStripRows],
                                   const float (*minimum)[kStripRows], const uint8_t* token,
                                   const ActivationLayout& layout, int64_t first_group) {
    const uint8_t* numbers = token + 4 * first_group;
    const auto* start = reinterpret_cast<const int32_t*>(numbers + layout.start);
    const auto* a = reinterpret_cast<const float*>(numbers + layout.scale);
    const auto* sum = reinterpret_cast<const float*>(numbers + layout.sum);
#pragma GCC unroll 16
    for (int g = 0; g < groups; ++g) {
        const Ints dot = Start ? add(dot_of(g), set_ints(start[g])) : dot_of(g);
        total = add_product(total, to_floats(dot), multiply(load_floats(scale[Step * g]), set_floats(a[g])));
        if constexpr (Minimum) total = subtract_product(total, load_floats(minimum[Step * g]), set_floats(sum[g]));
    }
    return total;
}

template <int Tokens, int Group, bool Minimum, bool SevenBits>
struct AnyRows {
    static constexpr int kSpans = 4 / Tokens;  // whose sums and scales are kept at a time, in the nearest cache
    static constexpr int kSums = kSpan / Group, kStep = Group / kGroupMin;

    struct alignas(64) Kept {
        int32_t sums[Tokens][kSpans][kStripRows][kMaxGroups];
        float scale[kSpans][kStripRows][kMaxGroups], minimum[kSpans][kStripRows][kMaxGroups];
    };

    static void multiply(int type_id, const QuantForm&, const PackSource& from, const uint8_t* const* bases,
                         const ActivationLayout& layout, float* c) {
        Floats totals[Tokens];
        for (int t = 0; t < Tokens; ++t) totals[t] = zero_floats();
        const UnpackFn unpack = find_unpack(type_id);
        UnpackInfo info{};
        unpack_info(type_id, info);
        const int64_t span_bytes = kSpan / info.block_elements * info.block_bytes;
        Kept kept;
        alignas(64) uint8_t rest[Tokens][kSpan] = {};  // the last activations, then zeros
        const int64_t whole = from.count / kSpan * kSpan;
        for (int t = 0; t < Tokens; ++t) __builtin_memcpy(rest[t], bases[t] + whole, static_cast<size_t>(from.count - whole));
        const uint8_t* asked = from.ahead.from;  // of what comes, each step asks for as many bytes as it reads
        const uint8_t* wanted = from.ahead.from;
        const int64_t step_bytes = from.ahead.bytes > 0 ? span_bytes : 0;
        for (int64_t first = 0; first < from.count; first += kSpans * kSpan) {
            const uint8_t* src = from.src + first / kSpan * span_bytes;
            const auto columns = [&](int64_t s) {
                const int64_t left = from.count - first - s * kSpan;
                return left < kSpan ? left : kSpan;
            };
            int64_t spans = 0;
            while (spans < kSpans && columns(spans) > 0) ++spans;
            for (int r = 0; r < kStripRows; ++r) {
                // Read only after as much again was written: bytes on their way to the cache can be read back
                // at once only in the pieces in which they were written.
                alignas(64) uint8_t q[kSpans][kSpan];
                for (int64_t s = 0; s < spans; ++s) {
                    for (wanted += step_bytes; asked < wanted;) asked = ask_for_lines<1>(asked, from.ahead.nearest);
                    if (columns(s) < kSpan) __builtin_memset(q[s], 0, kSpan);
                    unpack(src + r * from.row_bytes + s * span_bytes, columns(s), q[s], kept.scale[s][r],
                           kept.minimum[s][r]);
                }
                for (int64_t s = 0; s < spans; ++s)
                    for (int t = 0; t < Tokens; ++t) {
                        const uint8_t* x = columns(s) < kSpan ? rest[t] : bases[t] + first + s * kSpan;
                        sums_of_16<SevenBits>(q[s], x, kept.sums[t][s][r]);
                    }
            }
            for (int64_t s = 0; s < spans; ++s) {
                alignas(64) float scale[kMaxGroups][kStripRows], minimum[kMaxGroups][kStripRows];
                turn16(kept.scale[s], scale);
                if constexpr (Minimum) turn16(kept.minimum[s], minimum);
                for (int t = 0; t < Tokens; ++t) {
                    alignas(64) int32_t dots[kMaxGroups][kStripRows];
                    turn16(kept.sums[t][s], dots);
                    const auto dot_of = [&](int g) {
                        const Ints dot = load_ints(dots[kStep * g]);
                        if constexpr (kStep == 1) return dot;
                        else return add(dot, load_ints(dots[kStep * g + 1]));
                    };
                    const auto add_groups = [&](int groups) {
                        totals[t] = add_span<kStep, Minimum, true>(groups, totals[t], dot_of, scale, minimum, bases[t],
                                                             layout, (first + s * kSpan) / Group);
                    };
                    if (columns(s) == kSpan) add_groups(kSums);
                    else add_groups(static_cast<int>(columns(s) / Group));
                }
            }
        }
        for (int t = 0; t < Tokens; ++t) store_floats(c + t * kPanelRows, totals[t]);
    }
};

template <int Tokens>
RowsFn any_rows(const QuantForm& form) {
    switch ((form.group == 32 ? 4 : 0) + (form.has_minimum ? 2 : 0) + (form.seven_bits ? 1 : 0)) {
        case 0: return AnyRows<Tokens, 16, false, false>::multiply;
        case 1: return AnyRows<Tokens, 16, false, true>::multiply;
        case 2: return AnyRows<Tokens, 16, true, false>::multiply;
        case 3: return AnyRows<Tokens, 16, true, true>::multiply;
        case 4: return AnyRows<Tokens, 32, false, false>::multiply;
        case 5: return AnyRows<Tokens, 32, false, true>::multiply;
        case 6: return AnyRows<Tokens, 32, true, false>::multiply;
        default: return AnyRows<Tokens, 32, true, true>::multiply;
    }
}

RowsFn find_any_rows(const QuantForm& form, int64_t tokens) {
    return tokens == 1 ? any_rows<1>(form) : tokens == 2 ? any_rows<2>(form) : nullptr;
}

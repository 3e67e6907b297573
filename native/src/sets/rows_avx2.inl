// Products of a strip's rows with one or two tokens, straight from the file's bytes, eight rows at a time: columns are
// the lanes of the products, and the tree that adds them up ends with the rows as lanes. So nothing is laid out anew,
// and only scales pass through memory. The sums are integers, which add up to the same in any order; the floating-point
// part is that of the panel form, operation for operation: the results are equal to the bit.

constexpr int kTreeRows = 8;

// Products of 32 weights of a row and 32 activations, added up in pairs (16 bits) or fours (32 bits).
// merges_in_16_bits: how often such sums of the largest weight may be doubled in 16 bits; -1: they begin with 32.
#if defined(__AVXVNNI__)
constexpr int merges_in_16_bits(int) { return -1; }
template <int Largest>
THERMOCLINE_FORCED __m256i products_of(__m256i q, __m256i x) {
    return _mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), q, x);
}
#else
constexpr int merges_in_16_bits(int largest) {
    int merges = -1;
    for (int sum = 2 * 127 * largest; sum < 1 << 15; sum *= 2) ++merges;
    return merges;
}
THERMOCLINE_FORCED __m256i widen(__m256i pairs) { return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }
// Of eight bits (largest above 127), the weight is signed: its magnitude, at most 128, times a signed activation.
template <int Largest>
THERMOCLINE_FORCED __m256i products_of(__m256i q, __m256i x) {
    if constexpr (Largest > 127)
        return widen(_mm256_maddubs_epi16(_mm256_abs_epi8(q), _mm256_sign_epi8(x, q)));
    else
        return _mm256_maddubs_epi16(q, x);
}
#endif

// Merge number Nth (from 1) of the tree, in 16 bits as long as Merges allows: the sums of two registers in one.
template <int Nth, int Merges>
struct Merge {
    static THERMOCLINE_FORCED __m256i add(__m256i a, __m256i b) {
        return Nth <= Merges ? _mm256_add_epi16(a, b) : _mm256_add_epi32(a, b);
    }
    static THERMOCLINE_FORCED __m256i ready(__m256i sums) {
#if !defined(__AVXVNNI__)
        if constexpr (Merges >= 0 && Nth == Merges + 1) return widen(sums);
#endif
        return sums;
    }
    // The low 128 bits are of a, the high ones of b.
    static THERMOCLINE_FORCED __m256i halves(__m256i a, __m256i b) {
        a = ready(a), b = ready(b);
        return add(_mm256_blend_epi32(a, b, 0xf0), _mm256_permute2x128_si256(a, b, 0x21));
    }
    // Within 128 bits, the low 64 are of a, the high ones of b.
    static THERMOCLINE_FORCED __m256i quarters(__m256i a, __m256i b) {
        a = ready(a), b = ready(b);
        return add(_mm256_blend_epi32(a, b, 0xcc), _mm256_alignr_epi8(b, a, 8));
    }
    // Within 128 bits, two sums of 32 bits of a, then two of b.
    static THERMOCLINE_FORCED __m256i eighths(__m256i a, __m256i b) {
        const __m256 x = _mm256_castsi256_ps(ready(a)), y = _mm256_castsi256_ps(ready(b));
        return add(_mm256_castps_si256(_mm256_shuffle_ps(x, y, 0x88)),
                   _mm256_castps_si256(_mm256_shuffle_ps(x, y, 0xdd)));
    }
};

// Four units of four bytes at `at` of each of eight rows, rows as lanes.
THERMOCLINE_FORCED void words_of_rows(const uint8_t* at, int64_t row_bytes, __m256i (&words)[4]) {
    const auto load = [&](int row) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at + row * row_bytes)); };
    __m256i in[4];
    for (int i = 0; i < 4; ++i) in[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(load(i)), load(i + 4), 1);
    const __m256i a = _mm256_unpacklo_epi32(in[0], in[1]), b = _mm256_unpackhi_epi32(in[0], in[1]);
    const __m256i c = _mm256_unpacklo_epi32(in[2], in[3]), d = _mm256_unpackhi_epi32(in[2], in[3]);
    words[0] = _mm256_unpacklo_epi64(a, c);
    words[1] = _mm256_unpackhi_epi64(a, c);
    words[2] = _mm256_unpacklo_epi64(b, d);
    words[3] = _mm256_unpackhi_epi64(b, d);
}

// What a type has at a place of each row's blocks, [block][row]: copied as numbers, and read some time later.
template <typename Number>
struct alignas(32) PerBlock {
    Number of[kSpan / 32][kTreeRows];

    // Of the first `blocks` blocks.
    THERMOCLINE_FORCED void copy(const uint8_t* at, int64_t row_bytes, int64_t block_bytes, int blocks) {
        for (int b = 0; b < blocks; ++b, at += block_bytes)
#pragma GCC unroll 8
            for (int r = 0; r < kTreeRows; ++r) __builtin_memcpy(&of[b][r], at + r * row_bytes, sizeof(Number));
    }
};

THERMOCLINE_FORCED __m256 to_floats(__m128i halves) { return _mm256_cvtph_ps(halves); }
// The low and the high float16 of 32 bits.
THERMOCLINE_FORCED __m256 low_halves(__m256i words) {
    const __m256i low = _mm256_and_si256(words, _mm256_set1_epi32(0xffff));
    return to_floats(_mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1)));
}
THERMOCLINE_FORCED __m256 high_halves(__m256i words) { return low_halves(_mm256_srli_epi32(words, 16)); }

// The scales of eight rows' span, and the minima of types that have one: rows as lanes.
struct alignas(32) RowScales {
    float scale[kMaxGroups][kTreeRows], minimum[kMaxGroups][kTreeRows];
};

THERMOCLINE_FORCED __m256i load32(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
THERMOCLINE_FORCED __m256i low4(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
template <int Bits>
THERMOCLINE_FORCED __m256i down(__m256i x) { return _mm256_srli_epi16(x, Bits); }
THERMOCLINE_FORCED __m256i only(__m256i x, int mask) { return _mm256_and_si256(x, _mm256_set1_epi8(static_cast<char>(mask))); }
// 16 bytes' low nibbles, then their high ones.
THERMOCLINE_FORCED __m256i nibbles_in_order(const uint8_t* p) {
    const __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return low4(_mm256_srlv_epi64(twice, _mm256_set_epi64x(4, 4, 0, 0)));
}
// 16 where bit j of the four bytes at p is set, else 0.
THERMOCLINE_FORCED __m256i fifth_bits(const uint8_t* p) {
    int32_t bits;
    __builtin_memcpy(&bits, p, 4);
    const __m256i byte_of = _mm256_set_epi64x(0x0303030303030303, 0x0202020202020202, 0x0101010101010101, 0);
    const __m256i bit_of = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
    const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(bits), byte_of);
    return only(_mm256_cmpeq_epi8(_mm256_and_si256(spread, bit_of), bit_of), 16);
}
// The levels that four bits name, as products_of wants eight bits.
THERMOCLINE_FORCED __m256i uneven_levels(const uint8_t* p) {
    const __m128i levels = _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(unpacking::kUneven)),
                                         _mm_set1_epi8(static_cast<char>(kEightBitShift)));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(levels), nibbles_in_order(p));
}

// Of each type: the bytes of a span, the largest weight (255 stands for eight bits, which are signed where
// kEightBitShift says so), and how 32 columns of a row become bytes in their order: number kUnrolled * i + N of the
// span that begins at p. Types of blocks of 32 have kUnrolled 1, and any number of them.
template <int TypeId>
struct RowFormat;

struct KRows {
    static constexpr bool kMinimum = true;
    static THERMOCLINE_FORCED void scales(const uint8_t* p, int64_t row_bytes, int, RowScales& to) {
        __m256i words[4];
        words_of_rows(p, row_bytes, words);
        const __m256 d = low_halves(words[0]), dmin = high_halves(words[0]);
        const auto tails = [&](__m256i nibbles, __m256i tops) {
            return _mm256_or_si256(low4(nibbles), only(down<2>(tops), 0x30));
        };
        const __m256i scales[2] = {only(words[1], 0x3f), tails(words[3], words[1])};
        const __m256i minima[2] = {only(words[2], 0x3f), tails(down<4>(words[3]), words[2])};
#pragma GCC unroll 8
        for (int g = 0; g < 8; ++g) {
            const auto number = [&](__m256i bytes) {
                return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(bytes, 8 * (g % 4)), _mm256_set1_epi32(255)));
            };
            _mm256_store_ps(to.scale[g], _mm256_mul_ps(d, number(scales[g / 4])));
            _mm256_store_ps(to.minimum[g], _mm256_mul_ps(dmin, number(minima[g / 4])));
        }
    }
};

template <>
struct RowFormat<12> : KRows {  // Q4_K
    static constexpr int kBytes = 144, kLargest = 15, kUnrolled = 2;
    template <int N>
    static THERMOCLINE_FORCED __m256i unpack(const uint8_t* p, int i) {
        return low4(down<4 * N>(load32(p + 16 + 32 * i)));
    }
};

template <>
struct RowFormat<13> : KRows {  // Q5_K
    static constexpr int kBytes = 176, kLargest = 31, kUnrolled = 8;
    template <int N>
    static THERMOCLINE_FORCED __m256i unpack(const uint8_t* p, int) {
        const __m256i high = load32(p + 16);
        const __m256i fifth = N < 4 ? _mm256_slli_epi16(high, N < 4 ? 4 - N : 0) : down<N < 4 ? 0 : N - 4>(high);
        return _mm256_or_si256(low4(down<N % 2 * 4>(load32(p + 48 + 32 * (N / 2)))), only(fifth, 16));
    }
};

template <>
struct RowFormat<14> {  // Q6_K
    static constexpr bool kMinimum = false;
    static constexpr int kBytes = 210, kLargest = 63, kUnrolled = 4;
    template <int N>
    static THERMOCLINE_FORCED __m256i unpack(const uint8_t* p, int i) {
        const __m256i low = low4(down<N / 2 * 4>(load32(p + 64 * i + 32 * (N % 2))));
        const __m256i high = load32(p + 128 + 32 * i);
        const __m256i top = N < 2 ? _mm256_slli_epi16(high, N < 2 ? 4 - 2 * N : 0) : down<N < 2 ? 0 : 2 * N - 4>(high);
        return _mm256_or_si256(low, only(top, 48));
    }
    static THERMOCLINE_FORCED void scales(const uint8_t* p, int64_t row_bytes, int, RowScales& to) {
        alignas(16) uint16_t halves[kTreeRows];
        for (int r = 0; r < kTreeRows; ++r) __builtin_memcpy(&halves[r], p + 208 + r * row_bytes, 2);
        __m256i words[4];
        words_of_rows(p + 192, row_bytes, words);
        const __m256 d = to_floats(_mm_load_si128(reinterpret_cast<const __m128i*>(halves)));
#pragma GCC unroll 16
        for (int g = 0; g < 16; ++g) {
            const __m256i number = _mm256_srai_epi32(_mm256_slli_epi32(words[g / 4], 24 - 8 * (g % 4)), 24);
            _mm256_store_ps(to.scale[g], _mm256_mul_ps(d, _mm256_cvtepi32_ps(number)));
        }
    }
};

template <>
struct RowFormat<23> {  // IQ4_XS
    static constexpr bool kMinimum = false;
    static constexpr int kBytes = 136, kLargest = 255, kUnrolled = 1;
    template <int N>
    static THERMOCLINE_FORCED __m256i unpack(const uint8_t* p, int i) { return uneven_levels(p + 8 + 16 * i); }
    static THERMOCLINE_FORCED void scales(const uint8_t* p, int64_t row_bytes, int, RowScales& to) {
        __m256i words[4];
        words_of_rows(p, row_bytes, words);
        const __m256 d = low_halves(words[0]);
        const __m256i tops = _mm256_srli_epi32(words[0], 16);
#pragma GCC unroll 8
        for (int g = 0; g < 8; ++g) {
            const __m256i low = _mm256_and_si256(_mm256_srli_epi32(words[1], 4 * g), _mm256_set1_epi32(15));
            const __m256i top = _mm256_and_si256(_mm256_srli_epi32(tops, 2 * g), _mm256_set1_epi32(3));
            const __m256i six = _mm256_or_si256(low, _mm256_slli_epi32(top, 4));
            const __m256 number = _mm256_cvtepi32_ps(_mm256_sub_epi32(six, _mm256_set1_epi32(32)));
            _mm256_store_ps(to.scale[g], _mm256_mul_ps(d, number));
        }
    }
};

// Blocks of 32 that begin with a float16.
template <int Block>
struct HalfRows {
    static constexpr bool kMinimum = false;
    static constexpr int kBytes = 8 * Block, kUnrolled = 1;
    static THERMOCLINE_FORCED void scales(const uint8_t* p, int64_t row_bytes, int blocks, RowScales& to) {
        PerBlock<uint16_t> halves;
        halves.copy(p, row_bytes, Block, blocks);
        for (int b = 0; b < blocks; ++b)
            _mm256_store_ps(to.scale[b], to_floats(_mm_load_si128(reinterpret_cast<const __m128i*>(halves.of[b]))));
    }
};

// Blocks of 32 that begin with a scale and the negative of a minimum.
template <int Block>
struct PairRows {
    static constexpr bool kMinimum = true;
    static constexpr int kBytes = 8 * Block, kUnrolled = 1;
    static THERMOCLINE_FORCED void scales(const uint8_t* p, int64_t row_bytes, int blocks, RowScales& to) {
        PerBlock<uint32_t> pairs;
        pairs.copy(p, row_bytes, Block, blocks);
        for (int b = 0; b < blocks; ++b) {
            const __m256i both = _mm256_load_si256(reinterpret_cast<const __m256i*>(pairs.of[b]));
            _mm256_store_ps(to.scale[b], low_halves(both));
            _mm256_store_ps(to.minimum[b], _mm256_xor_ps(high_halves(both), _mm256_set1_ps(-0.0f)));
        }
    }
};

template <>
struct RowFormat<2> : HalfRows<18> {  // Q4_0
    static constexpr int kLargest = 15;
    template <int N>
    static THERMOCLINE_FORCED __m256i unpack(const uint8_t* p, int i) { return nibbles_in_order(p + 18 * i + 2); }
};

template <>
struct RowFormat<3> : PairRows<20> {  // Q4_1
    static constexpr int kLargest = 15;
    template <int N>
    static THERMOCLINE_FORCED __m256i unpack(const uint8_t* p, int i) { return nibbles_in_order(p + 20 * i + 4); }
};

template <>
struct RowFormat<6> : HalfRows<22> {  // Q5_0
    static constexpr int kLargest = 31;
    template <int N>
    static THERMOCLINE_FORCED __m256i unpack(const uint8_t* p, int i) {
        return _mm256_or_si256(nibbles_in_order(p + 22 * i + 6), fifth_bits(p + 22 * i + 2));
    }
};

template <>
struct RowFormat<7> : PairRows<24> {  // Q5_1
    static constexpr int kLargest = 31;
    template <int N>
    static THERMOCLINE_FORCED __m256i unpack(const uint8_t* p, int i) {
        return _mm256_or_si256(nibbles_in_order(p + 24 * i + 8), fifth_bits(p + 24 * i + 4));
    }
};

template <>
struct RowFormat<8> : HalfRows<34> {  // Q8_0
    static constexpr int kLargest = 255;
    template <int N>
    static THERMOCLINE_FORCED __m256i unpack(const uint8_t* p, int i) {
        return _mm256_xor_si256(load32(p + 34 * i + 2), _mm256_set1_epi8(static_cast<char>(128 - kEightBitShift)));
    }
};

template <>
struct RowFormat<20> : HalfRows<18> {  // IQ4_NL
    static constexpr int kLargest = 255;
    template <int N>
    static THERMOCLINE_FORCED __m256i unpack(const uint8_t* p, int i) { return uneven_levels(p + 18 * i + 2); }
};

template <>
struct RowFormat<39> {  // MXFP4
    static constexpr bool kMinimum = false;
    static constexpr int kBytes = 8 * 17, kLargest = 24, kUnrolled = 1;
    template <int N>
    static THERMOCLINE_FORCED __m256i unpack(const uint8_t* p, int i) {
        const __m256i levels = _mm256_broadcastsi128_si256(
            _mm_loadu_si128(reinterpret_cast<const __m128i*>(unpacking::kE2M1)));
        return _mm256_shuffle_epi8(levels, nibbles_in_order(p + 17 * i + 1));
    }
    // Half of 2^(e - 127) of each row's byte e; the two smallest are subnormal.
    static THERMOCLINE_FORCED void scales(const uint8_t* p, int64_t row_bytes, int blocks, RowScales& to) {
        PerBlock<uint8_t> bytes;
        bytes.copy(p, row_bytes, 17, blocks);
        const __m256i one = _mm256_set1_epi32(1);
        for (int b = 0; b < blocks; ++b) {
            const __m256i e = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes.of[b])));
            const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, one), 23);
            const __m256i tiny = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
            const __m256i bits = _mm256_blendv_epi8(tiny, normal, _mm256_cmpgt_epi32(e, one));
            _mm256_store_ps(to.scale[b], _mm256_castsi256_ps(bits));
        }
    }
};

template <int TypeId, int Group, int Tokens>
struct Rows {
    using Format = RowFormat<TypeId>;
    static constexpr int kMerges = merges_in_16_bits(Format::kLargest);
    static constexpr int kSums = 32 / Group;  // of 32 columns
    static constexpr int kSteps = kSpan / 32 / Format::kUnrolled;
    // Scales of a type that has one per 16 columns, or of which 32 columns share one.
    static constexpr int kScales = TypeId == 14 ? 2 : 1;
    using Products = __m256i[Tokens];

    // products[t] of 32 columns of one row.
    template <int N>
    static THERMOCLINE_FORCED void row(const uint8_t* p, int i, const __m256i (&x)[Tokens], Products& products) {
        const __m256i q = Format::template unpack<N>(p, i);
        for (int t = 0; t < Tokens; ++t) products[t] = products_of<Format::kLargest>(q, x[t]);
    }

    // sums[t][..]: of 32 columns of eight rows, rows as lanes.
    template <int N>
    static THERMOCLINE_FORCED void add_up(const uint8_t* p, int64_t row_bytes, int step, const __m256i (&x)[Tokens],
                                          __m256i (&sums)[Tokens][kSums]) {
        __m256i fours[2][Tokens];
        if constexpr (Group == 32) {
            for (int pair = 0; pair < 2; ++pair) {
                __m256i twos[2][Tokens];
                for (int i = 0; i < 2; ++i) {
                    Products a, b;
                    row<N>(p + (2 * pair + i) * row_bytes, step, x, a);
                    row<N>(p + (2 * pair + i + 4) * row_bytes, step, x, b);
                    for (int t = 0; t < Tokens; ++t) twos[i][t] = Merge<1, kMerges>::halves(a[t], b[t]);
                }
                for (int t = 0; t < Tokens; ++t)
                    fours[pair][t] = Merge<2, kMerges>::quarters(twos[0][t], twos[1][t]);
            }
            for (int t = 0; t < Tokens; ++t)
                sums[t][0] = Merge<4, kMerges>::ready(Merge<3, kMerges>::eighths(fours[0][t], fours[1][t]));
        } else {
            for (int half = 0; half < 2; ++half) {
                __m256i twos[2][Tokens];
                for (int i = 0; i < 2; ++i) {
                    Products a, b;
                    row<N>(p + (4 * half + 2 * i) * row_bytes, step, x, a);
                    row<N>(p + (4 * half + 2 * i + 1) * row_bytes, step, x, b);
                    for (int t = 0; t < Tokens; ++t) twos[i][t] = Merge<1, kMerges>::quarters(a[t], b[t]);
                }
                for (int t = 0; t < Tokens; ++t)
                    fours[half][t] = Merge<3, kMergesOf16>::ready(Merge<2, kMerges>::eighths(twos[0][t], twos[1][t]));
            }
            for (int t = 0; t < Tokens; ++t) {
                sums[t][0] = _mm256_permute2x128_si256(fours[0][t], fours[1][t], 0x20);
                sums[t][kSums - 1] = _mm256_permute2x128_si256(fours[0][t], fours[1][t], 0x31);
            }
        }
    }
    static constexpr int kMergesOf16 = kMerges > 2 ? 2 : kMerges;

    // What 32 columns add to the totals; `numbers` are the tokens' numbers of their groups.
    template <int N>
    static THERMOCLINE_FORCED void add_columns(const uint8_t* p, int64_t row_bytes, int step, const uint8_t* const* x,
                                               const uint8_t* const* numbers, const ActivationLayout& layout,
                                               const RowScales& scales, __m256 (&totals)[Tokens]) {
        const int n = Format::kUnrolled * step + N;
        __m256i columns[Tokens], sums[Tokens][kSums];
        for (int t = 0; t < Tokens; ++t) columns[t] = load32(x[t] + 32 * n);
        add_up<N>(p, row_bytes, step, columns, sums);
        for (int i = 0; i < kSums; ++i) {
            const int at = kScales * n + (kScales == 2 ? i : 0);
            const __m256 scale = _mm256_load_ps(scales.scale[at]);
            for (int t = 0; t < Tokens; ++t) {
                const uint8_t* of_group = numbers[t] + 4 * (kSums * n + i);
                int32_t start;
                float a, sum;
                __builtin_memcpy(&start, of_group + layout.start, 4);
                __builtin_memcpy(&a, of_group + layout.scale, 4);
                const __m256 dot = _mm256_cvtepi32_ps(_mm256_add_epi32(sums[t][i], _mm256_set1_epi32(start)));
                totals[t] = _mm256_fmadd_ps(dot, _mm256_mul_ps(scale, _mm256_set1_ps(a)), totals[t]);
                if constexpr (Format::kMinimum) {
                    __builtin_memcpy(&sum, of_group + layout.sum, 4);
                    totals[t] = _mm256_fnmadd_ps(_mm256_load_ps(scales.minimum[at]), _mm256_set1_ps(sum), totals[t]);
                }
            }
        }
    }

    template <int N = 0, typename... Given>
    static THERMOCLINE_FORCED void add_step(Given&... given) {
        if constexpr (N < Format::kUnrolled) {
            add_columns<N>(given...);
            add_step<N + 1>(given...);
        }
    }

    static void multiply(int, const QuantForm&, const PackSource& from, const uint8_t* const* bases,
                         const ActivationLayout& layout, float* c) {
        // Of what comes, each step asks for as many bytes as it reads.
        const uint8_t *asked = from.ahead, *wanted = from.ahead;
        const int64_t step_bytes = from.ahead_bytes > 0 ? kTreeRows * Format::kBytes / kSteps : 0;
        for (int first = 0; first < kStripRows; first += kTreeRows) {
            __m256 totals[Tokens];
            for (int t = 0; t < Tokens; ++t) totals[t] = _mm256_setzero_ps();
            const uint8_t* p = from.src + first * from.row_bytes;
            for (int64_t column = 0; column < from.count; column += kSpan, p += Format::kBytes) {
                const uint8_t *x[Tokens], *numbers[Tokens];
                for (int t = 0; t < Tokens; ++t) {
                    x[t] = bases[t] + column;
                    numbers[t] = bases[t] + column / Group * 4;
                }
                const int64_t left = from.count - column;
                const int steps = left < kSpan ? static_cast<int>(left / (kSpan / kSteps)) : kSteps;
                RowScales scales;
                Format::scales(p, from.row_bytes, steps, scales);
                for (int step = 0; step < steps; ++step) {
                    for (wanted += step_bytes; asked < wanted; asked += 64) __builtin_prefetch(asked, 0, 2);
                    add_step(p, from.row_bytes, step, x, numbers, layout, scales, totals);
                }
            }
            for (int t = 0; t < Tokens; ++t) _mm256_storeu_ps(c + t * kPanelRows + first, totals[t]);
        }
    }
};

template <int TypeId>
RowsFn rows_of(int group, int64_t tokens) {
    if (tokens > 2) return nullptr;
    if (group == 16) return tokens == 1 ? Rows<TypeId, 16, 1>::multiply : Rows<TypeId, 16, 2>::multiply;
    if constexpr (TypeId != 14) return tokens == 1 ? Rows<TypeId, 32, 1>::multiply : Rows<TypeId, 32, 2>::multiply;
    return nullptr;
}

RowsFn find_rows(int type_id, const QuantForm& form, int64_t tokens) {
    switch (type_id) {
        case 2: return rows_of<2>(form.group, tokens);
        case 3: return rows_of<3>(form.group, tokens);
        case 6: return rows_of<6>(form.group, tokens);
        case 7: return rows_of<7>(form.group, tokens);
        case 8: return rows_of<8>(form.group, tokens);
        case 12: return rows_of<12>(form.group, tokens);
        case 13: return rows_of<13>(form.group, tokens);
        case 14: return rows_of<14>(form.group, tokens);
        case 20: return rows_of<20>(form.group, tokens);
        case 23: return rows_of<23>(form.group, tokens);
        case 39: return rows_of<39>(form.group, tokens);
        default: return find_any_rows(form, tokens);
    }
}

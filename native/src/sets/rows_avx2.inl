// Products of a strip's rows with one or two tokens, straight from the file's bytes, eight rows at a time: columns are
// the lanes of the products, and the tree that adds them up ends with the rows as lanes. So nothing is laid out anew,
// and only scales pass through memory. The sums are integers, which add up to the same in any order; the floating-point
// part is that of the panel form, operation for operation: the results are equal to the bit.

#include "sets/row_formats_avx2.inl"
#include "sets/row_grids_avx2.inl"

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

template <typename Format>
concept HasGrid = requires { Format::kGrid; };
template <typename Format>
concept HasSigns = requires { Format::kSigned; };
template <typename Format>
concept HasSixteens = requires { Format::kSixteens; };

// Where a step of a span is, and what it is multiplied with.
template <int Tokens>
struct RowStep {
    const uint8_t* p;  // of the first row's span
    int64_t row_bytes;
    int number;
    const uint8_t* x[Tokens];        // the tokens' activations of the span
    const uint8_t* numbers[Tokens];  // and the numbers of its groups
    const ActivationLayout& layout;
    const RowScales& scales;
    const GridRow* rows;  // of types with a codebook: of each row's span, and its entries
    const uint8_t* grid;
    bool nearest;
};

template <int TypeId, int Group, int Tokens>
struct Rows {
    using Format = RowFormat<TypeId>;
    using Step = RowStep<Tokens>;
    static constexpr int kTogether = Format::kTogether, kSums = 32 / Group;
    static constexpr int kSteps = kSpan / 32 / Format::kUnrolled;
    // Scales of a type that has one per 16 columns, or of which 32 columns share one.
    static constexpr int kScales = HasSixteens<Format> ? 2 : 1;
    // Where 16 columns are a group, their sums are not added up, and reading whole rows is cheaper; so it is with entries.
    static constexpr bool kByTwos = (Format::kNibbles || Group == 32) && !HasGrid<Format>;
    // The merges of the tree: by twos the first is between the halves of a group of 32, which are one register's then.
    static constexpr int kMerges = merges_in_16_bits(Format::kLargest), kFirst = kByTwos && Group == 32 ? 2 : 1;
    using AddHalves = Merge<1, kMerges>;
    using Quarters = Merge<kFirst, kMerges>;
    using Eighths = Merge<kFirst + 1, kMerges>;
    using Last = Merge<kFirst + 2, (kMerges > kFirst + 1 ? kFirst + 1 : kMerges)>;
    // Sums of weights that bits of zero offset start at 0; the quantiser says what the others start at.
    static constexpr bool kStarts = Format::kLargest == 255 ? kEightBitShift != 128 : !(Format::kMinimum || HasSigns<Format>);
    using Columns = __m256i[kTogether][kByTwos ? 2 : 1][Tokens];
    using Sums = __m256i[kTogether][kSums][Tokens];

    template <int N, int Half>
    static THERMOCLINE_FORCED __m256i unpack(const TwoRows& from, int step) {
        if constexpr (Format::kNibbles) return Format::template unpack<Half>(from, step);
        else return Format::template unpack<N>(HalfOfTwo<Half>{from}, step);
    }

    // Sums of two rows, each in 128 bits.
    template <int N, int J = 0>
    static THERMOCLINE_FORCED void multiply_two(const TwoRows& rows, int step, const Columns& x, Sums& sums) {
        if constexpr (J < kTogether) {
            const __m256i q[2] = {unpack<N + J, 0>(rows, step), unpack<N + J, 1>(rows, step)};
            for (int t = 0; t < Tokens; ++t) {
                const __m256i low = products_of<Format::kLargest>(q[0], x[J][0][t]);
                const __m256i high = products_of<Format::kLargest>(q[1], x[J][1][t]);
                if constexpr (Group == 32) {
                    sums[J][0][t] = AddHalves::add(AddHalves::ready(low), AddHalves::ready(high));
                } else {
                    sums[J][0][t] = low;
                    sums[J][1][t] = high;
                }
            }
            multiply_two<N, J + 1>(rows, step, x, sums);
        }
    }

    // Sums of one row, those of each 16 columns in 128 bits.
    template <int N, int J = 0>
    static THERMOCLINE_FORCED void multiply_one(const Step& at, int row, const Columns& x, Sums& sums) {
        if constexpr (J < kTogether) {
            const uint8_t* p = at.p + row * at.row_bytes;
            if constexpr (HasSigns<Format>) {
                const __m256i q = Format::entries(p, at.rows[row], at.grid, at.number);
                const __m256i minus = mask_of(Format::signs(p, at.rows[row], at.number));
                for (int t = 0; t < Tokens; ++t) {
                    const __m256i turned = _mm256_sub_epi8(_mm256_xor_si256(x[J][0][t], minus), minus);
                    sums[J][0][t] = products_of<Format::kLargest>(q, turned);
                }
            } else {
                __m256i q;
                if constexpr (HasGrid<Format>) q = Format::entries(p, at.rows[row], at.grid, at.number);
                else q = Format::template unpack<N + J>(OneRow{p}, at.number);
                for (int t = 0; t < Tokens; ++t) sums[J][0][t] = products_of<Format::kLargest>(q, x[J][0][t]);
            }
            multiply_one<N, J + 1>(at, row, x, sums);
        }
    }

    template <typename Combine>
    static THERMOCLINE_FORCED void each(int sums_of_each, const Combine& combine) {
        for (int j = 0; j < kTogether; ++j)
            for (int i = 0; i < sums_of_each; ++i)
                for (int t = 0; t < Tokens; ++t) combine(j, i, t);
    }

    // sums[j]: of the 32 columns number N + j of the step and eight rows, rows as lanes.
    template <int N>
    static THERMOCLINE_FORCED void add_up(const Step& at, const Columns& x, Sums& sums) {
        Sums fours[2];
        for (int part = 0; part < 2; ++part) {
            Sums twos[2];
            for (int i = 0; i < 2; ++i) {
                if constexpr (kByTwos) {
                    const uint8_t* p = at.p + (2 * part + i) * at.row_bytes;
                    multiply_two<N>({p, p + 4 * at.row_bytes}, at.number, x, twos[i]);
                } else {
                    const int row = 4 * part + 2 * i;
                    Sums a, b;
                    multiply_one<N>(at, row, x, a);
                    multiply_one<N>(at, row + 1, x, b);
                    each(1, [&](int j, int, int t) { twos[i][j][0][t] = Quarters::quarters(a[j][0][t], b[j][0][t]); });
                }
            }
            each(kByTwos ? kSums : 1, [&](int j, int i, int t) {
                const __m256i a = twos[0][j][i][t], b = twos[1][j][i][t];
                fours[part][j][i][t] = kByTwos ? Quarters::quarters(a, b) : Last::ready(Eighths::eighths(a, b));
            });
        }
        each(kByTwos ? kSums : 1, [&](int j, [[maybe_unused]] int i, int t) {
            const __m256i a = fours[0][j][i][t], b = fours[1][j][i][t];
            if constexpr (kByTwos) {
                sums[j][i][t] = Last::ready(Eighths::eighths(a, b));
            } else {
                const __m256i first = _mm256_permute2x128_si256(a, b, 0x20), last = _mm256_permute2x128_si256(a, b, 0x31);
                if constexpr (Group == 32) {
                    sums[j][0][t] = _mm256_add_epi32(first, last);
                } else {
                    sums[j][0][t] = first;
                    sums[j][1][t] = last;
                }
            }
        });
    }

    static THERMOCLINE_FORCED void load_columns(const Step& at, int n, Columns& x) {
        for (int j = 0; j < kTogether; ++j)
            for (int t = 0; t < Tokens; ++t) {
                const uint8_t* from = at.x[t] + 32 * (n + j);
                if constexpr (kByTwos) {
                    x[j][0][t] = _mm256_broadcastsi128_si256(load16(from));
                    x[j][1][t] = _mm256_broadcastsi128_si256(load16(from + 16));
                } else {
                    x[j][0][t] = load32(from);
                }
            }
    }

    // What 32 * kTogether columns from number N of the step on add to the totals.
    template <int N>
    static THERMOCLINE_FORCED void add_columns(const Step& at, __m256 (&totals)[Tokens]) {
        const int n = Format::kUnrolled * at.number + N;
        Columns x;
        Sums sums;
        load_columns(at, n, x);
        add_up<N>(at, x, sums);
        each(kSums, [&](int j, int i, int t) {
            const int group = kScales * (n + j) + (kScales == 2 ? i : 0);
            const uint8_t* of_group = at.numbers[t] + 4 * (kSums * (n + j) + i);
            const auto number = [&](int64_t offset) {
                float value;
                __builtin_memcpy(&value, of_group + offset, 4);
                return _mm256_set1_ps(value);
            };
            __m256i dot = sums[j][i][t];
            if constexpr (kStarts) dot = _mm256_add_epi32(dot, _mm256_castps_si256(number(at.layout.start)));
            const __m256 scale = _mm256_mul_ps(_mm256_load_ps(at.scales.scale[group]), number(at.layout.scale));
            totals[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), scale, totals[t]);
            if constexpr (Format::kMinimum)
                totals[t] = _mm256_fnmadd_ps(_mm256_load_ps(at.scales.minimum[group]), number(at.layout.sum), totals[t]);
        });
    }

    // Each 32 columns of the step, and a prefetch of as many bytes as they take from `ahead` on; their number is fixed,
    // since a loop that ends now here, now there is mispredicted.
    template <int N = 0>
    static THERMOCLINE_FORCED void add_step(const Step& at, const uint8_t*& ahead, int64_t ahead_step,
                                            __m256 (&totals)[Tokens]) {
        if constexpr (N < Format::kUnrolled) {
            ask_for_lines<(kTogether * Format::kBytes + 63) / 64>(ahead, at.nearest);
            ahead += ahead_step;
            add_columns<N>(at, totals);
            add_step<N + kTogether>(at, ahead, ahead_step, totals);
        }
    }

    static void multiply(int, const QuantForm&, const PackSource& from, const uint8_t* const* bases,
                         const ActivationLayout& layout, float* c) {
        const uint8_t* ahead = from.ahead.bytes > 0 ? from.ahead.from : from.src;
        const int64_t ahead_step = from.ahead.bytes > 0 ? kTogether * Format::kBytes : 0;
        const uint8_t* grid = HasGrid<Format> ? codebook(TypeId) : nullptr;
        for (int first = 0; first < kStripRows; first += kTreeRows) {
            __m256 totals[Tokens];
            for (int t = 0; t < Tokens; ++t) totals[t] = _mm256_setzero_ps();
            const uint8_t* p = from.src + first * from.row_bytes;
            for (int64_t column = 0; column < from.count; column += kSpan, p += Format::kBytes) {
                const int64_t left = from.count - column;
                const int steps = left < kSpan ? static_cast<int>(left / (kSpan / kSteps)) : kSteps;
                RowScales scales;
                Format::scales(p, from.row_bytes, steps, scales);
                GridRow rows[HasGrid<Format> ? kTreeRows : 1];
                if constexpr (HasGrid<Format>)
                    for (int r = 0; r < kTreeRows; ++r) Format::prepare(p + r * from.row_bytes, rows[r]);
                Step at{p, from.row_bytes, 0, {}, {}, layout, scales, rows, grid, from.ahead.nearest};
                for (int t = 0; t < Tokens; ++t) {
                    at.x[t] = bases[t] + column;
                    at.numbers[t] = bases[t] + column / Group * 4;
                }
                for (; at.number < steps; ++at.number) add_step(at, ahead, ahead_step, totals);
            }
            for (int t = 0; t < Tokens; ++t) _mm256_storeu_ps(c + t * kPanelRows + first, totals[t]);
        }
    }
};

template <int TypeId>
RowsFn rows_of(int group, int64_t tokens) {
    if (tokens > 2) return nullptr;
    if (group == 16) return tokens == 1 ? Rows<TypeId, 16, 1>::multiply : Rows<TypeId, 16, 2>::multiply;
    if constexpr (!HasSixteens<RowFormat<TypeId>>) return tokens == 1 ? Rows<TypeId, 32, 1>::multiply : Rows<TypeId, 32, 2>::multiply;
    return nullptr;
}

RowsFn find_rows(int type_id, const QuantForm& form, int64_t tokens) {
    switch (type_id) {
        case 2: return rows_of<2>(form.group, tokens);
        case 3: return rows_of<3>(form.group, tokens);
        case 6: return rows_of<6>(form.group, tokens);
        case 7: return rows_of<7>(form.group, tokens);
        case 8: return rows_of<8>(form.group, tokens);
        case 10: return rows_of<10>(form.group, tokens);
        case 11: return rows_of<11>(form.group, tokens);
        case 12: return rows_of<12>(form.group, tokens);
        case 13: return rows_of<13>(form.group, tokens);
        case 14: return rows_of<14>(form.group, tokens);
        case 16: return rows_of<16>(form.group, tokens);
        case 17: return rows_of<17>(form.group, tokens);
        case 18: return rows_of<18>(form.group, tokens);
        case 19: return rows_of<19>(form.group, tokens);
        case 20: return rows_of<20>(form.group, tokens);
        case 21: return rows_of<21>(form.group, tokens);
        case 22: return rows_of<22>(form.group, tokens);
        case 23: return rows_of<23>(form.group, tokens);
        case 29: return rows_of<29>(form.group, tokens);
        case 39: return rows_of<39>(form.group, tokens);
        case 40: return rows_of<40>(form.group, tokens);
        default: return find_any_rows(form, tokens);
    }
}

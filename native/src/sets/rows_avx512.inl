// Products of a strip's rows with a few tokens, straight from the file's bytes: columns are the lanes of the
// integer sums, so that a row is read from its first byte to its last and nothing is laid out anew. The sums
// are integers, which add up to the same in any order. They are then turned so that rows are lanes, and the
// floating-point part is that of the panel form, operation for operation: the results are equal to the bit.

#include "sets/row_formats_avx512.inl"
#include "sets/row_grids_avx512.inl"

// Groups of 16, a row each, in the order of the format.
template <bool Nibbles>
THERMOCLINE_FORCED void turn_sixteens(const __m512i* rows, __m512i* group) {
    const RowPointers from(reinterpret_cast<const uint8_t*>(rows), 64);
    for (int j = 0; j < 4; ++j) {
        __m512i four[4];
        transpose16(from, 16 * j, four);
        for (int i = 0; i < 4; ++i) group[Nibbles ? 8 * (i / 2) + 2 * j + i % 2 : 4 * i + j] = four[i];
    }
}

// Of every second register: 128-bit lane j to part[j].
THERMOCLINE_FORCED void turn_lanes(const __m512i* rows, __m512i* part) {
    const __m512i ab01 = _mm512_shuffle_i64x2(rows[0], rows[2], 0x44);
    const __m512i ab23 = _mm512_shuffle_i64x2(rows[0], rows[2], 0xee);
    const __m512i cd01 = _mm512_shuffle_i64x2(rows[4], rows[6], 0x44);
    const __m512i cd23 = _mm512_shuffle_i64x2(rows[4], rows[6], 0xee);
    part[0] = _mm512_shuffle_i64x2(ab01, cd01, 0x88);
    part[1] = _mm512_shuffle_i64x2(ab01, cd01, 0xdd);
    part[2] = _mm512_shuffle_i64x2(ab23, cd23, 0x88);
    part[3] = _mm512_shuffle_i64x2(ab23, cd23, 0xdd);
}

// Groups of 32, of two rows: lanes 4j + {0, 1} are groups j and 4 + j of the first, 4j + {2, 3} of the second.
THERMOCLINE_FORCED void turn_halves(const __m512i* rows, __m512i* group) {
    __m512i even[4], odd[4];
    turn_lanes(rows, even);
    turn_lanes(rows + 1, odd);
    for (int j = 0; j < 4; ++j) {
        const __m512 a = _mm512_castsi512_ps(even[j]), b = _mm512_castsi512_ps(odd[j]);
        group[j] = _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0x88));
        group[4 + j] = _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0xdd));
    }
}

// Groups of 32, of two rows: lane 4j + i is group 2i + j % 2 of row j / 2.
THERMOCLINE_FORCED void turn_pairs(const __m512i* rows, __m512i* group) {
    __m512i even[4], odd[4];
    turn_lanes(rows, even);
    turn_lanes(rows + 1, odd);
    for (int j = 0; j < 2; ++j) {
        const __m512i a = even[j], b = even[j + 2], c = odd[j], d = odd[j + 2];
        const __m512i ab_low = _mm512_unpacklo_epi32(a, b), ab_high = _mm512_unpackhi_epi32(a, b);
        const __m512i cd_low = _mm512_unpacklo_epi32(c, d), cd_high = _mm512_unpackhi_epi32(c, d);
        group[j] = _mm512_unpacklo_epi64(ab_low, cd_low);
        group[j + 2] = _mm512_unpackhi_epi64(ab_low, cd_low);
        group[j + 4] = _mm512_unpacklo_epi64(ab_high, cd_high);
        group[j + 6] = _mm512_unpackhi_epi64(ab_high, cd_high);
    }
}

template <typename Format>
concept HasLanes = requires { Format::kLanes; };

template <typename Format>
concept HasGrid = requires { Format::kGrid; };
template <typename Format>
concept HasSigns = requires { Format::kSigned; };

template <int TypeId, int Group, int Tokens>
struct Rows {
    using Format = RowFormat<TypeId>;
    // Whether registers are filled with halves of groups, which need activations in another order.
    static constexpr bool kTurned = Format::kNibbles || (Group == 32 && HasLanes<Format>);
    static constexpr int kSums = kSpan / Group;        // registers of sums per span
    // Spans whose sums are kept at a time. Measured on a Zen 4: with eight, Q8_0 came from memory a sixth slower; one is no
    // faster. On a Zen 5 types of four bits gain up to a fifth by four, and lose by it where three are left over.
    static constexpr int64_t kFew = 2, kSpans = Group == 32 && Format::kBytes <= 144 ? 4 : kFew;
    using Sums = __m512i[Tokens][kSpans][kSums];

    // Lines of the strip of the same shape that comes (where it is of another, what is asked for is just less useful).
    // Only so many can be on their way to a core, and it must never wait for one with nothing else asked for: so every
    // pair of rows asks for its share, and the second half of a span, which takes as long as three pairs, for the rest.
    static constexpr int kLines = (kStripRows * Format::kBytes + 63) / 64;
    static constexpr int kPairLines = (kLines + 5) / 11, kRestLines = kLines - kPairLines * (kStripRows / 2);

    // Sums of two rows of a span.
    static THERMOCLINE_FORCED void add_up(const uint8_t* p, int64_t row_bytes, const uint8_t* grid,
                                          const uint8_t* const* x, int64_t s, int pair, Sums& sums) {
        const __m512i zero = _mm512_setzero_si512();
        if constexpr (kTurned && Group == 32) {
            __m512i dots[Tokens][4];
            for (int i = 0; i < 4; ++i)
                for (int half = 0; half < 2; ++half) {
                    const __m512i q = Format::lanes(p + i / 2 * row_bytes, i % 2, half);
                    for (int t = 0; t < Tokens; ++t)
                        dots[t][i] = dots_of(half ? dots[t][i] : zero, q, x[t] + 64 * (i % 2 * 2 + half));
                }
            for (int t = 0; t < Tokens; ++t)
                sums[t][s][pair] = Format::add_halves(dots[t]);
        } else {
            __m512i q[2][4];
            [[maybe_unused]] __mmask64 negative[2][4];
#pragma GCC unroll 2
            for (int row = 0; row < 2; ++row) {
                if constexpr (HasSigns<Format>)
                    Format::unpack(p + row * row_bytes, q[row], negative[row], grid);
                else if constexpr (HasGrid<Format>)
                    Format::unpack(p + row * row_bytes, q[row], grid);
                else
                    Format::unpack(p + row * row_bytes, q[row]);
            }
            for (int t = 0; t < Tokens; ++t) {
                __m512i of16[2];
                for (int row = 0; row < 2; ++row) {
                    __m512i dots[4];
                    for (int i = 0; i < 4; ++i) {
                        __m512i a = _mm512_loadu_si512(x[t] + 64 * i);
                        if constexpr (HasSigns<Format>) a = _mm512_mask_sub_epi8(a, negative[row][i], zero, a);
                        dots[i] = _mm512_dpbusd_epi32(zero, q[row][i], a);
                    }
                    of16[row] = Format::add_up(dots);
                }
                if constexpr (Group == 32) {  // lanes 4j + i, j even and odd, are the halves of a group
                    sums[t][s][pair] = _mm512_add_epi32(_mm512_shuffle_i64x2(of16[0], of16[1], 0x88),
                                                        _mm512_shuffle_i64x2(of16[0], of16[1], 0xdd));
                } else {
                    sums[t][s][2 * pair] = of16[0];
                    sums[t][s][2 * pair + 1] = of16[1];
                }
            }
        }
    }

    static THERMOCLINE_FORCED void turn(const __m512i* sums, __m512i* dots) {
        if constexpr (Group == 16)
            turn_sixteens<Format::kNibbles>(sums, dots);
        else if constexpr (kTurned)
            turn_halves(sums, dots);
        else
            turn_pairs(sums, dots);
    }

    // What the first groups of span s of `sums`, whose bytes are at `rows`, add to the totals.
    static THERMOCLINE_FORCED void add_groups(const RowPointers& rows, int groups, int64_t s, const Sums& sums,
                                              const uint8_t* const* bases, const ActivationLayout& layout,
                                              int64_t first_group, Floats (&totals)[Tokens]) {
        alignas(64) float scale[kMaxGroups][kStripRows], minimum[kMaxGroups][kStripRows];
        Format::scales(rows, Group, scale, minimum);
        for (int t = 0; t < Tokens; ++t) {
            __m512i dots[kSums];
            turn(sums[t][s], dots);
            totals[t] = add_span<1, Format::kMinimum, !HasSigns<Format>>(
                groups, totals[t], [&](int g) { return Ints{dots[g]}; }, scale, minimum, bases[t], layout, first_group);
        }
    }

    // The first `count` bytes, then zeros; to: of Bytes, rounded up to 64. Nothing behind these is read.
    template <int Bytes>
    static THERMOCLINE_FORCED void copy_padded(const uint8_t* from, int64_t count, uint8_t* to) {
        for (int64_t at = 0; at < Bytes; at += 64, count -= 64) {
            const __mmask64 mask = count >= 64 ? ~0ull : count > 0 ? (1ull << count) - 1 : 0;
            _mm512_store_si512(to + at, _mm512_maskz_loadu_epi8(mask, from + at));
        }
    }

    // What the last columns add, fewer than a span: as a span whose other columns are zeros.
    static void add_rest(const PackSource& from, const uint8_t* coming, const uint8_t* const* bases,
                         const ActivationLayout& layout, Sums& sums, Floats (&totals)[Tokens]) {
        const int64_t whole = from.count / kSpan, left = from.count % kSpan;
        const int64_t left_bytes = left / 32 * (Format::kBytes / 8);
        constexpr int kPadded = (Format::kBytes + 63) / 64 * 64;
        alignas(64) uint8_t rows[kStripRows][kPadded], x[Tokens][kSpan], turned[kTurned ? Tokens : 1][kSpan];
        for (int r = 0; r < kStripRows; ++r)
            copy_padded<Format::kBytes>(from.src + r * from.row_bytes + whole * Format::kBytes, left_bytes, rows[r]);
        const uint8_t* at[Tokens];
        for (int t = 0; t < Tokens; ++t) {
            copy_padded<kSpan>(bases[t] + whole * kSpan, left, x[t]);
            at[t] = x[t];
            if constexpr (kTurned) {
                turn_activations(x[t], turned[t]);
                at[t] = turned[t];
            }
        }
        for (int pair = 0; pair < kStripRows / 2; ++pair) {
            for (const uint8_t* const to = coming + 2 * left_bytes; coming < to;) coming = ask_for_lines<1>(coming, from.ahead.nearest);
            add_up(rows[2 * pair], kPadded, nullptr, at, 0, pair, sums);  // no grid: blocks of 256 have no rest
        }
        add_groups(RowPointers(rows[0], kPadded), static_cast<int>(left / Group), 0, sums, bases, layout, whole * kSums,
                   totals);
    }

    static void multiply(int, const QuantForm&, const PackSource& from, const uint8_t* const* bases,
                         const ActivationLayout& layout, float* c) {
        Sums sums;
        alignas(64) uint8_t turned[kTurned ? Tokens : 1][kSpans][kSpan];
        const int64_t all = from.count / kSpan;
        const uint8_t* grid = HasGrid<Format> ? codebook(TypeId) : nullptr;
        Floats totals[Tokens];
        for (int t = 0; t < Tokens; ++t) totals[t] = zero_floats();
        const uint8_t* coming = from.ahead.from ? from.ahead.from : from.src;
        const int64_t together = from.ahead.nearest && all % kSpans == 0 ? kSpans : kFew;
        for (int64_t first = 0; first < all; first += together) {
            const int64_t spans = all - first < together ? all - first : together;
            const uint8_t* x[Tokens];
            for (int t = 0; t < Tokens; ++t) {
                x[t] = bases[t] + first * kSpan;
                if constexpr (kTurned) {
                    for (int64_t s = 0; s < spans; ++s) turn_activations(x[t] + s * kSpan, turned[t][s]);
                    x[t] = turned[t][0];
                }
            }
            for (int pair = 0; pair < kStripRows / 2; ++pair) {
                const uint8_t* p = from.src + 2 * pair * from.row_bytes + first * Format::kBytes;
                for (int64_t s = 0; s < spans; ++s, p += Format::kBytes) {
                    coming = ask_for_lines<kPairLines>(coming, from.ahead.nearest);
                    const uint8_t* at[Tokens];
                    for (int t = 0; t < Tokens; ++t) at[t] = x[t] + s * kSpan;
                    add_up(p, from.row_bytes, grid, at, s, pair, sums);
                }
            }
            for (int64_t s = 0; s < spans; ++s) {
                coming = ask_for_lines<kRestLines>(coming, from.ahead.nearest);
                add_groups(RowPointers(from.src + (first + s) * Format::kBytes, from.row_bytes), kSums, s, sums, bases, layout,
                           (first + s) * kSums, totals);
            }
        }
        if constexpr (Format::kBlocks32) {
            if (from.count % kSpan != 0) add_rest(from, coming, bases, layout, sums, totals);
        }
        for (int t = 0; t < Tokens; ++t) store_floats(c + t * kPanelRows, totals[t]);
    }
};

// Measured: for three tokens the panel form is as fast, for four faster.
template <int TypeId, int Group>
RowsFn rows_of(int64_t tokens) {
    switch (tokens) {
        case 1: return Rows<TypeId, Group, 1>::multiply;
        case 2: return Rows<TypeId, Group, 2>::multiply;
        default: return nullptr;
    }
}

RowsFn find_rows(int type_id, const QuantForm& form, int64_t tokens) {
    const int group = form.group;
    switch (type_id) {
        case 2: return group == 32 ? rows_of<2, 32>(tokens) : rows_of<2, 16>(tokens);
        case 3: return group == 32 ? rows_of<3, 32>(tokens) : rows_of<3, 16>(tokens);
        case 6: return group == 32 ? rows_of<6, 32>(tokens) : rows_of<6, 16>(tokens);
        case 7: return group == 32 ? rows_of<7, 32>(tokens) : rows_of<7, 16>(tokens);
        case 8: return group == 32 ? rows_of<8, 32>(tokens) : rows_of<8, 16>(tokens);
        case 10: return rows_of<10, 16>(tokens);
        case 11: return rows_of<11, 16>(tokens);
        case 12: return group == 32 ? rows_of<12, 32>(tokens) : rows_of<12, 16>(tokens);
        case 13: return group == 32 ? rows_of<13, 32>(tokens) : rows_of<13, 16>(tokens);
        case 14: return rows_of<14, 16>(tokens);
        case 16: return group == 32 ? rows_of<16, 32>(tokens) : rows_of<16, 16>(tokens);
        case 17: return rows_of<17, 16>(tokens);
        case 18: return group == 32 ? rows_of<18, 32>(tokens) : rows_of<18, 16>(tokens);
        case 19: return group == 32 ? rows_of<19, 32>(tokens) : rows_of<19, 16>(tokens);
        case 20: return group == 32 ? rows_of<20, 32>(tokens) : rows_of<20, 16>(tokens);
        case 21: return group == 32 ? rows_of<21, 32>(tokens) : rows_of<21, 16>(tokens);
        case 22: return rows_of<22, 16>(tokens);
        case 23: return group == 32 ? rows_of<23, 32>(tokens) : rows_of<23, 16>(tokens);
        case 29: return rows_of<29, 16>(tokens);
        case 39: return group == 32 ? rows_of<39, 32>(tokens) : rows_of<39, 16>(tokens);
        case 40: return rows_of<40, 16>(tokens);
        default: return find_any_rows(form, tokens);
    }
}

// Weight rows into panels, for types whose bytes are unpacked where they lie: the packed bytes of eight rows are turned,
// which are half as many as the weights, and unpacked as what then is a panel's layout. Q6_K gains nothing by it.
// Entries of codebooks are turned as weights.

// Four bytes of each of eight rows, rows as lanes, number W of the 16 that begin at `piece`.
template <int W>
struct TurnedRows {
    const uint8_t* p;
    int64_t row_bytes, piece;
    THERMOCLINE_FORCED __m256i at(int64_t offset) const {
        __m256i words[4];
        words_of_rows(p + offset + piece, row_bytes, words);
        return words[W];
    }
};

template <typename Format>
concept HasEights = requires { Format::kEights; };

template <typename Format>
THERMOCLINE_FORCED void copy_scales(const RowScales& scales, int groups, int group, int first, int strip, QuantPanel& panel) {
    for (int g = 0; g < groups; ++g) {
        const int of_type = g * group / (HasSixteens<Format> ? 16 : 32);
        _mm256_store_ps(panel.scale[strip][g] + first, _mm256_load_ps(scales.scale[of_type]));
        if constexpr (Format::kMinimum)
            _mm256_store_ps(panel.minimum[strip][g] + first, _mm256_load_ps(scales.minimum[of_type]));
    }
}

template <int TypeId>
struct Packing {
    using Format = RowFormat<TypeId>;
    static constexpr int kTogether = Format::kTogether, kSteps = kSpan / 32 / Format::kUnrolled;
    static constexpr int kHalves = Format::kNibbles || HasEights<Format> ? 2 : 1;  // of 32 columns that come from the same bytes
    using Columns = uint8_t (*)[kStripRows][4];

    // Everything is read before anything is written, so that the compiler may keep what it has turned.
    struct Turned {
        __m256i of[kTogether * kHalves][4];
    };

    template <int N, int W = 0>
    static THERMOCLINE_FORCED void unpack(const uint8_t* p, int64_t row_bytes, int64_t piece, int step, Turned& to) {
        if constexpr (W < 4) {
            const TurnedRows<W> from{p, row_bytes, piece};
            if constexpr (kHalves == 2) {
                to.of[0][W] = Format::template unpack<0>(from, step);
                to.of[1][W] = Format::template unpack<1>(from, step);
            } else {
                to.of[0][W] = Format::template unpack<N>(from, step);
                if constexpr (kTogether >= 2) to.of[1][W] = Format::template unpack<N + 1>(from, step);
                if constexpr (kTogether == 4) {
                    to.of[2][W] = Format::template unpack<N + 2>(from, step);
                    to.of[3][W] = Format::template unpack<N + 3>(from, step);
                }
            }
            unpack<N, W + 1>(p, row_bytes, piece, step, to);
        }
    }

    template <int N = 0>
    static THERMOCLINE_FORCED void pack_step(const uint8_t* p, int64_t row_bytes, int step, int first_row, Columns q) {
        if constexpr (N < Format::kUnrolled) {
            constexpr int kPieces = 2 / kHalves;
            const int column = 32 * (Format::kUnrolled * step + N);
            for (int piece = 0; piece < kPieces; ++piece) {
                Turned turned;
                unpack<N>(p, row_bytes, 16 * piece, step, turned);
                for (int i = 0; i < kTogether * kHalves; ++i)
                    for (int w = 0; w < 4; ++w) {
                        // Halves of 16 columns, or of eight within each 16.
                        const int in_half = HasEights<Format> ? 2 * i + w / 2 * 4 + w % 2 : 8 / kHalves * i + 4 * piece + w;
                        const int at = column / 4 + in_half;
                        // Panels hold eight bits without a sign.
                        const __m256i shift = _mm256_set1_epi8(static_cast<char>(Format::kLargest > 127 ? kEightBitShift : 0));
                        _mm256_store_si256(reinterpret_cast<__m256i*>(q[at][first_row]), _mm256_xor_si256(turned.of[i][w], shift));
                    }
            }
            pack_step<N + kTogether>(p, row_bytes, step, first_row, q);
        }
    }

    static void pack(const PackSource& from, int group, int strip, QuantPanel& panel) {
        const int steps = static_cast<int>(from.count / (kSpan / kSteps)), groups = static_cast<int>(from.count / group);
        for (int first = 0; first < kStripRows; first += kTreeRows) {
            const uint8_t* p = from.src + first * from.row_bytes;
            RowScales scales;
            Format::scales(p, from.row_bytes, steps, scales);
            for (int step = 0; step < steps; ++step) {
                pack_step(p, from.row_bytes, step, first, panel.q[strip]);
            }
            copy_scales<Format>(scales, groups, group, first, strip, panel);
        }
    }
};

// Eight rows of 32 columns of a codebook's entries are written as they are, and turned when they are read again.
template <int TypeId>
struct GridPacking {
    using Format = RowFormat<TypeId>;

    static THERMOCLINE_FORCED __m256i weights(const uint8_t* p, const GridRow& row, const uint8_t* grid, int n) {
        const __m256i found = Format::entries(p, row, grid, n);
        if constexpr (HasSigns<Format>) {
            const __m256i minus = mask_of(Format::signs(p, row, n));
            const __m256i offset = _mm256_set1_epi8(Format::kOffset);
            return _mm256_add_epi8(offset, _mm256_sub_epi8(_mm256_xor_si256(found, minus), minus));
        } else {
            return found;
        }
    }

    static void pack(const PackSource& from, int group, int strip, QuantPanel& panel) {
        const uint8_t* grid = codebook(TypeId);
        for (int first = 0; first < kStripRows; first += kTreeRows) {
            const uint8_t* p = from.src + first * from.row_bytes;
            RowScales scales;
            Format::scales(p, from.row_bytes, 8, scales);
            GridRow rows[kTreeRows];
            for (int r = 0; r < kTreeRows; ++r) Format::prepare(p + r * from.row_bytes, rows[r]);
            for (int n = 0; n < kSpan / 32; ++n) {
                alignas(32) uint8_t q[kTreeRows][32];
                for (int r = 0; r < kTreeRows; ++r)
                    _mm256_store_si256(reinterpret_cast<__m256i*>(q[r]), weights(p + r * from.row_bytes, rows[r], grid, n));
                for (int piece = 0; piece < 2; ++piece) {
                    __m256i words[4];
                    words_of_rows(q[0] + 16 * piece, 32, words);
                    for (int w = 0; w < 4; ++w)
                        _mm256_store_si256(reinterpret_cast<__m256i*>(panel.q[strip][8 * n + 4 * piece + w][first]), words[w]);
                }
            }
            copy_scales<Format>(scales, static_cast<int>(from.count / group), group, first, strip, panel);
        }
    }
};

void pack(int type_id, const PackSource& from, int group, int strip, QuantPanel& panel) {
    if (from.rows == kStripRows) {
        switch (type_id) {
            case 2: return Packing<2>::pack(from, group, strip, panel);
            case 3: return Packing<3>::pack(from, group, strip, panel);
            case 8: return Packing<8>::pack(from, group, strip, panel);
            case 10: return Packing<10>::pack(from, group, strip, panel);
            case 11: return Packing<11>::pack(from, group, strip, panel);
            case 12: return Packing<12>::pack(from, group, strip, panel);
            case 13: return Packing<13>::pack(from, group, strip, panel);
            case 16: return GridPacking<16>::pack(from, group, strip, panel);
            case 17: return GridPacking<17>::pack(from, group, strip, panel);
            case 18: return GridPacking<18>::pack(from, group, strip, panel);
            case 19: return GridPacking<19>::pack(from, group, strip, panel);
            case 20: return Packing<20>::pack(from, group, strip, panel);
            case 21: return GridPacking<21>::pack(from, group, strip, panel);
            case 22: return GridPacking<22>::pack(from, group, strip, panel);
            case 23: return Packing<23>::pack(from, group, strip, panel);
            case 29: return GridPacking<29>::pack(from, group, strip, panel);
            case 39: return Packing<39>::pack(from, group, strip, panel);
            case 40: return Packing<40>::pack(from, group, strip, panel);
            default: break;
        }
    }
    pack_any(type_id, from, group, strip, panel);
}

// Products of decoded strips with packed tokens. The tile unit works on its own for 16 cycles per product, in
// which the vector unit decodes the coming span's weights: a few rows after each one or two products.

// Decodes one span of a strip pair in small portions, and asks for bytes that come later.
class SpanDecoder {
   public:
    // Done after `portions` calls of step(), or of finish(); nothing is decoded where `pair` is null.
    SpanDecoder(const StripPair* pair, int64_t column, int64_t cols, LeftTile (*out)[kPanelTiles], int64_t portions) {
        if (pair == nullptr) return;
        count_ = cols - column < kSpan ? cols - column : kSpan;
        for (int s = 0; s < kStrips; ++s) {
            const TileStrip& strip = pair->strip[s];
            Side& side = sides_[s];
            side.out = out[s][0].w[0];
            side.rows = strip.matrix == nullptr ? 0 : strip.rows;
            if (side.rows == 0) continue;
            const TileMatrix& matrix = *strip.matrix;
            const bool plain = matrix.unpack == nullptr;
            const int64_t block = plain ? 1 : matrix.info.block_elements, bytes = plain ? 2 : matrix.info.block_bytes;
            side.matrix = &matrix;
            side.decode = find_decode(matrix.weight->type_id);
            side.src = matrix.weight->row(strip.row) + column / block * bytes;
        }
        left_ = kPanelRows;
        portion_ = (kPanelRows + portions - 1) / portions;
    }

    // Bytes that are asked for on the way: part `share` of `shares` equal ones.
    void ask(const ComingBytes (&coming)[kStrips], int64_t share, int64_t shares) {
        for (int s = 0; s < kStrips; ++s) {
            const int64_t lines = coming[s].bytes / 64;
            const int64_t begin = lines * share / shares, end = lines * (share + 1) / shares;
            const int64_t each = ((end - begin) * portion_ + kPanelRows - 1) / kPanelRows;
            asked_[s] = {coming[s].from + begin * 64, coming[s].from + end * 64, each * 64};
        }
    }

    void step() {
        if (left_ <= 0) return;
        for (Lines& lines : asked_) {
            const uint8_t *at = lines.next, *end = lines.end - at < lines.each ? lines.end : at + lines.each;
            for (; at < end; at += 64) __builtin_prefetch(at, 0, 2);
            lines.next = at;
        }
        for (int64_t portion = portion_; portion > 0 && left_ > 0;) portion -= decode_some(portion);
    }

    void finish() {
        while (left_ > 0) step();
    }

   private:
    struct Side {
        const TileMatrix* matrix = nullptr;
        DecodeTileRows decode = nullptr;
        const uint8_t* src = nullptr;
        uint16_t* out = nullptr;
        int64_t rows = 0;
    };
    struct Lines {
        const uint8_t *next = nullptr, *end = nullptr;
        int64_t each = 0;  // bytes per step
    };

    // Up to `most` rows of one strip; missing rows become zero. Returns how many.
    int64_t decode_some(int64_t most) {
        static_assert(kStrips == 2 && (kStripRows & (kStripRows - 1)) == 0);
        const int64_t done = kPanelRows - left_, r = done & (kStripRows - 1);
        const Side& side = sides_[done >= kStripRows];
        const bool there = r < side.rows;
        const int64_t rest = (there ? side.rows : kStripRows) - r, n = most < rest ? most : rest;
        uint16_t* out = side.out + r * kTileColumns;
        if (there)
            side.decode(*side.matrix, side.src + r * side.matrix->weight->row_bytes, n, count_, out);
        else
            for (int64_t tile = 0; tile < tiles_of(count_); ++tile)
                __builtin_memset(out + tile * kTileWords, 0, static_cast<size_t>(n) * kTileColumns * sizeof *out);
        left_ -= n;
        return n;
    }

    Side sides_[kStrips];
    Lines asked_[kStrips];
    int64_t count_ = 0, left_ = 0, portion_ = 0;
};

// Registers 0..3 are the sums [strip][token tile], 4 and 5 the strips, 6 and 7 the tokens.
template <int TokenTiles>
inline void load_sums(Tiles& tiles, const SumTile* sums) {
    tiles.load<0>(sums);
    tiles.load<2>(sums + 1);
    if constexpr (TokenTiles == 2) {
        tiles.load<1>(sums + 2);
        tiles.load<3>(sums + 3);
    }
}

template <int TokenTiles>
inline void store_sums(Tiles& tiles, SumTile* sums) {
    tiles.store<0>(sums);
    tiles.store<2>(sums + 1);
    if constexpr (TokenTiles == 2) {
        tiles.store<1>(sums + 2);
        tiles.store<3>(sums + 3);
    }
}

// A product takes the tile unit 16 cycles and is done after 52, a row of 256 columns the vector unit some 30: what
// is between two products must be short, for the core to reach the next product while the last is under way.
constexpr int kPortions = 2;  // per step of 32 columns

template <int TokenTiles>
void multiply_span(Tiles& tiles, const LeftTile (&left)[kStrips][kPanelTiles], const RightTile* right,
                   int64_t right_stride, int64_t steps, SpanDecoder& decoder) {
    for (int64_t k = 0; k < steps; ++k) {
        tiles.load<4>(&left[0][k]);
        tiles.load<6>(right + k);
        tiles.add_product<0, 4, 6>();
        if constexpr (TokenTiles == 2) {
            tiles.load<7>(right + right_stride + k);
            tiles.add_product<1, 4, 7>();
        }
        decoder.step();
        tiles.load<5>(&left[1][k]);
        tiles.add_product<2, 5, 6>();
        if constexpr (TokenTiles == 2) tiles.add_product<3, 5, 7>();
        decoder.step();
    }
}

template <int TokenTiles>
void multiply_tokens(Tiles& tiles, const TilePanels& panels, const TileStep& step, int64_t group, int64_t span,
                     bool kept, SpanDecoder& decoder) {
    const int64_t depth = tiles_of(step.cols), spans = (step.cols + kSpan - 1) / kSpan;
    const int64_t first = span * kPanelTiles, steps = depth - first < kPanelTiles ? depth - first : kPanelTiles;
    SumTile* sums = step.sums + 2 * group * kStrips;
    if (span == 0) {
        tiles.zero<0>();
        tiles.zero<1>();
        tiles.zero<2>();
        tiles.zero<3>();
    } else if (!kept) {
        load_sums<TokenTiles>(tiles, sums);
    }
    multiply_span<TokenTiles>(tiles, panels.tile[panels.current], step.right + 2 * group * depth + first, depth,
                              steps, decoder);
    if (!kept || span + 1 == spans) store_sums<TokenTiles>(tiles, sums);
}

void multiply_pair(const TileStep& step, TilePanels& panels) {
    Tiles tiles;
    const int64_t groups = (step.token_tiles + 1) / 2, spans = (step.cols + kSpan - 1) / kSpan;
    const bool kept = groups == 1;  // the sums stay in the registers
    for (int64_t span = 0; span < spans; ++span) {
        const bool last = span + 1 == spans;
        const int64_t left = tiles_of(step.cols) - span * kPanelTiles, depth = left < kPanelTiles ? left : kPanelTiles;
        SpanDecoder decoder(last ? step.next : &step.here, last ? 0 : (span + 1) * kSpan, step.cols,
                            panels.tile[1 - panels.current], kPortions * groups * depth);
        decoder.ask(step.coming, span, spans);
        for (int64_t group = 0; group < groups; ++group) {
            if (2 * group + 1 < step.token_tiles)
                multiply_tokens<2>(tiles, panels, step, group, span, kept, decoder);
            else
                multiply_tokens<1>(tiles, panels, step, group, span, kept, decoder);
        }
        decoder.finish();
        panels.current = 1 - panels.current;
    }
}

void start_run(const StripPair& first, int64_t cols, TilePanels& panels) {
    SpanDecoder(&first, 0, cols, panels.tile[panels.current], 1).finish();
}

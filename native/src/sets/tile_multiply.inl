// Products of decoded strips with packed tokens. The tile unit works on its own for 16 cycles per product, in which
// the vector unit decodes rows of the coming half: one strip's columns of a span. Two halves, the one in use and the
// one being decoded, leave room in the first-level cache for what is read meanwhile; two spans did not.

// Bytes that are asked for on the way: part `share` of `shares` equal ones, in `slots` steps, evenly: whole lines in each
// step until all are asked for took 1.07 times as long.
class AskedLines {
   public:
    AskedLines() = default;
    AskedLines(const ComingBytes& coming, int64_t share, int64_t shares, int64_t slots) {
        const int64_t lines = coming.bytes / 64;
        const int64_t begin = lines * share / shares, end = lines * (share + 1) / shares;
        next_ = coming.from + begin * 64;
        end_ = coming.from + end * 64;
        each_ = ((end - begin) * kLine + slots - 1) / slots;
    }

    inline __attribute__((always_inline)) void step() {
        if (next_ >= end_) return;
        for (due_ += each_; due_ >= kLine; due_ -= kLine, next_ += 64) __builtin_prefetch(next_, 0, 2);
    }

   private:
    const uint8_t *next_ = nullptr, *end_ = nullptr;
    static constexpr int64_t kLine = 1 << 16;  // of each_ and due_: a line, in parts
    int64_t each_ = 0, due_ = 0;
};

// Row r of a strip, `count` columns from `column` on.
inline const uint8_t* strip_row(const TileStrip& strip, int64_t r, int64_t column) {
    const TileMatrix& matrix = *strip.matrix;
    const bool plain = matrix.unpack == nullptr;
    const int64_t block = plain ? 1 : matrix.info.block_elements, bytes = plain ? 2 : matrix.info.block_bytes;
    return matrix.weight->row(strip.row + r) + column / block * bytes;
}

inline void clear_row(int64_t count, uint16_t* out) {
    for (int64_t tile = 0; tile < tiles_of(count); ++tile)
        __builtin_memset(out + tile * kTileWords, 0, kTileColumns * sizeof *out);
}

// Rows of any type, whose decoder is called, not inlined.
struct RowsByCall {
    void row(const TileMatrix& matrix, const uint8_t* src, int64_t count, uint16_t* out) const {
        find_decode(matrix.weight->type_id)(matrix, src, count, out);
    }
};

// Decodes a half a row at a time, and asks for bytes that come later. Whole: a row in each step, 16 of a full span.
template <typename Rows, bool Whole>
class HalfDecoder {
   public:
    // Done after `slots` calls of step(); nothing is decoded where `strip` is null.
    HalfDecoder(const TileStrip* strip, int64_t column, int64_t cols, LeftTile (&out)[kPanelTiles], int64_t slots)
        : out_(out[0].w[0]), slots_(slots), count_(cols - column < kSpan ? cols - column : kSpan) {
        if (strip == nullptr) {
            done_ = kStripRows;
            return;
        }
        rows_ = strip->matrix == nullptr ? 0 : strip->rows;
        if (rows_ == 0) return;
        matrix_ = strip->matrix;
        row_bytes_ = matrix_->weight->row_bytes;
        src_ = strip_row(*strip, 0, column);
    }

    void ask(const ComingBytes& coming, int64_t share, int64_t shares) {
        asked_ = AskedLines(coming, share, shares, slots_);
    }

    inline __attribute__((always_inline)) void step() {
        asked_.step();
        if constexpr (Whole) {
            decoder_.row(*matrix_, src_, kSpan, out_);
            src_ += row_bytes_;
            out_ += kTileColumns;
        } else {
            for (due_ += kStripRows; due_ >= slots_ && done_ < kStripRows; due_ -= slots_) {
                if (done_ < rows_) {
                    decoder_.row(*matrix_, src_, count_, out_);
                    src_ += row_bytes_;
                } else {
                    clear_row(count_, out_);
                }
                out_ += kTileColumns;
                ++done_;
            }
        }
    }

   private:
    const Rows decoder_{};
    const TileMatrix* matrix_ = nullptr;
    const uint8_t* src_ = nullptr;
    uint16_t* out_;
    AskedLines asked_;
    int64_t slots_, count_, row_bytes_ = 0;
    int64_t rows_ = 0, done_ = 0, due_ = 0;  // due: row r is decoded when kStripRows * calls reaches slots * (r + 1)
};

constexpr int64_t kGroupTiles = 4;  // token tiles that are multiplied together: their sums are registers 0 to 3
constexpr int64_t kSlots = 2;       // calls of the decoder per step of 32 columns

// A half and the token tiles of a group: sums[First + t] += left * right[t]. Register 4 is the strip, 5 to 7 the tokens.
template <int First, int Count, typename Decoder>
inline __attribute__((always_inline)) void multiply_group(Tiles& tiles, const LeftTile* left, const RightTile* right,
                                                          int64_t stride, int64_t steps, Decoder& decoder) {
    for (int64_t k = 0; k < steps; ++k) {
        tiles.load<4>(left + k);
        tiles.load<6>(right + k);
        if constexpr (Count > 2) {
            tiles.load<7>(right + stride + k);
            tiles.load<5>(right + 2 * stride + k);
        }
        tiles.add_product<First, 4, 6>();
        decoder.step();
        if constexpr (Count == 2) tiles.load<7>(right + stride + k);
        if constexpr (Count > 1) tiles.add_product<First + 1, 4, 7>();
        if constexpr (Count > 2) tiles.add_product<First + 2, 4, 5>();
        decoder.step();
        if constexpr (Count > 3) {
            tiles.load<6>(right + 3 * stride + k);
            tiles.add_product<First + 3, 4, 6>();
        }
    }
}

template <int First, int Count>
inline void begin_sums(Tiles& tiles, const SumTile* from) {  // zero where `from` is null
    const auto begin = [&]<int T>() {
        if constexpr (T < Count) {
            if (from == nullptr)
                tiles.zero<First + T>();
            else
                tiles.load<First + T>(from + T * kStrips);
        }
    };
    begin.template operator()<0>();
    begin.template operator()<1>();
    begin.template operator()<2>();
    begin.template operator()<3>();
}

template <int First, int Count>
inline void store_sums(Tiles& tiles, SumTile* to) {
    tiles.store<First>(to);
    if constexpr (Count > 1) tiles.store<First + 1>(to + kStrips);
    if constexpr (Count > 2) tiles.store<First + 2>(to + 2 * kStrips);
    if constexpr (Count > 3) tiles.store<First + 3>(to + 3 * kStrips);
}

// What is multiplied in one half.
struct Half {
    const TileStep& step;
    int strip;
    int64_t span, spans;
    const LeftTile* left;

    int64_t first() const { return span * kPanelTiles; }
    int64_t depth() const { return tiles_of(step.cols); }
    int64_t steps() const { return depth() - first() < kPanelTiles ? depth() - first() : kPanelTiles; }
};

template <int First, int Count, typename Decoder>
void multiply_tokens(Tiles& tiles, const Half& half, Decoder& decoder) {
    if (half.span == 0) begin_sums<First, Count>(tiles, nullptr);
    multiply_group<First, Count>(tiles, half.left, half.step.right + half.first(), half.depth(), half.steps(), decoder);
    if (half.span + 1 == half.spans) store_sums<First, Count>(tiles, half.step.sums + half.strip);
}

// Multiplies a half with all tokens, and decodes `strip` from `column` on meanwhile.
template <typename Rows, bool Whole>
void multiply_half(Tiles& tiles, const Half& half, const TileStrip* strip, int64_t column,
                   LeftTile (&out)[kPanelTiles]) {
    HalfDecoder<Rows, Whole> decoder(strip, column, half.step.cols, out, kSlots * half.steps());
    decoder.ask(half.step.coming[half.strip], half.span, half.spans);
    const bool second = half.strip == 1;
    switch (half.step.token_tiles) {
        case 1: return second ? multiply_tokens<2, 1>(tiles, half, decoder) : multiply_tokens<0, 1>(tiles, half, decoder);
        case 2: return second ? multiply_tokens<2, 2>(tiles, half, decoder) : multiply_tokens<0, 2>(tiles, half, decoder);
        case 3: return multiply_tokens<0, 3>(tiles, half, decoder);
        default: return multiply_tokens<0, kGroupTiles>(tiles, half, decoder);
    }
}

using MultiplyHalf = void (*)(Tiles&, const Half&, const TileStrip*, int64_t, LeftTile (&)[kPanelTiles]);

// By the type of what is decoded meanwhile, where that is 16 rows of a full span, one in each step.
inline MultiplyHalf find_multiply(const Half& half, const TileStrip* decoded, int64_t column) {
    static_assert(kSlots * kPanelTiles == kStripRows);
    const bool whole = decoded != nullptr && decoded->matrix != nullptr && decoded->rows == kStripRows &&
                       half.steps() == kPanelTiles && half.step.cols - column >= kSpan;
    if (!whole) return multiply_half<RowsByCall, false>;
    switch (decoded->matrix->weight->type_id) {
        case kBF16: return multiply_half<RowsOfBF16, true>;
        case 2: return multiply_half<RowsOfQ40, true>;
        case 8: return multiply_half<RowsOfQ80, true>;
        case 12: return multiply_half<RowsOfQ4K, true>;
        case 13: return multiply_half<RowsOfQ5K, true>;
        case 14: return multiply_half<RowsOfQ6K, true>;
        case 20: return multiply_half<RowsOfIQ4NL, true>;
        case 23: return multiply_half<RowsOfIQ4XS, true>;
        case 39: return multiply_half<RowsOfMXFP4, true>;
        default: return multiply_half<RowsOfAny, true>;
    }
}

// Decodes `strips` strips of a pair, `spans` spans of each from `first` on, span by span, a row at a time. For what is
// multiplied with so many tokens that decoding is the shorter part: a row's decoder is called, not inlined.
class BlockDecoder {
   public:
    BlockDecoder(const StripPair* pair, int strips, int64_t first, int64_t spans, int64_t cols, LeftTile* out,
                 int64_t slots)
        : pair_(pair), strips_(strips), span_(first), first_(first), cols_(cols), out_(out), slots_(slots),
          left_(pair == nullptr ? 0 : strips * spans * kStripRows), rows_(left_) {}

    void ask(const ComingBytes (&coming)[kStrips], int64_t share, int64_t shares) {
        for (int s = 0; s < kStrips; ++s) asked_[s] = AskedLines(coming[s], share, shares, slots_);
    }

    void step() {
        for (AskedLines& lines : asked_) lines.step();
        for (due_ += rows_; due_ >= slots_ && left_ > 0; due_ -= slots_, --left_) decode_row();
    }

   private:
    void decode_row() {
        const TileStrip& strip = pair_->strip[strip_];
        const int64_t column = span_ * kSpan, count = cols_ - column < kSpan ? cols_ - column : kSpan;
        uint16_t* out = out_[strip_ * kBlockTiles + (span_ - first_) * kPanelTiles].w[row_];
        if (strip.matrix != nullptr && row_ < strip.rows)
            find_decode(strip.matrix->weight->type_id)(*strip.matrix, strip_row(strip, row_, column), count, out);
        else
            clear_row(count, out);
        if (++row_ < kStripRows) return;
        row_ = 0;
        if (++strip_ < strips_) return;
        strip_ = 0;
        ++span_;
    }

    const StripPair* pair_;
    int strips_, strip_ = 0, row_ = 0;
    int64_t span_, first_, cols_;
    LeftTile* out_;
    AskedLines asked_[kStrips];
    int64_t slots_, left_, rows_, due_ = 0;
};

// Two strips and one or two token tiles, all columns of a block: registers 0 to 3 are the sums [strip][token tile].
template <int Count>
void multiply_columns(Tiles& tiles, const LeftTile (&left)[kStrips][kBlockTiles], const RightTile* right,
                      int64_t stride, int64_t steps, BlockDecoder& decoder) {
    for (int64_t k = 0; k < steps; ++k) {
        tiles.load<4>(&left[0][k]);
        tiles.load<6>(right + k);
        tiles.add_product<0, 4, 6>();
        if constexpr (Count == 2) {
            tiles.load<7>(right + stride + k);
            tiles.add_product<1, 4, 7>();
        }
        decoder.step();
        tiles.load<5>(&left[1][k]);
        tiles.add_product<2, 5, 6>();
        if constexpr (Count == 2) tiles.add_product<3, 5, 7>();
        decoder.step();
    }
}

inline bool in_blocks(int64_t token_tiles) { return token_tiles > kGroupTiles; }

struct Blocks {
    int64_t cols, spans = (cols + kSpan - 1) / kSpan;

    int64_t count() const { return (spans + kBlockSpans - 1) / kBlockSpans; }
    int64_t first(int64_t block) const { return block * kBlockSpans; }
    int64_t length(int64_t block) const {
        return spans - first(block) < kBlockSpans ? spans - first(block) : kBlockSpans;
    }
};

// What the first products of `pair` need, in `slots` steps.
BlockDecoder decoder_of_first(const StripPair* pair, int64_t token_tiles, int64_t cols, TilePanels& panels,
                              int64_t slots) {
    if (!in_blocks(token_tiles)) return {pair, 1, 0, 1, cols, panels.half[panels.current], slots};
    return {pair, kStrips, 0, Blocks{cols}.length(0), cols, panels.block[panels.current][0], slots};
}

void multiply_blocks(const TileStep& step, TilePanels& panels) {
    Tiles tiles;
    const Blocks blocks{step.cols};
    const int64_t depth = tiles_of(step.cols), pairs = (step.token_tiles + 1) / 2;
    for (int64_t block = 0; block < blocks.count(); ++block) {
        const bool last = block + 1 == blocks.count();
        const int64_t first = blocks.first(block) * kPanelTiles, all = blocks.length(block) * kPanelTiles;
        const int64_t steps = depth - first < all ? depth - first : all, slots = kSlots * pairs * steps;
        const auto& left = panels.block[panels.current];
        panels.current = 1 - panels.current;
        BlockDecoder decoder =
            last ? decoder_of_first(step.next, step.next_tiles, step.cols, panels, slots)
                 : BlockDecoder(&step.here, kStrips, blocks.first(block + 1), blocks.length(block + 1), step.cols,
                                panels.block[panels.current][0], slots);
        decoder.ask(step.coming, block, blocks.count());
        for (int64_t tile = 0; tile < step.token_tiles; tile += 2) {
            SumTile* sums = step.sums + tile * kStrips;
            const RightTile* right = step.right + tile * depth + first;
            const SumTile* from = block == 0 ? nullptr : sums;
            if (tile + 1 < step.token_tiles) {
                begin_sums<0, 2>(tiles, from);
                begin_sums<2, 2>(tiles, from ? from + 1 : nullptr);
                multiply_columns<2>(tiles, left, right, depth, steps, decoder);
                store_sums<0, 2>(tiles, sums);
                store_sums<2, 2>(tiles, sums + 1);
            } else {
                begin_sums<0, 1>(tiles, from);
                begin_sums<2, 1>(tiles, from ? from + 1 : nullptr);
                multiply_columns<1>(tiles, left, right, depth, steps, decoder);
                store_sums<0, 1>(tiles, sums);
                store_sums<2, 1>(tiles, sums + 1);
            }
        }
    }
}

// Up to two token tiles: the strips take turns, and both strips' sums stay in the registers. Up to four: one strip
// after the other, each one's sums stay there.
void multiply_halves(const TileStep& step, TilePanels& panels) {
    Tiles tiles;
    const int64_t spans = (step.cols + kSpan - 1) / kSpan, halves = spans * kStrips;
    const bool turns = step.token_tiles <= kGroupTiles / kStrips;
    const auto strip_of = [&](int64_t h) { return static_cast<int>(turns ? h % kStrips : h / spans); };
    const auto span_of = [&](int64_t h) { return turns ? h / kStrips : h % spans; };
    const bool change = step.next != nullptr && in_blocks(step.next_tiles);
    for (int64_t h = 0; h < halves; ++h) {
        const Half half{step, strip_of(h), span_of(h), spans, panels.half[panels.current]};
        const bool last = h + 1 == halves;
        const TileStrip* coming = !last                         ? &step.here.strip[strip_of(h + 1)]
                                  : step.next && !change ? &step.next->strip[0]
                                                                : nullptr;
        panels.current = 1 - panels.current;
        const int64_t column = last ? 0 : span_of(h + 1) * kSpan;
        find_multiply(half, coming, column)(tiles, half, coming, column, panels.half[panels.current]);
    }
    if (change) decoder_of_first(step.next, step.next_tiles, step.cols, panels, 1).step();
}

void multiply_pair(const TileStep& step, TilePanels& panels) {
    in_blocks(step.token_tiles) ? multiply_blocks(step, panels) : multiply_halves(step, panels);
}

void start_run(const StripPair& first, int64_t token_tiles, int64_t cols, TilePanels& panels) {
    decoder_of_first(&first, token_tiles, cols, panels, 1).step();
}

// Attention of prompts on tiles: a span's scores of 32 rows, their softmax, and their sums of values.
//
// Queries, keys, values and the softmax's weights are each the sum of two bfloat16 numbers; of the four products the one
// of both smaller numbers is left out. A row's softmax takes its largest score of the span, and states of spans are
// merged in order. Positions that a row does not read weigh zero, which changes no sum: so its bits depend on nothing that
// is computed beside it.

constexpr int64_t kStepRows = kRowTiles * kTileTokens;
constexpr int64_t kSpanGroups = kSpanTokens / kTileTokens, kSpanSteps = kSpanTokens / kTileColumns;

struct TileSizes {
    int64_t rows;    // of tokens and their heads, a multiple of kStepRows
    int64_t stride;  // of values, a multiple of two right tiles
    int64_t depth;   // tiles of a key

    TileSizes(const AttentionJob& job, int64_t num_tokens)
        : rows(round_up(rows_of(job, num_tokens), kStepRows)),
          stride(round_up(job.value_dim(), 2 * kTileTokens)),
          depth(tiles_of(job.key_dim())) {}

    int64_t value_tiles() const { return stride / kTileTokens; }
    int64_t state() const { return state_size(rows, stride); }
};

struct TileItem {
    TileSizes sizes;
    LeftTile* queries;     // [row tiles][kAttentionParts][depth]
    int64_t* begin;        // [rows] first position that a row sees
    int64_t* end;          // [rows] one behind the last
    const uint16_t** chosen;  // [rows] what a row's token reads, see AttentionJob; or null
    RightTile* keys;       // [kSpanGroups][kAttentionParts][depth]
    RightTile* values;     // [value tiles][kSpanSteps][kAttentionParts]
    SumTile* scores[2];    // [kRowTiles][kSpanGroups], of two steps by turns
    LeftTile* weights[2];  // [kRowTiles][kSpanSteps][kAttentionParts]
    State first, next;     // of the spans so far, and of the span behind them
    BlockMemory block;
    TileHead head;  // where keys and values are made of a latent cache
};

inline TileItem carve_tiles(const AttentionJob& job, int64_t num_tokens, Carver& carver) {
    TileItem item{TileSizes(job, num_tokens), {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}};
    const TileSizes& sizes = item.sizes;
    item.queries = carver.take<LeftTile>(sizes.rows / kTileTokens * kAttentionParts * sizes.depth);
    item.begin = carver.take<int64_t>(sizes.rows);
    item.end = carver.take<int64_t>(sizes.rows);
    item.chosen = job.chosen == nullptr ? nullptr : carver.take<const uint16_t*>(sizes.rows);
    item.keys = carver.take<RightTile>(kSpanGroups * kAttentionParts * sizes.depth);
    item.values = carver.take<RightTile>(kSpanSteps * kAttentionParts * sizes.value_tiles());
    for (int turn = 0; turn < 2; ++turn) {
        item.scores[turn] = carver.take<SumTile>(kRowTiles * kSpanGroups);
        item.weights[turn] = carver.take<LeftTile>(kRowTiles * kSpanSteps * kAttentionParts);
    }
    float* const states[] = {carver.take<float>(sizes.state()), carver.take<float>(sizes.state())};
    float* const block = carver.take<float>(block_floats(job));
    if (job.expansion) item.head = carve_head(job, carver);
    if (block == nullptr) return item;
    item.first = state_at(sizes.rows, states[0]);
    item.next = state_at(sizes.rows, states[1]);
    item.block = block_memory(job, 1, block);
    return item;
}

int64_t tile_scratch(const AttentionJob& job, int64_t num_tokens) {
    Carver counting(nullptr);
    carve_tiles(job, num_tokens, counting);
    return counting.floats();
}

int64_t tile_state(const AttentionJob& job, int64_t num_tokens) { return TileSizes(job, num_tokens).state(); }

// Row r is query head r % group of token r / group; those beyond the last see nothing.
inline void load_row_tiles(const AttentionJob& job, const AttentionItem& work, const TileItem& item) {
    const int64_t rows = rows_of(job, work.num_tokens), dim = job.key_dim(), group = job.group();
    const float factor = score_factor(job);
    __m512i* const words = reinterpret_cast<__m512i*>(item.queries);
    const int64_t depth = item.sizes.depth;
    for (int64_t r = 0; r < item.sizes.rows; ++r) {
        __m512i* const to = words + r / kTileTokens * kAttentionParts * depth * kTileTokens + r % kTileTokens;
        item.begin[r] = item.end[r] = 0;
        if (item.chosen != nullptr)
            item.chosen[r] = r < rows ? job.chosen_of(work.first_token + r / group, work.slice) : nullptr;
        const float* q = job.q;
        int64_t count = 0;
        __m512 scale = _mm512_setzero_ps();
        if (r < rows) {
            const int64_t token = work.first_token + r / group, position = job.positions[token];
            q = job.q + (token * job.heads + work.slice * group + r % group) * dim;
            count = dim;
            item.begin[r] = job.first_seen(position);
            item.end[r] = position + 1;
            scale = _mm512_set1_ps(factor * temperature_at(job.temperature, position));
        }
        for (int64_t k = 0; k < depth; ++k) {
            const float* const from = q + k * kTileColumns;
            const int64_t left = count - k * kTileColumns;
            __m512 low = _mm512_mul_ps(_mm512_maskz_loadu_ps(first_lanes(left), from), scale);
            __m512 high = _mm512_mul_ps(_mm512_maskz_loadu_ps(first_lanes(left - kWidth), from + kWidth), scale);
            for (int part = 0; part < kAttentionParts; ++part)
                _mm512_store_si512(to + (part * depth + k) * kTileTokens, take_part(low, high));
        }
    }
}

// Values of the 32 positions of a block from `place` on, those within [first, last); the others are zero, since what lies
// there may be anything. The next block's keys are fetched meanwhile.
template <class Source>
inline void pack_values(const KeyBlock& block, int64_t vectors, int64_t place, int64_t first, int64_t last,
                        int64_t value_tiles, RightTile* to) {
    constexpr int64_t kVectorBytes = kWidth * Source::kVectorBytes;
    for (int64_t vec = 0; vec < value_tiles; ++vec, to += kSpanSteps * kAttentionParts) {
        if constexpr (Source::kFetchAhead)
            for (int64_t g = place / kWidth; g < place / kWidth + 2; ++g)
                fetch_ahead<kVectorBytes>(block.next_keys[g] + vec * kVectorBytes);
        const auto value = [&](int64_t at) {
            return vec < vectors && first <= at && at < last ? Source::value(Source::values(block, at, vec, 1), vec, 0)
                                                             : zero();
        };
        for (int pair = 0; pair < kTileColumns / 2; ++pair)
            put_pair(to, 1, pair, value(place + 2 * pair), value(place + 2 * pair + 1));
    }
}

template <class Source>
void pack_block(const AttentionJob& job, const TileItem& item, const KeyBlock& block, int64_t span, const Reach& reach) {
    const int64_t depth = item.sizes.depth, vectors = round_up(job.value_dim(), kWidth) / kWidth;
    const int64_t group = (block.base - span) / kTileTokens, step = (block.base - span) / kTileColumns;
    for (int g = block.first_group; g < block.last_group; ++g)
        pack_keys<Source>(block.keys[g], block.values[g], job.key_dim(), depth, item.keys + (group + g) * kAttentionParts * depth);
    for (int s = block.first_group / 2; s < (block.last_group + 1) / 2; ++s)
        pack_values<Source>(block, vectors, s * kTileColumns, reach.first - block.base, reach.last - block.base,
                            item.sizes.value_tiles(), item.values + (step + s) * kAttentionParts);
}

using PackBlock = void (*)(const AttentionJob&, const TileItem&, const KeyBlock&, int64_t, const Reach&);

inline PackBlock pack_function(CacheType type, bool direct) {
    if (!direct) return pack_block<InScratch>;
    switch (type) {
        case CacheType::F32: return pack_block<InCache<CacheType::F32>>;
        case CacheType::F16: return pack_block<InCache<CacheType::F16>>;
        case CacheType::BF16: return pack_block<InCache<CacheType::BF16>>;
        case CacheType::Q8_0: break;
    }
    return pack_block<InCache<CacheType::Q8_0>>;
}

// The span's keys and values within `reach`.
inline void pack_span(const AttentionJob& job, const AttentionItem& work, const TileItem& item, int64_t span,
                      const Reach& reach) {
    const int64_t row_bytes = cache_row_bytes(job.cache.type, job.cache.head_dim), kv_head = work.slice / job.slices();
    const bool direct = lies_in_vectors(job.cache);
    const PackBlock pack = pack_function(job.cache.type, direct);
    for (int64_t base = reach.first / kKeyBlock * kKeyBlock; base < reach.last; base += kKeyBlock)
        pack(job, item,
             job.expansion ? expand_on_tiles(job, row_bytes, base, reach, item.head, item.block)
             : direct      ? block_in_cache(job, row_bytes, kv_head, base, reach)
                           : block_in_scratch(job, row_bytes, kv_head, base, reach, item.block),
             span, reach);
}

// 32 rows and what they see of a span: the groups that are computed, an even number of them, and the positions that all
// of the rows see. `turn` says which of the buffers for scores and weights are theirs.
struct RowStep {
    int64_t row;
    int64_t first, last;  // groups
    int64_t common_first, common_last;
    int turn;

    int64_t count() const { return (last - first) / 2; }
};

// 2^x for x that are at most 0; 0 for -infinity, exactly 1 for 0. The relative error is below 3e-6.
inline Vec weight_of(Vec x) {
    constexpr float kTerms[] = {1.0f, 0.69304514f, 0.24127856f, 0.052245375f, 0.013425155f};
    constexpr int kAboveFloor = 0x09;
    return _mm512_scalef_ps(polynomial(kTerms, _mm512_reduce_ps(x, kAboveFloor)), x);
}

// The softmax of a step's rows, in slices: the row's largest score first, then weights of some groups at a time. They are
// computed beside products of other rows, whose unit is another one.
class Softening {
   public:
    Softening(const TileItem& item, const State& state, const RowStep& step, int64_t base, float cap)
        : item_(item),
          state_(state),
          step_(step),
          base_(base),
          cap_(cap),
          masked_(base + step.first * kTileTokens < step.common_first || step.common_last < base + step.last * kTileTokens ||
                  item.chosen != nullptr),
          pieces_((step.count() + kPieceGroups - 1) / kPieceGroups) {}

    int64_t slices() const { return pieces_ == 0 ? 0 : kStepRows * (1 + pieces_); }

    void run_until(int64_t slice) {
        for (; done_ < slice; ++done_) {
            if (piece_ == 0) begin_row();
            else weigh(piece_ - 1);
            if (piece_++ < pieces_) continue;
            state_.sum[step_.row + row_] = reduce_add(total_);
            piece_ = 0;
            ++row_;
        }
    }

   private:
    static constexpr int64_t kPieceGroups = 2;  // pairs of groups whose weights are computed at once

    void begin_row() {
        const int64_t tile = row_ / kTileTokens, row = row_ % kTileTokens;
        scores_ = item_.scores[step_.turn] + tile * kSpanGroups;
        weights_ = item_.weights[step_.turn] + tile * kSpanSteps * kAttentionParts;
        lane_ = row;
        const Vec top = masked_ || cap_ > 0.0f ? prepare_scores() : largest();
        const float most = reduce_max(top);
        state_.max[step_.row + row_] = most;
        shift_ = broadcast(most < -3.0e38f ? 0.0f : most);
        total_ = zero();
    }

    Vec largest() const {
        Vec top[2] = {broadcast(kMinusInfinity), broadcast(kMinusInfinity)};
        for (int64_t g = step_.first; g < step_.last; g += 2)
            for (int i = 0; i < 2; ++i) top[i] = max(top[i], load(scores_[g + i].v[lane_]));
        return max(top[0], top[1]);
    }

    // Scores under the cap, those of positions that the row does not read minus infinity; returns the largest.
    Vec prepare_scores() const {
        const int64_t begin = item_.begin[step_.row + row_], end = item_.end[step_.row + row_];
        const uint16_t* const chosen = item_.chosen == nullptr ? nullptr : item_.chosen[step_.row + row_];
        Vec top = broadcast(kMinusInfinity);
        for (int64_t g = step_.first; g < step_.last; ++g) {
            float* const at = scores_[g].v[lane_];
            Vec score = load(at);
            if (cap_ > 0.0f) score = mul(tanh(score), broadcast(cap_));
            score = keep_bits(score, read_bits(base_ + g * kTileTokens, begin, end, chosen), kMinusInfinity);
            store(at, score);
            top = max(top, score);
        }
        return top;
    }

    void weigh(int64_t piece) {
        const int64_t first = step_.first + piece * 2 * kPieceGroups;
        const int64_t last = min_of(first + 2 * kPieceGroups, step_.last);
        const Vec shift = shift_;
        Vec total = total_;
        for (int64_t g = first; g < last; g += 2) {
            __m512 low = weight_of(sub(load(scores_[g].v[lane_]), shift));
            __m512 high = weight_of(sub(load(scores_[g + 1].v[lane_]), shift));
            total = add(add(total, low), high);
            LeftTile* const to = weights_ + g / 2 * kAttentionParts;
            for (int part = 0; part < kAttentionParts; ++part) _mm512_store_si512(to[part].w[lane_], take_part(low, high));
        }
        total_ = total;
    }

    const TileItem& item_;
    const State& state_;
    const RowStep step_;
    const int64_t base_;
    const float cap_;
    const bool masked_;
    const int64_t pieces_;
    int64_t done_ = 0, row_ = 0, piece_ = 0, lane_ = 0;
    SumTile* scores_ = nullptr;
    LeftTile* weights_ = nullptr;
    Vec shift_ = zero(), total_ = zero();
};

// Spreads a softening's slices over so many calls.
class Beside {
   public:
    Beside(Softening& work, int64_t calls) : work_(work), calls_(calls) {}
    void operator()() { work_.run_until(++call_ * work_.slices() / calls_); }

   private:
    Softening& work_;
    const int64_t calls_;
    int64_t call_ = 0;
};

// Scores of a step's rows with its groups.
inline void score_rows(const TileItem& item, const RowStep& step, Beside& beside) {
    const int64_t depth = item.sizes.depth, tile = kAttentionParts * depth;
    const LeftTile* const queries = item.queries + step.row / kTileTokens * tile;
    SumTile* const scores = item.scores[step.turn];
    Tiles tiles;
    for (int64_t g = step.first; g < step.last; g += 2) {
        const RightTile* const keys = item.keys + g * tile;
        add_products(tiles, {{queries, queries + tile}, {keys, keys + tile}, depth, 1, depth, 1, depth}, beside);
        tiles.store<0>(scores + g);
        tiles.store<1>(scores + g + 1);
        tiles.store<2>(scores + kSpanGroups + g);
        tiles.store<3>(scores + kSpanGroups + g + 1);
    }
}

// The rows' sums of weighted values over their groups.
inline void weigh_values(const TileItem& item, const State& state, const RowStep& step, Beside& beside) {
    const int64_t stride = item.sizes.stride, start = step.first / 2;
    const int64_t tile = kSpanSteps * kAttentionParts;
    const LeftTile* const weights = item.weights[step.turn] + start * kAttentionParts;
    Tiles tiles;
    for (int64_t v = 0; v < item.sizes.value_tiles(); v += 2) {
        const RightTile* const values = item.values + v * tile + start * kAttentionParts;
        add_products(tiles,
                     {{weights, weights + tile}, {values, values + tile}, step.count(), kAttentionParts, 1, kAttentionParts, 1},
                     beside);
        float* const to = state.acc + step.row * stride + v * kTileTokens;
        tiles.store_rows<0>(to, stride * 4);
        tiles.store_rows<1>(to + kTileTokens, stride * 4);
        tiles.store_rows<2>(to + kTileTokens * stride, stride * 4);
        tiles.store_rows<3>(to + kTileTokens * stride + kTileTokens, stride * 4);
    }
}

// The rows from `row` on, of which some see something of the span at `base`; without groups where none does.
inline RowStep step_at(const TileItem& item, int64_t base, int64_t row, int turn) {
    RowStep step{row, 0, 0, 0, INT64_MAX, turn};
    int64_t first = INT64_MAX, last = 0;
    for (int64_t r = row; r < row + kStepRows; ++r) {
        if (item.begin[r] >= item.end[r]) continue;
        first = min_of(first, item.begin[r]);
        last = max_of(last, item.end[r]);
        step.common_first = max_of(step.common_first, item.begin[r]);
        step.common_last = min_of(step.common_last, item.end[r]);
    }
    first = max_of(first - base, 0);
    last = min_of(last - base, kSpanTokens);
    if (first < last) {
        step.first = first / kTileColumns * 2;
        step.last = round_up(last, kTileColumns) / kTileTokens;
    }
    return step;
}

// The span that begins at `base`, for all rows of the item: beside the softmax of 32 rows, scores of the 32 behind them
// and values of the 32 before them are computed.
inline void attend_tiles(const AttentionJob& job, const TileItem& item, const State& state, int64_t base) {
    const float cap = job.softcap > 0.0f ? job.softcap * kLog2E : 0.0f;
    const int64_t depth = item.sizes.depth, value_pairs = item.sizes.value_tiles() / 2;
    RowStep scored{}, softened{}, weighed{};
    for (int64_t row = 0; row < item.sizes.rows + 2 * kStepRows; row += kStepRows) {
        weighed = softened;
        softened = scored;
        scored = row < item.sizes.rows ? step_at(item, base, row, softened.turn ^ 1) : RowStep{};
        Softening softening(item, state, softened, base, cap);
        Beside beside(softening, 3 * (scored.count() * depth + weighed.count() * value_pairs));
        score_rows(item, scored, beside);
        if (weighed.count() > 0) weigh_values(item, state, weighed, beside);
        softening.run_until(softening.slices());
        if (scored.count() == 0 && row < item.sizes.rows)
            __builtin_memset(state.acc + row * item.sizes.stride, 0, static_cast<size_t>(kStepRows * item.sizes.stride) * 4);
    }
}

void tile_attention(const AttentionJob& job, const AttentionItem& work, float* scratch) {
    Carver carver(scratch);
    TileItem item = carve_tiles(job, work.num_tokens, carver);
    if (job.expansion) load_head_tiles(job, work.slice, item.head);
    const TileSizes& sizes = item.sizes;
    load_row_tiles(job, work, item);
    Reach reach{INT64_MAX, 0};
    const int64_t rows = rows_of(job, work.num_tokens);
    for (int64_t r = 0; r < rows; ++r) {
        reach.first = min_of(reach.first, item.begin[r]);
        reach.last = max_of(reach.last, item.end[r]);
    }
    begin_tiles();
    for (int64_t s = 0; s < work.num_spans; ++s) {
        const int64_t start = (work.first_span + s) * kSpanTokens;
        const Reach part{max_of(reach.first, start), min_of(reach.last, start + kSpanTokens)};
        const State state = work.partial != nullptr ? state_at(sizes.rows, work.partial + s * sizes.state())
                            : s == 0                ? item.first
                                                    : item.next;
        clear(state, 0, sizes.rows, sizes.stride);
        if (part.first < part.last) pack_span(job, work, item, start, part);
        attend_tiles(job, item, state, start);
        if (work.partial == nullptr && s > 0) merge(item.first, state, rows, sizes.stride);
    }
    end_tiles();
    if (work.partial == nullptr) write_output(job, work, item.first, rows, sizes.stride);
}

void tile_attention_merge(const AttentionJob& job, const AttentionItem& work) {
    const TileSizes sizes(job, work.num_tokens);
    const int64_t rows = rows_of(job, work.num_tokens);
    const State first = state_at(sizes.rows, work.partial);
    for (int64_t s = 1; s < work.num_spans; ++s)
        merge(first, state_at(sizes.rows, work.partial + s * sizes.state()), rows, sizes.stride);
    write_output(job, work, first, rows, sizes.stride);
}

// Rows of 128 numbers fill a second-level cache of 2 MiB with all that they need. Fewer than some 128 rows would pay too
// much for the keys and values that they share.
constexpr AttentionKernels tile_attention_kernels = {1 << 17,    128,          tile_scratch,
                                                     tile_state, tile_attention, tile_attention_merge};

// Products of numbers that are each the sum of two bfloat16 numbers: of the four products of their parts, the one of both
// smaller parts is left out.

constexpr int kRowTiles = 2;  // left tiles that are multiplied together

// Gives out pieces of scratch, one after another and aligned as it is. Without memory it counts alone.
class Carver {
   public:
    explicit Carver(float* memory) : memory_(memory) {}
    template <typename T>
    T* take(int64_t count) {
        float* const at = memory_ == nullptr ? nullptr : memory_ + floats_;
        floats_ += round_up(count * static_cast<int64_t>(sizeof(T) / sizeof(float)), kWidth);
        return reinterpret_cast<T*>(at);
    }
    int64_t floats() const { return floats_; }

   private:
    float* const memory_;
    int64_t floats_ = 0;
};

// Row `pair` of a right tile and of the one with the smaller parts, `behind` tiles behind it.
inline void put_pair(RightTile* to, int64_t behind, int pair, __m512 even, __m512 odd) {
    const __m512i words = weave_words(to_bf16(even, odd)), upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    _mm512_store_si512(to->pair[pair], words);
    even = _mm512_sub_ps(even, _mm512_castsi512_ps(_mm512_slli_epi32(words, 16)));
    odd = _mm512_sub_ps(odd, _mm512_castsi512_ps(_mm512_and_si512(words, upper)));
    _mm512_store_si512(to[behind].pair[pair], weave_words(to_bf16(even, odd)));
}

// Keys of one group of sixteen positions; their values are fetched meanwhile.
template <class Source>
inline void pack_keys(const uint8_t* group, const uint8_t* values, int64_t dim, int64_t depth, RightTile* to) {
    constexpr int64_t kTileBytes = kTileColumns * Source::kVectorBytes;
    for (int64_t k = 0; k < depth; ++k) {
        if constexpr (Source::kFetchAhead) fetch_ahead<kTileBytes>(values + k * kTileBytes);
        const int64_t start = k * kTileColumns / Source::kStep * Source::kStep;
        const uint8_t* const step = group + start * Source::kVectorBytes;
        const Vec units = Source::units(step);
        const auto number = [&](int64_t d) { return d < dim ? Source::numbers(step, d - start, units) : zero(); };
        for (int pair = 0; pair < kTileColumns / 2; ++pair) {
            const int64_t d = k * kTileColumns + 2 * pair;
            put_pair(to + k, depth, pair, number(d), number(d + 1));
        }
    }
}

// Sums of both row tiles with two right tiles, over `count` steps: a step's tiles lie left_step and right_step further, a
// number's smaller part left_part and right_part behind the larger. `beside` is called between products, three times a step.
struct TileProduct {
    const LeftTile* left[kRowTiles];
    const RightTile* right[2];
    int64_t count, left_step, left_part, right_step, right_part;
};

template <class Beside>
inline __attribute__((always_inline)) void add_products(Tiles& tiles, const TileProduct& p, Beside&& beside) {
    tiles.zero<0>();
    tiles.zero<1>();
    tiles.zero<2>();
    tiles.zero<3>();
    for (int64_t i = 0; i < p.count; ++i) {
        const LeftTile* const left[] = {p.left[0] + i * p.left_step, p.left[1] + i * p.left_step};
        const RightTile* const right[] = {p.right[0] + i * p.right_step, p.right[1] + i * p.right_step};
        const auto add_all = [&tiles] {
            tiles.add_product<0, 4, 6>();
            tiles.add_product<1, 4, 7>();
            tiles.add_product<2, 5, 6>();
            tiles.add_product<3, 5, 7>();
        };
        tiles.load<4>(left[0]);
        tiles.load<5>(left[1]);
        tiles.load<6>(right[0] + p.right_part);
        tiles.load<7>(right[1] + p.right_part);
        add_all();
        beside();
        tiles.load<6>(right[0]);
        tiles.load<7>(right[1]);
        add_all();
        beside();
        tiles.load<4>(left[0] + p.left_part);
        tiles.load<5>(left[1] + p.left_part);
        add_all();
        beside();
    }
}

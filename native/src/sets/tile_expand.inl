// Keys and values of one head of latent attention on tiles, for a block of positions: floats in scratch, as
// attention_expand.inl makes them.

// One head's matrices as tiles, and room for a block's rows.
struct TileHead {
    int64_t latent, plain, rest;  // `rest`: numbers of a row behind the latent ones
    int64_t depth;                // tiles of the latent numbers
    int64_t key_strips, value_tiles;  // even numbers of them
    float key_scale, value_scale;
    LeftTile* keys;     // [key strips][kAttentionParts][depth]
    RightTile* values;  // [value tiles][kAttentionParts][depth]
    LeftTile* left;     // [kGroups][kAttentionParts][depth], positions as rows
    RightTile* right;   // [kGroups][kAttentionParts][depth], positions as columns
    float* rows;        // [kGroups][latent + rest][kWidth]
    float* decoded;     // up to 32 rows of a matrix

    explicit TileHead(const AttentionJob& job)
        : latent(job.cache.latent),
          plain(job.expansion->plain()),
          rest(job.cache.head_dim - job.cache.latent),
          depth(tiles_of(latent)),
          key_strips(round_up(plain, 2 * kTileTokens) / kTileTokens),
          value_tiles(round_up(job.value_dim(), 2 * kTileTokens) / kTileTokens) {}
    TileHead() = default;

    int64_t group_tiles() const { return kAttentionParts * depth; }
    float* group(int64_t g) const { return rows + g * (latent + rest) * kWidth; }
    int64_t key_stride() const { return kWidth * (key_strips * kTileTokens + rest); }
};

inline TileHead carve_head(const AttentionJob& job, Carver& carver) {
    TileHead head(job);
    head.keys = carver.take<LeftTile>(head.key_strips * head.group_tiles());
    head.values = carver.take<RightTile>(head.value_tiles * head.group_tiles());
    head.left = carver.take<LeftTile>(kGroups * head.group_tiles());
    head.right = carver.take<RightTile>(kGroups * head.group_tiles());
    head.rows = carver.take<float>(kKeyBlock * (head.latent + head.rest));
    head.decoded = carver.take<float>(kTileColumns * (head.key_strips * kTileTokens + head.latent));
    return head;
}

// A left tile whose rows are the columns of up to 32 rows of sixteen numbers, `stride` apart; missing ones are zero.
inline void pack_turned(const float* from, int64_t stride, int64_t count, LeftTile* to, int64_t behind) {
    alignas(64) float square[kTileTokens][kTileTokens], turned[2][kTileTokens][kTileTokens];
    for (int half = 0; half < 2; ++half) {
        for (int n = 0; n < kTileTokens; ++n) {
            const int64_t row = half * kTileTokens + n;
            store(square[n], row < count ? load(from + row * stride) : zero());
        }
        turn16(square, turned[half]);
    }
    for (int r = 0; r < kTileTokens; ++r) {
        __m512 low = load(turned[0][r]), high = load(turned[1][r]);
        for (int part = 0; part < kAttentionParts; ++part) _mm512_store_si512(to[part * behind].w[r], take_part(low, high));
    }
}

// Decodes a head's matrices.
inline void load_head_tiles(const AttentionJob& job, int64_t slice, TileHead& head) {
    const Weight keys = job.expansion->k_up[slice], values = job.expansion->v_up[slice];
    float* const scratch = head.decoded;
    head.key_scale = keys.scale;
    head.value_scale = values.scale;
    const int64_t width = head.key_strips * kTileTokens;
    __builtin_memset(scratch, 0, static_cast<size_t>(kTileColumns * width) * 4);
    for (int64_t k = 0; k < head.depth; ++k) {
        const int64_t first = k * kTileColumns, count = min_of(kTileColumns, head.latent - first);
        for (int64_t n = 0; n < count; ++n)
            job.expansion->decode_row(keys.type_id, keys.row(first + n), head.plain, scratch + n * width);
        for (int64_t strip = 0; strip < head.key_strips; ++strip)
            pack_turned(scratch + strip * kTileTokens, width, count, head.keys + strip * head.group_tiles() + k, head.depth);
    }
    for (int64_t tile = 0; tile < head.value_tiles; ++tile) {
        const int64_t first = tile * kTileTokens, count = max_of(0, min_of(kTileTokens, values.rows - first));
        const float* rows[kTileTokens];
        for (int64_t d = 0; d < count; ++d) {
            float* const row = scratch + d * head.latent;
            job.expansion->decode_row(values.type_id, values.row(first + d), head.latent, row);
            rows[d] = row;
        }
        pack_tokens(rows, static_cast<int>(count), head.latent, kAttentionParts, head.values + tile * head.group_tiles());
    }
}

// The block's rows as tiles, and as floats in head.rows: of a group's positions those within `reach`.
inline void pack_latent_rows(const AttentionJob& job, int64_t row_bytes, const KeyBlock& block, const Reach& reach,
                             const TileHead& head) {
    const Converters convert = converters_of(job.cache.type);
    for (int g = block.first_group; g < block.last_group; ++g) {
        const int64_t place = block.base + g * kWidth;
        float* const rows = head.group(g);
        latent_in_scratch(job, row_bytes, convert, 1, block.base, max_of(reach.first, place),
                          min_of(reach.last, place + kWidth), rows, nullptr);
        const auto* const bytes = reinterpret_cast<const uint8_t*>(rows);
        pack_keys<InScratch>(bytes, bytes, head.latent, head.depth, head.right + g * head.group_tiles());
        for (int64_t k = 0; k < head.depth; ++k)
            pack_turned(rows + k * kTileColumns * kWidth, kWidth, head.latent - k * kTileColumns,
                        head.left + g * head.group_tiles() + k, head.depth);
    }
}

// The keys and values of one head for a block, made of a latent cache's rows. Groups are made two by two: what nobody
// sees of them is made of whatever their tiles hold.
inline KeyBlock expand_on_tiles(const AttentionJob& job, int64_t row_bytes, int64_t base, const Reach& reach,
                                const TileHead& head, const BlockMemory& memory) {
    KeyBlock b = empty_block(base, reach);
    pack_latent_rows(job, row_bytes, b, reach, head);
    const int64_t group = head.group_tiles(), depth = head.depth, stride = head.key_stride();
    const auto alone = [] {};
    Tiles tiles;
    for (int64_t g = b.first_group / 2 * 2; g < b.last_group; g += 2) {
        const RightTile* const right = head.right + g * group;
        for (int64_t strip = 0; strip < head.key_strips; strip += 2) {
            const LeftTile* const left = head.keys + strip * group;
            add_products(tiles, {{left, left + group}, {right, right + group}, depth, 1, depth, 1, depth}, alone);
            float* const to = memory.keys + g * stride + strip * kTileTokens * kWidth;
            tiles.store<0>(to);
            tiles.store<1>(to + stride);
            tiles.store<2>(to + kTileTokens * kWidth);
            tiles.store<3>(to + stride + kTileTokens * kWidth);
        }
        const LeftTile* const left = head.left + g * group;
        for (int64_t tile = 0; tile < head.value_tiles; tile += 2) {
            const RightTile* const matrix = head.values + tile * group;
            add_products(tiles, {{left, left + group}, {matrix, matrix + group}, depth, 1, depth, 1, depth}, alone);
            float* const to = memory.values + (tile * kKeyBlock + g * kTileTokens) * kWidth;
            tiles.store<0>(to);
            tiles.store<1>(to + kKeyBlock * kWidth);
            tiles.store<2>(to + kTileTokens * kWidth);
            tiles.store<3>(to + (kKeyBlock + kTileTokens) * kWidth);
        }
    }
    for (int g = b.first_group; g < b.last_group; ++g) {
        float* const keys = memory.keys + g * stride;
        scale_vectors(head.key_scale, head.plain, keys);
        __builtin_memcpy(keys + head.plain * kWidth, head.group(g) + head.latent * kWidth,
                         static_cast<size_t>(head.rest * kWidth) * 4);
        b.keys[g] = reinterpret_cast<const uint8_t*>(keys);
        b.values[g] = reinterpret_cast<const uint8_t*>(memory.values);
    }
    scale_vectors(head.value_scale, head.value_tiles * kKeyBlock, memory.values);
    return b;
}

// Weight rows into panels, for any type: rows are unpacked one by one, then transposed.

struct alignas(64) UnpackedStrip {
    uint8_t q[kStripRows][kSpan];
    float scale[kStripRows][kMaxGroups];
    float minimum[kStripRows][kMaxGroups];
};

// Asks for `Lines` lines from `at` on, and returns where they end.
template <int Lines>
inline const uint8_t* ask_for_lines(const uint8_t* at, bool nearest) {
    if (nearest) {
#pragma GCC unroll 32
        for (int i = 0; i < Lines; ++i) __builtin_prefetch(at + 64 * i, 0, 0);
    } else {
#pragma GCC unroll 32
        for (int i = 0; i < Lines; ++i) __builtin_prefetch(at + 64 * i, 0, 2);
    }
    return at + 64 * Lines;
}

void pack_any(int type_id, const PackSource& from, int group, int strip, QuantPanel& panel) {
    const int64_t count = from.count;
    UnpackInfo info{};
    unpack_info(type_id, info);
    const UnpackFn unpack = find_unpack(type_id);
    UnpackedStrip rest;
    for (int r = 0; r < from.rows; ++r) {
        unpack(from.src + r * from.row_bytes, count, rest.q[r], rest.scale[r], rest.minimum[r]);
    }
    for (int r = from.rows; r < kStripRows; ++r) {  // a scale of zero makes a missing row's product zero
        __builtin_memset(rest.q[r], 0, sizeof rest.q[r]);
        __builtin_memset(rest.scale[r], 0, sizeof rest.scale[r]);
        __builtin_memset(rest.minimum[r], 0, sizeof rest.minimum[r]);
    }
    for (int64_t k = 0; k < count; k += 16)
        transpose16(&rest.q[0][k], kSpan, &panel.q[strip][k / 4][0][0]);
    const int step = group / kGroupMin;
    alignas(64) float turned[kMaxGroups][kStripRows];
    for (int which = 0; which < (info.has_minimum ? 2 : 1); ++which) {
        const float* from = which == 0 ? rest.scale[0] : rest.minimum[0];
        float(*to)[kStripRows] = which == 0 ? panel.scale[strip] : panel.minimum[strip];
        turn16(from, turned);
        for (int g = 0; g < count / group; ++g) store_floats(to[g], load_floats(turned[g * step]));
    }
}

inline float half_to_float(uint16_t h) {
    constexpr uint32_t kExponent = 0x7c00u << 13;
    uint32_t bits = static_cast<uint32_t>(h & 0x7fffu) << 13;
    const uint32_t exponent = bits & kExponent;
    bits += (127u - 15u) << 23;
    const uint32_t infinite = bits + ((128u - 16u) << 23);
    const float tiny = __builtin_bit_cast(float, bits + (1u << 23)) - __builtin_bit_cast(float, 113u << 23);
    bits = exponent == kExponent ? infinite : bits;
    bits = exponent == 0 ? __builtin_bit_cast(uint32_t, tiny) : bits;
    return __builtin_bit_cast(float, bits | (static_cast<uint32_t>(h & 0x8000u) << 16));
}

// F32, F16 and BF16 to float32.
void decode_plain(int type_id, const uint8_t* src, int64_t count, float* out) {
    if (type_id == kF32) {
        __builtin_memcpy(out, src, static_cast<size_t>(count) * 4);
        return;
    }
    for (int64_t i = 0; i < count; ++i) {
        uint16_t bits;
        __builtin_memcpy(&bits, src + 2 * i, 2);
        out[i] = type_id == kF16 ? half_to_float(bits)
                                 : __builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16);
    }
}

void pack_float(int type_id, const PackSource& from, int strip, FloatPanel& panel) {
    const int64_t count = from.count;
    alignas(64) float flat[kStripRows][kSpan];
    for (int r = 0; r < kStripRows; ++r) {
        if (r < from.rows) decode_plain(type_id, from.src + r * from.row_bytes, count, flat[r]);
        const int64_t filled = r < from.rows ? count : 0;
        __builtin_memset(&flat[r][filled], 0, static_cast<size_t>(kSpan - filled) * 4);
    }
    for (int64_t k = 0; k < count; k += 4)
        transpose16(reinterpret_cast<const uint8_t*>(&flat[0][k]), sizeof flat[0],
                    reinterpret_cast<uint8_t*>(panel.w[strip][k]));
}

void decode_row(int type_id, const uint8_t* src, int64_t cols, float* out) {
    UnpackInfo info{};
    if (!unpack_info(type_id, info)) {
        decode_plain(type_id, src, cols, out);
        return;
    }
    const UnpackFn unpack = find_unpack(type_id);
    FormatInfo format{};
    format_info(type_id, format);
    alignas(64) uint8_t q[kSpan];
    float scale[kMaxGroups], minimum[kMaxGroups];
    for (int64_t start = 0; start < cols; start += kSpan) {
        const int64_t count = cols - start < kSpan ? cols - start : kSpan;
        unpack(src + start / format.block_elements * format.block_bytes, count, q, scale, minimum);
        for (int64_t k = 0; k < count; ++k) {
            const float value = scale[k / 16] * static_cast<float>(static_cast<int>(q[k]) - info.offset);
            out[start + k] = info.has_minimum ? value - minimum[k / 16] : value;
        }
    }
}

#if !defined(__AVX2__)
void pack(int type_id, const PackSource& from, int group, int strip, QuantPanel& panel) {
    pack_any(type_id, from, group, strip, panel);
}
#endif

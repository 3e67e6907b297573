// Matrix tiles and bfloat16 conversion in hardware.
//
// The tile instructions are written as assembly: GCC's intrinsics take the register as a literal, and those
// of version 12 do not tell the compiler that they read and write memory.

// Two floats' worth of bfloat16, rounded to nearest even: words 0..15 from `low`, 16..31 from `high`.
// Subnormal numbers become zero.
inline __m512i to_bf16(__m512 low, __m512 high) {
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
}

// Byte i of the result is the byte of `bytes` that the low six bits of byte i of `index` name.
inline __m512i pick_bytes(__m512i index, __m512i bytes) { return _mm512_permutexvar_epi8(index, bytes); }

// The same of 128 bytes, by the low seven bits.
inline __m512i pick_of_two(__m512i index, __m512i first, __m512i second) {
    return _mm512_permutex2var_epi8(first, index, second);
}

// As `pick_bytes` for byte 2 of every 32 bits; the others are those of `rest`.
inline __m512i pick_third_bytes(__m512i rest, __m512i index, __m512i bytes) {
    return _mm512_mask_permutexvar_epi8(rest, 0x4444444444444444u, index, bytes);
}

// The eight tile registers of this thread, each 16 rows of 64 bytes.
struct Tiles {
    template <int Register>
    void zero() {
        asm volatile("tilezero %%tmm%c0" ::"i"(Register));
    }
    // Rows are 64 bytes apart.
    template <int Register>
    void load(const void* from) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(64L), "i"(Register) : "memory");
    }
    template <int Register>
    void store(void* to) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(64L), "i"(Register) : "memory");
    }
    // The same, rows so many bytes apart.
    template <int Register>
    void store_rows(void* to, int64_t stride) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(Register) : "memory");
    }
    // Sums[row][token] += Left[row][32 columns] . Right[32 columns][token]
    template <int Sums, int Left, int Right>
    void add_product() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(Left), "i"(Right));
    }
};

// What ldtilecfg reads.
struct alignas(64) TileShapes {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
constexpr TileShapes kShapes;

void begin_tiles() { asm volatile("ldtilecfg %0" ::"m"(kShapes)); }
void end_tiles() { asm volatile("tilerelease" :::); }

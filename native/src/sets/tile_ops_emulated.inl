// The operations of tile_ops.inl written out as the processor's manual defines them.

inline __m512i bf16_of(__m512 x) {  // in the low half of each of 16 words of 32 bits
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), even);
    constexpr int kQuietNan = 0x01, kSignallingNan = 0x80, kSubnormal = 0x20;
    const __mmask16 nan = _mm512_fpclass_ps_mask(x, kQuietNan | kSignallingNan);
    const __mmask16 tiny = _mm512_fpclass_ps_mask(x, kSubnormal);
    __m512i r = _mm512_mask_or_epi32(up, nan, bits, _mm512_set1_epi32(0x400000));
    r = _mm512_mask_and_epi32(r, tiny, bits, _mm512_set1_epi32(INT32_MIN));
    return _mm512_srli_epi32(r, 16);
}

inline __m512i to_bf16(__m512 low, __m512 high) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(bf16_of(low))),
                              _mm512_cvtepi32_epi16(bf16_of(high)), 1);
}

inline __m512i pick_bytes(__m512i index, __m512i bytes) {
    alignas(64) uint8_t places[64], from[64], to[64];
    _mm512_store_si512(places, index);
    _mm512_store_si512(from, bytes);
    for (int i = 0; i < 64; ++i) to[i] = from[places[i] & 63];
    return _mm512_load_si512(to);
}

inline __m512i pick_of_two(__m512i index, __m512i first, __m512i second) {
    alignas(64) uint8_t places[64], from[128], to[64];
    _mm512_store_si512(places, index);
    _mm512_store_si512(from, first);
    _mm512_store_si512(from + 64, second);
    for (int i = 0; i < 64; ++i) to[i] = from[places[i] & 127];
    return _mm512_load_si512(to);
}

inline __m512i pick_third_bytes(__m512i rest, __m512i index, __m512i bytes) {
    return _mm512_mask_mov_epi8(rest, 0x4444444444444444u, pick_bytes(index, bytes));
}

class Tiles {
   public:
    template <int Register>
    void zero() {
        __builtin_memset(rows_[Register], 0, sizeof rows_[Register]);
    }
    template <int Register>
    void load(const void* from) {
        __builtin_memcpy(rows_[Register], from, sizeof rows_[Register]);
    }
    template <int Register>
    void store(void* to) {
        __builtin_memcpy(to, rows_[Register], sizeof rows_[Register]);
    }
    template <int Register>
    void store_rows(void* to, int64_t stride) {
        for (int row = 0; row < 16; ++row)
            __builtin_memcpy(static_cast<char*>(to) + row * stride, rows_[Register][row], sizeof rows_[Register][row]);
    }
    // Even and odd columns are added up apart, each in the order of the columns, then joined, then added.
    // Sums are rounded to nearest even, subnormal numbers are zeros on the way in and out, nothing traps. The
    // barriers keep the arithmetic, all of it on memory, between the two changes of the mode.
    template <int Sums, int Left, int Right>
    void add_product() {
        constexpr unsigned kMaskAll = 0x1f80, kZeroOut = 0x8000, kZeroIn = 0x0040;
        const unsigned before = _mm_getcsr();
        _mm_setcsr(kMaskAll | kZeroOut | kZeroIn);
        asm volatile("" ::: "memory");
        const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
        for (int m = 0; m < 16; ++m) {
            __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
            for (int k = 0; k < 16; ++k) {
                const __m512i b = _mm512_load_si512(rows_[Right][k]);
                const __m512i a = _mm512_set1_epi32(static_cast<int>(rows_[Left][m][k]));
                even = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)),
                                       _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), even);
                odd = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a, high)),
                                      _mm512_castsi512_ps(_mm512_and_si512(b, high)), odd);
            }
            void* c = rows_[Sums][m];
            _mm512_store_ps(c, _mm512_add_ps(_mm512_load_ps(c), _mm512_add_ps(even, odd)));
        }
        asm volatile("" ::: "memory");
        _mm_setcsr(before);
    }

   private:
    alignas(64) uint32_t rows_[8][16][16];
};

void begin_tiles() {}
void end_tiles() {}

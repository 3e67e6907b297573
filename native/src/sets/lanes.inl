// Sixteen lanes, one per row of a strip: 32-bit sums of four-byte products, and floats.
// Each instruction set has its own spelling of the same operations.
#if defined(__AVX512F__)

struct Floats { __m512 v; };
struct Ints { __m512i v; };

// Products per call that keep the registers full: tokens times strips.
constexpr int kTokenBlock = 6;
constexpr int kStripBlock = 2;
// Eight-bit weights are multiplied as they lie, unsigned.
constexpr int kEightBitShift = 0;

inline Floats zero_floats() { return {_mm512_setzero_ps()}; }
inline Floats set_floats(float x) { return {_mm512_set1_ps(x)}; }
inline Floats load_floats(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store_floats(float* p, Floats a) { _mm512_storeu_ps(p, a.v); }
inline Floats multiply(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Floats add(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Floats subtract(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Floats add_product(Floats sum, Floats a, Floats b) { return {_mm512_fmadd_ps(a.v, b.v, sum.v)}; }
inline Floats subtract_product(Floats sum, Floats a, Floats b) {
    return {_mm512_fnmadd_ps(a.v, b.v, sum.v)};
}
inline Floats larger_magnitude(Floats a, Floats b) {
    return {_mm512_max_ps(_mm512_abs_ps(a.v), _mm512_abs_ps(b.v))};
}
inline Floats divide(Floats a, Floats b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Floats where_less(Floats a, Floats b, Floats yes, Floats no) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}
inline Floats to_floats(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline Ints add(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline void store_ints(int32_t* p, Ints a) { _mm512_storeu_si512(p, a.v); }
inline Ints set_ints(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline Ints round_to_ints(Floats a) { return {_mm512_cvtps_epi32(a.v)}; }
inline Floats round_to_whole(Floats a) {
    return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline float total(Floats a) { return _mm512_reduce_add_ps(a.v); }
inline void store_bytes(int8_t* p, Ints a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
}

using Bytes = __m512i;  // [16 rows][4 columns]
inline Bytes load_bytes(const uint8_t* p) { return _mm512_load_si512(p); }
template <bool SevenBits>
inline Ints add_dot4(Ints sum, Bytes weights, int32_t four_activations) {
    return {_mm512_dpbusd_epi32(sum.v, weights, _mm512_set1_epi32(four_activations))};
}

#elif defined(__AVX2__)

struct Floats { __m256 lo, hi; };
struct Ints { __m256i lo, hi; };

// Sixteen registers: one more token would spill sums inside of the loop.
#if defined(__AVXVNNI__)
constexpr int kTokenBlock = 4;
#else
constexpr int kTokenBlock = 3;
#endif
constexpr int kStripBlock = 1;

inline Floats zero_floats() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Floats set_floats(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats load_floats(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store_floats(float* p, Floats a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}
inline Floats multiply(Floats a, Floats b) {
    return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
inline Floats add(Floats a, Floats b) {
    return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
inline Floats subtract(Floats a, Floats b) {
    return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
inline Floats add_product(Floats sum, Floats a, Floats b) {
    return {_mm256_fmadd_ps(a.lo, b.lo, sum.lo), _mm256_fmadd_ps(a.hi, b.hi, sum.hi)};
}
inline Floats subtract_product(Floats sum, Floats a, Floats b) {
    return {_mm256_fnmadd_ps(a.lo, b.lo, sum.lo), _mm256_fnmadd_ps(a.hi, b.hi, sum.hi)};
}
inline Floats larger_magnitude(Floats a, Floats b) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_max_ps(_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, b.lo)),
            _mm256_max_ps(_mm256_andnot_ps(sign, a.hi), _mm256_andnot_ps(sign, b.hi))};
}
inline Floats divide(Floats a, Floats b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline Floats where_less(Floats a, Floats b, Floats yes, Floats no) {
    return {_mm256_blendv_ps(no.lo, yes.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
            _mm256_blendv_ps(no.hi, yes.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ))};
}
inline Floats to_floats(Ints a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline Ints add(Ints a, Ints b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline void store_ints(int32_t* p, Ints a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.lo);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), a.hi);
}
inline Ints set_ints(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Ints round_to_ints(Floats a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
inline Floats round_to_whole(Floats a) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(a.lo, kNearest), _mm256_round_ps(a.hi, kNearest)};
}
inline float total(Floats a) {
    __m256 m = _mm256_add_ps(a.lo, a.hi);
    __m128 n = _mm_add_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
    n = _mm_add_ps(n, _mm_movehl_ps(n, n));
    return _mm_cvtss_f32(_mm_add_ss(n, _mm_shuffle_ps(n, n, 1)));
}
inline void store_bytes(int8_t* p, Ints a) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xd8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

struct Bytes { __m256i lo, hi; };
inline Bytes load_bytes(const uint8_t* p) {
    return {_mm256_load_si256(reinterpret_cast<const __m256i*>(p)),
            _mm256_load_si256(reinterpret_cast<const __m256i*>(p + 32))};
}

#if defined(__AVXVNNI__)
constexpr int kEightBitShift = 0;
template <bool SevenBits>
inline Ints add_dot4(Ints sum, const Bytes& weights, int32_t four_activations) {
    const __m256i a = _mm256_set1_epi32(four_activations);
    return {_mm256_dpbusd_avx_epi32(sum.lo, weights.lo, a), _mm256_dpbusd_avx_epi32(sum.hi, weights.hi, a)};
}
#else
// Pairs of products are added in 16 bits, which holds for weights of seven bits. Eight-bit weights are
// taken as signed (q - 128): magnitude times signed activation stays below 2 * 128 * 127 < 2^15.
constexpr int kEightBitShift = 128;
template <bool SevenBits>
inline __m256i dot4(__m256i sum, __m256i weights, __m256i a) {
    if constexpr (!SevenBits) {
        const __m256i centred = _mm256_xor_si256(weights, _mm256_set1_epi8(-128));
        a = _mm256_sign_epi8(a, centred);
        weights = _mm256_abs_epi8(centred);
    }
    const __m256i pairs = _mm256_maddubs_epi16(weights, a);
    __m256i added = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    // Keeps the compiler from collecting the terms of a whole group first, on the stack: 3 times slower.
    asm("" : "+x"(added));
    return added;
}
template <bool SevenBits>
inline Ints add_dot4(Ints sum, const Bytes& weights, int32_t four_activations) {
    const __m256i a = _mm256_set1_epi32(four_activations);
    return {dot4<SevenBits>(sum.lo, weights.lo, a), dot4<SevenBits>(sum.hi, weights.hi, a)};
}

// Sums of 16 bits hold so many pairs of products of weights up to `largest`, and are widened once for all of them.
// Two pairs of six bits would fit as well: slower, since sums of 16 and of 32 bits do not find room beside each other.
#define THERMOCLINE_NARROW_SUMS
constexpr int pairs_in_16_bits(int largest) { return largest <= 16 ? 8 : largest <= 32 ? 4 : largest <= 127 ? 1 : 0; }
static_assert(8 * 2 * 16 * 127 < 1 << 15 && 2 * 127 * 127 < 1 << 15);

struct NarrowSums { __m256i lo, hi; };
inline NarrowSums pair_products(const Bytes& weights, int32_t four_activations) {
    const __m256i a = _mm256_set1_epi32(four_activations);
    return {_mm256_maddubs_epi16(weights.lo, a), _mm256_maddubs_epi16(weights.hi, a)};
}
inline NarrowSums add(NarrowSums a, NarrowSums b) {
    NarrowSums sum{_mm256_add_epi16(a.lo, b.lo), _mm256_add_epi16(a.hi, b.hi)};
    asm("" : "+x"(sum.lo), "+x"(sum.hi));  // as in dot4
    return sum;
}
inline Ints add(Ints a, NarrowSums b) {
    const __m256i one = _mm256_set1_epi16(1);
    return {_mm256_add_epi32(a.lo, _mm256_madd_epi16(b.lo, one)), _mm256_add_epi32(a.hi, _mm256_madd_epi16(b.hi, one))};
}
#endif

#elif defined(__ARM_NEON) && defined(__ARM_FEATURE_DOTPROD)

struct Floats { float32x4_t v[4]; };
struct Ints { int32x4_t v[4]; };

constexpr int kTokenBlock = 4;
constexpr int kStripBlock = 1;
// The dot product is of signed bytes: eight-bit weights are centred first.
constexpr int kEightBitShift = 128;

#define THERMOCLINE_EACH4(expression) \
    { (expression)(0), (expression)(1), (expression)(2), (expression)(3) }

inline Floats set_floats(float x) { const float32x4_t v = vdupq_n_f32(x); return {{v, v, v, v}}; }
inline Floats zero_floats() { return set_floats(0.0f); }
inline Floats load_floats(const float* p) {
    return {{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}};
}
inline void store_floats(float* p, const Floats& a) {
    for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.v[i]);
}
inline Floats multiply(const Floats& a, const Floats& b) {
    return {THERMOCLINE_EACH4([&](int i) { return vmulq_f32(a.v[i], b.v[i]); })};
}
inline Floats add(const Floats& a, const Floats& b) {
    return {THERMOCLINE_EACH4([&](int i) { return vaddq_f32(a.v[i], b.v[i]); })};
}
inline Floats subtract(const Floats& a, const Floats& b) {
    return {THERMOCLINE_EACH4([&](int i) { return vsubq_f32(a.v[i], b.v[i]); })};
}
inline Floats add_product(const Floats& sum, const Floats& a, const Floats& b) {
    return {THERMOCLINE_EACH4([&](int i) { return vfmaq_f32(sum.v[i], a.v[i], b.v[i]); })};
}
inline Floats subtract_product(const Floats& sum, const Floats& a, const Floats& b) {
    return {THERMOCLINE_EACH4([&](int i) { return vfmsq_f32(sum.v[i], a.v[i], b.v[i]); })};
}
inline Floats larger_magnitude(const Floats& a, const Floats& b) {
    return {THERMOCLINE_EACH4([&](int i) { return vmaxq_f32(vabsq_f32(a.v[i]), vabsq_f32(b.v[i])); })};
}
inline Floats divide(const Floats& a, const Floats& b) {
    return {THERMOCLINE_EACH4([&](int i) { return vdivq_f32(a.v[i], b.v[i]); })};
}
inline Floats where_less(const Floats& a, const Floats& b, const Floats& yes, const Floats& no) {
    return {THERMOCLINE_EACH4([&](int i) { return vbslq_f32(vcltq_f32(a.v[i], b.v[i]), yes.v[i], no.v[i]); })};
}
inline Ints add(const Ints& a, const Ints& b) {
    return {THERMOCLINE_EACH4([&](int i) { return vaddq_s32(a.v[i], b.v[i]); })};
}
inline void store_ints(int32_t* p, const Ints& a) {
    for (int i = 0; i < 4; ++i) vst1q_s32(p + 4 * i, a.v[i]);
}
inline Floats to_floats(const Ints& a) {
    return {THERMOCLINE_EACH4([&](int i) { return vcvtq_f32_s32(a.v[i]); })};
}
inline Ints set_ints(int32_t x) { const int32x4_t v = vdupq_n_s32(x); return {{v, v, v, v}}; }
inline Ints round_to_ints(const Floats& a) {
    return {THERMOCLINE_EACH4([&](int i) { return vcvtnq_s32_f32(a.v[i]); })};
}
inline Floats round_to_whole(const Floats& a) {
    return {THERMOCLINE_EACH4([&](int i) { return vrndnq_f32(a.v[i]); })};
}
inline float total(const Floats& a) {  // folded 8, 4, 2, 1, as everywhere
    const float32x4_t four = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
inline void store_bytes(int8_t* p, const Ints& a) {
    const int16x8_t lo = vcombine_s16(vmovn_s32(a.v[0]), vmovn_s32(a.v[1]));
    const int16x8_t hi = vcombine_s16(vmovn_s32(a.v[2]), vmovn_s32(a.v[3]));
    vst1q_s8(p, vcombine_s8(vmovn_s16(lo), vmovn_s16(hi)));
}

struct Bytes { uint8x16_t v[4]; };
inline Bytes load_bytes(const uint8_t* p) {
    return {{vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)}};
}
template <bool SevenBits>
inline Ints add_dot4(Ints sum, const Bytes& weights, int32_t four_activations) {
    const int8x16_t a = vreinterpretq_s8_s32(vdupq_n_s32(four_activations));
    for (int i = 0; i < 4; ++i) {
        uint8x16_t w = weights.v[i];
        if constexpr (!SevenBits) w = veorq_u8(w, vdupq_n_u8(128));
        sum.v[i] = vdotq_s32(sum.v[i], vreinterpretq_s8_u8(w), a);
    }
    return sum;
}
#undef THERMOCLINE_EACH4

#else  // any other machine: plain loops, which the compiler may vectorise

struct alignas(16) Floats { float v[16]; };
struct alignas(16) Ints { int32_t v[16]; };

constexpr int kTokenBlock = 1;
constexpr int kStripBlock = 1;
constexpr int kEightBitShift = 0;

template <typename R, typename Lane>
inline R each(Lane lane) {
    R r;
    for (int i = 0; i < 16; ++i) r.v[i] = lane(i);
    return r;
}
inline Floats set_floats(float x) { return each<Floats>([&](int) { return x; }); }
inline Floats zero_floats() { return set_floats(0.0f); }
inline Floats load_floats(const float* p) { return each<Floats>([&](int i) { return p[i]; }); }
inline void store_floats(float* p, const Floats& a) { __builtin_memcpy(p, a.v, sizeof a.v); }
inline Floats multiply(const Floats& a, const Floats& b) {
    return each<Floats>([&](int i) { return a.v[i] * b.v[i]; });
}
inline Floats add(const Floats& a, const Floats& b) {
    return each<Floats>([&](int i) { return a.v[i] + b.v[i]; });
}
inline Floats subtract(const Floats& a, const Floats& b) {
    return each<Floats>([&](int i) { return a.v[i] - b.v[i]; });
}
inline Floats add_product(const Floats& sum, const Floats& a, const Floats& b) {
    return each<Floats>([&](int i) { return sum.v[i] + a.v[i] * b.v[i]; });
}
inline Floats subtract_product(const Floats& sum, const Floats& a, const Floats& b) {
    return each<Floats>([&](int i) { return sum.v[i] - a.v[i] * b.v[i]; });
}
inline Floats larger_magnitude(const Floats& a, const Floats& b) {
    return each<Floats>([&](int i) {
        const float x = __builtin_fabsf(a.v[i]), y = __builtin_fabsf(b.v[i]);
        return x > y ? x : y;
    });
}
inline Floats divide(const Floats& a, const Floats& b) {
    return each<Floats>([&](int i) { return a.v[i] / b.v[i]; });
}
inline Floats where_less(const Floats& a, const Floats& b, const Floats& yes, const Floats& no) {
    return each<Floats>([&](int i) { return a.v[i] < b.v[i] ? yes.v[i] : no.v[i]; });
}
inline Ints add(const Ints& a, const Ints& b) {
    return each<Ints>([&](int i) { return a.v[i] + b.v[i]; });
}
inline void store_ints(int32_t* p, const Ints& a) { __builtin_memcpy(p, a.v, sizeof a.v); }
inline Floats to_floats(const Ints& a) {
    return each<Floats>([&](int i) { return static_cast<float>(a.v[i]); });
}
inline Ints set_ints(int32_t x) { return each<Ints>([&](int) { return x; }); }
inline Ints round_to_ints(const Floats& a) {
    // Adding 1.5 * 2^23 rounds to the nearest even integer; |a| < 2^22.
    return each<Ints>([&](int i) {
        volatile float shifted = a.v[i] + 12582912.0f;
        return static_cast<int32_t>(shifted - 12582912.0f);
    });
}
inline Floats round_to_whole(const Floats& a) { return to_floats(round_to_ints(a)); }
inline float total(const Floats& a) {
    float s[8];
    for (int i = 0; i < 8; ++i) s[i] = a.v[i] + a.v[i + 8];
    for (int width = 4; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) s[i] += s[i + width];
    return s[0];
}
inline void store_bytes(int8_t* p, const Ints& a) {
    for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(a.v[i]);
}

struct Bytes { const uint8_t* p; };
inline Bytes load_bytes(const uint8_t* p) { return {p}; }
#if defined(__SSE2__)
// Even and odd columns as 16-bit pairs, which one instruction multiplies and adds.
template <bool SevenBits>
inline Ints add_dot4(const Ints& sum, Bytes weights, int32_t four_activations) {
    const __m128i low = _mm_set1_epi16(0xff), a = _mm_set1_epi32(four_activations);
    const __m128i even = _mm_srai_epi16(_mm_slli_epi16(a, 8), 8), odd = _mm_srai_epi16(a, 8);
    Ints r;
    for (int i = 0; i < 4; ++i) {
        const __m128i w = _mm_load_si128(reinterpret_cast<const __m128i*>(weights.p) + i);
        const __m128i products = _mm_add_epi32(_mm_madd_epi16(_mm_and_si128(w, low), even),
                                               _mm_madd_epi16(_mm_srli_epi16(w, 8), odd));
        const auto* before = reinterpret_cast<const __m128i*>(sum.v) + i;
        _mm_storeu_si128(reinterpret_cast<__m128i*>(r.v) + i, _mm_add_epi32(_mm_loadu_si128(before), products));
    }
    return r;
}
#else
template <bool SevenBits>
inline Ints add_dot4(const Ints& sum, Bytes weights, int32_t four_activations) {
    int8_t a[4];
    __builtin_memcpy(a, &four_activations, 4);
    return each<Ints>([&](int i) {
        const uint8_t* w = weights.p + 4 * i;
        return sum.v[i] + w[0] * a[0] + w[1] * a[1] + w[2] * a[2] + w[3] * a[3];
    });
}
#endif

#endif

// Activations to int8, one scale per group.

// Divisors of a group's largest magnitude that are tried; the one with the least squared error is kept.
// Against the usual 127 alone the error falls by a tenth (a product of three matrices: 0.0104 -> 0.0094),
// for a few microseconds per token.
constexpr int kSteps[] = {127, 125, 123, 121};

template <int Vectors>
void quantize_group(const float* x, int8_t* a, float& scale, int32_t& sum) {
    Floats v[Vectors];
    Floats magnitude = zero_floats();
    Floats check = zero_floats();
    for (int i = 0; i < Vectors; ++i) {
        v[i] = load_floats(x + 16 * i);
        magnitude = larger_magnitude(magnitude, v[i]);
        check = add_product(check, v[i], zero_floats());  // NaN when any of them is not finite
    }
    const float top = largest(magnitude);
    // 1e-30: below it the reciprocal would overflow, and nothing that follows could tell it from zero.
    if (!(top >= 1e-30f) || total(check) != 0.0f) {
        scale = total(check) == 0.0f ? 0.0f : __builtin_nanf("");
        sum = 0;
        __builtin_memset(a, 0, 16 * Vectors);
        return;
    }
    float least = 0.0f;
    int best = 0;
    for (int step : kSteps) {
        const Floats up = set_floats(static_cast<float>(step) / top);
        const Floats down = set_floats(top / static_cast<float>(step));
        Floats error = zero_floats();
        for (int i = 0; i < Vectors; ++i) {
            // Not fused: every instruction set must find the same errors, or near ties would be decided
            // differently and the same token would be rounded in two ways.
            const Floats off = subtract(v[i], multiply(to_floats(round_to_ints(multiply(v[i], up))), down));
            error = add(error, multiply(off, off));
        }
        const float found = total(error);
        if (best == 0 || found < least) {
            least = found;
            best = step;
        }
    }
    const Floats up = set_floats(static_cast<float>(best) / top);
    sum = 0;
    for (int i = 0; i < Vectors; ++i) {
        const Ints rounded = round_to_ints(multiply(v[i], up));
        store_bytes(a + 16 * i, rounded);
        sum += total(rounded);
    }
    scale = top / static_cast<float>(best);
}

void quantize(const float* x, int64_t cols, const QuantForm& form, const ActivationLayout& layout,
              uint8_t* out) {
    const int offset = form.offset - (form.seven_bits ? 0 : kEightBitShift);
    for (int64_t g = 0; g < cols / form.group; ++g) {
        float scale;
        int32_t sum;
        auto* a = reinterpret_cast<int8_t*>(out) + g * form.group;
        if (form.group == 32)
            quantize_group<2>(x + g * 32, a, scale, sum);
        else
            quantize_group<1>(x + g * 16, a, scale, sum);
        const int32_t start = -offset * sum;
        __builtin_memcpy(out + layout.scale + 4 * g, &scale, 4);
        __builtin_memcpy(out + layout.start + 4 * g, &start, 4);
        if (form.has_minimum) {
            const float scaled = scale * static_cast<float>(sum);
            __builtin_memcpy(out + layout.sum + 4 * g, &scaled, 4);
        }
    }
}

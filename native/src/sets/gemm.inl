// Products of a panel with tokens: lanes are rows, each lane adds over the columns in order.

#if !defined(THERMOCLINE_NARROW_SUMS)
// Whether a weight fits seven bits, where that matters.
constexpr int pairs_in_16_bits(int largest) { return kEightBitShift != 0 && largest <= 127 ? 1 : 0; }
#endif

// Asks for the bytes of what comes, of each strip as many lines in each step of the products.
class AskedBeside {
   public:
    AskedBeside(const Ahead* ahead, int64_t steps) : nearest_(ahead[0].nearest) {
        for (int s = 0; s < kStrips; ++s) {
            const int64_t lines = ahead[s].bytes / 64;
            at_[s] = ahead[s].from;
            end_[s] = at_[s] + 64 * lines;
            if (lines > lines_ * steps) lines_ = (lines + steps - 1) / steps;
        }
    }
    // Whole steps, so that a branch is seldom mistaken: at most a step's lines behind the end, which come next anyway.
    void ask() {
        for (int s = 0; s < kStrips; ++s)
            if (at_[s] < end_[s])
                for (int64_t n = 0; n < lines_; ++n) at_[s] = ask_for_lines<1>(at_[s], nearest_);
    }

   private:
    const uint8_t *at_[kStrips], *end_[kStrips];
    int64_t lines_ = 0;
    bool nearest_;
};

// Pairs: how many pairs of products a sum of 16 bits holds, 0 for weights of eight bits.
template <int Tokens, int Group, bool Minimum, int Pairs>
void multiply_block(const QuantPanel& panel, int strip, int64_t groups, int64_t column,
                    const uint8_t* const* bases, const ActivationLayout& layout, bool first, AskedBeside& beside,
                    float* c) {
    const uint8_t* base[Tokens];
    for (int t = 0; t < Tokens; ++t) base[t] = bases[t];
    Floats sums[Tokens][kStripBlock];
    for (int t = 0; t < Tokens; ++t)
        for (int s = 0; s < kStripBlock; ++s)
            sums[t][s] = first ? zero_floats() : load_floats(c + t * kPanelRows + (strip + s) * kStripRows);
    const int64_t numbers = column / Group * 4;  // bytes of a token's float or int32 per group before us
    const uint8_t* weights = &panel.q[strip][0][0][0];
    constexpr int64_t kStripBytes = sizeof panel.q[0];
    for (int64_t g = 0; g < groups; ++g) {
        beside.ask();
        Ints dots[Tokens][kStripBlock];
        for (int t = 0; t < Tokens; ++t) {
            int32_t start = 0;  // as it is where there is a minimum
            if constexpr (!Minimum) __builtin_memcpy(&start, base[t] + layout.start + numbers + 4 * g, 4);
            for (int s = 0; s < kStripBlock; ++s) dots[t][s] = set_ints(start);
        }
        // add_up(t, s, w, a): four columns of a strip and of a token
        const auto each_four = [&](int k, const auto& add_up) {
            Bytes w[kStripBlock];
            for (int s = 0; s < kStripBlock; ++s)
                w[s] = load_bytes(weights + s * kStripBytes + (g * Group + k) * kStripRows);
            for (int t = 0; t < Tokens; ++t) {
                int32_t a;
                __builtin_memcpy(&a, base[t] + column + g * Group + k, 4);
                for (int s = 0; s < kStripBlock; ++s) add_up(t, s, w[s], a);
            }
        };
#if defined(THERMOCLINE_NARROW_SUMS)
        if constexpr (Pairs > 1) {
            constexpr int kRun = Pairs < Group / 4 ? Pairs : Group / 4;
            for (int k = 0; k < Group; k += 4 * kRun) {
                NarrowSums narrow[Tokens][kStripBlock];
                each_four(k, [&](int t, int s, const Bytes& w, int32_t a) { narrow[t][s] = pair_products(w, a); });
#pragma GCC unroll 8
                for (int i = 1; i < kRun; ++i)
                    each_four(k + 4 * i, [&](int t, int s, const Bytes& w, int32_t a) {
                        narrow[t][s] = add(narrow[t][s], pair_products(w, a));
                    });
                for (int t = 0; t < Tokens; ++t)
                    for (int s = 0; s < kStripBlock; ++s) dots[t][s] = add(dots[t][s], narrow[t][s]);
            }
        } else
#endif
            for (int k = 0; k < Group; k += 4)
                each_four(k, [&](int t, int s, const Bytes& w, int32_t a) { dots[t][s] = add_dot4<Pairs != 0>(dots[t][s], w, a); });
        for (int s = 0; s < kStripBlock; ++s) {
            const Floats scale = load_floats(panel.scale[strip + s][g]);
            for (int t = 0; t < Tokens; ++t) {
                float a;
                __builtin_memcpy(&a, base[t] + layout.scale + numbers + 4 * g, 4);
                sums[t][s] = add_product(sums[t][s], to_floats(dots[t][s]), multiply(scale, set_floats(a)));
            }
            if constexpr (Minimum) {
                const Floats minimum = load_floats(panel.minimum[strip + s][g]);
                for (int t = 0; t < Tokens; ++t) {
                    float a;
                    __builtin_memcpy(&a, base[t] + layout.sum + numbers + 4 * g, 4);
                    sums[t][s] = subtract_product(sums[t][s], minimum, set_floats(a));
                }
            }
        }
    }
    for (int t = 0; t < Tokens; ++t)
        for (int s = 0; s < kStripBlock; ++s)
            store_floats(c + t * kPanelRows + (strip + s) * kStripRows, sums[t][s]);
}

using MultiplyBlock = void (*)(const QuantPanel&, int, int64_t, int64_t, const uint8_t* const*,
                               const ActivationLayout&, bool, AskedBeside&, float*);

template <int Tokens, int Pairs>
MultiplyBlock pick_form(const QuantForm& form) {
    switch ((form.group == 32 ? 2 : 0) + (form.has_minimum ? 1 : 0)) {
        case 0: return multiply_block<Tokens, 16, false, Pairs>;
        case 1: return multiply_block<Tokens, 16, true, Pairs>;
        case 2: return multiply_block<Tokens, 32, false, Pairs>;
        default: return multiply_block<Tokens, 32, true, Pairs>;
    }
}

// The function for strips of weights up to `largest`.
template <int Tokens>
MultiplyBlock pick_block(const QuantForm& form, int largest) {
    if (largest <= 16) return pick_form<Tokens, pairs_in_16_bits(16)>(form);
    if (largest <= 32) return pick_form<Tokens, pairs_in_16_bits(32)>(form);
    if (largest <= 127) return pick_form<Tokens, pairs_in_16_bits(127)>(form);
    return pick_form<Tokens, pairs_in_16_bits(255)>(form);
}

template <int Tokens = kTokenBlock>
MultiplyBlock pick_tail(int64_t tokens, const QuantForm& form, int largest) {
    if constexpr (Tokens == 1) {
        return pick_block<1>(form, largest);
    } else {
        return tokens == Tokens ? pick_block<Tokens>(form, largest) : pick_tail<Tokens - 1>(tokens, form, largest);
    }
}

void multiply_panel(const QuantPanel& panel, const QuantForm& form, int64_t count, int64_t column,
                    const uint8_t* const* bases, const ActivationLayout& layout, int64_t tokens,
                    bool first, const Ahead* ahead, float* c) {
    int largest[kStrips];
    MultiplyBlock whole[kStrips];
    for (int strip = 0; strip < kStrips; strip += kStripBlock) {
        largest[strip] = panel.largest[strip];
        for (int s = 1; s < kStripBlock; ++s)
            if (largest[strip] < panel.largest[strip + s]) largest[strip] = panel.largest[strip + s];
        whole[strip] = pick_block<kTokenBlock>(form, largest[strip]);
    }
    const int64_t groups = count / form.group;
    AskedBeside beside(ahead, (tokens + kTokenBlock - 1) / kTokenBlock * (kStrips / kStripBlock) * groups);
    for (int64_t t = 0; t < tokens; t += kTokenBlock)
        for (int strip = 0; strip < kStrips; strip += kStripBlock) {
            const MultiplyBlock block =
                tokens - t >= kTokenBlock ? whole[strip] : pick_tail(tokens - t, form, largest[strip]);
            block(panel, strip, groups, column, bases + t, layout, first, beside, c + t * kPanelRows);
        }
}

constexpr int64_t kAskedColumns = 16;  // of a float panel, between two steps of asking for what comes

template <int Tokens>
void multiply_float_block(const FloatPanel& panel, int strip, int64_t count, int64_t column,
                          const float* const* x, bool first, AskedBeside& beside, float* c) {
    Floats sums[Tokens][kStripBlock];
    for (int t = 0; t < Tokens; ++t)
        for (int s = 0; s < kStripBlock; ++s)
            sums[t][s] = first ? zero_floats() : load_floats(c + t * kPanelRows + (strip + s) * kStripRows);
    for (int64_t step = 0; step < count; step += kAskedColumns) {
        beside.ask();
        const int64_t end = step + kAskedColumns < count ? step + kAskedColumns : count;
        for (int64_t k = step; k < end; ++k)
            for (int s = 0; s < kStripBlock; ++s) {
                const Floats w = load_floats(panel.w[strip + s][k]);
                for (int t = 0; t < Tokens; ++t) sums[t][s] = add_product(sums[t][s], w, set_floats(x[t][column + k]));
            }
    }
    for (int t = 0; t < Tokens; ++t)
        for (int s = 0; s < kStripBlock; ++s)
            store_floats(c + t * kPanelRows + (strip + s) * kStripRows, sums[t][s]);
}

using MultiplyFloatBlock = void (*)(const FloatPanel&, int, int64_t, int64_t, const float* const*, bool, AskedBeside&,
                                    float*);

template <int Tokens = kTokenBlock>
MultiplyFloatBlock pick_float_tail(int64_t tokens) {
    if constexpr (Tokens == 1) {
        return multiply_float_block<1>;
    } else {
        return tokens >= Tokens ? multiply_float_block<Tokens> : pick_float_tail<Tokens - 1>(tokens);
    }
}

void multiply_float_panel(const FloatPanel& panel, int64_t count, int64_t column, const float* const* x,
                          int64_t tokens, bool first, const Ahead* ahead, float* c) {
    const int64_t steps = (count + kAskedColumns - 1) / kAskedColumns * (kStrips / kStripBlock);
    AskedBeside beside(ahead, (tokens + kTokenBlock - 1) / kTokenBlock * steps);
    for (int64_t t = 0; t < tokens; t += kTokenBlock) {
        const MultiplyFloatBlock block = pick_float_tail(tokens - t);
        for (int strip = 0; strip < kStrips; strip += kStripBlock)
            block(panel, strip, count, column, x + t, first, beside, c + t * kPanelRows);
    }
}

void add_slots(const float* sums, int64_t stride, const float* scales, const int32_t* pairs, int64_t slots,
               const float* residual, int64_t width, float* out) {
    for (int64_t at = 0; at < width; at += kStripRows) {
        const auto weighted = [&](int64_t slot) {
            const int64_t pair = pairs[slot];
            return multiply(set_floats(scales[pair]), load_floats(sums + pair * stride + at));
        };
        Floats total = weighted(0);
        for (int64_t slot = 1; slot < slots; ++slot) total = add(total, weighted(slot));
        if (at + kStripRows <= width) {
            store_floats(out + at, add(total, load_floats(residual + at)));
        } else {
            alignas(64) float last[kStripRows];
            store_floats(last, total);
            for (int64_t i = at; i < width; ++i) out[i] = last[i - at] + residual[i];
        }
    }
}

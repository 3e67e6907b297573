// What is done to each token by itself: norm, rotary embedding, append to the cache, gates, and the sum of
// its experts' outputs.
#pragma once

#include "activations.inl"
#include "cache.inl"

namespace thermocline::THERMOCLINE_SET {
namespace {

// Calls f(offset, lanes) for each vector of a row; the last may have fewer than sixteen lanes.
template <typename F>
inline __attribute__((always_inline)) void each_vector(int64_t count, F f) {
    int64_t i = 0;
    for (; i + kWidth <= count; i += kWidth) f(i, kWidth);
    if (i < count) f(i, count - i);
}

inline Vec load_lanes(const float* p, int64_t lanes) { return lanes == kWidth ? load(p) : load_part(p, lanes); }
inline void store_lanes(float* p, Vec x, int64_t lanes) {
    if (lanes == kWidth) store(p, x);
    else store_part(p, x, lanes);
}

inline void norm_row(const float* x, const float* gain, float epsilon, int64_t width, float* out) {
    Doubles squares = zero_doubles();
    each_vector(width, [&](int64_t i, int64_t n) { squares = add_squares(squares, load_lanes(x + i, n)); });
    const double mean = reduce_add(squares) / static_cast<double>(width);
    const Vec scale =
        broadcast(static_cast<float>(1.0 / __builtin_sqrt(mean + static_cast<double>(epsilon))));
    each_vector(width, [&](int64_t i, int64_t n) {
        store_lanes(out + i, mul(mul(load_lanes(x + i, n), scale), load_lanes(gain + i, n)), n);
    });
}

void rms_norm(const float* x, const float* gain, float epsilon, int64_t rows, int64_t width, float* out) {
    for (int64_t r = 0; r < rows; ++r) norm_row(x + r * width, gain, epsilon, width, out + r * width);
}

inline void rotate(float* x, const float* cosines, const float* sines, int64_t dims, RopeLayout layout) {
    const int64_t half = dims / 2;
    if (layout == RopeLayout::Pairs) {
        for (int64_t i = 0; i < half; ++i) {
            const float a = x[2 * i], b = x[2 * i + 1];
            x[2 * i] = a * cosines[i] - b * sines[i];
            x[2 * i + 1] = b * cosines[i] + a * sines[i];
        }
        return;
    }
    each_vector(half, [&](int64_t i, int64_t n) {
        const Vec a = load_lanes(x + i, n), b = load_lanes(x + half + i, n);
        const Vec c = load_lanes(cosines + i, n), s = load_lanes(sines + i, n);
        store_lanes(x + i, sub(mul(a, c), mul(b, s)), n);
        store_lanes(x + half + i, add(mul(b, c), mul(a, s)), n);
    });
}

constexpr int64_t kMaxHeadDim = 1152;

inline void append(const HeadsJob& job, int64_t token, int64_t kv_head, const float* key,
                   const float* value) {
    const CacheShape& c = job.cache;
    const int64_t row_bytes = cache_row_bytes(c.type, c.head_dim);
    const int64_t place = job.slots[token] % c.block_tokens;
    const int64_t head = head_offset(c, row_bytes, job.slots[token] / c.block_tokens, kv_head);
    const KeyPlace at = key_place(c, row_bytes, place);
    uint8_t packed[4 * kMaxHeadDim];
    pack_row(c.type, key, c.head_dim, packed);
    place_key(c.type, packed, c.head_dim, at, job.keys + head + at.group_offset);
    const int64_t value_bytes = cache_row_bytes(c.type, c.value_dim());
    const int64_t values = head_offset(c, value_bytes, job.slots[token] / c.block_tokens, kv_head);
    pack_row(c.type, value, c.value_dim(), job.values + values + place * value_bytes);
}

void heads(const HeadsJob& job, int64_t first_token, int64_t last_token) {
    const int64_t dim = job.cache.head_dim, value_dim = job.cache.value_dim(), half = job.rotary_dims / 2;
    const float* first_gain[] = {job.norm_last ? nullptr : job.q_gain, job.norm_last ? nullptr : job.k_gain};
    const float* last_gain[] = {job.norm_last ? job.q_gain : nullptr, job.norm_last ? job.k_gain : nullptr};
    for (int64_t t = first_token; t < last_token; ++t) {
        const float* cosines = job.cosines + t * half;
        const float* sines = job.sines + t * half;
        const auto turn = [&](float* x, int part) {
            if (first_gain[part] != nullptr) norm_row(x, first_gain[part], job.epsilon, dim, x);
            rotate(x, cosines, sines, job.rotary_dims, job.layout);
            if (last_gain[part] != nullptr) norm_row(x, last_gain[part], job.epsilon, dim, x);
        };
        for (int64_t h = 0; h < job.heads; ++h) turn(job.q + (t * job.heads + h) * dim, 0);
        for (int64_t h = 0; job.k != nullptr && h < job.cache.kv_heads; ++h) {
            const int64_t row = t * job.cache.kv_heads + h;
            float key[kMaxHeadDim];
            __builtin_memcpy(key, job.k + row * dim, static_cast<size_t>(dim) * 4);
            turn(key, 1);
            float normed[kMaxHeadDim];
            const float* value = job.v + row * value_dim;
            if (job.v_gain != nullptr) {
                norm_row(value, job.v_gain, job.epsilon, value_dim, normed);
                value = normed;
            }
            append(job, t, h, key, value);
        }
    }
}

void latent(const LatentJob& job, int64_t first_token, int64_t last_token) {
    const CacheShape& c = job.cache;
    const int64_t dim = c.head_dim, dims = job.rotary_dims, row_bytes = cache_row_bytes(c.type, dim);
    const auto turn = [&](float* x, int64_t token) {
        rotate(x, job.cosines + token * dims / 2, job.sines + token * dims / 2, dims, RopeLayout::Pairs);
    };
    for (int64_t t = first_token; t < last_token; ++t) {
        for (int64_t h = t * job.heads; h < (t + 1) * job.heads; ++h) turn(job.q + (h + 1) * job.q_width - dims, t);
        const float* const kv = job.kv + t * dim;
        float row[kMaxHeadDim];
        norm_row(kv, job.gain, job.epsilon, c.latent, row);
        __builtin_memcpy(row + c.latent, kv + c.latent, static_cast<size_t>(dims) * 4);
        turn(row + c.latent, t);
        const int64_t block = job.slots[t] / c.block_tokens, place = job.slots[t] % c.block_tokens;
        pack_row(c.type, row, dim, job.keys + head_offset(c, row_bytes, block, 0) + place * row_bytes);
    }
}

inline float first_lane(Vec x) {
    float lanes[kWidth];
    store(lanes, x);
    return lanes[0];
}

inline Vec sigmoid(Vec x) { return div(broadcast(1.0f), add(broadcast(1.0f), exp(sub(zero(), x)))); }

// log(1 + e^x) = max(x, 0) + log(1 + y) with y = e^-|x|, and log(1 + y) = 2 artanh(y / (2 + y)), whose series
// in s <= 1/3 has a relative error below 1e-8 after eight terms.
inline Vec softplus(Vec x) {
    constexpr float kTerms[] = {1.0f, 1.0f / 3, 1.0f / 5, 1.0f / 7, 1.0f / 9, 1.0f / 11, 1.0f / 13, 1.0f / 15};
    const Vec y = exp(sub(zero(), abs(x)));
    const Vec s = div(y, add(broadcast(2.0f), y));
    return fma(mul(broadcast(2.0f), s), polynomial(kTerms, mul(s, s)), max(zero(), x));
}

void gate(const GateJob& job, int64_t first_row, int64_t last_row) {
    const auto activate = [&](Vec x) {
        if (job.activation == Activation::Gelu) return gelu_times(x, broadcast(1.0f));
        return job.activation == Activation::Sigmoid ? sigmoid(x) : softplus(x);
    };
    for (int64_t r = first_row; r < last_row; ++r) {
        const float* x = job.x + r * job.width;
        const float* gates = job.gate + r * job.gate_stride;
        float* out = job.out + r * job.width;
        const Vec one = activate(broadcast(gates[0]));
        each_vector(job.width, [&](int64_t i, int64_t n) {
            const Vec factor = job.gate_width == 1 ? one : activate(load_lanes(gates + i, n));
            store_lanes(out + i, mul(load_lanes(x + i, n), factor), n);
        });
    }
}

void silu_multiply(const float* gate, const float* up, int64_t count, float* out) {
    each_vector(count, [&](int64_t i, int64_t n) {
        store_lanes(out + i, silu_times(load_lanes(gate + i, n), load_lanes(up + i, n)), n);
    });
}

void add_normed(const PostNormJob& job, int64_t first_row, int64_t last_row, float* scratch) {
    const PostNorm& norm = job.norm;
    const Vec scale = broadcast(norm.scale);
    float* const other = scratch + job.width;
    for (int64_t r = first_row; r < last_row; ++r) {
        const int64_t start = r * job.width;
        const float* y = job.first + start;
        if (job.second != nullptr) {
            const float* second = job.second + start;
            if (norm.first_gain != nullptr) {
                norm_row(y, norm.first_gain, norm.epsilon, job.width, scratch);
                norm_row(second, norm.second_gain, norm.epsilon, job.width, other);
                y = scratch;
                second = other;
            }
            each_vector(job.width, [&](int64_t i, int64_t n) {
                store_lanes(scratch + i, add(load_lanes(y + i, n), load_lanes(second + i, n)), n);
            });
            y = scratch;
        }
        norm_row(y, norm.gain, norm.epsilon, job.width, scratch);
        each_vector(job.width, [&](int64_t i, int64_t n) {
            const Vec sum = add(load_lanes(job.x + start + i, n), load_lanes(scratch + i, n));
            store_lanes(job.out + start + i, mul(sum, scale), n);
        });
    }
}

void softcap(const float* x, int64_t count, float cap, float* out) {
    const Vec most = broadcast(cap);
    each_vector(count, [&](int64_t i, int64_t n) {
        store_lanes(out + i, mul(tanh(div(load_lanes(x + i, n), most)), most), n);
    });
}

void clamped_silu_multiply(const float* gate, const float* up, int64_t count, float* out) {
    each_vector(count, [&](int64_t i, int64_t n) {
        store_lanes(out + i, clamped_silu_times(load_lanes(gate + i, n), load_lanes(up + i, n)), n);
    });
}

void gelu_multiply(const float* gate, const float* up, int64_t count, float* out) {
    each_vector(count, [&](int64_t i, int64_t n) {
        store_lanes(out + i, gelu_times(load_lanes(gate + i, n), load_lanes(up + i, n)), n);
    });
}

void squared_relu(const float*, const float* up, int64_t count, float* out) {
    each_vector(count, [&](int64_t i, int64_t n) { store_lanes(out + i, relu_square(load_lanes(up + i, n)), n); });
}

void relu_multiply(const float* gate, const float* up, int64_t count, float* out) {
    each_vector(count, [&](int64_t i, int64_t n) {
        store_lanes(out + i, relu_times(load_lanes(gate + i, n), load_lanes(up + i, n)), n);
    });
}

void limited_silu_multiply(const float* gate, const float* up, int64_t count, SiluLimits limits, float* out) {
    each_vector(count, [&](int64_t i, int64_t n) {
        store_lanes(out + i, limited_silu_times(load_lanes(gate + i, n), load_lanes(up + i, n), limits), n);
    });
}

void combine(const CombineJob& job, int64_t first_token, int64_t last_token) {
    for (int64_t t = first_token; t < last_token; ++t) {
        const float* const* sources = job.sources + t * job.slots;
        const float* residual = job.residual + t * job.width;
        float* out = job.out + t * job.width;
        each_vector(job.width, [&](int64_t i, int64_t n) {
            Vec sum = load_lanes(sources[0] + i, n);
            for (int64_t s = 1; s < job.slots; ++s) sum = add(sum, load_lanes(sources[s] + i, n));
            store_lanes(out + i, add(load_lanes(residual + i, n), sum), n);
        });
    }
}

}  // namespace
}  // namespace thermocline::THERMOCLINE_SET

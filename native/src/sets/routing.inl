// Which experts a token goes to, and with what weight.
#pragma once

#include "pointwise.inl"

namespace thermocline::THERMOCLINE_SET {
namespace {

// The best `count` of `experts` logits, best first; equal ones in the order of their ids, and NaN last.
inline void choose(const float* logits, int64_t experts, int64_t count, int32_t* ids) {
    int64_t held = 0;
    for (int64_t e = 0; e < experts; ++e) {
        const float x = logits[e];
        const auto beats = [&](int32_t id) { return x > logits[id] || (x == x && logits[id] != logits[id]); };
        if (held == count && !beats(ids[count - 1])) continue;
        int64_t place = held < count ? held++ : count - 1;
        for (; place > 0 && beats(ids[place - 1]); --place) ids[place] = ids[place - 1];
        ids[place] = static_cast<int32_t>(e);
    }
}

// Softmax over all experts of the chosen ones, which are the best logits.
inline void plain_softmax(const RouteJob& job, const float* logits, int32_t* ids, float* weights) {
    choose(logits, job.experts, job.rule.chosen, ids);
    const Vec top = broadcast(logits[ids[0]]);
    Vec sums = zero();
    each_vector(job.experts, [&](int64_t i, int64_t n) {
        const Vec weight = exp(sub(load_lanes(logits + i, n), top));
        sums = add(sums, keep_lanes(weight, 0, n, 0.0f));
    });
    const float total = reduce_add(sums);
    for (int64_t k = 0; k < job.rule.chosen; ++k)
        weights[k] = first_lane(exp(sub(broadcast(logits[ids[k]]), top))) / total;
}

// out = the softmax of x.
inline void softmax(const float* x, int64_t count, float* out) {
    float best = x[0];
    for (int64_t i = 1; i < count; ++i) best = x[i] > best ? x[i] : best;
    const Vec top = broadcast(best);
    Vec sums = zero();
    each_vector(count, [&](int64_t i, int64_t n) {
        const Vec weight = exp(sub(load_lanes(x + i, n), top));
        store_lanes(out + i, weight, n);
        sums = add(sums, keep_lanes(weight, 0, n, 0.0f));
    });
    const Vec total = broadcast(reduce_add(sums));
    each_vector(count, [&](int64_t i, int64_t n) { store_lanes(out + i, div(load_lanes(out + i, n), total), n); });
}

// Takes from the choice all experts that are not in the best groups. Equal groups in order, and NaN last.
inline void keep_groups(const RouteRule& rule, int64_t experts, float* scores, float* group_scores) {
    const int64_t members = experts / rule.groups;
    for (int64_t g = 0; g < rule.groups; ++g) {
        int32_t best[2];
        const float* own = scores + g * members;
        choose(own, members, rule.group_best, best);
        group_scores[g] = rule.group_best == 1 ? own[best[0]] : own[best[0]] + own[best[1]];
    }
    for (int64_t g = 0; g < rule.groups; ++g) {
        const float own = group_scores[g];
        int64_t better = 0;
        for (int64_t h = 0; h < rule.groups; ++h) {
            const float other = group_scores[h];
            const bool equal = own == other || (own != own && other != other);
            better += equal ? h < g : other > own || own != own;
        }
        if (better < rule.groups_used) continue;
        for (int64_t e = g * members; e < (g + 1) * members; ++e) scores[e] = -__builtin_inff();
    }
}

// Of each chosen expert its share in a softmax of logits that lie near its own, of experts that were not chosen before it.
// near: scratch of a number per expert.
inline void near_shares(const RouteJob& job, const float* logits, float* near, const int32_t* ids, float* weights) {
    for (int64_t k = 0; k < job.rule.chosen; ++k) {
        const float best = logits[ids[k]];
        int64_t count = 0;
        for (int64_t e = 0; e < job.experts; ++e) {
            const float x = logits[e], size = x < 0.0f ? -x : x;
            if (best - x > kNearBest * (size > best ? size : best)) continue;
            bool before = false;
            for (int64_t j = 0; j < k; ++j) before |= ids[j] == e;
            if (!before) near[count++] = x - best;
        }
        Vec sums = zero();
        each_vector(count, [&](int64_t i, int64_t n) {
            sums = add(sums, keep_lanes(exp(load_lanes(near + i, n)), 0, n, 0.0f));
        });
        weights[k] = 1.0f / reduce_add(sums);
    }
}

// Any rule. probabilities: what the weights are; scores: what decides, unless ids are given.
inline void scored_route(const RouteJob& job, const float* logits, float* scratch, const int32_t* given, int32_t* ids,
                         float* weights) {
    const RouteRule& rule = job.rule;
    float* probabilities = scratch + job.experts;
    float* scores = probabilities + job.experts;
    if (rule.logit_bias != nullptr) {
        each_vector(job.experts, [&](int64_t i, int64_t n) {
            store_lanes(scratch + i, add(load_lanes(logits + i, n), load_lanes(rule.logit_bias + i, n)), n);
        });
        logits = scratch;
    }
    if (rule.gating == Gating::Softmax) softmax(logits, job.experts, probabilities);
    else each_vector(job.experts, [&](int64_t i, int64_t n) {
        const Vec x = load_lanes(logits + i, n);
        store_lanes(probabilities + i,
                    rule.gating == Gating::Sigmoid        ? sigmoid(x)
                    : rule.gating == Gating::SqrtSoftplus ? sqrt(softplus(x))
                                                          : x,
                    n);
    });
    if (given != nullptr) {
        for (int64_t k = 0; k < rule.chosen; ++k) ids[k] = given[k];
    } else {
        each_vector(job.experts, [&](int64_t i, int64_t n) {
            const Vec score = load_lanes(probabilities + i, n);
            store_lanes(scores + i, rule.bias == nullptr ? score : add(score, load_lanes(rule.bias + i, n)), n);
        });
        if (rule.groups > 1) keep_groups(rule, job.experts, scores, scores + job.experts);
        choose(scores, job.experts, rule.chosen, ids);
    }
    for (int64_t k = 0; k < rule.chosen; ++k) weights[k] = probabilities[ids[k]];
    if (rule.gating == Gating::SoftmaxChosen) softmax(weights, rule.chosen, weights);
    if (rule.gating == Gating::NearBest) near_shares(job, probabilities, scores, ids, weights);
}

void route(const RouteJob& job, int64_t first_token, int64_t last_token) {
    const RouteRule& rule = job.rule;
    const bool plain = job.plain();
    for (int64_t t = first_token; t < last_token; ++t) {
        const float* logits = job.logits + t * job.experts;
        int32_t* ids = job.ids + t * rule.chosen;
        float* weights = job.weights + t * rule.chosen;
        if (plain) plain_softmax(job, logits, ids, weights);
        else scored_route(job, logits, job.scratch + t * route_scratch(job),
                          job.given == nullptr ? nullptr : job.given + t * rule.chosen, ids, weights);
        float chosen_sum = 0.0f;
        for (int64_t k = 0; k < rule.chosen; ++k) chosen_sum += weights[k];
        const float divisor = chosen_sum > rule.min_sum ? chosen_sum : rule.min_sum;
        for (int64_t k = 0; k < rule.chosen; ++k)
            weights[k] = (rule.normalize ? weights[k] / divisor : weights[k]) * rule.scale;
    }
}

}  // namespace
}  // namespace thermocline::THERMOCLINE_SET

"""Routing rules of every instruction set and of their NumPy twin, against a token-by-token model in plain Python."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from tests.support.kernel_cases import DENSE_ISAS
from thermocline.kernels import _native
from thermocline.kernels.dense import NativeDense
from thermocline.kernels.dense_contract import Gating, RoutingRule
from thermocline.kernels.dense_reference import ReferenceDense

# tokens, experts, chosen, groups, groups used
SHAPES = [
    (1, 8, 8, 1, 1),
    (17, 128, 8, 1, 1),
    (5, 61, 1, 1, 1),
    (9, 64, 6, 8, 3),
    (3, 6, 2, 3, 1),
    (4, 256, 8, 8, 4),
    (2, 10, 10, 5, 5),
]


@pytest.fixture(params=[*DENSE_ISAS, "reference"])
def dense(request):
    """Each implementation."""
    if request.param == "reference":
        return ReferenceDense()
    return NativeDense(_native.Core(request.param, 2))


@pytest.fixture(params=DENSE_ISAS)
def native(request):
    """Each instruction set of this machine."""
    return NativeDense(_native.Core(request.param, 2))


def rule_of(shape, gating: Gating, *, biased: bool, logit_biased: bool, normalize: bool = True):
    """A rule with random biases."""
    _, experts, chosen, groups, used = shape
    rng = np.random.default_rng(experts + chosen)
    bias, logit_bias = (rng.standard_normal(experts).astype(np.float32) * 0.3 for _ in range(2))
    return RoutingRule(
        chosen,
        normalize,
        min_sum=6.1e-5,
        scale=2.5,
        gating=gating,
        bias=bias if biased else None,
        logit_bias=logit_bias if logit_biased else None,
        groups=groups,
        groups_used=used,
    )


def softmax(numbers: list[float]) -> list[float]:
    shares = [math.exp(number - max(numbers)) for number in numbers]
    return [share / sum(shares) for share in shares]


def near_shares(logits: list[float], ids: list[int]) -> list[float]:
    left, shares = dict(enumerate(logits)), []
    for own in ids:
        best = logits[own]
        near = [x for x in left.values() if best - x <= 0.02 * max(abs(x), best)]
        shares.append(1 / sum(math.exp(x - best) for x in near))
        del left[own]
    return shares


def by_hand(
    row: np.ndarray, rule: RoutingRule, given: list[int] | None = None
) -> tuple[list[int], list[float]]:
    """One token's experts and weights, step by step."""
    logits = [float(x) for x in row]
    if rule.logit_bias is not None:
        logits = [x + float(b) for x, b in zip(logits, rule.logit_bias, strict=True)]
    match rule.gating:
        case Gating.SOFTMAX:
            shares = softmax(logits)
        case Gating.SIGMOID:
            shares = [1 / (1 + math.exp(-x)) for x in logits]
        case Gating.SQRT_SOFTPLUS:
            shares = [math.sqrt(math.log1p(math.exp(x))) for x in logits]
        case Gating.SOFTMAX_CHOSEN | Gating.NEAR_BEST:
            shares = logits
    scores = list(shares)
    if rule.bias is not None:
        scores = [x + float(b) for x, b in zip(scores, rule.bias, strict=True)]
    members = len(scores) // rule.groups
    allowed = range(len(scores))
    if rule.groups > 1:
        groups = [scores[g * members : (g + 1) * members] for g in range(rule.groups)]
        best = sorted(range(rule.groups), key=lambda g: (-sum(sorted(groups[g])[-2:]), g))
        allowed = [e for e in allowed if e // members in best[: rule.groups_used]]
    ids = given or sorted(allowed, key=lambda e: (-scores[e], e))[: rule.chosen]
    weights = [shares[e] for e in ids]
    if rule.gating is Gating.SOFTMAX_CHOSEN:
        weights = softmax(weights)
    if rule.gating is Gating.NEAR_BEST:
        weights = near_shares(logits, ids)
    divisor = max(sum(weights), rule.min_sum) if rule.normalize else 1.0
    return ids, [weight / divisor * rule.scale for weight in weights]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("gating", list(Gating))
def test_every_rule_is_what_it_says(dense, shape, gating):
    """Experts best first and weights as computed token by token, with any biases and groups."""
    rng = np.random.default_rng(sum(shape))
    logits = (rng.standard_normal(shape[:2]) * 2).astype(np.float32)
    biases, norms = ((False, False), (True, False), (True, True)), (True, False)
    for (biased, logit_biased), normalize in product(biases, norms):
        rule = rule_of(shape, gating, biased=biased, logit_biased=logit_biased)
        own = replace(rule, normalize=normalize)
        ids, weights = dense.route(logits, own)
        expected = [by_hand(row, own) for row in logits]
        assert ids.tolist() == [each for each, _ in expected], own
        np.testing.assert_allclose(weights, [each for _, each in expected], rtol=2e-6)


def test_a_weight_is_shared_with_logits_near_it(dense):
    """A second as near as the range allows takes its share, and none beyond, above zero and below; then it has all."""
    rule = RoutingRule(2, False, 1e-5, 1.0, Gating.NEAR_BEST)
    rows = [
        ([10.0, 9.81, 1.0], [1 / (1 + math.exp(-0.19)), 1.0]),
        ([10.0, 9.79, 1.0], [1.0, 1.0]),
        ([-10.0, -10.19, -30.0], [1 / (1 + math.exp(-0.19)), 1.0]),
        ([-10.0, -10.21, -30.0], [1.0, 1.0]),
        ([4.0, 4.0, 4.0], [1 / 3, 1 / 2]),
        ([0.0, 0.0, -1.0], [1 / 2, 1.0]),
        (
            [9.0, 8.99, 8.98],
            [1 / (1 + math.exp(-0.01) + math.exp(-0.02)), 1 / (1 + math.exp(-0.01))],
        ),
    ]
    ids, weights = dense.route(np.array([row for row, _ in rows], np.float32), rule)
    assert ids.tolist() == [[0, 1]] * len(rows)
    np.testing.assert_allclose(weights, [expected for _, expected in rows], rtol=2e-6)


def test_square_roots_of_softplus_far_from_zero(dense):
    """Logits far above are their own softplus, and those far below still have an order and weights."""
    rule = RoutingRule(6, False, 1e-5, 1.0, Gating.SQRT_SOFTPLUS)
    logits = np.array([[-60.0, 100.0, 19.9, 0.0, -20.0, 20.1, -40.0]], np.float32)
    ids, weights = dense.route(logits, rule)
    assert ids.tolist() == [[1, 5, 2, 3, 4, 6]]
    expected = np.sqrt(np.logaddexp(0.0, logits[0, ids[0]].astype(np.float64)))
    np.testing.assert_allclose(weights[0], expected, rtol=2e-6)


@pytest.mark.parametrize("gating", list(Gating))
def test_a_token_alone_is_routed_the_same(native, gating):
    """The same bits for a token by itself as among others."""
    shape = (13, 60, 7, 4, 3)
    rule = rule_of(shape, gating, biased=True, logit_biased=True)
    logits = np.random.default_rng(1).standard_normal(shape[:2]).astype(np.float32)
    ids, weights = native.route(logits, rule)
    for token in range(len(logits)):
        alone = native.route(logits[token : token + 1], rule)
        np.testing.assert_array_equal(alone[0][0], ids[token])
        np.testing.assert_array_equal(alone[1][0], weights[token])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("gating", list(Gating))
def test_given_experts_are_weighed(dense, shape, gating):
    """By their scores, in the order that is given; what chooses experts has no say."""
    tokens, experts, chosen = shape[:3]
    rng = np.random.default_rng(sum(shape))
    logits = (rng.standard_normal(shape[:2]) * 2).astype(np.float32)
    given = np.stack([rng.permutation(experts)[:chosen] for _ in range(tokens)]).astype(np.int32)
    kept = given.copy()
    for biased, normalize in product((False, True), (True, False)):
        rule = rule_of(shape, gating, biased=biased, logit_biased=biased)
        own = replace(rule, normalize=normalize)
        ids, weights = dense.route(logits, own, given)
        np.testing.assert_array_equal(ids, given)
        expected = [
            by_hand(row, own, each)[1] for row, each in zip(logits, given.tolist(), strict=True)
        ]
        np.testing.assert_allclose(weights, expected, rtol=2e-6)
        for bare in ({"bias": None}, {"groups": 1, "groups_used": 1}):
            np.testing.assert_array_equal(
                dense.route(logits, replace(own, **bare), given)[1], weights
            )
    ids[:] = 0
    np.testing.assert_array_equal(given, kept)


@pytest.mark.parametrize("isa", DENSE_ISAS)
@pytest.mark.parametrize("gating", list(Gating))
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("groups", [1, 4])
def test_the_choice_itself_has_the_same_weights_when_given(isa, gating, biased, groups):
    """To the bit; also of one token alone, and on three threads."""
    shape = (301, 60, 7, groups, min(groups, 3))
    rule = rule_of(shape, gating, biased=biased, logit_biased=biased)
    logits = np.random.default_rng(1).standard_normal(shape[:2]).astype(np.float32)
    native, three = (NativeDense(_native.Core(isa, threads)) for threads in (1, 3))
    ids, weights = native.route(logits, rule)
    for kernels in (native, three):
        for own, expected in zip(kernels.route(logits, rule, ids), (ids, weights), strict=True):
            np.testing.assert_array_equal(own, expected)
    for token in (0, 150, 300):
        alone = native.route(logits[token : token + 1], rule, ids[token : token + 1].copy())
        np.testing.assert_array_equal(alone[1][0], weights[token])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([[0, 9], [1, 2]], "does not exist"),
        ([[0, 1], [1, -1]], "does not exist"),
        ([[0, 1]], "tokens, chosen"),
        ([[0, 1, 2], [0, 1, 2]], "tokens, chosen"),
    ],
)
def test_given_experts_that_do_not_exist_are_refused(native, given, message):
    """Nothing is read beside a token's scores."""
    rule = RoutingRule(2, True, 1e-5, 1.0)
    with pytest.raises(ValueError, match=message):
        native.route(np.zeros((2, 9), np.float32), rule, np.array(given, np.int32))


def test_equal_groups_are_taken_in_order(dense):
    """Where all is equal the first groups and the first experts win."""
    rule = RoutingRule(3, True, 1e-5, 1.0, Gating.SIGMOID, groups=4, groups_used=2)
    ids, weights = dense.route(np.zeros((1, 12), np.float32), rule)
    np.testing.assert_array_equal(ids, [[0, 1, 2]])
    np.testing.assert_allclose(weights, [[1 / 3] * 3], rtol=1e-6)


@pytest.mark.parametrize("gating", list(Gating))
@pytest.mark.parametrize("logits", [[np.nan] * 9, [-np.inf] * 8 + [1.0], [np.inf] + [0.0] * 8])
@pytest.mark.parametrize("groups", [1, 3])
def test_broken_logits_still_give_ids_in_range(native, gating, logits, groups):
    """NaN and infinity make bad weights, never an expert that does not exist or is chosen twice."""
    bias = np.zeros(9, np.float32)
    rule = RoutingRule(4, True, 1e-5, 1.0, gating, bias, groups=groups, groups_used=min(groups, 2))
    ids, _ = native.route(np.array([logits], np.float32), rule)
    assert len(set(ids[0])) == 4
    assert ids.min() >= 0
    assert ids.max() < 9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"groups": 5}, "multiple of their groups"),
        ({"groups": 9}, "experts that it is judged by"),
        ({"group_best": 3}, "one or two of its experts"),
        ({"groups": 3, "groups_used": 1}, "must have the chosen experts"),
        ({"groups": 3, "groups_used": 4}, "must have the chosen experts"),
        ({"chosen": 10}, "at most all experts"),
        ({"bias": np.zeros(8, np.float32)}, "an entry per expert"),
        ({"logit_bias": np.zeros(8, np.float32)}, "an entry per expert"),
    ],
)
def test_the_core_refuses_impossible_rules(native, changes, message):
    """A mistake of ours is a ValueError at the boundary, never a read out of bounds."""
    rule = replace(RoutingRule(4, True, 1e-5, 1.0), **changes)
    with pytest.raises(ValueError, match=message):
        native.route(np.zeros((1, 9), np.float32), rule)

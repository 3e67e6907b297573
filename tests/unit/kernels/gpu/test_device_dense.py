"""Norms, rotary positions, gates and routing on a device against their NumPy twins."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.compare import assert_within
from tests.support.devices import DEVICES
from thermocline.kernels.cache_format import CacheShape, CacheType, read_cache
from thermocline.kernels.dense_contract import (
    Activation,
    Gating,
    HeadNorm,
    LayerCache,
    RoutingRule,
)
from thermocline.kernels.dense_reference import ReferenceDense
from thermocline.kernels.gpu import dense
from thermocline.kernels.gpu.streams import DeviceStreams

REFERENCE = ReferenceDense()


@pytest.fixture(params=DEVICES)
def streams(request):
    """A device, closed at the end."""
    with DeviceStreams.open(request.param) as opened, opened.computing():
        yield opened


def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(sum(shape)).standard_normal(shape) * scale).astype(np.float32)


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 128), (7, 33), (0, 8)])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_rms_norm(streams, rows, width, scale):
    """Rows of any width and size, none among them."""
    x, gain = normal(rows, width, scale=scale), normal(width)
    found = dense.rms_norm(streams.upload(x), streams.upload(gain), 1e-6)
    assert_within(found.cpu().numpy(), REFERENCE.rms_norm(x, gain, 1e-6), "non-expert/float32")


@pytest.mark.parametrize(("rows", "width"), [(1, 2), (3, 128), (7, 33), (0, 8)])
def test_layer_norm(streams, rows, width):
    """Rows far from zero, whose mean goes first."""
    x, gain = 5 + normal(rows, width), normal(width)
    found = dense.layer_norm(streams.upload(x), streams.upload(gain), 1e-6)
    assert_within(found.cpu().numpy(), REFERENCE.layer_norm(x, gain, 1e-6), "non-expert/float32")
    bias = normal(width, 1)[:, 0]
    found = dense.layer_norm(
        *(streams.upload(each) for each in (x, gain)), 1e-6, streams.upload(bias)
    )
    expected = REFERENCE.layer_norm(x, gain, 1e-6, bias)
    assert_within(found.cpu().numpy(), expected, "non-expert/float32")


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize(("head_dim", "dims"), [(16, 16), (10, 6), (64, 32), (8, 0)])
def test_heads_turn(streams, head_dim, dims, pairs):
    """Whole heads and parts of them, by halves and by pairs, as the twin stores them in its cache."""
    positions = np.array([0, 1, 511, 30000], np.int32)
    frequencies = 10000.0 ** (-np.arange(0, dims, 2) / max(dims, 1))
    table = REFERENCE.rope_table(positions, frequencies, magnitude=1.2, pairs=pairs)
    x = normal(4, 2, head_dim)
    cache = LayerCache(
        shape := CacheShape(CacheType.F32, 1, 4, 2, head_dim),
        np.zeros(shape.array_shape, np.uint8),
        np.zeros(shape.array_shape, np.uint8),
    )
    slots = np.arange(4, dtype=np.int32)
    REFERENCE.prepare_heads(x.copy(), x, x, HeadNorm(None, None, 0.0), table, cache, slots)
    expected, _ = read_cache(shape, cache.keys, cache.values, slots)
    everywhere = dense.DeviceRope(
        streams.upload(table.cosines[::-1].copy()), streams.upload(table.sines[::-1].copy()), pairs
    )
    rope = everywhere.at(torch.tensor([3, 2, 1, 0], device=streams.device))
    found = dense.rotate(streams.upload(x), rope)
    assert_within(found.cpu().numpy(), expected, "non-expert/float32")


@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize(("rows", "width", "gates"), [(1, 1, 1), (7, 128, 1), (7, 33, 33)])
def test_gates(streams, activation, rows, width, gates):
    """One gate for a row or one for each number, from far below zero to far above."""
    x, gate = normal(rows, width), normal(rows, gates, scale=30.0)
    found = dense.gate(streams.upload(x), streams.upload(gate), activation)
    expected = REFERENCE.gate(x, gate, activation)
    np.testing.assert_allclose(found.cpu().numpy(), expected, rtol=2e-5, atol=1e-12)


@pytest.mark.parametrize("gating", list(Gating))
@pytest.mark.parametrize(("biased", "logit_biased"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    ("tokens", "experts", "chosen", "groups", "used"),
    [(1, 8, 8, 1, 1), (17, 128, 8, 1, 1), (5, 61, 1, 1, 1), (9, 64, 6, 8, 3), (3, 6, 2, 3, 1)],
)
def test_routing(
    streams, gating, biased, logit_biased, normalize, tokens, experts, chosen, groups, used
):
    """The same experts in the same order, with the same weights."""
    bias = normal(experts, scale=0.3) if biased else None
    logit_bias = normal(experts, 1, scale=0.3)[:, 0] if logit_biased else None
    rule = RoutingRule(
        chosen, normalize, 6.1e-5, 1.5, gating, bias, logit_bias, groups=groups, groups_used=used
    )
    logits = normal(tokens, experts, scale=3.0)
    found = dense.route(streams.upload(logits), routing(streams, rule))
    ids, weights = REFERENCE.route(logits, rule)
    np.testing.assert_array_equal(found[0].cpu().numpy(), ids)
    np.testing.assert_allclose(found[1].cpu().numpy(), weights, rtol=1e-5)


def routing(streams: DeviceStreams, rule: RoutingRule) -> dense.DeviceRouting:
    bias, logit_bias = (
        None if each is None else streams.upload(np.ascontiguousarray(each))
        for each in (rule.bias, rule.logit_bias)
    )
    return dense.DeviceRouting(rule, bias, logit_bias)


def test_equal_experts_are_taken_in_order_and_small_sums_are_clamped(streams):
    """Ties go to the lower id; a token whose best experts are all but impossible is not blown up."""
    logits = np.zeros((2, 40), np.float32)
    logits[1, 39], logits[1, :39] = 50.0, -50.0
    rule = routing(streams, RoutingRule(3, True, min_sum=0.5, scale=1.0))
    ids, weights = dense.route(streams.upload(logits), rule)
    assert ids.tolist() == [[0, 1, 2], [39, 0, 1]]
    np.testing.assert_allclose(weights.cpu().numpy(), [[0.05] * 3, [1.0, 0.0, 0.0]], atol=1e-7)

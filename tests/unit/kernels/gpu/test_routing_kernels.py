"""Choosing experts and finding their slots: the kernels against the CPU's rule, and against plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.unit.kernels.gpu.conftest import IMPLEMENTATIONS
from thermocline.kernels.dense_contract import Gating, RoutingRule
from thermocline.kernels.gpu.resident import naive_find_slots
from thermocline.kernels.gpu.routing_kernels import choose_experts, find_slots
from thermocline.kernels.reference import ReferenceKernels

pytestmark = pytest.mark.slow


@pytest.fixture(params=[each for each in IMPLEMENTATIONS if each.id != "twin"])
def device(request):
    """Where the kernels run."""
    return "cuda" if request.param == "cuda" else "cpu"


def chosen_by(device, logits, rule):
    """Return ids and weights of the kernel."""
    there = [
        None if each is None else torch.from_numpy(each).to(device)
        for each in (rule.bias, rule.logit_bias)
    ]
    ids, weights = choose_experts(torch.from_numpy(logits).to(device), rule, *there)
    return ids.cpu().numpy(), weights.cpu().numpy()


@pytest.mark.parametrize("gating", list(Gating))
@pytest.mark.parametrize(("biased", "logit_biased"), [(False, False), (True, True)])
@pytest.mark.parametrize(
    ("tokens", "experts", "chosen"),
    [(1, 1, 1), (3, 8, 2), (2, 100, 6), (1, 128, 8), (2, 512, 10), (0, 8, 2)],
)
@pytest.mark.parametrize("normalize", [False, True])
def test_experts_are_those_of_the_cpu(
    device, gating, biased, logit_biased, tokens, experts, chosen, normalize
):
    """The same in the same order, with the same weights."""
    rng = np.random.default_rng(experts)
    bias, logit_bias = (rng.normal(0, 0.3, experts).astype(np.float32) for _ in range(2))
    rule = RoutingRule(
        *(chosen, normalize, 6.1e-5, 1.5, gating),
        *(bias if biased else None, logit_bias if logit_biased else None),
    )
    logits = rng.normal(0, 3, (tokens, experts)).astype(np.float32)
    ids, weights = chosen_by(device, logits, rule)
    expected = ReferenceKernels().dense.route(logits, rule)
    np.testing.assert_array_equal(ids, expected[0])
    np.testing.assert_allclose(weights, expected[1], rtol=1e-5)


def test_ties_go_to_the_lower_id_and_small_sums_are_clamped(device):
    """As on the CPU."""
    logits = np.zeros((2, 40), np.float32)
    logits[1, 39], logits[1, :39] = 50.0, -50.0
    ids, weights = chosen_by(device, logits, RoutingRule(3, True, 0.5, 1.0))
    assert ids.tolist() == [[0, 1, 2], [39, 0, 1]]
    np.testing.assert_allclose(weights[0], 1 / 40 / 0.5, rtol=1e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("gating", list(Gating))
def test_what_is_no_number_still_chooses_experts(device, gating, value):
    """Each once, of those that there are: another id would be read beyond the table."""
    logits = np.full((2, 9), value, np.float32)
    logits[1, :4] = 1.0
    with np.errstate(all="ignore"):
        ids, _ = chosen_by(device, logits, RoutingRule(5, True, 1e-5, 1.0, gating))
    for row in ids:
        assert len({*row.tolist()}) == 5
        assert ((row >= 0) & (row < 9)).all()


@pytest.mark.parametrize(
    ("tokens", "chosen", "live"), [(1, 1, 1), (4, 8, 3), (3, 5, 0), (8, 8, 8), (0, 2, 0)]
)
def test_slots_are_those_of_plain_torch(device, tokens, chosen, live):
    """With padding, with experts that are not there, and nothing at all."""
    rng = np.random.default_rng(2)
    ids = torch.from_numpy(rng.integers(0, 20, (tokens, chosen)))
    table = torch.from_numpy(rng.integers(-1, 6, 20).astype(np.int32))
    given = ids, table, torch.tensor([live])
    found = find_slots(*(each.to(device) for each in given))
    for mine, theirs in zip(found, naive_find_slots(*given), strict=True):
        assert mine.dtype == theirs.dtype == torch.int32
        np.testing.assert_array_equal(mine.cpu(), theirs)

"""Norms and rotary positions: the kernels against the plain torch that the CPU's kernels are compared with."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.compare import nmse
from tests.unit.kernels.gpu.conftest import IMPLEMENTATIONS
from thermocline.kernels.gpu.dense import (
    DeviceRope,
    naive_layer_norm,
    naive_rms_norm,
    naive_rotate,
)
from thermocline.kernels.gpu.row_kernels import norm_rows, turn_rows

pytestmark = pytest.mark.slow
MOST = 1e-13


@pytest.fixture(params=[each for each in IMPLEMENTATIONS if each.id != "twin"])
def device(request):
    """Where the kernels run."""
    return "cuda" if request.param == "cuda" else "cpu"


def normal(rng, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))


@pytest.mark.parametrize(
    "shape", [(1, 1), (3, 7), (2, 512), (1, 2048), (2, 3, 80), (1, 2880), (0, 64)]
)
def test_norms(device, shape):
    """Widths of one number, of no power of two, of heads and of tokens; no row."""
    rng = np.random.default_rng(3)
    x, gain = normal(rng, *shape) * 3, normal(rng, shape[-1])
    found = norm_rows(x.to(device), gain.to(device), 1e-3).cpu()
    expected = naive_rms_norm(x.double(), gain.double(), 1e-3)
    assert found.shape == x.shape
    assert not len(x) or nmse(found.numpy(), expected.numpy()) < MOST


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 512), (1, 2048), (2, 3, 80), (0, 64)])
def test_norms_that_take_the_mean_off(device, shape):
    """The same of rows that lie far from zero."""
    rng = np.random.default_rng(6)
    x, gain = normal(rng, *shape) + 5, normal(rng, shape[-1])
    found = norm_rows(x.to(device), gain.to(device), 1e-3, centers=True).cpu()
    expected = naive_layer_norm(x.double(), gain.double(), 1e-3)
    assert found.shape == x.shape
    assert not len(x) or shape[-1] == 1 or nmse(found.numpy(), expected.numpy()) < MOST
    assert shape[-1] > 1 or not found.any(), "a number alone is its mean"
    bias = normal(rng, shape[-1])
    found = norm_rows(x.to(device), gain.to(device), 1e-3, centers=True, bias=bias.to(device)).cpu()
    expected = naive_layer_norm(x.double(), gain.double(), 1e-3, bias.double())
    assert not len(x) or nmse(found.numpy(), expected.numpy()) < MOST


def test_a_norm_of_zeros_and_of_rows_apart(device):
    """Zeros stay zeros; rows that lie apart are those that are asked for."""
    rng = np.random.default_rng(4)
    wide, gain = normal(rng, 4, 2, 32), normal(rng, 32)
    wide[1] = 0
    part = wide[:, 0]
    found = norm_rows(part.to(device), gain.to(device), 1e-5).cpu()
    assert not found[1].any()
    expected = naive_rms_norm(part.double(), gain.double(), 1e-5)
    assert nmse(found.numpy(), expected.numpy()) < MOST


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "half"),
    [(1, 1, 2, 1), (3, 4, 64, 32), (2, 3, 80, 20), (1, 32, 128, 64), (2, 1, 576, 32), (0, 2, 8, 4)],
)
def test_turned_heads(device, pairs, tokens, heads, head_dim, half):
    """All of a head's dimensions or the first ones, in both orders; what does not turn keeps its bits."""
    rng = np.random.default_rng(5)
    x, angle = normal(rng, tokens, heads, head_dim), normal(rng, tokens, half)
    cosines, sines = torch.cos(angle), torch.sin(angle)
    given = [each.to(device) for each in (x, cosines, sines)]
    found = turn_rows(*given, pairs=pairs).cpu()
    rope = DeviceRope(cosines.double(), sines.double(), pairs)
    expected = naive_rotate(x.double(), rope)
    assert not tokens or nmse(found.numpy(), expected.numpy()) < MOST
    np.testing.assert_array_equal(found[..., 2 * half :], x[..., 2 * half :])


def test_a_row_is_the_same_beside_others(device):
    """Bits depend on nothing else."""
    rng = np.random.default_rng(6)
    x, gain = normal(rng, 5, 96).to(device), normal(rng, 96).to(device)
    together = norm_rows(x, gain, 1e-6)
    for n in range(5):
        assert torch.equal(norm_rows(x[n : n + 1], gain, 1e-6)[0], together[n])

"""What ends a layer or a model behind its products: norms before the addition, and capped logits, in every implementation."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.kernels.test_dense import dense  # noqa: F401 - a fixture
from thermocline.kernels.dense_contract import PostNorm

EPSILON = 1e-5


def in_double(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    return wide / np.sqrt(np.square(wide).mean(axis=-1, keepdims=True) + EPSILON) * gain


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (7, 33), (37, 2816), (0, 8)])
@pytest.mark.parametrize(("has_second", "has_parts"), [(False, False), (True, False), (True, True)])
def test_what_is_added_is_normed(dense, rows, width, has_second, has_parts):  # noqa: F811
    """(x + norm(y)) * scale, where y is one input, or the sum of two, which may be normed by gains of their own."""
    rng = np.random.default_rng(width)
    x, first, second = rng.standard_normal((3, rows, width)).astype(np.float32)
    gain, one, other = rng.standard_normal((3, width)).astype(np.float32)
    norm = PostNorm(gain, EPSILON, 0.75, (one, other) if has_parts else None)
    kept = x.copy(), first.copy(), second.copy()
    found = dense.add_normed(x, first, second if has_second else None, norm)
    y = in_double(first, one) if has_parts else first.astype(np.float64)
    if has_second:
        y = y + (in_double(second, other) if has_parts else second)
    np.testing.assert_allclose(found, (x + in_double(y, gain)) * 0.75, rtol=2e-5, atol=2e-5)
    for before, after in zip(kept, (x, first, second), strict=True):
        np.testing.assert_array_equal(before, after)
    for row in range(rows):
        alone = dense.add_normed(
            x[row : row + 1],
            first[row : row + 1],
            second[row : row + 1] if has_second else None,
            norm,
        )
        np.testing.assert_array_equal(alone[0], found[row])


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 33), (2, 70_001), (0, 5)])
def test_logits_are_capped(dense, rows, width):  # noqa: F811
    """cap * tanh(x / cap), from far below the cap to far above, and each number by itself."""
    rng = np.random.default_rng(width)
    x = (30 * rng.standard_normal((rows, width))).astype(np.float32)
    found = dense.softcap(x, 30.0)
    np.testing.assert_allclose(found, 30 * np.tanh(x.astype(np.float64) / 30), rtol=1e-5, atol=1e-6)
    if rows:
        shorter = np.ascontiguousarray(x[-1:, width // 2 :])
        np.testing.assert_array_equal(dense.softcap(shorter, 30.0)[0], found[-1, width // 2 :])

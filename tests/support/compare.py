"""How far two results may lie apart: one measure, and the one table of tolerances.

Loosening a tolerance is a decision that needs a record in docs/decisions. Knows no model and no oracle.
"""

from __future__ import annotations

from types import MappingProxyType

import numpy as np

TOLERANCES = MappingProxyType(
    {
        # Against transformers' float32 model holding the very values that the file's weights decode
        # to. Both sides compute in float32, so only the order of additions differs.
        "transformers/F32": 1e-8,
        "transformers/F16": 1e-5,
        "transformers/BF16": 1e-5,
        "transformers/Q8_0": 1e-6,
        "transformers/Q4_0": 1e-6,
        "transformers/Q4_K": 1e-6,
        "transformers/Q5_K": 1e-6,
        "transformers/Q6_K": 1e-6,
        "transformers/mixed": 1e-6,
    }
)
"""Largest allowed NMSE by "oracle/weight format"."""


def nmse(ours: np.ndarray, oracle: np.ndarray) -> float:
    """Return sum((ours - oracle)^2) / sum(oracle^2) in double; infinite where either is not finite."""
    assert ours.shape == oracle.shape, f"shapes differ: {ours.shape}, {oracle.shape}"
    a, b = np.asarray(ours, np.float64), np.asarray(oracle, np.float64)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("inf")
    power = float(np.square(b).sum())
    error = float(np.square(a - b).sum())
    if power == 0.0:
        return 0.0 if error == 0.0 else float("inf")
    return error / power


def assert_within(ours: np.ndarray, oracle: np.ndarray, tolerance: str) -> None:
    """Fail unless the NMSE of `ours` is at most that of entry `tolerance` of the table."""
    found, allowed = nmse(ours, oracle), TOLERANCES[tolerance]
    assert found <= allowed, f"NMSE {found:.3g} exceeds {allowed:g} ({tolerance})"

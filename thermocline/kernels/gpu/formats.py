"""Which block formats the device's kernels read. Imports neither torch nor Triton, so that planning can ask."""

from __future__ import annotations

DEVICE_FORMATS = frozenset(
    ["F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "MXFP4"]
)
"""Experts with a matrix in any other format are computed on the CPU."""

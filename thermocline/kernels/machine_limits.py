"""What a machine's computing threads reach at most, as kernels measure it. Knows no model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """What the computing threads reach at most, just now: bytes read, and int8 multiply-adds."""

    read_bytes_per_s: float
    multiply_adds_per_s: float
    sample_bytes: int
    """How much was read to measure; less than the last cache holds says little about memory."""

"""Speeds of a machine that nobody has, in round numbers."""

from __future__ import annotations

from typing import Any

from thermocline.costmodel.machine_speeds import (
    AttentionSpeeds,
    DeviceSpeeds,
    DiskSpeeds,
    MachineSpeeds,
    RowCosts,
)

LAYOUT = "q4"
DISK = DiskSpeeds(
    sequential_bytes_per_s=1e9,
    expert_bytes_per_s=5e8,
    release_bytes_per_s=2e9,
    cpu_s_per_byte=0.0,
    release_cpu_s_per_byte=0.0,
)
DEVICE = DeviceSpeeds("device", 1e12, 1e14, 2e10, 1e10, 2e10, 1e10, 1e-6)


def speeds(**changed: Any) -> MachineSpeeds:
    """Return 10 GB/s for one row, and twice the seconds for sixteen; `changed`: other fields."""
    costs = RowCosts((1, 16), (1e-10, 2e-10))
    fields: dict[str, Any] = {
        "threads": 2,
        "read_bytes_per_s": 1e10,
        "multiply_adds_per_s": 1e12,
        "experts": {LAYOUT: costs},
        "trunk": {"attention": costs, "attention, dense": costs, "recurrent": costs},
        "head": costs,
        "attention": AttentionSpeeds(decode_pair_s=1e-8, prompt_pair_s=1e-9),
        "step_s": 0.0,
    }
    return MachineSpeeds(**(fields | changed))

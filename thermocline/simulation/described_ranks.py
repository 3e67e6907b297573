"""Describes what a rank computes of a layer, from its sizes and the speeds of a processor or device. Pure.

Experts are read once for all their rows, or multiplied longer than they are read (`device_seconds`). Those that find
no room in memory are read from disk whenever they are used. Knows no exchange.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from thermocline.costmodel.cost_model import (
    EXPERT_LAUNCHES,
    Phase,
    Workload,
    device_seconds,
    non_expert_seconds_device,
)
from thermocline.simulation.ranks import RankCosts

if TYPE_CHECKING:
    from thermocline.costmodel.machine_speeds import DeviceSpeeds
    from thermocline.messages import IntArray
    from thermocline.models.sizes import LayerSizes


def describe_rank(
    layer: LayerSizes, speeds: DeviceSpeeds, *, is_prompt: bool, expert_wait_s: float = 0.0
) -> RankCosts:
    """Return what a rank computes of such a layer.

    is_prompt: tokens are one prompt's, and share its keys and values; else each is of another request. expert_wait_s:
    what the disk takes for an expert, on average of those in memory and the others.
    """
    row_s = device_seconds(speeds, layer.expert, 1.0)
    # Far beyond the rows at which arithmetic takes longer than reading.
    many = 1e9
    multiply_s = device_seconds(speeds, layer.expert, many) / many

    def attend_s(num_tokens: int, num_seen: int) -> float:
        if is_prompt:
            work = Workload(Phase.PREFILL, num_tokens, num_seen)
            return non_expert_seconds_device(speeds, layer, work)
        work = Workload(Phase.DECODE, num_tokens, 0)
        seen_bytes = layer.seen_per_token * layer.seen(num_seen)
        own_s = num_tokens * device_seconds(speeds, seen_bytes, 1.0)
        return non_expert_seconds_device(speeds, layer, work) + own_s

    def expert_s(rows: IntArray) -> float:
        each = np.maximum(row_s, rows * multiply_s) + expert_wait_s
        return float(each.sum()) + EXPERT_LAUNCHES * speeds.launch_s

    return RankCosts(attend_s, expert_s)

"""Cuts the experts that a device lacks into parts, which are copied and computed in turn. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from thermocline.kernels.expert_parts import StreamPart
from thermocline.units import ceil_div

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from thermocline.messages import IntArray, LayerIndex


def stream_parts(
    residency: IntArray, layers: Iterable[LayerIndex], slots: Sequence[int]
) -> list[StreamPart]:
    """Return parts that bring all experts without a slot, layer by layer.

    residency: int32 [layers, E], below zero for what is not there. slots: two or more, of which each half takes every
    other part, so that one is filled while the other is computed. Parts of a layer are about equal.
    """
    half = len(slots) // 2
    assert half, "one slot is filled while another is computed"
    halves = np.array(slots[: 2 * half], np.int32).reshape(2, half)
    parts: list[StreamPart] = []
    for layer in layers:
        absent = np.flatnonzero(residency[layer] < 0).astype(np.int32)
        for experts in np.array_split(absent, ceil_div(len(absent), half)) if len(absent) else ():
            parts.append(StreamPart(layer, experts, halves[len(parts) % 2][: len(experts)]))
    return parts

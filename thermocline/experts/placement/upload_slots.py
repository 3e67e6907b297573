"""How many slots of a device are for uploads: experts that are copied for one layer of one chunk. Pure.

Knows no device and no model.
"""

from __future__ import annotations

from typing import Final

from thermocline.units import ceil_div

MAX_STAGED: Final = 16
"""Slots for uploads: enough to keep the link busy while a layer is computed."""
_LEAST_STREAMED: Final = 4
_AHEAD_SHARE: Final = 8
"""Of the bytes of experts, one in so many may be for uploads that begin before their layer is routed."""


def num_staged_slots(given: int, largest: int, wanted: int, per_layer: int) -> int:
    """Return how many slots for uploads there are.

    given: bytes for experts, of which the largest takes so many; wanted: bytes of all that have a use. per_layer: the
    most experts of a layer; 0 where none is uploaded before its layer is routed.

    As many as a layer lacks: half of them can be filled for the next layer before it is routed, and the others go round
    while it is computed. An eighth of the bytes at most, but sixteen slots as long as they take no more than half.
    """
    few = min(max(given // 2 // largest, 1), MAX_STAGED)
    lacking = num_lacking(given - few * largest, wanted, per_layer)
    return max(few, min(lacking, given // _AHEAD_SHARE // largest))


def num_lacking(resident: int, wanted: int, per_layer: int) -> int:
    """Return how many experts an average layer lacks with so many bytes of experts on the device."""
    return ceil_div(per_layer * max(wanted - resident, 0), max(wanted, 1))


def num_streamed_slots(num_staged: int) -> int:
    """Return how many slots for uploads are for prompts that are computed on the device alone: three quarters.

    The others are for layers that the CPU shares. 0 where there are so few that neither had enough.
    """
    streamed = num_staged * 3 // 4
    return streamed if streamed >= _LEAST_STREAMED else 0

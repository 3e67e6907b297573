"""Sorts a layer's token-expert pairs by expert, and splits them among those who compute them. Pure."""

from __future__ import annotations

from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from thermocline.kernels.native import load_native
from thermocline.messages import BackendRole, ExpertDispatch

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

    from numpy.typing import NDArray

    from thermocline.messages import IntArray, Routing

# By the number of each as an owner.
_ROLES: Final = (BackendRole.HOT, BackendRole.REMOTE, BackendRole.COLD)
_HOT, _REMOTE, _COLD = (np.uint8(number) for number in range(3))

Owners: TypeAlias = "NDArray[np.uint8]"
"""uint8 [E]: who computes each of a layer's experts."""


def owners_of(hot_mask: NDArray[np.bool_], remote_mask: NDArray[np.bool_] | None = None) -> Owners:
    """Return who computes each expert. hot_mask, remote_mask: bool [E]; what is both is hot."""
    others = _COLD if remote_mask is None else np.where(remote_mask, _REMOTE, _COLD)
    return np.where(hot_mask, _HOT, others)


def dispatch(routing: Routing, owners: Owners) -> Mapping[BackendRole, ExpertDispatch]:
    """Return each backend's pairs of a layer; one without work has no entry.

    Raises ValueError for an expert that is not there.
    """
    ids = routing.expert_ids
    if not ids.size:  # a layer without experts
        return MappingProxyType({})
    out = np.empty(2 * min(ids.size, len(owners)) + 3 * ids.size, np.int32)
    sizes = _core().dispatch_pairs(ids, routing.weights, owners, out)
    dispatches, first = {}, 0
    for role, num_experts, num_pairs in zip(_ROLES, sizes[::2], sizes[1::2], strict=True):
        if num_experts:
            pairs = first + 2 * num_experts
            dispatches[role] = ExpertDispatch(
                out[first : first + num_experts],
                out[first + num_experts : pairs],
                out[pairs : pairs + num_pairs],
                out[pairs + num_pairs : pairs + 2 * num_pairs],
                out[pairs + 2 * num_pairs : pairs + 3 * num_pairs].view(np.float32),
            )
            first = pairs + 3 * num_pairs
    return MappingProxyType(dispatches)


def chosen_experts(routing: Routing, num_experts: int) -> tuple[IntArray, IntArray]:
    """Return the experts that a layer's tokens chose, ascending, and how many chose each: int32 [n] both."""
    out = np.empty(2 * min(routing.expert_ids.size, num_experts), np.int32)
    if not len(out):
        return out, out
    chosen = _core().count_experts(routing.expert_ids, num_experts, out)
    return out[:chosen], out[chosen : 2 * chosen]


def pairs_by_slot(routing: Routing, *parts: ExpertDispatch) -> IntArray:
    """Return which pair each token's slot is: int32 [T, K].

    parts: have every pair of the layer together, and number them one after the other.
    """
    pair_of = np.empty(routing.expert_ids.shape, np.int32)
    start = 0
    for part in parts:
        end = start + len(part.rows)
        pair_of[part.rows, part.slots] = np.arange(start, end, dtype=np.int32)
        start = end
    return pair_of


@cache
def _core() -> ModuleType:
    return load_native()


def count_choices(
    ids: IntArray,
    layers: IntArray,
    residency: IntArray,
    counts: NDArray[np.int64],
    num_tokens: NDArray[np.int64],
) -> tuple[int, int]:
    """Add the choices int32 [n, T, K] of layers int32 [n] to `counts`, int64 [all layers, E], and T to theirs of `num_tokens`.

    Returns how many of them have a slot in `residency`, int32 [all layers, E], and in how many layers all have.
    """
    found: tuple[int, int] = _core().count_choices(ids, layers, residency, counts, num_tokens)
    return found

"""Decides which ranks own which experts at the start: neighbours, or balanced by the use that is known of them. Pure.

Rank 0 decides, and the others get its map as text, since what each machine knows of the use may differ.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from thermocline.errors import MeshError
from thermocline.parallel.balance import RankLayout, balance, imbalance
from thermocline.parallel.expert_map import ExpertMap, linear_map
from thermocline.units import ceil_div

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from thermocline.config import ExpertMapKind

    Loads = NDArray[np.float64]

COPIES_PER_RANK: Final = 1
"""Experts that each rank of a balanced map holds of a layer beyond its equal part. With one, the most loaded of 8 ranks of 2
experts has 1.16 of the mean for text that was not counted, with none 1.74 (demo model); each costs its bytes in every layer."""


class ChosenMap(NamedTuple):
    """A map with its reason, for the user."""

    experts: ExpertMap
    reason: str


def choose_map(
    kind: ExpertMapKind, shape: tuple[int, int], num_ranks: int, warmth: Loads | None
) -> ChosenMap:
    """Return who owns what. shape: layers, experts; warmth: float64 of that shape, None where no use is known."""
    num_layers, num_experts = shape
    linear = linear_map(num_layers, num_experts, num_ranks)
    if kind == "linear":
        return ChosenMap(linear, "neighbouring experts on each rank (--expert-map linear)")
    if warmth is None or not warmth.any():
        return ChosenMap(linear, "neighbouring experts on each rank: their use is not known yet")
    num_slots = num_ranks * (ceil_div(num_experts, num_ranks) + COPIES_PER_RANK)
    placed = balance(np.maximum(warmth, 0.0), RankLayout(num_slots, num_ranks))
    chosen = placed.expert_map(num_experts)
    is_used = warmth.any(axis=1)
    loads = [rank_loads(each, warmth, num_ranks)[is_used] for each in (chosen, linear)]
    most, most_linear = (float(imbalance(each).mean()) for each in loads)
    return ChosenMap(
        chosen,
        f"balanced by the use that is known: the busiest rank of a layer has {most:.2f} of the mean, "
        f"with neighbouring experts {most_linear:.2f}",
    )


def rank_loads(experts: ExpertMap, loads: Loads, num_ranks: int) -> Loads:
    """Return what each rank gets of `loads` [layers, experts] where owners share an expert: float64 [layers, ranks]."""
    holds = np.stack([(experts.owner == rank).any(axis=2) for rank in range(num_ranks)], axis=1)
    shares = loads / np.maximum(holds.sum(axis=1), 1)
    found: Loads = (holds * shares[:, None, :]).sum(axis=2)
    return found


def map_text(experts: ExpertMap) -> str:
    """Return a map as text for `read_map`."""
    return json.dumps(experts.owner.tolist(), separators=(",", ":"))


def read_map(text: str, shape: tuple[int, int], num_ranks: int) -> ExpertMap:
    """Read rank 0's map. shape: layers, experts. Raises MeshError for what is none of so many ranks."""
    try:
        owner = np.array(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise _unreadable(f"is no map of experts ({error})") from error
    if owner.dtype.kind != "i" or owner.ndim != 3 or owner.shape[:2] != shape:
        raise _unreadable("has other layers or experts")
    if not ((owner >= -1) & (owner < num_ranks)).all() or (owner < 0).all(axis=2).any():
        raise _unreadable("names ranks that there are not, or an expert without one")
    return ExpertMap(owner.astype(np.int32))


def _unreadable(what: str) -> MeshError:
    return MeshError(f"rank 0's map {what}: start all ranks with the same version and model file")

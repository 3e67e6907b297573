"""What `thermocline plan` says about workers: how many experts they would hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from thermocline.errors import ConfigError

if TYPE_CHECKING:
    from thermocline.experts.placement.planner import Plan
    from thermocline.models.sizes import ModelSizes


@dataclass(frozen=True, slots=True)
class HeldByWorkers:
    """What workers hold."""

    workers: tuple[str, ...]
    num_experts: int
    nbytes: int


def in_words(held: HeldByWorkers | None, on_failure: str) -> tuple[str, ...]:
    """Return the line that says what workers hold, none without any. on_failure: what becomes of unanswered parts."""
    from thermocline.units import format_bytes

    if held is None:
        return ()
    number = len(held.workers)
    who = "1 worker holds" if number == 1 else f"{number} workers hold"
    missing = "is computed here" if on_failure == "cpu" else "is an error"
    return (
        f"{who} {held.num_experts} experts ({format_bytes(held.nbytes)}), each in its own view of the file; "
        f"what is not answered {missing}",
    )


def held_by_workers(
    sizes: ModelSizes, plan: Plan, workers: tuple[str, ...], share: float | None
) -> HeldByWorkers | None:
    """Return what workers would hold, None without any. Raises ConfigError for what is no worker, or has nothing to do."""
    if not workers:
        return None
    if not sizes.num_experts:
        raise ConfigError(
            "the model has no routed experts, which are what workers compute: leave out --expert-worker"
        )
    import numpy as np

    from thermocline.config import RemoteConfig
    from thermocline.messages import LayerIndex
    from thermocline.remote.address import parse_worker
    from thermocline.remote.assignment import assign_experts

    for text in workers:
        parse_worker(text)
    layers = range(len(sizes.layers))
    hot_mask = np.array([plan.placement.hot_mask(LayerIndex(n)) for n in layers])
    found = assign_experts(
        hot_mask, len(workers), RemoteConfig(workers, share).held_share, sizes.dense_layers
    )
    counts = found.mask.sum(axis=1).tolist()
    nbytes = sum(n * layer.expert for n, layer in zip(counts, sizes.layers, strict=True))
    return HeldByWorkers(workers, sum(counts), nbytes)

"""Decides which models are unloaded so that another one has room. Pure: knows no engine and no clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.engine.needs import ModelNeeds


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is in memory. is_busy: requests use it; is_pinned: it is never unloaded."""

    name: str
    needs: ModelNeeds
    last_used_s: float
    is_busy: bool = False
    is_pinned: bool = False


def models_to_unload(
    wanted: ModelNeeds, loaded: Sequence[LoadedModel], budget_bytes: int
) -> tuple[str, ...] | None:
    """Return which models must go before the wanted one fits, in order; None if it never fits beside what stays.

    Idle ones go first, the least recently used of them before others. Busy ones are named only where the idle ones are not
    enough: whoever unloads waits until nobody uses them. Any model fits alone, however large: what the memory can not
    hold of it is read again.
    """
    staying = sorted(
        (model for model in loaded if not model.is_pinned),
        key=lambda model: (model.is_busy, model.last_used_s),
    )
    pinned = [model for model in loaded if model.is_pinned]
    going: list[LoadedModel] = []
    while not _fits(wanted, [*pinned, *staying], budget_bytes):
        if not staying:
            return None
        going.append(staying.pop(0))
    # The first ones may have been too small to help.
    for model in tuple(going):
        if _fits(wanted, [*pinned, *staying, model], budget_bytes):
            going.remove(model)
            staying.append(model)
    return tuple(model.name for model in going)


def _fits(wanted: ModelNeeds, others: Sequence[LoadedModel], budget_bytes: int) -> bool:
    if not others:
        return True
    everybody = [wanted, *(model.needs for model in others)]
    on_device = [needs for needs in everybody if needs.uses_device]
    # Without a limit of its own, a model takes all of the device that is free.
    shares_device = len(on_device) < 2 or all(needs.device_bytes is not None for needs in on_device)
    return shares_device and sum(needs.host_bytes for needs in everybody) <= budget_bytes

"""Rules that choose what a device computes of a layer, and which experts are copied to it for that. Pure.

Knows no cache: who calls says what the device holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

import numpy as np

from thermocline.experts.dispatch.co_execution import seconds_on_device
from thermocline.experts.dispatch.co_execution import split as co_execute
from thermocline.experts.dispatch.streaming import pays_ahead

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from thermocline.costmodel.expert_costs import ExpertCosts
    from thermocline.messages import IntArray, LayerIndex

# Sizes of chunks that are tried, up to the largest.
_CHUNK_TOKENS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)

# Of the CPU's time: estimates leave out threads that take turns, and are no better than this.
_PROMISING: Final = 0.9

DeviceWork: TypeAlias = "tuple[NDArray[np.bool_], NDArray[np.bool_]]"
"""Which of a layer's n chosen experts the device computes: of the resident ones, and by an upload; bool [n] each."""


class SplitRule(Protocol):
    """Chooses what a device computes. Pure."""

    def split(
        self,
        layer: LayerIndex,
        resident: NDArray[np.bool_],
        counts: IntArray,
        arriving: NDArray[np.bool_],
    ) -> DeviceWork:
        """Return what the device computes of a layer's n chosen experts.

        resident: bool [n]; counts: int32 [n], how many tokens chose each; arriving: bool [n], those copied ahead.
        """
        ...

    def copies_ahead(
        self, layer: LayerIndex, num_tokens: int, num_experts: int, num_absent: int
    ) -> bool:
        """Return whether a layer's absent experts are copied before it is routed.

        num_experts: those that the device may have.
        """
        ...


@dataclass(frozen=True, slots=True)
class LinkState:
    """What the link to a device does.

    num_copying: returns the copies in flight. pause_s: returns how long the link waits between two layers of so many
    tokens. max_ahead: the most experts that are copied before their layer is routed.
    """

    num_copying: Callable[[], int] = lambda: 0
    pause_s: Callable[[int], float] = lambda num_tokens: 0.0
    max_ahead: int = 0


class OnlyResident:
    """`SplitRule`: the device computes what it holds, and nothing is uploaded."""

    def split(
        self,
        layer: LayerIndex,
        resident: NDArray[np.bool_],
        counts: IntArray,
        arriving: NDArray[np.bool_],
    ) -> DeviceWork:
        return resident, np.zeros_like(resident)

    def copies_ahead(
        self, layer: LayerIndex, num_tokens: int, num_experts: int, num_absent: int
    ) -> bool:
        return False


class FastestSplit:
    """`SplitRule` by which the last of device, link and CPU is done soonest."""

    def __init__(self, costs: Sequence[ExpertCosts | None], num_used: int, link: LinkState) -> None:
        """costs: by layer. num_used: experts of a token. link: what it does just now."""
        self._costs = tuple(costs)
        self._num_used = num_used
        self._link = link
        # With one token per expert only two numbers matter: of the experts, and of the resident ones.
        self._known: dict[tuple[str, int, int], tuple[int, int]] = {}

    def min_upload_tokens(self, num_experts: int) -> float:
        """Return the smallest chunk, in tokens, for which uploading its experts pays; they count as equally used."""
        nothing = np.zeros(num_experts, bool)
        for num_tokens in _CHUNK_TOKENS:
            rows = _equal_rows(num_tokens, num_experts, self._num_used)
            for costs in {one for one in self._costs if one is not None}:
                if co_execute(costs, rows, nothing[: len(rows)]).upload.any():
                    return num_tokens
        return inf

    def promises(self, num_tokens: int, num_experts: int, resident_share: float) -> bool:
        """Return whether chunks of so many tokens would take a tenth less than on the CPU, in any layer.

        Experts count as equally used. resident_share: of all experts.
        """
        rows = _equal_rows(num_tokens, num_experts, self._num_used)
        resident = np.arange(len(rows)) < round(resident_share * len(rows))
        return any(
            co_execute(costs, rows, resident).seconds
            < _PROMISING * float(costs.cpu_seconds(rows).sum())
            for costs in {one for one in self._costs if one is not None}
        )

    def split(
        self,
        layer: LayerIndex,
        resident: NDArray[np.bool_],
        counts: IntArray,
        arriving: NDArray[np.bool_],
    ) -> DeviceWork:
        costs = self._costs[layer]
        if costs is None:
            return resident, resident
        if counts.sum() == len(counts):
            return self._split_single(costs, resident, counts)
        there = resident | arriving
        if (
            not there.any()
            and costs.cpu_seconds(counts).sum() <= costs.copy_s + costs.launch_overhead_s
        ):
            return resident, resident  # the CPU is done before the first upload
        wait_s = self._link.num_copying() * costs.copy_s
        chosen = co_execute(costs, counts, there, link_wait_s=wait_s)
        # A layer may use fewer experts than others.
        num_tokens = max(int(counts.sum()) // self._num_used, 1)
        if seconds_on_device(costs, counts, there, num_tokens, link_wait_s=wait_s) < chosen.seconds:
            return resident, ~resident
        return chosen.on_device & resident, chosen.upload | (chosen.on_device & ~resident)

    def copies_ahead(
        self, layer: LayerIndex, num_tokens: int, num_experts: int, num_absent: int
    ) -> bool:
        costs = self._costs[layer]
        if costs is None:
            return False
        pause_s = self._link.pause_s(num_tokens)
        pairs = num_tokens, self._num_used
        return pays_ahead(costs, num_experts, num_absent, pairs, pause_s, self._link.max_ahead)

    def _split_single(
        self, costs: ExpertCosts, resident: NDArray[np.bool_], counts: IntArray
    ) -> DeviceWork:
        case = costs.layout, len(resident), int(np.count_nonzero(resident))
        known = self._known.get(case)
        if known is None:
            chosen = co_execute(costs, counts, resident)
            num_hits, num_uploads = int(chosen.on_device.sum()), int(chosen.upload.sum())
            known = self._known[case] = num_hits, num_uploads
        num_hits, num_uploads = known
        hits = resident & (np.cumsum(resident) <= num_hits)
        return hits, ~resident & (np.cumsum(~resident) <= num_uploads)


def _equal_rows(num_tokens: int, num_experts: int, num_used: int) -> IntArray:
    """Return how many tokens chose each of the chosen experts, if all are chosen as often: int32 [n]."""
    each = max(num_tokens * num_used // num_experts, 1)
    return np.full(min(num_experts, num_tokens * num_used), each, np.int32)

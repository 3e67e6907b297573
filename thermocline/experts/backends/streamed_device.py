"""A device that lacks experts: prompts are computed on it alone where copying those takes less time than the CPU's help."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from thermocline.errors import DeviceMemoryError
from thermocline.experts.cache.residency import StackedResidency
from thermocline.experts.dispatch.co_execution import seconds_on_device, split
from thermocline.experts.dispatch.stream_parts import stream_parts
from thermocline.messages import LayerIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from thermocline.costmodel.expert_costs import ExpertCosts
    from thermocline.experts.cache.store import ExpertStore
    from thermocline.kernels.gpu.streamed import StreamedExperts
    from thermocline.messages import IntArray, Routing

# A layer that is shared with the CPU takes so many times as long as its estimate, or longer: activations go to the host
# and back, and jobs wait for Python. On an H100 with 16 cores it was 9 to 24 ms where the estimate was 4 (docs/LOG.md).
_SHARING: Final = 2.0
# Chunks of about one size after which their times count more than estimates, and how many of them are kept.
_MEASURED, _KEPT = 3, 7


class StreamedDevice:
    """A device's store, and what computes layers with experts that are copied for a prompt alone."""

    def __init__(
        self,
        store: ExpertStore,
        experts: StreamedExperts,
        slots: Sequence[int],
        costs: Sequence[ExpertCosts | None],
        num_used: int,
        is_locked: Callable[[], bool],
    ) -> None:
        """slots: for copies, the device's alone. costs: by layer, None for one without experts. num_used: experts of a token.

        is_locked: whether all experts can be copied straight from memory.
        """
        self._store, self._experts, self._slots = store, experts, tuple(slots)
        self._costs, self._num_used = tuple(costs), num_used
        self._num_experts = len(store.residency(LayerIndex(0)))
        self._is_locked = is_locked
        self._residency = StackedResidency()
        self._held: IntArray = np.zeros((0, 0), np.int32)
        self._is_short = False  # of memory, once
        # Seconds per token of the last chunks, by the length of their number of tokens in bits.
        self._times: defaultdict[int, deque[float]] = defaultdict(partial(deque, maxlen=_KEPT))

    def __repr__(self) -> str:
        return f"StreamedDevice({self._store}, {len(self._slots)} slots)"

    @property
    def is_able(self) -> bool:
        """Whether a prompt can be computed here at all: experts can be copied, and memory has not run out over one."""
        return not self._is_short and self._is_locked()

    def takes(self, num_tokens: int) -> bool:
        """Whether a prompt's chunk of so many tokens is computed here sooner than with the CPU.

        By estimates, unless chunks of about this size have taken longer here than the CPU would take for their experts.
        """
        if not self.is_able:
            return False
        layouts = self._layouts()
        times = tuple(self._times[num_tokens.bit_length()])
        if len(times) >= _MEASURED:
            cpu_s = sum(count * self._cpu_seconds(one, num_tokens) for one, count, _ in layouts)
            if statistics.median(times) * num_tokens > cpu_s:
                return False
        return sum(count * self._gain(one, there, num_tokens) for one, count, there in layouts) > 0

    def _layouts(self) -> list[tuple[ExpertCosts, int, int]]:
        """Return each layout's costs, its layers, and how many experts are there in an average one of them."""
        num_there: dict[ExpertCosts, list[int]] = defaultdict(list)
        for layer, costs in self._routed():
            num_there[costs].append(int(np.count_nonzero(self._store.residency(layer) >= 0)))
        return [(costs, len(each), sum(each) // len(each)) for costs, each in num_there.items()]

    def note(self, num_tokens: int, seconds: float) -> None:
        """Take note of how long a chunk took here."""
        self._times[num_tokens.bit_length()].append(seconds / num_tokens)

    def _cpu_seconds(self, costs: ExpertCosts, num_tokens: int) -> float:
        return float(costs.cpu_seconds(self._rows(num_tokens)).sum())

    def _rows(self, num_tokens: int) -> IntArray:
        """Return how many tokens choose each chosen expert, if all are chosen as often: int32 [n]."""
        num_pairs = num_tokens * self._num_used
        share = 1 - (1 - self._num_used / self._num_experts) ** num_tokens
        num_chosen = max(round(self._num_experts * share), 1)
        return np.full(num_chosen, max(num_pairs // num_chosen, 1), np.int32)

    def _gain(self, costs: ExpertCosts, num_there: int, num_tokens: int) -> float:
        """Return the seconds that a layer takes less here, below zero where it takes more. num_there: of its experts."""
        rows = self._rows(num_tokens)
        num_pairs = num_tokens * self._num_used
        there = np.arange(len(rows)) < round(len(rows) * num_there / self._num_experts)
        shared_s = min(
            split(costs, rows, there).seconds, seconds_on_device(costs, rows, there, num_tokens)
        )
        # All that are absent are copied, chosen or not.
        copy_s = costs.copy_s if costs.bulk_copy_s is None else costs.bulk_copy_s
        copies_s = copy_s * (self._num_experts - num_there)
        compute_s = float(costs.device_seconds(rows).sum()) - costs.output_row_s * num_pairs
        return float(_SHARING * shared_s - max(copies_s, compute_s))

    def _routed(self) -> list[tuple[LayerIndex, ExpertCosts]]:
        return [(LayerIndex(n), one) for n, one in enumerate(self._costs) if one is not None]

    @contextmanager
    def held(self) -> Iterator[StreamedExperts]:
        """Hold the experts that are there in place, and give what brings the others. Not again where memory ran out."""
        residency = self._residency.of(self._store.hold())
        try:
            self._held = residency
            layers = [layer for layer, _ in self._routed()]
            yield self._experts.at(residency, stream_parts(residency, layers, self._slots))
        except DeviceMemoryError:
            self._is_short = True
            raise
        finally:
            self._store.let_go()

    def count(self, layer: LayerIndex, routing: Routing) -> None:
        """Count what a layer of the last prompt chose: what was there, and what was copied for it."""
        absent = self._held[layer] < 0
        num_absent = int(np.count_nonzero(absent[routing.expert_ids]))
        self._store.count_hits(routing.expert_ids.size - num_absent)
        self._store.count_streamed(layer, num_absent, int(np.count_nonzero(absent)))

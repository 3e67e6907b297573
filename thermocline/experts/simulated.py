"""A simulated device for hot experts: its own memory, its own compute thread, a copy engine of a set speed.

For studying and testing schedules on a machine without a GPU: results are those of the CPU, to the bit.
Copies take the time that the set bandwidth allows; computing takes what one thread takes.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from thermocline.errors import ConfigError
from thermocline.kernels.contract import ExpertWork
from thermocline.kernels.weight import ExpertStack, WeightStack
from thermocline.messages import LayerIndex, PartialSum, Tier
from thermocline.traces.lanes import Name
from thermocline.units import format_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from thermocline.experts.catalog import ExpertCatalog
    from thermocline.experts.placement import Placement
    from thermocline.kernels.contract import Kernels
    from thermocline.kernels.lane import JobLane
    from thermocline.kernels.weight import FloatArray, IntArray
    from thermocline.messages import LayerWork, TierWork


class DeviceExperts:
    """Copies of the hot experts. Raises ConfigError when they are more than `budget_bytes`."""

    def __init__(self, catalog: ExpertCatalog, placement: Placement, budget_bytes: int) -> None:
        chosen = {
            LayerIndex(layer): np.array(sorted(hot), np.intp)
            for layer, hot in enumerate(placement.hot)
            if hot
        }
        self.nbytes = sum(
            part.raw[:1].nbytes * len(experts)
            for layer, experts in chosen.items()
            for part in _parts(catalog.stack(layer))
        )
        if self.nbytes > budget_bytes:
            raise ConfigError(
                f"the hot experts have {format_bytes(self.nbytes)}, and the simulated device has "
                f"{format_bytes(budget_bytes)}: choose a smaller --hot-fraction"
            )
        self._stacks = {
            layer: _copy(catalog.stack(layer), experts) for layer, experts in chosen.items()
        }
        self._places = {
            layer: _places(experts, placement.num_experts) for layer, experts in chosen.items()
        }

    def stack(self, layer: LayerIndex) -> ExpertStack:
        """Return the layer's hot experts, by place on the device."""
        return self._stacks[layer]

    def places(self, layer: LayerIndex, experts: IntArray) -> IntArray:
        """Return where the experts with these ids are on the device."""
        places: IntArray = self._places[layer][experts]
        assert (places >= 0).all(), "an expert that is not hot was sent to the device"
        return places


class CopyEngine:
    """Moves arrays between host and device at `bytes_per_s`, on a lane of its own."""

    def __init__(self, lane: JobLane, bytes_per_s: float) -> None:
        self._lane = lane
        self._bytes_per_s = bytes_per_s

    async def copy(self, values: FloatArray, work: LayerWork) -> FloatArray:
        """Return a copy; takes as long as the bandwidth allows, and no CPU time beyond the copy itself."""
        job = partial(self._copy, values)
        return await self._lane.run(Name.COPY, job, work.chunk, work.layer, bytes=values.nbytes)

    def _copy(self, values: FloatArray) -> FloatArray:
        ends_s = time.perf_counter() + values.nbytes / self._bytes_per_s
        copied = values.copy()
        time.sleep(max(ends_s - time.perf_counter(), 0.0))
        return copied


class SimulatedExpertCompute:
    """`ExpertCompute` of the hot tier on the simulated device."""

    def __init__(
        self,
        fingerprint: str,
        experts: DeviceExperts,
        kernels: Kernels,
        lane: JobLane,
        engine: CopyEngine,
    ) -> None:
        self.tier = Tier.HOT
        self.fingerprint = fingerprint
        self._experts = experts
        self._kernels = kernels
        self._lane = lane
        self._engine = engine

    async def compute_share(self, work: LayerWork, share: TierWork) -> PartialSum:
        """See `ExpertCompute.compute_share`: input to the device, compute, outputs back."""
        needed, rows = np.unique(share.rows, return_inverse=True)
        x = await self._engine.copy(work.x[needed], work)
        job = partial(self._outputs, work, share, x, rows.astype(np.int32))
        values = await self._lane.run(
            Name.HOT, job, work.chunk, work.layer, experts=len(share.experts)
        )
        values = await self._engine.copy(values, work)
        return PartialSum(work.chunk, work.layer, self.tier, share.rows, share.slots, values)

    def _outputs(
        self, work: LayerWork, share: TierWork, x: FloatArray, rows: NDArray[np.int32]
    ) -> FloatArray:
        places = self._experts.places(work.layer, share.experts)
        stack = self._experts.stack(work.layer)
        expert_work = ExpertWork(stack, places, share.counts, x, rows, share.weights)
        return self._kernels.expert_outputs(expert_work, prompt=work.chunk.is_prompt)


def _parts(stack: ExpertStack) -> tuple[WeightStack, WeightStack, WeightStack]:
    return stack.gate, stack.up, stack.down


def _copy(stack: ExpertStack, experts: NDArray[np.intp]) -> ExpertStack:
    gate, up, down = (
        WeightStack(part.name, part.format, part.raw[experts], part.cols) for part in _parts(stack)
    )
    return ExpertStack(gate, up, down)


def _places(experts: NDArray[np.intp], num_experts: int) -> IntArray:
    places = np.full(num_experts, -1, np.int32)
    places[experts] = np.arange(len(experts))
    return places

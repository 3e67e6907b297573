"""`ExpertDevice` of a GPU, over torch and Triton.

Slots hold experts in the file's quantised blocks. On torch's CPU device the same code runs with the kernels' reference
twins, for tests. Knows no policy.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from thermocline.experts.backends.contract import KeptOutputs
from thermocline.experts.backends.expert_copies import slot_parts
from thermocline.experts.backends.expert_feed import ExpertFeed
from thermocline.experts.dispatch.grouping import pairs_by_slot
from thermocline.experts.placement.slots import UNIT_BYTES
from thermocline.kernels.gpu.expert_ffn import expert_outputs, naive_expert_outputs
from thermocline.kernels.gpu.gather_combine import gather_combine, naive_gather_combine
from thermocline.kernels.gpu.resident import ResidentExperts
from thermocline.kernels.gpu.slots import ExpertSlots, SlotMatrix, SlotWork
from thermocline.kernels.gpu.streamed import StreamedExperts
from thermocline.models.device.sizes import PART_ALIGNMENT
from thermocline.traces.lanes import Name
from thermocline.units import align_up

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from thermocline.experts.backends.contract import SentRows
    from thermocline.experts.backends.expert_copies import ExpertCopies, SlotPart
    from thermocline.experts.backends.slot_memory import SlotMemory
    from thermocline.experts.catalog import ExpertCatalog
    from thermocline.kernels.gpu.streams import DeviceStreams
    from thermocline.kernels.weight import ExpertStack, FloatArray, IntArray
    from thermocline.messages import ExpertDispatch, ExpertKey, LayerIndex, LayerWork
    from thermocline.traces.recorder import Recorder
    from thermocline.workers.lane import LaneThread


@dataclass(slots=True)
class _GpuRows:
    """Rows of activations, float32 [n, D] on the host, and on the device after their first use.

    rows: int32 [n], ascending, their tokens. residual, device_residual: [n, D], the same rows of it, where they are
    added up.
    """

    rows: IntArray
    host: FloatArray
    residual: FloatArray | None = None
    device: torch.Tensor | None = None
    device_residual: torch.Tensor | None = None


class GpuDevice:
    """`ExpertDevice` on one GPU. arena: uint8, all memory in which experts may lie, allocated at once."""

    def __init__(
        self,
        catalog: ExpertCatalog,
        layers: tuple[LayerIndex, ...],
        memory: SlotMemory,
        streams: DeviceStreams,
        lane: LaneThread,
        copies: ExpertCopies,
        arena: torch.Tensor | None = None,
    ) -> None:
        """layers: those whose experts may come. arena: None to take it; has the slots of `memory` in segments, too.

        Raises DeviceMemoryError where there is too little for `memory`.
        """
        self._catalog, self._memory, self._streams = catalog, memory, streams
        self._lane, self._copies = lane, copies
        if arena is None:
            with streams.computing():
                arena = torch.empty(memory.total_bytes, dtype=torch.uint8, device=streams.device)
        self.arena = arena
        streams.check(self.arena)
        self._layouts = {layer: catalog.layout(layer) for layer in layers}
        self._parts = {layer: slot_parts(catalog.stack(layer)) for layer in layers}
        self._slots = {
            layer: self._view(catalog.stack(layer), self._parts[layer]) for layer in self._layouts
        }
        factors = {layer: catalog.stack(layer).pair_factors() for layer in layers}
        self._resident: ResidentExperts | None = None
        self._factors = {layer: each for layer, each in factors.items() if each is not None}

    @property
    def num_experts(self) -> int:
        """Experts of each layer."""
        return self._catalog.num_experts

    @property
    def layout_layers(self) -> tuple[LayerIndex, ...]:
        """The first layer of each layout whose experts may come."""
        return tuple({name: layer for layer, name in reversed(self._layouts.items())}.values())

    def hidden_size(self, layer: LayerIndex) -> int:
        """Return the width of its experts' input."""
        return self._parts[layer][0].stack.cols

    def __repr__(self) -> str:
        return f"GpuDevice({self._streams}, {self._memory})"

    def allocate(self, layer: LayerIndex) -> int:
        return self._memory.allocate(self._layouts[layer])

    def free(self, layer: LayerIndex, slot: int) -> None:
        self._memory.free(self._layouts[layer], slot)

    def begin_copy(self, key: ExpertKey, slot: int, *, urgent: bool = False) -> Future[None]:
        target = self.arena[slot * UNIT_BYTES :]
        return self._copies.begin(key, self._parts[key.layer], target, urgent=urgent)

    def scratch(self, nbytes: int) -> AbstractContextManager[None]:
        """See `ExpertDevice.scratch`: torch allocates activations, and raises where memory is full."""
        return nullcontext()

    async def send(
        self, work: LayerWork, rows: IntArray, *, with_residual: bool = False
    ) -> SentRows:
        """See `ExpertDevice.send`. The rows are uploaded with the first compute."""
        is_all = len(rows) == len(work.x)
        x = work.x if is_all else work.x[rows]
        if not with_residual:
            return _GpuRows(rows, x)
        return _GpuRows(rows, x, residual=work.residual if is_all else work.residual[rows])

    async def compute(
        self, work: LayerWork, dispatch: ExpertDispatch, slots: IntArray, sent: SentRows
    ) -> FloatArray:
        """See `ExpertDevice.compute`. Raises DeviceMemoryError."""
        assert isinstance(sent, _GpuRows), "the rows were sent to another device"
        prompt = work.chunk.is_prompt
        job = partial(self.outputs, work.layer, dispatch, slots, sent, prompt=prompt)
        num_experts = len(dispatch.experts)
        return await self._lane.run(Name.HOT, job, work.chunk, work.layer, experts=num_experts)

    async def keep(
        self, work: LayerWork, dispatch: ExpertDispatch, slots: IntArray, sent: SentRows
    ) -> KeptOutputs:
        """See `ExpertDevice.keep`. Raises DeviceMemoryError."""
        assert isinstance(sent, _GpuRows), "the rows were sent to another device"
        job = partial(self._keep, work, dispatch, slots, sent)
        num_experts = len(dispatch.experts)
        values = await self._lane.run(Name.HOT, job, work.chunk, work.layer, experts=num_experts)
        return KeptOutputs(dispatch, values)

    async def compute_sum(
        self,
        work: LayerWork,
        dispatch: ExpertDispatch,
        slots: IntArray,
        sent: SentRows,
        kept: Sequence[KeptOutputs] = (),
    ) -> FloatArray:
        """See `ExpertDevice.compute_sum`. Raises DeviceMemoryError."""
        assert isinstance(sent, _GpuRows), "the rows were sent to another device"
        job = partial(self._sum, work, dispatch, slots, sent, kept)
        num_experts = len(dispatch.experts)
        return await self._lane.run(Name.HOT, job, work.chunk, work.layer, experts=num_experts)

    def outputs(
        self,
        layer: LayerIndex,
        dispatch: ExpertDispatch,
        slots: IntArray,
        sent: _GpuRows,
        *,
        prompt: bool,
    ) -> FloatArray:
        """Return what `compute` does, on the calling thread. Blocks, without the interpreter's lock."""
        with self._streams.computing():
            self._upload_rows(sent)
            rows = np.searchsorted(sent.rows, dispatch.rows)
            numbers = self._upload_numbers(slots, dispatch.counts, rows)
            found = self._queue(layer, numbers, sent, dispatch, prompt=prompt)
            return self._fetch(found, prompt=prompt)

    def computed(
        self, layer: LayerIndex, dispatch: ExpertDispatch, slots: IntArray, sent: _GpuRows
    ) -> None:
        """Compute a prompt's experts and leave their outputs there; on the calling thread. Blocks."""
        with self._streams.computing():
            self._upload_rows(sent)
            rows = np.searchsorted(sent.rows, dispatch.rows)
            numbers = self._upload_numbers(slots, dispatch.counts, rows)
            self._queue(layer, numbers, sent, dispatch, prompt=True)
            self._streams.finish(spin=True)

    def recorded(
        self, layer: LayerIndex, dispatch: ExpertDispatch, slots: IntArray, sent: _GpuRows
    ) -> Callable[[int], None] | None:
        """Return what computes a decode step's experts so many times from a recording, and blocks; on the calling thread.

        None where nothing can be recorded.
        """
        if not self._streams.can_capture:
            return None
        with self._streams.computing():
            self._upload_rows(sent)
            rows = np.searchsorted(sent.rows, dispatch.rows)
            numbers = self._upload_numbers(slots, dispatch.counts, rows)
            given = self._work(layer, numbers, sent, dispatch)
            _compute(given, prompt=False)  # compiles
            try:
                replay = self._streams.capture(lambda: _discard(_compute(given, prompt=False)))
            except RuntimeError:  # steps are not recorded either, and say so
                return None

        def run(times: int) -> None:
            with self._streams.computing():
                for _ in range(times):
                    replay()
                self._streams.finish(spin=True)

        return run

    def _keep(
        self, work: LayerWork, dispatch: ExpertDispatch, slots: IntArray, sent: _GpuRows
    ) -> torch.Tensor:
        """Return what `keep` does, on the calling thread. Blocks, so that the slots are free afterwards."""
        prompt = work.chunk.is_prompt
        with self._streams.computing():
            self._upload_rows(sent)
            numbers = self._upload_numbers(slots, dispatch.counts, dispatch.rows)
            found = self._queue(work.layer, numbers, sent, dispatch, prompt=prompt)
            self._streams.finish(spin=not prompt)
            return found

    def _sum(
        self,
        work: LayerWork,
        dispatch: ExpertDispatch,
        slots: IntArray,
        sent: _GpuRows,
        kept: Sequence[KeptOutputs],
    ) -> FloatArray:
        """Return what `compute_sum` does, like `outputs`."""
        prompt = work.chunk.is_prompt
        with self._streams.computing():
            self._upload_rows(sent)
            pair_of = pairs_by_slot(work.routing, *(part.dispatch for part in kept), dispatch)
            *numbers, pairs = self._upload_numbers(
                slots, dispatch.counts, dispatch.rows, pair_of.reshape(-1)
            )
            found = self._queue(work.layer, numbers, sent, dispatch, prompt=prompt)
            if kept:
                parts = [cast("torch.Tensor", part.values) for part in kept]
                found = torch.cat((*parts, found))
            residual = sent.device_residual
            assert residual is not None, "the rows were sent without the residual"
            combine = gather_combine if residual.is_cuda else naive_gather_combine
            return self._fetch(combine(found, pairs.view(pair_of.shape), residual), prompt=prompt)

    def _upload_rows(self, sent: _GpuRows) -> None:
        """Queue the copy of rows that were sent, once."""
        if sent.device is not None:
            return
        if sent.residual is None:
            (sent.device,) = self._upload(sent.host)
        else:
            sent.device, sent.device_residual = self._upload(sent.host, sent.residual)

    def _queue(
        self,
        layer: LayerIndex,
        numbers: Sequence[torch.Tensor],
        sent: _GpuRows,
        dispatch: ExpertDispatch,
        *,
        prompt: bool,
    ) -> torch.Tensor:
        """Queue the experts' compute. numbers: int32, their slots, how many pairs each has, and the pairs' rows."""
        return _compute(self._work(layer, numbers, sent, dispatch), prompt=prompt)

    def _work(
        self,
        layer: LayerIndex,
        numbers: Sequence[torch.Tensor],
        sent: _GpuRows,
        dispatch: ExpertDispatch,
    ) -> SlotWork:
        slots, counts, rows = numbers
        x = sent.device
        assert x is not None, "the rows are on the device"
        factors, gates = self._pair_factors(layer, dispatch)
        return SlotWork(
            self._slots[layer],
            slots,
            counts,
            x,
            rows,
            self._upload(factors)[0],
            None if gates is None else self._upload(gates)[0],
        )

    def _fetch(self, found: torch.Tensor, *, prompt: bool) -> FloatArray:
        """Return a result on the host. Blocks for all that is queued."""
        return self._streams.to_host(found, spin=not prompt)

    def resident(self) -> ResidentExperts:
        """Return what computes resident experts in jobs of all layers: one for all of those."""
        if self._resident is None:
            self._resident = self._new_resident()
        return self._resident

    def _new_resident(self) -> ResidentExperts:
        sizes = (self._catalog.num_layers, self._catalog.num_experts)
        return ResidentExperts(self._streams, self._slots, *sizes, self._factors)

    def feed(self, copies: ExpertCopies, recorder: Recorder) -> ExpertFeed:
        """Return what copies many experts by one call. copies: what has locked their pages."""
        return ExpertFeed(self._streams, self.arena, self._parts, copies, recorder)

    def streamed(self, feed: ExpertFeed) -> StreamedExperts:
        """Return what computes prompts whose absent experts `feed` copies meanwhile."""
        return StreamedExperts(self._streams, self.resident(), feed, self._catalog.num_experts)

    def empty_outputs(self, num_rows: int, hidden_size: int) -> FloatArray:
        """Return so many rows of zeros as outputs of a prompt's experts come back, on the calling thread."""
        with self._streams.computing():
            rows = torch.zeros((num_rows, hidden_size), device=self._streams.device)
            return self._fetch(rows, prompt=True)

    def empty_sum(self, num_chosen: int, hidden_size: int) -> FloatArray:
        """Return the residual of one token, zeros, plus `num_chosen` experts that there are not, on the calling thread."""
        with self._streams.computing():
            residual = torch.zeros((1, hidden_size), device=self._streams.device)
            none = torch.full((1, num_chosen), -1, dtype=torch.int32, device=residual.device)
            combine = gather_combine if residual.is_cuda else naive_gather_combine
            return self._fetch(combine(residual, none, residual), prompt=False)

    def sent(self, x: FloatArray) -> _GpuRows:
        """Return rows 0, 1, ... of activations, float32 [n, D], as `outputs` takes them."""
        return _GpuRows(np.arange(len(x), dtype=np.int32), x)

    def _upload(self, *arrays: FloatArray | IntArray) -> tuple[torch.Tensor, ...]:
        """Queue one copy of arrays of one shape to the device; torch reuses the pinned memory after it."""
        given = [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
        host = self._streams.host_empty(len(given), *given[0].shape, dtype=given[0].dtype)
        for place, one in zip(host, given, strict=True):
            place.copy_(one)
        return host.to(self._streams.device, non_blocking=True).unbind()

    def _upload_numbers(self, *arrays: NDArray[np.integer]) -> tuple[torch.Tensor, ...]:
        """Queue one copy of rows of numbers, as int32.

        Each begins at a multiple of 16 bytes: kernels are recompiled for other alignments.
        """
        parts, end = [], 0
        for array in arrays:
            parts.append(slice(end, end + len(array)))
            end += align_up(len(array), PART_ALIGNMENT // 4)
        numbers = np.zeros(end, np.int32)
        for part, array in zip(parts, arrays, strict=True):
            numbers[part] = array
        (there,) = self._upload(numbers)
        return tuple(there[part] for part in parts)

    def _pair_factors(
        self, layer: LayerIndex, dispatch: ExpertDispatch
    ) -> tuple[FloatArray, FloatArray | None]:
        """Return what a pair's output and its gate values are multiplied by; None for factors of 1."""
        if layer not in self._factors:
            return dispatch.weights, None
        gates, outputs = self._factors[layer]
        experts = np.repeat(dispatch.experts, dispatch.counts)
        return dispatch.weights * outputs[experts], gates[experts]

    def _view(self, stack: ExpertStack, parts: tuple[SlotPart, ...]) -> ExpertSlots:
        """Return the arena as slots that begin at every unit; only some are used."""
        matrices = [
            SlotMatrix(part.stack.format, self._strided(part), part.stack.cols) for part in parts
        ]
        return ExpertSlots.of(stack, matrices)

    def _strided(self, part: SlotPart) -> torch.Tensor:
        rows, row_bytes = part.stack.raw.shape[1:]
        count = max((len(self.arena) - part.start - part.nbytes) // UNIT_BYTES + 1, 0)
        return self.arena.as_strided(
            (count, rows, row_bytes), (UNIT_BYTES, row_bytes, 1), part.start
        )


def _compute(given: SlotWork, *, prompt: bool) -> torch.Tensor:
    return expert_outputs(given, prompt=prompt) if given.x.is_cuda else naive_expert_outputs(given)


def _discard(_: torch.Tensor) -> None:
    """Forget a result: what is recorded returns nothing."""

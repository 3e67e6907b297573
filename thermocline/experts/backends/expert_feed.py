"""Copies parts of layers' experts to a device's slots while it computes others: one call for each part, on the copy stream.

From the file's locked pages. Knows no store and no policy.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from thermocline.experts.placement.slots import UNIT_BYTES
from thermocline.traces.lanes import Lane, Name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from concurrent.futures import Future

    import torch
    from numpy.typing import NDArray

    from thermocline.experts.backends.expert_copies import ExpertCopies, SlotPart
    from thermocline.kernels.expert_parts import StreamPart
    from thermocline.kernels.gpu.streams import DeviceMark, DeviceStreams
    from thermocline.messages import LayerIndex
    from thermocline.traces.recorder import Recorder


class _Matrices(NamedTuple):
    """One matrix, or bias, of all experts of a layer: where it begins in a slot, and where the first one lies; bytes."""

    start: int
    address: int
    stride: int
    nbytes: int


class ExpertFeed:
    """`PartFeed` of a GPU. Parts take turns in two places, so that a part waits for the compute of the one before the last."""

    def __init__(
        self,
        streams: DeviceStreams,
        arena: torch.Tensor,
        layers: Mapping[LayerIndex, Sequence[SlotPart]],
        copies: ExpertCopies,
        recorder: Recorder,
    ) -> None:
        """arena: what slots are offsets into. layers: the matrices of their experts. copies: what has locked their pages."""
        self._streams, self._copies, self._recorder = streams, copies, recorder
        self._arena = arena
        self._layers = {layer: tuple(map(_matrices_of, parts)) for layer, parts in layers.items()}
        self._parts: Sequence[StreamPart] = ()
        self._arrivals: list[DeviceMark | None] = []

    def copy(self, part: StreamPart) -> None:
        """Copy one part; blocks, on the calling thread."""
        with self._streams.computing():
            self.begin((part,))
            self.wait(0)
            self._streams.finish(spin=True)

    def begin(self, parts: Sequence[StreamPart]) -> None:
        """See `PartFeed.begin`. Raises RuntimeError where the driver refuses, as the others do."""
        self._parts, self._arrivals = parts, []
        self._queue(None)
        self._queue(None)

    def wait(self, number: int) -> None:
        """See `PartFeed.wait`."""
        self._streams.wait(self._arrivals[number])

    def computed(self, number: int) -> None:
        """See `PartFeed.computed`."""
        assert number == len(self._arrivals) - 2 or len(self._arrivals) == len(self._parts), (
            "parts are computed in order"
        )
        self._queue(self._streams.mark())

    def _queue(self, computed: DeviceMark | None) -> None:
        """Queue the next part's copies behind what was computed in its place."""
        if len(self._arrivals) == len(self._parts):
            return
        part = self._parts[len(self._arrivals)]
        copies = self._copies_of(part)
        with self._streams.copying():
            self._streams.wait(computed, copies=True)
            self._streams.queue_copies(copies)
            self._arrivals.append(self._streams.mark(copies=True))
        if self._recorder.enabled:
            arrived = self._streams.when_done(self._streams.record(copies=True))
            begun_ns, nbytes = self._recorder.now_ns(), int(copies[:, 2].sum())
            arrived.add_done_callback(partial(self._draw, part, begun_ns, nbytes))

    def _copies_of(self, part: StreamPart) -> NDArray[np.int64]:
        """Return addresses there and here, and bytes: int64 [n, 3]."""
        there = self._arena.data_ptr() + part.slots.astype(np.int64) * UNIT_BYTES
        experts = part.experts.astype(np.int64)
        rows = [
            np.stack(
                (
                    there + each.start,
                    each.address + experts * each.stride,
                    np.full(len(experts), each.nbytes, np.int64),
                ),
                axis=1,
            )
            for each in self._layers[part.layer]
        ]
        return np.concatenate(rows)

    def _draw(self, part: StreamPart, begun_ns: int, nbytes: int, arrived: Future[None]) -> None:
        """Show a part's copies as one."""
        if arrived.exception() is not None:
            return
        start_ns, end_ns = self._copies.take_span(begun_ns)
        args = {"layer": part.layer, "experts": len(part.experts), "bytes": nbytes}
        self._recorder.span(Lane.GPU_H2D, Name.LOAD, start_ns, end_ns, args)


def _matrices_of(part: SlotPart) -> _Matrices:
    raw = part.stack.raw
    assert raw[0].flags.c_contiguous, "the rows of a matrix lie one behind the other"
    return _Matrices(part.start, int(raw.ctypes.data), int(raw.strides[0]), part.nbytes)

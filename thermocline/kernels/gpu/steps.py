"""Buffers of steps on a device, and graphs of decode steps, captured per shape.

A recurring shape keeps its buffers at the same addresses. Each of its layers is computed eagerly the first time,
captured the second, and replayed afterwards; where nothing can be captured it is always computed eagerly. So is a
shape whose capture failed once: it is not captured again. Knows no chunk and no model.
"""

from __future__ import annotations

import logging
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np
import torch

from thermocline.kernels.gpu.memory import release_unused
from thermocline.kernels.gpu.step import cut_inputs

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from thermocline.kernels.gpu.layer import LayerOutput
    from thermocline.kernels.gpu.step import StepInputs, StepShape
    from thermocline.kernels.gpu.streams import DeviceStreams
    from thermocline.kernels.weight import FloatArray, IntArray

_LOG: Final = logging.getLogger("thermocline.devices")

Saves: TypeAlias = tuple[tuple[tuple[int, int], ...], ...]
LayerCompute: TypeAlias = "Callable[[torch.Tensor, StepInputs], LayerOutput]"


class HostOutput(NamedTuple):
    """A layer's output on the host: residual and x float32 [T, D], ids int32 and weights float32 [T, chosen].

    kept: as in `LayerOutput`.
    """

    residual: FloatArray
    x: FloatArray
    ids: IntArray
    weights: FloatArray
    kept: tuple[FloatArray, ...]


class RowSizes(NamedTuple):
    """Sizes of a token's row: hidden size, the most experts that it chooses, and how many wide rows layers keep."""

    hidden: int
    chosen: int
    kept: int = 0


class StepBuffers:
    """A chunk's buffers on the device, used layer after layer. One thread at a time, `computing`."""

    def __init__(
        self,
        streams: DeviceStreams,
        shape: StepShape,
        sizes: RowSizes,
        *,
        saves: Saves = (),
        on_refusal: Callable[[Exception], None] | None = None,
    ) -> None:
        """saves: see `cut_inputs`. on_refusal: of a shape that recurs, told why it can not be captured; None: do not
        capture.
        """
        device, tokens = streams.device, shape.num_tokens
        self._num_rows = tokens
        self._streams, self._sizes, self._tokens = streams, sizes, tokens
        self._x = torch.empty((tokens, sizes.hidden), dtype=torch.float32, device=device)
        self._staging = streams.host_empty(tokens, sizes.hidden, dtype=torch.float32)
        self._numbers = torch.empty(shape.num_numbers, dtype=torch.int64, device=device)
        # Residual, x, ids, weights and what is kept in one array, so that one copy brings them to the host.
        words = tokens * ((2 + sizes.kept) * sizes.hidden + 2 * sizes.chosen)
        self._out = torch.empty(words, dtype=torch.float32, device=device)
        self._inputs = cut_inputs(shape, self._numbers, saves)
        self._on_refusal = on_refusal if streams.can_capture else None
        self._host_numbers: NDArray[np.int64] | None = None
        self._known: set[int] = set()
        self._replays: dict[int, Callable[[], None]] = {}
        streams.check(self._x, self._numbers, self._out)

    @property
    def num_captured(self) -> int:
        """Layers that are replayed."""
        return len(self._replays)

    def use(self, numbers: NDArray[np.int64]) -> None:
        """Set the first of the step's numbers, in the order of `cut_inputs`; the same array is copied once."""
        if self._host_numbers is not numbers:
            self._host_numbers = numbers
            self._numbers[: len(numbers)].copy_(torch.from_numpy(numbers))

    def run(self, index: int, compute: LayerCompute, x: FloatArray) -> None:
        """Queue layer `index` for x [rows, D]; its `compute` is the same every time. Further rows are padding: zeros."""
        self._num_rows = len(x)
        self._staging[: len(x)].copy_(torch.from_numpy(x))
        self._staging[len(x) :].zero_()
        self._x.copy_(self._staging, non_blocking=True)
        work = partial(self._compute, compute)
        replay = self._replays.get(index)
        if replay is None and index in self._known:
            replay = self._capture(index, work)
        self._known.add(index)
        if replay is None:
            work()
        else:
            replay()

    def fetch(self, num_chosen: int, *, spin: bool) -> HostOutput:
        """Wait for the layer that was queued last and return a copy of its output, without padding.

        spin: see `DeviceStreams.finish`.
        """
        host = torch.from_numpy(self._streams.to_host(self._out, spin=spin))
        parts = self._parts(host, num_chosen)
        residual, x, ids, weights, *kept = (part[: self._num_rows] for part in parts)
        return HostOutput(
            residual.numpy(),
            x.numpy(),
            ids.view(torch.int32).numpy(),
            weights.numpy(),
            tuple(part.numpy() for part in kept),
        )

    def _capture(self, index: int, work: Callable[[], None]) -> Callable[[], None] | None:
        """Return what replays the layer; None where the shape is not captured, now or any more."""
        if self._on_refusal is None:
            return None
        try:
            replay = self._streams.capture(work)
        except Exception as error:  # noqa: BLE001 - whatever it is, the layer is computed eagerly, which shows it
            self._replays.clear()
            self._on_refusal(error)
            self._on_refusal = None
            return None
        self._replays[index] = replay
        return replay

    def _compute(self, compute: LayerCompute) -> None:
        given = compute(self._x, self._inputs)
        parts = self._parts(self._out, 0 if given.ids is None else given.ids.shape[1])
        parts[0].copy_(given.residual)
        parts[1].copy_(given.x)
        if given.ids is not None and given.weights is not None:
            parts[2].view(torch.int32).copy_(given.ids)
            parts[3].copy_(given.weights)
        for part, kept in zip(parts[4:], given.kept, strict=False):
            part.copy_(kept)

    def _parts(self, words: torch.Tensor, num_chosen: int) -> list[torch.Tensor]:
        """Return residual, x, ids, weights, and what is kept."""
        wide, narrow = self._tokens * self._sizes.hidden, self._tokens * num_chosen
        cuts = np.cumsum([0, wide, wide, narrow, narrow, *[wide] * self._sizes.kept]).tolist()
        return [
            words[start:end].view(self._tokens, -1 if end > start else 0)
            for start, end in pairwise(cuts)
        ]


class CapturedSteps:
    """Owns the buffers of recurring shapes, of which a model has one for each size of a batch."""

    def __init__(self, streams: DeviceStreams, sizes: RowSizes) -> None:
        self._streams, self._sizes = streams, sizes
        self._steps: dict[StepShape, StepBuffers] = {}
        self._refused: set[StepShape] = set()

    def __repr__(self) -> str:
        return f"CapturedSteps({len(self._steps)} shapes, {self.num_captured} layers captured)"

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def num_captured(self) -> int:
        """Layers that are replayed, of all shapes."""
        return sum(step.num_captured for step in self._steps.values())

    def step(self, shape: StepShape, *, recurs: bool = True, saves: Saves = ()) -> StepBuffers:
        """Return the buffers of this shape, kept if it recurs.

        saves: for a shape that does not recur.
        """
        if not recurs:
            return StepBuffers(self._streams, shape, self._sizes, saves=saves)
        step = self._steps.get(shape)
        if step is None:
            on_refusal = None if shape in self._refused else partial(self._refuse, shape)
            step = StepBuffers(self._streams, shape, self._sizes, on_refusal=on_refusal)
            self._steps[shape] = step
        return step

    def clear(self) -> None:
        """Release all buffers. Shapes that can not be captured stay known."""
        self._steps.clear()

    def _refuse(self, shape: StepShape, error: Exception) -> None:
        """Never capture this shape again, and log why, once."""
        if shape in self._refused:
            return
        self._refused.add(shape)
        if isinstance(error, torch.OutOfMemoryError):
            release_unused()
        _LOG.warning(
            "decode steps of %d tokens run without a captured graph, which is slower: capturing one failed (%s: %s)",
            *(shape.num_tokens, type(error).__name__, error),
        )

"""A computation of a few rows that comes again with each decode step, captured for 1, 2, 4 and 8 of them.

Others are filled up with zeros. As with steps it is computed eagerly the first time, captured the second, and replayed
afterwards; where nothing can be captured, or a capture failed once, always eagerly. Knows no model.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from thermocline.kernels.gpu.memory import release_unused

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from numpy.typing import NDArray

    from thermocline.kernels.gpu.streams import DeviceStreams
    from thermocline.kernels.weight import FloatArray

_LOG: Final = logging.getLogger("thermocline.devices")
# More rows take so long that a launch does not matter.
_MAX_ROWS: Final = 8


class _Rows(NamedTuple):
    """Memory of so many rows: on the host, on the device, and of what is computed."""

    staging: torch.Tensor
    x: torch.Tensor
    out: torch.Tensor
    replay: Callable[[], None]


class CapturedRows:
    """Computes rows float32 [n, in] -> float32 [n, out] and brings them to the host. One thread at a time, `computing`."""

    def __init__(
        self, streams: DeviceStreams, compute: Callable[[torch.Tensor], torch.Tensor], what: str
    ) -> None:
        """compute: the same every time; queues only. what: of the log, in the plural."""
        self._streams, self._compute, self._what = streams, compute, what
        # Sizes that were computed, and their rows' widths.
        self._known: dict[int, tuple[int, int]] = {}
        self._rows: dict[int, _Rows] = {}
        self._can_capture = streams.can_capture

    @property
    def num_captured(self) -> int:
        """Sizes that are replayed."""
        return len(self._rows)

    def __call__(self, x: FloatArray, *, spin: bool) -> NDArray[Any]:
        """Return a copy of the output, float32 [n, out]. spin: see `DeviceStreams.finish`."""
        number = len(x)
        size = 1 << max(number - 1, 0).bit_length()
        rows = self._rows.get(size)
        if rows is None and size in self._known:
            rows = self._capture(size)
        if rows is None:
            found = self._compute(self._streams.upload(x))
            if size <= _MAX_ROWS:
                self._known[size] = x.shape[1], found.shape[1]
            return self._streams.to_host(found, spin=spin)
        rows.staging[:number].copy_(torch.from_numpy(x))
        rows.staging[number:].zero_()
        rows.x.copy_(rows.staging, non_blocking=True)
        rows.replay()
        return self._streams.to_host(rows.out[:number], spin=spin)

    def clear(self) -> None:
        """Release all memory."""
        self._rows.clear()

    def _capture(self, size: int) -> _Rows | None:
        """Capture a size; None where they can not be, which is logged once."""
        if not self._can_capture:
            return None
        device = self._streams.device
        try:
            x, out = (
                torch.zeros((size, width), dtype=torch.float32, device=device)
                for width in self._known[size]
            )
            staging = self._streams.host_empty(*x.shape, dtype=x.dtype)
            replay = self._streams.capture(partial(self._queue, x, out))
        except Exception as error:  # noqa: BLE001 - whatever it is, rows are computed eagerly, which shows it
            self._can_capture = False
            if isinstance(error, torch.OutOfMemoryError):
                release_unused()
            _LOG.warning(
                "%s are computed without a captured graph, which is slower: capturing one failed (%s: %s)",
                *(self._what, type(error).__name__, error),
            )
            return None
        self._rows[size] = _Rows(staging, x, out, replay)
        return self._rows[size]

    def _queue(self, x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(self._compute(x))

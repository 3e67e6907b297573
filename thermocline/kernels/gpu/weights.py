"""A trunk's weight matrices on a device, and products with them. Knows no layer.

F32 stays float32; every other type is expanded to bfloat16 when it is loaded (docs/decisions/0013).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from thermocline.kernels.gpu.streams import DeviceStreams
    from thermocline.kernels.weight import FloatArray, IntArray, Weight

# Decoded numbers on the host at a time, while a matrix is loaded.
_NUMBERS_AT_A_TIME = 1 << 24


@dataclass(frozen=True, slots=True, eq=False)
class DeviceMatrix:
    """numbers: float32 or bfloat16 [rows, cols]."""

    numbers: torch.Tensor

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return float32 [tokens, rows]: x [tokens, cols] times the transposed matrix."""
        return torch.mm(x.to(self.numbers.dtype), self.numbers.t()).float()


def device_bytes(weight: Weight) -> int:
    """Return what a matrix takes on the device."""
    return weight.rows * weight.cols * _kind(weight).itemsize


def _kind(weight: Weight) -> torch.dtype:
    return torch.float32 if weight.format.name == "F32" else torch.bfloat16


class MatrixLoader:
    """Brings weights of the mapped file to one device."""

    def __init__(
        self, streams: DeviceStreams, decode_rows: Callable[[Weight, IntArray], FloatArray]
    ) -> None:
        """decode_rows: as `Kernels.decode_rows`."""
        self._streams = streams
        self._decode_rows = decode_rows

    def matrix(self, weight: Weight, *, exact: bool = False) -> DeviceMatrix:
        """Return the matrix. exact: in float32 whatever its type, for what decides between experts."""
        kind = torch.float32 if exact else _kind(weight)
        numbers = torch.empty((weight.rows, weight.cols), dtype=kind, device=self._streams.device)
        step = max(_NUMBERS_AT_A_TIME // weight.cols, 1)
        for start in range(0, weight.rows, step):
            rows = np.arange(start, min(start + step, weight.rows), dtype=np.int32)
            decoded = torch.from_numpy(self._decode_rows(weight, rows))
            # Rounded on the host: half of the bytes to copy.
            numbers[start : start + len(rows)].copy_(decoded.to(kind))
        self._streams.check(numbers)
        return DeviceMatrix(numbers)

    def vector(self, values: FloatArray) -> torch.Tensor:
        """Return float32 numbers of any shape."""
        return self._streams.upload(values)

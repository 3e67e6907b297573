"""What one routed expert costs on CPU, device and link: the numbers behind dispatch and cache decisions. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from typing import Self

    from thermocline.messages import IntArray

SecondsArray: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ExpertCosts:
    """An expert of one layer.

    nbytes, layout: its size and formats; experts of one layout take slots of one size. rows: ascending row
    counts at which cpu_s and device_s are known. device_s: with the transfer of each row's input and output.
    copy_s: of the expert to the device. launch_overhead_s: of a layer on the device, whatever the number of experts.
    copy_slowdown: the part of its speed that the CPU loses during a copy, 0 to 1. output_row_s: of the transfer of one
    row's output, which is a part of device_s. recorded: of one expert with one row, and of the launch, in a decode step
    that the device has recorded; None where it records none. bulk_copy_s: of an expert among many that are copied by one
    call, which leaves out what each costs Python; None where nothing is copied so.
    """

    nbytes: int
    layout: str
    rows: tuple[int, ...]
    cpu_s: tuple[float, ...]
    device_s: tuple[float, ...]
    copy_s: float
    launch_overhead_s: float = 0.0
    copy_slowdown: float = 0.0
    output_row_s: float = 0.0
    recorded: tuple[float, float] | None = None
    bulk_copy_s: float | None = None

    def in_recorded_steps(self) -> Self:
        """Return the costs of decoding in such steps, where each launch is not a launch of the host's."""
        if self.recorded is None:
            return self
        first_s, launch_s = self.recorded
        first_s = min(first_s, self.device_s[0])
        rest = self.device_s[1:]
        return replace(self, device_s=(first_s, *rest), launch_overhead_s=launch_s, recorded=None)

    def cpu_seconds(self, rows: IntArray) -> SecondsArray:
        """Return what experts with so many rows each cost the CPU, [n] for [n]."""
        return self._seconds(rows, self.cpu_s)

    def device_seconds(self, rows: IntArray) -> SecondsArray:
        """Return what they cost the device that holds them, [n] for [n]."""
        return self._seconds(rows, self.device_s)

    def _seconds(self, rows: IntArray, known: tuple[float, ...]) -> SecondsArray:
        """Linear between known counts; proportional to the rows beyond the last one."""
        beyond = np.maximum(rows / self.rows[-1], 1.0)
        return np.interp(rows, self.rows, known) * beyond

"""Experts that a device and the CPU compute at the same time: each those that it has.

Owns the device and the thread beside the caller's. After a fault of the device the CPU computes everything. Knows no
connection and no group.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

import numpy as np

from thermocline.errors import DeviceMemoryError, EngineError
from thermocline.kernels.contract import ExpertWork

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from thermocline.kernels.contract import Kernels
    from thermocline.messages import FloatArray, IntArray
    from thermocline.remote.device_experts import DeviceExperts

_LOG: Final = logging.getLogger("thermocline.remote")


class SplitExperts:
    """Computes a layer's experts. Close it, which lets the device go."""

    def __init__(self, kernels: Kernels) -> None:
        """kernels: the CPU's."""
        self._kernels = kernels
        self._owned = ExitStack()
        self._device: DeviceExperts | None = None
        self._thread: ThreadPoolExecutor | None = None

    @property
    def device(self) -> DeviceExperts | None:
        """What computes experts beside the CPU; None without one, or after a fault."""
        return self._device

    def use_device(self, device: DeviceExperts) -> None:
        """Let a device compute what it has from now on; it is closed with this."""
        self._device = self._owned.enter_context(device)
        # Beside the caller's own thread, which computes on the CPU meanwhile.
        self._thread = self._owned.enter_context(ThreadPoolExecutor(1, "thermocline split experts"))

    def outputs(
        self, layer: int, work: ExpertWork, slots: IntArray | None, *, prompt: bool
    ) -> FloatArray:
        """Return what `Kernels.expert_outputs` does, float32 [pairs, hidden]. Blocks.

        slots: int32 [experts], those of the device, -1 for experts that the CPU computes; None for all of them.
        """
        device, thread = self._device, self._thread
        if device is None or thread is None or slots is None or not (slots >= 0).any():
            return self._kernels.expert_outputs(work, prompt=prompt)
        is_there = slots >= 0
        if is_there.all():
            try:
                return device.outputs(layer, work, slots, prompt=prompt)
            except EngineError as error:
                self._give_up_device(error)
                return self._kernels.expert_outputs(work, prompt=prompt)
        there, here = _part(work, is_there), _part(work, ~is_there)
        begun = thread.submit(device.outputs, layer, there, slots[is_there], prompt=prompt)
        pairs = np.repeat(is_there, work.counts)
        outputs = np.empty((len(work.rows), work.x.shape[1]), np.float32)
        outputs[~pairs] = self._kernels.expert_outputs(here, prompt=prompt)
        try:
            outputs[pairs] = begun.result()
        except EngineError as error:
            self._give_up_device(error)
            outputs[pairs] = self._kernels.expert_outputs(there, prompt=prompt)
        return outputs

    def close(self) -> None:
        """Let the device go."""
        self._owned.close()

    def _give_up_device(self, error: EngineError) -> None:
        """Compute everything on the CPU from now on, unless activations found no room just once."""
        if isinstance(error, DeviceMemoryError):
            _LOG.warning("%s; computed on the CPU", error)
            return
        _LOG.warning("%s; experts are computed on the CPU from now on", error)
        self._device = None


def _part(work: ExpertWork, wanted: NDArray[np.bool_]) -> ExpertWork:
    """Return the work of some of the experts, bool [experts], with only the tokens that they have."""
    pairs = np.repeat(wanted, work.counts)
    tokens, rows = np.unique(work.rows[pairs], return_inverse=True)
    return ExpertWork(
        work.stack,
        work.experts[wanted],
        work.counts[wanted],
        work.x[tokens],
        rows.astype(np.int32),
        work.scale[pairs],
    )

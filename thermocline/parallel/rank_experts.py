"""What computes the experts that a rank owns: its CPU, and a device that has some of them.

Owns which of them are on the device. Knows no exchange. With a GPU an output's last bits depend on which rank computed it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from thermocline.remote.split_experts import SplitExperts

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from thermocline.kernels.contract import ExpertWork, Kernels
    from thermocline.messages import FloatArray, IntArray
    from thermocline.remote.device_experts import DeviceExperts


class RankExperts:
    """The experts of one rank. Close it, which lets the device go."""

    def __init__(self, kernels: Kernels, warmth: NDArray[np.float64] | None = None) -> None:
        """warmth: [layers, experts], their use so far: the most used ones are the first that the device gets."""
        self._split = SplitExperts(kernels)
        self._warmth = warmth
        self._slots: IntArray | None = None
        self._first_layer = 0

    def __repr__(self) -> str:
        return f"RankExperts({self.num_on_device} on {self.device_name})"

    @property
    def device_name(self) -> str:
        """What computes beside the CPU."""
        device = self._split.device
        return "no device" if device is None else device.name

    @property
    def num_on_device(self) -> int:
        """Experts that the device computes."""
        if self._slots is None or self._split.device is None:
            return 0
        return int(np.count_nonzero(self._slots >= 0))

    def use_device(self, device: DeviceExperts, first_layer: int = 0) -> None:
        """Let a device compute what it has room for, of layers from the first one on; it is closed with this."""
        self._split.use_device(device)
        self._first_layer = first_layer

    def hold(self, owned: NDArray[np.bool_]) -> None:
        """Copy these experts, bool [layers, experts], to the device as far as it has room; blocks until they are there."""
        device = self._split.device
        if device is None:
            return
        wanted = owned.copy()
        wanted[: self._first_layer] = False
        held = tuple(self._in_order(layer, np.flatnonzero(row)) for layer, row in enumerate(wanted))
        slots = np.full(owned.shape, -1, np.int32)
        for layer, (experts, of_layer) in enumerate(zip(held, device.hold(held), strict=True)):
            slots[layer, experts] = of_layer
        self._slots = slots

    def outputs(self, layer: int, work: ExpertWork, *, prompt: bool) -> FloatArray:
        """Return what `Kernels.expert_outputs` does. Blocks."""
        slots = None if self._slots is None else self._slots[layer][work.experts]
        return self._split.outputs(layer, work, slots, prompt=prompt)

    def close(self) -> None:
        """Let the device go."""
        self._split.close()

    def _in_order(self, layer: int, experts: NDArray[np.intp]) -> IntArray:
        if self._warmth is not None:
            experts = experts[np.argsort(-self._warmth[layer][experts], kind="stable")]
        return experts.astype(np.int32)

"""A device on which work can be captured, which is torch's CPU, and what requests may have of a model's memory there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tests.support.device_blocks import blocks_of
from thermocline.kernels.gpu.streams import DeviceStreams

if TYPE_CHECKING:
    import numpy as np

    from thermocline.models.device.non_expert import DeviceNonExpert


class Capturing(DeviceStreams):
    """The CPU, on which a capture computes nothing, and what was captured can be run."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.events: list[str] = []

    @property
    def can_capture(self) -> bool:
        return True

    def capture(self, work):
        self.events.append("captured")

        def replay() -> None:
            self.events.append("replayed")
            work()

        return replay


def everything(device: DeviceNonExpert) -> list[np.ndarray]:
    """Return all that requests may have on the device."""
    found = [blocks[:-1].numpy() for blocks in blocks_of(device)]
    for states in device._states.values():
        found += [part[:-1].numpy() for part in (states.conv, states.recurrent)]
    return found

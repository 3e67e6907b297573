"""Recurrent states, the same on the host and on a device. Knows no rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from tests.support.compare import assert_within
from thermocline.kernels.gpu.cache import DeviceStates
from thermocline.kernels.gpu.step import DeltaSpan, SpanShape
from thermocline.kernels.recurrent_contract import RecurrentStates

if TYPE_CHECKING:
    from thermocline.kernels.gpu.streams import DeviceStreams

NUM_SLOTS = 5


class RecurrentCase:
    """Random numbers, and states on both sides once `begin_states` was called."""

    def __init__(self, streams: DeviceStreams) -> None:
        self._rng, self._streams = np.random.default_rng(8), streams

    def normal(self, *shape: int) -> np.ndarray:
        return self._rng.standard_normal(shape).astype(np.float32)

    def begin_states(self, state) -> None:
        """Draw the states of NUM_SLOTS slots. state: a rule's shape of them."""
        self.states = RecurrentStates(
            self.normal(NUM_SLOTS, *state.conv), self.normal(NUM_SLOTS, *state.heads)
        )
        self.device_states = DeviceStates(self._streams, NUM_SLOTS, state)
        self.device_states.conv.copy_(self._streams.upload(self.states.conv))
        self.device_states.recurrent.copy_(self._streams.upload(self.states.recurrent))

    def span(self, start: int, slots: list[int], length: int, saves=()) -> DeltaSpan:
        at = torch.tensor(slots, device=self._streams.device)
        return DeltaSpan(SpanShape(start, len(slots), length), at, saves)

    def check_states(self) -> None:
        for name in ("conv", "recurrent"):
            found = getattr(self.device_states, name).cpu().numpy()
            assert_within(found, getattr(self.states, name), "non-expert/float32")

"""Recurrent states, the same on the host and on a device, and what any rule must do with them. Knows no rule."""

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

    def expected(self, rows: np.ndarray, runs: list[tuple[int, int, int]]) -> np.ndarray:
        """Return what the twin gives, run after run; a slot may have several."""
        raise NotImplementedError

    def on_device(self, rows: np.ndarray, spans: tuple[DeltaSpan, ...]) -> np.ndarray:
        """Return what the device gives."""
        raise NotImplementedError

    def check_step(self, row: int) -> None:
        """One token of three sequences, in slots out of order; the slot that nobody has stays as it was."""
        rows = self.normal(3, row)
        out = self.expected(rows, [(0, 1, 4), (1, 1, 0), (2, 1, 2)])
        found = self.on_device(rows, (self.span(0, [4, 0, 2], 1),))
        assert_within(found, out, "non-expert/float32")
        self.check_states()

    def check_prompts(self, row: int) -> None:
        """Runs of several lengths, shorter than a convolution too, with a copy of the state on the way."""
        rows = self.normal(13, row)
        out = self.expected(rows, [(0, 9, 1)])
        for part in (self.states.conv, self.states.recurrent):
            part[3] = part[1]
        out[9:] = self.expected(rows, [(9, 1, 1), (10, 3, 0)])[9:]
        spans = (self.span(0, [1], 9, ((1, 3),)), self.span(9, [1], 1), self.span(10, [0], 3))
        assert_within(self.on_device(rows, spans), out, "non-expert/float32")
        self.check_states()

    def check_states(self) -> None:
        for name in ("conv", "recurrent"):
            found = getattr(self.device_states, name).cpu().numpy()
            assert_within(found, getattr(self.states, name), "non-expert/float32")

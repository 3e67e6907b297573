"""Short convolutions and Mamba2 on a device against their NumPy twins."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.support.compare import assert_within
from tests.support.devices import DEVICES
from tests.support.recurrent_device import RecurrentCase
from thermocline.kernels.dense_reference import ReferenceDense
from thermocline.kernels.gpu import recurrent as recurrent_module
from thermocline.kernels.gpu.recurrent import DeviceMamba, DeviceShortConv
from thermocline.kernels.gpu.spans import each_span
from thermocline.kernels.gpu.streams import DeviceStreams
from thermocline.kernels.gpu.weights import MatrixLoader
from thermocline.kernels.recurrent_contract import (
    MambaRule,
    MambaShape,
    ShortConvRule,
    ShortConvShape,
)
from thermocline.kernels.reference import ReferenceKernels

if TYPE_CHECKING:
    from thermocline.kernels.gpu.step import DeltaSpan

SHAPES = {
    "convolution": ShortConvShape(10, 3),
    "narrow convolution": ShortConvShape(1, 2),
    "mamba": MambaShape(heads=6, head_dim=5, groups=2, state_dim=7, conv_width=4),
    "one group": MambaShape(heads=4, head_dim=8, groups=1, state_dim=16, conv_width=2),
    "a group each": MambaShape(heads=3, head_dim=1, groups=3, state_dim=1, conv_width=3),
}


@pytest.fixture(params=DEVICES)
def streams(request):
    """A device, closed at the end."""
    with DeviceStreams.open(request.param) as opened, opened.computing():
        yield opened


class Case(RecurrentCase):
    """A rule and states, the same on the host and on the device."""

    def __init__(self, streams: DeviceStreams, shape: ShortConvShape | MambaShape) -> None:
        super().__init__(streams)
        self.shape, state = shape, shape.state
        self.rule, self.device_rule = self._rules(streams, shape)
        self.begin_states(state)

    def _rules(self, streams: DeviceStreams, shape: ShortConvShape | MambaShape):
        if isinstance(shape, ShortConvShape):
            conv = self.normal(shape.conv_width, shape.channels)
            return ShortConvRule(shape, conv), DeviceShortConv(streams.upload(conv))
        rule = MambaRule(
            shape,
            self.normal(shape.conv_width, shape.channels),
            self.normal(shape.channels),
            self.normal(shape.heads) - 1,
            -np.exp(self.normal(shape.heads)),
            self.normal(shape.heads),
            self.normal(shape.width) * 0.1 + 1,
            1e-6,
        )
        load = MatrixLoader(streams, ReferenceKernels().decode_rows)
        return rule, DeviceMamba.load(load, rule)

    def expected(self, rows: np.ndarray, runs: list[tuple[int, int, int]]) -> np.ndarray:
        """Return what the twin gives, run after run; a slot may have several."""
        out = np.full((len(rows), self.shape.width), np.nan, np.float32)
        for run in runs:
            ReferenceDense().recur(rows, self.rule, np.int32([run]), self.states, out)
        return out

    def on_device(self, rows: np.ndarray, spans: tuple[DeltaSpan, ...]) -> np.ndarray:
        states = self.device_states
        found = each_span(
            (self._streams.upload(rows),),
            spans,
            states,
            lambda mine, slots: self.device_rule.run(mine[0], slots, states),
        )
        return found.cpu().numpy()


@pytest.mark.parametrize("name", SHAPES)
def test_a_step_of_several_sequences(streams, name):
    """One token each, in slots out of order; the slot that nobody has stays as it was."""
    case = Case(streams, SHAPES[name])
    case.check_step(case.shape.row)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("piece", [64, 4])
def test_prompts_that_go_on_and_are_saved(streams, monkeypatch, name, piece):
    """Runs of several lengths, shorter than the convolution too, with a copy of the state on the way.

    In one piece or in several.
    """
    monkeypatch.setattr(recurrent_module, "_PIECE_TOKENS", piece)
    case = Case(streams, SHAPES[name])
    case.check_prompts(case.shape.row)


@pytest.mark.parametrize("decay", [1e-4, 30.0])
def test_long_prompts_stay_exact(streams, decay):
    """300 tokens that hardly decay, and ones that forget all at once: nothing overflows or drifts."""
    case = Case(streams, SHAPES["mamba"])
    case.rule.decay[:] = -decay
    case.device_rule.decay.copy_(streams.upload(case.rule.decay))
    rows = case.normal(300, case.shape.row)
    out = case.expected(rows, [(0, 300, 2)])
    assert_within(case.on_device(rows, (case.span(0, [2], 300),)), out, "non-expert/float32")
    case.check_states()

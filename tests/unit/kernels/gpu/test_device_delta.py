"""The gated delta rule on a device against its NumPy twin."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tests.support.compare import assert_within
from tests.support.devices import DEVICES
from tests.support.recurrent_device import RecurrentCase
from thermocline.kernels import delta_reference
from thermocline.kernels.delta_contract import DeltaInput, DeltaRule, DeltaShape
from thermocline.kernels.gpu import delta as delta_module
from thermocline.kernels.gpu.delta import DeltaTokens, DeviceDeltaRule, delta_rule, key_heads
from thermocline.kernels.gpu.streams import DeviceStreams

if TYPE_CHECKING:
    from thermocline.kernels.gpu.step import DeltaSpan

SHAPES = {
    "shared": DeltaShape(2, 4, 16, 8, 4, tiled=False),
    "tiled": DeltaShape(2, 6, 10, 10, 3, tiled=True),
    "alone": DeltaShape(1, 1, 5, 7, 2, tiled=False),
    "rows_decay": DeltaShape(2, 2, 16, 16, 4, tiled=False, by_channel=True),
    "odd_rows_decay": DeltaShape(1, 3, 5, 7, 2, tiled=False, by_channel=True),
    "bounded": DeltaShape(1, 3, 5, 7, 2, tiled=False, by_channel=True, lower_bound=-5.0),
}


@pytest.fixture(params=DEVICES)
def streams(request):
    """A device, closed at the end."""
    with DeviceStreams.open(request.param) as opened, opened.computing():
        yield opened


class Case(RecurrentCase):
    """A rule and states, the same on the host and on the device."""

    def __init__(self, streams: DeviceStreams, shape: DeltaShape) -> None:
        super().__init__(streams)
        self.rule = DeltaRule(
            shape,
            self.normal(shape.conv_width, shape.channels),
            self.normal(shape.steps) - 1,
            np.exp(self.normal(shape.value_heads)) * np.float32(1 if shape.lower_bound else -1),
            self.normal(shape.value_dim) * 0.1 + 1,
            1e-6,
            sigmoid_gate=shape.by_channel,
        )
        numbers = (self.rule.conv, self.rule.step_bias, self.rule.decay, self.rule.gain)
        heads = torch.tensor(key_heads(shape), device=streams.device)
        self.device_rule = DeviceDeltaRule(
            shape, *(streams.upload(part) for part in numbers), heads, 1e-6, shape.by_channel
        )
        self.begin_states(shape.state)

    def tokens(self, count: int) -> DeltaInput:
        shape = self.rule.shape
        widths = (shape.channels, shape.value_width, shape.steps, shape.value_heads)
        return DeltaInput(*(self.normal(count, width) for width in widths))

    def on_device(self, given: DeltaInput, spans: tuple[DeltaSpan, ...]) -> np.ndarray:
        parts = (given.mixed, given.z, given.alpha, given.beta)
        tokens = DeltaTokens(*(self._streams.upload(part) for part in parts))
        return delta_rule(tokens, self.device_rule, spans, self.device_states).cpu().numpy()


@pytest.mark.parametrize("name", SHAPES)
def test_a_step_of_several_sequences(streams, name):
    """One token each, in slots out of order; the slot that nobody has stays as it was."""
    case = Case(streams, SHAPES[name])
    given, out = case.tokens(3), np.empty((3, SHAPES[name].value_width), np.float32)
    runs = np.array([(0, 1, 4), (1, 1, 0), (2, 1, 2)], np.int32)
    delta_reference.delta_rule(given, case.rule, runs, case.states, out)
    found = case.on_device(given, (case.span(0, [4, 0, 2], 1),))
    assert_within(found, out, "non-expert/float32")
    case.check_states()


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("piece", [64, 4])
def test_prompts_that_go_on_and_are_saved(streams, monkeypatch, name, piece):
    """Runs of several lengths, shorter than the convolution too, with a copy of the state on the way.

    In one piece or in several.
    """
    for name_of in ("_PIECE_TOKENS", "_CHANNEL_PIECE_TOKENS"):
        monkeypatch.setattr(delta_module, name_of, piece)
    case = Case(streams, SHAPES[name])
    given, out = case.tokens(13), np.empty((13, SHAPES[name].value_width), np.float32)
    for run in ((0, 9, 1), (9, 1, 1), (10, 3, 0)):
        delta_reference.delta_rule(given, case.rule, np.int32([run]), case.states, out)
        if run == (0, 9, 1):
            case.states.conv[3], case.states.recurrent[3] = (
                case.states.conv[1],
                case.states.recurrent[1],
            )
    spans = (case.span(0, [1], 9, ((1, 3),)), case.span(9, [1], 1), case.span(10, [0], 3))
    assert_within(case.on_device(given, spans), out, "non-expert/float32")
    case.check_states()


@pytest.mark.parametrize("name", ["shared", "rows_decay"])
@pytest.mark.parametrize("decay", [1e-4, 30.0])
def test_long_prompts_stay_exact(streams, decay, name):
    """300 tokens that hardly decay, and ones that forget all at once: nothing overflows or drifts."""
    case = Case(streams, SHAPES[name])
    case.rule.decay[:] = -decay
    case.device_rule.decay.copy_(streams.upload(case.rule.decay))
    given, out = case.tokens(300), np.empty((300, SHAPES[name].value_width), np.float32)
    run = np.array([(0, 300, 2)], np.int32)
    delta_reference.delta_rule(given, case.rule, run, case.states, out)
    assert_within(case.on_device(given, (case.span(0, [2], 300),)), out, "non-expert/float32")
    case.check_states()


def test_a_state_begins_with_nothing_or_with_a_snapshot(streams):
    """A slot is cleared, or takes what another holds, in both of its parts."""
    case = Case(streams, SHAPES["alone"])
    states = case.device_states
    states.begin(0, 2)
    states.begin(1, None)
    for part in (states.conv, states.recurrent):
        assert torch.equal(part[0], part[2])
        assert not part[1].any()
        assert part[2].any()

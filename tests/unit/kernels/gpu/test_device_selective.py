"""The first Mamba on a device against its NumPy twin."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.support.compare import assert_within
from tests.support.devices import DEVICES
from tests.support.recurrent_device import RecurrentCase
from thermocline.kernels.gpu import selective as selective_module
from thermocline.kernels.gpu.selective import DeviceSelective
from thermocline.kernels.gpu.spans import each_span
from thermocline.kernels.gpu.streams import DeviceStreams
from thermocline.kernels.gpu.weights import MatrixLoader
from thermocline.kernels.recurrent_contract import SelectiveInput, SelectiveRule, SelectiveShape
from thermocline.kernels.reference import ReferenceKernels
from thermocline.kernels.weight import Weight
from thermocline.kernels.whole_layer import SelectiveProducts
from thermocline.modelfile.formats import FORMATS_BY_NAME

if TYPE_CHECKING:
    from thermocline.kernels.gpu.step import DeltaSpan

SHAPES = {
    "odd": SelectiveShape(width=10, state_dim=7, rank=3, conv_width=4),
    "real state": SelectiveShape(width=24, state_dim=16, rank=6, conv_width=2),
    "one of each": SelectiveShape(width=1, state_dim=1, rank=1, conv_width=3),
}
EPSILON = 1e-2  # so that the norm of a lone number is not its sign


@pytest.fixture(params=DEVICES)
def streams(request):
    """A device, closed at the end."""
    with DeviceStreams.open(request.param) as opened, opened.computing():
        yield opened


class Case(RecurrentCase):
    """A rule, its products, and states, the same on the host and on the device."""

    def __init__(self, streams: DeviceStreams, shape: SelectiveShape) -> None:
        super().__init__(streams)
        self.shape, self._kernels = shape, ReferenceKernels()
        width, state_dim = shape.width, shape.state_dim
        self.rule = SelectiveRule(
            shape,
            self.normal(shape.conv_width, width),
            self.normal(width),
            self.normal(width) - 1,
            -np.exp(self.normal(state_dim, width)),
            self.normal(width),
        )
        rows = (shape.rank, state_dim, state_dim)
        low, keys, queries = (self._matrix(count, width) for count in rows)
        gains = [self.normal(count) * np.float32(0.1) + 1 for count in rows]
        self.products = SelectiveProducts(
            (low, keys, queries), (gains[0], gains[1], gains[2]), self._matrix(width, shape.rank)
        )
        load = MatrixLoader(streams, self._kernels.decode_rows)
        self.device_rule = DeviceSelective(load, self.rule, self.products, EPSILON)
        self.begin_states(shape.state)

    def _matrix(self, rows: int, cols: int) -> Weight:
        numbers = self.normal(rows, cols) / np.float32(np.sqrt(cols))
        return Weight("matrix", FORMATS_BY_NAME["F32"], numbers.view(np.uint8), cols)

    def expected(self, rows: np.ndarray, runs: list[tuple[int, int, int]]) -> np.ndarray:
        """Return what the twin gives, run after run; a slot may have several."""
        out = np.full((len(rows), self.shape.width), np.nan, np.float32)
        convolved, dense = np.zeros_like(out), self._kernels.dense
        for run in runs:
            one = np.int32([run])
            dense.selective_convolution(rows, self.rule, one, self.states, convolved)
            firsts = self._kernels.multiply_all(self.products.firsts, convolved, prompt=True)
            low, keys, queries = (
                dense.rms_norm(first, gain, EPSILON)
                for first, gain in zip(firsts, self.products.gains, strict=True)
            )
            steps = self._kernels.matmul(self.products.steps, low, prompt=True)
            given = SelectiveInput(rows, convolved, steps, keys, queries)
            dense.selective_scan(given, self.rule, one, self.states, out)
        return out

    def on_device(self, rows: np.ndarray, spans: tuple[DeltaSpan, ...]) -> np.ndarray:
        states = self.device_states
        found = each_span(
            (self._streams.upload(rows),),
            spans,
            states,
            lambda mine, slots: self.device_rule.run(mine[0], slots, states, prompt=True),
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
    monkeypatch.setattr(selective_module, "_PIECE_TOKENS", piece)
    case = Case(streams, SHAPES[name])
    case.check_prompts(case.shape.row)


def test_many_sequences_go_in_smaller_pieces(streams, monkeypatch):
    """What is on the way is limited, whatever the number of sequences."""
    monkeypatch.setattr(selective_module, "_PIECE_NUMBERS", 400)
    case, sizes = Case(streams, SHAPES["odd"]), []
    rows, real = case.normal(15, case.shape.row), selective_module._move_on

    def noting(decay, change, state):
        sizes.append(decay.numel())
        return real(decay, change, state)

    monkeypatch.setattr(selective_module, "_move_on", noting)
    out = case.expected(rows, [(0, 5, 4), (5, 5, 0), (10, 5, 2)])
    assert_within(case.on_device(rows, (case.span(0, [4, 0, 2], 5),)), out, "non-expert/float32")
    case.check_states()
    assert sizes == [3 * 70] * 5


@pytest.mark.parametrize("decay", [1e-4, 30.0])
def test_long_prompts_stay_exact(streams, decay):
    """300 tokens that hardly decay, and ones that forget all at once: nothing overflows or drifts."""
    case = Case(streams, SHAPES["odd"])
    case.rule.decay[:] = -decay
    load = MatrixLoader(streams, ReferenceKernels().decode_rows)
    case.device_rule = DeviceSelective(load, case.rule, case.products, EPSILON)
    rows = case.normal(300, case.shape.row)
    out = case.expected(rows, [(0, 300, 2)])
    assert_within(case.on_device(rows, (case.span(0, [2], 300),)), out, "non-expert/float32")
    case.check_states()

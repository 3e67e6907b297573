"""The device's side of a shared step against the core's: twins, the kernels in Triton's interpreter, and a GPU's."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from tests.support.arch_cases import ARCH_CASES
from tests.support.toy_archs import write_toy_arch
from tests.unit.kernels.gpu.conftest import IMPLEMENTATIONS
from thermocline.errors import StepLostError
from thermocline.kernels.contract import ExpertWork
from thermocline.kernels.cpu import NativeKernels
from thermocline.kernels.gpu.handoff_page import DevicePage, GivenUpError
from thermocline.kernels.gpu.layer import LayerOutput
from thermocline.kernels.gpu.streams import DeviceStreams
from thermocline.kernels.handoff import Handoff
from thermocline.messages import LayerIndex
from thermocline.modelfile.reader import open_model_file
from thermocline.models.registry import open_model

MAX_ROWS = 4
# A second for a CPU that does nothing, counted in looks; more for one that computes.
PATIENCE_NS = (50_000, 1_000_000_000)


def signed(epoch: int) -> int:
    """Return the bits of an epoch as a number with a sign."""
    return int(np.uint32(epoch).astype(np.int32))


class Rig:
    """A page, the device's side of one implementation, and a thread that serves."""

    def __init__(self, model, streams, name: str) -> None:
        self.kernels = NativeKernels(threads=1)
        parts = model.non_expert.layers
        self.handoff = Handoff(self.kernels, parts, MAX_ROWS)
        self.routed = [LayerIndex(n) for n in self.handoff.routed]
        self.stacks = {n: parts[n].routed.stack for n in self.routed}
        self.streams, self.name = streams, name
        self.device, self.rng = self.seen(), np.random.default_rng(5)
        self.serving: threading.Thread | None = None
        self.lost: list[StepLostError] = []

    def seen(self, **rest) -> DevicePage:
        """Return the page as the device sees it."""
        page, shape = self.handoff.page, self.handoff.shape
        return DevicePage(self.streams, page, shape, has_kernels=self.name != "twin", **rest)

    def tensor(self, array) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.streams.device)

    def begin(self, num_rows: int) -> int:
        """Begin a step on both sides; return its epoch."""
        epoch = self.handoff.begin()
        self.device.epoch.fill_(signed(epoch))

        def serve() -> None:
            try:
                self.handoff.serve(num_rows, epoch)
            except StepLostError as error:
                self.lost.append(error)

        self.serving = threading.Thread(target=serve)
        self.serving.start()
        self.device.begin()
        return epoch

    def layer(self, layer: LayerIndex, num_rows: int, padding: int, share: float):
        """Compute a layer with random choices; return what came out, and what should have."""
        _, _, chosen, hidden = self.handoff.shape
        stack = self.stacks[layer]
        shape = (num_rows, hidden)
        x, residual, mine = (self.rng.standard_normal(shape).astype(np.float32) for _ in range(3))
        ids = np.stack([self.rng.permutation(len(stack))[:chosen] for _ in range(num_rows)])
        weights = self.rng.random((num_rows, chosen), np.float32)
        slots = np.where(self.rng.random(len(stack)) < share, 3, -1).astype(np.int32)
        is_cold = slots[ids] < 0
        given = LayerOutput(
            *(self.tensor(np.pad(each, ((0, padding), (0, 0)))) for each in (residual, x)),
            self.tensor(np.pad(ids, ((0, padding), (0, 0)))),
            self.tensor(np.pad(weights, ((0, padding), (0, 0)), constant_values=np.nan)),
        )
        num_live = self.tensor(np.array([num_rows]))
        # Each row of the device's outputs stands for all of its pairs.
        pair_of = np.where(is_cold, -1, np.arange(num_rows)[:, None]).astype(np.int32)
        places = self.tensor(np.pad(pair_of, ((0, padding), (0, 0)), constant_values=-1))
        self.device.publish(layer, given, self.tensor(slots), num_live)
        self.device.wait(layer)
        found = self.device.combine(layer, self.tensor(mine), places, given.residual, num_live)
        expected = self.expected(stack, (x, residual, mine), ids, weights, is_cold)
        return found.cpu().numpy(), np.pad(expected, ((0, padding), (0, 0))), ids, weights

    def expected(self, stack, arrays, ids, weights, is_cold):
        """Return the sum in slot order, of outputs that the CPU computes pair by pair."""
        x, residual, mine = arrays
        rows = []
        for row in range(len(x)):
            total = None
            for slot, expert in enumerate(ids[row]):
                value = mine[row]
                if is_cold[row, slot]:
                    one, none = np.ones(1, np.int32), np.zeros(1, np.int32)
                    scale = weights[row, slot : slot + 1]
                    work = ExpertWork(
                        stack, one * np.int32(expert), one, x[row : row + 1], none, scale
                    )
                    value = self.kernels.expert_outputs(work)[0]
                total = value if total is None else total + value
            rows.append(total + residual[row])
        return np.stack(rows)

    def end(self) -> None:
        """End the step on both sides."""
        self.device.end()
        self.serving.join()


@pytest.fixture(params=IMPLEMENTATIONS)
def rig(request, tmp_path):
    """Layers with and without routed experts, three experts of a token."""
    case = next(case for case in ARCH_CASES if case.name == "laguna_odd")
    kind = "cuda" if request.param == "cuda" else "torch-cpu"
    with (
        open_model_file(write_toy_arch(tmp_path / "toy.gguf", case.toy)) as file,
        DeviceStreams.open(kind) as streams,
        streams.computing(),
    ):
        yield Rig(open_model(file, NativeKernels(threads=1)), streams, request.param)


def test_both_sides_add_up_in_slot_order(rig):
    """No, some or all pairs of the device, one to four rows, with padding: to the bit; what was chosen is logged."""
    for share, num_rows, padding in (
        (0.0, 1, 0),
        (0.5, 3, 1),
        (1.0, 4, 0),
        (0.5, 1, 0),
        (0.6, 4, 4),
    ):
        rig.begin(num_rows)
        chosen = []
        for layer in rig.routed:
            found, expected, ids, weights = rig.layer(layer, num_rows, padding, share)
            np.testing.assert_array_equal(found, expected)
            chosen.append((ids, weights))
        rig.end()
        assert not rig.lost
        log = rig.handoff.routing(num_rows)
        np.testing.assert_array_equal(log.expert_ids, [ids for ids, _ in chosen])
        np.testing.assert_array_equal(log.weights, [weights for _, weights in chosen])


@pytest.mark.parametrize("epoch", [(1 << 31) + 3, (1 << 32) - 1])
def test_large_epochs_are_the_same_on_both_sides(rig, epoch):
    """The device's numbers have a sign, the CPU's have none."""
    rig.handoff._epoch = epoch - 1
    rig.begin(1)
    found, expected, _, _ = rig.layer(rig.routed[0], 1, 0, 0.0)
    for layer in rig.routed[1:]:
        rig.layer(layer, 1, 0, 0.0)
    rig.end()
    np.testing.assert_array_equal(found, expected)
    assert not rig.lost


def test_a_step_that_was_given_up_does_not_wait(rig):
    """The device goes on at once, says nothing of its end, and both sides are done."""
    rig.begin(1)
    rig.handoff.page.abort(rig.handoff._epoch)
    if rig.name == "twin":
        with pytest.raises(GivenUpError):
            rig.layer(rig.routed[0], 1, 0, 0.0)
    else:
        rig.layer(rig.routed[0], 1, 0, 0.0)
        rig.end()
    rig.serving.join()
    assert len(rig.lost) == 1
    rig.streams.finish(spin=False)
    assert int(rig.device._flags["ended"]) == 0


def test_a_cpu_that_never_comes_is_given_up(rig):
    """After the patience for one that does nothing: nobody serves, and the step's number is on the page."""
    rig.device = rig.seen(patience_ns=PATIENCE_NS)
    rig.device.epoch.fill_(7)
    rig.device.begin()
    if rig.name == "twin":
        with pytest.raises(GivenUpError, match="LATE"):
            rig.layer(rig.routed[0], 1, 0, 0.0)
    else:
        rig.layer(rig.routed[0], 1, 0, 0.0)
    rig.streams.finish(spin=False)
    assert int(rig.device._flags["abort"]) == 7


def test_a_step_of_nobody_writes_nothing(rig):
    """With the number 0 no flag is set and no CPU is waited for, whatever is chosen."""
    before = rig.handoff.page.memory.copy()
    rig.device.begin()
    rig.layer(rig.routed[0], 2, 0, 0.0)
    rig.device.end()
    rig.streams.finish(spin=False)
    np.testing.assert_array_equal(rig.handoff.page.memory, before)

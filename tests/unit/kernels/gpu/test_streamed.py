"""Experts that are copied while others are computed: the bits of a device that has them all, in whatever parts they come."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.devices import DEVICES
from thermocline.experts.dispatch.stream_parts import stream_parts
from thermocline.kernels.gpu.layer import LayerOutput
from thermocline.kernels.gpu.resident import ResidentExperts
from thermocline.kernels.gpu.slots import ExpertSlots, SlotMatrix
from thermocline.kernels.gpu.streamed import StreamedExperts
from thermocline.kernels.gpu.streams import DeviceStreams
from thermocline.messages import LayerIndex
from thermocline.modelfile.formats import FORMATS_BY_NAME

LAYERS, EXPERTS, HIDDEN, CHOSEN, TOKENS = 3, 9, 256, 3, 21
SPARE = 6


class CopyFeed:
    """`PartFeed` that copies from a tensor of all experts, and notes what is asked of it in which order."""

    def __init__(self, given: torch.Tensor, slots: torch.Tensor) -> None:
        self.given, self.slots = given, slots
        self.calls: list[tuple[str, int]] = []

    def begin(self, parts) -> None:
        self.parts, self.next = parts, 0
        for _ in range(2):
            self._copy()

    def wait(self, number: int) -> None:
        assert number < self.next, "nobody copies it"
        self.calls.append(("wait", number))

    def computed(self, number: int) -> None:
        self.calls.append(("computed", number))
        part = self.parts[number]
        self.slots[torch.from_numpy(part.slots).long()] = (
            0xFF  # not a number: nobody reads it any more
        )
        self._copy()

    def _copy(self) -> None:
        if self.next < len(self.parts):
            part = self.parts[self.next]
            places = torch.from_numpy(part.slots).long()
            self.slots[places] = self.given[part.layer, torch.from_numpy(part.experts).long()]
            self.next += 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("num_slots", [2, 4, SPARE])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_streamed_sums_have_the_bits_of_resident_ones(device, num_slots, share, is_scaled):
    """Any share of experts there, and any number of slots; padding is nobody's; parts are waited for and let go in order."""
    rng = np.random.default_rng(5)
    numbers = rng.standard_normal((LAYERS, EXPERTS, HIDDEN, HIDDEN), np.float32).astype(np.float16)
    everything = LAYERS * EXPERTS
    with DeviceStreams.open(device) as streams, streams.computing():
        there = streams.device
        raw = torch.from_numpy(numbers.view(np.uint8).reshape(LAYERS, EXPERTS, HIDDEN, -1)).to(
            there
        )
        memory = torch.cat((raw.flatten(0, 1), torch.full_like(raw[0, :SPARE], 0xFF)))
        matrix = SlotMatrix(FORMATS_BY_NAME["F16"], memory, HIDDEN)
        slots = {LayerIndex(n): ExpertSlots(matrix, matrix, matrix) for n in range(LAYERS)}
        scales = rng.random((2, EXPERTS), dtype=np.float32)
        factors = {LayerIndex(1): (scales[0], scales[1])} if is_scaled else {}
        resident = ResidentExperts(streams, slots, LAYERS, EXPERTS, factors)
        home = np.arange(everything, dtype=np.int32).reshape(LAYERS, EXPERTS)
        is_there = rng.random(home.shape) < share
        residency = np.where(is_there, home, -1).astype(np.int32)
        feed = CopyFeed(raw, memory)
        streamed = StreamedExperts(streams, resident, feed, EXPERTS)
        parts = stream_parts(
            residency, map(LayerIndex, range(LAYERS)), range(everything, everything + num_slots)
        )
        x = torch.from_numpy(rng.standard_normal((TOKENS + 2, HIDDEN), np.float32)).to(there)
        x[TOKENS:] = float("nan")
        ids = np.stack([rng.permutation(EXPERTS)[:CHOSEN] for _ in x])
        weights = rng.random(ids.shape, dtype=np.float32)
        given = LayerOutput(x, x * 0.1, *(torch.from_numpy(a).to(there) for a in (ids, weights)))
        live = torch.tensor([TOKENS], device=there)
        resident.at(home).upload()
        expected = [
            resident.sum(LayerIndex(n), given, live, prompt=True)[:TOKENS].cpu()
            for n in range(LAYERS)
        ]
        streamed.at(residency, parts).upload()
        for layer in range(LAYERS):
            found = streamed.sum(LayerIndex(layer), given, live, prompt=True)[:TOKENS].cpu()
            assert found.isfinite().all()
            assert torch.equal(found, expected[layer])
    order = [(what, number) for number in range(len(parts)) for what in ("wait", "computed")]
    assert feed.calls == order
    assert bool(parts) == bool((~is_there).any())


def test_a_layer_without_experts_is_its_residual():
    """A dense layer's output went into it already."""
    with DeviceStreams.open("torch-cpu") as streams, streams.computing():
        resident = ResidentExperts(streams, {}, 1, EXPERTS, {})
        streamed = StreamedExperts(streams, resident, CopyFeed(*[torch.empty(0)] * 2), EXPERTS)
        streamed.at(np.full((1, EXPERTS), -1, np.int32), ()).upload()
        x = torch.ones((2, HIDDEN))
        given = LayerOutput(x, x, None, None)
        assert streamed.sum(LayerIndex(0), given, torch.tensor([2]), prompt=True) is x

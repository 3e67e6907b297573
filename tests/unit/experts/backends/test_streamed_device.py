"""When a prompt is computed on a device alone that lacks experts: where copying them takes less than sharing, as measured."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from thermocline.costmodel.expert_costs import ExpertCosts
from thermocline.errors import DeviceMemoryError
from thermocline.experts.backends.streamed_device import StreamedDevice
from thermocline.messages import LayerIndex, Routing

NUM_EXPERTS, NUM_USED, LAYERS = 128, 8, 3
ROWS = (1, 4, 16, 64, 256)
# An expert of Qwen3-30B-A3B on the CPU's 16 cores, on an H100, and over its link, as measured.
COSTS = ExpertCosts(
    3_059_712,
    "one",
    ROWS,
    (3.4e-5, 7.5e-5, 1.2e-4, 4.9e-4, 1.2e-3),
    (1e-7, 6e-6, 1.2e-5, 4.1e-5, 1.5e-4),
    copy_s=8.3e-5,
    launch_overhead_s=6e-4,
    output_row_s=4.5e-7,
    bulk_copy_s=7e-5,
)


class Store:
    """Some experts of each layer; what is counted."""

    def __init__(self, num_there: int) -> None:
        row = np.where(np.arange(NUM_EXPERTS) < num_there, np.arange(NUM_EXPERTS), -1)
        self.rows = (row.astype(np.int32),) * LAYERS
        self.holds, self.hits, self.streamed = 0, 0, []

    def residency(self, layer):
        return self.rows[layer]

    def hold(self):
        self.holds += 1
        return self.rows

    def let_go(self):
        self.holds -= 1

    def count_hits(self, num_choices):
        self.hits += num_choices

    def count_streamed(self, *given):
        self.streamed.append(given)


def device(num_there=64, costs=COSTS, *, is_locked=True, store=None) -> StreamedDevice:
    experts = SimpleNamespace(at=lambda residency, parts: (residency, parts))
    by_layer = (None, costs, costs)
    store = store or Store(num_there)
    return StreamedDevice(store, experts, range(40), by_layer, NUM_USED, lambda: is_locked)


def test_long_prompts_are_worth_the_copies():
    """From some length on, and sooner with more experts there; never where copies go by buffers."""

    def least(num_there: int) -> int:
        one = device(num_there)
        taken = [n for n in range(1, 600) if one.takes(n)]
        assert taken == list(range(taken[0], 600))
        return taken[0]

    few, half, most = least(0), least(64), least(120)
    assert 600 > few >= half >= most > 1
    assert half < 64
    assert not device(is_locked=False).takes(512)


def test_a_slow_link_leaves_experts_to_the_cpu():
    """And a CPU as fast as the device leaves nothing to gain."""
    slow = ExpertCosts(
        *(3_059_712, "one", ROWS, COSTS.cpu_s, COSTS.device_s), copy_s=2e-3, bulk_copy_s=2e-3
    )
    assert not device(costs=slow).takes(128)
    fast = ExpertCosts(
        *(3_059_712, "one", ROWS, COSTS.device_s, COSTS.device_s), copy_s=7e-5, bulk_copy_s=7e-5
    )
    assert not device(costs=fast).takes(512)


def test_what_was_measured_counts_more_than_estimates():
    """Chunks of about one size that took longer than the CPU takes for their experts are given back to it."""
    one = device()
    cpu_s = 2 * float(COSTS.cpu_seconds(np.full(NUM_EXPERTS, 32, np.int32)).sum())
    for _ in range(2):
        one.note(512, 2 * cpu_s)
    assert one.takes(512), "two may be outliers"
    one.note(500, cpu_s)
    assert one.takes(512), "another size"
    one.note(513, 2 * cpu_s)
    assert not one.takes(512)
    assert one.takes(400)
    for _ in range(7):
        one.note(512, 0.5 * cpu_s)
    assert one.takes(512)


def test_experts_are_held_while_they_are_used():
    """Parts bring what is absent of layers with experts; what a layer chose is counted by where it was."""
    store = Store(100)
    one = device(store=store)
    with one.held() as (residency, parts):
        assert store.holds == 1
        assert residency.shape == (LAYERS, NUM_EXPERTS)
        assert {part.layer for part in parts} == {1, 2}
        assert sum(len(part.experts) for part in parts) == 2 * 28
    assert store.holds == 0
    ids = np.array([[1, 99], [100, 127]], np.int32)
    one.count(LayerIndex(1), Routing(ids, np.ones(ids.shape, np.float32)))
    assert (store.hits, store.streamed) == (2, [(1, 2, 28)])


def test_a_device_that_ran_out_of_memory_once_is_not_tried_again():
    """That chunk fails; later ones are shared with the CPU."""
    store = Store(64)
    one = device(store=store)
    assert one.takes(512)
    with pytest.raises(DeviceMemoryError), one.held():
        raise DeviceMemoryError("activations", 5)
    assert store.holds == 0
    assert not one.takes(512)

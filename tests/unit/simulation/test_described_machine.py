"""From speeds to the costs that a replay weighs, against sums worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.speeds import LAYOUT, speeds
from thermocline.models.device.part import DevicePart
from thermocline.models.sizes import LayerSizes, ModelSizes
from thermocline.simulation.described_machine import describe, other_device, other_memory

MB = 10**6
DEVICE = other_device(1e12, 1e14, 1e9, 1e-6)
DENSE = LayerSizes(30 * MB, 0, 0, "")
ROUTED = LayerSizes(30 * MB, 0, 5 * MB, LAYOUT)
NOTHING = DevicePart(2)
SIZES = ModelSizes((DENSE, ROUTED), 10 * MB, 20 * MB, 8, 2, hidden_size=1000)
ONE, MANY = np.ones(1, np.int32), np.full(1, 16, np.int32)


def test_rows_cross_the_link_to_who_does_not_have_the_trunk():
    """An expert of 5 MB: half a millisecond of reading on the CPU, and 8 kB of activations at 1 GB/s."""
    measured = speeds(device=DEVICE)
    costs = describe(SIZES, measured, NOTHING).layers[1]
    assert costs is not None
    assert costs.cpu_seconds(ONE)[0] == pytest.approx(5e-4)
    assert costs.device_seconds(ONE)[0] == pytest.approx(5e-6 + 8e-6)
    assert costs.device_seconds(MANY)[0] == pytest.approx(5e-6 + 16 * 8e-6)
    assert (costs.copy_s, costs.launch_overhead_s) == (pytest.approx(5.001e-3), pytest.approx(3e-6))
    there = describe(SIZES, measured, DevicePart.whole(2)).layers[1]
    assert there is not None
    assert there.cpu_seconds(ONE)[0] == pytest.approx(5e-4 + 8e-6)
    assert there.device_seconds(ONE)[0] == pytest.approx(5e-6)
    assert describe(SIZES, measured, NOTHING).layers[0] is None


def test_many_rows_cost_alike_beyond_the_last_that_is_known():
    """Twice as many rows take twice as long."""
    costs = describe(SIZES, speeds(device=DEVICE), NOTHING).layers[1]
    assert costs is not None
    once, twice = costs.cpu_seconds(np.array([1024, 2048], np.int32))
    assert twice == pytest.approx(2 * once)


def test_a_layer_takes_its_share_of_trunk_and_head():
    """(30 + 30 + 20) MB at 10 GB/s for two layers; with half of it on the device that part is fast."""
    measured = speeds(device=DEVICE)
    assert describe(SIZES, measured, NOTHING).layer_seconds(1, 0) == pytest.approx(4e-3)
    half = describe(SIZES, measured, DevicePart.last(2, 2)).layer_seconds(1, 0)
    assert half == pytest.approx((3e-3 + 3e-5 + 1e-5 + 2e-5) / 2)


@pytest.mark.parametrize(("memory", "lost"), [(30e9, 0.0), (15e9, 0.5), (10e9, 0.95)])
def test_a_link_takes_from_the_memory_what_the_cpu_reads(memory, lost):
    """A CPU at 10 GB/s beside a link of 10 GB/s has half of what is left of 15."""
    device = replace(DEVICE, pinned_to_device_bytes_per_s=1e10)
    measured = speeds(device=device, read_bytes_per_s=memory)
    costs = describe(SIZES, measured, NOTHING).layers[1]
    assert costs is not None
    assert costs.copy_slowdown == pytest.approx(lost)


def test_another_memory_changes_reading_and_not_arithmetic():
    """At twice the speed one row takes half, and sixteen rows lose no more than that."""
    measured = speeds(device=DEVICE)
    found = other_memory(measured, 2e10)
    assert found.read_bytes_per_s == 2e10
    assert found.experts[LAYOUT].seconds_per_byte == pytest.approx((5e-11, 1.5e-10))
    assert found.head.seconds_per_byte == pytest.approx((5e-11, 1.5e-10))
    assert other_memory(measured, 1e10) == measured

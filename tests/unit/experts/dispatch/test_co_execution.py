"""The split of a layer between device, uploads and CPU: the least makespan, and what it rests on."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from thermocline.costmodel.expert_costs import ExpertCosts
from thermocline.experts.dispatch.co_execution import split

COSTS = ExpertCosts(
    100, "q4", (1, 8), (1.0, 4.0), (0.125, 0.5), copy_s=0.75, launch_overhead_s=0.25
)


def makespan(costs: ExpertCosts, rows, who, link_wait_s: float) -> float:
    """When the last is done, computed by following each resource; who: d, u or c per expert."""
    cpu, device = costs.cpu_seconds(rows), costs.device_seconds(rows)
    hits = [device[n] for n, each in enumerate(who) if each == "d"]
    uploads = sorted((n for n, each in enumerate(who) if each == "u"), key=lambda n: -rows[n])
    device_at = sum(hits) + (costs.launch_overhead_s if hits or uploads else 0.0)
    link_at = link_wait_s
    for n in uploads:
        link_at += costs.copy_s
        device_at = max(device_at, link_at) + device[n]
    busy = link_wait_s + costs.copy_s * len(uploads)
    work = sum(cpu[n] for n, each in enumerate(who) if each == "c")
    during = busy * (1 - costs.copy_slowdown)
    cpu_at = work / (1 - costs.copy_slowdown) if work < during else busy + work - during
    return max(device_at, cpu_at)


def best(costs, rows, there, link_wait_s):
    choices = ["dc" if each else "uc" for each in there]
    return min(makespan(costs, rows, who, link_wait_s) for who in product(*choices))


def letters(found) -> str:
    return "".join(
        "d" if here else "u" if up else "c"
        for here, up in zip(found.on_device, found.upload, strict=True)
    )


def test_what_is_there_is_computed_there_and_some_of_the_rest_comes():
    """Of four misses one second each, two are uploaded: both sides are done after two seconds."""
    rows, there = np.ones(5, np.int32), np.array([1, 0, 0, 0, 0], bool)
    found = split(COSTS, rows, there)
    assert letters(found) == "duucc"
    assert found.seconds == 2.0
    assert (found.on_device ^ found.upload ^ found.on_cpu).all()


def test_the_experts_of_most_rows_are_uploaded():
    """They save the CPU the most for the same copy."""
    rows = np.array([1, 8, 1, 6], np.int32)
    assert letters(split(COSTS, rows, np.zeros(4, bool))) == "cucu"


def test_a_busy_or_thin_link_uploads_nothing():
    """A copy that ends after the CPU would is not begun."""
    rows, there = np.ones(4, np.int32), np.zeros(4, bool)
    assert letters(split(COSTS, rows, there, link_wait_s=9.0)) == "cccc"
    assert letters(split(replace(COSTS, copy_s=5.0), rows, there)) == "cccc"


def test_a_slow_device_gets_no_work_even_of_what_it_has():
    """Then the CPU is done sooner with everything."""
    slow = replace(COSTS, device_s=(3.0, 9.0))
    found = split(slow, np.ones(2, np.int32), np.ones(2, bool))
    assert letters(found) == "cc"
    assert found.seconds == 2.0


def test_a_slow_device_shares_what_it_has():
    """As slow as the CPU, it takes half."""
    even = replace(COSTS, device_s=(1.0, 4.0), launch_overhead_s=0.0)
    assert split(even, np.ones(4, np.int32), np.ones(4, bool)).seconds == 2.0


def test_everything_there_is_one_visit():
    """Nothing is left for the CPU when the device is fast."""
    found = split(COSTS, np.ones(3, np.int32), np.ones(3, bool))
    assert letters(found) == "ddd"
    assert found.seconds == pytest.approx(0.625)


CASE = {
    "rows": st.lists(st.integers(1, 12), min_size=1, max_size=6),
    "bits": st.integers(0, 63),
    "copy": st.floats(0.01, 6),
    "speed": st.floats(0.05, 3),
    "wait": st.sampled_from([0.0, 0.4, 3.0]),
    "slowdown": st.sampled_from([0.0, 0.3, 0.9]),
}


def case(rows, bits, copy, speed, slowdown):
    costs = replace(COSTS, copy_s=copy, device_s=(speed, 4 * speed), copy_slowdown=slowdown)
    there = np.array([bits >> n & 1 for n in range(len(rows))], bool)
    return costs, np.array(rows, np.int32), there


@example(rows=[2, 2, 1, 4, 11], bits=42, copy=1.5, speed=0.5, wait=3.0, slowdown=0.0)
@example(rows=[10, 12, 5, 3, 11], bits=16, copy=1.5, speed=0.5, wait=3.0, slowdown=0.3)
@given(**CASE)
def test_it_is_as_long_as_it_says_and_never_worse_than_the_cpu_alone(
    rows, bits, copy, speed, wait, slowdown
):
    """The promised time is that of following each resource, and all on the CPU takes no less."""
    costs, rows, there = case(rows, bits, copy, speed, slowdown)
    found = split(costs, rows, there, link_wait_s=wait)
    assert found.seconds == pytest.approx(makespan(costs, rows, letters(found), wait))
    alone = makespan(costs, rows, "c" * len(rows), wait)
    assert found.seconds <= alone * (1 + 1e-9)


@given(**CASE)
def test_tokens_of_one_step_are_split_as_well_as_can_be(rows, bits, copy, speed, wait, slowdown):
    """With one row each and a device no slower than the CPU, no other split of all takes less."""
    costs, rows, there = case(rows, bits, copy, min(speed, 1.0), slowdown)
    rows = np.ones_like(rows)
    found = split(costs, rows, there, link_wait_s=wait)
    assert found.seconds <= best(costs, rows, there, wait) * (1 + 1e-9)


@example(rows=[1, 1, 5, 1], bits=9, copy=1.0, speed=0.75, wait=0.0, slowdown=0.0)
@given(**CASE)
def test_uneven_rows_are_split_nearly_as_well_as_can_be(rows, bits, copy, speed, wait, slowdown):
    """Uploading in the order of rows, from either end, is a rule of thumb, good to a third."""
    costs, rows, there = case(rows, bits, copy, min(speed, 1.0), slowdown)
    found = split(costs, rows, there, link_wait_s=wait)
    assert found.seconds <= best(costs, rows, there, wait) * 4 / 3

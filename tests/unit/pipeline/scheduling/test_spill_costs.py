"""Reading back or computing: what was measured decides, and what was never measured is tried."""

from __future__ import annotations

from thermocline.pipeline.scheduling.spill_costs import SpillCosts


def test_what_was_never_measured_is_tried():
    """Neither a first prompt nor a first read can say what they would have cost."""
    costs = SpillCosts(2)
    assert costs.pays(16, [1 << 30, 0])
    costs.observe_prompt(100, 1.0)
    assert costs.pays(16, [1 << 30, 0])


def test_the_faster_way_is_taken():
    """Ten ms a token, one ns a byte of memory, 100 of the file."""
    costs = SpillCosts(2)
    costs.observe_prompt(100, 1.0)
    costs.observe_read([1000, 0], 1e-6)
    costs.observe_read([0, 1000], 1e-4)
    assert costs.pays(10, [90_000_000, 0])
    assert costs.pays(10, [0, 900_000])
    assert not costs.pays(10, [20_000_000, 900_000])


def test_a_slow_moment_does_not_decide_for_ever():
    """Each refusal makes the next one less likely; a measurement then says anew."""
    costs = SpillCosts(1)
    costs.observe_prompt(1000, 1.0)
    costs.observe_read([1000], 3600.0)
    refusals = 0
    while not costs.pays(1000, [1000]):
        refusals += 1
    assert 50 < refusals < 100


def test_large_measurements_count_for_more():
    """A last chunk of few tokens has the fixed costs of a whole one."""
    costs = SpillCosts(1)
    for _ in range(20):
        costs.observe_prompt(1000, 1.0)
        costs.observe_prompt(1, 0.1)
    costs.observe_read([1000], 1.0)
    assert costs.pays(1000, [990])
    assert not costs.pays(1000, [1200])

"""The cache policy: what is worth a copy, who goes for it, and what is said when nothing is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thermocline.costmodel.expert_costs import ExpertCosts
from thermocline.experts.cache.policy import Move, SegmentedLruPolicy
from thermocline.messages import ExpertIndex, ExpertKey, LayerIndex

# A copy stops the CPU, so that it costs what it takes.
SMALL = ExpertCosts(100, "q4", (1, 16), (1.0, 4.0), (0.1, 0.4), copy_s=2.0, copy_slowdown=1.0)
LARGE = replace(SMALL, nbytes=150, layout="q6")


def key(layer: int, expert: int) -> ExpertKey:
    return ExpertKey(LayerIndex(layer), ExpertIndex(expert))


def use(policy: SegmentedLruPolicy, layer: int, *experts: int, times: int = 1) -> None:
    chosen = np.array(experts, np.int32)
    for _ in range(times):
        policy.observe(layer, chosen, np.ones_like(chosen), 1)


def make(policy: SegmentedLruPolicy, move: Move | None) -> Move:
    assert move is not None
    for gone in move.evict:
        policy.dropped(gone)
    policy.installed(move.install)
    policy.check_integrity()
    return move


def install(policy: SegmentedLruPolicy, keys) -> None:
    for each in keys:
        policy.installed(each)


def drop(policy: SegmentedLruPolicy, keys) -> None:
    for each in keys:
        policy.dropped(each)


def one_layer(capacity: int = 200, costs: ExpertCosts = SMALL, **given_) -> SegmentedLruPolicy:
    return SegmentedLruPolicy([costs], 8, capacity, **{"num_used": 1, **given_})


def test_an_expert_comes_once_its_uses_have_paid_for_the_copy():
    """A copy costs two seconds and a use saves 0.91: after the third use it is worthwhile."""
    policy = one_layer()
    use(policy, 0, 3, times=2)
    assert policy.next_move(()) is None
    assert "would save 1.81 s" in policy.reason
    use(policy, 0, 3)
    assert policy.next_move(()) == Move(key(0, 3), (), 100)
    assert policy.reason == ""


def test_what_is_on_its_way_is_not_asked_for_again():
    """Until it arrives or its copy comes to nothing; then it may be tried again."""
    policy = one_layer()
    use(policy, 0, 3, times=5)
    assert policy.next_move(()) is not None
    use(policy, 0, 3)
    assert policy.next_move(()) is None
    policy.dropped(key(0, 3))
    use(policy, 0, 3)
    make(policy, policy.next_move(()))
    assert repr(policy) == "SegmentedLruPolicy(1 experts, 100 of 200 bytes, 0 being copied)"


def test_the_least_worth_goes_when_the_gain_pays_for_the_copy():
    """A newcomer has to be used more than the victim, by the uses that a copy costs."""
    policy = one_layer()
    use(policy, 0, 0, 1, times=10)
    make(policy, policy.next_move(()))
    make(policy, policy.next_move(()))
    use(policy, 0, 1, times=5)
    use(policy, 0, 2, times=11)
    assert policy.next_move(()) is None
    assert "none of the other experts" in policy.reason
    use(policy, 0, 2, times=3)
    assert make(policy, policy.next_move(())).evict == (key(0, 0),)


def test_the_leased_stay():
    """A victim that is in use is passed over; where all are, nothing moves."""
    policy = one_layer()
    policy.installed(key(0, 0))
    policy.installed(key(0, 1))
    use(policy, 0, 1, times=3)
    use(policy, 0, 2, times=9)
    assert policy.next_move({key(0, 0), key(0, 1)}) is None
    use(policy, 0, 2)
    assert make(policy, policy.next_move({key(0, 0)})).evict == (key(0, 1),)


def test_every_copy_in_flight_has_its_own_victim():
    """Whether the victim of the first is gone already or not, the second move takes another one."""
    for is_gone in (True, False):
        policy = one_layer()
        policy.installed(key(0, 0))
        policy.installed(key(0, 1))
        use(policy, 0, 2, 3, times=5)
        first = policy.next_move(())
        assert first is not None
        if is_gone:
            policy.dropped(first.evict[0])
        second = policy.next_move(())
        assert second is not None
        assert {*first.evict, *second.evict} == {key(0, 0), key(0, 1)}
        policy.check_integrity()


def test_a_victim_whose_move_came_to_nothing_may_go_for_another():
    """It was not dropped, so it is there as before."""
    policy = one_layer(100)
    policy.installed(key(0, 0))
    use(policy, 0, 2, times=5)
    first = policy.next_move(())
    assert first == Move(key(0, 2), (key(0, 0),), 100)
    policy.dropped(first.install)
    policy.check_integrity()
    use(policy, 0, 3, times=6)
    assert policy.next_move(()) == Move(key(0, 3), (key(0, 0),), 100)


def test_old_heat_fades():
    """What was hot long ago gives way to what is chosen now."""
    policy = one_layer(100, half_life_steps=8)
    use(policy, 0, 0, times=50)
    make(policy, policy.next_move(()))
    use(policy, 0, 1, times=12)
    assert make(policy, policy.next_move(())).evict == (key(0, 0),)


def test_prompts_count_what_they_save():
    """Sixteen rows save more than one, but never more than the copy that could be made for the occasion."""
    policy = one_layer(half_life_steps=1e9)
    policy.observe(0, np.array([5], np.int32), np.array([16], np.int32), 16)
    assert policy.next_move(()) is None
    assert "would save 2.00 s" in policy.reason


def test_a_prompt_that_reads_everything_says_nothing_of_recency():
    """The order of use is the steps' own."""
    policy = one_layer(800)
    for expert in range(8):
        policy.installed(key(0, expert))
    use(policy, 0, 0)
    every = np.arange(8, dtype=np.int32)
    policy.observe(0, every, every + 1, 9)
    assert policy.resize(700) == (key(0, 1),)


def test_each_layout_has_its_share_of_the_capacity():
    """However hot one layer is, the slots of the other layout are not its own."""
    policy = SegmentedLruPolicy([SMALL, LARGE], 4, 500, num_used=1)
    use(policy, 0, 0, 1, 2, 3, times=50)
    use(policy, 1, 0, 1, 2, 3, times=10)
    moves = []
    while (move := policy.next_move(())) is not None:
        moves.append(make(policy, move))
    assert sorted(move.install.layer for move in moves) == [0, 0, 1, 1]
    assert not any(move.evict for move in moves)
    use(policy, 1, 0, 1, times=99)
    use(policy, 0, 2, 3, times=99)
    assert [each.layer for each in make(policy, policy.next_move(())).evict] == [0]


def test_who_has_more_than_a_share_gives_it_back():
    """Placed by the store beyond its share, a layout makes room for the other one's experts."""
    policy = SegmentedLruPolicy([SMALL, LARGE], 4, 550, num_used=1)
    for expert in range(4):
        policy.installed(key(0, expert))
    use(policy, 1, 0, times=9)
    assert make(policy, policy.next_move(())).evict == ()
    policy.check_integrity()
    policy = SegmentedLruPolicy([SMALL, LARGE], 5, 500, num_used=1)
    for expert in range(5):
        policy.installed(key(0, expert))
    use(policy, 1, 0, times=9)
    assert make(policy, policy.next_move(())).evict == (key(0, 0), key(0, 1))


def test_a_smaller_capacity_sends_away_the_least_worth():
    """As many as are too many go, and those on their way last."""
    policy = one_layer(300)
    use(policy, 0, 0, 1, times=9)
    make(policy, policy.next_move(()))
    make(policy, policy.next_move(()))
    use(policy, 0, 2, times=9)
    assert policy.next_move(()) is not None
    use(policy, 0, 1)
    going = policy.resize(100)
    assert going == (key(0, 0), key(0, 1))
    for each in going:
        policy.dropped(each)
    assert policy.resize(0) == (key(0, 2),)
    policy.dropped(key(0, 2))
    policy.check_integrity()


def test_known_heat_begins_with_the_hottest():
    """Experts of earlier runs come in the order of their use, before any is chosen."""
    policy = one_layer(100)
    policy.warm(0, np.array([0.1, 0.0, 0.7, 0.2, 0.0, 0.0, 0.0, 0.0]))
    assert make(policy, policy.next_move(())).install == key(0, 2)
    assert policy.next_move(()) is None


def test_a_slower_device_helps_too():
    """At half of the CPU's speed it takes a third of the work: an expert there saves a third of a second."""
    policy = one_layer(costs=replace(SMALL, device_s=(2.0, 9.0)), num_used=3)
    use(policy, 0, 0, 1, 2, times=6)
    assert policy.next_move(()) is None
    assert "would save 1.97 s" in policy.reason
    use(policy, 0, 0, 1, 2)
    assert policy.next_move(()) is not None


@pytest.mark.parametrize(
    ("device_s", "launch_s", "helps"), [(2.9, 0.0, True), (3.1, 0.0, False), (0.1, 3.0, False)]
)
def test_a_device_slower_than_a_whole_layer_gets_nothing(device_s, launch_s, helps):
    """It has to end one expert before the CPU has ended all three of the token; a launch counts."""
    costs = replace(SMALL, device_s=(device_s, 9.0), launch_overhead_s=launch_s)
    policy = one_layer(costs=costs, num_used=3)
    policy.warm(0, np.full(8, 0.375))
    use(policy, 0, 0, 1, 2, times=500)
    assert (policy.next_move(()) is not None) is helps
    text = "the device takes 3.10 s for one expert, and the CPU 3.00 s for all 3 of a token"
    assert policy.reason == ("" if helps else f"nothing is copied: {text}")


def test_a_copy_that_takes_nothing_from_the_cpu_costs_a_tenth():
    """So an empty place is filled after the first use, and a taken one by whom is used at least once more."""
    policy = one_layer(100, costs=replace(SMALL, copy_slowdown=0.0))
    use(policy, 0, 0)
    make(policy, policy.next_move(()))
    use(policy, 0, 1)
    assert policy.next_move(()) is None
    use(policy, 0, 1)
    assert make(policy, policy.next_move(())).evict == (key(0, 0),)


def test_a_thin_link_stops_copying_and_says_so():
    """A copy that no expert can pay for is never begun."""
    policy = one_layer(costs=replace(SMALL, copy_s=200.0))
    use(policy, 0, 0, times=2000)
    assert policy.next_move(()) is None
    assert "the link is too thin" in policy.reason
    assert "200.00 s" in policy.reason


def test_worths_survive_many_steps():
    """The growing scale is brought back before it overflows."""
    policy = one_layer(half_life_steps=0.5)
    use(policy, 0, 4, times=2000)
    with pytest.raises(AssertionError, match="no routed experts"):
        SegmentedLruPolicy([None, SMALL], 8, 100, num_used=1).observe(
            0, np.ones(1, np.int32), np.ones(1, np.int32), 1
        )
    policy = one_layer(half_life_steps=4)
    use(policy, 0, 4, times=4000)
    assert policy.next_move(()) == Move(key(0, 4), (), 100)


STEP = st.one_of(
    st.tuples(st.just("use"), st.integers(0, 1), st.sets(st.integers(0, 5), min_size=1)),
    st.tuples(st.just("move"), st.sets(st.tuples(st.integers(0, 1), st.integers(0, 5)))),
    st.tuples(st.just("arrive"), st.booleans()),
    st.tuples(st.just("resize"), st.integers(0, 1500)),
)


@given(st.lists(STEP, max_size=60))
def test_no_move_breaks_a_lease_or_the_capacity(steps):
    """Whatever the order of choices, copies, failures and resizing, bytes stay within the capacity."""
    policy = SegmentedLruPolicy(
        [replace(SMALL, copy_s=0.5), replace(LARGE, copy_s=0.5)], 6, 600, num_used=1
    )
    capacity, resident, coming = 600, {key(0, 0), key(0, 1), key(1, 0), key(1, 1)}, []
    install(policy, sorted(resident))
    nbytes = {0: 100, 1: 150}
    for step in steps:
        if step[0] == "use":
            use(policy, step[1], *sorted(step[2]), times=2)
        elif step[0] == "move":
            leased = {key(*pair) for pair in step[1]}
            move = policy.next_move(leased)
            if move is not None:
                assert set(move.evict) <= resident - leased
                assert move.install not in resident
                assert move.install not in coming
                drop(policy, move.evict)
                resident -= set(move.evict)
                coming.append(move.install)
        elif step[0] == "arrive" and coming:
            arrived = coming.pop(0)
            if step[1]:
                policy.installed(arrived)
                resident.add(arrived)
            else:
                policy.dropped(arrived)
        elif step[0] == "resize":
            capacity = step[1]
            going = policy.resize(capacity)
            drop(policy, going)
            resident -= set(going)
            coming = [each for each in coming if each not in going]
        assert sum(nbytes[each.layer] for each in (*resident, *coming)) <= capacity
        policy.check_integrity()


def test_a_device_that_records_its_steps_is_not_judged_by_the_host_s_launches():
    """Each launch by the host takes longer than the CPU's whole layer; in a recorded step there is none."""
    eager = replace(SMALL, launch_overhead_s=3.0, recorded=(0.05, 0.01))
    assert "the device takes 3.10 s" in one_layer(costs=eager, num_used=3).reason
    recorded = eager.in_recorded_steps()
    assert (recorded.device_s, recorded.launch_overhead_s) == ((0.05, 0.4), 0.01)
    policy = one_layer(costs=recorded, num_used=3)
    assert policy.reason == ""
    use(policy, 0, 3, times=4)
    assert policy.next_move(()) is not None
    assert SMALL.in_recorded_steps() is SMALL
    assert replace(eager, recorded=(9.0, 0.0)).in_recorded_steps().device_s == SMALL.device_s

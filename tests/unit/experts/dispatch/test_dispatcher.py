"""Which tier computes what: by a fixed placement, or by what is on a device and what is soonest done."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.chunks import make_chunk
from tests.support.fake_device import FakeDevice, RandomPolicy
from thermocline.costmodel.expert_costs import ExpertCosts
from thermocline.experts.cache.store import ExpertStore
from thermocline.experts.dispatch.co_execution import split as co_execute
from thermocline.experts.dispatch.dispatcher import CacheDispatcher, StaticDispatcher
from thermocline.experts.dispatch.offload_selector import ChunkTimes, OffloadSelector
from thermocline.experts.dispatch.split_rules import FastestSplit, LinkState, OnlyResident
from thermocline.experts.placement.placement import uniform_placement
from thermocline.messages import BackendRole, ExpertIndex, ExpertKey, LayerIndex, Routing
from thermocline.traces.recorder import NullRecorder

LAYER = LayerIndex(0)
CHUNK = make_chunk(7)
FAST = ExpertCosts(100, "a", (1, 64), (1e-3, 8e-3), (1e-4, 1e-3), copy_s=2e-3)
THIN = replace(FAST, copy_s=15e-3)
SLOW = ExpertCosts(100, "b", (1, 64), (1e-3, 8e-3), (2e-3, 2e-2), copy_s=2e-3)


def routing(ids: list[list[int]]) -> Routing:
    return Routing(np.array(ids, np.int32), np.ones((len(ids), len(ids[0])), np.float32))


def make_dispatcher(hot: list[int], choose, min_upload_tokens=inf, times=None):
    device = FakeDevice([10], 1000)
    policy = RandomPolicy([10], 8, 1000, random.Random(1))
    store = ExpertStore([10], 8, device, policy, 1000, NullRecorder())
    plain = device.begin_copy

    def at_once(*args, **named):
        copy = plain(*args, **named)
        device.end_copy(0)
        return copy

    device.begin_copy = at_once
    store.install(ExpertKey(LAYER, ExpertIndex(expert)) for expert in hot)
    return CacheDispatcher(store, choose, min_upload_tokens, times=times), store, policy


def test_a_fixed_placement_needs_no_lease():
    """Hot experts to the hot tier, the others to the cold one."""
    dispatcher = StaticDispatcher(uniform_placement(1, 4, 0.5))
    dispatches, lease = dispatcher.dispatch(CHUNK, LAYER, routing([[0, 1], [2, 3]]))
    dispatcher.computed_here(CHUNK, LAYER)
    assert lease is None
    assert dispatches[BackendRole.HOT].experts.tolist() == [0, 2]
    assert dispatches[BackendRole.COLD].experts.tolist() == [1, 3]


def test_what_is_on_the_device_is_leased_until_it_was_computed():
    """The hot share has a slot for each expert, which stays until the lease is released."""
    dispatcher, store, _ = make_dispatcher([1, 2, 5], OnlyResident())
    dispatches, lease = dispatcher.dispatch(CHUNK, LAYER, routing([[5, 0], [2, 7]]))
    assert dispatches[BackendRole.HOT].experts.tolist() == [2, 5]
    assert lease.slots.tolist() == store.residency(LAYER)[[2, 5]].tolist()
    store.resize(0)
    dispatches, again = dispatcher.dispatch(CHUNK, LAYER, routing([[5, 0], [2, 7]]))
    assert (set(dispatches), again) == ({BackendRole.COLD}, None)
    lease.release()
    store.check_integrity(idle=True)


def test_all_on_the_device_leaves_nothing_to_the_cpu():
    """A token whose experts are all there has one share."""
    dispatcher, _, _ = make_dispatcher([1, 2, 5], OnlyResident())
    dispatches, lease = dispatcher.dispatch(CHUNK, LAYER, routing([[5, 1]]))
    assert set(dispatches) == {BackendRole.HOT}
    lease.release()


def test_experts_of_many_tokens_are_copied_for_the_occasion():
    """An upload belongs to the lease and has no slot yet."""
    split = FastestSplit([THIN], 1, LinkState())
    dispatcher, _, _ = make_dispatcher([], split)
    dispatches, lease = dispatcher.dispatch(CHUNK, LAYER, routing([[3, n % 3] for n in range(60)]))
    # One with 20 tokens: it is computed sooner than the one with 60, and the copy is what takes long.
    assert dispatches[BackendRole.HOT].experts.tolist() == [2]
    assert lease.slots.tolist() == [-1]
    assert dispatches[BackendRole.COLD].experts.tolist() == [0, 1, 3]
    lease.release()


def test_a_device_with_nothing_to_do_leaves_layers_whole():
    """Empty, and too few tokens for uploads to pay: no need to take the layer apart."""
    split = FastestSplit([THIN, None, SLOW], 2, LinkState())
    fewest = split.min_upload_tokens(num_experts=8)
    assert 2 < fewest < inf
    assert FastestSplit([replace(SLOW, copy_s=1.0)], 2, LinkState()).min_upload_tokens(8) == inf
    dispatcher, _, _ = make_dispatcher([], split, fewest)
    assert dispatcher.is_left_to_cpu(int(fewest) - 1)
    assert not dispatcher.is_left_to_cpu(int(fewest))
    full, _, _ = make_dispatcher([1], split, fewest)
    assert not full.is_left_to_cpu(1)
    with_workers = CacheDispatcher(dispatcher._store, split, fewest, np.ones((1, 8), bool))
    assert not with_workers.is_left_to_cpu(1), "workers have"


@settings(max_examples=200, deadline=None)
@given(
    there=st.lists(st.booleans(), min_size=1, max_size=10),
    costs=st.sampled_from([FAST, THIN, SLOW]),
    single=st.booleans(),
    data=st.data(),
)
def test_what_is_remembered_and_what_is_skipped_is_what_would_be_computed(
    there, costs, single, data
):
    """For one token as for many, the choice costs as little time as the split that it stands for."""
    rows = [1] * len(there)
    if not single:
        rows = data.draw(st.lists(st.integers(1, 80), min_size=len(there), max_size=len(there)))
    counts, here = np.array(rows, np.int32), np.array(there)
    split = FastestSplit([costs], 1, LinkState())
    expected = co_execute(costs, counts, here)
    for _ in range(2):
        hits, uploads = split.split(LAYER, here, counts, np.zeros_like(here))
        assert not (hits & ~here).any()
        assert not (uploads & here).any()
        assert int(hits.sum()) == int(expected.on_device.sum())
        assert int(uploads.sum()) == int(expected.upload.sum())


def cpu_only(num_tokens: int) -> OffloadSelector:
    """A selector that has seen chunks of so many tokens take less time on the CPU alone."""
    selector = OffloadSelector()
    for offloaded in [True] * 3 + [False] * 3:
        selector.observe(num_tokens, 2.0 if offloaded else 1.0, offloaded=offloaded)
    return selector


def test_a_chunk_that_others_slow_down_is_the_cpus_even_where_it_goes_in_parts():
    """What is on the device stays there unused, and workers get nothing; a chunk of another size is shared."""
    times = ChunkTimes(cpu_only(2), LAYER, time.perf_counter)
    dispatcher, store, _ = make_dispatcher([1, 2, 5], OnlyResident(), times=times)
    two, eight = [[5, 0], [2, 7]], [[5, 0]] * 8
    dispatches, lease = dispatcher.dispatch(make_chunk(7, num_tokens=2), LAYER, routing(two))
    assert (set(dispatches), lease) == ({BackendRole.COLD}, None)
    assert dispatches[BackendRole.COLD].experts.tolist() == [0, 2, 5, 7]
    dispatches, lease = dispatcher.dispatch(make_chunk(8, num_tokens=8), LAYER, routing(eight))
    assert set(dispatches) == {BackendRole.HOT, BackendRole.COLD}
    lease.release()
    store.check_integrity(idle=True)
    workers = StaticDispatcher(uniform_placement(1, 8, 0.0), np.ones((1, 8), bool), times)
    assert set(workers.dispatch(make_chunk(7, num_tokens=2), LAYER, routing(two))[0]) == {
        BackendRole.COLD
    }
    assert set(workers.dispatch(make_chunk(8, num_tokens=8), LAYER, routing(eight))[0]) == {
        BackendRole.REMOTE
    }


def test_a_chunk_keeps_the_way_on_which_it_began():
    """A decision that is made while a chunk is on its way changes the next one."""
    selector = OffloadSelector()
    times = ChunkTimes(selector, LayerIndex(1), time.perf_counter)
    begun, later = make_chunk(1, num_tokens=2), make_chunk(2, num_tokens=2)
    times.note(begun, LayerIndex(0), offloaded=times.offloads(begun))
    for offloaded in [True] * 3 + [False] * 3:
        selector.observe(2, 2.0 if offloaded else 1.0, offloaded=offloaded)
    assert times.offloads(begun)
    assert not times.offloads(later)


@pytest.mark.parametrize(
    ("costs", "num_tokens", "resident_share", "promises"),
    [
        (FAST, 1, 1.0, True),
        (THIN, 1, 0.0, False),
        (FAST, 256, 0.0, True),
        (replace(FAST, copy_s=0.5), 64, 0.0, False),
        (replace(SLOW, device_s=(10e-3, 0.1)), 256, 1.0, False),
    ],
)
def test_offloading_promises_something_where_a_tenth_is_saved(
    costs, num_tokens, resident_share, promises
):
    """With all experts there a fast device helps a single token; without them, only prompts, over a link that is worth it."""
    split = FastestSplit([None, costs], 3, LinkState())
    assert split.promises(num_tokens, 8, resident_share) is promises

"""The expert store: leases are never broken, slots never lost, whatever happens in whatever order."""

from __future__ import annotations

import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fake_device import FakeDevice, RandomPolicy
from thermocline.experts.cache.policy import StaticCache
from thermocline.experts.cache.store import ExpertStore
from thermocline.messages import ExpertIndex, ExpertKey, LayerIndex, Routing
from thermocline.traces.events import CounterEvent, InstantEvent
from thermocline.traces.lanes import Name
from thermocline.traces.recorder import MemoryRecorder, NullRecorder

# Two layouts, and a dense layer in front.
SIZES = (0, 10, 10, 25)
NUM_EXPERTS = 5


def make_store(capacity=100, memory=1000, seed=0):
    device = FakeDevice(SIZES, memory)
    policy = RandomPolicy(SIZES, NUM_EXPERTS, capacity, random.Random(seed))
    store = ExpertStore(SIZES, NUM_EXPERTS, device, policy, capacity, NullRecorder())
    return store, device, policy


def key(layer: int, expert: int) -> ExpertKey:
    return ExpertKey(LayerIndex(layer), ExpertIndex(expert))


def fill(store: ExpertStore, device: FakeDevice, rounds: int = 20) -> None:
    """Promote for so many rounds, each until its copies have ended."""
    for _ in range(rounds):
        store.promote()
        while device.copies:
            device.end_copy(0)


def take(store: ExpertStore, layer: int, experts: list[int], uploads: tuple[int, ...] = ()):
    """Return which of the experts are held, and the lease."""
    ids = np.array(experts, np.int32)
    staged = np.array([expert in uploads for expert in experts])
    return store.lease(LayerIndex(layer), ids, np.ones_like(ids), ~staged, staged)


class PromptDevice(FakeDevice):
    """Copies end when they begin."""

    def begin_copy(self, key, slot, *, urgent=False):
        copy = super().begin_copy(key, slot, urgent=urgent)
        self.end_copy(0)
        return copy


class _Hold:
    """Gives everything back once, as a lease does."""

    def __init__(self, store: ExpertStore) -> None:
        self._let_go = [store.let_go]

    def release(self) -> None:
        if self._let_go:
            self._let_go.pop()()


class Walkers:
    """Whoever holds leases, and what must be in their slots."""

    def __init__(self, store: ExpertStore, device: FakeDevice) -> None:
        self.store, self.device = store, device
        self.held: list[tuple[list[tuple[int, ExpertKey]], object]] = []

    def lease(self, rng: random.Random) -> None:
        layer = rng.randrange(1, len(SIZES))
        experts = sorted(rng.sample(range(NUM_EXPERTS), rng.randint(1, NUM_EXPERTS)))
        mine, lease = take(self.store, layer, experts)
        if lease is not None:
            keys = [key(layer, expert) for expert in np.array(experts)[mine].tolist()]
            self.held.append((list(zip(lease.slots.tolist(), keys, strict=True)), lease))

    def release(self, rng: random.Random) -> None:
        if self.held:
            _, lease = self.held.pop(rng.randrange(len(self.held)))
            lease.release()
            lease.release()  # does nothing

    def hold_all(self) -> None:
        rows = self.store.hold_all()
        assert (rows is not None) == self.store.is_full
        if rows is not None:
            keys = [
                (slot, key(layer, expert))
                for layer, row in enumerate(rows)
                for expert, slot in enumerate(row.tolist())
                if SIZES[layer]
            ]
            self.held.append((keys, _Hold(self.store)))

    def check(self) -> None:
        for slots, _ in self.held:
            for slot, expert in slots:
                assert self.device.contents[slot] == expert, "a lease was broken"


@settings(max_examples=200, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), capacity=st.sampled_from([0, 24, 50, 100, 400]))
def test_no_interleaving_breaks_a_lease_or_loses_a_slot(seed, capacity):
    """Leases, promotions, copies that end or fail, smaller memory and capacity, in any order."""
    rng = random.Random(seed)
    store, device, policy = make_store(capacity, memory=300, seed=seed)
    walkers = Walkers(store, device)

    def end_copy() -> None:
        if device.copies:
            error = RuntimeError("the link broke") if rng.random() < 0.1 else None
            device.end_copy(rng.randrange(len(device.copies)), error)

    def limit_memory() -> None:
        device.memory_bytes = rng.randrange(300)

    actions = [
        *[partial(walkers.lease, rng), partial(walkers.release, rng), store.promote] * 4,
        walkers.hold_all,
        *[end_copy] * 8,
        lambda: store.resize(rng.randrange(capacity + 1)),
        lambda: store.give_up(rng.randrange(50)),
        limit_memory,
    ]
    for _ in range(rng.randrange(120)):
        rng.choice(actions)()
        walkers.check()
        store.check_integrity()
    while walkers.held:
        walkers.release(rng)
    while device.copies:
        device.end_copy(0)
    store.resize(0)
    store.check_integrity(idle=True)
    assert device.used_bytes == 0, "a slot was lost"
    assert not policy.there + policy.coming


class ThreadedDevice(FakeDevice):
    """The fake device for several threads, whose copies a thread of its own makes."""

    def __init__(self, expert_bytes, memory_bytes) -> None:
        super().__init__(expert_bytes, memory_bytes)
        self._lock = threading.Lock()

    def allocate(self, layer):
        with self._lock:
            return super().allocate(layer)

    def free(self, layer, slot):
        with self._lock:
            super().free(layer, slot)

    def begin_copy(self, key, slot, *, urgent=False):
        with self._lock:
            return super().begin_copy(key, slot, urgent=urgent)

    def copy_until(self, ended: threading.Event) -> None:
        while not ended.is_set() or self.copies:
            with self._lock:
                arrived, self.copies = self.copies, []
                self.contents |= {slot: expert for expert, slot, _ in arrived}
            for *_, copy in arrived:
                copy.set_result(None)


def walk(store: ExpertStore, device: FakeDevice, seed: int) -> int:
    """Lease and give back at random; return how many leased slots were looked at.

    It goes on until that is worth something: how soon there is anything to lease is the other threads' affair.
    """
    rng, num_checked, num_rounds = random.Random(seed), 0, 0
    walkers = Walkers(store, device)
    while num_rounds < 1500 or (num_checked <= 1000 and num_rounds < 100_000):
        num_rounds += 1
        walkers.lease(rng)
        num_checked += sum(len(slots) for slots, _ in walkers.held)
        walkers.check()
        if rng.random() < 0.6 or len(walkers.held) > 3:
            walkers.release(rng)
    while walkers.held:
        walkers.release(rng)
    return num_checked


@pytest.fixture
def _threads_that_often_change():
    """The interpreter changes threads every 10 us: they meet in more places, and none has it for long."""
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(usual_s)


@pytest.mark.slow
@pytest.mark.usefixtures("_threads_that_often_change")
def test_no_lease_is_broken_between_threads():
    """Two threads that lease and one that promotes, with copies on a fourth, never see a slot change hands."""
    device, ended = ThreadedDevice(SIZES, 1000), threading.Event()
    policy = RandomPolicy(SIZES, NUM_EXPERTS, 60, random.Random(3))
    store = ExpertStore(SIZES, NUM_EXPERTS, device, policy, 60, NullRecorder())

    def promote() -> None:
        while not ended.is_set():
            store.promote()

    with ThreadPoolExecutor(4) as pool:
        busy = [pool.submit(device.copy_until, ended), pool.submit(promote)]
        for _ in range(50):
            walks = [pool.submit(walk, store, device, n) for n in (1, 2)]
            checked = [one.result() for one in walks]
            # On a busy machine the other two may hardly have run.
            if store.statistics().total_evictions > 10:
                break
        ended.set()
        for one in busy:
            one.result()
    store.check_integrity(idle=True)
    assert min(checked) > 1000
    assert store.statistics().total_evictions > 10


def test_a_leased_expert_stays_until_it_is_given_back():
    """A smaller capacity takes a leased expert out of sight at once, and out of its slot afterwards."""
    store, device, _ = make_store(capacity=400)
    fill(store, device, 50)
    held, lease = take(store, 3, [0, 2])
    assert held.all()
    used = device.used_bytes
    assert store.resize(0) == used - 50
    assert device.used_bytes == 50
    assert take(store, 3, [0, 2])[1] is None
    assert [device.contents[slot] for slot in lease.slots.tolist()] == [key(3, 0), key(3, 2)]
    lease.release()
    assert device.used_bytes == 0
    store.check_integrity(idle=True)


def test_everything_stays_while_it_is_held():
    """A full store that is held: what is evicted is gone for routers, and its bytes stay until the last one lets go."""
    device = PromptDevice(SIZES, 1000)
    store = ExpertStore(SIZES, NUM_EXPERTS, device, StaticCache(SIZES), 400, NullRecorder())
    store.install(key(layer, n) for layer in (1, 2, 3) for n in range(NUM_EXPERTS))
    assert store.is_full
    rows = store.hold_all()
    assert store.hold_all() is not None
    assert store.resize(100) == 0, "nothing is free yet"
    assert not store.is_full
    assert store.hold_all() is None
    assert device.contents[int(rows[3][4])] == key(3, 4)
    store.let_go()
    store.check_integrity()
    assert device.used_bytes == 225
    store.let_go()
    assert device.used_bytes <= 100
    store.check_integrity(idle=True)


def test_room_is_made_of_what_nobody_uses():
    """What is asked for is freed even where much is leased; where all is leased it is told."""
    store, device, _ = make_store(capacity=400)
    fill(store, device, 50)
    _, lease = take(store, 1, list(range(NUM_EXPERTS)))
    used = device.used_bytes
    assert store.give_up(30)
    assert device.used_bytes <= used - 30
    assert store.statistics().capacity_bytes <= used - 30
    assert not store.give_up(used)
    lease.release()
    assert device.used_bytes == 0


def test_a_device_with_less_memory_than_was_said_shrinks_the_cache():
    """Where no slot can be had, the capacity becomes what is used, and no copy is tried again."""
    store, device, _ = make_store(capacity=400, memory=60)
    fill(store, device)
    statistics = store.statistics()
    assert statistics.capacity_bytes <= 60
    assert statistics.num_resident > 0
    store.check_integrity(idle=True)


def test_hits_misses_and_uploads_are_counted():
    """Each choice is counted once: found there, copied for it, or left to the CPU."""
    store, device, policy = make_store(capacity=400)
    store.on_change(lambda: None, lambda: True)
    fill(store, device, 50)
    store.resize(0)
    ids = np.array([[0, 1], [0, 2], [3, 4]], np.int32)
    store.observe(LayerIndex(1), Routing(ids, np.ones((3, 2), np.float32)), is_step_end=True)
    experts, counts = np.arange(5, dtype=np.int32), np.array([2, 1, 1, 1, 1], np.int32)
    uploads = np.array([False, False, True, False, False])
    mine, lease = store.lease(LayerIndex(1), experts, counts, ~uploads, uploads)
    statistics = store.statistics()
    assert (statistics.total_hits, statistics.total_staged, statistics.total_misses) == (0, 1, 5)
    assert mine.tolist() == uploads.tolist()
    assert lease.slots.tolist() == [-1]
    assert statistics.total_staged_experts == 1
    store.promote()
    assert policy.num_observed == 6
    dense = Routing(np.empty((2, 0), np.int32), np.empty((2, 0), np.float32))
    policy.observe = None
    store.observe(LayerIndex(0), dense, is_step_end=False)
    store.promote()


def test_choices_are_kept_only_for_who_listens():
    """After a step whose end asked for no more, nothing is kept until an end asks again."""
    store, _, policy = make_store(capacity=400)
    wanted = iter([False, True, False])
    store.on_change(lambda: None, lambda: next(wanted))
    chosen = Routing(np.array([[0, 1]], np.int32), np.ones((1, 2), np.float32))
    told = []
    for _ in range(3):
        before = policy.num_observed
        store.observe(LayerIndex(1), chosen, is_step_end=True)
        store.promote()
        told.append(policy.num_observed - before)
    assert told == [2, 0, 2]


def test_experts_are_put_there_at_the_start_as_far_as_they_fit():
    """`install` waits for the copies, and leaves out what has no room."""
    device = PromptDevice(SIZES, 1000)
    store = ExpertStore(SIZES, NUM_EXPERTS, device, StaticCache(SIZES), 45, NullRecorder())
    store.install([key(1, 3), key(3, 0), key(3, 1), key(2, 4)])
    assert store.placement().hot == ((), (3,), (4,), (0,))
    assert store.placement().dense_layers == {0}
    assert store.residency(LayerIndex(1)).tolist()[:3] == [-1, -1, -1]
    with pytest.raises(ValueError, match="read-only"):
        store.residency(LayerIndex(1))[0] = 0
    assert store.resize(20) == 25 + 10, "what came last goes first"
    assert store.placement().num_hot == 1
    store.check_integrity(idle=True)


def test_the_timeline_shows_evictions_and_what_is_used():
    """A counter of bytes, and a moment for each expert that goes."""
    recorder = MemoryRecorder(256)
    device = FakeDevice(SIZES, 1000)
    policy = RandomPolicy(SIZES, NUM_EXPERTS, 60, random.Random(1))
    store = ExpertStore(SIZES, NUM_EXPERTS, device, policy, 60, recorder)
    fill(store, device)
    events = recorder.events()
    used = [event.value for event in events if isinstance(event, CounterEvent)]
    gone = [event for event in events if isinstance(event, InstantEvent)]
    assert 0 < max(used) <= 60
    assert {event.name for event in gone} == {Name.EVICT}
    assert len(gone) == store.statistics().total_evictions

"""The governor: never waits, reads the selected first, streams prompts, predicts decode, and goes quiet."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.kernel_cases import float_weight
from thermocline.kernels.dense_contract import RoutingRule
from thermocline.kernels.reference import ReferenceKernels
from thermocline.messages import ChunkId, ExpertIndex, ExpertKey, LayerIndex, PrefetchHint
from thermocline.models.routing import RouterWeights
from thermocline.prefetch.cache_model import CacheModel
from thermocline.prefetch.governor import MAX_HINTS, PrefetchGovernor
from thermocline.prefetch.predictor import Predictor
from thermocline.prefetch.readers import ReaderTotals
from thermocline.traces.events import CounterEvent
from thermocline.traces.recorder import MemoryRecorder, NullRecorder

NUM_LAYERS, NUM_EXPERTS, EXPERT_BYTES = 4, 4, 10
ALL = np.arange(NUM_EXPERTS, dtype=np.int32)
NONE = np.empty(0, np.int32)


def key(layer: int, expert: int) -> ExpertKey:
    return ExpertKey(LayerIndex(layer), ExpertIndex(expert))


class FakeReaders:
    """Notes what it is asked for; what waits stays pending until the test says that it was read."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ExpertKey]] = []
        self.with_neighbours: list[ExpertKey] = []
        self.released: list[ExpertKey] = []
        self.cancelled: list[ExpertKey] = []
        self.waiting: set[ExpertKey] = set()
        self.closed = False
        self.non_expert_reads = 0
        self.rests: list[list[ExpertKey]] = []

    def read_rest(self, keys, *, with_neighbours=()):
        self.rests.append(list(keys))
        self.rest_with_neighbours = set(with_neighbours)

    def read_non_expert(self):
        self.non_expert_reads += 1

    def read(self, keys, urgency, *, with_neighbours=False):
        for each in keys:
            self.asked.append((urgency, each))
            self.waiting.add(each)
            if with_neighbours:
                self.with_neighbours.append(each)

    def release(self, keys):
        self.released += keys

    def pending(self, layer):
        return {each for each in self.waiting if each.layer == layer}

    def cancel(self, keys):
        found = [each for each in keys if each in self.waiting]
        self.waiting.difference_update(found)
        self.cancelled += found
        return found

    def totals(self):
        return ReaderTotals(len(self.asked), 0, 0)

    def close(self):
        self.closed = True


class Setup:
    """A governor over fakes, and `settle`, which waits until all hints are worked off."""

    def __init__(self, *, capacity: int = 1000, cold=None, probe=None, recorder=None) -> None:
        self.readers = FakeReaders()
        self.looks = 0
        self._gate = threading.Event()
        self._gate.set()
        self._capacity = capacity
        rule = RoutingRule(1, True, 1e-5, 1.0)
        router = RouterWeights(
            np.ones(4, np.float32), float_weight(np.eye(4, dtype=np.float32)), 1e-6, rule
        )
        self.governor = PrefetchGovernor(
            CacheModel([EXPERT_BYTES] * NUM_LAYERS, NUM_EXPERTS, capacity),
            Predictor(lambda _: router, ReferenceKernels(), NUM_LAYERS, NUM_EXPERTS),
            self.readers,
            recorder or NullRecorder(),
            cold=np.ones((NUM_LAYERS, NUM_EXPERTS), bool) if cold is None else cold,
            room_bytes=self._room,
            probe=probe,
        )

    def _room(self) -> int:
        self.looks += 1
        assert self._gate.wait(10)
        return self._capacity

    def block(self) -> None:
        self._gate.clear()

    def unblock(self) -> None:
        self._gate.set()

    def offer(self, *hints) -> None:
        for hint in hints:
            self.governor.offer_nowait(hint)

    def settle(self, *hints) -> None:
        """Offer hints one by one, each worked off before the next."""
        for hint in hints:
            self.governor.offer_nowait(hint)
            self.governor.wait_idle()


@pytest.fixture
def make():
    """Builds set-ups and closes them."""
    made = []

    def build(**options) -> Setup:
        made.append(Setup(**options))
        return made[-1]

    yield build
    for setup in made:
        setup.unblock()
        setup.governor.close()


def prompt(layer: int, experts=ALL, *, chunk: int = 1, continues: bool = False) -> PrefetchHint:
    shares = np.full(len(experts), 0.5, np.float32)
    return PrefetchHint(ChunkId(chunk), LayerIndex(layer), experts, shares, 8, True, continues)


def token(layer: int, *experts: int, chunk: int = 1, loud: int | None = None) -> PrefetchHint:
    """A decode hint whose state makes every router choose expert `loud`."""
    residual = np.zeros((1, 4), np.float32)
    residual[0, 0 if loud is None else loud] = 1.0
    chosen = np.array(experts, np.int32)
    shares = np.ones(len(chosen), np.float32)
    return PrefetchHint(
        ChunkId(chunk), LayerIndex(layer), chosen, shares, 1, False, False, residual
    )


def asked(setup, urgency: int) -> list[tuple[int, int]]:
    return [tuple(each) for found, each in setup.readers.asked if found == urgency]


def test_a_prompt_that_sets_out_gets_all_layers_in_order(make):
    """Before the first router has spoken, every layer is read, the first one first."""
    setup = make()
    setup.settle(prompt(0, NONE))
    assert [each.layer for _, each in setup.readers.asked] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4


def test_streaming_ends_with_the_prompt_unless_more_of_it_follows(make):
    """The first layers are read again for the next chunk only when there is one."""
    for continues, layers in ((False, {2, 3}), (True, {0, 1, 2, 3})):
        setup = make()
        setup.settle(prompt(2, NONE, continues=continues))
        assert {each.layer for _, each in setup.readers.asked} == layers


def test_streaming_stops_at_the_budget(make):
    """With room for two layers, two layers are asked for and no more."""
    setup = make(capacity=8 * EXPERT_BYTES)
    setup.settle(prompt(0, NONE))
    assert {each.layer for _, each in setup.readers.asked} == {0, 1}


@pytest.mark.parametrize("hint", ["prompt", "token"])
@pytest.mark.parametrize("room", [2, 0, -5])
def test_a_selection_is_read_whole_and_in_order_where_there_is_no_room_for_it(make, room, hint):
    """Compute would miss the others page by page, and the kernel reads no neighbours of them; nothing lies ahead of it."""
    setup = make(capacity=room * EXPERT_BYTES)
    setup.settle(prompt(1) if hint == "prompt" else token(1, *ALL))
    assert asked(setup, 0) == [(1, expert) for expert in range(NUM_EXPERTS)]
    assert len(setup.readers.asked) == NUM_EXPERTS


def test_what_was_passed_is_released_for_what_comes(make):
    """As the prompt walks, the layer it left makes room for the next."""
    setup = make(capacity=8 * EXPERT_BYTES)
    setup.settle(prompt(0, NONE))
    setup.readers.waiting.clear()
    setup.settle(prompt(0), prompt(1))
    assert {each.layer for each in setup.readers.released} == {0}
    assert {each.layer for _, each in setup.readers.asked} == {0, 1, 2}


def test_selected_experts_are_urgent_and_predicted_ones_come_behind(make):
    """A decode step reads its selection at once, then what the next routers choose from its state."""
    setup = make()
    setup.settle(token(0, 1, 2, loud=3))
    assert asked(setup, 0) == [(0, 1), (0, 2)]
    assert asked(setup, 1) == [(1, 3)]


def test_a_layer_whose_usual_experts_are_in_memory_is_not_predicted(make):
    """Predicting costs compute time, and would rarely find what is missing; it begins again when that changes."""
    setup = make()
    for _ in range(500):
        setup.settle(token(0, 1, loud=1), token(1, 1, loud=1))
    before = setup.governor.statistics().layers[1].total_predicted
    setup.settle(token(0, 1, loud=3), token(1, 1))
    assert [each for each in asked(setup, 1) if each[0] == 1] == [(1, 1)]
    assert setup.governor.statistics().layers[1].total_predicted == before < 500
    for _ in range(30):
        setup.settle(token(0, 1, loud=3), token(1, 2))
    setup.settle(token(0, 1, loud=3))
    assert (1, 3) not in asked(setup, 1)  # 2 is in memory by now
    setup.settle(token(0, 1, 2, loud=3))
    assert (1, 3) in asked(setup, 1)


def test_a_predicted_expert_that_is_selected_becomes_urgent(make):
    """It is late, not missed, while it waits; once read it is a hit."""
    setup = make()
    setup.settle(token(0, 1, loud=3), token(1, 3, loud=3))
    assert (0, 3) not in asked(setup, 0)
    assert (1, 3) in asked(setup, 0)
    assert setup.governor.statistics().total_late == 1
    setup.readers.waiting.clear()
    setup.settle(token(1, 3, loud=3, chunk=2))
    assert setup.governor.statistics().total_hits == 1


def test_wrong_guesses_and_passed_layers_are_cancelled(make):
    """What waits for a layer in vain, or for the layer just left, is not read any more."""
    setup = make()
    setup.settle(token(0, 1, loud=3))
    setup.settle(token(1, 2, loud=3))
    assert set(setup.readers.cancelled) >= {key(0, 1), key(1, 3)}
    assert setup.readers.released == [key(1, 3)]
    assert setup.governor.statistics().total_misses == 2


def test_a_cancelled_expert_can_be_asked_for_again(make):
    """What was taken back is missing again."""
    setup = make()
    setup.settle(token(0, 1, loud=3), token(1, 2, loud=3), token(1, 3, loud=3, chunk=2))
    assert asked(setup, 0).count((1, 3)) == 1


def test_experts_of_a_device_are_left_alone(make):
    """Only cold experts are read ahead."""
    cold = np.ones((NUM_LAYERS, NUM_EXPERTS), bool)
    cold[:, :2] = False
    setup = make(cold=cold)
    setup.settle(prompt(0, NONE))
    assert {each.expert for _, each in setup.readers.asked} == {2, 3}


def test_a_prompt_reads_layers_with_their_neighbours_where_nearly_all_is_wanted(make):
    """Not a layer half of which is on a device, and no single expert of a decode step."""
    cold = np.ones((NUM_LAYERS, NUM_EXPERTS), bool)
    cold[2, :2] = False
    setup = make(cold=cold)
    setup.settle(prompt(0, NONE))
    assert {each.layer for each in setup.readers.with_neighbours} == {0, 1, 3}
    assert len(setup.readers.with_neighbours) == 3 * NUM_EXPERTS
    decoding = make()
    decoding.settle(token(0, 1, loud=2))
    assert decoding.readers.asked
    assert not decoding.readers.with_neighbours


def test_offering_never_waits_and_the_newest_hints_survive(make):
    """With planning stuck, as many hints as fit are kept, and the oldest are dropped and counted."""
    setup = make()
    setup.block()
    setup.offer(token(0, 0, chunk=0))
    while not setup.looks:
        threading.Event().wait(0.001)
    setup.offer(*(token(0, 0, chunk=n) for n in range(1, MAX_HINTS + 4)))
    assert setup.governor.statistics().total_dropped == 3
    setup.unblock()


def test_of_one_chunks_waiting_hints_only_the_newest_is_read_for(make):
    """A layer that was computed meanwhile teaches the predictor, and nothing is read for it."""
    setup = make()
    setup.block()
    setup.offer(token(3, 0, chunk=0))
    while not setup.looks:
        threading.Event().wait(0.001)
    setup.offer(token(0, 1, loud=1), token(1, 2, loud=1))
    setup.unblock()
    setup.governor.wait_idle()
    assert (0, 1) not in asked(setup, 0)
    assert (1, 2) in asked(setup, 0)
    assert setup.governor.statistics().layers[0].total_selected == 1


class FakeProbe:
    """Says what the test wants."""

    def __init__(self, answer: bool | OSError) -> None:
        self.answer = answer
        self.looks = 0

    def is_resident(self) -> bool:
        self.looks += 1
        if isinstance(self.answer, OSError):
            raise self.answer
        return self.answer


def test_it_goes_quiet_when_all_is_in_memory(make, monkeypatch):
    """One look, and further hints are counted and cost nothing: nothing is planned or looked at."""
    monkeypatch.setattr("thermocline.prefetch.governor._LOOK_EVERY_S", 3600.0)
    probe = FakeProbe(True)
    setup = make(probe=probe)
    setup.settle(prompt(0, NONE))
    assert setup.governor.is_quiet
    setup.offer(*(token(0, n % 4) for n in range(20)))
    statistics = setup.governor.statistics()
    assert (statistics.total_hints, statistics.total_needless) == (21, 21)
    assert (probe.looks, setup.readers.asked) == (1, [])


def test_who_asks_before_a_chunk_gets_an_answer_of_now(make, monkeypatch):
    """None while the last look holds, another after a pause, and none where the last found a page missing, or before the first."""
    clock = [1000.0]
    time = SimpleNamespace(monotonic=lambda: clock[0])
    monkeypatch.setattr("thermocline.prefetch.governor.time", time)
    probe = FakeProbe(True)
    setup = make(probe=probe)
    assert not setup.governor.looks_quiet()
    assert probe.looks == 0
    setup.settle(token(0, 1))
    assert setup.governor.looks_quiet()
    assert probe.looks == 1
    clock[0] += 3600
    assert not setup.governor.is_quiet
    assert setup.governor.looks_quiet()
    assert probe.looks == 2
    clock[0] += 3600
    probe.answer = False
    assert not setup.governor.looks_quiet()
    assert not setup.governor.looks_quiet()
    assert probe.looks == 3
    # A hint's own look finds that all is there again.
    clock[0] += 3600
    probe.answer = True
    setup.settle(token(0, 1))
    assert setup.governor.looks_quiet()
    assert probe.looks == 4
    statistics = setup.governor.statistics()
    assert (statistics.total_hints, statistics.total_needless) == (2, 2)
    assert setup.readers.asked == []


def test_nobody_waits_for_a_look_that_will_not_come(make, monkeypatch):
    """Without a probe there is none, and whoever waits while it closes is let go."""
    monkeypatch.setattr("thermocline.prefetch.governor._LOOK_EVERY_S", 0.0)
    assert not make().governor.looks_quiet()
    setup = make(probe=FakeProbe(True))
    setup.settle(token(0, 1))
    setup.block()  # the next look does not end
    answers = []
    asks = threading.Thread(target=lambda: answers.append(setup.governor.looks_quiet()))
    closes = threading.Thread(target=setup.governor.close)
    asks.start()
    closes.start()
    asks.join(10)
    setup.unblock()
    closes.join(10)
    assert not asks.is_alive()
    assert not closes.is_alive()
    assert answers == [False]


def test_hints_that_come_while_it_looks_are_needless_too(make, monkeypatch):
    """All is in memory; what was offered before the look had ended is not planned, and counts as no miss."""
    monkeypatch.setattr("thermocline.prefetch.governor._LOOK_EVERY_S", 3600.0)
    probe = FakeProbe(True)
    setup = make(probe=probe)

    def look() -> bool:
        for expert in range(4):
            setup.governor.offer_nowait(token(1, expert))
        return True

    monkeypatch.setattr(probe, "is_resident", look)
    setup.settle(token(0, 1))
    statistics = setup.governor.statistics()
    assert statistics.is_resident
    assert (statistics.total_hints, statistics.total_needless, statistics.total_misses) == (5, 5, 0)
    assert setup.readers.asked == []


def test_non_expert_weights_are_read_once_until_all_was_in_memory(make, monkeypatch):
    """With the first hint, and again with the first one after a time in which nothing was missing."""
    monkeypatch.setattr("thermocline.prefetch.governor._LOOK_EVERY_S", 0.0)
    probe = FakeProbe(False)
    setup = make(probe=probe)
    setup.settle(token(0, 1), token(1, 2))
    assert setup.readers.non_expert_reads == 1
    probe.answer = True
    setup.settle(token(0, 1))
    probe.answer = False
    setup.settle(token(1, 1))
    assert setup.readers.non_expert_reads == 2


def test_a_probe_that_fails_or_says_no_keeps_it_awake(make):
    """Neither a missing page nor a refusing kernel silences it."""
    for answer in (False, OSError(12, "no memory, as told")):
        setup = make(probe=FakeProbe(answer))
        setup.settle(prompt(0, NONE))
        assert not setup.governor.is_quiet
        assert setup.readers.asked


EVERY = [key(layer, expert) for layer in range(NUM_LAYERS) for expert in range(NUM_EXPERTS)]


def test_where_all_have_room_the_rest_is_read_once(make, monkeypatch):
    """With the first look that finds something missing, and again after a time in which nothing was."""
    monkeypatch.setattr("thermocline.prefetch.governor._LOOK_EVERY_S", 0.0)
    probe = FakeProbe(False)
    cold = np.ones((NUM_LAYERS, NUM_EXPERTS), bool)
    cold[1, 2] = cold[3, 0] = cold[3, 1] = False
    wanted = [each for each in EVERY if cold[each]]
    setup = make(capacity=15 * EXPERT_BYTES, probe=probe, cold=cold)
    setup.settle(token(0, 1), token(1, 2))
    assert setup.readers.rests == [wanted]
    assert setup.readers.rest_with_neighbours == {0, 1, 2}
    probe.answer = True
    setup.settle(token(0, 1))
    probe.answer = False
    setup.settle(token(1, 1))
    assert setup.readers.rests == [wanted, wanted]


def test_without_room_for_all_nothing_is_read_unasked(make, monkeypatch):
    """An expert too many, and none is; and no more of them once another program takes the room."""
    monkeypatch.setattr("thermocline.prefetch.governor._LOOK_EVERY_S", 0.0)
    small = make(capacity=16 * EXPERT_BYTES - 1, probe=FakeProbe(False))
    small.settle(token(0, 1))
    assert small.readers.rests == []
    setup = make(capacity=16 * EXPERT_BYTES, probe=FakeProbe(False))
    setup.settle(token(0, 1))
    setup._capacity -= 1
    setup.settle(token(1, 1), token(2, 1))
    assert setup.readers.rests == [EVERY, []]


def test_waste_is_what_goes_unselected(make):
    """Two experts that were read ahead and evicted without use count their bytes."""
    setup = make(capacity=2 * EXPERT_BYTES)
    setup.settle(token(0, 0, loud=1))
    setup.readers.waiting.clear()
    setup.settle(token(2, 2, 3, loud=1, chunk=2))
    assert setup.governor.statistics().total_wasted_bytes == EXPERT_BYTES


def test_counters_reach_the_trace(make):
    """Hits, late ones, misses and wasted bytes are tracks of their own."""
    recorder = MemoryRecorder(100)
    setup = make(recorder=recorder)
    setup.settle(token(0, 1, 2))
    found = {
        event.track: event.value for event in recorder.events() if isinstance(event, CounterEvent)
    }
    assert found == {
        "prefetch hit": 0,
        "prefetch late": 0,
        "prefetch miss": 2,
        "prefetch wasted": 0,
    }


def test_a_prompt_that_ended_early_is_forgotten(make):
    """A chunk that stops in mid-walk does not decide what is evicted for good."""
    setup = make()
    setup.settle(prompt(1))
    setup.settle(*(token(n % 4, 0, chunk=n) for n in range(2, 30)))
    assert "positions={}" in repr(setup.governor)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_planner_that_failed(make):
    """An error that nobody foresaw ends reading ahead, and nothing else."""
    setup = make()
    setup.readers.pending = None
    setup.offer(token(0, 1))
    setup.governor.wait_idle()
    setup.offer(token(0, 1))
    setup.governor.wait_idle()
    setup.governor.close()


def test_closing_ends_the_readers_and_can_be_repeated(make):
    """Nothing is left running."""
    setup = make()
    setup.governor.close()
    setup.governor.close()
    assert setup.readers.closed

"""The model of the page cache: within its budget, Belady's choice for scans, the least selected experts else."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from thermocline.messages import LayerIndex
from thermocline.prefetch.cache_model import CacheModel


def ids(*experts: int) -> np.ndarray:
    return np.array(experts, np.int32)


def layer(index: int) -> LayerIndex:
    return LayerIndex(index)


def scan(model: CacheModel, position: int) -> int:
    """Let a prompt reach a layer and select all of it; returns how many experts were not held."""
    model.advance([layer(position)])
    missing = model.missing(layer(position))
    model.use(layer(position), np.arange(4, dtype=np.int32))
    model.admit(layer(position), missing)
    return len(missing)


def test_all_is_admitted_while_there_is_room():
    """Nothing is evicted below the budget, and the held experts are those admitted."""
    model = CacheModel([10, 20], 4, 100)
    model.advance([])
    admission = model.admit(layer(1), ids(0, 3))
    assert admission.experts.tolist() == [0, 3]
    assert len(admission.evicted) == 0
    assert model.held(layer(1), ids(0, 1, 2, 3)).tolist() == [True, False, False, True]
    assert model.missing(layer(1)).tolist() == [1, 2]
    assert model.current_bytes == 40


def test_the_least_recently_used_go_during_decode():
    """Without prompts the oldest stamp is evicted first, and use makes an expert young."""
    model = CacheModel([10], 4, 30)
    for expert in (0, 1, 2):
        model.advance([])
        model.admit(layer(0), ids(expert))
    model.advance([])
    model.use(layer(0), ids(0))
    assert model.admit(layer(0), ids(3)).evicted.tolist() == [[0, 1]]


def test_the_least_selected_go_before_the_oldest():
    """What most tokens select stays, though another one was used later."""
    model = CacheModel([10], 4, 30)
    model.advance([])
    model.admit(layer(0), ids(0, 1, 2))
    model.observe(layer(0), ids(0, 1, 2), np.array([0.9, 0.5, 0.1], np.float32), 64)
    model.use(layer(0), ids(0, 1, 2))
    model.advance([])
    model.use(layer(0), ids(2))
    model.advance([])
    assert model.admit(layer(0), ids(3)).evicted.tolist() == [[0, 2]]


def test_old_selections_are_forgotten():
    """After many tokens that select another expert, the favourite of the past goes."""
    model = CacheModel([10], 3, 20)
    model.advance([])
    model.admit(layer(0), ids(0, 1))
    model.observe(layer(0), ids(0), np.ones(1, np.float32), 64)
    model.use(layer(0), ids(0, 1))
    for _ in range(3):
        model.observe(layer(0), ids(1), np.ones(1, np.float32), 64)
    for _ in range(2):
        model.advance([])
    assert model.admit(layer(0), ids(2)).evicted.tolist() == [[0, 0]]


def test_behind_a_last_chunk_the_least_selected_of_all_passed_layers_go():
    """Where more of the prompt follows, the layer just passed goes; where none does, what answers will want least."""
    for is_last, gone in ((False, [[1, 0], [1, 1]]), (True, [[0, 1], [1, 1]])):
        model = CacheModel([1] * 4, 2, 4)
        for at in (0, 1):
            model.advance([layer(at)])
            model.admit(layer(at), ids(0, 1))
            model.observe(layer(at), ids(0, 1), np.array([0.9, 0.1], np.float32), 64)
            model.use(layer(at), ids(0, 1))
        here = [layer(2)]
        model.advance(*([], here) if is_last else [here])
        assert sorted(model.admit(layer(2), ids(0, 1)).evicted.tolist()) == gone


def test_nothing_of_the_present_step_is_evicted():
    """What was just used or admitted is no victim: the rest finds no room."""
    model = CacheModel([10], 4, 20)
    model.advance([])
    model.admit(layer(0), ids(0, 1))
    admission = model.admit(layer(0), ids(2, 3))
    assert len(admission.experts) == len(admission.evicted) == 0


def test_a_cyclic_scan_misses_as_little_as_belady():
    """Over the second and later passes only about what does not fit is read; LRU would read everything.

    8 layers of 4 experts and room for 5 layers: the offline optimum of a cyclic scan with room for C of N
    misses (N - C) / (N - 1) of it, here 3/7 of 32.
    """
    model = CacheModel([1] * 8, 4, 20)
    passes = [sum(scan(model, position) for position in range(8)) for _ in range(8)]
    assert passes[0] == 32
    assert sum(passes[1:]) / 7 <= 32 * 3 / 7 + 0.5


def test_reading_ahead_never_evicts_what_is_wanted_sooner():
    """A far layer's experts make no nearer layer's go."""
    model = CacheModel([1] * 4, 4, 8)
    model.advance([layer(0)])
    model.admit(layer(0), np.arange(4, dtype=np.int32))
    model.admit(layer(1), np.arange(4, dtype=np.int32))
    model.advance([layer(0)])
    assert len(model.admit(layer(3), ids(0)).experts) == 0
    model.advance([layer(1)])
    admission = model.admit(layer(2), ids(0, 1))
    assert {row[0] for row in admission.evicted.tolist()} == {0}


def test_a_layer_is_kept_for_the_prompt_behind():
    """With a second prompt one layer behind, the layer that the first has left stays."""
    model = CacheModel([1] * 4, 4, 12)
    model.advance([layer(0)])
    for index in (0, 1, 2):
        model.admit(layer(index), np.arange(4, dtype=np.int32))
    model.advance([layer(2), layer(1)])
    admission = model.admit(layer(3), ids(0, 1, 2, 3))
    assert {row[0] for row in admission.evicted.tolist()} == {0}


def test_bytes_let_go_unused_are_counted():
    """Of two evicted experts only the one that was never selected is waste."""
    model = CacheModel([10], 4, 20)
    model.advance([])
    model.admit(layer(0), ids(0, 1))
    model.advance([])
    model.use(layer(0), ids(1))
    model.advance([])
    admission = model.admit(layer(0), ids(2, 3))
    assert len(admission.evicted) == 2
    assert admission.unused_bytes == 10


def test_a_forgotten_expert_frees_its_bytes_once():
    """Forgetting twice takes nothing more."""
    model = CacheModel([10], 4, 20)
    model.admit(layer(0), ids(2))
    for _ in range(2):
        model.forget(layer(0), 2)
        assert model.current_bytes == 0


def test_a_smaller_budget_takes_effect_with_the_next_admission():
    """After the budget shrank, an admission evicts down to it first."""
    model = CacheModel([10], 4, 40)
    model.advance([])
    model.admit(layer(0), ids(0, 1, 2))
    model.capacity_bytes = 20
    model.advance([])
    admission = model.admit(layer(0), ids(3))
    assert len(admission.evicted) == 2
    assert model.current_bytes == 20


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(0, 60),
    st.lists(
        st.tuples(st.integers(0, 3), st.sets(st.integers(0, 5)), st.booleans(), st.booleans()),
        max_size=25,
    ),
)
def test_bytes_are_those_of_the_held_experts_and_within_the_budget(sizes, capacity, steps):
    """Whatever is used, admitted or streamed: the count is exact, the budget holds, held ones stay known."""
    model = CacheModel(sizes, 6, capacity)
    for index, chosen, streams, evict in steps:
        at = layer(index % len(sizes))
        experts = np.array(sorted(chosen), np.int32)
        model.advance([at] if streams else [])
        model.use(at, experts)
        held = {(n, e) for n in range(len(sizes)) for e in range(6) if model.held(layer(n), ids(e))}
        wanted = experts[~model.held(at, experts)]
        admission = model.admit(at, wanted, evict=evict)
        evicted = {tuple(row) for row in admission.evicted.tolist()}
        assert evicted <= held
        after = {
            (n, e) for n in range(len(sizes)) for e in range(6) if model.held(layer(n), ids(e))
        }
        assert after == (held - evicted) | {(at, e) for e in admission.experts.tolist()}
        assert model.current_bytes == sum(sizes[n] for n, _ in after) <= max(capacity, 0)

"""Recorded decode steps from Python: what they refuse, and what they keep alive."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.latent_cases import LATENT_OPTIONS
from tests.support.toy_archs import ToyArch, write_toy_arch
from tests.support.toy_model import ToyShape, write_toy_model
from thermocline.kernels.cpu import NativeKernels
from thermocline.kernels.whole_step import PlacedParts
from thermocline.modelfile.reader import open_model_file
from thermocline.models.registry import open_model

SHAPE = ToyShape()
ROWS, BLOCKS, BLOCK_TOKENS = 4, 6, 16
LONG = (60_000_000_000, 60_000_000_000)
SHORT = (1_000_000, 1_000_000)
DONE, ABORTED, LATE = range(3)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """The parts of a model of two layers, its kernels, and its experts as a device's slots."""
    path = write_toy_model(tmp_path_factory.mktemp("toy") / "toy.gguf", SHAPE)
    with open_model_file(path) as file:
        kernels = NativeKernels("portable", threads=1)
        yield SimpleNamespace(kernels=kernels, parts=open_model(file, kernels).non_expert.layers)


@pytest.fixture(scope="module")
def used(toy):
    """A graph for many steps, and the number of the last."""
    return SimpleNamespace(graph=new_graph(toy), epoch=0)


def cache():
    """Return the keys or values of a layer."""
    return np.zeros((BLOCKS, SHAPE.kv_heads, BLOCK_TOKENS * 4 * SHAPE.head_dim), np.uint8)


def layers_of(toy):
    """Return all layers, each with a cache of its own; the device holds every expert."""
    layers = []
    for parts in toy.parts:
        layer = toy.kernels.placed_layer(PlacedParts(parts, None, 0, 0, parts.routed.stack))
        layer.attends(0, BLOCK_TOKENS, SHAPE.head_dim, cache(), cache())
        layers.append(layer)
    return layers


def new_graph(toy, rows=ROWS):
    """Return a graph, its page and its server."""
    page, server = toy.kernels.handoff(toy.parts, rows, SHAPE.used, SHAPE.hidden)
    return SimpleNamespace(
        run=(graph := toy.kernels.step_graph(page, layers_of(toy), 1e12)).run,
        graph=graph,
        page=page,
        server=server,
    )


def step(num_rows=2, slot=0):
    """Return a step's arguments: sequences of two blocks each, at position 3; `slot` holds every expert, or none."""
    table = np.arange(2 * num_rows, dtype=np.int32)
    starts = np.arange(num_rows + 1, dtype=np.int32)
    turn = np.ones((2 * BLOCK_TOKENS, SHAPE.head_dim // 2), np.float32)
    residency = np.full((SHAPE.layers, SHAPE.experts), slot, np.int32)
    return {
        "x": np.random.default_rng(1).standard_normal((num_rows, SHAPE.hidden)).astype(np.float32),
        "positions": np.full(num_rows, 3, np.int32),
        "ropes": [(turn, 0 * turn, True)],
        "places": [
            (table[::2].copy() * BLOCK_TOKENS + 3, starts, table, 2 * starts, 0 * starts[1:])
        ],
        "runs": np.zeros((0, 4), np.int32),
        "residency": residency,
    }


def test_a_step_with_all_experts_on_the_device_needs_no_cpu(toy):
    """It is computed alone, and its output and spans can be read."""
    graph = new_graph(toy)
    assert graph.run(1, SHORT, **step()) == DONE
    out = np.full((2, SHAPE.hidden), np.nan, np.float32)
    graph.graph.output(out)
    assert np.isfinite(out).all()
    spans = np.zeros((graph.graph.num_nodes, 5), np.int64)
    graph.graph.spans(spans)
    assert (spans[:, 0] <= spans[:, 1]).all()
    assert (np.diff(spans[:, 0]) >= 0).all()


def test_a_step_without_a_cpu_ends(toy):
    """The device is late, and the page says so to the CPU."""
    graph = new_graph(toy)
    assert graph.run(1, SHORT, **step(slot=-1)) == LATE
    assert graph.server.serve(2, 1, LONG, np.zeros((SHAPE.layers, 2), np.int64)) == ABORTED


def test_a_graph_computes_one_step_at_a_time(toy):
    """A second one would use the same memory; so would whoever reads the output."""
    graph = new_graph(toy)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(graph.run, 1, LONG, **step(slot=-1))
        begun = graph.page.memory[graph.page.layout["published"] :][:4].view(np.uint32)
        while begun[0] != 1:
            pass
        with pytest.raises(ValueError, match="already"):
            graph.run(2, SHORT, **step())
        with pytest.raises(ValueError, match="computes a step"):
            graph.graph.output(np.zeros((2, SHAPE.hidden), np.float32))
        with pytest.raises(ValueError, match="computes a step"):
            graph.graph.spans(np.zeros((graph.graph.num_nodes, 5), np.int64))
        graph.page.abort(1)
        assert first.result() == ABORTED


def test_a_graph_keeps_what_it_was_recorded_with(toy):
    """A layer may get another cache, or go away: the graph writes to the cache that it knows."""
    page, _ = toy.kernels.handoff(toy.parts, ROWS, SHAPE.used, SHAPE.hidden)
    layers, kept = layers_of(toy), cache()
    layers[0].attends(0, BLOCK_TOKENS, SHAPE.head_dim, kept, cache())
    graph = toy.kernels.step_graph(page, layers, 1e12)
    small = np.zeros((1, SHAPE.kv_heads, BLOCK_TOKENS * 4 * SHAPE.head_dim), np.uint8)
    for layer in layers:
        layer.attends(0, BLOCK_TOKENS, SHAPE.head_dim, small, small)
    del layers, layer
    gc.collect()
    assert graph.run(1, SHORT, **step()) == DONE
    assert kept.any()
    assert not small.any()


def test_a_cache_that_is_refused_is_not_used(toy):
    """A layer without a valid cache makes no graph."""
    parts = toy.parts[0]
    layer = toy.kernels.placed_layer(PlacedParts(parts, None, 0, 0, parts.routed.stack))
    wrong = np.zeros((BLOCKS, 3, BLOCK_TOKENS * 4 * SHAPE.head_dim), np.uint8)
    with pytest.raises(ValueError, match="heads"):
        layer.attends(0, BLOCK_TOKENS, SHAPE.head_dim, wrong, wrong)
    page, _ = toy.kernels.handoff([parts], ROWS, SHAPE.used, SHAPE.hidden)
    with pytest.raises(ValueError, match="attends or recurs"):
        toy.kernels.step_graph(page, [layer], 1e12)
    with pytest.raises(ValueError, match="no recurrent state"):
        layer.recurs(np.zeros((1, 1, 1), np.float32), np.zeros((1, 1, 1, 1), np.float32))


@pytest.mark.parametrize("number", [-1, 1024, 2**31, 2**63 - 1, -(2**63)])
def test_tables_and_places_below_zero_or_far_away_are_refused(toy, number):
    """They choose which of a step's arrays a layer reads."""
    parts = toy.parts[0]
    for rope, places in ((number, 0), (0, number)):
        with pytest.raises(ValueError, match="tables and places"):
            toy.kernels.placed_layer(PlacedParts(parts, None, rope, places, parts.routed.stack))


@pytest.mark.parametrize("bytes_per_s", [0.0, -1.0, 1e-300, float("nan"), float("-inf")])
def test_a_link_without_a_speed_is_refused(toy, bytes_per_s):
    """Neither a time that never ends nor one that is none."""
    page, _ = toy.kernels.handoff(toy.parts, ROWS, SHAPE.used, SHAPE.hidden)
    with pytest.raises(ValueError, match="byte per second"):
        toy.kernels.step_graph(page, layers_of(toy), bytes_per_s)


def test_layers_that_do_not_fit_the_page_are_refused(toy):
    """Another number of them, None, or other sizes."""
    layers = layers_of(toy)
    page, _ = toy.kernels.handoff(toy.parts, ROWS, SHAPE.used, SHAPE.hidden)
    for given_layers, what in ((layers[:1], "as many layers"), ([layers[0], None], "missing")):
        with pytest.raises(ValueError, match=what):
            toy.kernels.step_graph(page, given_layers, 1e12)
    wide = type(page)(SHAPE.layers, ROWS, SHAPE.used, SHAPE.hidden + 1)
    with pytest.raises(ValueError, match="sizes of the layers"):
        toy.kernels.step_graph(wide, layers, 1e12)


def test_layers_need_the_tables_that_they_name(toy):
    """A step with too few of them is refused."""
    parts = toy.parts[0]
    page, _ = toy.kernels.handoff([parts], ROWS, SHAPE.used, SHAPE.hidden)
    layer = toy.kernels.placed_layer(PlacedParts(parts, None, 2, 1, parts.routed.stack))
    layer.attends(0, BLOCK_TOKENS, SHAPE.head_dim, cache(), cache())
    graph = toy.kernels.step_graph(page, [layer], 1e12)
    given_step = step()
    given_step["residency"] = given_step["residency"][:1]
    for ropes, places, is_enough in ((2, 2, False), (3, 1, False), (3, 2, True)):
        given_step["ropes"] = step()["ropes"] * ropes
        given_step["places"] = step()["places"] * places
        if is_enough:
            assert graph.run(1, SHORT, **given_step) == DONE
            continue
        with pytest.raises(ValueError, match="tables and places"):
            graph.run(1, SHORT, **given_step)


def test_a_recurrent_layer_needs_runs(tmp_path):
    """Without them its output would be whatever lay in memory."""
    path = write_toy_arch(tmp_path / "toy.gguf", ToyArch("qwen35moe", layers=2, interval=2))
    with open_model_file(path) as file:
        kernels = NativeKernels("portable", threads=1)
        parts = open_model(file, kernels).non_expert.layers[0]
        shape = parts.mixer.rule.shape
        layer = kernels.placed_layer(PlacedParts(parts, None, 0, 0, parts.routed.stack))
        layer.recurs(
            np.zeros((2, shape.conv_width - 1, shape.channels), np.float32),
            np.zeros((2, shape.value_heads, shape.key_dim, shape.value_dim), np.float32),
        )
        hidden = len(parts.norm)
        page, _ = kernels.handoff([parts], ROWS, parts.routed.rule.chosen, hidden)
        graph = kernels.step_graph(page, [layer], 1e12)
        given_step = step()
        given_step["x"] = np.zeros((2, hidden), np.float32)
        given_step["residency"] = np.zeros((1, len(parts.routed.stack)), np.int32)
        with pytest.raises(ValueError, match="has runs"):
            graph.run(1, SHORT, **given_step)
        for state in (2, 2**31 - 1):
            given_step["runs"] = np.array([(0, 2, state, -1)], np.int32)
            with pytest.raises(ValueError, match="beyond the states"):
                graph.run(1, SHORT, **given_step)
        given_step["runs"] = np.array([(0, 2, 1, 0)], np.int32)
        assert graph.run(1, SHORT, **given_step) == DONE


def test_a_feed_forward_alone_remembers_nothing(tmp_path):
    """It takes neither cache nor states, and is computed without runs or places."""
    path = write_toy_arch(tmp_path / "toy.gguf", ToyArch("nemotron_h_moe", layers=4))
    with open_model_file(path) as file:
        kernels = NativeKernels("portable", threads=1)
        model = open_model(file, kernels)
        number = next(n for n, part in enumerate(model.non_expert.layers) if part.mixer is None)
        parts = model.non_expert.layers[number]
        layer = kernels.placed_layer(PlacedParts(parts, None, 0, 0, parts.routed.stack))
        with pytest.raises(ValueError, match="no attention"):
            layer.attends(0, BLOCK_TOKENS, SHAPE.head_dim, cache(), cache())
        with pytest.raises(ValueError, match="no recurrent state"):
            layer.recurs(np.zeros((1, 1, 1), np.float32), np.zeros((1, 1, 1, 1), np.float32))
        hidden = len(parts.norm)
        page, _ = kernels.handoff([parts], ROWS, parts.routed.rule.chosen, hidden)
        graph = kernels.step_graph(page, [layer], 1e12)
        given_step = step()
        given_step["x"] = np.random.default_rng(1).standard_normal((2, hidden)).astype(np.float32)
        given_step["residency"] = np.zeros((1, len(parts.routed.stack)), np.int32)
        assert graph.run(1, SHORT, **given_step) == DONE


def test_latent_rows_turn_all_that_lies_behind_their_value(tmp_path):
    """A table of fewer or more numbers is refused, and so is a row of another width."""
    path = write_toy_arch(tmp_path / "toy.gguf", ToyArch("deepseek2", **LATENT_OPTIONS["lite"]))
    with open_model_file(path) as file:
        kernels = NativeKernels("portable", threads=1)
        model = open_model(file, kernels)
        parts, width = model.non_expert.layers[1], model.spec.head_dim
        rows = np.zeros((BLOCKS, 1, BLOCK_TOKENS * 4 * width), np.uint8)
        none = np.zeros((BLOCKS, 1, 0), np.uint8)
        layer = kernels.placed_layer(PlacedParts(parts, None, 0, 0, parts.routed.stack))
        with pytest.raises(ValueError, match="number per row of kv"):
            layer.attends(0, BLOCK_TOKENS, width // 2, rows, none)
        layer.attends(0, BLOCK_TOKENS, width, rows, none)
        page, _ = kernels.handoff([parts], ROWS, parts.routed.rule.chosen, model.spec.hidden_size)
        graph = kernels.step_graph(page, [layer], 1e12)
        given_step = step()
        given_step["x"] = np.ones((2, model.spec.hidden_size), np.float32)
        given_step["residency"] = np.zeros((1, len(parts.routed.stack)), np.int32)
        for dims, is_right in ((6, False), (10, False), (8, True)):
            turn = np.ones((2 * BLOCK_TOKENS, dims // 2), np.float32)
            given_step["ropes"] = [(turn, 0 * turn, True)]
            if is_right:
                assert graph.run(1, SHORT, **given_step) == DONE
                assert rows.any()
                continue
            with pytest.raises(ValueError, match="behind the value"):
                graph.run(1, SHORT, **given_step)


NUMBERS = st.one_of(st.integers(-2, 130), st.sampled_from([2**31 - 1, -(2**31)]))


def changed(draw, array):
    """Return an array with another number somewhere, or of another shape."""
    if array.size and draw(st.booleans()):
        array = array.copy()
        array.flat[draw(st.integers(0, array.size - 1))] = draw(NUMBERS)
        return array
    shape = [max(0, size + draw(st.integers(-1, 1))) for size in array.shape]
    return np.resize(array, shape) if array.size else np.zeros(shape, array.dtype)


def change_one(draw, arguments):
    """Change one of a step's arguments."""
    name = draw(st.sampled_from(sorted(arguments)))
    value = arguments[name]
    if isinstance(value, list):
        group = list(value[0])
        index = draw(st.integers(0, len(group) - (2 if name == "ropes" else 1)))
        group[index] = changed(draw, group[index])
        arguments[name] = [tuple(group)]
    elif value is None:
        shape = draw(st.lists(st.integers(0, 3), min_size=3, max_size=3))
        arguments[name] = np.zeros(shape, np.float32)
    else:
        arguments[name] = changed(draw, value)


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_a_step_is_computed_or_refused(toy, used, data):
    """One number or one axis of any array is another: an error, or a step within its memory."""
    graph, arguments = used.graph, step()
    change_one(data.draw, arguments)
    used.epoch += 1
    try:
        end = graph.run(used.epoch, (1000, 1000), **arguments)
    except ValueError:
        return
    if end == LATE:  # an expert was not resident: the page is given up
        used.graph = new_graph(toy)
        return
    assert end == DONE


def whole_step(toy):
    """Return all layers as one job of the CPU, with caches of their own."""
    return toy.kernels._native.WholeStep(toy.kernels._core, layers_of(toy))


def whole_arguments(num_rows=2):
    """Return what it takes, and room for what it gives."""
    given_step = step(num_rows)
    del given_step["residency"]
    chosen = SHAPE.layers, num_rows, SHAPE.used
    return given_step | {
        "embedded": None,
        "out": np.full((num_rows, SHAPE.hidden), np.nan, np.float32),
        "ids": np.full(chosen, -1, np.int32),
        "weights": np.zeros(chosen, np.float32),
        "spans": np.zeros((SHAPE.layers, 2), np.int64),
    }


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_a_whole_step_is_computed_or_refused(toy, data):
    """One number or one axis of any array is another: an error, or a step within its memory that writes all of its output."""
    arguments = whole_arguments()
    change_one(data.draw, arguments)
    try:
        whole_step(toy).run(**arguments)
    except ValueError:
        return
    assert np.isfinite(arguments["out"]).all()
    assert ((arguments["ids"] >= 0) & (arguments["ids"] < SHAPE.experts)).all()
    assert (arguments["spans"] > 0).all()


def test_layers_that_are_no_model_are_refused(toy):
    """None at all, a missing one, and one without its cache."""
    make, core = toy.kernels._native.WholeStep, toy.kernels._core
    placed = toy.kernels.placed_layer(PlacedParts(toy.parts[0], None, 0, 0))
    for layers, what in (([], "has layers"), ([None], "missing"), ([placed], "attends or recurs")):
        with pytest.raises(ValueError, match=what):
            make(core, layers)


@settings(max_examples=50, deadline=None)
@given(shape=st.lists(st.integers(0, 80), min_size=1, max_size=3).map(tuple))
def test_outputs_must_fit(used, shape):
    """Rows of the page and the hidden size; a row of five numbers per node."""
    graph = used.graph.graph
    for read, kind, fits in (
        (graph.output, np.float32, 0 < shape[0] <= ROWS and shape[1:] == (SHAPE.hidden,)),
        (graph.spans, np.int64, shape == (graph.num_nodes, 5)),
    ):
        try:
            read(np.zeros(shape, kind))
        except (ValueError, TypeError):
            assert not fits
        else:
            assert fits

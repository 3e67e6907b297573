"""A whole layer as one native job: the bits of its parts, for any cache type and mix of sequences."""

from __future__ import annotations

import mmap
import os
import resource
from dataclasses import replace

import numpy as np
import pytest

from tests.support.arch_cases import ARCH_CASES, READERS_CASE, SCHEDULED_CASES
from tests.support.toy_archs import write_toy_arch
from tests.support.toy_model import ToyShape, write_toy_model
from thermocline.experts.catalog import ExpertCatalog
from thermocline.experts.dispatch.grouping import dispatch, owners_of
from thermocline.kernels.cache_format import CacheType
from thermocline.kernels.contract import ExpertWork
from thermocline.kernels.cpu import NativeKernels, load_native
from thermocline.kernels.dense import NativeDense
from thermocline.kernels.dense_contract import PostNorm
from thermocline.kernels.reference import ReferenceKernels
from thermocline.kernels.whole_layer import HandedOn
from thermocline.kv.cache import SequenceCache
from thermocline.kv.pool import KVPool
from thermocline.kv.recurrent import StatePool
from thermocline.messages import (
    BackendRole,
    Chunk,
    ChunkId,
    LayerIndex,
    RequestId,
    Segment,
    SegmentKind,
    StateUse,
)
from thermocline.modelfile.reader import open_model_file
from thermocline.models.registry import open_model
from thermocline.prefetch.advice import PageAdvisor

BLOCK = 16
QUANTISED = {"attn": "Q4_K", "gate_up": "Q4_K", "down": "Q6_K", "embed": "Q8_0"}


def shape_of(formats):
    """Return a toy wide enough for blocks of 256."""
    return ToyShape(hidden=256, heads=8, head_dim=32, intermediate=256, formats=formats, used=3)


def chunk_of(lengths, starts, kind):
    """Return a chunk with one segment per length, each from its own position on, blocks out of order."""
    segments, positions, slots, row = [], [], [], 0
    for number, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        table = np.array([3 * block + number for block in range(4)][::-1], np.int32)
        at = np.arange(start, start + length, dtype=np.int32)
        segments.append(Segment(RequestId(number), row, length, kind, table, 0, StateUse(number)))
        positions.append(at)
        slots.append(table[at // BLOCK] * BLOCK + at % BLOCK)
        row += length
    all_positions = np.concatenate(positions)
    return Chunk(
        ChunkId(0),
        tuple(segments),
        np.zeros(row, np.int32),
        all_positions,
        np.concatenate(slots).astype(np.int32),
        np.array([row - 1], np.int32),
    )


def cache_of(spec, cache_type):
    """Return the keys, values and states of a model for 12 blocks and four sequences."""
    kv = KVPool(
        spec.kv_shapes,
        12,
        BLOCK,
        cache_type,
        own_blocks=dict.fromkeys(spec.keyless_layers, 0),
        sources=spec.kv_sources,
    )
    states = StatePool(4, spec.main_states, spec.further_states) if spec.has_states else None
    for number, left in enumerate(() if states is None else states.all_layers):
        draw = np.random.default_rng(number)
        # A window is rows of the cache's type, of which few bits are numbers.
        for array in (left.recurrent,) if spec.entries else (left.conv, left.recurrent):
            array[...] = draw.standard_normal(array.shape)
    return SequenceCache(kv, states)


def arrays_of(cache, layer):
    """Return what a layer has left behind."""
    states = cache.states
    of_states = () if states is None else (states._layers.get(layer), states._further.get(layer))
    left = [array for each in of_states if each for array in (each.conv, each.recurrent)]
    if layer in cache.kv._layers:  # else a state, or a feed-forward alone
        left += cache.kv.layer(layer).arrays
    return left


def by_parts(kernels, model, catalog, layer, chunk, x, cache):
    """Return what attend, route and the experts give one after another, and the stream that the experts are added to."""
    residual = model.attend(layer, chunk, x, cache)
    routed = model.route(layer, chunk, residual)
    residual, normed, routing, ending = routed
    stream = residual if ending is None else ending.stream
    no_hot = np.zeros(model.spec.router.num_experts, np.bool_)
    shares = dispatch(routing, owners_of(no_hot))
    if not shares:
        return residual, routing, None
    share = shares[BackendRole.COLD]
    pair_of = np.empty(routing.expert_ids.shape, np.int32)
    pair_of[share.rows, share.slots] = np.arange(len(share.rows), dtype=np.int32)
    work = ExpertWork(
        catalog.stack(layer), share.experts, share.counts, normed, share.rows, share.weights
    )
    out = kernels.expert_sum(work, pair_of, residual, prompt=chunk.is_prompt)
    return out if ending is None else ending.finish(out), routing, stream


@pytest.mark.parametrize("cache_type", list(CacheType))
@pytest.mark.parametrize("formats", [{}, QUANTISED], ids=["f32", "quantised"])
@pytest.mark.parametrize(
    ("lengths", "starts"), [([1], [0]), ([1], [37]), ([1, 1, 1], [5, 0, 33]), ([3, 1], [14, 20])]
)
def test_a_whole_layer_has_the_bits_of_its_parts(tmp_path, cache_type, formats, lengths, starts):
    """Output, routing and the cache are equal, for one token and for several sequences."""
    path = write_toy_model(tmp_path / "toy.gguf", shape_of(formats))
    check_layers(path, [chunk_of(lengths, starts, SegmentKind.DECODE)], cache_type)


def check_layers(path, chunks, cache_type, isa="auto"):
    """Compare every layer of a model in one job with its parts one after another, for each chunk."""
    with open_model_file(path) as file:
        kernels = NativeKernels(isa, threads=2)
        model = open_model(file, kernels)
        catalog = ExpertCatalog(model.expert_layers)
        for chunk in chunks:
            check_chunk(kernels, model, catalog, chunk, cache_type)


def check_chunk(kernels, model, catalog, chunk, cache_type):
    """Compare every layer, for one chunk and an empty cache; also where somebody is told its choice on the way."""
    spec = model.spec
    caches = [cache_of(spec, cache_type) for _ in range(3)]
    told = []

    def note(ids, stream):
        told.append((ids.copy(), stream))

    x = np.random.default_rng(3).standard_normal((chunk.num_tokens, spec.stream_size))
    ours = theirs = x.astype(np.float32)
    own = model.embed_layers(chunk.token_ids, ours, prompt=chunk.is_prompt)
    chunk = replace(chunk, embedded=own)
    for layer in map(LayerIndex, range(spec.num_layers)):
        telling, _ = model.layer(layer, chunk, ours, caches[2], note)
        theirs, expected, stream = by_parts(
            kernels, model, catalog, layer, chunk, theirs, caches[0]
        )
        ours, found = model.layer(layer, chunk, ours, caches[1])
        assert np.array_equal(telling, ours)
        assert len(told) == (stream is not None)
        for ids, told_stream in told:
            assert np.array_equal(ids, expected.expert_ids)
            assert np.array_equal(told_stream, stream)
        told.clear()
        assert np.array_equal(found.expert_ids, expected.expert_ids)
        assert np.array_equal(found.weights, expected.weights)
        assert np.array_equal(ours, theirs)
        left = [arrays_of(cache, layer) for cache in caches]
        for theirs_left, ours_left, telling_left in zip(*left, strict=True):
            assert np.array_equal(ours_left, theirs_left)
            assert np.array_equal(telling_left, theirs_left)
    assert np.isfinite(ours).all()
    if not chunk.is_prompt and model.has_whole_steps:
        check_step(
            model, replace(chunk, embedded=own), x.astype(np.float32), cache_type, caches[0], ours
        )


def check_step(model, chunk, x, cache_type, expected_cache, expected):
    """Compare all layers in one job with what one after another gave: output, choices, and what they left behind."""
    cache, other = (cache_of(model.spec, cache_type) for _ in range(2))
    step = model.step(chunk, x, cache)
    assert np.array_equal(step.x, expected)
    routed = [n for n, layer in enumerate(model.expert_layers) if layer is not None]
    assert len(step.expert_ids) == len(step.weights) == len(routed)
    for layer in map(LayerIndex, range(model.spec.num_layers)):
        x, found = model.layer(layer, chunk, x, other)
        if layer in routed:
            assert np.array_equal(step.expert_ids[routed.index(layer)], found.expert_ids)
            assert np.array_equal(step.weights[routed.index(layer)], found.weights)
        for ours, theirs in zip(
            arrays_of(cache, layer), arrays_of(expected_cache, layer), strict=True
        ):
            assert np.array_equal(ours, theirs)
    assert (step.spans[:, 0] <= step.spans[:, 1]).all()
    assert (step.spans[1:, 0] >= step.spans[:-1, 1]).all()


@pytest.mark.parametrize("case", [*SCHEDULED_CASES, *ARCH_CASES], ids=str)
def test_every_architecture_has_whole_layers(tmp_path, case):
    """Biases, gates, windows, dense layers and shared experts: the bits of the parts."""
    path = write_toy_arch(tmp_path / "toy.gguf", case.toy)
    given = [([1], [37]), ([3, 1], [14, 20])]
    chunks = [chunk_of(lengths, starts, SegmentKind.DECODE) for lengths, starts in given]
    expanded = [each._replace(num_expanded=each.length) for each in chunks[1].segments]
    chunks.append(replace(chunks[1], segments=tuple(expanded)))
    check_layers(path, chunks, CacheType.F16)


@pytest.mark.parametrize("isa", ["auto", *load_native().emulated_sets()])
@pytest.mark.parametrize("case", [*SCHEDULED_CASES, READERS_CASE], ids=str)
def test_prompts_walk_through_whole_layers_too(tmp_path, monkeypatch, case, isa):
    """In the arithmetic of prompts, attention's too, with snapshots of recurrent state: the bits of the parts."""
    forms = []

    def noting(real):
        def attend(*args, prompt=False):
            forms.append(prompt)
            return real(*args, prompt=prompt)

        return attend

    for name in ("attention", "expanded_attention"):
        monkeypatch.setattr(NativeDense, name, noting(getattr(NativeDense, name)))
    path = write_toy_arch(tmp_path / "toy.gguf", case.toy)
    chunk = chunk_of([21, 9], [0, 16], SegmentKind.PROMPT)
    states = (StateUse(0, None, ((8, 3), (21, 2))), StateUse(1, 3, ((4, 2),)))
    # Both forms of latent attention in a chunk, and in one sequence's part of it.
    segments = [
        segment._replace(state=use, num_expanded=count)
        for segment, use, count in zip(chunk.segments, states, (16, 9), strict=True)
    ]
    check_layers(path, [replace(chunk, segments=tuple(segments))], CacheType.F16, isa)
    assert forms
    assert all(forms)


def test_numbers_that_are_none_choose_experts_in_range(tmp_path):
    """NaN in the residual stream ends in NaN, not in a write beyond an array."""
    with open_model_file(write_toy_model(tmp_path / "toy.gguf", shape_of({}))) as file:
        model = open_model(file, NativeKernels(threads=1))
        spec = model.spec
        cache = cache_of(spec, CacheType.F32)
        x = np.full((1, spec.hidden_size), np.nan, np.float32)
        out, routing = model.layer(LayerIndex(0), chunk_of([1], [0], SegmentKind.DECODE), x, cache)
    assert np.isnan(out).all()
    assert ((routing.expert_ids >= 0) & (routing.expert_ids < spec.router.num_experts)).all()


def test_an_error_of_who_is_told_the_choice_ends_the_layer_and_nothing_else(tmp_path):
    """It arrives as it was raised, and the kernels compute on."""

    def fail(ids, stream):
        raise LookupError("not today")

    with open_model_file(write_toy_model(tmp_path / "toy.gguf", shape_of({}))) as file:
        model = open_model(file, NativeKernels(threads=2))
        cache, chunk = cache_of(model.spec, CacheType.F32), chunk_of([1], [0], SegmentKind.DECODE)
        x = np.ones((1, model.spec.hidden_size), np.float32)
        expected, _ = model.layer(LayerIndex(0), chunk, x, cache)
        for _ in range(2):
            with pytest.raises(LookupError, match="not today"):
                model.layer(LayerIndex(0), chunk, x, cache, fail)
        out, _ = model.layer(LayerIndex(0), chunk, x, cache)
        assert np.array_equal(out, expected)


def test_missing_experts_are_asked_for_in_pieces_where_the_choice_is_told(tmp_path):
    """A layer waits less than a third as often as one whose missing pages come alone."""
    toy = ToyShape(hidden=256, heads=8, head_dim=32, intermediate=512, experts=4, used=4)
    path = write_toy_model(tmp_path / "toy.gguf", toy)
    with path.open("rb") as written:
        os.fsync(written.fileno())  # the kernel keeps pages that are not yet stored
    with open_model_file(path) as file:
        model, advisor = open_model(file, NativeKernels(threads=2)), PageAdvisor(file)
        layer, chunk = LayerIndex(0), chunk_of([1], [0], SegmentKind.DECODE)
        cache, x = cache_of(model.spec, CacheType.F32), np.ones((1, 256), np.float32)
        spans = ExpertCatalog(model.expert_layers).layer_spans(layer)
        advisor.stop_read_ahead(spans)

        def waits(on_routed):
            model.layer(layer, chunk, x, cache)
            for span in spans:
                advisor.release(span)
            first = np.array([span.start + mmap.PAGESIZE for span in spans], np.int64)
            if load_native().resident_pages(file.mapping(0), first) > 0:
                pytest.skip("this file system keeps everything in memory")
            before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
            model.layer(layer, chunk, x, cache, on_routed)
            return resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before

        alone = waits(None)
        assert alone > 100
        assert waits(lambda *_: None) < alone / 3


def test_a_weight_of_the_input_is_for_one_expert(tmp_path):
    """With several of a token, each would need an input of its own: the core refuses such a layer."""
    with open_model_file(write_toy_model(tmp_path / "toy.gguf", shape_of({}))) as file:
        kernels = NativeKernels(threads=1)
        parts = open_model(file, kernels).non_expert.layers[0]
        wrong = replace(parts, routed=replace(parts.routed, weighs_input=True))
        with pytest.raises(ValueError, match="one expert of each token"):
            kernels._layer(wrong)


@pytest.mark.parametrize("handed_on", [HandedOn.NORMED, HandedOn.INPUT])
def test_a_layer_whose_attention_hands_on_more_has_one_norm(tmp_path, handed_on):
    """What has an end, or norms of its own, can not take it: the core refuses such a layer."""
    with open_model_file(write_toy_model(tmp_path / "toy.gguf", shape_of({}))) as file:
        kernels = NativeKernels(threads=1)
        parts = open_model(file, kernels).non_expert.layers[0]
        end = PostNorm(parts.norm, 1e-6)
        assert kernels._layer(replace(parts, handed_on=handed_on))
        with pytest.raises(ValueError, match="there is one norm"):
            kernels._layer(replace(parts, handed_on=handed_on, end=end))
        posted = replace(parts.mixer, post_norm=end)
        with pytest.raises(ValueError, match="there is one norm"):
            kernels._layer(replace(parts, handed_on=handed_on, mixer=posted))
        with pytest.raises(ValueError, match="is for a feed-forward"):
            kernels._layer(replace(parts, handed_on=handed_on, mixer=None))


def test_the_reference_has_none(tmp_path):
    """Without a whole layer the parts are the way, and the model says so."""
    with open_model_file(write_toy_model(tmp_path / "toy.gguf", ToyShape())) as file:
        reference, native = (
            open_model(file, ReferenceKernels()),
            open_model(file, NativeKernels(threads=1)),
        )
    assert (reference.has_whole_layers, reference.has_whole_steps) == (False, False)
    assert (native.has_whole_layers, native.has_whole_steps) == (True, True)

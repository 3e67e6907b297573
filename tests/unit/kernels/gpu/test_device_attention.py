"""Attention over a device's block cache, by every implementation, against the NumPy reference on the CPU's cache."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.compare import assert_within
from thermocline.kernels.cache_format import (
    CacheShape,
    CacheType,
    read_cache,
    write_cache,
    write_latent,
)
from thermocline.kernels.dense_contract import Attending, LayerCache, Temperature
from thermocline.kernels.dense_reference import ReferenceDense
from thermocline.kernels.gpu import attention as attention_module
from thermocline.kernels.gpu.cache import DeviceKVPool
from thermocline.kernels.gpu.step import StepShape, cut_inputs
from thermocline.kernels.gpu.streams import DeviceStreams
from thermocline.messages import Chunk, ChunkId, RequestId, Segment, SegmentKind
from thermocline.models.device.cache_places import BlockStrides
from thermocline.models.device.steps import StepRules, plan_step

TYPES = list(CacheType)
KV_HEADS, HEAD_DIM, NUM_BLOCKS = 2, 32, 96
WIDE = (CacheType.F32, CacheType.BF16)
TOLERANCE = {CacheType.F32: "non-expert/float32", CacheType.BF16: "non-expert/attention bfloat16"}


@pytest.fixture
def streams(kernels):
    """The device of the implementation."""
    with DeviceStreams(kernels.device) as opened, opened.computing():
        yield opened


def normal(rng, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


class Caches:
    """The same keys and values on the device and, as the twin has them, on the CPU."""

    def __init__(
        self,
        streams: DeviceStreams,
        cache_type: CacheType,
        block_tokens: int,
        kv_heads: int = KV_HEADS,
        head_dim: int = HEAD_DIM,
        latent: int = 0,
        value_dim: int = 0,
    ) -> None:
        sizes = kv_heads, head_dim, latent, value_dim
        self.shape = CacheShape(cache_type, NUM_BLOCKS, block_tokens, *sizes)
        shapes = self.shape.array_shape, self.shape.value_shape
        self.host = LayerCache(self.shape, *(np.zeros(each, np.uint8) for each in shapes))
        # One of two layers, whose blocks alternate.
        pool = DeviceKVPool(streams, self.shape, (3, 7))
        self.strides = BlockStrides(block_tokens, pool.stride, pool.stride)
        self.device = pool.layers[7]
        self._streams = streams

    def append(self, slots: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        """Store keys and values; of a latent cache the keys, which have one head."""
        upload = self._streams.upload
        blocks, rows = np.divmod(slots.astype(np.int64), self.strides.block_tokens)
        there = blocks * self.strides.full * self.strides.block_tokens + rows
        if self.shape.latent:
            write_latent(self.shape, self.host.keys, slots, k[:, 0])
            self.device.append_rows(upload(there), upload(k[:, 0]))
            return
        write_cache(self.shape, self.host.keys, self.host.values, slots, k, v)
        self.device.append(upload(there), upload(k), upload(v))


def chunk_of(spans, kind: SegmentKind, block_tokens: int) -> Chunk:
    """Return a chunk of (first position, length) per sequence, whose blocks lie scattered."""
    free = np.random.default_rng(1).permutation(NUM_BLOCKS).astype(np.int32)
    segments, positions, slots, row, taken = [], [], [], 0, 0
    for number, (start, length) in enumerate(spans):
        size = (start + length - 1) // block_tokens + 1
        table, taken = free[taken : taken + size], taken + size
        assert len(table) == size, "the test's cache is too small"
        at = np.arange(start, start + length, dtype=np.int32)
        segments.append(Segment(RequestId(number), row, length, kind, table))
        positions.append(at)
        slots.append(table[at // block_tokens] * block_tokens + at % block_tokens)
        row += length
    return Chunk(
        ChunkId(1),
        tuple(segments),
        np.zeros(row, np.int32),
        np.concatenate(positions),
        np.concatenate(slots),
        np.zeros(0, np.int32),
    )


def fill(rng, caches: Caches, chunk: Chunk) -> None:
    """Store every position of the chunk's sequences."""
    block_tokens = caches.shape.block_tokens
    for segment in chunk.segments:
        at = np.arange(chunk.positions[segment.start + segment.length - 1] + 1)
        slots = segment.block_table[at // block_tokens] * block_tokens + at % block_tokens
        dims = caches.shape.head_dim, caches.shape.value_dim
        k, v = (normal(rng, len(at), caches.shape.kv_heads, dim) for dim in dims)
        caches.append(slots.astype(np.int32), k, v)


def compare(kernels, streams, caches, chunk, rule, tolerance, heads: int = 4) -> np.ndarray:
    """Return the rows of every span, after they are compared with the reference."""
    shape = caches.shape
    q = normal(np.random.default_rng(5), chunk.num_tokens, heads, shape.head_dim)
    rules = StepRules((rule.window,), shape.block_tokens, NUM_BLOCKS, False)
    plan = plan_step(caches.strides.chunk(chunk), rules)
    numbers = np.full(plan.shape.num_numbers, -1)
    numbers[: len(plan.numbers)] = plan.numbers
    inputs = cut_inputs(plan.shape, streams.upload(numbers))
    found = np.concatenate(
        [
            kernels.attention(q[span.shape.rows], span, caches.device, rule)
            for span in inputs.attention[rule.window].spans
        ]
    )
    expected = ReferenceDense().attention(q, chunk.positions, chunk.segments, caches.host, rule)
    assert_within(found, expected, tolerance)
    return found


SPANS = {
    "answers": (
        SegmentKind.DECODE,
        [(37, 1), (0, 1), (200, 1), (15, 1), (16, 1), (63, 1), (64, 1)],
    ),
    "prompt": (SegmentKind.PROMPT, [(0, 40)]),
    "later chunks": (SegmentKind.PROMPT, [(90, 17), (0, 1), (33, 30)]),
}


# Every type of cache, and with each size of blocks one of numbers and one of blocks.
@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize(
    ("cache_type", "window", "block_tokens"),
    [
        (CacheType.F32, 0, 16),
        (CacheType.Q8_0, 0, 16),
        (CacheType.F16, 0, 16),
        (CacheType.BF16, 23, 5),
        (CacheType.F32, 23, 5),
        (CacheType.Q8_0, 23, 5),
    ],
)
def test_attention_is_the_references(kernels, streams, cache_type, spans, window, block_tokens):
    """Prompts and steps, several sequences, scattered blocks, borders of blocks, windows, every type of cache."""
    caches = Caches(streams, cache_type, block_tokens)
    kind, sequences = SPANS[spans]
    chunk = chunk_of(sequences, kind, block_tokens)
    fill(np.random.default_rng(2), caches, chunk)
    tolerance = TOLERANCE.get(cache_type, "non-expert/attention float16")
    compare(kernels, streams, caches, chunk, Attending(0.2, window=window), tolerance)


@pytest.mark.parametrize(
    ("head_dim", "heads"), [(10, 1), (64, 6), (80, 20), (128, 20), (160, 6), (256, 1), (512, 8)]
)
@pytest.mark.parametrize("spans", [[(69, 1), (2, 1)], [(60, 9)]])
def test_heads_of_any_size_and_number(kernels, streams, head_dim, heads, spans):
    """No powers of two among them; one key head, or as many as query heads, or groups wider than a tile."""
    kv_heads = {1: 1, 6: 6, 20: 1, 8: 2}[heads]
    caches = Caches(streams, CacheType.F16, 16, kv_heads, head_dim)
    chunk = chunk_of(spans, SegmentKind.PROMPT if len(spans) == 1 else SegmentKind.DECODE, 16)
    fill(np.random.default_rng(2), caches, chunk)
    tolerance = "non-expert/attention float16"
    compare(kernels, streams, caches, chunk, Attending(head_dim**-0.5), tolerance, heads)


@pytest.mark.parametrize(
    ("cache_type", "head_dim", "value_dim"),
    [
        (CacheType.F16, 192, 128),
        (CacheType.Q8_0, 96, 64),
        (CacheType.F32, 10, 7),
        (CacheType.BF16, 16, 24),
    ],
)
@pytest.mark.parametrize("spans", [[(69, 1), (2, 1)], [(60, 9)]])
def test_values_may_have_another_size_than_keys(
    kernels, streams, cache_type, head_dim, value_dim, spans
):
    """Narrower and wider; of two layers, whose keys are one run of memory and whose values another."""
    caches = Caches(streams, cache_type, 16, KV_HEADS, head_dim, 0, value_dim)
    assert caches.strides.full == 2
    chunk = chunk_of(spans, SegmentKind.PROMPT if len(spans) == 1 else SegmentKind.DECODE, 16)
    fill(np.random.default_rng(2), caches, chunk)
    tolerance = TOLERANCE.get(cache_type, "non-expert/attention float16")
    rule = Attending(head_dim**-0.5, window=23)
    found = compare(kernels, streams, caches, chunk, rule, tolerance)
    assert found.shape[-1] == value_dim


LATENT = [
    *((kind, 48, 16, 3) for kind in TYPES),
    (CacheType.F32, 21, 6, 38),
    (CacheType.F16, 512, 64, 20),
    (CacheType.Q8_0, 70, 26, 1),
]


@pytest.mark.parametrize(("cache_type", "latent", "turned", "heads"), LATENT)
@pytest.mark.parametrize("spans", [[(69, 1), (2, 1)], [(60, 9)]])
def test_latent_rows_are_keys_and_values(
    kernels, streams, cache_type, latent, turned, heads, spans
):
    """The first numbers of a row are the value: as in GLM-4.7-Flash, odd sizes, and more heads than a tile has rows."""
    caches = Caches(streams, cache_type, 16, 1, latent + turned, latent)
    chunk = chunk_of(spans, SegmentKind.PROMPT if len(spans) == 1 else SegmentKind.DECODE, 16)
    fill(np.random.default_rng(2), caches, chunk)
    tolerance = TOLERANCE.get(cache_type, "non-expert/attention float16")
    rule = Attending((latent + turned) ** -0.5)
    compare(kernels, streams, caches, chunk, rule, tolerance, heads)


@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize("window", [0, 23])
def test_sinks_take_their_share_once(kernels, streams, spans, window):
    """Of prompts and of steps in splits: weak sinks, and one that takes nearly all."""
    caches = Caches(streams, CacheType.F32, 16)
    kind, sequences = SPANS[spans]
    chunk = chunk_of(sequences, kind, 16)
    fill(np.random.default_rng(2), caches, chunk)
    sinks = np.array([-3.0, 0.5, 2.0, 9.0], np.float32)
    rule = Attending(0.2, window=window, sinks=sinks)
    compare(kernels, streams, caches, chunk, rule, "non-expert/float32")


@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize("cache_type", [CacheType.F32, CacheType.Q8_0])
def test_windows_that_do_not_slide(kernels, streams, cache_type, spans):
    """Prompts and steps at both sides of a chunk's border, and scores that grow with the position."""
    caches = Caches(streams, cache_type, 5)
    kind, sequences = SPANS[spans]
    chunk = chunk_of(sequences, kind, 5)
    fill(np.random.default_rng(2), caches, chunk)
    heat = Temperature(0.7, 9, 1)
    rule = Attending(0.2, window=16, chunked=True, temperature=heat)
    tolerance = TOLERANCE.get(cache_type, "non-expert/attention float16")
    compare(kernels, streams, caches, chunk, rule, tolerance)


@pytest.mark.parametrize(("poison", "window"), [(np.nan, 0), (np.nan, 9), (np.inf, 9)])
@pytest.mark.parametrize("spans", [[(66, 1), (3, 1)], [(66, 5)]])
def test_what_a_token_may_not_see_does_not_reach_it(kernels, streams, poison, window, spans):
    """Blocks behind a sequence, of others and before a window may hold anything; tables behind it, too."""
    caches = Caches(streams, CacheType.F32, 16)
    everything = np.arange(NUM_BLOCKS * 16, dtype=np.int32)
    bad = np.full((len(everything), KV_HEADS, HEAD_DIM), poison, np.float32)
    caches.append(everything, bad, bad)
    chunk = chunk_of(spans, SegmentKind.PROMPT if len(spans) == 1 else SegmentKind.DECODE, 16)
    rng = np.random.default_rng(4)
    for segment in chunk.segments:
        first = int(chunk.positions[segment.start])
        low = max(0, first - window + 1) if window else 0
        at = np.arange(low, first + segment.length)
        slots = (segment.block_table[at // 16] * 16 + at % 16).astype(np.int32)
        shape = (len(at), KV_HEADS, HEAD_DIM)
        caches.append(slots, normal(rng, *shape), normal(rng, *shape))
    rule = Attending(0.2, window=window)
    compare(kernels, streams, caches, chunk, rule, "non-expert/float32")


@pytest.mark.parametrize("num_splits", [1, 2, 8])
def test_the_number_of_splits_changes_no_more_than_the_order_of_sums(
    kernels, streams, monkeypatch, num_splits
):
    """Fewer splits than tiles, more of them, and one; contexts that end at a split's border."""
    monkeypatch.setattr(attention_module, "NUM_SPLITS", num_splits)
    caches = Caches(streams, CacheType.F32, 16)
    chunk = chunk_of([(255, 1), (256, 1), (127, 1), (5, 1)], SegmentKind.DECODE, 16)
    fill(np.random.default_rng(2), caches, chunk)
    compare(kernels, streams, caches, chunk, Attending(0.2), "non-expert/float32")


def test_a_row_is_the_same_beside_others(kernels, streams):
    """Bit for bit: neither longer contexts in the batch nor a wider batch change how its sums are added."""
    caches = Caches(streams, CacheType.F16, 16)
    sequences = [(200, 1), (70, 1), (9, 1)]
    chunk = chunk_of(sequences, SegmentKind.DECODE, 16)
    fill(np.random.default_rng(2), caches, chunk)
    q = normal(np.random.default_rng(5), 3, 4, HEAD_DIM)
    rule = Attending(0.2)

    def spans_of(some: Chunk):
        plan = plan_step(some, StepRules((0,), 16, NUM_BLOCKS, False))
        numbers = np.full(plan.shape.num_numbers, -1)
        numbers[: len(plan.numbers)] = plan.numbers
        return cut_inputs(plan.shape, streams.upload(numbers)).attention[0].spans[0]

    together = kernels.attention(q, spans_of(chunk), caches.device, rule)
    for row, segment in enumerate(chunk.segments):
        alone = replace(
            chunk,
            segments=(segment._replace(start=0),),
            positions=chunk.positions[row : row + 1],
            kv_slots=chunk.kv_slots[row : row + 1],
            token_ids=chunk.token_ids[row : row + 1],
        )
        found = kernels.attention(q[row : row + 1], spans_of(alone), caches.device, rule)
        if kernels.name == "twin":  # torch orders a product's sums by its shape
            assert_within(found[0], together[row], "non-expert/attention float16")
        else:
            np.testing.assert_array_equal(found[0], together[row])


@pytest.mark.parametrize("window", [0, 9])
def test_a_row_without_a_context_is_zeros(kernels, streams, window):
    """A length of 0 gives no NaN, beside rows that see something."""
    caches = Caches(streams, CacheType.F32, 16)
    chunk = chunk_of([(20, 1), (3, 1)], SegmentKind.DECODE, 16)
    fill(np.random.default_rng(2), caches, chunk)
    rule = Attending(0.2, window=window)
    plan = plan_step(chunk, StepRules((window,), 16, NUM_BLOCKS, False))
    numbers = np.zeros(plan.shape.num_numbers, np.int64)
    numbers[: len(plan.numbers)] = plan.numbers
    q = normal(np.random.default_rng(5), 2, 4, HEAD_DIM)
    inputs = cut_inputs(plan.shape, streams.upload(numbers))
    whole = kernels.attention(q, inputs.attention[window].spans[0], caches.device, rule)
    inputs.positions[1] = -1
    found = kernels.attention(q, inputs.attention[window].spans[0], caches.device, rule)
    np.testing.assert_array_equal(found[0], whole[0])
    assert not found[1].any()


def test_prompts_taken_in_pieces_change_nothing(streams, kernels, monkeypatch):
    """The twin bounds its scores: a long chunk is computed some rows at a time."""
    caches = Caches(streams, CacheType.F32, 16)
    chunk = chunk_of([(30, 37)], SegmentKind.PROMPT, 16)
    fill(np.random.default_rng(2), caches, chunk)
    rule = Attending(0.2)
    monkeypatch.setattr(attention_module, "_MAX_SCORES", 4 * 256 * 5)
    compare(kernels, streams, caches, chunk, rule, "non-expert/float32")


class Largest(TorchDispatchMode):
    """Keeps the most numbers of an array that is made, views of the cache apart."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        known = {each.untyped_storage()._cdata for each in args if isinstance(each, torch.Tensor)}
        if isinstance(found, torch.Tensor) and found.untyped_storage()._cdata not in known:
            self.numel = max(self.numel, found.numel())
        return found


@pytest.mark.parametrize("kernels", ["twin"], indirect=True)
@pytest.mark.parametrize("length", [1, 4])
def test_the_twins_memory_does_not_grow_with_the_context(kernels, streams, monkeypatch, length):
    """It holds a piece of the context at a time, neither all of it nor a mask over it."""
    monkeypatch.setattr(attention_module, "_PIECE_POSITIONS", 32)
    monkeypatch.setattr(attention_module, "_LONG_PIECE", 32)
    caches, largest = Caches(streams, CacheType.F32, 16), []
    kind = SegmentKind.PROMPT if length > 1 else SegmentKind.DECODE
    for start in (100, 1500):
        chunk = chunk_of([(start, length)], kind, 16)
        fill(np.random.default_rng(2), caches, chunk)
        with Largest() as seen:
            compare(kernels, streams, caches, chunk, Attending(0.2), "non-expert/float32")
        largest.append(seen.numel)
    assert largest[0] == largest[1] > 0


@pytest.mark.parametrize("cache_type", TYPES)
def test_extreme_numbers_are_stored_as_on_the_cpu(streams, cache_type):
    """Tiny, huge and zero rows come back as the CPU's cache gives them back."""
    caches = Caches(streams, cache_type, 16)
    rng = np.random.default_rng(3)
    scales = np.float32([1e-30, 3e-3, 1e-5, 1.0, 3e4, 1e5, 1e8, 0])
    x = normal(rng, 8, KV_HEADS, HEAD_DIM) * scales[:, None, None]
    slots = np.arange(8, dtype=np.int32)
    with np.errstate(over="ignore"):
        caches.append(slots, x, x)
    host = read_cache(caches.shape, caches.host.keys, caches.host.values, slots)
    there = caches.device.read(streams.upload(slots)[None])
    for part, expected in zip(there, host, strict=True):
        found = part[0].transpose(0, 1).cpu().numpy()
        # What is attended to in halves saturates.
        wanted = expected if cache_type in WIDE else np.clip(expected, -65504, 65504)
        rtol = 1e-3 if cache_type is CacheType.Q8_0 else 0
        np.testing.assert_allclose(found, wanted, rtol=rtol)


def test_the_array_of_a_step_is_cut_without_rest():
    """Every number has one place; the views follow each other."""
    chunk = chunk_of([(90, 17), (0, 1), (33, 30)], SegmentKind.PROMPT, 16)
    plan = plan_step(chunk, StepRules((0, 7), 16, NUM_BLOCKS, False))
    assert isinstance(plan.shape, StepShape)
    assert len(plan.numbers) == plan.shape.num_numbers
    inputs = cut_inputs(plan.shape, torch.from_numpy(plan.numbers))
    np.testing.assert_array_equal(inputs.positions, chunk.positions)
    for window in (0, 7):
        np.testing.assert_array_equal(inputs.attention[window].slots, chunk.kv_slots)
    last = inputs.attention[0].spans[2]
    assert last.first.tolist() == [0]
    np.testing.assert_array_equal(last.tables[0], chunk.segments[2].block_table)
    trimmed = inputs.attention[7].spans[0]
    assert trimmed.first.tolist() == [80]  # position 84 is the first that row 0 sees
    np.testing.assert_array_equal(trimmed.tables[0], chunk.segments[0].block_table[5:])
    assert inputs.num_live.tolist() == [48]

"""Ranks of a replica divide a chunk's rows: each row is one rank's, and everything of it goes along."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest

from tests.support.arch_cases import ARCH_CASES
from tests.support.chunks import make_chunk, make_decode
from tests.support.toy_archs import write_toy_arch
from thermocline.kernels.cache_format import CacheType
from thermocline.messages import CachePlaces, Chunk, ChunkId, RequestId, Segment, SegmentKind
from thermocline.modelfile.reader import open_model_file
from thermocline.models.registry import read_spec
from thermocline.parallel.parts import (
    MIN_DIVIDED_TOKENS,
    Mixing,
    bounds_of,
    is_divided,
    mixed_row_bytes,
    mixing_of,
    part_of,
)


def long_chunk() -> Chunk:
    """Return prompt tokens of three requests, of which everything is wanted."""
    segments, window, positions = [], [], []
    start = 0
    for number, (length, first, expanded) in enumerate(((40, 7, 25), (3, 0, 0), (30, 90, 30))):
        table = np.array([number, number + 9], np.int32)
        segment = Segment(RequestId(number), start, length, SegmentKind.PROMPT, table, 1)
        segments.append(segment._replace(num_expanded=expanded, num_states=2))
        window.append(segment._replace(block_table=table + 100, num_expanded=expanded))
        positions += range(first, first + length)
        start += length
    rng = np.random.default_rng(2)
    slots = rng.permutation(500).astype(np.int32)
    return Chunk(
        ChunkId(3),
        tuple(segments),
        token_ids=np.arange(73, dtype=np.int32) + 1000,
        positions=np.array(positions, np.int32),
        kv_slots=slots[:73],
        logits_rows=np.array([39, 42, 72], np.int32),
        window_places=CachePlaces(slots[100:173], tuple(window)),
        states_rows=np.array([38, 39, 41, 42, 71, 72], np.int32),
    )


def about_rows(chunk: Chunk, places: CachePlaces) -> list[tuple]:
    """Return all that is known of each row."""
    expanded = {each.start + n for each in chunk.segments for n in range(each.num_expanded)}
    logits, states = chunk.logits_rows.tolist(), chunk.states_rows.tolist()
    return [
        (
            *(segment.request, segment.kind, segment.block_table.tolist()),
            *(chunk.token_ids[row], chunk.positions[row], places.slots[row]),
            *(row in expanded, row in logits, row in states),
        )
        for segment in places.segments
        for row in range(segment.start, segment.start + segment.length)
    ]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7, 73])
def test_all_rows_of_a_chunk_are_those_of_its_parts(num_ranks):
    """In order, each once, with the same blocks, slots and wishes; requests are those of the whole."""
    whole = long_chunk()
    parts = [part_of(whole, num_ranks, index) for index in range(num_ranks)]
    for window in (False, True):
        places = [part.places(window=window) for part in parts]
        rows = [about_rows(*each) for each in zip(parts, places, strict=True)]
        assert list(chain.from_iterable(rows)) == about_rows(whole, whole.places(window=window))
        for part in parts:
            for index, place in enumerate(places):
                assert part.slots_of(index, window=window).tolist() == place.slots.tolist()
    sizes = [part.num_tokens for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert all(part.requests == whole.requests and part.id == whole.id for part in parts)
    assert all(part.is_prompt for part in parts)
    joined = np.concatenate([part.token_ids for part in parts])
    assert joined.tolist() == whole.token_ids.tolist()
    assert whole.token_ids[parts[-1].rows].tolist() == parts[-1].token_ids.tolist()


def test_a_part_stays_one_when_a_stage_adds_to_it():
    """Embeddings of each layer come to a chunk after it was divided."""
    part = part_of(long_chunk(), 2, 1)
    more = replace(part, embedded=np.zeros((1, part.num_tokens, 4), np.float32))
    assert more.whole is part.whole
    assert more.rows == part.rows == slice(36, 73)


def test_what_is_divided():
    """A prompt's rows from some number on; not decode steps, nor what the first rank notes of every row."""
    long = make_chunk(num_tokens=MIN_DIVIDED_TOKENS)
    assert is_divided(long, 2)
    assert not is_divided(long, 1)
    assert not is_divided(make_chunk(num_tokens=MIN_DIVIDED_TOKENS - 1), 2)
    assert not is_divided(make_decode(long), 2)
    assert not is_divided(replace(long, wants_routing=True), 2)
    many = 2 * MIN_DIVIDED_TOKENS
    assert not is_divided(long, many), "a rank without rows"
    assert bounds_of(many, many) == tuple(range(many + 1))


def toy_spec(folder, case: str):
    """Return the dimensions of a toy model."""
    (toy,) = [each.toy for each in ARCH_CASES if each.name == case]
    with open_model_file(write_toy_arch(folder / "toy.gguf", toy)) as file:
        return read_spec(file), toy


def test_what_ranks_give_each_other_by_layer(tmp_path):
    """Keys and values where a row sees others by them, hidden rows where a state moves on."""
    spec, toy = toy_spec(tmp_path, "qwen3next_default")
    kinds = [Mixing.HIDDEN, Mixing.HIDDEN, Mixing.HIDDEN, Mixing.CACHE]
    assert list(mixing_of(spec)) == kinds
    assert mixed_row_bytes(spec, CacheType.F16) == max(
        4 * toy.hidden, 2 * 2 * toy.kv_heads * toy.head_dim
    )
    spec, toy = toy_spec(tmp_path, "deepseek2_flash")
    assert set(mixing_of(spec)) == {Mixing.CACHE}
    assert mixed_row_bytes(spec, CacheType.BF16) == 2 * (toy.rank + toy.rotary), "one row for all"


def test_layers_that_write_nothing_exchange_nothing(tmp_path):
    """Feed-forwards alone, and layers that read another one's keys; windows have places of their own."""
    spec, _ = toy_spec(tmp_path, "nemotron_h_moe_default")
    assert Mixing.NOTHING in mixing_of(spec)
    assert {kind is Mixing.NOTHING for kind in mixing_of(spec)} == {True, False}
    spec = replace(spec, own_kv_sources=(*range(spec.num_layers - 1), 0))
    assert mixing_of(spec)[-1] is Mixing.NOTHING
    spec, _ = toy_spec(tmp_path, "gpt-oss_default")
    assert Mixing.WINDOW_CACHE in mixing_of(spec)

"""Attention to the positions that are chosen for a token, in every implementation and type of cache."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from tests.support.compare import assert_within
from tests.unit.kernels.test_dense import (
    ATTENDING,
    SINKS,
    TYPES,
    PromptDense,
    attended,
    attending,  # noqa: F401 - a fixture
    attending_on,
    empty_cache,
    filled_cache,
    isa,  # noqa: F401 - a fixture
    native,  # noqa: F401 - a fixture
    normal,
    slots_of,
    token_run,
)
from thermocline.kernels.cache_format import CacheShape, CacheType, read_cache, write_cache
from thermocline.kernels.dense_contract import Attending, Temperature
from thermocline.kernels.dense_reference import ReferenceDense

SIZES = [
    # heads, kv_heads, head_dim, block_tokens, positions
    (2, 2, 64, 16, range(600, 603)),
    (8, 2, 64, 16, range(1080, 1100)),
    (16, 2, 96, 5, [700, 701]),
    (24, 2, 32, 33, range(520, 530)),
    (8, 1, 256, 64, [1100]),
    (12, 1, 64, 16, [0, 15, 16, 63, 64]),
]
RULES = {
    "plain": Attending(0.1),
    "window": Attending(0.1, window=300, sinks=SINKS),
    "softcap": Attending(0.3, softcap=2.0),
    "chunked": Attending(0.1, window=40, chunked=True, temperature=Temperature(0.9, 11, 1)),
}
# Blocks of four positions: of each token by itself, in runs of eight blocks, and hardly any.
SHARES = {"scattered": (1, 0.1), "clustered": (8, 0.1), "few": (1, 0.004)}


def drawn(rng, positions, share: str, words: int) -> np.ndarray:
    """Bits [tokens, 16 * words] of a choice; behind a token, where they say nothing, all are set."""
    run, chance = SHARES[share]
    blocks = rng.random((len(positions), -(-4 * words // run))) < chance
    bits = np.repeat(np.repeat(blocks, run, axis=1)[:, : 4 * words], 4, axis=1)
    return bits | (np.arange(16 * words) >= np.asarray(positions)[:, None])


def packed(bits: np.ndarray) -> np.ndarray:
    """Those bits as `Attending.chosen`."""
    return np.packbits(bits, axis=1, bitorder="little").view("<u2").astype(np.uint16)


def naive(q, positions, cache, table, rule, bits) -> np.ndarray:
    """Attention in double, of each token over the positions that it reads alone."""
    out = np.empty(q.shape, np.float64)
    group = q.shape[1] // cache.shape.kv_heads
    for t, position in enumerate(positions):
        first = max(0, position + 1 - rule.window) if rule.window else 0
        heat = 1.0
        if rule.chunked:
            first = position - position % rule.window
        if (given := rule.temperature) is not None:
            heat += given.scale * np.log1p((position + given.offset) // given.length)
        read = first + np.flatnonzero(bits[t, first : position + 1])
        slots = slots_of(table, read, cache.shape.block_tokens)
        keys, values = read_cache(cache.shape, cache.keys, cache.values, slots)
        for h in range(q.shape[1]):
            scores = keys[:, h // group].astype(np.float64) @ q[t, h] * rule.scale * heat
            if rule.softcap:
                scores = rule.softcap * np.tanh(scores / rule.softcap)
            weights = np.exp(scores)
            sink = 0.0 if rule.sinks is None else np.exp(np.float64(rule.sinks[h]))
            out[t, h] = weights @ values[:, h // group] / (weights.sum() + sink)
    return out


def tolerance(kernels, cache_type: CacheType) -> str:
    """The name of the tolerance of an implementation and a type of cache."""
    if cache_type is CacheType.F32:
        return "attention/float32"
    kind = "16 bits" if isinstance(kernels, PromptDense) else "float32, packed cache"
    return f"attention/{kind}"


@pytest.mark.parametrize("cache_type", TYPES)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_token_reads_what_is_chosen(attending, cache_type, sizes, rule):  # noqa: F811
    """Grouped heads, blocks of any length, groups and whole spans that are not read, with windows and all else."""
    heads, kv_heads, head_dim, block_tokens, at = sizes
    positions = np.array(at, np.int32)
    shape = {"block_tokens": block_tokens, "kv_heads": kv_heads, "head_dim": head_dim}
    context = int(positions[-1]) + 1
    cache, table, q = attended(heads, len(at), heads, context, type=cache_type, **shape)
    if rule.sinks is not None:
        rule = replace(rule, sinks=np.resize(rule.sinks, heads))
    runs = [token_run(0, len(q), table)]
    for share in SHARES:
        bits = drawn(np.random.default_rng(heads), positions, share, context // 16 + 2)
        ours = attending.attention(q, positions, runs, cache, replace(rule, chosen=packed(bits)))
        key = cache_type, heads, head_dim, share, rule.window, rule.softcap
        if key not in _known:
            _known[key] = naive(q, positions, cache, table, rule, bits)
        assert_within(ours, _known[key], tolerance(attending, cache_type))


@pytest.mark.parametrize("cache_type", TYPES)
@pytest.mark.parametrize("sizes", [SIZES[0], (24, 3, 32, 33, range(520, 530))])
def test_key_heads_may_read_different_positions(attending, cache_type, sizes):  # noqa: F811
    """Each head's queries give the bits of a choice that all heads share; a token may not be among what it reads."""
    heads, kv_heads, head_dim, block_tokens, at = sizes
    positions = np.array(at, np.int32)
    shape = {"block_tokens": block_tokens, "kv_heads": kv_heads, "head_dim": head_dim}
    context = int(positions[-1]) + 1
    cache, table, q = attended(heads, len(at), heads, context, type=cache_type, **shape)
    rng = np.random.default_rng(heads)
    bits = [drawn(rng, positions, "scattered", context // 16 + 2) for _ in range(kv_heads)]
    bits[0][:, 0] = True
    bits[0][np.arange(len(at)), positions] = False
    lists = [packed(each) for each in bits]
    given = q, positions, [token_run(0, len(q), table)], cache
    rule = Attending(0.1, chosen=np.stack(lists, axis=1))
    ours = attending.attention(*given, rule)
    group = heads // kv_heads
    for head, words in enumerate(lists):
        shared = attending.attention(*given, replace(rule, chosen=words))
        mine = slice(head * group, (head + 1) * group)
        np.testing.assert_array_equal(ours[:, mine], shared[:, mine])
    first = naive(q, positions, cache, table, rule, bits[0])[:, :group]
    assert_within(ours[:, :group], first, tolerance(attending, cache_type))


# Of the same numbers for every implementation: it takes longer than all of them.
_known: dict[tuple[object, ...], np.ndarray] = {}


@pytest.mark.parametrize("cache_type", TYPES)
@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "block_tokens"), [(8, 1, 16), (24, 2, 16), (2, 2, 5), (8, 2, 33)]
)
@pytest.mark.parametrize("name", ATTENDING)
def test_chunks_and_threads_change_no_bit(name, cache_type, window, heads, kv_heads, block_tokens):
    """A token alone, in pieces of any size, or among all, whose choices differ, on one, two or seven threads."""
    context, first = 1100, 1000
    positions = np.arange(first, context, dtype=np.int32)
    sizes = {"block_tokens": block_tokens, "kv_heads": kv_heads, "head_dim": 64}
    cache, table, q = attended(heads, len(positions), heads, context, type=cache_type, **sizes)
    rng = np.random.default_rng(window)
    shares = [drawn(rng, positions, share, context // 16 + 1) for share in SHARES]
    bits = np.choose(rng.integers(len(shares), size=(len(positions), 1)), shares)
    chosen = packed(bits)

    def attend(threads: int, cuts: list[int]) -> np.ndarray:
        kernels = attending_on(name, threads)
        parts = [
            kernels.attention(
                q[a:b].copy(),
                positions[a:b].copy(),
                [token_run(0, b - a, table)],
                cache,
                Attending(0.1, window=window, chosen=chosen[a:b].copy()),
            )
            for a, b in pairwise(cuts)
        ]
        return np.concatenate(parts)

    whole = attend(2, [0, len(q)])
    for threads in (1, 7):
        np.testing.assert_array_equal(attend(threads, [0, len(q)]), whole)
    np.testing.assert_array_equal(attend(2, [0, 1, 2, 3, 5, 12, 13, 64, len(q)]), whole)
    np.testing.assert_array_equal(attend(1, [0, 1, 30, 31, len(q)]), whole)


@pytest.mark.parametrize("cache_type", TYPES)
@pytest.mark.parametrize("block_tokens", [16, 5])
def test_a_choice_of_all_or_of_a_window_is_neither(attending, cache_type, block_tokens):  # noqa: F811
    """To the bit as without a choice, and as with the window that it draws, for one row and for many."""
    context = 1090
    sizes = {"block_tokens": block_tokens, "kv_heads": 2, "head_dim": 64}
    cache, table, q = attended(3, 40, 8, context, type=cache_type, **sizes)
    for count in (1, 40):
        positions = np.arange(context - count, context, dtype=np.int32)
        given = q[:count], positions, [token_run(0, count, table)], cache
        places = np.arange(-(-context // 16) * 16)
        bits = np.ones((count, len(places)), bool)
        for window in (0, 300):
            if window:
                bits &= places > positions[:, None] - window
            expected = attending.attention(*given, Attending(0.1, window=window))
            found = attending.attention(*given, Attending(0.1, chosen=packed(bits)))
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("cache_type", [CacheType.F32, CacheType.BF16])
@pytest.mark.parametrize("block_tokens", [16, 5])
def test_what_is_not_chosen_does_not_reach_a_token(attending, cache_type, block_tokens):  # noqa: F811
    """Nor does what lies behind it, whatever it is and whatever bits it has."""
    rng = np.random.default_rng(5)
    sizes = {"block_tokens": block_tokens, "kv_heads": 1, "head_dim": 32}
    cache, table = filled_cache(rng, 650, type=cache_type, **sizes)
    q, positions, runs = (
        normal(rng, 2, 8, 32),
        np.array([595, 603], np.int32),
        [token_run(0, 2, table)],
    )
    bits = drawn(rng, positions, "scattered", 41)
    bits[:, 595:604] = True
    rule = Attending(0.2, chosen=packed(bits))
    clean = attending.attention(q, positions, runs, cache, rule)
    for places, bad in ((np.flatnonzero(~bits.any(axis=0)), 1e30), (np.arange(604, 650), np.nan)):
        slots = slots_of(table, places, block_tokens)
        rows = np.full((len(places), 1, 32), bad, np.float32)
        write_cache(cache.shape, cache.keys, cache.values, slots, rows, rows)
        np.testing.assert_array_equal(attending.attention(q, positions, runs, cache, rule), clean)


def test_sequences_have_rows_of_their_own(attending):  # noqa: F811
    """Several sequences of very different length in one call, an empty one among them: each as if it were alone."""
    rng = np.random.default_rng(11)
    sizes = {"block_tokens": 16, "kv_heads": 2, "head_dim": 64}
    cache, table = filled_cache(rng, 2000, type=CacheType.F16, **sizes)
    tables = [table, table[60:70].copy(), table[:0].copy(), table[100:101].copy()]
    positions = np.array([1998, 1999, 150, 0, 1, 2], np.int32)
    spans = [(0, 2), (2, 1), (3, 0), (3, 3)]
    q = normal(rng, len(positions), 4, 64)
    chosen = packed(drawn(rng, positions, "scattered", 125))
    runs = [token_run(a, n, t) for (a, n), t in zip(spans, tables, strict=True)]
    together = attending.attention(q, positions, runs, cache, Attending(0.125, chosen=chosen))
    for run in runs:
        rows = slice(run.start, run.start + run.length)
        if run.length == 0:
            continue
        alone = attending.attention(
            q[rows].copy(),
            positions[rows].copy(),
            [token_run(0, run.length, run.block_table)],
            cache,
            Attending(0.125, chosen=chosen[rows].copy()),
        )
        np.testing.assert_array_equal(together[rows], alone)


@pytest.mark.parametrize(
    ("rows", "words", "says"),
    [(2, 2, "up to a token's own"), (2, 0, "up to a token's own"), (1, 3, "a row per token")],
)
def test_the_core_refuses_choices_that_are_too_small(native, rows, words, says):  # noqa: F811
    """A word or a row that is missing would be read beside the array; the last word that is needed is enough."""
    sizes = {"block_tokens": 16, "kv_heads": 1, "head_dim": 16}
    cache, table = filled_cache(np.random.default_rng(1), 40, type=CacheType.F32, **sizes)
    q, at = np.zeros((2, 1, 16), np.float32), np.array([31, 32], np.int32)
    runs = [token_run(0, 2, table)]
    enough = np.full((2, 3), 0xFFFF, np.uint16)
    native.attention(q, at, runs, cache, Attending(0.1, chosen=enough))
    lists = np.repeat(enough[:, None], 2, axis=1)
    with pytest.raises(ValueError, match="one list, or one for each key head"):
        native.attention(q, at, runs, cache, Attending(0.1, chosen=lists))
    with pytest.raises(ValueError, match=says):
        native.attention(q, at, runs, cache, Attending(0.1, chosen=enough[:rows, :words].copy()))


@pytest.mark.parametrize("make", [ReferenceDense, lambda: attending_on("portable")])
def test_rows_of_a_latent_cache_are_all_read(make):
    """A choice of them is our bug."""
    cache = empty_cache(CacheShape(CacheType.F32, 2, 16, 1, 48, latent=32))
    q, at = np.zeros((1, 1, 48), np.float32), np.zeros(1, np.int32)
    rule = Attending(0.1, chosen=np.ones((1, 1), np.uint16))
    with pytest.raises(AssertionError, match="latent"):
        make().attention(q, at, [token_run(0, 1, at)], cache, rule)

"""Sinks in attention over a latent cache, and rows that are read one by one, in every implementation."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest

from tests.support.compare import assert_within
from tests.unit.kernels.test_dense import (
    ATTENDING,
    TYPES,
    PromptDense,
    attending,  # noqa: F401 - a fixture
    attending_on,
    normal,
    slots_of,
    token_run,
)
from thermocline.kernels.cache_format import (
    CacheShape,
    CacheType,
    read_latent,
    row_by_row,
    write_latent,
)
from thermocline.kernels.dense_contract import Attending, LayerCache, Temperature

# heads, numbers of a row, those of a value, block_tokens
SIZES = [
    (64, 512, 512, 16),  # all of a row is its value
    (16, 576, 512, 16),
    (37, 64, 48, 7),
    (5, 32, 32, 1),
    (1, 27, 21, 16),
]
# Wide rows of two types alone: they take long.
CASES = [*product(SIZES[:2], (CacheType.F16, CacheType.Q8_0)), *product(SIZES[2:4], TYPES)]
CASES += [(SIZES[4], CacheType.F32), (SIZES[4], CacheType.F16)]
RULES = {
    "all": Attending(0.2),
    "window": Attending(0.2, window=300),
    "softcap": Attending(0.3, softcap=2.0, window=128),
    "chunked": Attending(0.2, window=40, chunked=True, temperature=Temperature(0.9, 11, 1)),
}
CONTEXT = 640


class Rows:
    """A sequence's rows in a cache, and queries of its last tokens."""

    def __init__(self, sizes, cache_type: CacheType, count: int) -> None:
        heads, dim, latent, block_tokens = sizes
        rng, blocks = np.random.default_rng(heads), -(-CONTEXT // block_tokens)
        shape = CacheShape(cache_type, blocks + 2, block_tokens, 1, dim, latent)
        # Places that nothing was stored in hold NaN, where the type has one.
        keys = np.full(shape.array_shape, 0 if cache_type is CacheType.Q8_0 else 255, np.uint8)
        self.cache = LayerCache(shape, keys, np.zeros(shape.value_shape, np.uint8))
        self.table = rng.permutation(blocks + 2)[:blocks].astype(np.int32)
        self.positions = np.arange(CONTEXT - count, CONTEXT, dtype=np.int32)
        self.slots = slots_of(self.table, np.arange(CONTEXT), block_tokens)
        write_latent(shape, keys, self.slots, normal(rng, CONTEXT, dim))
        self.q = normal(rng, count, heads, dim, scale=0.6)

    def attend(self, dense, rule: Attending, first: int = 0, last: int | None = None) -> np.ndarray:
        """Return what some of the tokens read."""
        q, at = self.q[first:last].copy(), self.positions[first:last].copy()
        return dense.attention(q, at, [token_run(0, len(q), self.table)], self.cache, rule)


def expected(rows: Rows, rule: Attending) -> np.ndarray:
    """Return what all of them read, in double."""
    read = read_latent(rows.cache.shape, rows.cache.keys, rows.slots)
    return np.stack(
        [
            by_definition(q, read, int(position), rows.cache.shape.latent, rule)
            for q, position in zip(rows.q, rows.positions, strict=True)
        ]
    )


def by_definition(q, rows, position: int, latent: int, rule: Attending) -> np.ndarray:
    """Return what one token reads of rows, in double: a sink is a row that has a score and no value."""
    first, heat = 0, 1.0
    if rule.window:
        first = max(0, position + 1 - rule.window)
    if rule.chunked:
        first = position - position % rule.window
    if (given := rule.temperature) is not None:
        heat += given.scale * np.log1p((position + given.offset) // given.length)
    seen = rows[first : position + 1].astype(np.float64)
    scores = q.astype(np.float64) @ seen.T * rule.scale * heat
    if rule.softcap:
        scores = rule.softcap * np.tanh(scores / rule.softcap)
    if rule.sinks is not None:
        scores = np.concatenate((scores, rule.sinks[:, None]), axis=1)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return weights[:, : len(seen)] @ seen[:, :latent]


def with_sinks(rule: Attending, heads: int) -> Attending:
    """Return the rule with weak sinks and strong ones; of many heads, one takes nothing and one takes all."""
    sinks = np.linspace(-3.0, 9.0, heads, dtype=np.float32)
    if heads > 3:
        sinks[1], sinks[2] = -1e4, 1e4
    return replace(rule, sinks=sinks)


def tolerance(kernels, cache_type: CacheType) -> str:
    """The name of the tolerance of an implementation and a type of cache."""
    is_packed = isinstance(kernels, PromptDense) and cache_type is not CacheType.F32
    return "attention/16 bits" if is_packed else "attention/float32, packed cache"


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize(("sizes", "cache_type"), CASES)
def test_sinks_take_their_share_once(attending, rule, sizes, cache_type):  # noqa: F811
    """Of a token whose spans are divided among threads, and of some tokens, with windows or without."""
    rule = with_sinks(rule, sizes[0])
    key = sizes, cache_type, rule.window
    rows = Rows(sizes, cache_type, 5)
    if key not in _known:
        _known[key] = expected(rows, rule)
    for first in (4, 0):
        found = rows.attend(attending, rule, first)
        assert_within(found, _known[key][first:], tolerance(attending, cache_type))


# Of the same numbers for every implementation: it takes longer than all of them.
_known: dict[tuple[object, ...], np.ndarray] = {}


@pytest.mark.parametrize("name", ATTENDING)
@pytest.mark.parametrize("rule", [RULES["all"], RULES["window"]], ids=["all", "window"])
@pytest.mark.parametrize(("sizes", "cache_type"), CASES)
def test_chunks_and_threads_change_no_bit(name, rule, sizes, cache_type):
    """A token alone, in pieces or among all, on one, two or seven threads."""
    rule, rows = with_sinks(rule, sizes[0]), Rows(sizes, cache_type, 6)
    one, two, seven = (attending_on(name, threads) for threads in (1, 2, 7))
    whole = rows.attend(one, rule)
    for dense, cuts in ((two, [0, 6]), (seven, [0, 1, 5, 6]), (one, [0, 1, 4, 6])):
        parts = [rows.attend(dense, rule, first, last) for first, last in pairwise(cuts)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize(("window", "has_sinks"), [(0, True), (128, True), (0, False)])
@pytest.mark.parametrize(
    ("sizes", "cache_type"), [(SIZES[0], CacheType.F16), *((SIZES[3], kind) for kind in TYPES)]
)
def test_rows_are_read_one_by_one(attending, window, cache_type, sizes, has_sinks):  # noqa: F811
    """Blocks of single tokens, in any order: to the bit what each token reads of these rows behind each other."""
    rule = Attending(0.2, window=window)
    rule = with_sinks(rule, sizes[0]) if has_sinks else rule
    counts = [1, 17, 513, 640] if sizes[0] == 64 else [1, 5, 16, 17, 128, 511, 512, 513, 640]
    rows, behind = (Rows(sizes, cache_type, len(counts)) for _ in range(2))
    shape, keys = row_by_row(rows.cache.shape, rows.cache.keys)
    target = row_by_row(behind.cache.shape, behind.cache.keys)[1]
    single = LayerCache(shape, keys, np.zeros(shape.value_shape, np.uint8))
    rng, q = np.random.default_rng(3), rows.q
    slots = [rng.permutation(rows.slots)[:count].astype(np.int32) for count in counts]
    runs = [token_run(n, 1, each) for n, each in enumerate(slots)]
    at = np.array(counts, np.int32) - 1
    found = attending.attention(q, at, runs, single, rule)
    for n, own in enumerate(slots):
        read = read_latent(rows.cache.shape, rows.cache.keys, own)
        definition = by_definition(q[n], read, int(at[n]), shape.latent, rule)
        assert_within(found[n], definition, tolerance(attending, cache_type))
        one, place, run = q[n : n + 1].copy(), at[n : n + 1].copy(), token_run(0, 1, own)
        alone = attending.attention(one, place, [run], single, rule)
        np.testing.assert_array_equal(alone[0], found[n])
        target[behind.slots[: len(own)]] = keys[own]
        run = token_run(0, 1, behind.table)
        whole = attending.attention(one, place, [run], behind.cache, rule)
        np.testing.assert_array_equal(whole[0], found[n])


def test_sinks_of_other_heads_are_refused():
    """The core reads a number per head."""
    rows = Rows(SIZES[3], CacheType.F16, 2)
    for heads in (4, 6):
        with pytest.raises(ValueError, match="sinks must have a number per head"):
            rows.attend(attending_on("portable"), with_sinks(RULES["all"], heads))

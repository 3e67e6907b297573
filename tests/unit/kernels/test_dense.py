"""The dense kernels of every instruction set and their NumPy twin: one body of tests over all."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
import pytest

from tests.support.compare import assert_within, nmse
from tests.support.kernel_cases import DENSE_ISAS, TILE_ISAS
from thermocline.kernels import _native
from thermocline.kernels.cache_format import CacheShape, CacheType, read_cache, write_cache
from thermocline.kernels.dense import NativeDense
from thermocline.kernels.dense_contract import (
    Activation,
    Attending,
    Contributions,
    Gating,
    HeadNorm,
    LayerCache,
    RoutingRule,
    Temperature,
)
from thermocline.kernels.dense_reference import ReferenceDense
from thermocline.messages import RequestId, Segment, SegmentKind

# Of every set, and those for prompts on tiles.
ATTENDING = [*DENSE_ISAS, *(f"{name} prompts" for name in TILE_ISAS)]
TYPES = list(CacheType)


def token_run(start: int, length: int, block_table: np.ndarray) -> Segment:
    """Rows of a chunk that belong to one sequence."""
    return Segment(RequestId(1), start, length, SegmentKind.PROMPT, block_table)


@pytest.fixture(params=[*DENSE_ISAS, "reference"])
def dense(request, monkeypatch):
    """Each implementation, with output memory poisoned by NaN so that a hole shows."""
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(np, name, _poisoned(getattr(np, name)))
    return (
        ReferenceDense()
        if request.param == "reference"
        else NativeDense(_native.Core(request.param, 2))
    )


@pytest.fixture(params=DENSE_ISAS)
def isa(request):
    """Each instruction set of this machine."""
    return request.param


@pytest.fixture
def native(isa):
    """Its kernels."""
    return NativeDense(_native.Core(isa, 2))


class PromptDense(NativeDense):
    """Attention as prompts have it: on tiles, for types that do not hold floats."""

    def attention(self, *args, prompt: bool = True, **kwargs) -> np.ndarray:
        return super().attention(*args, prompt=prompt, **kwargs)


def attending_on(name: str, threads: int = 2) -> NativeDense | ReferenceDense:
    """Return the implementation of attention with a name of `ATTENDING`."""
    if name == "reference":
        return ReferenceDense()
    isa, _, form = name.partition(" ")
    core = _native.Core(isa, threads)
    return PromptDense(core) if form else NativeDense(core)


@pytest.fixture(params=[*ATTENDING, "reference"])
def attending(request, monkeypatch):
    """Each implementation of attention, the one for prompts on tiles among them; outputs poisoned."""
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(np, name, _poisoned(getattr(np, name)))
    return attending_on(request.param)


def _poisoned(make):
    def poisoned(*args, **kwargs):
        out = make(*args, **kwargs)
        if out.dtype.kind == "f":
            out.fill(np.nan)
        return out

    return poisoned


def normal(rng, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def empty_cache(shape: CacheShape) -> LayerCache:
    return LayerCache(
        shape, np.zeros(shape.array_shape, np.uint8), np.zeros(shape.value_shape, np.uint8)
    )


def slots_of(table: np.ndarray, positions: np.ndarray, block_tokens: int) -> np.ndarray:
    slots = table[positions // block_tokens] * block_tokens + positions % block_tokens
    return slots.astype(np.int32)


def filled_cache(rng, context: int, **sizes) -> tuple[LayerCache, np.ndarray]:
    """A cache of `context` positions in scattered blocks, and the block table."""
    needed = -(-context // sizes["block_tokens"])
    table = rng.permutation(needed + 3)[:needed].astype(np.int32)
    shape = CacheShape(num_blocks=needed + 3, **sizes)
    cache = empty_cache(shape)
    slots = slots_of(table, np.arange(context), shape.block_tokens)
    dims = shape.head_dim, shape.value_dim
    k, v = (normal(rng, context, shape.kv_heads, dim) for dim in dims)
    write_cache(shape, cache.keys, cache.values, slots, k, v)
    return cache, table


@lru_cache(maxsize=128)
def attended(
    seed: int, rows: int, heads: int, context: int, **sizes
) -> tuple[LayerCache, np.ndarray, np.ndarray]:
    """A filled cache, its block table and queries, only to be read: drawing them takes as long as attention."""
    rng = np.random.default_rng(seed)
    cache, table = filled_cache(rng, context, **sizes)
    q = normal(rng, rows, heads, sizes["head_dim"])
    for each in (cache.keys, cache.values, table, q):
        each.flags.writeable = False
    return cache, table, q


@pytest.mark.parametrize(
    ("rows", "width"), [(1, 2048), (7, 80), (13, 5), (3, 16), (2, 4099), (0, 8)]
)
def test_rms_norm_is_the_formula(dense, rows, width):
    """Close to the formula in double, for any width, with rows of very different size."""
    rng = np.random.default_rng(width)
    x = normal(rng, rows, width) * np.logspace(-18, 18, max(rows, 1))[:rows, None].astype(
        np.float32
    )
    gain = normal(rng, width)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt(np.square(wide).mean(axis=1, keepdims=True) + 1e-6) * gain
    np.testing.assert_allclose(dense.rms_norm(x, gain, 1e-6), expected, rtol=3e-7)


@pytest.mark.parametrize(
    ("rows", "width"), [(1, 2048), (7, 80), (13, 5), (3, 16), (2, 4099), (0, 8), (2, 1)]
)
def test_layer_norm_is_the_formula(dense, rows, width):
    """Close to the formula in double, for rows far from zero whose mean is most of them."""
    rng = np.random.default_rng(width)
    x, gain = normal(rng, rows, width) + 30, normal(rng, width)
    wide = x.astype(np.float64)
    wide -= wide.mean(axis=1, keepdims=True)
    expected = wide / np.sqrt(np.square(wide).mean(axis=1, keepdims=True) + 1e-6) * gain
    np.testing.assert_allclose(dense.layer_norm(x, gain, 1e-6), expected, rtol=1e-6, atol=1e-6)
    bias = normal(rng, width)
    found = dense.layer_norm(x, gain, 1e-6, bias)
    np.testing.assert_allclose(found, expected + bias, rtol=1e-6, atol=1e-6)


def test_layer_norm_has_one_result_for_all_sets_and_threads():
    """The mean is summed in an order that neither changes."""
    rng = np.random.default_rng(8)
    x, gain = normal(rng, 64, 2051) + 3, normal(rng, 2051)
    found = [
        NativeDense(_native.Core(isa, threads)).layer_norm(x, gain, 1e-6)
        for isa, threads in (("portable", 1), (DENSE_ISAS[-1], 1), (DENSE_ISAS[-1], 3))
    ]
    # Behind the mean the sets' own norm follows, which may round its sum of squares differently.
    np.testing.assert_allclose(found[0], found[1], rtol=3e-7)
    np.testing.assert_array_equal(found[1], found[2])


def test_rope_angles_are_exact_at_large_positions(dense):
    """A million positions in, an angle is still right to the last bit of a float."""
    positions = np.array([0, 1, 4095, 1_000_003, 2**31 - 1], np.int32)
    frequencies = 1e6 ** (-np.arange(0, 128, 2) / 128)
    table = dense.rope_table(positions, frequencies, magnitude=1.25)
    angles = positions[:, None].astype(np.float64) * frequencies
    np.testing.assert_allclose(table.cosines, 1.25 * np.cos(angles), rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(table.sines, 1.25 * np.sin(angles), rtol=1e-7, atol=1e-9)


HEADS = [
    # tokens, heads, kv_heads, head_dim, rotary_dims, block_tokens
    (1, 8, 2, 64, 64, 16),
    (37, 4, 4, 80, 80, 16),
    (5, 4, 1, 96, 32, 1),
    (19, 8, 2, 128, 128, 33),
    (3, 2, 2, 256, 64, 16),
    (3, 4, 1, 512, 512, 16),
]


@pytest.mark.parametrize("cache_type", TYPES)
@pytest.mark.parametrize("sizes", HEADS)
@pytest.mark.parametrize("normed", ["first", "last", "not"])
def test_heads_are_normed_turned_and_stored(dense, cache_type, sizes, normed):
    """Queries as in double; the cache holds the turned keys and the values, and nothing else changes."""
    tokens, heads, kv_heads, head_dim, rotary_dims, block_tokens = sizes
    if cache_type is CacheType.Q8_0 and head_dim % 32:
        pytest.skip("Q8_0 needs a head_dim that 32 divides")
    for pairs in (False, True):
        rng = np.random.default_rng(tokens)
        cache = empty_cache(CacheShape(cache_type, 50, block_tokens, kv_heads, head_dim))
        slots = rng.permutation(50 * block_tokens)[:tokens].astype(np.int32)
        q = normal(rng, tokens, heads, head_dim, scale=3.0)
        k, v = (normal(rng, tokens, kv_heads, head_dim, scale=3.0) for _ in range(2))
        gains = [normal(rng, head_dim) for _ in range(3)]
        v_gain = gains[2] if head_dim == 512 else None
        norm = HeadNorm(gains[0], gains[1], 1e-6, last=normed == "last", v_gain=v_gain)
        if normed == "not":
            norm = HeadNorm(None, None, 1e-6)
        positions = (np.arange(tokens) + 100_000).astype(np.int32)
        frequencies = 1e4 ** (-np.arange(0, rotary_dims, 2) / rotary_dims)
        rope = dense.rope_table(positions, frequencies, pairs=pairs)

        expected_q, expected_k = (
            turned_in_double(x, gain, norm.last, positions, frequencies, pairs)
            for x, gain in ((q, norm.q_gain), (k, norm.k_gain))
        )
        expected_v = v
        if norm.v_gain is not None:
            rows = dense.rms_norm(v.reshape(-1, head_dim), norm.v_gain, norm.epsilon)
            expected_v = rows.reshape(v.shape)
        dense.prepare_heads(q, k, v, norm, rope, cache, slots)
        assert nmse(q, expected_q) <= 1e-13
        expected = empty_cache(cache.shape)
        write_cache(
            cache.shape,
            expected.keys,
            expected.values,
            slots,
            expected_k.astype(np.float32),
            expected_v,
        )
        found = read_cache(cache.shape, cache.keys, cache.values, slots)
        wanted = read_cache(cache.shape, expected.keys, expected.values, slots)
        # A key that lies near the middle of two stored numbers may go to either.
        limits = {
            CacheType.F32: 1e-13,
            CacheType.F16: 1e-9,
            CacheType.BF16: 1e-7,
            CacheType.Q8_0: 1e-7,
        }
        assert nmse(found[0], wanted[0]) <= limits[cache_type]
        np.testing.assert_array_equal(cache.values, expected.values)
        rest = np.setdiff1d(np.arange(50 * block_tokens), slots).astype(np.int32)
        assert not np.any(read_cache(cache.shape, cache.keys, cache.values, rest))


def test_queries_alone_are_prepared(dense):
    """Where another layer has stored keys and values, queries come out the same, and the cache stays as it is."""
    rng = np.random.default_rng(5)
    shape = CacheShape(CacheType.F32, 2, 8, 2, 16)
    q, k = normal(rng, 3, 4, 16), normal(rng, 3, 2, 16)
    slots, norm = np.arange(3, dtype=np.int32), HeadNorm(normal(rng, 16), None, 1e-6)
    rope = dense.rope_table(slots, 100.0 ** -np.arange(4))
    cache, alone = empty_cache(shape), q.copy()
    dense.prepare_heads(q, k, k, norm, rope, empty_cache(shape), slots)
    dense.prepare_heads(alone, None, None, norm, rope, cache, slots)
    np.testing.assert_array_equal(alone, q)
    assert not np.any(cache.keys)
    assert not np.any(cache.values)


@pytest.mark.parametrize("cache_type", TYPES)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(96, 64), (32, 96)])
@pytest.mark.parametrize("has_gain", [False, True])
def test_values_of_another_size_are_stored(dense, cache_type, head_dim, value_dim, has_gain):
    """Narrower or wider than keys, with a norm of their own size or without."""
    rng = np.random.default_rng(7)
    cache = empty_cache(CacheShape(cache_type, 9, 5, 2, head_dim, own_value_dim=value_dim))
    slots = rng.permutation(45)[:11].astype(np.int32)
    q, k, v = (normal(rng, 11, 2, dim) for dim in (head_dim, head_dim, value_dim))
    gain = normal(rng, value_dim) if has_gain else None
    expected = v if gain is None else ReferenceDense().rms_norm(v, gain, 1e-6)
    rope = dense.rope_table(slots, 100.0 ** -np.arange(4))
    dense.prepare_heads(q, k, v, HeadNorm(None, None, 1e-6, v_gain=gain), rope, cache, slots)
    twin = empty_cache(cache.shape)
    write_cache(twin.shape, twin.keys, twin.values, slots, q, expected)
    found = read_cache(cache.shape, cache.keys, cache.values, slots)[1]
    wanted = read_cache(twin.shape, twin.keys, twin.values, slots)[1]
    assert found.shape == v.shape
    # A number in the middle of two stored ones may go to either.
    assert nmse(found, wanted) <= 1e-6
    rest = np.setdiff1d(np.arange(45), slots).astype(np.int32)
    assert not any(x.any() for x in read_cache(cache.shape, cache.keys, cache.values, rest))


def normed_in_double(wide, gain) -> np.ndarray:
    return wide / np.sqrt(np.square(wide).mean(axis=-1, keepdims=True) + 1e-6) * gain


def turned_in_double(x, gain, last, positions, frequencies, pairs) -> np.ndarray:
    wide = x.astype(np.float64)
    if gain is not None and not last:
        wide = normed_in_double(wide, gain)
    turn = np.exp(1j * positions[:, None] * frequencies)[:, None, :]
    half = len(frequencies)
    first = np.arange(0, 2 * half, 2) if pairs else np.arange(half)
    second = first + 1 if pairs else first + half
    numbers = (wide[..., first] + 1j * wide[..., second]) * turn
    wide[..., first], wide[..., second] = numbers.real, numbers.imag
    return normed_in_double(wide, gain) if gain is not None and last else wide


@pytest.mark.parametrize("cache_type", TYPES)
def test_extreme_numbers_are_stored_alike(native, cache_type):
    """Subnormal, huge and zero rows: every set packs the very bytes that the NumPy twin packs."""
    rng = np.random.default_rng(3)
    rows = [
        normal(rng, 64) * np.float32(s) for s in (1e-40, 3e-8, 1e-5, 1.0, 3e4, 1e5, 1e8, 1e38, 0)
    ]
    rows += [(np.arange(64, dtype=np.float32) - 32) / 64 + 1, np.full(64, 65520, np.float32)]
    x = np.array(rows, np.float32)[:, None, :]
    slots = np.arange(len(x), dtype=np.int32)[::-1].copy()
    shape = CacheShape(cache_type, 1, 33, 1, 64)
    ours, twin = empty_cache(shape), empty_cache(shape)
    nothing = native.rope_table(slots, np.zeros(0))
    native.prepare_heads(x[:, :0], x, x, HeadNorm(None, None, 0.0), nothing, ours, slots)
    with np.errstate(over="ignore"):
        write_cache(shape, twin.keys, twin.values, slots, x, x)
    np.testing.assert_array_equal(ours.keys, twin.keys)
    np.testing.assert_array_equal(ours.values, twin.values)


SINKS = np.linspace(-4.0, 6.0, 24, dtype=np.float32)
ATTENTION = [
    # heads, kv_heads, head_dim, block_tokens, positions
    (8, 1, 64, 16, [0]),
    (4, 4, 80, 16, [0, 1, 2]),
    (8, 2, 96, 1, [40, 41, 42, 43, 44]),
    (6, 2, 128, 33, range(90, 127)),
    (8, 8, 256, 16, [600, 601]),
    (16, 2, 64, 16, range(1009, 1040)),
    (10, 2, 128, 64, [1500]),
    (24, 2, 64, 1024, [1100, 1101]),
    (3, 3, 32, 16, [511, 512, 513]),
    (16, 2, 512, 16, [530]),
    (4, 1, 576, 16, range(60, 90)),
]


RULES = [
    Attending(0.1),
    Attending(0.1, window=23),
    Attending(0.3, softcap=2.0),
    Attending(0.1, window=300, sinks=SINKS),
]
# Several chunks in a call, a border inside of a span, and a wide head.
CHUNKED = Attending(0.1, window=40, chunked=True, temperature=Temperature(0.9, 11, 1))
CHUNKED_SIZES = [ATTENTION[3], ATTENTION[8], ATTENTION[10]]


@pytest.mark.parametrize("cache_type", TYPES)
@pytest.mark.parametrize("sizes", ATTENTION)
def test_attention_is_causal_softmax_over_the_cache(attending, cache_type, sizes):
    """Scattered blocks of any length, grouped heads, windows that slide or not, softcaps, every type of cache."""
    heads, kv_heads, head_dim, block_tokens, positions = sizes
    if cache_type is CacheType.Q8_0 and head_dim % 32:
        pytest.skip("Q8_0 needs a head_dim that 32 divides")
    positions = np.array(positions, np.int32)
    cache, table, q = attended(
        heads * head_dim,
        len(positions),
        heads,
        int(positions[-1]) + 1,
        type=cache_type,
        block_tokens=block_tokens,
        kv_heads=kv_heads,
        head_dim=head_dim,
    )
    kind = "16 bits" if isinstance(attending, PromptDense) else "float32, packed cache"
    if cache_type is CacheType.F32:
        kind = "float32"
    for number, each in enumerate([*RULES, CHUNKED] if sizes in CHUNKED_SIZES else RULES):
        rule = each if each.sinks is None else replace(each, sinks=each.sinks[:heads])
        ours = attending.attention(q, positions, [token_run(0, len(q), table)], cache, rule)
        key = cache_type, heads, head_dim, number
        if key not in _known_attention:
            _known_attention[key] = naive_attention(q, positions, cache, table, rule)
        assert_within(ours, _known_attention[key], f"attention/{kind}")


# Of the same numbers for every implementation: it takes longer than all of them.
_known_attention: dict[tuple[object, ...], np.ndarray] = {}


@pytest.mark.parametrize("cache_type", TYPES)
@pytest.mark.parametrize(
    ("head_dim", "value_dim", "block_tokens"),
    [(192, 128, 16), (32, 96, 16), (24, 17, 16), (7, 18, 5)],
)
@pytest.mark.parametrize("window", [0, 23])
def test_values_may_have_another_size_than_keys(
    attending, cache_type, head_dim, value_dim, block_tokens, window
):
    """As in MiMo, wider ones, and sizes that fill no vector; with sinks where there is a window; for one row and many."""
    if cache_type is CacheType.Q8_0 and head_dim % 32:
        pytest.skip("Q8_0 needs sizes that 32 divides")
    rng = np.random.default_rng(value_dim)
    sizes = {"kv_heads": 2, "head_dim": head_dim, "own_value_dim": value_dim}
    cache, table = filled_cache(rng, 90, type=cache_type, block_tokens=block_tokens, **sizes)
    rule = Attending(0.1, window=window, sinks=SINKS[:6] if window else None)
    kind = "16 bits" if isinstance(attending, PromptDense) else "float32, packed cache"
    if cache_type is CacheType.F32:
        kind = "float32"
    for count in (1, 19):
        positions = np.arange(90 - count, 90, dtype=np.int32)
        q = normal(rng, count, 6, head_dim)
        ours = attending.attention(q, positions, [token_run(0, count, table)], cache, rule)
        assert ours.shape == (count, 6, value_dim)
        assert_within(ours, naive_attention(q, positions, cache, table, rule), f"attention/{kind}")


def naive_attention(q, positions, cache, table, rule) -> np.ndarray:
    shape = cache.shape
    group = q.shape[1] // shape.kv_heads
    out = np.empty((*q.shape[:2], shape.value_dim), np.float64)
    for t, position in enumerate(positions):
        first = max(0, position + 1 - rule.window) if rule.window else 0
        if rule.chunked:
            first = position - position % rule.window
        heat = 1.0
        if (given := rule.temperature) is not None:
            heat += given.scale * np.log1p(np.floor((position + given.offset) / given.length))
        slots = slots_of(table, np.arange(first, position + 1), shape.block_tokens)
        keys, values = read_cache(shape, cache.keys, cache.values, slots)
        for h in range(q.shape[1]):
            scores = keys[:, h // group].astype(np.float64) @ q[t, h] * rule.scale * heat
            if rule.softcap:
                scores = rule.softcap * np.tanh(scores / rule.softcap)
            if rule.sinks is not None:  # as a key without a value
                scores = np.append(scores, rule.sinks[h])
            weights = np.exp(scores - scores.max())
            out[t, h] = (weights / weights.sum())[: len(values)] @ values[:, h // group]
    return out


@pytest.mark.parametrize("cache_type", TYPES)
@pytest.mark.parametrize(
    "rule",
    [
        Attending(0.1),
        Attending(0.1, 3.0, 300),
        Attending(0.1, sinks=SINKS[:8]),
        Attending(0.1, window=70, chunked=True, temperature=Temperature(0.3, 50)),
    ],
    ids=["plain", "softcap", "sinks", "chunked"],
)
@pytest.mark.parametrize(("heads", "kv_heads", "block_tokens"), [(8, 1, 16), (6, 2, 16), (2, 2, 5)])
@pytest.mark.parametrize("name", ATTENDING)
def test_chunks_and_threads_change_no_bit(name, cache_type, rule, heads, kv_heads, block_tokens):
    """A token alone, in pieces of any size, or among all, on one, two or seven threads."""
    native = attending_on(name)
    context, first = 1100, 900
    positions = np.arange(first, context, dtype=np.int32)
    sizes = {"block_tokens": block_tokens, "kv_heads": kv_heads, "head_dim": 64}
    cache, table, q = attended(heads, len(positions), heads, context, type=cache_type, **sizes)

    def attend(kernels: NativeDense, cuts: list[int]) -> np.ndarray:
        parts = [
            kernels.attention(
                q[a:b].copy(), positions[a:b].copy(), [token_run(0, b - a, table)], cache, rule
            )
            for a, b in pairwise(cuts)
        ]
        return np.concatenate(parts)

    if rule.sinks is not None:
        rule = replace(rule, sinks=rule.sinks[:heads])
    whole = attend(native, [0, len(q)])
    for threads in (1, 7):
        kernels = attending_on(name, threads)
        np.testing.assert_array_equal(attend(kernels, [0, len(q)]), whole)
    np.testing.assert_array_equal(attend(native, [0, 1, 2, 3, 5, 12, 13, 64, 137, len(q)]), whole)
    last = len(q) - 1
    np.testing.assert_array_equal(attend(native, [last, len(q)]), whole[last:])


@pytest.mark.parametrize("isa", TILE_ISAS)
@pytest.mark.parametrize("cache_type", TYPES)
def test_prompts_take_tiles_unless_the_cache_holds_floats(isa, cache_type):
    """Their bits are others than those of decoded tokens, and the same with a cache of F32."""
    rng = np.random.default_rng(8)
    cache, table = filled_cache(rng, 40, type=cache_type, block_tokens=16, kv_heads=1, head_dim=64)
    q, positions = normal(rng, 3, 4, 64), np.array([37, 38, 39], np.int32)
    given = q, positions, [token_run(0, 3, table)], cache, Attending(0.2)
    dense = NativeDense(_native.Core(isa, 2))
    same = np.array_equal(dense.attention(*given, prompt=True), dense.attention(*given))
    assert same == (cache_type is CacheType.F32)


@pytest.mark.parametrize("cache_type", [CacheType.F32, CacheType.BF16])
@pytest.mark.parametrize("sink", [-1e4, 1e4])
def test_sinks_far_out_take_all_or_nothing(attending, sink, cache_type):
    """A sink far below all scores changes nothing, and one far above leaves zeros."""
    cache, table = filled_cache(
        np.random.default_rng(3), 20, type=cache_type, block_tokens=16, kv_heads=1, head_dim=32
    )
    q, at = normal(np.random.default_rng(4), 1, 2, 32), np.array([19], np.int32)
    rule, runs = Attending(0.1), [token_run(0, 1, table)]
    plain = attending.attention(q, at, runs, cache, rule)
    found = attending.attention(
        q, at, runs, cache, replace(rule, sinks=np.full(2, sink, np.float32))
    )
    np.testing.assert_allclose(found, plain if sink < 0 else 0 * plain, rtol=1e-6)


def test_sequences_do_not_feel_each_other(attending):
    """Several sequences of very different length in one call: each as if it were alone."""
    rng = np.random.default_rng(11)
    cache, table = filled_cache(
        rng, 2000, type=CacheType.F16, block_tokens=16, kv_heads=2, head_dim=64
    )
    tables = [table, table[60:70].copy(), table[100:101].copy()]
    positions = np.array([1998, 1999, 150, 0, 1, 2], np.int32)
    q = normal(rng, len(positions), 4, 64)
    spans = [(0, 2), (2, 1), (3, 3)]
    rule = Attending(0.125)
    runs = [token_run(a, n, t) for (a, n), t in zip(spans, tables, strict=True)]
    together = attending.attention(q, positions, runs, cache, rule)
    for run in runs:
        rows = slice(run.start, run.start + run.length)
        alone = attending.attention(
            q[rows].copy(),
            positions[rows].copy(),
            [token_run(0, run.length, run.block_table)],
            cache,
            rule,
        )
        np.testing.assert_array_equal(together[rows], alone)


@pytest.mark.parametrize("cache_type", [CacheType.F32, CacheType.BF16])
def test_scores_far_apart_leave_the_best(attending, cache_type):
    """Keys whose scores differ by thousands: the best takes all, and nothing overflows."""
    cache = empty_cache(CacheShape(cache_type, 8, 16, 1, 16))
    k = np.zeros((100, 1, 16), np.float32)
    k[:, 0, 0] = np.linspace(-3e4, 3e4, 100)
    v = np.arange(100, dtype=np.float32)[:, None, None] * np.ones((1, 1, 16), np.float32)
    slots = np.arange(100, dtype=np.int32)
    write_cache(cache.shape, cache.keys, cache.values, slots, k, v)
    q = np.ones((2, 1, 16), np.float32)
    q[1] = -1.0
    table = np.arange(8, dtype=np.int32)
    positions = np.array([98, 99], np.int32)
    out = attending.attention(q, positions, [token_run(0, 2, table)], cache, Attending(1.0))
    np.testing.assert_array_equal(out[:, 0, 0], np.array([98, 0], np.float32))


@pytest.mark.parametrize("cache_type", [CacheType.F32, CacheType.BF16])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_lies_before_a_chunk_does_not_reach_it(attending, poison, cache_type):
    """A token sees the keys of its own chunk, whatever the one before holds; tokens of both in one call."""
    rng = np.random.default_rng(5)
    cache, table = filled_cache(rng, 70, type=cache_type, block_tokens=16, kv_heads=1, head_dim=32)
    positions, rule = np.array([47, 48, 66], np.int32), Attending(0.2, window=24, chunked=True)
    q, runs = normal(rng, 3, 8, 32), [token_run(0, 3, table)]
    clean = attending.attention(q, positions, runs, cache, rule)
    for first, last, rows in ((0, 24, [0, 1, 2]), (24, 48, [1, 2])):
        slots = slots_of(table, np.arange(first, last), 16)
        bad = np.full((last - first, 1, 32), poison, np.float32)
        write_cache(cache.shape, cache.keys, cache.values, slots, bad, bad)
        each = [(q[n : n + 1].copy(), positions[n : n + 1].copy()) for n in rows]
        run = [token_run(0, 1, table)]
        found = [attending.attention(one, at, run, cache, rule)[0] for one, at in each]
        np.testing.assert_array_equal(np.array(found), clean[rows])


@pytest.mark.parametrize("cache_type", [CacheType.F32, CacheType.BF16])
def test_a_temperature_grows_with_the_position(attending, cache_type):
    """As a scale of each token's own: 1 before the first length, then more with each; of one key more changes nothing."""
    rng = np.random.default_rng(6)
    cache, table = filled_cache(rng, 40, type=cache_type, block_tokens=16, kv_heads=1, head_dim=16)
    rule, runs = Attending(0.5, temperature=Temperature(2.0, 10, 1)), [token_run(0, 1, table)]
    for position, steps in ((0, 0), (8, 0), (9, 1), (18, 1), (19, 2), (39, 4)):
        q, at = normal(rng, 1, 2, 16), np.array([position], np.int32)
        plain = Attending(0.5 * (1 + 2.0 * float(np.log1p(steps))))
        expected = attending.attention(q, at, runs, cache, plain)
        found = attending.attention(q, at, runs, cache, rule)
        np.testing.assert_allclose(found, expected, rtol=2e-5)
        assert (
            steps == 0
            or nmse(found, attending.attention(q, at, runs, cache, Attending(0.5))) > 1e-4
        )


@pytest.mark.parametrize("cache_type", [CacheType.F32, CacheType.BF16])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_lies_behind_a_token_does_not_reach_it(attending, poison, cache_type):
    """Cache memory that was never written, or is another's, may hold anything."""
    rng = np.random.default_rng(5)
    cache, table = filled_cache(rng, 70, type=cache_type, block_tokens=16, kv_heads=1, head_dim=32)
    q = normal(rng, 1, 8, 32)
    positions = np.array([66], np.int32)
    runs = [token_run(0, 1, table)]
    clean = attending.attention(q, positions, runs, cache, Attending(0.2))
    behind = slots_of(table, np.arange(67, 80), 16)
    bad = np.full((13, 1, 32), poison, np.float32)
    write_cache(cache.shape, cache.keys, cache.values, behind, bad, bad)
    np.testing.assert_array_equal(
        attending.attention(q, positions, runs, cache, Attending(0.2)), clean
    )


@pytest.mark.parametrize(
    ("tokens", "experts", "chosen"), [(1, 8, 8), (17, 128, 8), (3, 512, 32), (5, 61, 1)]
)
@pytest.mark.parametrize("normalize", [True, False])
def test_routing_is_softmax_then_the_best(dense, tokens, experts, chosen, normalize):
    """Ids best first, weights as in double, for any number of experts."""
    rng = np.random.default_rng(experts)
    logits = normal(rng, tokens, experts, scale=4.0)
    rule = RoutingRule(chosen, normalize, min_sum=6.1e-5, scale=2.5)
    ids, weights = dense.route(logits, rule)
    wide = np.exp(logits.astype(np.float64))
    expected = np.take_along_axis(wide / wide.sum(axis=1, keepdims=True), ids, axis=1)
    if normalize:
        expected /= expected.sum(axis=1, keepdims=True)
    np.testing.assert_array_equal(ids, np.argsort(-logits, axis=1, kind="stable")[:, :chosen])
    np.testing.assert_allclose(weights, expected * 2.5, rtol=1e-6)
    assert ids.dtype == np.int32


def test_equal_experts_are_taken_in_order_and_small_sums_are_clamped(dense):
    """Ties go to the lower id; a token whose best experts are all but impossible is not blown up."""
    logits = np.zeros((2, 40), np.float32)
    logits[1, 39] = 50.0
    logits[1, :39] = -50.0
    ids, weights = dense.route(logits, RoutingRule(3, True, min_sum=0.5, scale=1.0))
    np.testing.assert_array_equal(ids, [[0, 1, 2], [39, 0, 1]])
    np.testing.assert_allclose(weights, [[0.05] * 3, [1.0, 0.0, 0.0]], atol=1e-7)


@pytest.mark.parametrize("logits", [[np.nan] * 9, [-np.inf] * 8 + [1.0], [np.inf] + [0.0] * 8])
def test_broken_logits_still_give_ids_in_range(native, logits):
    """NaN and infinity make bad weights, never an expert that does not exist or is chosen twice."""
    ids, _ = native.route(np.array([logits], np.float32), RoutingRule(4, True, 1e-5, 1.0))
    assert len(set(ids[0])) == 4
    assert ids.min() >= 0
    assert ids.max() < 9


@pytest.mark.parametrize(("tokens", "experts", "chosen"), [(1, 8, 8), (17, 256, 8), (5, 61, 1)])
@pytest.mark.parametrize("biased", [True, False])
def test_sigmoid_routing_chooses_by_the_bias_and_weighs_without(
    dense, tokens, experts, chosen, biased
):
    """The best by score plus bias; weights from the scores alone."""
    rng = np.random.default_rng(experts)
    logits = normal(rng, tokens, experts, scale=2.0)
    bias = normal(rng, experts, scale=0.3) if biased else None
    rule = RoutingRule(chosen, True, 6.1e-5, 1.5, Gating.SIGMOID, bias)
    ids, weights = dense.route(logits, rule)
    scores = 1 / (1 + np.exp(-logits.astype(np.float64)))
    by = scores + bias if biased else scores
    np.testing.assert_array_equal(ids, np.argsort(-by, axis=1, kind="stable")[:, :chosen])
    expected = np.take_along_axis(scores, ids, axis=1)
    expected *= 1.5 / expected.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(weights, expected, rtol=1e-6)


@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize(
    ("rows", "width", "gates"), [(1, 1, 1), (7, 128, 1), (7, 33, 33), (0, 4, 1)]
)
def test_gates_multiply(dense, activation, rows, width, gates):
    """One gate for a row or one for each number, from far below zero to far above."""
    rng = np.random.default_rng(width)
    x, gate = normal(rng, rows, width), normal(rng, rows, gates, scale=30.0)
    wide = gate.astype(np.float64)
    twice = np.clip(np.sqrt(8 / np.pi) * (wide + 0.044715 * wide**3), -700, None)
    expected = (
        x
        * {
            Activation.SIGMOID: 1 / (1 + np.exp(-wide)),
            Activation.SOFTPLUS: np.logaddexp(0.0, wide),
            Activation.GELU: wide / (1 + np.exp(-twice)),
        }[activation]
    )
    found = dense.gate(x, gate, activation)
    # Far below zero the rounded exponent counts.
    rtol = 2e-5 if activation is Activation.GELU else 1e-6
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=1e-30)


@pytest.mark.parametrize(("tokens", "slots", "width"), [(1, 1, 5), (7, 8, 2048), (13, 3, 33)])
def test_combine_adds_slots_in_order(dense, tokens, slots, width):
    """To the bit residual + ((slot 0 + slot 1) + ...), however the slots are spread over tiers."""
    rng = np.random.default_rng(tokens)
    residual = normal(rng, tokens, width)
    values = normal(rng, tokens, slots, width)
    order = rng.permutation(tokens * slots).astype(np.int32)
    cut = len(order) // 3
    parts = [
        Contributions(
            ids // slots, ids % slots, np.ascontiguousarray(values[ids // slots, ids % slots])
        )
        for ids in (order[:cut], order[cut:])
    ]
    total = values[:, 0].copy()
    for slot in range(1, slots):
        total += values[:, slot]
    np.testing.assert_array_equal(dense.combine(residual, parts, slots), residual + total)


def test_combine_refuses_a_hole_and_a_double(native):
    """A slot that nobody, or two, filled is our bug, and says so."""
    residual, values = np.zeros((1, 4), np.float32), np.zeros((2, 4), np.float32)
    zeros, both = np.zeros(2, np.int32), np.array([0, 1], np.int32)
    native.combine(residual, [Contributions(zeros, both, values)], 2)
    with pytest.raises(ValueError, match="exactly one"):
        native.combine(residual, [Contributions(zeros, zeros, values)], 2)
    with pytest.raises(ValueError, match="exactly one"):
        native.combine(residual, [Contributions(zeros[:1], zeros[:1], values[:1])], 2)


@pytest.mark.parametrize("block", [2**31 - 1, -1, 5])
def test_the_core_refuses_what_lies_beyond_the_cache(native, block):
    """A mistake of ours is a ValueError at the boundary, never a read out of bounds."""
    rng = np.random.default_rng(1)
    cache, table = filled_cache(rng, 8, type=CacheType.F32, block_tokens=4, kv_heads=1, head_dim=16)
    q = np.zeros((1, 1, 16), np.float32)
    broken = np.array([block, 0], np.int32)
    rule = Attending(1.0)
    with pytest.raises(ValueError, match="beyond the cache"):
        native.attention(q, np.zeros(1, np.int32), [token_run(0, 1, broken)], cache, rule)
    with pytest.raises(ValueError, match="beyond the block table"):
        native.attention(q, np.array([8], np.int32), [token_run(0, 1, table)], cache, rule)
    rope = native.rope_table(np.zeros(1, np.int32), np.zeros(8))
    with pytest.raises(ValueError, match="slot lies beyond"):
        native.prepare_heads(
            q, q, q, HeadNorm(None, None, 0.0), rope, cache, np.array([block * 4 % 2**31], np.int32)
        )


def test_the_core_refuses_values_of_no_size(native):
    """Bytes that are no whole number of values per token, and outputs and values of another size than the cache's."""
    shape = CacheShape(CacheType.F32, 2, 4, 1, 16, own_value_dim=8)
    cache, at = empty_cache(shape), np.zeros(1, np.int32)
    rope = native.rope_table(at, np.zeros(8))
    q, norm = np.zeros((1, 1, 16), np.float32), HeadNorm(None, None, 0.0)
    with pytest.raises(ValueError, match="those of the cache's values"):
        native.prepare_heads(q, q, q, norm, rope, cache, at)
    for broken in (cache.values[..., :-4], cache.values[..., :0], cache.values[:1]):
        odd = replace(cache, values=np.ascontiguousarray(broken))
        with pytest.raises(ValueError, match="values must"):
            native.attention(q, at, [token_run(0, 1, at)], odd, Attending(1.0))


def test_the_core_refuses_windows_and_temperatures_without_a_size(native):
    """A chunk of no tokens would divide by zero, and so would a length of none."""
    cache, table = filled_cache(
        np.random.default_rng(1), 9, type=CacheType.F32, block_tokens=16, kv_heads=1, head_dim=16
    )
    q, at, runs = np.zeros((1, 1, 16), np.float32), np.zeros(1, np.int32), [token_run(0, 1, table)]
    for rule, what in (
        (Attending(0.1, chunked=True), "chunks have a size"),
        (Attending(0.1, temperature=Temperature(0.1, 0)), "has a length"),
        (Attending(0.1, temperature=Temperature(0.1, 8, -1)), "no offset below zero"),
    ):
        with pytest.raises(ValueError, match=what):
            native.attention(q, at, runs, cache, rule)


def test_an_instruction_set_that_is_not_there_is_refused():
    """Kernels of another machine are never called."""
    with pytest.raises(ValueError, match="instruction set"):
        _native.Core("vax", 1)

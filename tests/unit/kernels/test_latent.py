"""The kernels of latent attention in every instruction set, and their NumPy twin: one body of tests over all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.compare import assert_within
from tests.support.kernel_cases import DENSE_ISAS, ISAS, exact_product, normal_weight
from tests.unit.kernels.test_dense import (
    ATTENDING,
    TYPES,
    attending_on,
    normal,
    slots_of,
    token_run,
)
from thermocline.kernels import _native
from thermocline.kernels.cache_format import CacheShape, CacheType, HeadShape, read_latent
from thermocline.kernels.cpu import NativeKernels
from thermocline.kernels.dense import NativeDense
from thermocline.kernels.dense_contract import Attending, LatentNorm, LayerCache, Temperature
from thermocline.kernels.dense_reference import ReferenceDense
from thermocline.kernels.reference import ReferenceKernels, decode_blocks
from thermocline.kernels.weight import HeadMatrices, WeightStack

# heads, latent, rotary, plain, block_tokens
SHAPES = [
    (4, 32, 32, 16, 16),
    (16, 512, 64, 128, 16),  # DeepSeek-V2-Lite
    (20, 96, 32, 11, 33),
    (37, 48, 16, 5, 7),  # a prime of heads, and blocks of less than a group
    (1, 21, 6, 3, 16),  # rows that no vector divides
    (12, 64, 0, 24, 16),  # no number turns
]

# Of every set, the reference, and prompts on tiles.
FORMS = [*ATTENDING, "reference"]


def limit_of(name: str, cache_type: CacheType) -> str:
    """Return the entry of the tolerances."""
    packed = name.endswith("prompts") and cache_type is not CacheType.F32
    return "attention/16 bits" if packed else "attention/float32, packed cache"


def kernels_on(name: str, threads: int) -> NativeKernels | ReferenceKernels:
    """Return the kernels of a name of `FORMS`."""
    return ReferenceKernels() if name == "reference" else NativeKernels(name.split()[0], threads)


@pytest.fixture(params=[*DENSE_ISAS, "reference"])
def dense(request):
    """Each implementation."""
    if request.param == "reference":
        return ReferenceDense()
    return NativeDense(_native.Core(request.param, 2))


class Sequence:
    """A sequence whose rows are in a cache, and its queries."""

    def __init__(self, dense, sizes, context: int, cache_type: CacheType) -> None:
        heads, latent, rotary, plain, block_tokens = sizes
        rng, blocks = np.random.default_rng(context), -(-context // block_tokens)
        shape = CacheShape(cache_type, blocks + 2, block_tokens, 1, latent + rotary, latent)
        # Places that nothing was stored in hold NaN, where the type has one.
        keys = np.full(shape.array_shape, 0 if cache_type is CacheType.Q8_0 else 255, np.uint8)
        self.cache = LayerCache(shape, keys, np.zeros(shape.value_shape, np.uint8))
        self.before = keys.copy()
        self.table = rng.permutation(blocks + 2)[:blocks].astype(np.int32)
        self.positions = np.arange(context, dtype=np.int32)
        self.slots = slots_of(self.table, self.positions, block_tokens)
        self.given_q = normal(rng, context, heads, plain + rotary)
        self.absorbed = normal(rng, context, heads, latent)
        self.kv = normal(rng, context, latent + rotary)
        self.norm = LatentNorm(1 + normal(rng, latent, scale=0.1), 1e-6)
        self.rope = dense.rope_table(
            self.positions, 1e4 ** (-np.arange(0, rotary, 2) / rotary), magnitude=1.1
        )
        self.q = self.given_q.copy()
        dense.prepare_latent(self.q, self.kv, self.norm, self.rope, self.cache, self.slots)
        self.queries = np.concatenate((self.absorbed, self.q[..., plain:]), axis=-1)

    def attend(self, dense, first: int, last: int, heat: Temperature | None = None) -> np.ndarray:
        """Return what the tokens [first, last) read."""
        rows = slice(first, last)
        run = token_run(0, last - first, self.table)
        q = np.ascontiguousarray(self.queries[rows])
        rule = Attending(0.2, temperature=heat)
        return dense.attention(q, self.positions[rows], [run], self.cache, rule)


def factor_at(heat: Temperature | None, position: int) -> float:
    if heat is None:
        return 1.0
    return 1.0 + heat.scale * np.log1p((position + heat.offset) // heat.length)


def fits(sizes, cache_type) -> bool:
    return cache_type is not CacheType.Q8_0 or (sizes[1] + sizes[2]) % 32 == 0


HEAT = Temperature(0.7, 9)
NAMED = list(zip(SHAPES, ["Q8_0", "Q8_0", "F16", "F32", "BF16", "F16"], strict=True))
CASES = [(sizes, kind) for sizes in SHAPES for kind in TYPES if fits(sizes, kind)]
WIDEST = (2, 1088, 64, 8, 16)
"""Rows as wide as any may be."""
CASES += [(WIDEST, CacheType.F16), (WIDEST, CacheType.Q8_0)]


@pytest.mark.parametrize(("sizes", "cache_type"), CASES)
def test_rows_are_normed_turned_and_stored(dense, sizes, cache_type):
    """Queries and rows are the formula in double; neighbours turn together; no other byte of the cache changes."""
    _, latent, _, plain, _ = sizes
    seq = Sequence(dense, sizes, 37, cache_type)
    cos, sin = seq.rope.cosines.astype(float), seq.rope.sines.astype(float)

    def turned(x):
        a, b = x[..., 0::2].astype(float), x[..., 1::2].astype(float)
        c, s = (part.reshape(len(x), *[1] * (x.ndim - 2), -1) for part in (cos, sin))
        return np.stack((a * c - b * s, b * c + a * s), axis=-1).reshape(x.shape)

    assert np.array_equal(seq.q[..., :plain], seq.given_q[..., :plain])
    wanted = turned(seq.given_q[..., plain:])
    np.testing.assert_allclose(seq.q[..., plain:], wanted, rtol=1e-6, atol=1e-6)
    kv = seq.kv.astype(float)
    scale = 1 / np.sqrt(np.square(kv[:, :latent]).mean(axis=1, keepdims=True) + 1e-6)
    rows = np.concatenate((kv[:, :latent] * scale * seq.norm.gain, turned(kv[:, latent:])), axis=1)
    found = read_latent(seq.cache.shape, seq.cache.keys, seq.slots)
    error = {CacheType.F32: 1e-6, CacheType.F16: 2e-3, CacheType.BF16: 1e-2, CacheType.Q8_0: 3e-2}
    np.testing.assert_allclose(found, rows, rtol=error[cache_type], atol=error[cache_type])
    others = np.setdiff1d(np.arange(seq.before.size // seq.cache.shape.row_bytes), seq.slots)
    by_row = (-1, seq.cache.shape.row_bytes)
    assert np.array_equal(
        seq.cache.keys.reshape(by_row)[others], seq.before.reshape(by_row)[others]
    )


@pytest.mark.parametrize(
    ("sizes", "cache_type", "context", "heat"),
    [*((*case, context, None) for case in CASES for context in (1, 530)), (*CASES[0], 530, HEAT)],
)
@pytest.mark.parametrize("name", FORMS)
def test_attention_reads_the_first_numbers_of_rows(name, sizes, cache_type, context, heat):
    """Softmax over all numbers of the rows up to a token, weighing their first ones; over spans, too."""
    latent, num_tokens, dense = sizes[1], min(context, 3), attending_on(name)
    seq = Sequence(dense, sizes, context, cache_type)
    rows = read_latent(seq.cache.shape, seq.cache.keys, seq.slots).astype(float)
    found = seq.attend(dense, context - num_tokens, context, heat)
    expected = np.empty(found.shape)
    for token in range(num_tokens):
        position = context - num_tokens + token
        seen = rows[: position + 1]
        scale = 0.2 * factor_at(heat, position)
        scores = seq.queries[position].astype(float) @ seen.T * scale  # [heads, positions]
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        expected[token] = weights / weights.sum(axis=1, keepdims=True) @ seen[:, :latent]
    assert_within(found, expected, limit_of(name, cache_type))


@pytest.mark.parametrize("name", ATTENDING)
@pytest.mark.parametrize(("sizes", "cache_type"), CASES)
def test_a_token_does_not_depend_on_its_chunk(name, sizes, cache_type):
    """Bit for bit: token by token with one thread, and all together with three."""
    one, three = attending_on(name, 1), attending_on(name, 3)
    seq = Sequence(one, sizes, 83, cache_type)
    whole = seq.attend(three, 0, 83)
    for token in (0, 1, 15, 16, 63, 64, 82):
        assert np.array_equal(seq.attend(one, token, token + 1)[0], whole[token])


def head_matrices(sizes, name: str) -> HeadMatrices:
    """Return matrices of all heads with scales of their own. name: the type, or F32 where its blocks do not fit."""
    heads, latent, _, plain, _ = sizes
    rng, value_dim = np.random.default_rng(9), plain + 2
    stacks = []
    for rows, cols in ((latent, plain), (value_dim, latent)):
        kind = name if cols % 32 == 0 else "F32"
        matrices = [normal_weight(rng, kind, rows, cols) for _ in range(heads)]
        raw = np.stack([matrix.raw for matrix in matrices])
        scales = 1 + normal(rng, heads, scale=0.1)
        stacks.append(WeightStack("b", matrices[0].format, raw, cols, scales))
    return HeadMatrices(*stacks)


def decoded(stack: WeightStack) -> np.ndarray:
    """Return float64 [heads, rows, cols]."""
    rows = decode_blocks(stack.raw.reshape(-1, stack.raw.shape[-1]), stack.format.type_id)
    return rows.reshape(*stack.raw.shape[:2], -1) * stack.scales[:, None, None].astype(float)


@pytest.mark.parametrize(
    ("sizes", "name", "context", "heat"),
    [*((*case, context, None) for case in NAMED for context in (1, 530)), (*NAMED[0], 530, HEAT)],
)
@pytest.mark.parametrize("form", FORMS)
def test_keys_and_values_of_heads_are_made_of_rows(form, sizes, name, context, heat):
    """Softmax over each head's own keys, weighing its own values: what the model's definition says."""
    one, prompt = kernels_on(form, 2), form.endswith("prompts")
    up, num_tokens = head_matrices(sizes, name), min(context, 3)
    seq = Sequence(one.dense, sizes, context, CacheType.F16)
    latent, first = sizes[1], context - num_tokens
    rows = read_latent(seq.cache.shape, seq.cache.keys, seq.slots).astype(float)
    made = np.einsum("pn,hnd->phd", rows[:, :latent], decoded(up.keys))
    turned = np.broadcast_to(rows[:, None, latent:], (*made.shape[:2], sizes[2]))
    keys = np.concatenate((made, turned), axis=-1)
    values = np.einsum("pn,hdn->phd", rows[:, :latent], decoded(up.values))
    run, q = token_run(0, num_tokens, seq.table), seq.q[first:].copy()
    rule = Attending(0.2, temperature=heat)
    positions = seq.positions[first:]
    found = one.expanded_attention(up, q, positions, [run], seq.cache, rule, prompt=prompt)
    expected = np.empty(found.shape)
    for token in range(num_tokens):
        seen = first + token + 1
        scores = np.einsum("hd,phd->hp", q[token].astype(float), keys[:seen])
        scores *= 0.2 * factor_at(heat, first + token)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        expected[token] = np.einsum("hp,phd->hd", weights, values[:seen])
    assert_within(found, expected, limit_of(form, CacheType.F16))


@pytest.mark.parametrize("form", FORMS)
def test_the_expanded_form_has_no_sinks(form):
    """To ask for them is our bug."""
    sizes, one = SHAPES[0], kernels_on(form, 1)
    seq = Sequence(one.dense, sizes, 3, CacheType.F16)
    rule, runs = Attending(0.2, sinks=np.zeros(4, np.float32)), [token_run(0, 3, seq.table)]
    up, at = head_matrices(sizes, "F32"), seq.positions
    with pytest.raises(AssertionError, match="no sinks"):
        one.expanded_attention(up, seq.q, at, runs, seq.cache, rule)


@pytest.mark.parametrize("name", ATTENDING)
@pytest.mark.parametrize(("sizes", "cache_type"), CASES)
def test_an_expanded_token_does_not_depend_on_its_chunk(name, sizes, cache_type):
    """Bit for bit: token by token with one thread, and all together with three."""
    one, three = kernels_on(name, 1), kernels_on(name, 3)
    up, seq = head_matrices(sizes, "Q8_0"), Sequence(one.dense, sizes, 83, cache_type)

    def attend(kernels, first, last):
        run, q = token_run(0, last - first, seq.table), seq.q[first:last].copy()
        positions, rule = seq.positions[first:last], Attending(0.2)
        prompt = name.endswith("prompts")
        return kernels.expanded_attention(up, q, positions, [run], seq.cache, rule, prompt=prompt)

    whole = attend(three, 0, 83)
    for token in (0, 15, 16, 63, 64, 82):
        assert np.array_equal(attend(one, token, token + 1)[0], whole[token])
    assert np.array_equal(attend(one, 30, 83), whole[30:])


@pytest.mark.parametrize("name", ["F32", "BF16", "Q8_0", "Q4_0", "Q5_K"])
@pytest.mark.parametrize("kernels", [*ISAS, "reference"])
def test_each_head_has_a_matrix(kernels, name):
    """A head's product is the one of its matrix alone, to the bit, whatever is computed beside it."""
    rng, heads, rows = np.random.default_rng(5), 5, 45
    cols, is_slow = 256 if name == "Q5_K" else 96, kernels == "reference"
    matrices = [normal_weight(rng, name, rows, cols) for _ in range(heads)]
    raw = np.stack([matrix.raw for matrix in matrices])
    stack = WeightStack("k_b", matrices[0].format, raw, cols, normal(rng, heads))
    one = ReferenceKernels() if is_slow else NativeKernels(kernels, threads=2)
    x = normal(rng, 3 if is_slow else 300, heads, cols)
    found = one.multiply_heads(stack, x)
    for head in range(heads):
        alone = one.matmul(stack[head], np.ascontiguousarray(x[:, head]))
        assert np.array_equal(found[:, head], alone)
    assert np.array_equal(one.multiply_heads(stack, np.ascontiguousarray(x[1:2]))[0], found[1])
    exact = np.stack([exact_product(stack[n], x[:2, n]) * stack[n].scale for n in range(heads)], 1)
    assert_within(found[:2], exact, "product/int8 activations")


def test_a_token_takes_one_row():
    """576 numbers, and no value beside them."""
    shape = CacheShape(CacheType.F16, 3, 16, 1, 576, 512)
    assert shape.value_shape == (3, 1, 0)
    assert HeadShape(1, 576, 512).token_bytes(CacheType.F16) == 2 * 576
    assert HeadShape(1, 576, 512).token_bytes(CacheType.Q8_0) == 576 // 32 * 34


def test_shapes_that_do_not_fit_are_errors():
    """The core checks what Python hands over."""
    dense = NativeDense(_native.Core(DENSE_ISAS[-1], 1))
    seq = Sequence(dense, SHAPES[0], 5, CacheType.F32)
    with pytest.raises(ValueError, match="kv"):
        dense.prepare_latent(seq.q, seq.kv[:2].copy(), seq.norm, seq.rope, seq.cache, seq.slots)
    with pytest.raises(ValueError, match="slot"):
        dense.prepare_latent(seq.q, seq.kv, seq.norm, seq.rope, seq.cache, seq.slots + 1000)
    kernels, up = NativeKernels(DENSE_ISAS[-1], threads=1), head_matrices(SHAPES[0], "F32")
    run = token_run(0, 5, seq.table)
    rule = Attending(0.2)
    for wrong in (
        replace(up, values=replace(up.values, raw=up.values.raw[:3], scales=None)),
        HeadMatrices(up.values, up.keys),
    ):
        with pytest.raises(ValueError, match=r"heads|latent|cache"):
            kernels.expanded_attention(wrong, seq.q, seq.positions, [run], seq.cache, rule)

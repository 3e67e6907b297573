"""Prompt arithmetic in matrix tiles: on the processor's own where it has them, and always emulated.

Weights and activations are rounded to bfloat16, products are added in float32.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import gguf
import numpy as np
import pytest

from scripts.kquants import LARGEST_INPUT, dequantize, quantize
from tests.support.kernel_cases import TILE_ISAS, stacked
from thermocline.errors import ConfigError
from thermocline.kernels.codebooks import CODEBOOK_SHAPES
from thermocline.kernels.contract import ExpertWork
from thermocline.kernels.cpu import NativeKernels
from thermocline.kernels.instruction_sets import best_instruction_set
from thermocline.kernels.native import load_native
from thermocline.kernels.weight import SUPPORTED_FORMATS, ExpertWeights, Weight
from thermocline.modelfile.formats import FORMATS_BY_NAME

if TYPE_CHECKING:
    from collections.abc import Sequence

NATIVE = load_native()
QUANTISED = sorted(SUPPORTED_FORMATS - {"F32", "F16", "BF16"})
TILED = [*QUANTISED, "BF16"]
BY_GGUF = ["MXFP4", "Q4_1", "Q5_0", "Q5_1", "TQ1_0", "TQ2_0"]
# Two roundings to eight bits each: 2 * (2**-9)**2 / 3 relative to a normal number's square, and some.
NMSE_LIMIT = 2e-5
BF16_NMSE_LIMIT = 1e-13  # weights and x are as they are

pytestmark = pytest.mark.skipif(not TILE_ISAS, reason="needs a processor with AVX-512")


@pytest.fixture(params=TILE_ISAS)
def isa(request) -> str:
    """Each set that has tiles."""
    return request.param


@pytest.fixture
def kernels(isa, monkeypatch) -> NativeKernels:
    """Two threads of each set, with output memory poisoned by NaN so that a hole shows."""
    real_empty = np.empty

    def poisoned(*args, **kwargs):
        out = real_empty(*args, **kwargs)
        if out.dtype.kind == "f":
            out.fill(np.nan)
        return out

    monkeypatch.setattr(np, "empty", poisoned)
    return NativeKernels(isa, 2)


def encoded(rng, name: str, values: np.ndarray) -> Weight:
    """`values` [rows, cols] rounded to a type; for types without a quantiser, random finite blocks."""
    rows, cols = values.shape
    block = FORMATS_BY_NAME[name]
    if name in BY_GGUF:
        raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType[name])
    elif name in LARGEST_INPUT:
        raw = quantize(values, name)
    else:
        row_bytes = cols // block.block_elements * block.block_bytes
        raw = rng.integers(0, 256, (8 * rows + 8, row_bytes), np.uint8)
        with np.errstate(all="ignore"):
            raw = raw[np.isfinite(dequantize(raw, name)).all(axis=1)][:rows]
        assert len(raw) == rows
    return Weight("w", block, np.ascontiguousarray(raw).view(np.uint8), cols)


def random_weight(rng, name: str, rows: int, cols: int, gain: float = 1.0) -> Weight:
    return encoded(rng, name, (rng.standard_normal((rows, cols)) * gain).astype(np.float32))


def decoded(weight: Weight) -> np.ndarray:
    return dequantize(weight.raw, weight.format.name).astype(np.float32)


def per_row(weight: Weight, products: np.ndarray) -> np.ndarray:
    """Products [tokens, rows] over each row's length: random blocks have scales of any size."""
    return products / np.linalg.norm(decoded(weight).astype(np.float64), axis=1)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Nearest even, subnormal numbers to zero; as float32."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.abs(x) < 2.0**-126, np.float32(0), rounded.view(np.float32))


def as_packed(x: np.ndarray, name: str) -> np.ndarray:
    """What tiles make of activations, in double: for BF16 weights what rounding leaves is added twice, rounded."""
    packed = to_bf16(x).astype(np.float64)
    for _ in range(2 if name == "BF16" else 0):
        packed += to_bf16((x - packed).astype(np.float32))
    return packed


def nmse(actual: np.ndarray, exact: np.ndarray) -> float:
    return float(np.square(actual - exact).sum() / np.square(exact).sum())


def tokens_of(rng, count: int, cols: int) -> np.ndarray:
    return rng.standard_normal((count, cols)).astype(np.float32)


@pytest.mark.parametrize("name", TILED)
def test_every_weight_is_rounded_to_the_nearest_bfloat16(kernels, name):
    """Tokens with a single 1 read the weights out: to the bit the rounded float32 value."""
    rng = np.random.default_rng(1)
    weight = random_weight(rng, name, 35, 512)
    expected = to_bf16(decoded(weight))
    actual = kernels.matmul(weight, np.eye(512, dtype=np.float32), prompt=True).T
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("name", TILED)
@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (17, 37), (40, 64)])
def test_products_are_near_the_exact_ones(kernels, name, tokens, rows):
    """NMSE against products in double, with odd numbers of rows and tokens."""
    rng = np.random.default_rng(tokens)
    weight = random_weight(rng, name, rows, 768)
    x = tokens_of(rng, tokens, 768)
    exact = x.astype(np.float64) @ decoded(weight).astype(np.float64).T
    rounded = as_packed(x, name) @ to_bf16(decoded(weight)).astype(np.float64).T
    actual = kernels.matmul(weight, x, prompt=True)
    assert nmse(per_row(weight, actual), per_row(weight, rounded)) < 1e-10
    if rows > 1:  # a single sum may cancel
        limit = BF16_NMSE_LIMIT if name == "BF16" else NMSE_LIMIT
        assert nmse(per_row(weight, actual), per_row(weight, exact)) < limit


def test_products_are_added_in_the_order_of_the_manual(kernels):
    """Per 32 columns even and odd ones apart, each in order, then joined, then added: to the bit."""
    rng = np.random.default_rng(14)
    weight = random_weight(rng, "BF16", 16, 320)
    x = to_bf16(tokens_of(rng, 16, 320))
    # Products of two bfloat16 and their sum with a float32 are exact in double, or nearly always.
    products = x[:, None, :].astype(np.float64) * decoded(weight)[None].astype(np.float64)
    expected = np.zeros((16, 16), np.float32)
    for step in np.split(products, 10, axis=2):
        even = odd = np.zeros((16, 16), np.float32)
        for k in range(0, 32, 2):
            even = (even + step[:, :, k]).astype(np.float32)
            odd = (odd + step[:, :, k + 1]).astype(np.float32)
        expected = expected + (even + odd)
    np.testing.assert_array_equal(kernels.matmul(weight, x, prompt=True), expected)


@pytest.mark.parametrize("name", ["Q4_0", "Q8_0", "IQ4_NL", "BF16"])
@pytest.mark.parametrize("cols", [32, 64, 96, 288, 544])
def test_spans_need_not_be_full(kernels, name, cols):
    """Columns of which 256 is no divisor."""
    rng = np.random.default_rng(cols)
    weight = random_weight(rng, name, 50, cols)
    x = tokens_of(rng, 33, cols)
    rounded = as_packed(x, name) @ to_bf16(decoded(weight)).astype(np.float64).T
    assert nmse(kernels.matmul(weight, x, prompt=True), rounded) < 1e-10


@pytest.mark.parametrize(
    ("rows", "cols"), [(1, 1), (3, 7), (17, 31), (33, 33), (5, 257), (48, 300)]
)
def test_bf16_weights_of_any_length(kernels, rows, cols):
    """Columns that no tile divides are followed by zeros, whatever lies behind them."""
    rng = np.random.default_rng(cols)
    weight = random_weight(rng, "BF16", rows, cols)
    x = tokens_of(rng, 19, cols)
    rounded = as_packed(x, "BF16") @ decoded(weight).astype(np.float64).T
    np.testing.assert_allclose(kernels.matmul(weight, x, prompt=True), rounded, atol=1e-4)


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q2_K", "BF16"])
def test_a_token_does_not_feel_its_neighbours(kernels, name):
    """A token alone equals, to the bit, itself among any number of others, at any place."""
    rng = np.random.default_rng(4)
    weight = random_weight(rng, name, 37, 768)
    x = tokens_of(rng, 300, 768)
    whole = kernels.matmul(weight, x, prompt=True)
    for count in [*range(1, 41), 127, 128, 129, 160, 255, 256, 257]:
        part = kernels.matmul(weight, x[300 - count :], prompt=True)
        np.testing.assert_array_equal(part, whole[300 - count :])


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_threads_do_not_matter(isa, threads):
    """Several products of one x, one of them in float32, are the same to the bit for any threads."""
    rng = np.random.default_rng(5)
    names = ["Q4_K", "F32", "Q8_0", "BF16", "F16"]
    weights = [random_weight(rng, name, 40 * i + 33, 512) for i, name in enumerate(names)]
    x = tokens_of(rng, 150, 512)
    kernels, alone = NativeKernels(isa, threads), NativeKernels(isa, 1)
    for product, weight in zip(kernels.multiply_all(weights, x, prompt=True), weights, strict=True):
        np.testing.assert_array_equal(product, alone.matmul(weight, x, prompt=True))


@pytest.mark.parametrize("rows", [16, 37])
def test_the_residual_is_added(kernels, rows):
    """add + product, to the bit."""
    rng = np.random.default_rng(6)
    weight = random_weight(rng, "Q5_K", rows, 512)
    x, add = tokens_of(rng, 20, 512), tokens_of(rng, 20, rows)
    expected = add + kernels.matmul(weight, x, prompt=True)
    np.testing.assert_array_equal(kernels.matmul(weight, x, add, prompt=True), expected)


@pytest.mark.parametrize("name", ["F32", "F16"])
def test_wider_weights_keep_float32(kernels, name):
    """F32 and F16 weights have one arithmetic in prompts and in decoding."""
    rng = np.random.default_rng(7)
    weight = random_weight(rng, name, 37, 100)
    x = tokens_of(rng, 20, 100)
    np.testing.assert_array_equal(kernels.matmul(weight, x, prompt=True), kernels.matmul(weight, x))


def test_what_is_not_finite_stays_with_its_token(kernels):
    """An infinity or NaN in one token leaves its neighbours as they are."""
    rng = np.random.default_rng(8)
    weight = random_weight(rng, "Q4_K", 37, 512)
    x = tokens_of(rng, 20, 512)
    clean = kernels.matmul(weight, x, prompt=True)
    x[3, 5], x[7, 300] = np.inf, np.nan
    spoiled = kernels.matmul(weight, x, prompt=True)
    others = np.delete(np.arange(20), [3, 7])
    np.testing.assert_array_equal(spoiled[others], clean[others])
    assert not np.isfinite(spoiled[[3, 7]]).any()


@cache
def expert(
    formats: tuple[str, str, str], hidden: int, intermediate: int, seed: int
) -> ExpertWeights:
    rng = np.random.default_rng(seed)
    gate, up, down = formats
    return ExpertWeights(
        random_weight(rng, gate, intermediate, hidden, gain=2 / np.sqrt(hidden)),
        random_weight(rng, up, intermediate, hidden, gain=2 / np.sqrt(hidden)),
        random_weight(rng, down, hidden, intermediate, gain=2 / np.sqrt(intermediate)),
    )


class Layer:
    """Experts with random routing: `counts[e]` pairs for expert e, some tokens more than once."""

    def __init__(
        self,
        formats: tuple[str, str, str],
        counts: Sequence[int],
        hidden: int = 256,
        intermediate: int = 256,
        tokens: int = 40,
    ) -> None:
        rng = np.random.default_rng(9)
        self.x = tokens_of(rng, tokens, hidden)
        experts = [expert(formats, hidden, intermediate, e) for e in range(len(counts))]
        pairs = sum(counts)
        self.rows = rng.integers(0, tokens, pairs).astype(np.int32)
        self.scale = (rng.random(pairs) + 0.1).astype(np.float32)
        self.work = ExpertWork(
            stacked(experts),
            np.arange(len(counts), dtype=np.int32),
            np.array(counts, np.int32),
            self.x,
            self.rows,
            self.scale,
        )

    def exact(self) -> np.ndarray:
        """[pairs, hidden] in double."""
        out, start = [], 0
        for index, count in enumerate(self.work.counts.tolist()):
            pairs, weights = slice(start, start + count), self.work.stack[index]
            x = self.x[self.rows[pairs]].astype(np.float64)
            gate, up, down = (
                decoded(part).astype(np.float64)
                for part in (weights.gate, weights.up, weights.down)
            )
            g = x @ gate.T
            out.append((g / (1 + np.exp(-g)) * (x @ up.T)) @ down.T * self.scale[pairs, None])
            start += count
        return np.concatenate(out)


Q4_Q6 = ("Q4_K", "Q4_K", "Q6_K")


@pytest.mark.parametrize("counts", [[1], [16, 17], [40, 3, 0, 33], [300, 1], [128, 129]])
def test_experts_are_near_the_formula(kernels, counts):
    """Relative error of scale * down(silu(gate x) * up x), at most 0.006."""
    layer = Layer(Q4_Q6, counts)
    exact = layer.exact()
    assert np.sqrt(nmse(kernels.expert_outputs(layer.work, prompt=True), exact)) < 0.006


@pytest.mark.parametrize(
    "formats",
    [("Q8_0", "Q4_0", "Q5_1"), ("BF16", "Q5_K", "BF16"), ("BF16",) * 3, ("Q5_K", "Q6_K", "Q8_0")],
)
@pytest.mark.parametrize(("hidden", "intermediate"), [(256, 256), (512, 288), (256, 544)])
def test_experts_of_any_types_and_widths(kernels, formats, hidden, intermediate):
    """Gate, up and down of different types, widths that no panel divides."""
    if intermediate % 256 and formats[2] == "Q6_K":
        pytest.skip("not a row of this type")
    layer = Layer(formats, [23], hidden, intermediate)
    limit = 2e-5 if set(formats) == {"BF16"} else 0.006
    assert np.sqrt(nmse(kernels.expert_outputs(layer.work, prompt=True), layer.exact())) < limit


@pytest.mark.parametrize(("hidden", "intermediate"), [(40, 17), (33, 48), (100, 80), (7, 5)])
def test_experts_of_odd_sizes(kernels, hidden, intermediate):
    """BF16 experts whose sizes no tile divides."""
    layer = Layer(("BF16",) * 3, [9, 20, 65, 129], hidden, intermediate)
    assert np.sqrt(nmse(kernels.expert_outputs(layer.work, prompt=True), layer.exact())) < 2e-5


def slots_of(rng, tokens: int, pairs: int, slots: int) -> np.ndarray:
    return rng.integers(0, pairs, (tokens, slots)).astype(np.int32)


@pytest.mark.parametrize(
    "formats",
    [Q4_Q6, ("Q4_K", "F16", "Q6_K"), ("F16",) * 3],
    ids=["tiles", "mixed", "float32"],
)
@pytest.mark.parametrize("hidden", [256, 512])
def test_the_sum_is_that_of_the_outputs_in_slot_order(kernels, formats, hidden):
    """residual + ((slot 0 + slot 1) + ...), to the bit."""
    layer = Layer(formats, [40, 5, 150], hidden)
    rng = np.random.default_rng(10)
    pair_of, residual = slots_of(rng, 40, 195, 3), tokens_of(rng, 40, hidden)
    outputs = kernels.expert_outputs(layer.work, prompt=True)
    expected = outputs[pair_of[:, 0]]
    for slot in (1, 2):
        expected = expected + outputs[pair_of[:, slot]]
    actual = kernels.expert_sum(layer.work, pair_of, residual, prompt=True)
    np.testing.assert_array_equal(actual, expected + residual)


@pytest.mark.parametrize("count", [1, 5, 16, 31, 40])
def test_a_pair_does_not_feel_its_neighbours(isa, count):
    """An expert's pairs, cut anywhere, computed by any number of threads, are the same to the bit."""
    layer = Layer(Q4_Q6, [257])
    whole = NativeKernels(isa, 3).expert_outputs(layer.work, prompt=True)
    part = replace(
        layer.work,
        counts=np.array([count], np.int32),
        rows=layer.rows[257 - count :].copy(),
        scale=layer.scale[257 - count :].copy(),
    )
    alone = NativeKernels(isa, 1).expert_outputs(part, prompt=True)
    np.testing.assert_array_equal(alone, whole[257 - count :])


def test_extreme_gates_give_their_limits(kernels):
    """silu is 0 far below zero and the gate itself far above it, without NaN."""
    one = np.eye(16, 32, dtype=np.float32)
    gate, up, down = (
        encoded(None, "BF16", part) for part in (one, np.ones((16, 32), np.float32), one.T.copy())
    )
    x = np.zeros((4, 32), np.float32)
    x[:, 0] = [-1000.0, -90.0, 0.0, 1000.0]
    rows, scale = np.arange(4, dtype=np.int32), np.ones(4, np.float32)
    stack, counts = stacked([ExpertWeights(gate, up, down)]), np.array([4], np.int32)
    work = ExpertWork(stack, np.zeros(1, np.int32), counts, x, rows, scale)
    out = kernels.expert_outputs(work, prompt=True)[:, 0]
    np.testing.assert_allclose(out, [0.0, 0.0, 0.0, 1e6], rtol=5e-3, atol=1e-6)


@pytest.mark.parametrize("name", sorted(SUPPORTED_FORMATS))
def test_decoding_is_the_arithmetic_of_avx512(isa, name):
    """Without `prompt` a set with tiles gives the bits of the set that it extends."""
    rng = np.random.default_rng(11)
    weight = random_weight(rng, name, 37, 512)
    x = tokens_of(rng, 5, 512)
    np.testing.assert_array_equal(
        NativeKernels(isa, 2).matmul(weight, x), NativeKernels("avx512", 2).matmul(weight, x)
    )


def test_experts_decode_with_the_arithmetic_of_avx512(isa):
    """The same for experts and their sum."""
    layer = Layer(Q4_Q6, [3, 20])
    rng = np.random.default_rng(12)
    pair_of, residual = slots_of(rng, 40, 23, 2), tokens_of(rng, 40, 256)
    tiles, plain = NativeKernels(isa, 2), NativeKernels("avx512", 2)
    np.testing.assert_array_equal(
        tiles.expert_outputs(layer.work), plain.expert_outputs(layer.work)
    )
    np.testing.assert_array_equal(
        tiles.expert_sum(layer.work, pair_of, residual),
        plain.expert_sum(layer.work, pair_of, residual),
    )


@pytest.mark.parametrize("name", ["portable", "avx2", "avx512"])
def test_sets_without_tiles_have_one_arithmetic(name):
    """`prompt` changes nothing there."""
    if not dict(NATIVE.instruction_sets()).get(name):
        pytest.skip("not on this machine")
    rng = np.random.default_rng(13)
    weight = random_weight(rng, "Q4_K", 37, 512)
    x = tokens_of(rng, 20, 512)
    kernels = NativeKernels(name, 1)
    np.testing.assert_array_equal(kernels.matmul(weight, x, prompt=True), kernels.matmul(weight, x))


@pytest.mark.skipif("amx" not in TILE_ISAS, reason="needs a processor with tiles")
def test_emulation_is_the_processors_arithmetic():
    """The written-out tiles give the bits of the real ones, tiny and huge numbers included."""
    rng = np.random.default_rng(15)
    weight = random_weight(rng, "Q4_K", 64, 512)
    x = tokens_of(rng, 40, 512) * (10.0 ** rng.integers(-38, 36, (40, 1))).astype(np.float32)
    real, written = (NativeKernels(name, 1) for name in ("amx", "amx_emulated"))
    np.testing.assert_array_equal(
        real.matmul(weight, x, prompt=True), written.matmul(weight, x, prompt=True)
    )


def test_emulation_is_for_those_who_ask():
    """It is no choice of "auto", not in the list of sets, and not in the text of an error."""
    emulated = set(NATIVE.emulated_sets())
    assert emulated == {"amx_emulated"}
    assert best_instruction_set(NATIVE) not in emulated
    assert not emulated & set(dict(NATIVE.instruction_sets()))
    with pytest.raises(ConfigError) as caught:
        NativeKernels("amy")
    assert "emulated" not in str(caught.value)


def test_every_type_with_a_codebook_was_among_those_tested():
    """The list of types is the whole contract's."""
    assert set(CODEBOOK_SHAPES) <= set(QUANTISED)

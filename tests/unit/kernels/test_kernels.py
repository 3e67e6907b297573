"""Every implementation of the kernel contract: one body of tests over all of them."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from scripts.kquants import dequantize, quantize
from thermocline.errors import NativeModuleError
from thermocline.kernels.contract import SUPPORTED_FORMATS, ExpertWeights, Weight
from thermocline.kernels.cpu import NativeKernels
from thermocline.kernels.reference import ReferenceKernels
from thermocline.modelfile.formats import FORMATS_BY_NAME

FORMATS = sorted(SUPPORTED_FORMATS)
PLAIN = ["BF16", "F16", "F32"]


@pytest.fixture(params=[NativeKernels, ReferenceKernels], ids=["native", "reference"])
def kernels(request, monkeypatch):
    """Each implementation, with output memory poisoned by NaN so that a hole shows."""
    real_empty = np.empty

    def poisoned(*args, **kwargs):
        out = real_empty(*args, **kwargs)
        if out.dtype.kind == "f":
            out.fill(np.nan)
        return out

    monkeypatch.setattr(np, "empty", poisoned)
    return request.param()


def make_weight(rng, format_name: str, rows: int, cols: int, gain: float = 1.0) -> Weight:
    values = (rng.standard_normal((rows, cols)) * gain / np.sqrt(cols)).astype(np.float32)
    return Weight("w", FORMATS_BY_NAME[format_name], quantize(values, format_name), cols)


def decoded(weight: Weight) -> np.ndarray:
    return dequantize(weight.raw, weight.format.name).astype(np.float64)


@pytest.mark.parametrize("format_name", FORMATS)
def test_decode_rows_equals_the_gguf_package_to_the_bit(kernels, format_name):
    """Decoded rows are exactly those of the independent decoder, in the order asked for."""
    weight = make_weight(np.random.default_rng(1), format_name, 9, 512)
    rows = np.array([8, 0, 3, 3], np.int32)
    np.testing.assert_array_equal(
        kernels.decode_rows(weight, rows), dequantize(weight.raw, format_name)[rows]
    )


@pytest.mark.parametrize("format_name", FORMATS)
def test_random_block_bytes_decode_like_the_gguf_package(kernels, format_name):
    """Any bytes, not only those that a quantiser makes, decode alike; infinities and NaN included."""
    info = FORMATS_BY_NAME[format_name]
    raw = np.random.default_rng(2).integers(0, 256, (64, info.block_bytes * 2), np.uint8)
    weight = Weight("w", info, raw, info.block_elements * 2)
    with np.errstate(all="ignore"):
        expected = dequantize(raw, format_name)
        actual = kernels.decode_rows(weight, np.arange(64, dtype=np.int32))
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 17])
def test_matmul_is_the_product_with_the_decoded_weight(kernels, format_name, tokens):
    """Close to the product in double, for token counts around the kernel's own blocking."""
    rng = np.random.default_rng(tokens)
    weight = make_weight(rng, format_name, 37, 256)
    x = rng.standard_normal((tokens, 256)).astype(np.float32)
    expected = x.astype(np.float64) @ decoded(weight).T
    np.testing.assert_allclose(kernels.matmul(weight, x), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("format_name", PLAIN)
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (3, 7), (5, 15), (2, 16), (4, 17), (7, 33)])
def test_matmul_handles_tails(kernels, format_name, rows, cols):
    """Row lengths that no vector width divides."""
    rng = np.random.default_rng(cols)
    weight = make_weight(rng, format_name, rows, cols)
    x = rng.standard_normal((5, cols)).astype(np.float32)
    expected = x.astype(np.float64) @ decoded(weight).T
    np.testing.assert_allclose(kernels.matmul(weight, x), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_token_does_not_feel_its_neighbours(kernels, format_name):
    """The numeric contract: a row computed alone equals, to the bit, the row computed in company."""
    rng = np.random.default_rng(4)
    weight = make_weight(rng, format_name, 21, 512)
    x = rng.standard_normal((11, 512)).astype(np.float32)
    together = kernels.matmul(weight, x)
    alone = np.concatenate([kernels.matmul(weight, x[t : t + 1]) for t in range(11)])
    np.testing.assert_array_equal(together, alone)


@pytest.mark.parametrize("format_name", FORMATS)
def test_native_products_equal_the_reference_to_the_bit(format_name):
    """Both implementations add in the same order."""
    rng = np.random.default_rng(5)
    weight = make_weight(rng, format_name, 13, 768)
    x = rng.standard_normal((6, 768)).astype(np.float32)
    native, reference = NativeKernels(), ReferenceKernels()
    np.testing.assert_array_equal(native.matmul(weight, x), reference.matmul(weight, x))


def make_expert(
    rng, formats: tuple[str, str, str], hidden: int, intermediate: int
) -> ExpertWeights:
    gate, up, down = formats
    return ExpertWeights(
        make_weight(rng, gate, intermediate, hidden, gain=2.0),
        make_weight(rng, up, intermediate, hidden),
        make_weight(rng, down, hidden, intermediate),
    )


@pytest.mark.parametrize(
    "formats",
    [("Q4_K", "Q4_K", "Q6_K"), ("Q8_0", "F16", "BF16"), ("F32",) * 3, ("Q5_K", "Q4_0", "Q8_0")],
)
@pytest.mark.parametrize("rows", [[0], [2, 0], [1, 1, 3, 2, 0], []])
def test_expert_ffn_is_the_formula(kernels, formats, rows):
    """scale * down(silu(gate x) * up x), for rows in any order, repeated, or none."""
    rng = np.random.default_rng(6)
    expert = make_expert(rng, formats, 256, 512)
    x = rng.standard_normal((4, 256)).astype(np.float32)
    scale = rng.random(len(rows)).astype(np.float32)
    gathered = x[rows].astype(np.float64)
    gate = gathered @ decoded(expert.gate).T
    hidden = gate / (1 + np.exp(-gate)) * (gathered @ decoded(expert.up).T)
    expected = hidden @ decoded(expert.down).T * scale[:, None]
    actual = kernels.expert_ffn(expert, x, np.array(rows, np.int32), scale)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=5e-6)


def test_expert_ffn_survives_extreme_gates(kernels):
    """A sigmoid far out on either side is 0 or 1, not NaN."""
    rng = np.random.default_rng(7)
    expert = make_expert(rng, ("F32",) * 3, 32, 32)
    x = np.array([[1e30] * 32, [-1e30] * 32], np.float32) * expert.gate.raw.view(np.float32)[0]
    with np.errstate(over="ignore", invalid="ignore"):
        out = kernels.expert_ffn(
            expert, x * 1e-28, np.array([0, 1], np.int32), np.ones(2, np.float32)
        )
    assert np.isfinite(out).all()


def test_native_expert_equals_the_reference_to_the_bit():
    """The sigmoid is rounded once from double in both."""
    rng = np.random.default_rng(8)
    expert = make_expert(rng, ("Q4_K", "Q4_K", "Q6_K"), 512, 256)
    x = rng.standard_normal((9, 512)).astype(np.float32)
    rows = np.array([8, 1, 4, 4, 0], np.int32)
    scale = rng.random(5).astype(np.float32)
    np.testing.assert_array_equal(
        NativeKernels().expert_ffn(expert, x, rows, scale),
        ReferenceKernels().expert_ffn(expert, x, rows, scale),
    )


def test_the_native_core_refuses_wrong_shapes():
    """A mistake of ours is a ValueError at the boundary, never a read out of bounds."""
    native = NativeKernels()
    rng = np.random.default_rng(10)
    weight = make_weight(rng, "Q8_0", 4, 64)
    with pytest.raises(ValueError, match="columns"):
        native.matmul(weight, np.zeros((1, 32), np.float32))
    with pytest.raises(ValueError, match="row id"):
        native.decode_rows(weight, np.array([4], np.int32))


def test_the_native_core_never_copies_its_inputs():
    """An array that would need a copy (here: every second column) is refused, not converted."""
    weight = make_weight(np.random.default_rng(11), "F32", 4, 64)
    strided = np.zeros((2, 128), np.float32)[:, ::2]
    with pytest.raises(TypeError):
        NativeKernels().matmul(weight, strided)


def test_a_core_of_another_version_says_how_to_build_it(monkeypatch):
    """A stale compiled module is a typed error with the command, not a missing attribute later."""
    from thermocline.kernels import _native

    monkeypatch.setattr(_native, "interface", 1)
    with pytest.raises(NativeModuleError, match=r"interface 1.*pip install"):
        NativeKernels()


def test_a_missing_core_says_how_to_build_it(monkeypatch):
    """Without the compiled module, the error names the build command."""
    import thermocline.kernels

    monkeypatch.setitem(sys.modules, "thermocline.kernels._native", None)
    monkeypatch.delattr(thermocline.kernels, "_native", raising=False)
    with pytest.raises(NativeModuleError, match=r"missing.*pip install"):
        NativeKernels()

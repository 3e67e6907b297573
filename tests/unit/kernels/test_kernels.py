"""Decoding, attention and the core's interface: one body of tests over every implementation.

Products are in test_products.py and test_experts.py, refusals in test_core_refusals.py.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest

from scripts.kquants import dequantize
from tests.support.kernel_cases import FORMATS, IMPLEMENTATIONS, make_weight
from thermocline.errors import NativeModuleError
from thermocline.kernels.contract import KVView, Weight
from thermocline.kernels.cpu import NativeKernels
from thermocline.kernels.reference import ReferenceKernels
from thermocline.modelfile.formats import FORMATS_BY_NAME

DECODERS = [each for each in IMPLEMENTATIONS if each.threads == 1]


@pytest.fixture(params=[NativeKernels, ReferenceKernels], ids=["native", "reference"])
def kernels(request, guarded):
    """Each implementation, with guarded outputs."""
    return request.param()


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("implementation", DECODERS, ids=str)
def test_decode_rows_equals_the_gguf_package_to_the_bit(guarded, implementation, format_name):
    """Decoded rows are exactly those of the independent decoder, in the order asked for."""
    weight = make_weight(np.random.default_rng(1), format_name, 9, 768)
    rows = np.array([8, 0, 3, 3], np.int32)
    np.testing.assert_array_equal(
        implementation.make().decode_rows(weight, rows), dequantize(weight.raw, format_name)[rows]
    )


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("implementation", DECODERS, ids=str)
def test_random_block_bytes_decode_like_the_gguf_package(guarded, implementation, format_name):
    """Any bytes, not only those that a quantiser makes, decode alike; infinities and NaN included."""
    info = FORMATS_BY_NAME[format_name]
    raw = np.random.default_rng(2).integers(0, 256, (64, info.block_bytes * 2), np.uint8)
    weight = Weight("w", info, raw, info.block_elements * 2)
    with np.errstate(all="ignore"):
        expected = dequantize(raw, format_name)
        actual = implementation.make().decode_rows(weight, np.arange(64, dtype=np.int32))
    np.testing.assert_array_equal(actual, expected)


def make_cache(rng, *, context: int, kv_heads: int, head_dim: int, block_tokens: int) -> KVView:
    num_blocks = -(-context // block_tokens)
    table = rng.permutation(num_blocks + 3)[:num_blocks].astype(np.int32)
    shape = ((num_blocks + 3) * block_tokens, kv_heads, head_dim)
    keys, values = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    return KVView(keys, values, table, block_tokens)


def naive_attention(q, kv: KVView, positions, scale: float) -> np.ndarray:
    out = np.empty(q.shape, np.float64)
    group = q.shape[1] // kv.keys.shape[1]
    for t, position in enumerate(positions):
        slots = [
            kv.block_table[p // kv.block_tokens] * kv.block_tokens + p % kv.block_tokens
            for p in range(position + 1)
        ]
        for h in range(q.shape[1]):
            scores = kv.keys[slots, h // group].astype(np.float64) @ q[t, h] * scale
            weights = np.exp(scores - scores.max())
            out[t, h] = weights / weights.sum() @ kv.values[slots, h // group]
    return out


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("head_dim", [2, 16, 24, 64])
def test_attention_is_causal_softmax_over_the_blocks(kernels, heads, kv_heads, head_dim):
    """Scattered blocks, grouped heads, positions that start anywhere."""
    rng = np.random.default_rng(heads * 100 + head_dim)
    kv = make_cache(rng, context=23, kv_heads=kv_heads, head_dim=head_dim, block_tokens=4)
    q = rng.standard_normal((3, heads, head_dim)).astype(np.float32)
    positions = np.array([0, 11, 22], np.int32)
    scale = head_dim**-0.5
    expected = naive_attention(q, kv, positions, scale)
    actual = kernels.attention(q, kv, positions, scale=scale)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=3e-6)


def test_native_attention_equals_the_reference_to_the_bit():
    """Scores, exponentials and sums are taken in the same order and precision."""
    rng = np.random.default_rng(9)
    kv = make_cache(rng, context=130, kv_heads=2, head_dim=32, block_tokens=16)
    q = rng.standard_normal((4, 4, 32)).astype(np.float32)
    positions = np.array([3, 64, 128, 129], np.int32)
    np.testing.assert_array_equal(
        NativeKernels().attention(q, kv, positions, scale=0.2),
        ReferenceKernels().attention(q, kv, positions, scale=0.2),
    )


def test_attention_beyond_the_block_table_is_refused():
    """A mistake of ours is a ValueError at the boundary, never a read out of bounds."""
    kv = make_cache(np.random.default_rng(10), context=8, kv_heads=1, head_dim=16, block_tokens=4)
    q = np.zeros((1, 1, 16), np.float32)
    with pytest.raises(ValueError, match="beyond the block table"):
        NativeKernels().attention(q, kv, np.array([8], np.int32), scale=1.0)


@pytest.mark.parametrize("block", [2**31 - 1, -1, 8 // 4 + 3])
def test_a_block_beyond_the_cache_is_refused(block):
    """Also the largest number that a block id can be, one more than which would wrap around."""
    kv = make_cache(np.random.default_rng(1), context=8, kv_heads=1, head_dim=16, block_tokens=4)
    broken = KVView(kv.keys, kv.values, np.array([block, 0], np.int32), kv.block_tokens)
    q = np.zeros((1, 1, 16), np.float32)
    with pytest.raises(ValueError, match="beyond the cache"):
        NativeKernels().attention(q, broken, np.zeros(1, np.int32), scale=1.0)


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

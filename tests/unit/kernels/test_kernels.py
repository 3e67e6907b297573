"""Decoding and the core's interface: one body of tests over every implementation.

Products are in test_products.py and test_experts.py, refusals in test_core_refusals.py.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest

from scripts.kquants import dequantize
from tests.support.kernel_cases import FORMATS, IMPLEMENTATIONS, make_weight
from thermocline.errors import NativeModuleError
from thermocline.kernels.cpu import NativeKernels
from thermocline.kernels.weight import Weight
from thermocline.modelfile.formats import FORMATS_BY_NAME

DECODERS = [each for each in IMPLEMENTATIONS if each.threads == 1]


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

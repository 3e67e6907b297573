"""Blocks unpacked to `scale * (q - offset) - minimum`, against the gguf package's decoder."""

from __future__ import annotations

import subprocess
import sys
from typing import NamedTuple

import gguf
import numpy as np
import pytest

from scripts.kquants import dequantize, quantize
from thermocline.kernels.codebooks import CODEBOOK_SHAPES, codebook_table
from thermocline.kernels.native import load_native
from thermocline.modelfile.formats import FORMATS_BY_NAME

# The instruction sets of this build that this machine has.
ISAS = [name for name, available in load_native().instruction_sets() if available]
UNPACKED = [
    *["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"],
    *["IQ1_M", "IQ1_S", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ3_S", "IQ3_XXS", "IQ4_NL", "IQ4_XS"],
    *["MXFP4", "NVFP4", "TQ1_0", "TQ2_0"],
]
BY_GGUF = ["MXFP4", "Q4_1", "Q5_0", "Q5_1", "TQ1_0", "TQ2_0"]
BY_US = ["Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0"]
EIGHT_BITS = {"Q8_0", "IQ4_NL", "IQ4_XS"}
GUARD_BYTE, GUARD = 0xA5, np.float32(-12345.0)


class Unpacked(NamedTuple):
    """q [rows, cols], scale and minimum [rows, cols / 16]."""

    q: np.ndarray
    scale: np.ndarray
    minimum: np.ndarray


@pytest.fixture(scope="module")
def native():
    """The compiled core, with every codebook in place."""
    core = load_native()
    for name in CODEBOOK_SHAPES:
        core.set_codebook(FORMATS_BY_NAME[name].type_id, codebook_table(name))
    return core


def unpack(native, name: str, raw: np.ndarray, isa: str) -> Unpacked:
    """Unpack rows between two guard rows, which must come back as they were."""
    block = FORMATS_BY_NAME[name]
    rows, cols = len(raw), raw.shape[1] // block.block_bytes * block.block_elements
    q = np.full((rows + 2, cols), GUARD_BYTE, np.uint8)
    scale, minimum = (np.full((rows + 2, cols // 16), GUARD, np.float32) for _ in range(2))
    core = native.Core(isa, 1)
    core.unpack(block.type_id, raw, q[1:-1], scale[1:-1], minimum[1:-1])
    assert (q[[0, -1]] == GUARD_BYTE).all()
    assert (scale[[0, -1]] == GUARD).all()
    assert (minimum[[0, -1]] == GUARD).all()
    return Unpacked(q[1:-1], scale[1:-1], minimum[1:-1])


def weights(native, name: str, unpacked: Unpacked) -> np.ndarray:
    """The formula, in float32 and in its order."""
    offset, _, has_minimum, *_ = native.unpack_info(FORMATS_BY_NAME[name].type_id)
    whole = (unpacked.q.astype(np.int32) - offset).astype(np.float32)
    scale, minimum = (np.repeat(part, 16, axis=1) for part in (unpacked.scale, unpacked.minimum))
    return scale * whole - (minimum if has_minimum else np.float32(0))


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    """Equal bits, signs of zeros included; any NaN equals any NaN."""
    same = actual.view(np.uint32) == np.ascontiguousarray(expected).view(np.uint32)
    same |= np.isnan(actual) & np.isnan(expected)
    assert same.all(), f"{np.count_nonzero(~same)} of {same.size} differ"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", UNPACKED)
@pytest.mark.parametrize("blocks", [1, 3, 8, 9])
def test_random_bytes_unpack_to_the_weights_of_the_gguf_package(native, name, blocks, isa):
    """Any bytes, to the bit: infinite scales included, and rows that end within a step of 256."""
    raw = np.random.default_rng(blocks).integers(
        0, 256, (32, FORMATS_BY_NAME[name].block_bytes * blocks), np.uint8
    )
    with np.errstate(all="ignore"):
        actual = weights(native, name, unpack(native, name, raw, isa))
        assert_same_bits(actual, dequantize(raw, name))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", BY_GGUF + BY_US)
def test_quantised_weights_unpack_to_the_weights_of_the_gguf_package(native, name, isa):
    """What a quantiser makes of normal, tiny and zero weights, to the bit."""
    rng = np.random.default_rng(3)
    values = rng.standard_normal((5, 768)).astype(np.float32)
    values[1] *= np.float32(1e-6)
    values[2, :256] = 0
    raw = (
        quantize(values, name)
        if name in BY_US
        else gguf.quants.quantize(values, gguf.GGMLQuantizationType[name])
    )
    actual = weights(native, name, unpack(native, name, raw, isa))
    assert np.isfinite(actual).all()
    assert_same_bits(actual, dequantize(raw, name))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", UNPACKED)
def test_every_bit_counts_alike_wherever_it_stands(native, name, isa):
    """Each bit of a block is flipped alone."""
    size = FORMATS_BY_NAME[name].block_bytes
    block = np.random.default_rng(4).integers(0, 256, size, np.uint8)
    raw = block ^ np.packbits(np.eye(8 * size, dtype=np.uint8), axis=1)
    with np.errstate(all="ignore"):
        actual = weights(native, name, unpack(native, name, raw, isa))
        assert_same_bits(actual, dequantize(raw, name))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("name", "scale_bytes"),
    [pytest.param("Q4_1", 2, marks=pytest.mark.slow), ("MXFP4", 1), ("NVFP4", 1)],
)
def test_every_scale_is_read_exactly(native, name, scale_bytes, isa):
    """All half-precision, E8M0 and E4M3 numbers: subnormal, infinite and not numbers included."""
    size, codes = FORMATS_BY_NAME[name].block_bytes, 256**scale_bytes
    raw = np.random.default_rng(6).integers(0, 256, (codes, size), np.uint8)
    raw[:, :scale_bytes] = (
        np.arange(codes, dtype="<u4").view(np.uint8).reshape(-1, 4)[:, :scale_bytes]
    )
    with np.errstate(all="ignore"):
        actual = weights(native, name, unpack(native, name, raw, isa))
        assert_same_bits(actual, dequantize(raw, name))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", UNPACKED)
def test_the_form_is_the_one_that_is_declared(native, name, isa):
    """Block sizes, the bits of q, equal scales within a group, and a minimum only where there is one."""
    block = FORMATS_BY_NAME[name]
    offset, group, has_minimum, seven_bits, elements, nbytes = native.unpack_info(block.type_id)
    assert (elements, nbytes) == (block.block_elements, block.block_bytes)
    assert seven_bits == (name not in EIGHT_BITS)
    assert offset == 0 or not has_minimum  # products with a minimum start at 0
    raw = np.random.default_rng(5).integers(0, 256, (500, nbytes * 4), np.uint8)
    unpacked = unpack(native, name, raw, isa)
    assert 0 <= unpacked.q.min() <= offset < unpacked.q.max()
    assert (unpacked.q.max() <= 127) == seven_bits
    pairs = unpacked.scale.reshape(500, -1, 2)
    equal = np.array_equal(pairs[..., 0], pairs[..., 1], equal_nan=True)
    assert equal == (group == 32)
    assert (unpacked.minimum == GUARD).all() != has_minimum


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "I8", "I32", "Q8_1", "Q8_K"])
def test_other_types_are_refused(native, name):
    """Types that are no quantised weights have no unpacked form."""
    raw, floats = np.zeros((1, 1), np.uint8), np.zeros((1, 1), np.float32)
    with pytest.raises(ValueError, match="no quantised block"):
        native.unpack_info(FORMATS_BY_NAME[name].type_id)
    with pytest.raises(ValueError, match=r"no quantised block|not computed from|whole number"):
        native.Core("portable", 1).unpack(FORMATS_BY_NAME[name].type_id, raw, raw, floats, floats)


@pytest.mark.parametrize(
    ("row_bytes", "q_cols", "scale_cols", "minimum_cols"),
    [(33, 32, 2, 2), (34, 31, 2, 2), (34, 32, 1, 2), (34, 32, 2, 3)],
)
def test_wrong_shapes_are_refused(native, row_bytes, q_cols, scale_cols, minimum_cols):
    """Nothing is written outside of what was handed over."""
    with pytest.raises(ValueError, match=r"row|must be"):
        native.Core("portable", 1).unpack(
            FORMATS_BY_NAME["Q8_0"].type_id,
            np.zeros((2, row_bytes), np.uint8),
            np.zeros((2, q_cols), np.uint8),
            np.zeros((2, scale_cols), np.float32),
            np.zeros((2, minimum_cols), np.float32),
        )


@pytest.mark.parametrize("name", sorted(CODEBOOK_SHAPES))
def test_a_codebook_is_set_once(native, name):
    """The same bytes again are welcome; others, of any size or type, are not."""
    table = codebook_table(name)
    type_id = FORMATS_BY_NAME[name].type_id
    assert table.shape == CODEBOOK_SHAPES[name]
    native.set_codebook(type_id, table)
    for refused in (table[::-1].copy(), table[:-1], np.full_like(table, 255)):
        with pytest.raises(ValueError, match="codebook"):
            native.set_codebook(type_id, refused)
    with pytest.raises(ValueError, match="codebook"):
        native.set_codebook(FORMATS_BY_NAME["Q4_K"].type_id, table)


FRESH_PROCESS = """
import sys
import numpy as np
from thermocline.kernels import _native as native, codebooks
assert "gguf" not in sys.modules
core = native.Core("portable", 1)
type_id, rows = 16, (np.zeros((1, 66), np.uint8), np.zeros((1, 256), np.uint8))
floats = np.zeros((1, 16), np.float32)
for attempt in (
    lambda: core.unpack(type_id, *rows, floats, floats),
    lambda: native.set_codebook(type_id, np.full((256, 8), 64, np.uint8)),
):
    try:
        attempt()
    except ValueError:
        continue
    raise AssertionError("not refused")
native.set_codebook(type_id, np.full((256, 8), 63, np.uint8))
core.unpack(type_id, *rows, floats, floats)
assert (rows[1] == 127).all()
"""


@pytest.mark.slow
def test_a_type_without_its_codebook_is_refused():
    """No null pointer is read; magnitudes that q can not hold are refused; gguf is imported late."""
    subprocess.run([sys.executable, "-c", FRESH_PROCESS], check=True)

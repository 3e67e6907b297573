"""The table of block formats agrees with the gguf package and computes row sizes."""

from __future__ import annotations

import subprocess
import sys

import gguf
import pytest

from thermocline.modelfile.formats import FORMATS_BY_ID, FORMATS_BY_NAME, BlockFormat

# gguf-py counts the scales of Q8_1, which no file stores, as two f32; ggml stores two f16.
KNOWN_DIFFERENCES = {"Q8_1"}


@pytest.mark.parametrize(
    "ggml_type",
    [t for t in gguf.GGMLQuantizationType if t.name not in KNOWN_DIFFERENCES],
    ids=lambda t: t.name,
)
def test_every_type_of_the_gguf_package_is_known_and_equal(ggml_type):
    """Name, id, block elements and block bytes are those of the gguf package."""
    elements, block_bytes = gguf.GGML_QUANT_SIZES[ggml_type]
    expected = BlockFormat(ggml_type.name, int(ggml_type), elements, block_bytes)
    assert FORMATS_BY_ID[int(ggml_type)] == expected
    assert FORMATS_BY_NAME[ggml_type.name] == expected


def test_both_registries_hold_the_same_formats_and_can_not_be_changed():
    """An id or name is never shared, and the registry is read-only."""
    assert list(FORMATS_BY_ID.values()) == list(FORMATS_BY_NAME.values())
    with pytest.raises(TypeError):
        FORMATS_BY_ID[99] = FORMATS_BY_ID[0]


def test_row_bytes_counts_whole_blocks():
    """A row's bytes are its blocks times the block's bytes."""
    assert FORMATS_BY_NAME["Q4_K"].row_bytes(1024) == 4 * 144
    assert FORMATS_BY_NAME["F32"].row_bytes(3) == 12
    assert FORMATS_BY_NAME["Q8_0"].row_bytes(0) == 0


@pytest.mark.parametrize("num_elements", [1, 255, 257, -256])
def test_row_bytes_refuses_partial_blocks(num_elements):
    """A row that is no whole number of blocks is an error that names the block."""
    with pytest.raises(ValueError, match="Q4_K blocks of 256"):
        FORMATS_BY_NAME["Q4_K"].row_bytes(num_elements)


@pytest.mark.slow
def test_import_is_light():
    """Importing the reader loads neither torch, nor asyncio, nor the gguf package."""
    code = (
        "import sys, thermocline.modelfile.reader; "
        "print([m for m in ('torch', 'asyncio', 'gguf') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"

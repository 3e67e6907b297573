"""llama.cpp's own quantiser, from one GGUF file to another. Needs `llama_cpp`."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import llama_cpp

from tests.oracle.llama_model import silence

if TYPE_CHECKING:
    from pathlib import Path

FILE_TYPES = {
    "F16": 1,
    "Q8_0": 7,
    "Q2_K": 10,
    "Q4_K_M": 15,
    "Q5_K_S": 16,
    "Q6_K": 18,
    "IQ4_XS": 30,
    "BF16": 32,
    "MXFP4_MOE": 38,
}
"""llama.cpp's numbers of the mixes that people publish."""


def quantise(source: Path, out: Path, mix: str, *, keep_split: bool = False) -> Path:
    """Write `source` in the mix `mix` to `out`, and return that.

    keep_split: into as many files as `source` has, which are named after `out` without its suffix.
    """
    silence()
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = FILE_TYPES[mix]
    params.nthread = 2
    params.allow_requantize = True
    params.keep_split = keep_split
    code = llama_cpp.llama_model_quantize(
        str(source).encode(), str(out).encode(), ctypes.byref(params)
    )
    assert code == 0, f"llama.cpp refused to write {mix}"
    return out

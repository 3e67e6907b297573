"""llama.cpp's source tree, for the vocabularies that it ships."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

VARIABLE = "THERMOCLINE_LLAMA_CPP_SOURCE"


def vocabulary_file(name: str) -> Path:
    """The shipped GGUF of a vocabulary, its .inp and .out beside it; skips where there is no tree."""
    root = os.environ.get(VARIABLE)
    if root is None:
        pytest.skip(f"set {VARIABLE} to a source tree of llama.cpp to compare its vocabularies")
    path = Path(root) / "models" / f"ggml-vocab-{name}.gguf"
    if not path.exists():
        pytest.fail(f"{VARIABLE} is {root}, which has no models/{path.name}")
    return path

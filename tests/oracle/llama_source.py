"""The vocabularies that llama.cpp ships in its source tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.oracle.toolchain.sources import llama_cpp_sources

if TYPE_CHECKING:
    from pathlib import Path


def vocabulary_file(name: str) -> Path:
    """The shipped GGUF of a vocabulary, its .inp and .out beside it."""
    path = llama_cpp_sources() / "models" / f"ggml-vocab-{name}.gguf"
    if not path.exists():
        pytest.fail(f"llama.cpp's sources have no models/{path.name}")
    return path

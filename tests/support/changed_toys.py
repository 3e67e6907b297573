"""Toy files with other keys or tensors than their own, for tests of what a file states and of what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.support.toy_archs import toy_arch_weights, write_toy_arch
from thermocline.modelfile.reader import open_model_file
from thermocline.models.registry import read_spec

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

    from tests.support.toy_archs import ToyArch
    from thermocline.models.spec import ModelSpec


def write_changed(
    folder: Path, toy: ToyArch, weights: dict[str, np.ndarray] | None = None, **keys: Any
) -> Path:
    """Write a toy; `keys` without the architecture's prefix replace its own, None leaves one out."""
    metadata = {f"{toy.arch}.{key}": value for key, value in keys.items()}
    return write_toy_arch(folder / "m.gguf", toy, weights=weights, metadata=metadata)


def write_without(folder: Path, toy: ToyArch, tensor: str) -> Path:
    """Write a toy that lacks a tensor."""
    weights = toy_arch_weights(toy)
    del weights[tensor]
    return write_changed(folder, toy, weights)


def spec_of(path: Path) -> ModelSpec:
    """Return the dimensions that a file states."""
    with open_model_file(path) as file:
        return read_spec(file)

"""Opens a model file that is to stay mapped: with the native core's guards, so that a change of it is survived."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thermocline.kernels.native import load_native
from thermocline.modelfile.reader import open_model_file

if TYPE_CHECKING:
    import os

    from thermocline.modelfile.reader import ModelFile


def open_guarded_model(path: str | os.PathLike[str]) -> ModelFile:
    """Return the open model; `ModelFile.find_change` tells what happened to its files. Raises as `open_model_file`."""
    return open_model_file(path, make_guard=load_native().GuardedMap)

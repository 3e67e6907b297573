"""Which architectures there are, and the module of each, imported only when a file asks for it."""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from thermocline.errors import UnsupportedModelError
from thermocline.models.spec import ModelSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from thermocline.kernels.contract import Kernels
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.contract import Model

ARCHITECTURES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"qwen3moe": ("thermocline.models.qwen3moe", "Qwen3Moe")}
)
"""general.architecture -> (module, class); the module also has `read_spec`."""


def read_spec(file: ModelFile) -> ModelSpec:
    """Return the model's dimensions from its metadata. Raises ModelError."""
    module_name, _ = _entry(file)
    spec = import_module(module_name).read_spec(file)
    assert isinstance(spec, ModelSpec)
    return spec


def open_model(file: ModelFile, kernels: Kernels) -> Model:
    """Return the model over the mapped `file`. Raises ModelError."""
    module_name, class_name = _entry(file)
    model: Model = getattr(import_module(module_name), class_name)(file, kernels)
    return model


def _entry(file: ModelFile) -> tuple[str, str]:
    entry = ARCHITECTURES.get(file.architecture)
    if entry is None:
        raise UnsupportedModelError(
            file.path,
            "this architecture is not supported",
            unsupported=(file.architecture,),
            fix=f"use a model of one of: {', '.join(sorted(ARCHITECTURES))}",
        )
    return entry

"""Makes files as users get them, once each: a model of transformers', converted and quantised by llama.cpp.

Knows which small models there are and how each file is made, not what is compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tests.oracle.hf_archs import Keys, open_hf
from tests.oracle.hf_model import HfModel, open_qwen3moe
from tests.oracle.toolchain.convert import convert
from tests.oracle.toolchain.quantise import quantise
from tests.oracle.toolchain.tiny_hf import TinyModel, save_tiny_model

if TYPE_CHECKING:
    from pathlib import Path

_HYBRIDS = ("qwen3next", "qwen35moe")


@dataclass(frozen=True)
class ToolCase:
    """A tiny model, and what the converter is told besides."""

    name: str
    tiny: TinyModel
    arguments: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


def _case(name: str, arch: str, *arguments: str, **options: object) -> ToolCase:
    tiny = TinyModel(arch, **options)
    if arch in _HYBRIDS and not tiny.extra_block:
        arguments += ("--no-mtp",)
    return ToolCase(f"{arch}_{name}", tiny, arguments)


def _wide(arch: str) -> dict[str, object]:
    """Experts of width 256."""
    if arch == "olmoe":
        return {"intermediate_size": 256}
    shared = {} if arch == "qwen3moe" else {"shared_expert_intermediate_size": 256}
    return {"moe_intermediate_size": 256, **shared}


ARCHS = ("qwen2moe", "qwen3moe", "olmoe", "qwen3next", "qwen35moe", "laguna")

SMALL_CASES = tuple(_case("small", arch) for arch in ARCHS)
"""In float32; no row is a multiple of 256."""

OTHER_CASES = (
    _case("fused", "qwen3next", "--fuse-gate-up-exps", seed=2),
    _case("fused", "qwen35moe", "--fuse-gate-up-exps", seed=2),
    _case("fused_qkv", "qwen2moe", "--fuse-qkv", seed=5),
    _case("fused_qkv", "qwen3moe", "--fuse-qkv", seed=3),
    _case("fused_qkv", "olmoe", "--fuse-qkv", seed=2),
    _case("fused_qkv", "qwen3next", "--fuse-qkv", seed=3),
    _case("fused_qkv", "qwen35moe", "--fuse-qkv", seed=3),
    _case("tied", "qwen3moe", options={"tie_word_embeddings": True}, seed=4),
    _case("extra_block", "qwen35moe", extra_block=True),
    _case("extra_block", "qwen3next", extra_block=True),
    _case("long", "laguna", layers=5, seed=3),
    _case("element_gates", "laguna", layers=2, options={"gating": "per-element"}),
    _case("split", "qwen2moe", "--split-max-tensors", "10", seed=5),
)
"""What the converter writes otherwise for some."""

MIXED_CASES = (
    *(_case("narrow", arch, hidden=256, seed=6) for arch in ARCHS),
    *(_case("wide", arch, hidden=256, seed=7, options=_wide(arch)) for arch in ARCHS),
)
"""To be quantised. Down matrices of the narrow ones have rows of 32, for which the quantiser falls back to others."""

MIXES = ("BF16", "Q8_0", "Q6_K", "Q5_K_S", "Q4_K_M", "IQ4_XS", "Q2_K", "MXFP4_MOE")


class Workshop:
    """A folder of files, each made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._converted: dict[str, tuple[HfModel, Path]] = {}

    def converted(self, case: ToolCase) -> tuple[HfModel, Path]:
        """Return transformers' model and the file that the converter made of it, in float32."""
        if case.name not in self._converted:
            source = self._folder / case.name
            model = save_tiny_model(source, case.tiny)
            oracle = HfModel(model, None, tied=False)
            out = self._folder / f"{case.name}.gguf"
            convert(source, out, case.tiny.arch, *case.arguments)
            if not out.exists():  # in several files, which are named after it
                (out,) = self._folder.glob(f"{case.name}-00001-of-*.gguf")
            self._converted[case.name] = oracle, out
        return self._converted[case.name]

    def quantised(self, case: ToolCase, mix: str) -> Path:
        """Return the file that the quantiser made of the converted one."""
        out = self._folder / f"{case.name}-{mix}.gguf"
        if not out.exists():
            quantise(self.converted(case)[1], out, mix)
        return out


def open_exact(path: Path) -> HfModel:
    """Return transformers' model, holding in float32 what the file's weights decode to."""
    return (open_qwen3moe if Keys(path).arch == "qwen3moe" else open_hf)(path)


def position_errors(found: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Return each position's squared error over its squared logits, in double: float64 [tokens]."""
    a, b = found.astype(np.float64), exact.astype(np.float64)
    return np.square(a - b).sum(axis=-1) / np.square(b).sum(axis=-1)

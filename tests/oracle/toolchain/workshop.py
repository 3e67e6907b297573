"""Makes files as users get them, once each: a model of transformers', converted and quantised by llama.cpp.

Knows how each file is made, not what is compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.oracle.hf_archs import Keys, open_hf
from tests.oracle.hf_model import HfModel, open_qwen3moe
from tests.oracle.toolchain.convert import convert
from tests.oracle.toolchain.nvfp4 import quantise_checkpoint
from tests.oracle.toolchain.quantise import quantise
from tests.oracle.toolchain.tiny_hf import save_tiny_model

if TYPE_CHECKING:
    from pathlib import Path

    from tests.oracle.toolchain.tool_cases import ToolCase

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
            if case.nvfp4:
                quantise_checkpoint(source)
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

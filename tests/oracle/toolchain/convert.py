"""Runs llama.cpp's own converter on a folder in the hub's form, in a process of its own.

The converter knows a pre-tokenizer by a hash over the tokens of a test text. A tiny vocabulary has no entry there,
so `get_vocab_base_pre` is replaced, and `set_vocab` of models that ask for their own special tokens or tokenizer
files. Everything else is the real code of the pinned release.

usage: python -m tests.oracle.toolchain.convert SOURCES ARCH PRE_TOKENIZER [the converter's own arguments]
"""

from __future__ import annotations

import importlib
import json
import runpy
import subprocess
import sys
from pathlib import Path

from tests.oracle.toolchain.sources import llama_cpp_sources

_PRE_TOKENIZERS = {
    "olmoe": "olmo",
    "qwen35": "qwen35",
    "qwen35moe": "qwen35",
    "qwen4exp": "qwen35",
    "laguna": "laguna",
    "gpt-oss": "gpt-4o",
    "dbrx": "dbrx",
    "afmoe": "afmoe",
    "bailingmoe": "bailingmoe",
    "bailingmoe3": "bailingmoe2",
    "exaone-moe": "exaone-moe",
    "llama4": "llama4",
    "mellum": "mellum2",
    "step35": "deepseek-v3",
    "deepseek": "deepseek-llm",
}


# Module and class that read a vocabulary in a way of their own.
_OWN_VOCABULARIES = {
    "ernie4_5": ("ernie", "Ernie4_5Model"),
    "ernie4_5-moe": ("ernie", "Ernie4_5Model"),
    "deepseek_v32": ("deepseek", "DeepseekV32Model"),
    "glm_moe_dsa": ("glm", "GlmMoeDsaModel"),
    "glm4moe": ("glm", "Glm4MoeModel"),
    "glm4_moe_lite": ("glm", "Glm4MoeLiteModel"),
    "glm5_next": ("glm", "Glm5NextModel"),
    "granitehybrid": ("granite", "GraniteHybridModel"),
    "granite": ("granite", "GraniteModel"),
    "granite_swa": ("granite", "GraniteSWAModel"),
    "granitemoe": ("granite", "GraniteMoeModel"),
    "granitemoe_swa": ("granite", "GraniteMoeSWAModel"),
    "hunyuan-dense": ("hunyuan", "HunYuanModel"),
    "hy_v4": ("deepseek", "DeepseekV2Model"),
    "dots3note": ("dots3", "Dots3NoteModel"),
    "hunyuan-moe": ("hunyuan", "HunYuanMoEModel"),
    "jamba": ("jamba", "JambaModel"),
    "kimi_linear": ("kimi_linear", "KimiLinearModel"),
    "nemotron_h": ("nemotron", "NemotronHModel"),
    "phimoe": ("phi", "PhiMoeModel"),
    "nemotron_h_moe": ("nemotron", "NemotronHModel"),
    "solar_open": ("glm", "SolarOpenModel"),
}


# transformers' own classes add settings of experts that the converter takes for those of nemotron_h_moe, and name those
# of the others otherwise than the published configuration, for which the converter is made: bailingmoe3's head size is
# not that of its states there, and qwen4exp's layers that attend are of another kind, for which the converter writes that
# they read all positions. It has none for maple and smallthinker, and names step35's and minimax_m3's otherwise.
_AS_WRITTEN = (
    "nemotron_h",
    "dots3note",
    "kimi_linear",
    "bailingmoe3",
    "maple",
    "smallthinker",
    "step35",
    "mimo2",
    "minimax_m3",
    "qwen4exp",
)


def convert(folder: Path, out: Path, arch: str, *arguments: str) -> Path:
    """Convert the model in `folder` to the file `out`, and return that.

    arguments: more of the converter's, which writes float32 where they name no other type.
    """
    pre = _PRE_TOKENIZERS.get(arch, "qwen2")
    options = ["--outfile", str(out), "--outtype", "f32", *arguments]
    command = [sys.executable, "-W", "ignore", "-m", __name__, str(llama_cpp_sources()), arch, pre]
    done = subprocess.run(
        [*command, str(folder), *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return out


def main() -> None:
    """Run the converter with everything after the first three arguments."""
    sources, arch, pre = sys.argv[1:4]
    script = Path(sources) / "convert_hf_to_gguf.py"
    sys.path.insert(0, sources)
    sys.path.insert(0, str(Path(sources) / "gguf-py"))
    from conversion.base import ModelBase, TextModel

    def no_sentencepiece(_self: object) -> None:
        # What it finds of these models, after it has imported a package that is not needed then.
        raise FileNotFoundError("tokenizer.model")

    def as_written(folder: Path, *_: object, **_options: object) -> dict[str, object]:
        settings: dict[str, object] = json.loads((folder / "config.json").read_text())
        return settings

    if arch in _AS_WRITTEN:
        ModelBase.load_hparams = staticmethod(as_written)
    TextModel._create_vocab_sentencepiece = no_sentencepiece

    TextModel.get_vocab_base_pre = lambda _self, _tokenizer: pre
    if arch in _OWN_VOCABULARIES:
        module, name = _OWN_VOCABULARIES[arch]
        own = getattr(importlib.import_module(f"conversion.{module}"), name)
        own.set_vocab = TextModel._set_vocab_gpt2
    sys.argv = [str(script), *sys.argv[4:]]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()

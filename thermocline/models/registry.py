"""The supported architectures, and the module of each, imported when a file needs it."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from thermocline.errors import UnsupportedModelError
from thermocline.kernels.cache_format import MAX_HEAD_DIM
from thermocline.models.decoder import Decoder
from thermocline.models.next_token_block import NextTokenBlock
from thermocline.models.prompt_limits import served_context
from thermocline.models.rope import LongRope

if TYPE_CHECKING:
    from collections.abc import Mapping

    from thermocline.kernels.contract import Kernels
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.contract import Model
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap

DFLASH_NAMES: Final = ("dflash", "qwen35-dflash-draft", "dflash-draft", "gemma4-dflash-draft")
"""general.architecture of block diffusion drafters, the present layout first."""

ASSISTANT_NAME: Final = "gemma4-assistant"
"""general.architecture of Gemma 4's own drafters."""

EAGLE3_NAME: Final = "eagle3"
"""general.architecture of EAGLE-3 drafters."""

ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        name: f"thermocline.models.architectures.{name.replace('-', '_')}"
        for name in (
            "laguna",
            "olmoe",
            "phimoe",
            "qwen2moe",
            "qwen35moe",
            "qwen3moe",
            "qwen3next",
            "deepseek2",
            "gemma4",
            "llama",
            "llama4",
            "qwen2",
            "qwen3",
            "qwen35",
            "afmoe",
            "bailingmoe",
            "bailingmoe2",
            "bailingmoe3",
            "cohere2moe",
            "dbrx",
            "deepseek",
            "dots1",
            "ernie4_5",
            "ernie4_5-moe",
            "glm4moe",
            "granite",
            "granite_swa",
            "granitemoe",
            "hunyuan-dense",
            "hunyuan-moe",
            "mimo2",
            "minimax-m2",
            "qwen3vl",
            "qwen3vlmoe",
            "qwen4exp",
            "gpt-oss",
            "lfm2",
            "lfm2moe",
            "nemotron_h",
            "nemotron_h_moe",
            "granitehybrid",
            "jamba",
            "exaone-moe",
            "hy_v3",
            "maple",
            "mellum",
            "smallthinker",
            "mistral3",
            "mistral4",
            "smollm3",
            "step35",
            "kimi-linear",
            "deepseek32",
            "glm-dsa",
            "glm5-next",
            "deepseek4",
            "hy_v4",
            "dots3note",
            "minimax-m3",
        )
    }
)
"""general.architecture -> its module, an `Architecture`."""


_OTHER_KINDS: Final = (
    *((name, "an encoder, which writes no text") for name in ("bert", "nomic-bert", "jina-bert")),
    *((name, "an encoder, which writes no text") for name in ("modern-bert", "neo-bert")),
    ("eurobert", "an encoder, which writes no text"),
    ("t5", "an encoder with a decoder"),
    ("clip", "the image or sound part of another model"),
    *((name, "a model that makes images") for name in ("flux", "sd1", "sd3", "sdxl", "aura")),
    ("wavtokenizer", "a model that makes sound"),
    ("adapter", "changes to another model's weights"),
    *(
        (name, "a drafter for another model: give it as --draft-model")
        for name in (*DFLASH_NAMES, ASSISTANT_NAME, EAGLE3_NAME)
    ),
)


class Architecture(Protocol):
    """What the module of an architecture has."""

    def read_spec(self, file: ModelFile, /) -> ModelSpec:
        """Return the dimensions that the file's metadata state. Raises ModelError."""
        ...

    def read_layer(self, weights: WeightMap, spec: ModelSpec, index: int, /) -> DecoderLayer:
        """Return one layer's weights and rules. Raises ModelError."""
        ...


class DraftingArchitecture(Architecture, Protocol):
    """What the module of an architecture has besides, whose blocks behind the last layer can draft."""

    def read_next_block(self, weights: WeightMap, spec: ModelSpec, index: int, /) -> DecoderLayer:
        """Return the layer that is in block `index`, behind the last layer. Raises ModelError."""
        ...


def read_spec(file: ModelFile) -> ModelSpec:
    """Return the model's dimensions from its metadata. Raises ModelError."""
    return _checked_spec(file, _architecture(file))


def open_model(file: ModelFile, kernels: Kernels, context_tokens: int | None = None) -> Model:
    """Return the model over the mapped `file`. Raises ModelError.

    context_tokens: the longest sequence that is asked for, as `prompt_limits.served_context` takes it.
    """
    architecture = _architecture(file)
    spec = _checked_spec(file, architecture)
    if isinstance(spec.rope_scaling, LongRope):
        spec = replace(spec, served_tokens=served_context(context_tokens, spec))
    return Decoder(file, kernels, spec, architecture.read_layer)


def can_draft(file: ModelFile, spec: ModelSpec) -> bool:
    """Whether `open_next_blocks` opens blocks of this file, as far as its header tells."""
    return spec.num_predict_layers > 0 and hasattr(_architecture(file), "read_next_block")


def open_next_blocks(file: ModelFile, kernels: Kernels) -> tuple[NextTokenBlock, ...]:
    """Return the blocks of the mapped `file` that guess further tokens, one for each place of a draft.

    One alone guesses all places. Raises ModelError, also where it has none.
    """
    architecture = _architecture(file)
    spec = _checked_spec(file, architecture)
    if not can_draft(file, spec):
        raise UnsupportedModelError(
            file.path,
            "drafting needs a block that guesses further tokens",
            unsupported=(f"{spec.num_predict_layers} such blocks of {file.architecture}",),
            fix="leave mtp out of --speculate, or use a file that was converted with its block",
        )
    drafting = cast("DraftingArchitecture", architecture)
    return tuple(
        NextTokenBlock(file, kernels, spec, drafting.read_next_block, place)
        for place in range(spec.num_predict_layers)
    )


def _checked_spec(file: ModelFile, architecture: Architecture) -> ModelSpec:
    """Return the dimensions. Raises ModelError, also for rows of a cache that no kernel takes."""
    spec = architecture.read_spec(file)
    widest = max((dim for of in spec.kv_shapes for dim in of.stored_dims), default=0)
    if widest > MAX_HEAD_DIM:
        raise UnsupportedModelError(
            file.path,
            f"a head, or a row that heads share, has at most {MAX_HEAD_DIM} numbers here",
            unsupported=(f"{widest} numbers for a token in a cache of {file.architecture}",),
            fix="use another model, or convert this one again if it should have fewer",
        )
    return spec


def _architecture(file: ModelFile) -> Architecture:
    module_name = ARCHITECTURES.get(file.architecture)
    if module_name is None:
        raise UnsupportedModelError(
            file.path,
            "this architecture is not supported",
            unsupported=(_described(file.architecture),),
            fix=_way_out(file.architecture),
        )
    module: Any = import_module(module_name)
    architecture: Architecture = module
    return architecture


def _described(name: str) -> str:
    """Return the architecture's name, with what it is where that is no model that continues text."""
    kind = next((what for start, what in _OTHER_KINDS if name.startswith(start)), None)
    return name if kind is None else f"{name} ({kind})"


def _way_out(name: str) -> str:
    known = sorted(ARCHITECTURES)
    near = get_close_matches(name, known, n=1)
    nearest = f" ({near[0]} has the nearest name)" if near else ""
    return f"use a model of one of: {', '.join(known)}{nearest}"

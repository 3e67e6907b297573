"""A tiny gemma4 with a drafter of its own, saved as models from the hub are. Needs `torch` and `transformers`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from unittest import mock

import torch
import transformers

from tests.oracle.hf_assistant import SHARING, HfAssistant
from tests.oracle.hf_model import HfModel
from tests.oracle.toolchain.convert import convert
from tests.oracle.toolchain.tiny_gemma import gemma4_config
from tests.oracle.toolchain.tiny_hf import (
    TinyModel,
    common_settings,
    draw_weights,
    save_tiny_model,
    save_tokenizer,
)

if TYPE_CHECKING:
    from pathlib import Path

_TARGET = TinyModel("gemma4", layers=3, seed=5)
_LAYERS, _HIDDEN = 3, 48


@dataclass(frozen=True)
class ConvertedPair:
    """Files that the converter wrote, and what it was given."""

    target: Path
    drafter: Path
    oracle: HfAssistant


def convert_pair(folder: Path) -> ConvertedPair:
    """Make a model and a drafter of transformers' classes, and convert both."""
    with mock.patch.object(transformers.Gemma4TextConfig, "kv_sharing_modes", SHARING):
        model = save_tiny_model(folder / "model", _TARGET)
        drafter = _save_drafter(folder / "drafter")
    paths = [
        convert(folder / name, folder / f"{name}.gguf", "gemma4") for name in ("model", "drafter")
    ]
    window = drafter.config.text_config.sliding_window
    oracle = HfAssistant(HfModel(model, None, tied=False), drafter, window)
    return ConvertedPair(*paths, oracle)


def _save_drafter(folder: Path) -> transformers.PreTrainedModel:
    tiny = TinyModel(
        "gemma4",
        hidden=_HIDDEN,
        layers=_LAYERS,
        options={
            "enable_moe_block": False,
            **dict.fromkeys(
                ("num_experts", "top_k_experts", "moe_intermediate_size", "num_experts_per_tok")
            ),
            "num_kv_shared_layers": _LAYERS,
            "vocab_size_per_layer_input": 0,
            "tie_word_embeddings": True,
        },
    )
    torch.manual_seed(9)
    config = transformers.Gemma4AssistantConfig(
        text_config=gemma4_config(common_settings(tiny), tiny),
        backbone_hidden_size=_TARGET.hidden,
    )
    model = transformers.Gemma4AssistantForCausalLM(config)
    draw_weights(model)
    model.save_pretrained(folder)
    save_tokenizer(folder, tiny.arch)
    return model

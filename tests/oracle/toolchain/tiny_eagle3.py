"""Tiny models with an EAGLE-3 drafter beside each, saved as those from the hub are, and the drafter's formulas.

transformers has no class for the drafter. Needs `torch`, `transformers` and `safetensors`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn.functional import rms_norm, silu

from tests.oracle.toolchain.convert import convert
from tests.oracle.toolchain.tiny_hf import NUM_TOKENS, TinyModel, save_tiny_model

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

LAYERS_READ = (2, 3, 4)
"""Where the checkpoint names none: the third layer, the middle one, and the third from the end."""
_LAYERS, _TARGET_WIDTH = 7, 64
_HEADS, _KV_HEADS, _HEAD_DIM, _HIDDEN, _WIDTH = 4, 2, 16, 48, 80
_ROWS, _BASE, _EPSILON = 100, 50_000.0, 1e-5


@dataclass(frozen=True)
class Checkpoint:
    """How a drafter is published. target: its model's kind. nested: with the settings of its layer in a part of its own.

    norms_features, adds_normed: see `Eagle3Spec`.
    """

    target: str
    nested: bool = False
    norms_features: bool = False
    adds_normed: bool = False


CHECKPOINTS = {
    "plain": Checkpoint("qwen3moe"),
    "nested": Checkpoint("mixtral", nested=True, adds_normed=True),
    "normed": Checkpoint("llama", norms_features=True),
}


@dataclass(frozen=True)
class ConvertedPair:
    """Files that the converter wrote, and what it was given. tokens: int64 [rows], those that the drafter can guess."""

    target: Path
    drafter: Path
    tokens: np.ndarray
    of: Checkpoint
    weights: dict[str, torch.Tensor]

    def guesses(
        self, known: Sequence[int], features: np.ndarray, chain: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return logits [n, rows], and the states [n, D] that the next guess takes, behind each token of `chain`.

        features: float32 [known, 3 * D of the model]. chain: the newest known token, then guesses.
        """
        weights = {name: values.double() for name, values in self.weights.items()}
        given = torch.from_numpy(features).double()
        if self.of.norms_features:
            given = _norm(given, weights["input_norm"])
        states = list(given @ weights["fc"].T)
        tokens, logits = list(known[1:]), []
        for token in chain:
            tokens.append(token)
            states.append(self._layer(weights, tokens, torch.stack(states)))
            logits.append(_norm(states[-1], weights["norm"]) @ weights["lm_head"].T)
        following = torch.stack(states[len(known) :])
        return torch.stack(logits).float().numpy(), following.float().numpy()

    def _layer(
        self, weights: dict[str, torch.Tensor], tokens: list[int], states: torch.Tensor
    ) -> torch.Tensor:
        """Return the state behind the last of these pairs of a token and the state before it."""
        normed = _norm(states, weights["layers.0.hidden_norm"])
        embedded = _norm(weights["embed_tokens"][tokens], weights["layers.0.input_layernorm"])
        x = torch.cat((embedded, normed), dim=1)
        count = len(tokens)
        q, k, v = (
            (x @ weights[f"layers.0.self_attn.{name}_proj"].T).view(count, -1, _HEAD_DIM)
            for name in "qkv"
        )
        q, k = _turned(q)[-1], _turned(k)
        k, v = (each.repeat_interleave(_HEADS // _KV_HEADS, dim=1) for each in (k, v))
        shares = torch.einsum("hd,thd->ht", q, k).mul(_HEAD_DIM**-0.5).softmax(dim=1)
        attended = torch.einsum("ht,thd->hd", shares, v).flatten()
        x = (normed if self.of.adds_normed else states)[-1]
        x = x + weights["layers.0.self_attn.o_proj"] @ attended
        inner = _norm(x, weights["layers.0.post_attention_layernorm"])
        gate, up, down = (weights[f"layers.0.mlp.{name}_proj"] for name in ("gate", "up", "down"))
        return x + down @ (silu(gate @ inner) * (up @ inner))


def convert_pair(folder: Path, name: str) -> ConvertedPair:
    """Make a model and a drafter for it, and convert both."""
    of = CHECKPOINTS[name]
    save_tiny_model(folder / "model", TinyModel(of.target, layers=_LAYERS, seed=5))
    weights, tokens = _weights(), np.sort(np.random.default_rng(3).permutation(NUM_TOKENS)[:_ROWS])
    _save_drafter(folder / "drafter", of, weights, tokens)
    target = convert(folder / "model", folder / "model.gguf", of.target)
    options = ("--target-model-dir", str(folder / "model"))
    drafter = convert(folder / "drafter", folder / "drafter.gguf", of.target, *options)
    return ConvertedPair(target, drafter, tokens, of, weights)


def _weights() -> dict[str, torch.Tensor]:
    """Return random tensors by their names in checkpoints, without `.weight`."""
    chance = torch.Generator().manual_seed(9)
    q_size, kv_size = _HEADS * _HEAD_DIM, _KV_HEADS * _HEAD_DIM
    shapes = {
        "fc": (_HIDDEN, 3 * _TARGET_WIDTH),
        "embed_tokens": (NUM_TOKENS, _HIDDEN),
        "lm_head": (_ROWS, _HIDDEN),
        "layers.0.self_attn.q_proj": (q_size, 2 * _HIDDEN),
        "layers.0.self_attn.k_proj": (kv_size, 2 * _HIDDEN),
        "layers.0.self_attn.v_proj": (kv_size, 2 * _HIDDEN),
        "layers.0.self_attn.o_proj": (_HIDDEN, q_size),
        "layers.0.mlp.gate_proj": (_WIDTH, _HIDDEN),
        "layers.0.mlp.up_proj": (_WIDTH, _HIDDEN),
        "layers.0.mlp.down_proj": (_HIDDEN, _WIDTH),
    }
    gains = {
        "norm": _HIDDEN,
        "input_norm": 3 * _TARGET_WIDTH,
        "layers.0.hidden_norm": _HIDDEN,
        "layers.0.input_layernorm": _HIDDEN,
        "layers.0.post_attention_layernorm": _HIDDEN,
    }
    weights = {
        name: torch.randn(shape, generator=chance)
        * (3 if name == "lm_head" else 1)
        / (1 if name == "embed_tokens" else shape[1] ** 0.5)
        for name, shape in shapes.items()
    }
    return weights | {
        name: 1 + 0.1 * torch.randn(size, generator=chance) for name, size in gains.items()
    }


def _save_drafter(
    folder: Path, of: Checkpoint, weights: dict[str, torch.Tensor], tokens: np.ndarray
) -> None:
    """Write a checkpoint in one of the two published forms."""
    folder.mkdir()
    layer: dict[str, Any] = {
        "hidden_size": _HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "intermediate_size": _WIDTH,
        "rms_norm_eps": _EPSILON,
        "rope_theta": _BASE,
        "max_position_embeddings": 512,
        "vocab_size": NUM_TOKENS,
        "hidden_act": "silu",
    }
    config = {"draft_vocab_size": _ROWS, "norm_before_residual": of.adds_normed}
    config |= {"norm_before_fc": of.norms_features}
    if of.nested:
        config |= {"architectures": ["Eagle3Speculator"], "transformer_layer_config": layer}
    else:
        config |= {"architectures": ["LlamaForCausalLMEagle3"], **layer}
    (folder / "config.json").write_text(json.dumps(config))
    start = "layers.0." if of.nested else "midlayer."
    saved = {
        f"{name.replace('layers.0.', start)}.weight": values.contiguous()
        for name, values in weights.items()
        if name != "input_norm" or of.norms_features
    }
    # How far each row's token is from the row.
    saved["d2t"] = torch.from_numpy(tokens - np.arange(_ROWS))
    saved["t2d"] = torch.from_numpy(np.isin(np.arange(NUM_TOKENS), tokens))
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})


def _norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return rms_norm(x, (x.shape[-1],), gain, _EPSILON)


def _turned(x: torch.Tensor) -> torch.Tensor:
    """Turn each half of heads [T, heads, head_dim] by the other, from position 0 on."""
    half = _HEAD_DIM // 2
    angles = torch.outer(
        torch.arange(len(x), dtype=torch.double),
        _BASE ** (-torch.arange(half, dtype=torch.double) / half),
    )[:, None]
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

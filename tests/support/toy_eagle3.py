"""Toy EAGLE-3 drafters for toy models. The keys and tensors are what llama.cpp asks for, too."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from tests.support.gguf_files import write_gguf
from tests.support.toy_archs import ToyArch, toy_arch_metadata
from tests.support.toy_parts import Draw, Weights

ARCH = "eagle3"
GOLDEN_EAGLE3 = Path(__file__).parents[1] / "golden" / "eagle3.npz"
"""By the names of EAGLES, llama.cpp's logits behind `known_features` and each of CHAINED_TOKENS, of the tokens that the
drafter can guess, and under "NAME next" the states that the next guess takes."""
KNOWN_TOKENS = tuple((7 * n) % 90 + 40 for n in range(20))
CHAINED_TOKENS = (77, 8, 151)
"""The newest known token, and guesses behind it."""


@dataclass(frozen=True)
class ToyEagle:
    """A model and its drafter, whose sizes differ where they may.

    rows: of the head, with the token of each; 0 for a head of all tokens. own_ends: it has an embedding and a head of
    its own. slowed: a tensor of factors for the rotary embedding, as Llama 3 has it.
    """

    target: ToyArch
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    width: int = 80
    layers_read: tuple[int, int, int] = (0, 1, 2)
    rows: int = 0
    own_embedding: bool = False
    own_head: bool = True
    norms_features: bool = False
    adds_normed: bool = False
    slowed: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    seed: int = 17


EAGLES = MappingProxyType(
    {
        "rows": ToyEagle(
            ToyArch("llama", intermediate=48, seed=71), rows=90, layers_read=(1, 2, 2)
        ),
        "wide": ToyEagle(
            ToyArch("gpt-oss", layers=4, window=12, seed=72),
            hidden=48,
            heads=6,
            kv_heads=3,
            head_dim=10,
            width=50,
            rows=130,
            layers_read=(1, 2, 3),
            own_embedding=True,
            norms_features=True,
            adds_normed=True,
        ),
        "shared": ToyEagle(
            ToyArch("llama", experts=0, used=0, seed=73), own_head=False, slowed=True
        ),
        "recurrent": ToyEagle(
            ToyArch("qwen35moe", layers=5, rotary=8, seed=74),
            layers_read=(4, 1, 3),
            adds_normed=True,
            extra={
                "rope.freq_base": 50_000.0,
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 32,
            },
        ),
    }
)
"""By the names of cases: a part of the vocabulary; a width of its own; all of the model's ends; and behind recurrent layers."""


def num_tokens(toy: ToyEagle) -> int:
    """Return how many tokens the model has."""
    return len(toy_arch_metadata(toy.target)["tokenizer.ggml.tokens"])


def tokens_of_rows(toy: ToyEagle) -> np.ndarray:
    """Return the token of each row of the head, int64 [rows]: ascending, with gaps."""
    count = num_tokens(toy)
    if not toy.rows:
        return np.arange(count)
    chosen = np.random.default_rng(toy.seed).permutation(count)[: toy.rows]
    return np.sort(chosen).astype(np.int64)


def known_features(toy: ToyEagle) -> np.ndarray:
    """Return features of the positions of KNOWN_TOKENS: float32 [20, 3 * D of the model]."""
    return Draw(5).vector(len(KNOWN_TOKENS), 3 * toy.target.hidden, spread=1.0)


def eagle_weights(toy: ToyEagle) -> Weights:
    """Return the tensors."""
    draw, hidden, width = Draw(toy.seed), toy.hidden, 3 * toy.target.hidden
    q_size, kv_size = toy.heads * toy.head_dim, toy.kv_heads * toy.head_dim
    own = {
        "attn_norm": draw.gain(hidden),
        "attn_norm_2": draw.gain(hidden),
        "attn_q": draw.matrix(q_size, 2 * hidden),
        "attn_k": draw.matrix(kv_size, 2 * hidden),
        "attn_v": draw.matrix(kv_size, 2 * hidden),
        "attn_output": draw.matrix(hidden, q_size),
        "ffn_norm": draw.gain(hidden),
        "ffn_gate": draw.matrix(toy.width, hidden),
        "ffn_up": draw.matrix(toy.width, hidden),
        "ffn_down": draw.matrix(hidden, toy.width),
    }
    weights = {f"blk.0.{name}.weight": values for name, values in own.items()}
    weights["fc.weight"] = draw.matrix(hidden, width)
    weights["output_norm.weight"] = draw.gain(hidden)
    if toy.norms_features:
        weights["enc.output_norm.weight"] = draw.gain(width)
    if toy.own_embedding:
        weights["token_embd.weight"] = draw.vector(num_tokens(toy), hidden, spread=1.0)
    if toy.own_head:
        weights["output.weight"] = draw.matrix(len(tokens_of_rows(toy)), hidden, gain=3.0)
    if toy.rows:
        weights["d2t"] = tokens_of_rows(toy)
    if toy.slowed:
        weights["rope_freqs.weight"] = 1 + 7 * np.linspace(0, 1, toy.head_dim // 2, dtype="f4")
    return weights


def eagle_metadata(toy: ToyEagle) -> dict[str, Any]:
    """Return the metadata, with the model's tokenizer."""
    found = {
        key: value
        for key, value in toy_arch_metadata(toy.target).items()
        if key.startswith("tokenizer.")
    }
    keys = {
        "block_count": 1,
        "context_length": 512,
        "embedding_length": toy.hidden,
        "feed_forward_length": toy.width,
        "attention.head_count": toy.heads,
        "attention.head_count_kv": toy.kv_heads,
        "attention.key_length": toy.head_dim,
        "attention.value_length": toy.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": toy.head_dim,
        "vocab_size": num_tokens(toy),
        "target_layers": list(toy.layers_read),
        "target_hidden_size": toy.target.hidden,
        "norm_before_fc": toy.norms_features,
        "norm_before_residual": toy.adds_normed,
    }
    return (
        found
        | {"general.name": "toy eagle"}
        | {f"{ARCH}.{key}": value for key, value in (keys | toy.extra).items()}
    )


def write_eagle(
    path: Path,
    toy: ToyEagle,
    *,
    weights: Weights | None = None,
    metadata: dict[str, Any] | None = None,
) -> Path:
    """Write a drafter; `weights` replaces the tensors, `metadata` adds to or replaces keys, None takes one away."""
    tensors = eagle_weights(toy) if weights is None else weights
    keys = eagle_metadata(toy) | (metadata or {})
    kept = {key: value for key, value in keys.items() if value is not None}
    types = {"f": "F32", "i": "I64"}
    return write_gguf(
        path,
        kept,
        [(name, types[values.dtype.kind], values) for name, values in tensors.items()],
        arch=ARCH,
    )

"""Toy block diffusion drafters for toy models, in both published layouts. The keys and tensors are llama.cpp's, or the older converter's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.gguf_files import write_gguf
from tests.support.toy_archs import ToyArch, toy_arch_metadata
from tests.support.toy_parts import Draw, Weights

if TYPE_CHECKING:
    from collections.abc import Iterator

TARGET = ToyArch("qwen35moe", layers=5, rotary=8)
"""What the toys draft for."""
MASK_TOKEN = 261
GOLDEN_DFLASH = Path(__file__).parents[1] / "golden" / "dflash.npz"
"""By the names of TOYS, llama.cpp's logits of `masked_block` behind `known_features`."""
GOLDEN_AUTHORS = Path(__file__).parents[1] / "golden" / "dflash_authors.npz"
"""Values of the authors' own code (github.com/liranringel/ddtree at c96427a), made once.

"older logits": of two blocks of TOYS["plain"], with AUTHORS_BLOCKS before them. "tree tokens", "tree parents": of 1,000
random trees, one after another, whose nodes "tree sizes" counts; see tests/unit/speculation/test_tree.py.
"""
AUTHORS_BLOCKS = ((12, 77), (20, 33))
"""So many first positions of `known_features` are known, and this is the last token."""


@dataclass(frozen=True)
class ToyDrafter:
    """Sizes that differ from the model's on purpose. window: of all layers but the last; 0 is none.

    layers_read: whose inputs are its features. own_ends: it has an embedding and a head of its own.
    """

    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    width: int = 80
    block: int = 8
    window: int = 0
    rotary: int = 0
    layers_read: tuple[int, ...] = (1, 3, 4)
    own_ends: bool = False
    seed: int = 11


TOYS = {
    "plain": ToyDrafter(),
    "window": ToyDrafter(window=12),
    "own ends": ToyDrafter(own_ends=True, block=16, kv_heads=4, layers_read=(0, 2)),
    "half turned": ToyDrafter(rotary=16, layers=2, block=5),
}


def known_features(toy: ToyDrafter, target: ToyArch = TARGET) -> np.ndarray:
    """Return features of twenty positions: float32 [20, layers * D]."""
    return Draw(5).vector(20, target.hidden * len(toy.layers_read), spread=1.0)


def masked_block(toy: ToyDrafter, last: int = 77) -> list[int]:
    """Return a block with a known token, and masks behind it."""
    return [last] + [MASK_TOKEN] * (toy.block - 1)


def tree_cases() -> Iterator[tuple[np.ndarray, int]]:
    """Yield 1,000 times logits float32 [places, V], and how many nodes a tree of them may have."""
    rng = np.random.default_rng(3)
    for _ in range(1000):
        places, vocabulary = int(rng.integers(1, 16)), int(rng.integers(2, 40))
        budget, spread = int(rng.integers(1, 33)), float(rng.choice([0.3, 1.0, 3.0, 8.0]))
        yield (rng.standard_normal((places, vocabulary)) * spread).astype(np.float32), budget


def toy_drafter_weights(toy: ToyDrafter, target: ToyArch = TARGET) -> Weights:
    """Return the tensors of the present layout."""
    draw, hidden = Draw(toy.seed), target.hidden
    count = len(toy_arch_metadata(target)["tokenizer.ggml.tokens"])
    weights = {
        "fc.weight": draw.matrix(hidden, hidden * len(toy.layers_read)),
        "enc.output_norm.weight": draw.gain(hidden),
        "output_norm.weight": draw.gain(hidden),
    }
    if toy.own_ends:
        weights["token_embd.weight"] = draw.vector(count, hidden, spread=1.0)
        weights["output.weight"] = draw.matrix(count, hidden, gain=3.0)
    q_size, kv_size = toy.heads * toy.head_dim, toy.kv_heads * toy.head_dim
    for layer in range(toy.layers):
        own = {
            "attn_norm": draw.gain(hidden),
            "attn_q": draw.matrix(q_size, hidden),
            "attn_k": draw.matrix(kv_size, hidden),
            "attn_v": draw.matrix(kv_size, hidden),
            "attn_output": draw.matrix(hidden, q_size),
            "attn_q_norm": draw.gain(toy.head_dim),
            "attn_k_norm": draw.gain(toy.head_dim),
            "ffn_norm": draw.gain(hidden),
            "ffn_gate": draw.matrix(toy.width, hidden),
            "ffn_up": draw.matrix(toy.width, hidden),
            "ffn_down": draw.matrix(hidden, toy.width),
        }
        weights |= {f"blk.{layer}.{name}.weight": values for name, values in own.items()}
    return weights


def toy_drafter_metadata(toy: ToyDrafter, target: ToyArch = TARGET) -> dict[str, Any]:
    """Return the metadata of the present layout, with the model's tokenizer."""
    found = {
        key: value
        for key, value in toy_arch_metadata(target).items()
        if key.startswith("tokenizer.")
    }
    keys: dict[str, Any] = {
        "block_count": toy.layers,
        "context_length": 512,
        "embedding_length": target.hidden,
        "feed_forward_length": toy.width,
        "attention.head_count": toy.heads,
        "attention.head_count_kv": toy.kv_heads,
        "attention.key_length": toy.head_dim,
        "attention.value_length": toy.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
        "block_size": toy.block,
        "target_layers": list(toy.layers_read),
    }
    if toy.rotary:
        keys["rope.dimension_count"] = toy.rotary
    if toy.window:
        keys["attention.sliding_window"] = toy.window
        keys["attention.sliding_window_pattern"] = [True] * (toy.layers - 1) + [False]
    found |= {f"dflash.{key}": value for key, value in keys.items()}
    return found | {"general.name": "toy drafter", "tokenizer.ggml.mask_token_id": MASK_TOKEN}


def write_toy_drafter(
    path: Path,
    toy: ToyDrafter,
    target: ToyArch = TARGET,
    *,
    weights: dict[str, np.ndarray] | None = None,
    metadata: dict[str, Any] | None = None,
) -> Path:
    """Write a drafter; `weights` replaces the tensors, `metadata` adds to or replaces keys, None takes one away."""
    tensors = toy_drafter_weights(toy, target) if weights is None else weights
    keys = toy_drafter_metadata(toy, target) | (metadata or {})
    kept = {key: value for key, value in keys.items() if value is not None}
    return write_gguf(
        path, kept, [(name, "F32", each) for name, each in tensors.items()], arch="dflash"
    )


def write_older_drafter(
    path: Path, toy: ToyDrafter, target: ToyArch = TARGET, *, metadata: dict[str, Any] | None = None
) -> Path:
    """Write the same in the older layout: it names the layers whose outputs are read, and has no tokenizer."""
    arch = "qwen35-dflash-draft"
    names = {
        "fc.weight": "dflash.fc.weight",
        "enc.output_norm.weight": "dflash.hidden_norm.weight",
    }
    tensors = [
        (names.get(name, name), "F32", values)
        for name, values in toy_drafter_weights(toy, target).items()
    ]
    keys = {
        key.replace("dflash.", f"{arch}.", 1): value
        for key, value in toy_drafter_metadata(toy, target).items()
        if key.startswith("dflash.") and key not in ("dflash.block_size", "dflash.target_layers")
    }
    keys |= {
        "general.name": "older toy drafter",
        f"{arch}.dflash.block_size": toy.block,
        f"{arch}.dflash.mask_token_id": MASK_TOKEN,
        f"{arch}.dflash.n_target_layers": len(toy.layers_read),
        f"{arch}.dflash.target_layer_ids": [layer - 1 for layer in toy.layers_read],
    }
    keys |= metadata or {}
    kept = {key: value for key, value in keys.items() if value is not None}
    return write_gguf(path, kept, tensors, arch=arch)

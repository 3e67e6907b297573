"""Llama 4 Scout: its numbers with the source of each, and how its files are laid out.

Sources: C is the default of transformers' configuration class, J the model's own config.json (named in `own`). Knows no file.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from benchmarks.published_models.families import common
from benchmarks.published_models.latent import mixed_feed_forward, plain_vocabulary
from benchmarks.published_models.shape import (
    Family,
    Metadata,
    Part,
    PublishedModel,
    Shape,
    Window,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_SLOWED: Final = 16.0  # J, rope_scaling.factor
_SLOWED_FROM: Final = 8192  # J, original_max_position_embeddings: turns that take longer are slowed


def _metadata(shape: Shape) -> Metadata:
    """Llama4Model in conversion/llama.py."""
    return common(shape) | {
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "vocab_size": 202048,
        "rope.dimension_count": shape.head_dim,
        "interleave_moe_layer_step": 1,
        "expert_feed_forward_length": shape.expert_width,
    }


def _block(shape: Shape, block: int) -> Iterator[Part]:
    hidden = shape.hidden
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "attn_norm.weight", (hidden,)
    for name, rows in (("q", query), ("k", key), ("v", key)):
        yield f"attn_{name}.weight", (rows, hidden)
    yield "attn_output.weight", (hidden, query)
    yield "ffn_norm.weight", (hidden,)
    yield from mixed_feed_forward(shape, block, 1, biased=False)


def _constants(shape: Shape) -> dict[str, tuple[float, ...]]:
    """LlamaModel.generate_extra_tensors."""
    turns = (
        2 * math.pi * shape.rope_base ** (n / shape.head_dim) for n in range(0, shape.head_dim, 2)
    )
    return {"rope_freqs.weight": tuple(1.0 if turn < _SLOWED_FROM else _SLOWED for turn in turns)}


SCOUT: Final = PublishedModel(
    name="Llama-4-Scout",
    billions="108B",
    family=Family("llama4", _metadata, _block, constants=_constants),
    shape=Shape(
        layers=48,  # C
        hidden=5120,  # C
        feed_forward=16384,  # C, intermediate_size_mlp, of no layer
        heads=40,  # C
        kv_heads=8,  # C
        head_dim=128,  # C
        context=10485760,  # J
        rope_base=5e5,  # C
        rms_epsilon=1e-5,  # C
        experts=16,  # C, num_local_experts
        used=1,  # C
        expert_width=8192,  # C, intermediate_size
        # C; the window does not slide
        window=Window(tokens=8192, heads=40, rope_base=5e5, rotary=128, full_at=3),
    ),
    vocabulary=plain_vocabulary("llama4", 202048, 200000),
    config_class="Llama4TextConfig",
    own=frozenset({"feed_forward", "context"}),
)

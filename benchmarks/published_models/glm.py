"""GLM-4.5-Air: its numbers with the source of each, and how its files are laid out.

Sources: C is the default of transformers' configuration class, J the model's own config.json (named in `own`). Knows no file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from benchmarks.published_models.families import common
from benchmarks.published_models.latent import mixed_feed_forward, plain_vocabulary
from benchmarks.published_models.shape import Family, Metadata, Part, PublishedModel, Shape

if TYPE_CHECKING:
    from collections.abc import Iterator

_SIGMOID: Final = 2


def _metadata(shape: Shape) -> Metadata:
    """Glm4MoeModel in conversion/glm.py."""
    return common(shape) | {
        "expert_group_count": 1,
        "expert_group_used_count": 1,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "rope.dimension_count": shape.rotary or shape.head_dim,
        "expert_feed_forward_length": shape.expert_width,
        "expert_shared_count": 1,
        "leading_dense_block_count": shape.dense_layers,
        "expert_gating_func": _SIGMOID,
        "expert_weights_scale": shape.routed_scale,
        "expert_weights_norm": True,
        "nextn_predict_layers": shape.mtp_blocks,
    }


def _block(shape: Shape, block: int) -> Iterator[Part]:
    hidden = shape.hidden
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "attn_norm.weight", (hidden,)
    for name, rows in (("q", query), ("k", key), ("v", key)):
        yield f"attn_{name}.weight", (rows, hidden)
        yield f"attn_{name}.bias", (rows,)
    yield "attn_output.weight", (hidden, query)
    yield "post_attention_norm.weight", (hidden,)
    yield from mixed_feed_forward(shape, block, 1, biased=True)
    if block >= shape.layers:
        yield "nextn.eh_proj.weight", (hidden, 2 * hidden)
        for name in ("enorm", "hnorm", "shared_head_norm"):
            yield f"nextn.{name}.weight", (hidden,)


GLM_AIR: Final = PublishedModel(
    name="GLM-4.5-Air",
    billions="107B",  # 106.85; its card says 106B
    family=Family("glm4moe", _metadata, _block),
    shape=Shape(
        layers=46,  # C
        hidden=4096,  # C
        feed_forward=10944,  # C; 256 does not divide it
        heads=96,  # C
        kv_heads=8,  # C
        head_dim=128,  # J
        context=131072,  # C
        rope_base=1e6,  # J
        rms_epsilon=1e-5,  # C
        experts=128,  # C
        used=8,  # C
        expert_width=1408,  # C; 256 does not divide it
        rotary=64,  # C, half of the head
        dense_layers=1,  # C
        mtp_blocks=1,  # C
    ),
    vocabulary=plain_vocabulary("glm4", 151552, 151329),
    config_class="Glm4MoeConfig",
    own=frozenset({"rope_base"}),
)

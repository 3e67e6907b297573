"""Kimi-Linear-48B-A3B: its numbers with their sources, and how its files are laid out (KimiLinearModel in llama.cpp's converter).

Sources and vocabularies as in `latent.py`. Knows no file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from benchmarks.published_models.families import common, delta_of
from benchmarks.published_models.latent import (
    Latent,
    latent_attention,
    mixed_feed_forward,
    plain_vocabulary,
)
from benchmarks.published_models.shape import Delta, Family, Metadata, Part, PublishedModel, Shape

if TYPE_CHECKING:
    from collections.abc import Iterator

_SIGMOID: Final = 2
_LATENT: Final = Latent(query_rank=0, plain=128, value=128, shared=1)  # C


def _metadata(shape: Shape) -> Metadata:
    delta = delta_of(shape)
    return common(shape) | {
        "attention.head_count_kv": tuple(
            int(not shape.is_recurrent(n)) for n in range(shape.blocks)
        ),
        "expert_group_count": 1,
        "expert_group_used_count": 1,
        "expert_gating_func": _SIGMOID,
        "vocab_size": 163840,
        "ssm.conv_kernel": delta.conv,
        "kda.head_dim": delta.state,
        "attention.kv_lora_rank": _LATENT.rank,
        "rope.dimension_count": _LATENT.rotary,
        "attention.key_length": _LATENT.rank + _LATENT.rotary,
        "attention.key_length_mla": _LATENT.plain + _LATENT.rotary,
        "attention.value_length_mla": _LATENT.value,
        "expert_feed_forward_length": shape.expert_width,
        "expert_shared_count": _LATENT.shared,
        "leading_dense_block_count": shape.dense_layers,
        "expert_weights_scale": shape.routed_scale,
    }


def _block(shape: Shape, block: int) -> Iterator[Part]:
    if shape.is_recurrent(block):
        yield from _delta_rule(shape)
    else:
        yield from latent_attention(shape, _LATENT)
    yield "ffn_norm.weight", (shape.hidden,)
    yield from mixed_feed_forward(shape, block, _LATENT.shared, biased=True)


def _delta_rule(shape: Shape) -> Iterator[Part]:
    delta, hidden = delta_of(shape), shape.hidden
    yield "attn_norm.weight", (hidden,)
    width, rank = delta.values, delta.state
    for part in "qkv":
        yield f"attn_{part}.weight", (width, hidden)
        yield f"ssm_conv1d_{part}.weight", (1, width, 1, delta.conv)
    for part in "fg":
        yield f"ssm_{part}_a.weight", (rank, hidden)
        yield f"ssm_{part}_b.weight", (width, rank)
    yield "ssm_beta.weight", (delta.value_heads, hidden)
    yield "ssm_a", (delta.value_heads, 1)
    yield "ssm_dt.bias", (width,)
    yield "ssm_norm.weight", (rank,)
    yield "attn_output.weight", (hidden, width)


KIMI_ROWS: Final = (
    PublishedModel(
        name="Kimi-Linear-48B-A3B",
        billions="49B",  # 49.12; its card says 48B
        family=Family("kimi-linear", _metadata, _block),
        shape=Shape(
            layers=27,  # C
            hidden=2304,  # C
            feed_forward=9216,  # C
            heads=32,  # C
            kv_heads=32,  # C
            head_dim=64,  # C, what would turn
            context=1048576,  # C, model_max_length
            rope_base=1e4,  # J
            rms_epsilon=1e-5,  # C
            experts=256,  # C
            used=8,  # C
            expert_width=1024,  # C
            routed_scale=2.446,  # C
            dense_layers=1,  # C, mlp_layer_types
            # C, but for which layers
            delta=Delta(conv=4, key_heads=32, value_heads=32, state=128, full=(26,)),
        ),
        vocabulary=plain_vocabulary("kimi-k2", 163840, 163584),
        config_class="KimiLinearConfig",
        own=frozenset({"rope_base"}),
    ),
)

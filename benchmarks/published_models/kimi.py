"""Kimi-Linear-48B-A3B: its numbers with their sources, and how its files are laid out (KimiLinearModel in llama.cpp's converter).

Sources and vocabularies as in `latent.py`. Knows no file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from benchmarks.published_models.latent import feed_forward, plain_vocabulary
from benchmarks.published_models.shape import Delta, Family, Metadata, Part, PublishedModel, Shape

if TYPE_CHECKING:
    from collections.abc import Iterator

_SIGMOID: Final = 2
_RANK: Final = 512  # C, kv_lora_rank
_PLAIN: Final = 128  # C, qk_nope_head_dim
_VALUE: Final = 128  # C, v_head_dim
_SHARED: Final = 1  # C, num_shared_experts


def _metadata(shape: Shape) -> Metadata:
    delta = _delta_of(shape)
    return {
        "block_count": shape.blocks,
        "context_length": shape.context,
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.feed_forward or 0,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": tuple(
            int(not shape.is_recurrent(n)) for n in range(shape.blocks)
        ),
        "rope.freq_base": shape.rope_base,
        "attention.layer_norm_rms_epsilon": shape.rms_epsilon,
        "expert_count": shape.experts,
        "expert_used_count": shape.used,
        "expert_group_count": 1,
        "expert_group_used_count": 1,
        "expert_gating_func": _SIGMOID,
        "vocab_size": 163840,
        "ssm.conv_kernel": delta.conv,
        "kda.head_dim": delta.state,
        "attention.kv_lora_rank": _RANK,
        "rope.dimension_count": shape.head_dim,
        "attention.key_length": _RANK + shape.head_dim,
        "attention.key_length_mla": _PLAIN + shape.head_dim,
        "attention.value_length_mla": _VALUE,
        "expert_feed_forward_length": shape.expert_width,
        "expert_shared_count": _SHARED,
        "leading_dense_block_count": shape.dense_layers,
        "expert_weights_scale": shape.routed_scale,
    }


def _block(shape: Shape, block: int) -> Iterator[Part]:
    hidden, width = shape.hidden, shape.expert_width
    yield "attn_norm.weight", (hidden,)
    yield from (_delta_rule(shape) if shape.is_recurrent(block) else _attention(shape))
    yield "ffn_norm.weight", (hidden,)
    if block < shape.dense_layers:
        yield from feed_forward(hidden, shape.feed_forward or 0, "")
        return
    yield "ffn_gate_inp.weight", (shape.experts, hidden)
    for name, size in feed_forward(hidden, width, "_exps"):
        yield name, (shape.experts, *size)
    yield "exp_probs_b.bias", (shape.experts,)
    yield from feed_forward(hidden, _SHARED * width, "_shexp")


def _attention(shape: Shape) -> Iterator[Part]:
    hidden, heads = shape.hidden, shape.heads
    yield "attn_q.weight", (heads * (_PLAIN + shape.head_dim), hidden)
    yield "attn_kv_a_mqa.weight", (_RANK + shape.head_dim, hidden)
    yield "attn_kv_a_norm.weight", (_RANK,)
    yield "attn_k_b.weight", (heads, _RANK, _PLAIN)
    yield "attn_v_b.weight", (heads, _VALUE, _RANK)
    yield "attn_output.weight", (hidden, heads * _VALUE)


def _delta_rule(shape: Shape) -> Iterator[Part]:
    delta, hidden = _delta_of(shape), shape.hidden
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


def _delta_of(shape: Shape) -> Delta:
    assert shape.delta is not None, "Kimi Linear keeps states"
    return shape.delta


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

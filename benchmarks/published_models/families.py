"""How each architecture's files are laid out: metadata and tensors of llama.cpp's converter (conversion/*.py).

Knows no model's numbers, no tensor type and no vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from benchmarks.published_models.shape import Delta, Family, Metadata, Part, Shape, Window, Yarn

if TYPE_CHECKING:
    from collections.abc import Iterator

_SIGMOID: Final = 2
"""GGUF's number of the gating function, in gguf.ExpertGatingFuncType."""


def common(shape: Shape) -> Metadata:
    """TextModel.set_gguf_parameters in conversion/base.py, in its order."""
    found: Metadata = {
        "block_count": shape.blocks,
        "context_length": shape.context,
        "embedding_length": shape.hidden,
    }
    if shape.feed_forward is not None:
        found["feed_forward_length"] = shape.feed_forward
    found["attention.head_count"] = shape.heads
    found["attention.head_count_kv"] = shape.kv_heads
    if shape.mrope_sections:
        found["rope.dimension_sections"] = shape.mrope_sections
    found["rope.freq_base"] = shape.rope_base
    found["attention.layer_norm_rms_epsilon"] = shape.rms_epsilon
    found["expert_count"] = shape.experts
    found["expert_used_count"] = shape.used
    return found


def _head_length(shape: Shape) -> Metadata:
    """Written where the configuration has head_dim."""
    return {
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
    }


def _moe(shape: Shape) -> Metadata:
    """Qwen2MoeModel.set_gguf_parameters in conversion/qwen.py."""
    found: Metadata = {"expert_feed_forward_length": shape.expert_width}
    if shape.shared_width:
        found["expert_shared_feed_forward_length"] = shape.shared_width
    return found


def _hybrid_metadata(shape: Shape) -> Metadata:
    """Qwen3NextModel and _QwenMtpMixin in conversion/qwen.py."""
    delta = delta_of(shape)
    found = common(shape) | _head_length(shape) | _moe(shape)
    if shape.mtp_blocks:
        found["nextn_predict_layers"] = shape.mtp_blocks
    return found | {
        "ssm.conv_kernel": delta.conv,
        "ssm.state_size": delta.state,
        "ssm.group_count": delta.key_heads,
        "ssm.time_step_rank": delta.value_heads,
        "ssm.inner_size": delta.values,
        "attention.recurrent_layers": tuple(map(shape.is_recurrent, range(shape.blocks))),
        "full_attention_interval": delta.interval,
        "rope.dimension_count": shape.rotary or shape.head_dim,
    }


def _laguna_metadata(shape: Shape) -> Metadata:
    """LagunaModel in conversion/laguna.py."""
    window, yarn = _window_of(shape), _yarn_of(shape)
    found = common(shape)
    found["attention.head_count"] = tuple(shape.heads_of(layer) for layer in range(shape.layers))
    return (
        found
        | {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": yarn.factor,
            "rope.scaling.original_context_length": yarn.original_context,
            "rope.scaling.yarn_attn_factor": yarn.attention_factor,
            "rope.scaling.yarn_beta_fast": yarn.beta_fast,
            "rope.scaling.yarn_beta_slow": yarn.beta_slow,
            "rope.freq_base_swa": window.rope_base,
            "attention.sliding_window": window.tokens,
            "expert_weights_norm": True,
            "expert_weights_scale": shape.routed_scale,
            "expert_gating_func": _SIGMOID,
            "leading_dense_block_count": shape.dense_layers,
            "rope.dimension_count": shape.rotary or shape.head_dim,
            "rope.dimension_count_swa": window.rotary,
        }
        | _head_length(shape)
        | _moe(shape)
    )


def _attention(shape: Shape, heads: int, *, gates: int = 0) -> Iterator[Part]:
    """Yield the four projections. gates: rows of the query projection beside the queries."""
    query, key = heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "attn_norm.weight", (shape.hidden,)
    yield "attn_q.weight", (query + gates, shape.hidden)
    yield "attn_k.weight", (key, shape.hidden)
    yield "attn_v.weight", (key, shape.hidden)
    yield "attn_output.weight", (shape.hidden, query)


def _head_norms(query: int, key: int) -> Iterator[Part]:
    yield "attn_q_norm.weight", (query,)
    yield "attn_k_norm.weight", (key,)


def _experts(shape: Shape) -> Iterator[Part]:
    hidden, width = shape.hidden, shape.expert_width
    yield "ffn_gate_inp.weight", (shape.experts, hidden)
    yield "ffn_gate_exps.weight", (shape.experts, width, hidden)
    yield "ffn_up_exps.weight", (shape.experts, width, hidden)
    yield "ffn_down_exps.weight", (shape.experts, hidden, width)


def _shared_expert(shape: Shape, *, is_gated: bool) -> Iterator[Part]:
    hidden, width = shape.hidden, shape.shared_width
    yield "ffn_gate_shexp.weight", (width, hidden)
    yield "ffn_up_shexp.weight", (width, hidden)
    yield "ffn_down_shexp.weight", (hidden, width)
    if is_gated:
        yield "ffn_gate_inp_shexp.weight", (1, hidden)  # two dimensions, as in the checkpoint


def _qwen3moe_block(shape: Shape, _block: int) -> Iterator[Part]:
    yield from _attention(shape, shape.heads)
    yield from _head_norms(shape.head_dim, shape.head_dim)
    yield "ffn_norm.weight", (shape.hidden,)
    yield from _experts(shape)


def _qwen2moe_block(shape: Shape, _block: int) -> Iterator[Part]:
    yield from _attention(shape, shape.heads)
    for name, heads in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads)):
        yield f"attn_{name}.bias", (heads * shape.head_dim,)
    yield "ffn_norm.weight", (shape.hidden,)
    yield from _experts(shape)
    yield from _shared_expert(shape, is_gated=True)


def _olmoe_block(shape: Shape, _block: int) -> Iterator[Part]:
    yield from _attention(shape, shape.heads)
    yield from _head_norms(shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim)
    yield "ffn_norm.weight", (shape.hidden,)
    yield from _experts(shape)


def _hybrid_block(shape: Shape, block: int, *, is_fused: bool) -> Iterator[Part]:
    """Yield a hybrid model's block. is_fused: beta and alpha are one tensor."""
    hidden = shape.hidden
    if shape.is_recurrent(block):
        yield from _delta_rule(shape, is_fused=is_fused)
    else:
        yield from _attention(shape, shape.heads, gates=shape.heads * shape.head_dim)
        yield from _head_norms(shape.head_dim, shape.head_dim)
    yield "post_attention_norm.weight", (hidden,)
    yield from _experts(shape)
    yield from _shared_expert(shape, is_gated=True)
    if block >= shape.layers:
        yield "nextn.eh_proj.weight", (hidden, 2 * hidden)
        for name in ("enorm", "hnorm", "shared_head_norm"):
            yield f"nextn.{name}.weight", (hidden,)


def _delta_rule(shape: Shape, *, is_fused: bool) -> Iterator[Part]:
    delta, hidden = delta_of(shape), shape.hidden
    yield "attn_norm.weight", (hidden,)
    yield "attn_qkv.weight", (delta.channels, hidden)
    yield "attn_gate.weight", (delta.values, hidden)
    if is_fused:
        yield "ssm_ba.weight", (2 * delta.value_heads, hidden)
    else:
        yield "ssm_alpha.weight", (delta.value_heads, hidden)
        yield "ssm_beta.weight", (delta.value_heads, hidden)
    yield "ssm_conv1d.weight", (delta.channels, delta.conv)
    yield "ssm_dt.bias", (delta.value_heads,)
    yield "ssm_a", (delta.value_heads,)
    yield "ssm_norm.weight", (delta.state,)
    yield "ssm_out.weight", (hidden, delta.values)


def _qwen3next_block(shape: Shape, block: int) -> Iterator[Part]:
    return _hybrid_block(shape, block, is_fused=True)


def _qwen35moe_block(shape: Shape, block: int) -> Iterator[Part]:
    return _hybrid_block(shape, block, is_fused=False)


def _laguna_block(shape: Shape, block: int) -> Iterator[Part]:
    heads, hidden = shape.heads_of(block), shape.hidden
    yield from _attention(shape, heads)
    yield from _head_norms(shape.head_dim, shape.head_dim)
    yield "attn_gate.weight", (heads, hidden)
    yield "ffn_norm.weight", (hidden,)
    if block < shape.dense_layers:
        width = shape.feed_forward or 0
        yield "ffn_gate.weight", (width, hidden)
        yield "ffn_up.weight", (width, hidden)
        yield "ffn_down.weight", (hidden, width)
        return
    yield from _experts(shape)
    yield "exp_probs_b.bias", (shape.experts,)
    yield from _shared_expert(shape, is_gated=False)


def _oss_metadata(shape: Shape) -> Metadata:
    """GptOssModel in conversion/gpt_oss.py."""
    window, yarn = _window_of(shape), _yarn_of(shape)
    return (
        common(shape)
        | _head_length(shape)
        | {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": yarn.factor,
            "rope.scaling.original_context_length": yarn.original_context,
            "rope.scaling.yarn_beta_fast": yarn.beta_fast,
            "rope.scaling.yarn_beta_slow": yarn.beta_slow,
            "attention.sliding_window": window.tokens,
        }
        | _moe(shape)
    )


def _oss_block(shape: Shape, _block: int) -> Iterator[Part]:
    hidden, query, key = (
        shape.hidden,
        shape.heads * shape.head_dim,
        shape.kv_heads * shape.head_dim,
    )
    yield from _attention(shape, shape.heads)
    for name, rows in (("q", query), ("k", key), ("v", key), ("output", hidden)):
        yield f"attn_{name}.bias", (rows,)
    yield "attn_sinks.weight", (shape.heads,)
    yield "post_attention_norm.weight", (hidden,)
    yield from _experts(shape)
    yield "ffn_gate_inp.bias", (shape.experts,)
    for role, rows in (("gate", shape.expert_width), ("up", shape.expert_width), ("down", hidden)):
        yield f"ffn_{role}_exps.bias", (shape.experts, rows)


def delta_of(shape: Shape) -> Delta:
    """Return the gated delta rule of a model that has one."""
    assert shape.delta is not None
    return shape.delta


def _window_of(shape: Shape) -> Window:
    assert shape.window is not None
    return shape.window


def _yarn_of(shape: Shape) -> Yarn:
    assert shape.yarn is not None
    return shape.yarn


QWEN2MOE: Final = Family("qwen2moe", lambda s: common(s) | _moe(s), _qwen2moe_block)
QWEN3MOE: Final = Family(
    "qwen3moe", lambda s: common(s) | _head_length(s) | _moe(s), _qwen3moe_block
)
QWEN3NEXT: Final = Family("qwen3next", _hybrid_metadata, _qwen3next_block)
QWEN35MOE: Final = Family("qwen35moe", _hybrid_metadata, _qwen35moe_block)
OLMOE: Final = Family("olmoe", common, _olmoe_block)
LAGUNA: Final = Family("laguna", _laguna_metadata, _laguna_block)
GPT_OSS: Final = Family("gpt-oss", _oss_metadata, _oss_block)

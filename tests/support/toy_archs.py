"""Small random models of every architecture but qwen3moe: shapes that hurt, valid in every respect.

Knows how each architecture names its tensors and keys, by the GGUF convention. Knows no oracle.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support import (
    toy_dense,
    toy_dots3,
    toy_formulas,
    toy_hy_v4,
    toy_norms,
    toy_recurrent,
    toy_routers,
    toy_streams,
)
from tests.support.gguf_files import write_gguf
from tests.support.known_files import write_known
from tests.support.toy_deepseek4 import deepseek4_keys, deepseek4_layer, deepseek4_top
from tests.support.toy_gemma import NO_EXPERTS, gemma4_keys, gemma4_layer, gemma4_top
from tests.support.toy_glm5 import glm5_keys, glm5_layer
from tests.support.toy_jamba import jamba_keys, jamba_layer
from tests.support.toy_latent import (
    bailingmoe3_keys,
    bailingmoe3_layer,
    deepseek2_keys,
    deepseek2_layer,
    deepseek32_keys,
    deepseek32_layer,
    kimi_linear_keys,
    kimi_linear_layer,
)
from tests.support.toy_minimax_m3 import minimax_m3_keys, minimax_m3_layer
from tests.support.toy_model import ToyShape, byte_vocabulary, tensor_format, toy_metadata
from tests.support.toy_parts import Draw, Weights, attention, dense, experts, head_norms

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@dataclass(frozen=True)
class ToyArch:
    """A toy model of an architecture. What an architecture does not have is not looked at."""

    arch: str
    layers: int = 3
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    experts: int = 8
    used: int = 2
    intermediate: int = 32
    shared: int = 48
    rotary: int = 16
    tied: bool = False
    seed: int = 7
    context: int = 512
    rms_epsilon: float = 1e-6
    formats: dict[str, str] = field(default_factory=dict)
    """Tensor type by role, as in `ToyShape`."""
    extra: dict[str, Any] = field(default_factory=dict)
    """More keys of the metadata, without the architecture's prefix."""
    biased: bool = True
    all_biased: bool = False
    """Biases of attention's output and of a dense feed-forward, too."""
    narrow: int = 0
    """Width of what routed experts take and give, where it is their own."""
    key_heads: int = 2
    value_heads: int = 4
    state: int = 16
    value_state: int = 0
    """Of a value head, where it is not `state`, a key head's."""
    conv_width: int = 4
    interval: int = 4
    dense: int = 1
    window: int = 0
    head_gates: bool = True
    """A number per head, or one for each of a head's numbers."""
    fused: bool = False
    """Gate and up of the experts in one tensor."""
    slowed: bool = False
    """A tensor of factors for the rotary embedding, as Llama 3 has it."""
    stretched: bool = False
    """Two of them: for short contexts, and for long ones."""
    query_rank: int = 0
    """Numbers between the two matrices of queries; 0 for one matrix."""
    rank: int = 32
    joined: bool = False
    """Keys and values of latent heads in one tensor, as old converters left them; of mimo2 q, k and v."""
    value_dim: int = 16
    puzzle: bool = False
    """Layers with experts differ in how wide those are, and in how many a token uses."""
    near_kv_heads: int = 2
    near_head_dim: int = 16
    """Of layers with a window, where they have heads of their own."""
    layer_embedding: int = 0
    """Width of each layer's own embeddings."""
    readers: int = 0
    """How many last layers attend to the keys and values of earlier ones; their feed-forward is twice as wide."""

    def normal(self) -> ToyShape:
        """The dimensions that all architectures share."""
        return ToyShape(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            experts=self.experts,
            used=self.used,
            intermediate=self.intermediate,
            context=self.context,
            rms_epsilon=self.rms_epsilon,
            tied=self.tied,
            formats=self.formats,
            seed=self.seed,
        )


def toy_arch_metadata(toy: ToyArch) -> dict[str, Any]:
    """Return all metadata, tokenizer included."""
    metadata = {}
    for key, value in toy_metadata(toy.normal()).items():
        metadata[key.replace("qwen3moe.", f"{toy.arch}.")] = value
    own = _KEYS[toy.arch](toy) | toy.extra
    metadata |= {f"{toy.arch}.{key}": value for key, value in own.items()}
    return {key: value for key, value in metadata.items() if value is not None}


def toy_arch_weights(toy: ToyArch) -> Weights:
    """Return the float32 tensors by GGUF name, drawn from `toy.seed`."""
    draw = Draw(toy.seed)
    num_tokens = len(byte_vocabulary()[0])
    weights = {
        "token_embd.weight": draw.matrix(num_tokens, toy.hidden, gain=_spread(toy)),
        _OUTPUT_NORMS.get(toy.arch, "output_norm.weight"): draw.gain(toy.hidden),
    }
    weights |= _TOP[toy.arch](toy, draw) if toy.arch in _TOP else {}
    if not toy.tied:
        weights["output.weight"] = draw.matrix(num_tokens, toy.hidden, gain=3.0)
    loud = 1.5 * np.sqrt(toy.hidden) if toy.tied else 1.0
    for layer in range(toy.layers):
        for name, values in _LAYERS[toy.arch](toy, draw, layer).items():
            # A tied model's layers speak louder, or it would repeat its last token.
            is_end = name in _ENDS or (name == "ffn_down.weight" and not toy.experts)
            # Tables stay whole numbers.
            weights[f"blk.{layer}.{name}"] = values * np.float32(loud) if is_end else values
    if toy.slowed:
        spread = draw.vector(toy.head_dim // 2, spread=1.0)
        weights["rope_freqs.weight"] = np.exp(spread).astype(np.float32)
    return weights


def toy_layer(toy: ToyArch, draw: Draw, layer: int) -> Weights:
    """Return one layer's tensors without `blk.N.`."""
    return _LAYERS[toy.arch](toy, draw, layer)


def _spread(toy: ToyArch) -> float:
    """What makes embeddings of ones, which some multiply by as much."""
    return 1.0 if toy.arch in ("afmoe", "gemma4") else float(np.sqrt(toy.hidden))


def write_toy_arch(
    path: Path,
    toy: ToyArch,
    *,
    weights: Weights | None = None,
    metadata: dict[str, Any] | None = None,
) -> Path:
    """Write a toy model; `weights` replaces the random ones, `metadata` adds to or replaces keys."""
    if weights is None and metadata is None:
        return write_known(path, toy, lambda place: _write(place, toy, toy_arch_weights(toy), {}))
    return _write(path, toy, weights or toy_arch_weights(toy), metadata or {})


def _write(path: Path, toy: ToyArch, weights: Weights, metadata: dict[str, Any]) -> Path:
    shape = toy.normal()
    tensors = [(name, tensor_format(shape, name), values) for name, values in weights.items()]
    all_metadata = toy_arch_metadata(toy) | metadata
    kept = {key: value for key, value in all_metadata.items() if value is not None}
    return write_gguf(path, kept, tensors, arch=toy.arch)


def _olmoe_keys(toy: ToyArch) -> dict[str, Any]:
    return {"feed_forward_length": toy.intermediate, "expert_feed_forward_length": None}


def _olmoe_layer(toy: ToyArch, draw: Draw, layer: int) -> Weights:
    return {
        **attention(toy, draw),
        "attn_q_norm.weight": draw.gain(toy.heads * toy.head_dim),
        "attn_k_norm.weight": draw.gain(toy.kv_heads * toy.head_dim),
        "ffn_norm.weight": draw.gain(toy.hidden),
        **experts(toy, draw),
    }


def _qwen2moe_keys(toy: ToyArch) -> dict[str, Any]:
    return {"expert_shared_feed_forward_length": toy.shared}


def _qwen2moe_layer(toy: ToyArch, draw: Draw, layer: int) -> Weights:
    weights = {
        **attention(toy, draw),
        "ffn_norm.weight": draw.gain(toy.hidden),
        **experts(toy, draw),
        **dense(toy, draw, toy.shared, "_shexp"),
        "ffn_gate_inp_shexp.weight": draw.vector(toy.hidden, spread=0.2),
    }
    if toy.biased:
        for part in ("q", "k", "v"):
            rows = len(weights[f"attn_{part}.weight"])
            weights[f"attn_{part}.bias"] = draw.vector(rows, spread=0.3)
    return weights


def _hybrid_keys(toy: ToyArch) -> dict[str, Any]:
    return {
        "expert_shared_feed_forward_length": toy.shared,
        "rope.dimension_count": toy.rotary,
        "full_attention_interval": toy.interval,
        "ssm.conv_kernel": toy.conv_width,
        "ssm.state_size": toy.state,
        "ssm.group_count": toy.key_heads,
        "ssm.time_step_rank": toy.value_heads,
        "ssm.inner_size": toy.value_heads * (toy.value_state or toy.state),
    }


def _qwen35moe_keys(toy: ToyArch) -> dict[str, Any]:
    # Pairs go to the three in turns; one that belonged to none would not be turned by llama.cpp.
    sections = [len(range(part, toy.rotary // 2, 3)) for part in range(3)] + [0]
    return _hybrid_keys(toy) | {"rope.dimension_sections": sections}


def _qwen35_keys(toy: ToyArch) -> dict[str, Any]:
    own = {"feed_forward_length": toy.shared, "expert_shared_feed_forward_length": None}
    return _qwen35moe_keys(toy) | NO_EXPERTS | own


def _hybrid_layer(toy: ToyArch, draw: Draw, layer: int) -> Weights:
    if (layer + 1) % toy.interval:
        mixer = _delta(toy, draw)
    else:
        mixer = attention(toy, draw, q_rows=2) | head_norms(toy, draw)
    if not toy.experts:
        norm = {"post_attention_norm.weight": draw.gain(toy.hidden)}
        return mixer | norm | dense(toy, draw, toy.shared, "")
    routed = experts(toy, draw)
    if toy.fused:
        parts = [routed.pop(f"ffn_{role}_exps.weight") for role in ("gate", "up")]
        routed["ffn_gate_up_exps.weight"] = np.concatenate(parts, axis=1)
    return {
        **mixer,
        "post_attention_norm.weight": draw.gain(toy.hidden),
        **routed,
        **dense(toy, draw, toy.shared, "_shexp"),
        "ffn_gate_inp_shexp.weight": draw.vector(toy.hidden, spread=0.2),
    }


def _qwen4exp_keys(toy: ToyArch) -> dict[str, Any]:
    return _qwen35moe_keys(toy) | toy_streams.streams_keys(toy)


def _qwen4exp_layer(toy: ToyArch, draw: Draw, layer: int) -> Weights:
    return toy_streams.streams_layer(toy, draw, layer, _hybrid_layer(toy, draw, layer))


def _delta(toy: ToyArch, draw: Draw) -> Weights:
    value_state = toy.value_state or toy.state
    keys, values = toy.key_heads * toy.state, toy.value_heads * value_state
    weights = {
        "attn_norm.weight": draw.gain(toy.hidden),
        "attn_qkv.weight": draw.matrix(2 * keys + values, toy.hidden),
        "attn_gate.weight": draw.matrix(values, toy.hidden),
        "ssm_conv1d.weight": draw.vector(2 * keys + values, toy.conv_width, spread=0.5),
        "ssm_dt.bias": draw.vector(toy.value_heads, spread=0.5, mean=-1.0),
        "ssm_a": -np.exp(draw.vector(toy.value_heads, spread=1.0, mean=-1.0)),
        "ssm_norm.weight": draw.gain(value_state),
        "ssm_out.weight": draw.matrix(toy.hidden, values),
    }
    if toy.arch == "qwen3next":
        weights["ssm_ba.weight"] = draw.matrix(2 * toy.value_heads, toy.hidden)
        return weights
    for part in ("alpha", "beta"):
        weights[f"ssm_{part}.weight"] = draw.matrix(toy.value_heads, toy.hidden)
    return weights


def _laguna_keys(toy: ToyArch) -> dict[str, Any]:
    return {
        "attention.head_count": [_heads_of(toy, layer) for layer in range(toy.layers)],
        "expert_shared_feed_forward_length": toy.shared,
        "expert_shared_count": 1,
        "leading_dense_block_count": toy.dense,
        "feed_forward_length": 2 * toy.shared,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.5,
        "expert_gating_func": 2,
        "rope.dimension_count": toy.rotary,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 8.0,
        "rope.scaling.original_context_length": 64,
        "rope.scaling.yarn_beta_fast": 8.0,
        "rope.scaling.yarn_beta_slow": 1.0,
        "attention.sliding_window": toy.window or None,
        "rope.dimension_count_swa": toy.head_dim if toy.window else None,
        "rope.freq_base_swa": 500.0 if toy.window else None,
    }


def _heads_of(toy: ToyArch, layer: int) -> int:
    """Layers with a window have more heads."""
    return toy.heads if layer % 4 == 0 or not toy.window else toy.heads + toy.kv_heads


def _laguna_layer(toy: ToyArch, draw: Draw, layer: int) -> Weights:
    heads = _heads_of(toy, layer)
    gates = heads if toy.head_gates else heads * toy.head_dim
    weights = {
        **attention(toy, draw, heads),
        **head_norms(toy, draw),
        "attn_gate.weight": draw.matrix(gates, toy.hidden),
        "ffn_norm.weight": draw.gain(toy.hidden),
    }
    if layer < toy.dense:
        return weights | dense(toy, draw, 2 * toy.shared, "")
    return {
        **weights,
        **experts(toy, draw),
        "exp_probs_b.bias": draw.vector(toy.experts, spread=0.2),
        **dense(toy, draw, toy.shared, "_shexp"),
    }


_KEYS: dict[str, Callable[[ToyArch], dict[str, Any]]] = {
    "bailingmoe3": bailingmoe3_keys,
    "deepseek2": deepseek2_keys,
    "deepseek32": deepseek32_keys,
    "deepseek4": deepseek4_keys,
    "glm-dsa": deepseek32_keys,
    "glm5-next": glm5_keys,
    "jamba": jamba_keys,
    "kimi-linear": kimi_linear_keys,
    "minimax-m3": minimax_m3_keys,
    "mistral4": deepseek2_keys,
    "gemma4": gemma4_keys,
    "laguna": _laguna_keys,
    "olmoe": _olmoe_keys,
    "qwen2moe": _qwen2moe_keys,
    "qwen35": _qwen35_keys,
    "qwen35moe": _qwen35moe_keys,
    "qwen4exp": _qwen4exp_keys,
    "qwen3next": _hybrid_keys,
    **toy_dense.KEYS,
    **toy_routers.KEYS,
    **toy_formulas.KEYS,
    **toy_norms.KEYS,
    **toy_recurrent.KEYS,
    **toy_hy_v4.KEYS,
    **toy_dots3.KEYS,
}
_TOP: dict[str, Callable[[ToyArch, Draw], Weights]] = {
    "deepseek4": deepseek4_top,
    "gemma4": gemma4_top,
    "qwen4exp": toy_streams.streams_top,
    **toy_hy_v4.TOP,
    **toy_norms.TOP,
}
_LAYERS: dict[str, Callable[[ToyArch, Draw, int], Weights]] = {
    "bailingmoe3": bailingmoe3_layer,
    "deepseek2": deepseek2_layer,
    "deepseek32": deepseek32_layer,
    "deepseek4": deepseek4_layer,
    "glm-dsa": deepseek32_layer,
    "glm5-next": glm5_layer,
    "jamba": jamba_layer,
    "kimi-linear": kimi_linear_layer,
    "minimax-m3": minimax_m3_layer,
    "mistral4": deepseek2_layer,
    "gemma4": gemma4_layer,
    "laguna": _laguna_layer,
    "olmoe": _olmoe_layer,
    "qwen2moe": _qwen2moe_layer,
    "qwen35": _hybrid_layer,
    "qwen35moe": _hybrid_layer,
    "qwen4exp": _qwen4exp_layer,
    "qwen3next": _hybrid_layer,
    **toy_dense.LAYERS,
    **toy_routers.LAYERS,
    **toy_formulas.LAYERS,
    **toy_norms.LAYERS,
    **toy_recurrent.LAYERS,
    **toy_hy_v4.LAYERS,
    **toy_dots3.LAYERS,
}
_OUTPUT_NORMS = dict.fromkeys(("lfm2", "lfm2moe"), "token_embd_norm.weight")
_OUTPUT_NORMS["qwen4exp"] = "output_hc_norm.weight"
_ENDS = (
    "attn_output.weight",
    "ffn_down_exps.weight",
    "ssm_out.weight",
    "shortconv.out_proj.weight",
)

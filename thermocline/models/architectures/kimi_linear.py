"""Kimi Linear: delta rule with a decay per channel, every fourth layer latent attention that does not turn."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from thermocline.kernels.delta_contract import DeltaRule, DeltaShape
from thermocline.kernels.whole_layer import DeltaWeights
from thermocline.models.gated_delta import delta_shape
from thermocline.models.latent import read_latent_attention, still_rope, with_still_latent
from thermocline.models.metadata import SpecReader
from thermocline.models.mixed_layers import mixed_layer, mixed_spec
from thermocline.models.spec import LayerKind

if TYPE_CHECKING:
    from thermocline.kernels.weight import FloatArray, Weight
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`. A layer without heads of keys keeps a state, with as many heads as attention has.

    llama.cpp divides the chosen experts' weights by their sum whatever a file says, and its converter says nothing.
    """
    read = SpecReader(file, is_latent=True)
    read.refuse("kda.safe_gate", "kda.gate_lower_bound")
    kv_heads, _ = read.attention_heads("attention.head_count_kv", read.size("block_count"))
    normalize = read.flag("expert_weights_norm", default=True)
    spec = read.decoder(normalize_top_k=normalize, num_kv_heads=1)
    shared = read.count("expert_shared_count") * spec.expert_intermediate_size
    spec = mixed_spec(read, spec, gating=read.gating(), shared=shared)
    heads, head_dim = spec.num_heads, read.size("kda.head_dim")
    shape = DeltaShape(
        key_heads=heads,
        value_heads=heads,
        key_dim=head_dim,
        value_dim=head_dim,
        conv_width=read.size("ssm.conv_kernel", least=2),
        tiled=False,
        by_channel=True,
    )
    kinds = tuple(
        LayerKind.ATTENTION if count else LayerKind.RECURRENT
        for count in kv_heads[: spec.num_layers]
    )
    return replace(with_still_latent(read, spec), own_layer_kinds=kinds, recurrent=shape)


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    prefix = f"blk.{index}."
    if spec.layer_kinds[index] is LayerKind.RECURRENT:
        return mixed_layer(weights, spec, index, _delta(weights, spec, prefix))
    attention = read_latent_attention(weights, spec, prefix)
    return mixed_layer(weights, spec, index, attention, rope=still_rope(spec))


def _delta(weights: WeightMap, spec: ModelSpec, prefix: str) -> DeltaWeights:
    """Return a layer's rule. Its decays and its gate are products of two matrices each, without a norm between them."""
    shape, hidden = delta_shape(spec), spec.hidden_size
    heads, rank, width = shape.value_heads, shape.key_dim, shape.value_width
    rule = DeltaRule(
        shape,
        conv=_convolution(weights, shape, prefix),
        step_bias=weights.vector(prefix + "ssm_dt.bias", width),
        decay=weights.array(prefix + "ssm_a", (heads, 1)).reshape(heads),
        gain=weights.vector(prefix + "ssm_norm.weight", shape.value_dim),
        epsilon=spec.rms_epsilon,
        sigmoid_gate=True,
    )
    return DeltaWeights(
        norm=weights.vector(prefix + "attn_norm.weight", hidden),
        mixed=_mixed(weights, prefix, width, hidden),
        z=weights.matrix(prefix + "ssm_g_b.weight", width, rank),
        alpha=weights.matrix(prefix + "ssm_f_b.weight", width, rank),
        beta=weights.matrix(prefix + "ssm_beta.weight", heads, hidden),
        output=weights.matrix(prefix + "attn_output.weight", hidden, width),
        rule=rule,
        z_low=weights.matrix(prefix + "ssm_g_a.weight", rank, hidden),
        alpha_low=weights.matrix(prefix + "ssm_f_a.weight", rank, hidden),
    )


def _mixed(weights: WeightMap, prefix: str, width: int, hidden: int) -> tuple[Weight, ...]:
    """Return the matrices of queries, keys and values, or the one of all three that a converter may write."""
    if prefix + "attn_qkv.weight" in weights:
        return (weights.matrix(prefix + "attn_qkv.weight", 3 * width, hidden),)
    names = (f"{prefix}attn_{part}.weight" for part in "qkv")
    return tuple(weights.matrix(name, width, hidden) for name in names)


def _convolution(weights: WeightMap, shape: DeltaShape, prefix: str) -> FloatArray:
    """Return [conv_width, channels] of a tensor each for queries, keys and values."""
    sizes = shape.value_width, 1, shape.conv_width
    names = (f"{prefix}ssm_conv1d_{part}.weight" for part in "qkv")
    parts = [weights.array(name, sizes).reshape(-1, shape.conv_width) for name in names]
    return np.ascontiguousarray(np.concatenate(parts).T)

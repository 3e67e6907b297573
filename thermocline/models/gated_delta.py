"""Reads the parts that hybrids of gated delta rule and gated attention share, by their GGUF names.

Knows the names and shapes of tensors and keys, not which architecture it reads for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from thermocline.kernels.delta_contract import DeltaRule, DeltaShape
from thermocline.kernels.dense_contract import Activation
from thermocline.kernels.whole_layer import (
    AttentionWeights,
    DeltaWeights,
    LayerParts,
    OutputGate,
    SharedExpert,
)
from thermocline.models.blocks import (
    plain_rope,
    read_attention,
    read_head_norm,
    read_mixer_norm,
    read_routed,
    read_shared,
)
from thermocline.models.decoder import DecoderLayer
from thermocline.models.metadata import SpecReader
from thermocline.models.spec import LayerKind, ModelSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.kernels.weight import FloatArray, Weight
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.weights import WeightMap


def read_hybrid_spec(file: ModelFile, *, tiled: bool, routed: bool = True) -> ModelSpec:
    """Return the dimensions of a hybrid. tiled: see `DeltaShape`; routed: with experts. Raises ModelError."""
    read = SpecReader(file)
    read.refuse_expert_scale()
    spec = read.decoder(normalize_top_k=True) if routed else read.dense_decoder()
    num_layers, extra = read.decoder_layers(spec.num_layers)
    interval = read.size("full_attention_interval", default=4)
    recurrent = read.layer_flags("attention.recurrent_layers", num_layers) or tuple(
        (index + 1) % interval != 0 for index in range(num_layers)
    )
    kinds = tuple(
        LayerKind.RECURRENT if is_recurrent else LayerKind.ATTENTION for is_recurrent in recurrent
    )
    value_heads = read.size("ssm.time_step_rank")
    shape = DeltaShape(
        key_heads=read.size("ssm.group_count"),
        value_heads=value_heads,
        key_dim=read.size("ssm.state_size"),
        value_dim=max(read.size("ssm.inner_size") // value_heads, 1),
        conv_width=read.size("ssm.conv_kernel"),
        tiled=tiled,
    )
    read.check_delta(shape)
    return replace(
        spec,
        num_layers=num_layers,
        num_predict_layers=extra,
        num_dense_layers=0 if routed else num_layers,
        own_layer_kinds=kinds,
        shared_intermediate_size=read.size("expert_shared_feed_forward_length") if routed else 0,
        own_rotary_dims=read.rotary_dims(spec.head_dim),
        recurrent=shape,
    )


def delta_shape(spec: ModelSpec) -> DeltaShape:
    """Return the sizes of a hybrid's recurrent layers."""
    assert isinstance(spec.recurrent, DeltaShape), "a hybrid of gated delta rule"
    return spec.recurrent


def hybrid_layer(
    weights: WeightMap, spec: ModelSpec, index: int, alpha_beta: tuple[Weight, Weight] | None
) -> DecoderLayer:
    """Return one layer. alpha_beta: of a recurrent layer, as its architecture stores them."""
    prefix, hidden = f"blk.{index}.", spec.hidden_size
    mixer: AttentionWeights | DeltaWeights
    if alpha_beta is None:
        mixer, rope = read_gated_attention(weights, spec, prefix), plain_rope(spec)
    else:
        mixer, rope = read_delta(weights, spec, prefix, *alpha_beta), None
    norm = weights.vector(prefix + "post_attention_norm.weight", hidden)
    if not spec.has_experts:
        dense = SharedExpert(weights.expert(prefix, "", spec.dense_intermediate_size, hidden), None)
        return DecoderLayer(LayerParts(mixer, norm, spec.rms_epsilon, None, dense), rope, None)
    routed, experts = read_routed(weights, spec, prefix)
    shared = read_gated_shared(weights, spec, prefix)
    return DecoderLayer(LayerParts(mixer, norm, spec.rms_epsilon, routed, shared), rope, experts)


def tiled_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """Return one layer of a hybrid whose alphas and betas are a matrix each."""
    if spec.layer_kinds[index] is not LayerKind.RECURRENT:
        return hybrid_layer(weights, spec, index, None)
    return hybrid_layer(weights, spec, index, read_alpha_beta(weights, spec, index))


def read_alpha_beta(weights: WeightMap, spec: ModelSpec, index: int) -> tuple[Weight, Weight]:
    """Return the matrices of alphas and of betas, where they are one each."""
    alpha, beta = (
        weights.matrix(
            f"blk.{index}.ssm_{part}.weight", delta_shape(spec).value_heads, spec.hidden_size
        )
        for part in ("alpha", "beta")
    )
    return alpha, beta


def read_gated_shared(weights: WeightMap, spec: ModelSpec, prefix: str) -> SharedExpert:
    """Return the shared expert with its gate."""
    gate = weights.row(prefix + "ffn_gate_inp_shexp.weight", spec.hidden_size)
    return replace(read_shared(weights, spec, prefix), gate=gate)


def read_gated_attention(weights: WeightMap, spec: ModelSpec, prefix: str) -> AttentionWeights:
    """Return attention with norms of its heads, and gates beside its queries."""
    return replace(
        read_attention(weights, spec, prefix, gated=True),
        head_norm=read_head_norm(weights, spec, prefix),
        gate=OutputGate(Activation.SIGMOID, None),
    )


def read_delta(
    weights: WeightMap,
    spec: ModelSpec,
    prefix: str,
    alpha: Weight,
    beta: Weight,
    *,
    sigmoid_gate: bool = False,
) -> DeltaWeights:
    """Return a layer's rule. alpha, beta: as its architecture stores them; sigmoid_gate: see `DeltaRule`."""
    shape, hidden = delta_shape(spec), spec.hidden_size
    conv = weights.array(prefix + "ssm_conv1d.weight", (shape.channels, shape.conv_width))
    rule = DeltaRule(
        shape,
        conv=np.ascontiguousarray(conv.T),
        step_bias=weights.vector(prefix + "ssm_dt.bias", shape.value_heads),
        decay=weights.vector(prefix + "ssm_a", shape.value_heads),
        gain=weights.vector(prefix + "ssm_norm.weight", shape.value_dim),
        epsilon=spec.rms_epsilon,
        sigmoid_gate=sigmoid_gate,
    )
    return DeltaWeights(
        norm=read_mixer_norm(weights, spec, prefix),
        mixed=(weights.matrix(prefix + "attn_qkv.weight", shape.channels, hidden),),
        z=weights.matrix(prefix + "attn_gate.weight", shape.value_width, hidden),
        alpha=alpha,
        beta=beta,
        output=weights.matrix(prefix + "ssm_out.weight", hidden, shape.value_width),
        rule=rule,
    )


def channel_shape(read: SpecReader, spec: ModelSpec) -> DeltaShape:
    """Return the sizes of a rule with a decay for each row of a state, with as many heads as attention has."""
    head_dim = read.size("kda.head_dim")
    return DeltaShape(
        key_heads=spec.num_heads,
        value_heads=spec.num_heads,
        key_dim=head_dim,
        value_dim=head_dim,
        conv_width=read.size("ssm.conv_kernel", least=2),
        tiled=False,
        by_channel=True,
    )


def kinds_by_heads(kv_heads: Sequence[int]) -> tuple[LayerKind, ...]:
    """Return the kinds of layers, of which those without heads of keys keep a state."""
    return tuple(LayerKind.ATTENTION if count else LayerKind.RECURRENT for count in kv_heads)


def lower_bound(read: SpecReader, file: ModelFile) -> float:
    """Return the bound of a decay's logarithm. Raises ModelFileError for one that bounds nothing."""
    bound = file.metadata.get_float(f"{file.architecture}.kda.gate_lower_bound")
    if bound >= 0:
        raise read.bad("kda.gate_lower_bound", f"is {bound}; it must be a negative number")
    return bound


def low_rank_delta(
    weights: WeightMap, spec: ModelSpec, prefix: str, decay: FloatArray | None = None
) -> DeltaWeights:
    """Return the same, whose decays and gate are products of two matrices each, without a norm between them."""
    shape, hidden = delta_shape(spec), spec.hidden_size
    rank, width = shape.key_dim, shape.value_width
    delta = channel_delta(
        weights,
        spec,
        prefix,
        z=weights.matrix(prefix + "ssm_g_b.weight", width, rank),
        alpha=weights.matrix(prefix + "ssm_f_b.weight", width, rank),
        decay=decay,
    )
    return replace(
        delta,
        z_low=weights.matrix(prefix + "ssm_g_a.weight", rank, hidden),
        alpha_low=weights.matrix(prefix + "ssm_f_a.weight", rank, hidden),
    )


def channel_delta(
    weights: WeightMap,
    spec: ModelSpec,
    prefix: str,
    *,
    z: Weight,
    alpha: Weight,
    decay: FloatArray | None = None,
) -> DeltaWeights:
    """Return a layer's rule with a decay for each row of a state. z, alpha: as its architecture stores them.

    decay: float32 [heads], where the file has it otherwise.
    """
    shape, hidden = delta_shape(spec), spec.hidden_size
    heads, width = shape.value_heads, shape.value_width
    if decay is None:
        decay = weights.array(prefix + "ssm_a", (heads, 1)).reshape(heads)
    rule = DeltaRule(
        shape,
        conv=_convolution(weights, shape, prefix),
        step_bias=weights.vector(prefix + "ssm_dt.bias", width),
        decay=decay,
        gain=weights.vector(prefix + "ssm_norm.weight", shape.value_dim),
        epsilon=spec.rms_epsilon,
        sigmoid_gate=True,
    )
    return DeltaWeights(
        norm=read_mixer_norm(weights, spec, prefix),
        mixed=_mixed(weights, prefix, width, hidden),
        z=z,
        alpha=alpha,
        beta=weights.matrix(prefix + "ssm_beta.weight", heads, hidden),
        output=weights.matrix(prefix + "attn_output.weight", hidden, width),
        rule=rule,
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

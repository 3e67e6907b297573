"""Layers with a feed-forward behind their mixer: dense ones first or in all, else routed and shared experts.

Knows the names of tensors and keys that these architectures share, none by name.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from thermocline.kernels.whole_layer import (
    AttentionWeights,
    DeltaWeights,
    LatentWeights,
    LayerParts,
    RecurrentWeights,
    SharedExpert,
)
from thermocline.models.attention_specs import WindowSpec
from thermocline.models.blocks import (
    plain_rope,
    read_attention,
    read_rope_factors,
    read_routed,
    read_shared,
)
from thermocline.models.decoder import DecoderLayer
from thermocline.models.feed_forwards import is_routed, with_dense_layers
from thermocline.models.metadata import SpecReader
from thermocline.models.rope import RopeRule
from thermocline.models.spec import LayerKind, NextBlockSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.kernels.cache_format import HeadShape
    from thermocline.kernels.compressed_weights import CompressedWeights
    from thermocline.kernels.dense_contract import Gating
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.rope import RopeScaling
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap


def dense_spec(file: ModelFile, *, most_experts: int = 0) -> ModelSpec:
    """Return the dimensions of a model without experts whose whole heads turn, and whose tokens see all before them.

    most_experts: as for `SpecReader.dense_decoder`.
    """
    read = SpecReader(file)
    read.refuse_other_attention()
    spec = read.dense_decoder(most_experts=most_experts)
    read.require_equal("rope.dimension_count", spec.head_dim)
    return spec


def mixed_spec(
    read: SpecReader,
    spec: ModelSpec,
    *,
    gating: Gating,
    shared: int,
    scaled: bool = True,
    num_dense: int | None = None,
) -> ModelSpec:
    """Return `spec` with dense layers, a router's rule, and blocks at the end that are left out.

    shared: width of all shared experts together, 0 for none. scaled: the file says a factor on routing weights. num_dense:
    dense layers where the file does not say how many; the tensors say which others there are.
    """
    num_layers, extra = read.decoder_layers(spec.num_layers)
    num_dense = read.leading_dense(num_layers, num_dense)
    scale = read.positive_float("expert_weights_scale", zero=1.0) if scaled else 1.0
    spec = replace(
        spec,
        num_layers=num_layers,
        num_predict_layers=extra,
        router=replace(spec.router, gating=gating, scale=scale),
        num_dense_layers=num_dense,
        dense_intermediate_size=read.size("feed_forward_length") if num_dense else 0,
        shared_intermediate_size=shared,
    )
    return with_dense_layers(read, spec)


def with_own_blocks(
    read: SpecReader,
    spec: ModelSpec,
    heads: Sequence[int],
    shapes: Sequence[HeadShape],
    windowed: Sequence[bool],
) -> ModelSpec:
    """Return `spec` with what its blocks behind the last layer are, which take states before the model's last norm.

    heads, shapes, windowed: of all blocks of the file, layers included.
    """
    blocks = tuple(
        NextBlockSpec(
            heads[n],
            shapes[n],
            LayerKind.WINDOW if windowed[n] else LayerKind.ATTENTION,
            0 if is_routed(read, n) else read.size("feed_forward_length"),
        )
        for n in range(spec.num_layers, spec.num_layers + spec.num_predict_layers)
    )
    return replace(spec, own_next_blocks=blocks, next_blocks_raw=bool(blocks))


def with_factors(read: SpecReader, spec: ModelSpec, *, logit_scale: float | None) -> ModelSpec:
    """Return `spec` with Granite's factors on scores, embeddings, residuals and logits; 0 stands for no factor.

    logit_scale: what logits are divided by where the file does not say it; None requires that it does.
    """
    usual = spec.attention_scale
    divisor = read.positive_float("logit_scale", default=logit_scale, zero=logit_scale)
    return replace(
        spec,
        own_attention_scale=read.positive_float("attention.scale", default=usual, zero=usual),
        embedding_scale=read.positive_float("embedding_scale", default=1.0, zero=1.0),
        residual_scale=read.positive_float("residual_scale", default=1.0, zero=1.0),
        logit_scale=1.0 / divisor,
    )


def with_windows(
    read: SpecReader,
    spec: ModelSpec,
    period: int,
    scaling: RopeScaling | None = None,
    size: int | None = None,
    *,
    full_last: bool = True,
) -> ModelSpec:
    """Return `spec` with windows in all layers but one of every so many, the last or the first, which sees all tokens.

    period: where the file names no pattern. scaling: of what turns in layers with a window, whose base may be their own.
    size: tokens of a window where the file does not say it.
    """
    num_layers, _ = read.decoder_layers(spec.num_layers)
    base = read.positive_float("rope.freq_base_swa", default=spec.rope_base)
    dims = read.rotary_dims(spec.head_dim, default=spec.head_dim)
    rope = RopeRule(dims, base, scaling)
    kinds = tuple(
        LayerKind.WINDOW if is_window else LayerKind.ATTENTION
        for is_window in read.window_pattern(num_layers, period, full_last=full_last)
    )
    window = WindowSpec(read.size("attention.sliding_window", size), rope)
    return replace(spec, own_layer_kinds=kinds, window=window)


def near_or_far(
    spec: ModelSpec, index: int, attention: AttentionWeights, far: RopeRule | None
) -> tuple[AttentionWeights, RopeRule | None]:
    """Return the attention with its layer's window, and what turns there. far: what does in layers without a window."""
    if spec.window is None or spec.layer_kinds[index] is not LayerKind.WINDOW:
        return attention, far
    window = spec.window
    near = replace(attention, window=window.num_tokens, chunked=window.chunked)
    return near, window.rope


def mixed_layer(
    weights: WeightMap,
    spec: ModelSpec,
    index: int,
    mixer: AttentionWeights | CompressedWeights | DeltaWeights | LatentWeights | RecurrentWeights,
    *,
    norm: str = "ffn_norm",
    choice_bias: str = "exp_probs_b.bias",
    rope: RopeRule | None = None,
) -> DecoderLayer:
    """Return a dense layer, or one of routed experts with the bias and the shared experts that it has.

    norm, choice_bias: names of the norm before the experts, and of the bias of their choice. rope: that of the first dimensions, unless it is given; none where
    nothing turns. The model's factor on what is added to the residual stream is in the matrices and weights that give it.
    """
    prefix, hidden, activation = f"blk.{index}.", spec.hidden_size, spec.expert_activation
    gains = weights.vector(f"{prefix}{norm}.weight", hidden)
    output = replace(mixer.output, scale=mixer.output.scale * spec.residual_scale)
    mixer = replace(mixer, output=output)
    if isinstance(mixer, DeltaWeights | RecurrentWeights) or not spec.rotary_dims:
        rope = None
    else:
        rope = rope or plain_rope(spec)
    if isinstance(mixer, AttentionWeights) and mixer.output_bias is not None:
        added = mixer.output_bias * np.float32(spec.residual_scale)
        mixer = replace(mixer, output_bias=added)
    if index in spec.dense_layers:
        dense = SharedExpert(
            weights.expert(prefix, "", spec.dense_intermediate_size, hidden, activation), None
        )
        dense = scaled_expert(weights, dense, spec.residual_scale)
        parts = LayerParts(mixer, gains, spec.rms_epsilon, None, dense)
        return DecoderLayer(parts, rope, None)
    name, bias = prefix + choice_bias, None
    if name in weights:
        bias = weights.vector(name, spec.router.num_experts)
    routed, experts = read_routed(weights, spec, prefix, bias, activation)
    rule = replace(routed.rule, scale=routed.rule.scale * spec.residual_scale)
    shared = None
    if spec.shared_intermediate_size:
        shared = read_shared(weights, spec, prefix, activation)
        shared = scaled_expert(weights, shared, spec.residual_scale)
    routed = replace(routed, rule=rule)
    return DecoderLayer(LayerParts(mixer, gains, spec.rms_epsilon, routed, shared), rope, experts)


def paired_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """Return a layer as `mixed_layer` does, of attention whose neighbouring dimensions turn together."""
    attention = read_attention(weights, spec, f"blk.{index}.")
    factors = read_rope_factors(weights, spec.head_dim)
    rope = replace(plain_rope(spec), pairs=True, factors=factors)
    return mixed_layer(weights, spec, index, attention, rope=rope)


def scaled_expert(weights: WeightMap, expert: SharedExpert, factor: float) -> SharedExpert:
    """Return the expert with a factor on its last matrix. Raises ModelError for one with biases."""
    if factor == 1.0:
        return expert
    down = expert.stack.down
    own = np.ones(len(down), np.float32) if down.scales is None else down.scales
    scales = (own * np.float32(factor)).astype(np.float32)
    stack = replace(expert.stack, down=replace(down, scales=scales))
    weights.check_scales(stack)
    return replace(expert, stack=stack)

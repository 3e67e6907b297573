"""Reads Mamba2 and the first Mamba by their GGUF names, for the architectures that have them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from thermocline.kernels.recurrent_contract import (
    MambaRule,
    MambaShape,
    SelectiveRule,
    SelectiveShape,
)
from thermocline.kernels.whole_layer import RecurrentWeights, SelectiveProducts

if TYPE_CHECKING:
    from thermocline.kernels.weight import FloatArray
    from thermocline.models.metadata import SpecReader
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap


def mamba_shape(read: SpecReader) -> MambaShape:
    """Return the sizes of Mamba2, checked. Raises ModelFileError."""
    heads, width = read.size("ssm.time_step_rank"), read.size("ssm.inner_size")
    groups = read.size("ssm.group_count")
    if width % heads:
        raise read.bad("ssm.inner_size", f"is {width}, no multiple of time_step_rank {heads}")
    if heads % groups:
        raise read.bad("ssm.time_step_rank", f"is {heads}, no multiple of group_count {groups}")
    state, conv = read.size("ssm.state_size"), read.size("ssm.conv_kernel", least=2)
    return MambaShape(heads, width // heads, groups, state, conv)


def read_mamba(weights: WeightMap, spec: ModelSpec, prefix: str) -> RecurrentWeights:
    """Return one layer's Mamba2. A convolution without a bias has zeros."""
    shape, hidden = spec.recurrent, spec.hidden_size
    assert isinstance(shape, MambaShape)
    conv, conv_bias = _convolution(weights, prefix, shape.channels, shape.conv_width)
    rule = MambaRule(
        shape,
        conv=conv,
        conv_bias=conv_bias,
        step_bias=weights.vector(prefix + "ssm_dt.bias", shape.heads),
        decay=weights.array(prefix + "ssm_a", (shape.heads, 1)).reshape(-1),
        skip=weights.array(prefix + "ssm_d", (shape.heads, 1)).reshape(-1),
        gain=weights.array(
            prefix + "ssm_norm.weight", (shape.groups, shape.width // shape.groups)
        ).reshape(-1),
        epsilon=spec.rms_epsilon,
    )
    return RecurrentWeights(
        norm=weights.vector(prefix + "attn_norm.weight", hidden),
        epsilon=spec.rms_epsilon,
        input=weights.matrix(prefix + "ssm_in.weight", shape.row, hidden),
        output=weights.matrix(prefix + "ssm_out.weight", hidden, shape.width),
        rule=rule,
    )


def selective_shape(read: SpecReader) -> SelectiveShape:
    """Return the sizes of the first Mamba, checked. Raises ModelFileError."""
    return SelectiveShape(
        width=read.size("ssm.inner_size"),
        state_dim=read.size("ssm.state_size"),
        rank=read.size("ssm.time_step_rank"),
        conv_width=read.size("ssm.conv_kernel", least=2),
    )


def read_selective(weights: WeightMap, spec: ModelSpec, prefix: str) -> RecurrentWeights:
    """Return one layer's first Mamba, whose steps, B and C are normed. A convolution without a bias has zeros."""
    shape, hidden = spec.recurrent, spec.hidden_size
    assert isinstance(shape, SelectiveShape)
    width, state_dim = shape.width, shape.state_dim
    conv, conv_bias = _convolution(weights, prefix, width, shape.conv_width)
    decay = weights.array(prefix + "ssm_a", (width, state_dim))
    rule = SelectiveRule(
        shape,
        conv=conv,
        conv_bias=conv_bias,
        step_bias=weights.vector(prefix + "ssm_dt.bias", width),
        decay=np.ascontiguousarray(decay.T),
        skip=weights.vector(prefix + "ssm_d", width),
    )
    rows = (shape.rank, state_dim, state_dim)
    low, keys, queries = weights.matrices(prefix + "ssm_x.weight", rows, width)
    norms = zip(("dt", "b", "c"), rows, strict=True)
    gains = [weights.vector(f"{prefix}ssm_{part}_norm.weight", size) for part, size in norms]
    return RecurrentWeights(
        norm=weights.vector(prefix + "attn_norm.weight", hidden),
        epsilon=spec.rms_epsilon,
        input=weights.matrix(prefix + "ssm_in.weight", shape.row, hidden),
        output=weights.matrix(prefix + "ssm_out.weight", hidden, width),
        rule=rule,
        products=SelectiveProducts(
            (low, keys, queries),
            (gains[0], gains[1], gains[2]),
            steps=weights.matrix(prefix + "ssm_dt.weight", width, shape.rank),
        ),
    )


def _convolution(
    weights: WeightMap, prefix: str, channels: int, conv_width: int
) -> tuple[FloatArray, FloatArray]:
    """Return a convolution [conv_width, channels], and its bias."""
    conv = weights.array(prefix + "ssm_conv1d.weight", (channels, conv_width))
    name, bias = prefix + "ssm_conv1d.bias", np.zeros(channels, np.float32)
    if name in weights:
        bias = weights.vector(name, channels)
    return np.ascontiguousarray(conv.T), bias

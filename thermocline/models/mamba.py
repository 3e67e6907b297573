"""Reads Mamba2 by its GGUF names, for the architectures that have it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from thermocline.kernels.recurrent_contract import MambaRule, MambaShape
from thermocline.kernels.whole_layer import RecurrentWeights

if TYPE_CHECKING:
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
    conv = weights.array(prefix + "ssm_conv1d.weight", (shape.channels, shape.conv_width))
    name, conv_bias = prefix + "ssm_conv1d.bias", np.zeros(shape.channels, np.float32)
    rule = MambaRule(
        shape,
        conv=np.ascontiguousarray(conv.T),
        conv_bias=weights.vector(name, shape.channels) if name in weights else conv_bias,
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

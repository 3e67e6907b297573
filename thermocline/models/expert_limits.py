"""Limits of what SwiGLU multiplies, as the files of several architectures state them for each layer.

Knows the keys, and no architecture. A limit of 0 is none: such a layer computes what one without the key does.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from thermocline.kernels.weight import ExpertActivation, ExpertStack, SiluLimits

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.metadata import SpecReader
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap

ROUTED_KEY: Final = "swiglu_clamp_exp"
"""A limit of routed experts for each block, or one for all."""
SHARED_KEY: Final = "swiglu_clamp_shexp"
"""The same of shared experts, and of the feed-forward of dense layers."""
_NONE: Final = 1e-6
"""Up to here a limit is none, as in llama.cpp."""
_MOST: Final = float(np.finfo(np.float32).max)


def with_limits(
    read: SpecReader, file: ModelFile, spec: ModelSpec, *, before: bool = False
) -> ModelSpec:
    """Return the dimensions with the limits that the file states. Raises ModelFileError.

    before: a limit is of the gate's values before their SiLU, whose largest value is that of the limit then; else of what
    SiLU gives. The up values stay within the limit of zero either way.
    """
    routed, shared = (_limits(read, file, key, before=before) for key in (ROUTED_KEY, SHARED_KEY))
    return replace(spec, expert_limits=routed, shared_limits=shared)


def _limits(
    read: SpecReader, file: ModelFile, key: str, *, before: bool
) -> tuple[SiluLimits | None, ...]:
    """Return the limits by block; () where no block has one."""
    if not read.has(key):
        return ()
    name, num_blocks = f"{file.architecture}.{key}", read.size("block_count")
    if file.metadata.is_array(name):
        values = file.metadata.get_floats(name)
    else:
        values = (file.metadata.get_float(name),) * num_blocks
    if len(values) != num_blocks:
        raise read.bad(key, f"has {len(values)} entries for {num_blocks} blocks")
    for value in values:
        if not 0 <= value <= _MOST:
            raise read.bad(key, f"has {value}; a limit is a positive number, or 0 for none")
    found = tuple(_limit(value, before=before) for value in values)
    return found if any(found) else ()


def _limit(value: float, *, before: bool) -> SiluLimits | None:
    if value <= _NONE:
        return None
    # SiLU grows wherever it is positive.
    return SiluLimits(value / (1 + math.exp(-value)) if before else value, value)


def limited_layer(
    weights: WeightMap, spec: ModelSpec, index: int, layer: DecoderLayer
) -> DecoderLayer:
    """Return the layer whose experts keep the limits of block `index`. Raises ModelError for scales that they forbid."""
    parts, experts = layer.parts, layer.experts
    routed, shared = spec.expert_limits, spec.shared_limits
    if routed and parts.routed is not None and experts is not None:
        stack = _limited(weights, parts.routed.stack, routed[index])
        parts = replace(parts, routed=replace(parts.routed, stack=stack))
        experts = replace(experts, stack=stack)
    if shared and parts.shared is not None:
        stack = _limited(weights, parts.shared.stack, shared[index])
        parts = replace(parts, shared=replace(parts.shared, stack=stack))
    return replace(layer, parts=parts, experts=experts)


def _limited(weights: WeightMap, stack: ExpertStack, limits: SiluLimits | None) -> ExpertStack:
    if limits is None:
        return stack
    assert stack.activation is ExpertActivation.SILU, "limits are of SwiGLU"
    found = replace(stack, activation=ExpertActivation.LIMITED_SILU, limits=limits)
    weights.check_scales(found)
    return found

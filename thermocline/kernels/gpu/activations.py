"""What experts compute between their products, on a device: as device code, and in torch.

Knows no weights and no launch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

import torch
import triton
import triton.language as tl
from torch.nn import functional

from thermocline.kernels.weight import ExpertActivation

if TYPE_CHECKING:
    from torch import Tensor

    from thermocline.kernels.weight import SiluLimits


def activate(
    activation: ExpertActivation,
    gate: Tensor | None,
    up: Tensor,
    limits: SiluLimits | None = None,
) -> Tensor:
    """Return the activation of a gate's values and the up values. gate: None where it has none."""
    if activation is ExpertActivation.SQUARED_RELU:
        return functional.relu(up).square()
    assert gate is not None, "this activation has a gate"
    if activation is ExpertActivation.LIMITED_SILU:
        assert limits is not None, "this activation has limits"
        return functional.silu(gate).clamp(max=limits.gate) * up.clamp(-limits.up, limits.up)
    return _gated(activation, gate, up)


def _gated(activation: ExpertActivation, gate: Tensor, up: Tensor) -> Tensor:
    match activation:
        case ExpertActivation.SILU:
            return functional.silu(gate) * up
        case ExpertActivation.CLAMPED_SILU:
            kept = gate.clamp(max=7.0)
            return kept * torch.sigmoid(1.702 * kept) * (up.clamp(-7.0, 7.0) + 1.0)
        case ExpertActivation.GELU:
            return functional.gelu(gate, approximate="tanh") * up
        case ExpertActivation.RELU:
            return functional.relu(gate) * up
        case ExpertActivation.SQUARED_RELU | ExpertActivation.LIMITED_SILU:
            raise AssertionError("this activation has a formula of its own")
        case _:
            assert_never(activation)


@triton.jit
def activated(
    gate: tl.tensor,
    up: tl.tensor,
    gate_limit: tl.tensor,
    up_limit: tl.tensor,
    activation: tl.constexpr,
) -> tl.tensor:
    """Return the activation of this name of an `ExpertActivation`. Without a gate, `gate` is not read.

    gate_limit, up_limit: read where the activation has `SiluLimits`.
    """
    if activation == "SQUARED_RELU":
        kept = tl.maximum(up, 0.0)
        value = kept * kept
    elif activation == "CLAMPED_SILU":
        kept = tl.minimum(gate, 7.0)
        bounded = tl.minimum(tl.maximum(up, -7.0), 7.0)
        value = kept / (1.0 + tl.exp(-1.702 * kept)) * (bounded + 1.0)
    elif activation == "GELU":
        # x / 2 * (1 + tanh(y)) = x / (1 + e^-2y)
        bent = gate + 0.044715 * gate * gate * gate
        value = gate / (1.0 + tl.exp(-1.5957691216057308 * bent)) * up
    elif activation == "RELU":
        value = tl.maximum(gate, 0.0) * up
    elif activation == "LIMITED_SILU":
        # By comparisons, which leave NaN.
        value = gate / (1.0 + tl.exp(-gate))
        value = tl.where(value > gate_limit, gate_limit, value)
        bounded = tl.where(up > up_limit, up_limit, up)
        value *= tl.where(bounded < -up_limit, -up_limit, bounded)
    else:
        value = gate / (1.0 + tl.exp(-gate)) * up
    return value

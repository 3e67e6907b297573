"""The norm of a residual stream, of whichever kind a model has. Owns no weights, and knows no layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thermocline.kernels.dense_contract import Centering

if TYPE_CHECKING:
    from thermocline.kernels.dense_contract import DenseKernels
    from thermocline.kernels.weight import FloatArray
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap


def read_centering(weights: WeightMap, spec: ModelSpec, name: str) -> Centering | None:
    """Return what the norm whose gains are `name` does besides, None for an RMS norm. Raises ModelFileError."""
    if not spec.norms_center:
        return None
    if not spec.norms_have_bias:
        return Centering()
    return Centering(weights.vector(name.removesuffix("weight") + "bias", spec.hidden_size))


def norm_rows(
    dense: DenseKernels,
    x: FloatArray,
    gain: FloatArray,
    epsilon: float,
    centering: Centering | None = None,
) -> FloatArray:
    """Return x [rows, width] normed, with its mean taken off first where there is `centering`."""
    if centering is None:
        return dense.rms_norm(x, gain, epsilon)
    return dense.layer_norm(x, gain, epsilon, centering.bias)

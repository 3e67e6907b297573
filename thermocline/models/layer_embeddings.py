"""Embeddings of each layer's own: read from the file, and looked up for a chunk before its first layer.

Knows their tensors and how both of their parts are added, not what a layer does with them (`LayerEmbedding`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from thermocline.kernels.contract import Kernels
    from thermocline.kernels.weight import FloatArray, IntArray, Weight
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap

TABLE: Final = "per_layer_token_embd.weight"
PROJECTION: Final = "per_layer_model_proj.weight"
_HALF: Final = np.float32(1 / np.sqrt(2))


@dataclass(frozen=True, slots=True, eq=False)
class LayerEmbeddings:
    """The half that a token alone decides, of which a row is looked up, and the half made of its first hidden state.

    table: [V, layers * width]; projection: [layers * width, D]; gain: float32 [width], of the second half's norm.
    """

    table: Weight
    projection: Weight
    gain: FloatArray
    epsilon: float

    def look_up(
        self,
        kernels: Kernels,
        token_ids: IntArray,
        x: FloatArray,
        *,
        prompt: bool,
        may_be_missing: bool = False,
    ) -> FloatArray:
        """Return float32 [layers, T, width] of int32 [T] tokens, whose embedding is x [T, D].

        may_be_missing: as `Kernels.decode_rows` takes it.
        """
        count, width = len(token_ids), len(self.gain)
        rows = kernels.decode_rows(self.table, token_ids, may_be_missing=may_be_missing)
        looked_up = rows.reshape(-1, width)
        made = kernels.matmul(self.projection, x, prompt=prompt).reshape(-1, width)
        both = (kernels.dense.rms_norm(made, self.gain, self.epsilon) + looked_up) * _HALF
        return np.ascontiguousarray(both.reshape(count, -1, width).swapaxes(0, 1))


def read_layer_embeddings(weights: WeightMap, spec: ModelSpec) -> LayerEmbeddings | None:
    """Return a model's embeddings of layers; None without any. Raises ModelFileError."""
    width = spec.layer_embedding_size
    if not width:
        return None
    total = spec.num_layers * width
    table = weights.table(TABLE, spec.vocab_size, total)
    projection = weights.matrix(PROJECTION, total, spec.hidden_size)
    return LayerEmbeddings(
        replace(table, scale=table.scale * float(np.sqrt(np.float32(width)))),
        replace(projection, scale=projection.scale / float(np.sqrt(np.float32(spec.hidden_size)))),
        weights.vector("per_layer_proj_norm.weight", width),
        spec.rms_epsilon,
    )

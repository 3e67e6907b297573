"""Inputs of a chunk of few tokens through all layers as one native job; its layers one after another are the reference.

Knows no model: layers are weights with a cache or states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from thermocline.kernels.dense import num_expanded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from thermocline.kernels import _native
    from thermocline.kernels.dense import NativeDense
    from thermocline.kernels.dense_contract import LayerCache, RopeTable, TokenRun
    from thermocline.kernels.recurrent_contract import RecurrentStates
    from thermocline.kernels.weight import ExpertStack, FloatArray, IntArray
    from thermocline.kernels.whole_layer import LayerParts


@dataclass(frozen=True, slots=True, eq=False)
class PlacedParts:
    """A layer and where it keeps what it computed.

    memory: the keys and values of a layer that attends, the states of a recurrent one, None of others. rope, places:
    which of a step's tables and places are its own. slots: experts of its own on a device; None on the CPU.
    """

    parts: LayerParts
    memory: LayerCache | RecurrentStates | None
    rope: int
    places: int
    slots: ExpertStack | None = None


@dataclass(frozen=True, slots=True)
class StepPlaces:
    """Where keys and values of a step's tokens go, int32 [T], and those that its tokens see lie."""

    slots: IntArray
    runs: Sequence[TokenRun]


@dataclass(frozen=True, slots=True)
class StepInput:
    """A chunk as the input of all layers.

    x: float32 [T, hidden]; positions: int32 [T]. ropes: tables by position, up to the chunk's last. runs: int32 [n, 4] of
    recurrent layers, as for `RecurrentLayerInput`; none without these. embedded: float32 [layers, T, width], of layers
    with embeddings of tokens.
    """

    x: FloatArray
    positions: IntArray
    ropes: Sequence[RopeTable]
    places: Sequence[StepPlaces]
    runs: IntArray
    embedded: FloatArray | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """x: float32 [T, hidden] behind the last layer. spans: int64 [layers, 2], each one's begin and end in monotonic ns.

    expert_ids, weights: int32 and float32 [n, T, chosen], of the layers with routed experts, best first.
    """

    x: FloatArray
    expert_ids: IntArray
    weights: FloatArray
    spans: NDArray[np.int64]


class WholeStep(Protocol):
    """All layers of a model, with the bits of single ones, in the arithmetic of decoded tokens."""

    def __call__(self, given: StepInput) -> StepOutput:
        """Compute a chunk. Appends to the caches, and updates the states."""
        ...


class NativeStep:
    """`WholeStep` on the compiled core."""

    def __init__(
        self, step: _native.WholeStep, dense: NativeDense, layers: Sequence[PlacedParts]
    ) -> None:
        self._step = step
        self._dense = dense
        routed = [layer.parts.routed for layer in layers if layer.parts.routed is not None]
        self._num_layers, self._num_routed = len(layers), len(routed)
        self._chosen = routed[0].rule.chosen if routed else 0

    def __call__(self, given: StepInput) -> StepOutput:
        """See `WholeStep`."""
        num_tokens = len(given.x)
        ids = np.empty((self._num_routed, num_tokens, self._chosen), np.int32)
        out = StepOutput(
            np.empty_like(given.x),
            ids,
            np.empty(ids.shape, np.float32),
            np.empty((self._num_layers, 2), np.int64),
        )
        self._step.run(
            given.x,
            given.positions,
            step_ropes(given.ropes),
            step_places(self._dense, given.places),
            given.runs,
            given.embedded,
            out.x,
            ids,
            out.weights,
            out.spans,
        )
        return out


def step_ropes(ropes: Sequence[RopeTable]) -> list[tuple[FloatArray, FloatArray, bool]]:
    """Return tables as the core takes them."""
    return [(rope.cosines, rope.sines, rope.pairs) for rope in ropes]


def step_places(
    dense: NativeDense, places: Sequence[StepPlaces]
) -> list[tuple[IntArray, IntArray, IntArray, IntArray, IntArray]]:
    """Return places as the core takes them."""
    return [(each.slots, *dense.run_tables(each.runs), num_expanded(each.runs)) for each in places]

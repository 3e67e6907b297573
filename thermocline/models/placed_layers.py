"""The layers of a model with their cache, and what a step through all of them is given. Knows no kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from thermocline.kernels.compressed_weights import CompressedWeights
from thermocline.kernels.dense_contract import RopeTable
from thermocline.kernels.whole_layer import (
    AttentionWeights,
    DeltaWeights,
    LatentWeights,
    RecurrentWeights,
)
from thermocline.kernels.whole_step import PlacedParts, StepInput, StepPlaces
from thermocline.messages import LayerIndex
from thermocline.models.recurrent_layers import begin_states, cut_runs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from thermocline.kernels.dense_contract import LayerCache
    from thermocline.kernels.recurrent_contract import RecurrentStates
    from thermocline.kernels.weight import ExpertStack
    from thermocline.kv.cache import SequenceCache
    from thermocline.messages import Chunk, FloatArray
    from thermocline.models.contract import NonExpertParts
    from thermocline.models.layers import RotaryTable
    from thermocline.models.rope import RopeRule

_NO_RUNS: Final = np.zeros((0, 4), np.int32)


class PlacedLayers:
    """All layers of a model over one cache. tables: of every rule in `parts.ropes`."""

    def __init__(
        self,
        parts: NonExpertParts,
        cache: SequenceCache,
        tables: Mapping[RopeRule, RotaryTable],
        slots: Sequence[ExpertStack | None] | None = None,
    ) -> None:
        """slots: by layer, a device's; None on the CPU."""
        self._parts = parts
        self._cache = cache
        self._rules = list(dict.fromkeys(rope for rope in parts.ropes if rope is not None))
        self._tables = [tables[rule] for rule in self._rules]
        self._slots = [None] * len(parts.layers) if slots is None else slots
        self._recurrent = [
            LayerIndex(n)
            for n, layer in enumerate(parts.layers)
            if isinstance(layer.mixer, DeltaWeights | RecurrentWeights)
        ]

    def __len__(self) -> int:
        return len(self._parts.layers)

    def layers(self) -> list[PlacedParts]:
        """Return each layer with its arrays, which stay where they are."""
        return [self._placed(LayerIndex(number)) for number in range(len(self))]

    def given(self, chunk: Chunk, x: FloatArray) -> StepInput:
        """Return a step's input, x [T, D] before the first layer; begins the states of the chunk's sequences."""
        end = max(chunk.positions.tolist()) + 1
        nothing = np.empty((end, 0), np.float32)
        places = [chunk.places(window=False), chunk.places(window=True)]
        runs = _NO_RUNS
        if self._recurrent:
            runs = cut_runs(chunk)
            self._begin_states(chunk)
        return StepInput(
            x,
            chunk.positions,
            [*(table.up_to(end) for table in self._tables), RopeTable(nothing, nothing)],
            [StepPlaces(each.slots, each.segments) for each in places],
            runs,
            chunk.embedded,
        )

    def _begin_states(self, chunk: Chunk) -> None:
        begin = any(
            chunk.positions[segment.start] == 0
            or (segment.state is not None and segment.state.load is not None)
            for segment in chunk.segments
        )
        for layer in self._recurrent if begin else ():
            begin_states(chunk, self._states(layer))

    def _placed(self, layer: LayerIndex) -> PlacedParts:
        parts, rope = self._parts.layers[layer], self._parts.ropes[layer]
        mixer = parts.mixer
        is_windowed = isinstance(mixer, AttentionWeights) and mixer.window > 0
        # The last table is of layers whose heads do not turn.
        at = len(self._rules) if rope is None else self._rules.index(rope)
        memory: LayerCache | RecurrentStates | None = None
        match mixer:
            case AttentionWeights() | LatentWeights():
                memory = self._cache.kv.layer(layer)
            case DeltaWeights() | RecurrentWeights():
                memory = self._states(layer)
            case None | CompressedWeights():  # no step computes these
                pass
        return PlacedParts(parts, memory, at, int(is_windowed), self._slots[layer])

    def _states(self, layer: LayerIndex) -> RecurrentStates:
        assert self._cache.states is not None, (
            "a model with recurrent layers needs a pool of states"
        )
        return self._cache.states.layer(layer)

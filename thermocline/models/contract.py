"""What stages ask of a model, whatever its architecture. Knows no implementation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from thermocline.kernels.dense_contract import Centering
    from thermocline.kernels.handoff import Handoff
    from thermocline.kernels.weight import FloatArray, IntArray, Weight
    from thermocline.kernels.whole_layer import LayerParts, OnRouted
    from thermocline.kernels.whole_step import StepOutput
    from thermocline.kv.cache import SequenceCache
    from thermocline.messages import Chunk, LayerIndex, Routing
    from thermocline.models.rope import RopeRule
    from thermocline.models.routing import Routed, RouterWeights
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import StackedExperts


@dataclass(frozen=True, slots=True, eq=False)
class NonExpertParts:
    """The non-expert weights, as they lie in the file; layers carry their routed experts along.

    ropes: by layer, None for layers without rotary embedding. output_norm: float32 [D], `NO_NORM` behind several residual
    streams; centering: of that norm. output: [V, D]; output_bias: float32 [V], added to logits, before they are capped.
    """

    layers: tuple[LayerParts, ...]
    ropes: tuple[RopeRule | None, ...]
    output_norm: FloatArray
    output: Weight
    centering: Centering | None = None
    output_bias: FloatArray | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SharedStep:
    """A decode step of a device and the CPU.

    epoch: its number on the page. x: float32 [T, D] before the first layer. residency: int32 [layers, E], the slot of
    each expert, below zero for those that the CPU computes; it is not changed. on_done: called on the device's lane
    when the device is done, while the CPU goes on.
    """

    epoch: int
    chunk: Chunk
    x: FloatArray
    residency: IntArray
    on_done: Callable[[], None]


class StepDevice(Protocol):
    """A device that computes decode steps through all layers, and leaves the experts that it lacks to the CPU."""

    @property
    def takes_branches(self) -> bool:
        """Whether its steps may have trees of drafted tokens."""
        ...

    def launch(self, handoff: Handoff, step: SharedStep) -> None:
        """Begin a step, and return at once. What is given stays until `finish`."""
        ...

    def finish(self, num_rows: int, *, lost: bool = False) -> FloatArray:
        """Return x [T, D] behind the last layer of the step that was launched, which is done.

        lost: it was given up; wait until the device is done with it. Raises what went wrong on the device.
        """
        ...


class Head(Protocol):
    """The end of a model, wherever it is computed."""

    @property
    def spec(self) -> ModelSpec:
        """The model's dimensions."""
        ...

    def head(self, x: FloatArray, *, prompt: bool) -> FloatArray:
        """Return logits float32 [rows, V] from the final residual stream [rows, D].

        prompt: the rows are a prompt's.
        """
        ...


class Model(Head, Protocol):
    """One opened model. Every method blocks and computes each token independently.

    D is the width of the residual stream: of all of them, where there are several.
    """

    @property
    def non_expert(self) -> NonExpertParts:
        """The weights of all but routed experts and embedding, for a device other than the CPU."""
        ...

    @property
    def expert_layers(self) -> tuple[StackedExperts | None, ...]:
        """Where each layer's routed experts lie, by layer index; None for a dense layer."""
        ...

    @property
    def score_head(self) -> FloatArray | None:
        """The matrix of a reranker's outputs, float32 [outputs, D], of what `final_norm` gives; None for others."""
        ...

    def embed(self, token_ids: IntArray, *, may_be_missing: bool = False) -> FloatArray:
        """Return float32 [T, D] for int32 [T]; ids are in range. may_be_missing: as `Kernels.decode_rows` takes it."""
        ...

    def embed_layers(
        self,
        token_ids: IntArray,
        x: FloatArray,
        *,
        prompt: bool,
        may_be_missing: bool = False,
    ) -> FloatArray | None:
        """Return each layer's own embeddings of the tokens int32 [T], whose embedding is x; None without any.

        float32 [layers, T, width], for `Chunk.embedded`.
        """
        ...

    def attend(
        self, layer: LayerIndex, chunk: Chunk, x: FloatArray, cache: SequenceCache
    ) -> FloatArray:
        """Return the residual stream [T, D] after this layer's attention; with what `begin_attention` hands on."""
        ...

    def begin_attend(
        self, layer: LayerIndex, chunk: Chunk, x: FloatArray, cache: SequenceCache
    ) -> Callable[[], FloatArray]:
        """Write the chunk's keys and values; return what attends, and gives what `attend` returns.

        For layers whose tokens see others by the cache alone, not for recurrent ones. Keys and values that the chunk's
        tokens see may come into the cache in between.
        """
        ...

    def route(self, layer: LayerIndex, chunk: Chunk, x: FloatArray) -> Routed:
        """Return each token's experts, and the residual stream [T, D] with the shared expert added.

        x: what `attend` gives of the chunk's tokens.
        """
        ...

    @property
    def has_whole_layers(self) -> bool:
        """Whether `layer` can be called: kernels that compute a layer as one job, or its parts one after another in one."""
        ...

    @property
    def has_whole_steps(self) -> bool:
        """Whether `step` can be called: and all of them."""
        ...

    def layer(
        self,
        layer: LayerIndex,
        chunk: Chunk,
        x: FloatArray,
        cache: SequenceCache,
        on_routed: OnRouted | None = None,
    ) -> tuple[FloatArray, Routing]:
        """Return the residual stream [T, D] after the layer, and its routing.

        The bits are those of `attend`, `route` and the experts one after another. on_routed: see `WholeLayer`.
        """
        ...

    def step(self, chunk: Chunk, x: FloatArray, cache: SequenceCache) -> StepOutput:
        """Return what all layers give of decoded tokens, x [T, D] before the first; not of branches.

        The bits are those of `layer` for each of them.
        """
        ...

    def final_norm(self, x: FloatArray) -> FloatArray:
        """Return what the head's matrix is multiplied with, float32 [rows, D], of the final residual stream [rows, D]."""
        ...

    def router_weights(self, layer: LayerIndex) -> RouterWeights:
        """Return the router's weights, as they lie in the file."""
        ...

"""Where each expert's bytes are in the mapped file. Pure arithmetic on tensor offsets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from thermocline.kernels.weight import ExpertActivation
from thermocline.messages import LayerIndex

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.kernels.weight import ExpertStack
    from thermocline.messages import ExpertKey
    from thermocline.modelfile.layout import TensorInfo
    from thermocline.models.weights import StackedExperts

_SILU = frozenset({ExpertActivation.SILU, ExpertActivation.LIMITED_SILU})


@dataclass(frozen=True, slots=True)
class ByteSpan:
    """Half-open range of bytes [start, end) of one shard of the file."""

    shard: int
    start: int
    end: int


class ExpertCatalog:
    """Looks up a layer's experts, and the byte ranges that computing one of them reads."""

    def __init__(self, layers: Sequence[StackedExperts | None]) -> None:
        """layers: None where a layer has no routed experts."""
        self._layers = tuple(layers)

    @property
    def num_layers(self) -> int:
        """All layers, those without routed experts included."""
        return len(self._layers)

    @property
    def routed_layers(self) -> list[LayerIndex]:
        """The layers with routed experts."""
        return [LayerIndex(n) for n, layer in enumerate(self._layers) if layer is not None]

    @property
    def num_experts(self) -> int:
        """Experts per layer."""
        return max((len(layer.stack) for layer in self._layers if layer is not None), default=0)

    @property
    def total_bytes(self) -> int:
        """Bytes of all routed experts."""
        return sum(info.nbytes for layer in self._layers for info in _tensors(layer))

    def stack(self, layer: LayerIndex) -> ExpertStack:
        """Return views of the mapped bytes of all experts of a layer."""
        experts = self._layers[layer]
        assert experts is not None, f"layer {layer} has no routed experts"
        return experts.stack

    def expert_bytes(self, layer: LayerIndex) -> int:
        """Return the bytes of one expert of a layer; 0 where it has none."""
        return sum(info.nbytes // info.shape[0] for info in _tensors(self._layers[layer]))

    def layout(self, layer: LayerIndex) -> str:
        """Return formats and shapes of an expert of a layer; experts of one layout fit the same slots.

        Limits of a layer's own make no other layout.
        """
        stack = self.stack(layer)
        formula = "" if stack.activation in _SILU else f"{stack.activation.name} "
        return formula + ",".join(
            f"{part.format.name} {part.raw.shape[1]}x{part.cols}"
            + (" scaled" if part.scales is not None else "")
            for part in stack.parts
        )

    def layer_spans(self, layer: LayerIndex) -> tuple[ByteSpan, ...]:
        """Return matrices and biases of all experts of a layer as ranges of the file."""
        infos = _tensors(self._layers[layer])
        return tuple(ByteSpan(info.shard, info.offset, info.offset + info.nbytes) for info in infos)

    def spans(self, key: ExpertKey) -> tuple[ByteSpan, ...]:
        """Return matrices and biases of one expert as ranges of the file, in reading order."""
        spans = []
        for info in _tensors(self._layers[key.layer]):
            nbytes = info.nbytes // info.shape[0]
            start = info.offset + key.expert * nbytes
            spans.append(ByteSpan(info.shard, start, start + nbytes))
        return tuple(spans)


def _tensors(experts: StackedExperts | None) -> tuple[TensorInfo, ...]:
    return () if experts is None else experts.tensors

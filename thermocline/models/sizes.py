"""Bytes of each part of a model, wherever it is placed; planners use them. Pure.

Reads the tensor table and the dimensions, never tensor data.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from thermocline.config import MemoryConfig
from thermocline.kv.blocks import window_blocks
from thermocline.models.footprint import measure_footprint
from thermocline.models.layer_embeddings import PROJECTION, TABLE
from thermocline.units import ceil_div

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from thermocline.kernels.cache_format import CacheType
    from thermocline.modelfile.layout import TensorInfo
    from thermocline.models.attention_specs import WindowSpec
    from thermocline.models.device.part import DevicePart
    from thermocline.models.spec import ModelSpec

_LAYER: Final = re.compile(r"blk\.(\d+)\.")
_EXPERTS: Final = ("_exps.weight", "_exps.bias")
_EMBEDDING: Final = "token_embd.weight"
_OUTPUTS: Final = ("output.weight", "output_norm.weight")
_IN_FLIGHT_TOKENS: Final = 1024
"""What a CPU has of prompts: one chunk, see `prompt_limits`."""


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Bytes of one layer.

    non_expert: everything but routed experts. kv_per_token: keys and values of one token in the cache's own type,
    0 where the layer keeps none. expert: one routed expert, 0 without. layout: the formats of an expert's
    matrices; experts of one layout take slots of one size. state: the state of one sequence in a
    recurrent layer. With a sliding window, max_kv_tokens is the most tokens of a sequence whose keys and values are
    kept, and window how many tokens one attends to, itself included. read_per_token: what kv_per_token is of the layer
    whose keys and values this one attends to, where they are another's.
    """

    non_expert: int
    kv_per_token: int
    expert: int
    layout: str
    state: int = 0
    max_kv_tokens: int | None = None
    window: int | None = None
    read_per_token: int = 0

    @property
    def seen_per_token(self) -> int:
        """Keys and values of one token that attention reads, whoever keeps them."""
        return self.kv_per_token + self.read_per_token

    def seen(self, num_tokens: int) -> int:
        """Return how many of `num_tokens` the last one attends to."""
        return num_tokens if self.window is None else min(num_tokens, self.window)

    def kv(self, num_tokens: int) -> int:
        """Keys and values of a sequence of so many tokens, or its state."""
        kept = num_tokens if self.max_kv_tokens is None else min(num_tokens, self.max_kv_tokens)
        return kept * self.kv_per_token + self.state


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Bytes of one model, and how many experts a token uses of each layer.

    output: the head's matrix and norm; a tied head's matrix is the embedding table, which then counts here.
    embedding: the table, where it is not the head's matrix too, and that of the layers' own embeddings. ngrams: the table of
    n-grams, of which a token takes a few rows: memory need not hold it.
    """

    layers: tuple[LayerSizes, ...]
    embedding: int
    output: int
    num_experts: int
    num_used: int
    """Rounded, where layers differ."""
    hidden_size: int
    ngrams: int = 0

    @property
    def non_expert(self) -> int:
        """All but routed experts and the embedding table."""
        return self.output + sum(layer.non_expert for layer in self.layers)

    def non_expert_of(self, part: DevicePart) -> int:
        """The bytes of some layers' non-expert weights, and of the head."""
        layers = sum(self.layers[n].non_expert for n in part.layers)
        return layers + self.output * part.has_head

    @property
    def dense_layers(self) -> frozenset[int]:
        """Layers without routed experts."""
        return frozenset(n for n, layer in enumerate(self.layers) if not layer.expert)

    @property
    def routed_layers(self) -> tuple[int, ...]:
        """Layers with routed experts."""
        return tuple(n for n, layer in enumerate(self.layers) if layer.expert)

    @property
    def routed(self) -> int:
        """All routed experts."""
        return self.num_experts * sum(layer.expert for layer in self.layers)

    @property
    def total(self) -> int:
        """Every tensor but the table of n-grams."""
        return self.non_expert + self.embedding + self.routed

    def kv(self, num_tokens: int) -> int:
        """Keys and values of a sequence of so many tokens in all layers that keep them, and its state in the others."""
        return sum(layer.kv(num_tokens) for layer in self.layers)


@dataclass(frozen=True, slots=True)
class NextBlockSizes:
    """Bytes of the blocks behind the last layer, which draft tokens.

    weights: their tensors. cache_block: what they keep for each block of the trunk's cache: keys,
    values, and a state.
    """

    weights: int
    cache_block: int


def measure_next_block(
    tensors: Iterable[TensorInfo], spec: ModelSpec, cache_type: CacheType, block_tokens: int
) -> NextBlockSizes:
    """Return the sizes of the blocks of `tensors` that are behind the last layer."""
    blocks = ((tensor, _LAYER.match(tensor.name)) for tensor in tensors)
    weights = sum(
        tensor.nbytes for tensor, block in blocks if block and int(block[1]) >= spec.num_layers
    )
    of_token = sum(shape.token_bytes(cache_type) for shape in spec.next_block_shapes)
    kept = block_tokens * of_token + 4 * spec.hidden_size
    return NextBlockSizes(weights, kept)


def measure_sizes(
    tensors: Iterable[TensorInfo],
    spec: ModelSpec,
    cache_type: CacheType,
    *,
    in_flight_tokens: int = _IN_FLIGHT_TOKENS,
) -> ModelSizes:
    """Return the sizes of the model that consists of `tensors`.

    in_flight_tokens: prompt tokens of a sequence that are computed at a time, which layers with a sliding
    window keep besides their window.
    """
    table = tuple(tensors)
    non_expert, formats = [0] * spec.num_layers, defaultdict[int, list[str]](list)
    embedding = of_layers = output = 0
    for tensor in table:
        match = _LAYER.match(tensor.name)
        if tensor.name == _EMBEDDING:
            embedding = tensor.nbytes
        elif tensor.name == TABLE:
            of_layers = tensor.nbytes
        elif tensor.name == PROJECTION:  # each layer's rows
            non_expert = [nbytes + tensor.nbytes // spec.num_layers for nbytes in non_expert]
        elif tensor.name in _OUTPUTS or match is None:
            output += tensor.nbytes
        elif int(match[1]) < spec.num_layers:
            if tensor.name.endswith(_EXPERTS):
                role = tensor.name.split(".", 2)[2].removesuffix(".weight")
                formats[int(match[1])].append(f"{role}:{tensor.format.name}")
            else:
                non_expert[int(match[1])] += tensor.nbytes
    if all(tensor.name != _OUTPUTS[0] for tensor in table):
        embedding, output = 0, output + embedding
    ngrams, of_layers = (of_layers, 0) if spec.ngrams is not None else (0, of_layers)
    embedding += of_layers
    expert_bytes = measure_footprint(table, spec.router).expert_bytes
    windows = set(spec.window_layers)
    keyless, sources = set(spec.keyless_layers), spec.kv_sources
    kv_bytes = [shape.token_bytes(cache_type) for shape in spec.kv_shapes]
    max_kv_tokens = None if spec.window is None else _max_kv_tokens(spec.window, in_flight_tokens)
    layers = tuple(
        LayerSizes(
            non_expert=non_expert[n],
            kv_per_token=0 if n in keyless else kv_bytes[n],
            read_per_token=kv_bytes[n] if n in sources else 0,
            expert=expert_bytes[n] if n < len(expert_bytes) else 0,
            layout=_layout(formats[n], spec, n),
            state=spec.state_bytes(n),
            max_kv_tokens=max_kv_tokens if n in windows else None,
            window=spec.window.num_tokens if spec.window is not None and n in windows else None,
        )
        for n in range(spec.num_layers)
    )
    router = spec.router
    return ModelSizes(
        layers,
        embedding,
        output,
        router.num_experts,
        router.typical_used,
        spec.hidden_size,
        ngrams,
    )


def lasting_bytes(tensors: Iterable[TensorInfo], spec: ModelSpec) -> int:
    """Return the bytes of a file that memory should hold: of all tensors but a table of n-grams."""
    skipped = TABLE if spec.ngrams is not None else None
    return sum(tensor.nbytes for tensor in tensors if tensor.name != skipped)


def _layout(formats: Sequence[str], spec: ModelSpec, layer: int) -> str:
    """Return the name of a layer's layout: formats by role, and the width where layers differ in it."""
    widths = [f"width:{spec.own_expert_sizes[layer]}"] if spec.own_expert_sizes and formats else []
    return " ".join([*sorted(formats), *widths])


def _max_kv_tokens(window: WindowSpec, in_flight_tokens: int) -> int:
    block_tokens = MemoryConfig().block_tokens
    num_blocks = window_blocks(window.num_tokens, block_tokens)
    return (num_blocks + ceil_div(in_flight_tokens, block_tokens)) * block_tokens

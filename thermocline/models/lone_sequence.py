"""One sequence with a cache of its own, for measuring and checking a model's parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from thermocline.kv.cache import SequenceCache
from thermocline.kv.pool import KVPool
from thermocline.kv.recurrent import StatePool
from thermocline.messages import Chunk, ChunkId, RequestId, Segment, StateUse
from thermocline.models.layers import add_experts

if TYPE_CHECKING:
    from thermocline.kernels.cache_format import CacheType
    from thermocline.kernels.contract import Kernels
    from thermocline.kernels.weight import FloatArray, IntArray
    from thermocline.messages import LayerIndex, SegmentKind
    from thermocline.models.contract import Model
    from thermocline.models.spec import ModelSpec


def lone_cache(
    spec: ModelSpec, num_blocks: int, block_tokens: int, cache_type: CacheType
) -> SequenceCache:
    """Return room for one sequence of so many blocks in every layer, and for its state."""
    pool = KVPool(
        spec.kv_shapes,
        num_blocks,
        block_tokens,
        cache_type,
        own_blocks=dict.fromkeys(spec.keyless_layers, 0),
        sources=spec.kv_sources,
    )
    states = None if spec.state is None else StatePool(spec.recurrent_layers, 1, spec.state)
    return SequenceCache(pool, states)


def lone_segment(num_tokens: int, kind: SegmentKind, blocks: IntArray) -> Segment:
    """Return a sequence's first tokens, whose keys and values lie in `blocks`."""
    return Segment(RequestId(0), 0, num_tokens, kind, blocks, 1, StateUse(0))


def lone_chunk(num_tokens: int, kind: SegmentKind, blocks: IntArray) -> Chunk:
    """Return a chunk of these tokens alone, under a number that no other chunk has; logits for the last."""
    positions = np.arange(num_tokens, dtype=np.int32)
    segments = (lone_segment(num_tokens, kind, blocks),)
    return Chunk(ChunkId(-1), segments, positions, positions, positions, positions[-1:])


def compute_layer(
    kernels: Kernels,
    model: Model,
    layer: LayerIndex,
    chunk: Chunk,
    x: FloatArray,
    cache: SequenceCache,
) -> FloatArray:
    """Return x [T, D] after a layer: in one job where the model has such, else part by part, with the same bits."""
    if model.has_whole_layers:
        return model.layer(layer, chunk, x, cache)[0]
    attended = model.attend(layer, chunk, x, cache)
    embedded = chunk.embedded_at(layer)
    routed = model.route(layer, attended, prompt=chunk.is_prompt, embedded=embedded)
    return add_experts(kernels, model.non_expert.layers[layer], routed, prompt=chunk.is_prompt)

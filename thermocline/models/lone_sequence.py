"""One sequence with a cache of its own, for measuring and checking a model's parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from thermocline.kv.cache import SequenceCache
from thermocline.kv.pool import KVPool
from thermocline.kv.recurrent import StatePool
from thermocline.messages import Chunk, ChunkId, RequestId, Segment, StateUse

if TYPE_CHECKING:
    from thermocline.kernels.cache_format import CacheType
    from thermocline.kernels.weight import IntArray
    from thermocline.messages import SegmentKind
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
    states = None
    if spec.has_states:
        states = StatePool(1, spec.main_states, spec.further_states)
    return SequenceCache(pool, states)


def lone_segment(num_tokens: int, kind: SegmentKind, blocks: IntArray) -> Segment:
    """Return a sequence's first tokens, whose keys and values lie in `blocks`."""
    return Segment(RequestId(0), 0, num_tokens, kind, blocks, 1, StateUse(0))


def lone_chunk(num_tokens: int, kind: SegmentKind, blocks: IntArray) -> Chunk:
    """Return a chunk of these tokens alone, under a number that no other chunk has; logits for the last."""
    positions = np.arange(num_tokens, dtype=np.int32)
    segments = (lone_segment(num_tokens, kind, blocks),)
    return Chunk(ChunkId(-1), segments, positions, positions, positions, positions[-1:])

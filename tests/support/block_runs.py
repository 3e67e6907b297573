"""Runs a file's trunk, and its blocks that guess further tokens, with plain kernels and nothing of the engine."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from thermocline.kernels.cache_format import CacheType
from thermocline.kernels.cpu import NativeKernels
from thermocline.kv.pool import KVPool
from thermocline.messages import LayerIndex, SegmentKind
from thermocline.modelfile.reader import open_model_file
from thermocline.models.layers import compute_layer
from thermocline.models.lone_sequence import lone_cache, lone_chunk
from thermocline.models.registry import open_model, open_next_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from thermocline.kernels.contract import Kernels
    from thermocline.messages import Chunk, IntArray
    from thermocline.modelfile.reader import ModelFile

_BLOCK_TOKENS = 16
_NUM_BLOCKS = 8
BLOCKS = np.arange(_NUM_BLOCKS, dtype=np.int32)[::-1].copy()
"""Where the sequence lies."""


def chunk_of(
    tokens: Sequence[int], start: int, kind: SegmentKind, blocks: IntArray = BLOCKS
) -> Chunk:
    """Return tokens at positions from `start` on, of the sequence in `blocks`."""
    positions = np.arange(start, start + len(tokens), dtype=np.int32)
    size = np.int32(_BLOCK_TOKENS)
    return replace(
        lone_chunk(len(tokens), kind, blocks),
        token_ids=np.array(tokens, np.int32),
        positions=positions,
        kv_slots=blocks[positions // size] * size + positions % size,
    )


def trunk_states(path: Path, token_ids: Sequence[int]) -> np.ndarray:
    """Return the states after each token that the file's blocks take, float32 [tokens, D]: behind the last norm, or before."""
    with open_model_file(path) as file:
        kernels = NativeKernels(threads=1)
        model = open_model(file, kernels)
        cache = lone_cache(model.spec, _NUM_BLOCKS, _BLOCK_TOKENS, CacheType.F32)
        chunk = chunk_of(token_ids, 0, SegmentKind.PROMPT)
        x = model.embed(chunk.token_ids)
        for layer in range(model.spec.num_layers):
            x = compute_layer(kernels, model, LayerIndex(layer), chunk, x, cache)
        return x if model.spec.next_blocks_raw else model.final_norm(x)


class BlockRuns:
    """A file's blocks with a cache."""

    def __init__(self, file: ModelFile, kernels: Kernels) -> None:
        self.blocks = open_next_blocks(file, kernels)
        shapes = self.blocks[0].spec.next_block_shapes
        self.cache = KVPool(shapes, _NUM_BLOCKS, _BLOCK_TOKENS, CacheType.F32)

    def run_block(
        self, place: int, token_ids: Sequence[int], before: np.ndarray, start: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the logits of a block after tokens at positions from `start` on, and its states. The first are a prompt."""
        block, kind = self.blocks[place], SegmentKind.DECODE if start else SegmentKind.PROMPT
        states = block.states(chunk_of(token_ids, start, kind), before, self.cache)
        return block.logits(states), states


def states_in_chunks(
    path: Path, token_ids: Sequence[int], cuts: Sequence[int], cache_type: CacheType
) -> np.ndarray:
    """Return what is behind the model's last norm, of a sequence whose chunks end at `cuts`: float32 [tokens, D]."""
    with open_model_file(path) as file:
        kernels = NativeKernels(threads=1)
        model = open_model(file, kernels)
        cache = lone_cache(model.spec, _NUM_BLOCKS, _BLOCK_TOKENS, cache_type)
        found = []
        for start, end in pairwise((0, *cuts)):
            chunk = chunk_of(token_ids[start:end], start, SegmentKind.DECODE)
            x = model.embed(chunk.token_ids)
            for layer in range(model.spec.num_layers):
                x = compute_layer(kernels, model, LayerIndex(layer), chunk, x, cache)
            found.append(model.final_norm(x))
        return np.concatenate(found)

"""Runs a file's trunk, and its block that guesses further tokens, with plain kernels and nothing of the engine."""

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
from thermocline.models.registry import open_model, open_next_block

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from thermocline.messages import Chunk, IntArray

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
    """Return what is behind the model's last norm after each token: float32 [tokens, D]."""
    with open_model_file(path) as file:
        kernels = NativeKernels(threads=1)
        model = open_model(file, kernels)
        cache = lone_cache(model.spec, _NUM_BLOCKS, _BLOCK_TOKENS, CacheType.F32)
        chunk = chunk_of(token_ids, 0, SegmentKind.PROMPT)
        x = model.embed(chunk.token_ids)
        for layer in range(model.spec.num_layers):
            x = compute_layer(kernels, model, LayerIndex(layer), chunk, x, cache)
        return model.final_norm(x)


def block_logits(path: Path, token_ids: Sequence[int], chain: Sequence[int]) -> np.ndarray:
    """Return the block's logits after each token of a prompt, and of a chain behind it: float32 [tokens, V]."""
    states = trunk_states(path, token_ids)
    before = np.concatenate((np.zeros_like(states[:1]), states[:-1]))
    with open_model_file(path) as file:
        block = open_next_block(file, NativeKernels(threads=1))
        shape = block.spec.next_block_shape
        cache = KVPool([shape], _NUM_BLOCKS, _BLOCK_TOKENS, CacheType.F32)
        own = block.states(chunk_of(token_ids, 0, SegmentKind.PROMPT), before, cache)
        found = [block.logits(own)]
        for position, token in enumerate(chain, len(token_ids)):
            own = block.states(chunk_of([token], position, SegmentKind.DECODE), own[-1:], cache)
            found.append(block.logits(own))
        return np.concatenate(found)


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

"""Runs a model's layers, and a block diffusion drafter over what they got, with plain kernels and nothing of the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.support.block_runs import BLOCKS, chunk_of
from thermocline.kernels.cache_format import CacheType
from thermocline.kernels.cpu import NativeKernels
from thermocline.kv.pool import KVPool
from thermocline.messages import LayerIndex, SegmentKind
from thermocline.modelfile.reader import open_model_file
from thermocline.models.dflash import BlockRows, DFlashModel
from thermocline.models.lone_sequence import lone_cache
from thermocline.models.registry import open_model, read_spec

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_BLOCK_TOKENS = 16


def trunk_features(path: Path, token_ids: Sequence[int], layers: Sequence[int]) -> np.ndarray:
    """Return the inputs of these layers at every token, side by side: float32 [tokens, layers * D]."""
    with open_model_file(path) as file:
        model = open_model(file, NativeKernels(threads=1))
        cache = lone_cache(model.spec, len(BLOCKS), _BLOCK_TOKENS, CacheType.F32)
        chunk = chunk_of(token_ids, 0, SegmentKind.PROMPT)
        x, found = model.embed(chunk.token_ids), {}
        for layer in range(model.spec.num_layers):
            found[layer] = x
            x, _ = model.layer(LayerIndex(layer), chunk, x, cache)
        return np.concatenate([found[layer] for layer in layers], axis=1)


def block_logits(
    target: Path, drafter: Path, features: np.ndarray, block: Sequence[int]
) -> np.ndarray:
    """Return the logits of a block's rows behind positions with these features: float32 [rows, V]."""
    with open_model_file(target) as file, open_model_file(drafter) as own:
        model = DFlashModel(own, file, read_spec(file), NativeKernels(threads=1))
        pool = KVPool(model.spec.kv_shapes, len(BLOCKS), _BLOCK_TOKENS, CacheType.F32)
        caches = [pool.layer(LayerIndex(n)) for n in range(len(model.spec.kv_shapes))]
        known = chunk_of([0] * len(features), 0, SegmentKind.PROMPT)
        model.store(
            np.ascontiguousarray(features), known.positions, known.kv_slots, caches, prompt=True
        )
        rows = chunk_of(block, len(features), SegmentKind.DECODE)
        last = np.full(len(block), rows.positions[-1], np.int32)
        return model.logits(
            BlockRows(rows.token_ids, rows.positions, last, rows.kv_slots, rows.segments), caches
        )

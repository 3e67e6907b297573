"""Runs an EAGLE-3 drafter over given features with plain kernels and nothing of the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.support.block_runs import BLOCKS, chunk_of
from thermocline.kernels.cache_format import CacheType
from thermocline.kernels.cpu import NativeKernels
from thermocline.kv.pool import KVPool
from thermocline.messages import LayerIndex, SegmentKind
from thermocline.modelfile.reader import open_model_file
from thermocline.models.eagle3 import Eagle3Model, StatedTokens
from thermocline.models.registry import read_spec

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from thermocline.kernels.contract import Kernels

_BLOCK_TOKENS = 16


def eagle_guesses(
    target: Path,
    drafter: Path,
    known: Sequence[int],
    features: np.ndarray,
    chain: Sequence[int],
    *,
    kernels: Kernels | None = None,
    cache_type: CacheType = CacheType.F32,
) -> tuple[np.ndarray, np.ndarray]:
    """Return logits [n, rows of the head], and the states [n, D] that the next guess takes, behind each token of `chain`.

    known: what the model has computed. features: float32 [known, 3 * D of the model], what its layers got. chain: the
    newest known token, then guesses.
    """
    kernels = kernels or NativeKernels(threads=1)
    with open_model_file(target) as file, open_model_file(drafter) as own:
        model = Eagle3Model(own, file, read_spec(file), kernels)
        pool = KVPool(model.spec.kv_shapes, len(BLOCKS), _BLOCK_TOKENS, cache_type)
        cache = pool.layer(LayerIndex(0))
        states = model.fuse(np.ascontiguousarray(features), prompt=True)
        if len(known) > 1:
            model.store(_rows(known[1:], 1, states[:-1]), cache, prompt=True)
        before, logits, following = states[-1:], [], []
        for position, token in enumerate(chain, len(known)):
            before = model.states(_rows([token], position, before), [BLOCKS], cache)
            logits.append(model.logits(before))
            following.append(before)
        return np.concatenate(logits), np.concatenate(following)


def _rows(tokens: Sequence[int], start: int, before: np.ndarray) -> StatedTokens:
    chunk = chunk_of(tokens, start, SegmentKind.DECODE)
    return StatedTokens(chunk.token_ids, before, chunk.positions, chunk.kv_slots)

"""Runs a model's layers, and Gemma 4's own drafter over what they keep, with plain kernels and nothing of the engine."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from tests.support.block_runs import BLOCKS
from thermocline.kernels.cache_format import CacheType
from thermocline.kernels.cpu import NativeKernels
from thermocline.messages import (
    CachePlaces,
    Chunk,
    ChunkId,
    LayerIndex,
    RequestId,
    Segment,
    SegmentKind,
)
from thermocline.modelfile.reader import open_model_file
from thermocline.models.gemma4_assistant import AssistantModel, AssistantRows
from thermocline.models.lone_sequence import lone_cache
from thermocline.models.registry import open_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from thermocline.kernels.contract import Kernels
    from thermocline.kv.cache import SequenceCache
    from thermocline.messages import IntArray
    from thermocline.models.contract import Model

BLOCK_TOKENS = 16


@dataclass(frozen=True)
class Trunk:
    """The layers of a drafted model."""

    model: Model

    def run(self, chunk: Chunk, cache: SequenceCache) -> np.ndarray:
        """Return what the last layer gives for a chunk's tokens, float32 [T, D]; their keys and values are in `cache` then."""
        model, prompt = self.model, chunk.is_prompt
        x = model.embed(chunk.token_ids)
        chunk = replace(chunk, embedded=model.embed_layers(chunk.token_ids, x, prompt=prompt))
        for index in range(model.spec.num_layers):
            layer = LayerIndex(index)
            if model.has_whole_layers:
                x, _ = model.layer(layer, chunk, x, cache)
                continue
            x = model.attend(layer, chunk, x, cache)
            routed = model.route(layer, chunk, x)
            assert routed.ending is None, "reference kernels run models without experts here"
            x = routed.residual
        return x

    def compute(
        self,
        tokens: Sequence[int],
        cache: SequenceCache,
        table: IntArray,
        window_table: IntArray | None = None,
    ) -> np.ndarray:
        """Compute a prompt, and return the state behind the final norm after each token, float32 [T, D]."""
        chunk = placed_chunk(tokens, 0, table, window_table)
        return self.model.final_norm(self.run(chunk, cache))


def placed_chunk(
    tokens: Sequence[int],
    start: int,
    table: IntArray,
    window_table: IntArray | None = None,
    *,
    kind: SegmentKind = SegmentKind.PROMPT,
    request: RequestId = RequestId(0),  # noqa: B008 - a number
    block_tokens: int = BLOCK_TOKENS,
    num_drafted: int = 0,
) -> Chunk:
    """Return tokens of one request from position `start` on, in these blocks."""
    positions = np.arange(start, start + len(tokens), dtype=np.int32)
    size = np.int32(block_tokens)

    def places(blocks: IntArray) -> CachePlaces:
        segment = Segment(request, 0, len(tokens), kind, blocks, num_drafted=num_drafted)
        return CachePlaces(blocks[positions // size] * size + positions % size, (segment,))

    whole = places(table)
    return Chunk(
        ChunkId(0),
        whole.segments,
        np.array(tokens, np.int32),
        positions,
        whole.slots,
        np.zeros(0, np.int32),
        window_places=None if window_table is None else places(window_table),
    )


@contextmanager
def opened_assistant(
    target: Path,
    drafter: Path,
    *,
    kernels: Kernels | None = None,
    cache_type: CacheType = CacheType.F32,
    num_blocks: int = len(BLOCKS),
    block_tokens: int = BLOCK_TOKENS,
) -> Iterator[tuple[Trunk, AssistantModel, SequenceCache]]:
    """Open a model, its drafter, and room for what the model keeps."""
    kernels = kernels or NativeKernels(threads=1)
    with open_model_file(target) as file, open_model_file(drafter) as own:
        model = open_model(file, kernels)
        cache = lone_cache(model.spec, num_blocks, block_tokens, cache_type)
        yield Trunk(model), AssistantModel(own, file, model.spec, kernels), cache


def assistant_guesses(
    target: Path,
    drafter: Path,
    known: Sequence[int],
    chain: Sequence[int],
    *,
    kernels: Kernels | None = None,
    cache_type: CacheType = CacheType.F32,
) -> tuple[np.ndarray, np.ndarray]:
    """Return logits [n, V], and the states [n, D] that the next guess takes, behind each token of `chain`.

    known: what the model has computed. chain: the newest known token, then guesses.
    """
    with opened_assistant(target, drafter, kernels=kernels, cache_type=cache_type) as opened:
        trunk, drafts, cache = opened
        before = trunk.compute(known, cache, BLOCKS)[-1:]
        positions = np.array([len(known)], np.int32)
        logits, following = [], []
        for token in chain:
            rows = AssistantRows(positions, [BLOCKS], [BLOCKS])
            states = drafts.states(np.array([token], np.int32), before, rows, cache.kv)
            before = drafts.next_before(states)
            logits.append(drafts.logits(states))
            following.append(before)
        return np.concatenate(logits), np.concatenate(following)

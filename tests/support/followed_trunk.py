"""What a drafter that reads layers is told of requests: chunks that go by, steps, and what came of drafts. Computes no model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from thermocline.messages import Chunk, ChunkId, LayerIndex, Segment, SegmentKind
from thermocline.speculation.contract import DraftWish, Verified

if TYPE_CHECKING:
    from thermocline.speculation.contract import Drafter

BLOCK = 4
"""Tokens of a block of the cache."""


def made_inputs(states, tokens, start, end):
    """The inputs of layers at some positions, made of the last two tokens there. states: [layers, V, D]."""
    ids = np.array(tokens[start:end])
    before = np.array([tokens[max(position - 1, 0)] for position in range(start, end)])
    return {LayerIndex(n): of[ids] - 0.5 * of[before] for n, of in enumerate(states)}


def chunk_of(request, tokens, start, end, *, blocks, prompt=False, drafted=0):
    """A chunk of tokens[start:end] of one request. blocks: those that hold it; drafted: how many last tokens were guessed."""
    positions = np.arange(start, end, dtype=np.int32)
    table = np.array(blocks, np.int32)[: -(-end // BLOCK)]
    kind = SegmentKind.PROMPT if prompt else SegmentKind.DECODE
    segment = Segment(request, 0, end - start, kind, table, num_drafted=drafted)
    ids = np.array(tokens[start:end], np.int32)
    slots = table[positions // BLOCK] * BLOCK + positions % BLOCK
    return Chunk(ChunkId(0), (segment,), ids, positions, slots, np.zeros(0, np.int32))


class FollowedTrunk:
    """A drafter with layers before it."""

    def __init__(self, drafter: Drafter, states) -> None:
        """states: as for `made_inputs`."""
        self.drafter, self._states = drafter, states

    def compute(self, request, tokens, start, end, *, blocks, prompt=False, drafted=0, given=None):
        """Let a chunk of tokens[start:end] go by. given: what the layers get; None for what these tokens make."""
        chunk = chunk_of(request, tokens, start, end, blocks=blocks, prompt=prompt, drafted=drafted)
        inputs = given or made_inputs(self._states, tokens, start, end)
        self.drafter.hidden_computed(chunk, np.zeros((end - start, 64), np.float32), inputs)

    def step(self, request, known, drafted, chosen, *, blocks):
        """Let a decode step go by: the newest known token, and drafted ones, of which the first chosen ones are right."""
        start = len(known) - 1
        tokens = [*known, *drafted]
        self.compute(request, tokens, start, len(tokens), blocks=blocks, drafted=len(drafted))
        right = len(chosen) - 1
        assert drafted[:right] == chosen[:right]
        self.drafter.observe(Verified(request, start, tuple(chosen), len(drafted), right))

    def propose(self, request, known, count=7):
        """What it drafts after these tokens."""
        (draft,) = self.drafter.propose([DraftWish(request, len(known), known[-1], count)])
        return draft


def same(found, draft):
    """Whether two drafts have the same nodes. What they come of are a prompt's products, or a step's."""
    return (found.tokens, found.parents) == (draft.tokens, draft.parents) and np.allclose(
        found.confidence, draft.confidence, rtol=1e-4
    )

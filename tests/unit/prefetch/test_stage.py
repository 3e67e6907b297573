"""The prefetch stage: what a chunk's hint says, from its setting out and from each routed layer."""

from __future__ import annotations

import numpy as np
import pytest

from thermocline.messages import (
    BackendRole,
    Chunk,
    ChunkId,
    ExpertDispatch,
    Hidden,
    LayerIndex,
    LayerWork,
    RequestId,
    Routing,
    Segment,
    SegmentKind,
)
from thermocline.models.router_rule import RouterRule
from thermocline.stages.prefetch import PrefetchStage


class FakeGovernor:
    """Keeps the hints."""

    def __init__(self) -> None:
        self.hints = []

    def offer_nowait(self, hint) -> None:
        self.hints.append(hint)


@pytest.fixture
def governor():
    """Takes the hints of the stage under test."""
    return FakeGovernor()


@pytest.fixture
def stage(governor):
    """16 experts, 2 per token: from 8 tokens on a chunk wants most of a layer."""
    return PrefetchStage(governor, RouterRule(16, 2, normalize_top_k=True))


def chunk(num_tokens: int, *, ends: bool) -> Chunk:
    tokens = np.arange(num_tokens, dtype=np.int32)
    kind = SegmentKind.PROMPT if num_tokens > 1 else SegmentKind.DECODE
    segment = Segment(RequestId(1), 0, num_tokens, kind, np.zeros(1, np.int32))
    rows = tokens[-1:] if ends else tokens[:0]
    return Chunk(ChunkId(5), (segment,), tokens, tokens, tokens, rows)


def work(num_tokens: int, *tiers: BackendRole, ends: bool = True) -> LayerWork:
    rows = np.zeros(2, np.int32)
    share = ExpertDispatch(np.array([3, 9], np.int32), rows + 1, rows, rows, np.ones(2, np.float32))
    x = np.ones((num_tokens, 4), np.float32)
    routing = Routing(np.zeros((num_tokens, 2), np.int32), np.ones((num_tokens, 2), np.float32))
    shares = dict.fromkeys(tiers, share)
    return LayerWork(chunk(num_tokens, ends=ends), LayerIndex(2), x, x, routing, shares)


async def test_few_tokens_give_their_selection_and_their_state(stage, governor):
    """A decode step's hint has the cold experts of its layer and the residual stream."""
    message = work(1, BackendRole.COLD)
    await stage(message)
    (hint,) = governor.hints
    assert (hint.chunk, hint.layer, hint.streams) == (5, 2, False)
    assert hint.experts.tolist() == [3, 9]
    assert hint.residual is message.residual
    assert hint.token_ids is message.chunk.token_ids


async def test_many_tokens_stream_and_hold_no_state(stage, governor):
    """A prompt's hint does not keep a large array alive."""
    await stage(work(8, BackendRole.COLD))
    assert governor.hints[0].streams
    assert governor.hints[0].residual is None
    assert governor.hints[0].token_ids is None


async def test_a_prompt_that_is_not_at_its_end_continues(stage, governor):
    """Only a chunk without logits is followed by more of its prompt."""
    await stage(work(8, BackendRole.COLD, ends=False))
    await stage(work(8, BackendRole.COLD, ends=True))
    assert [hint.continues for hint in governor.hints] == [True, False]


async def test_a_chunk_that_sets_out_selects_nothing_yet(stage, governor):
    """Before its first router a prompt's hint names the layer only."""
    start = chunk(8, ends=True)
    await stage(Hidden(start, LayerIndex(0), np.ones((8, 4), np.float32)))
    (hint,) = governor.hints
    assert (hint.layer, len(hint.experts), hint.streams) == (0, 0, True)


async def test_experts_of_others_are_not_hinted(stage, governor):
    """Without experts that this process computes there is no hint."""
    await stage(work(1, BackendRole.HOT))
    await stage(work(1, BackendRole.REMOTE))
    assert not governor.hints


async def test_what_workers_may_leave_is_hinted_too(governor):
    """Where their share is decided layer by layer, their experts count as this process's own."""
    stage = PrefetchStage(
        governor, RouterRule(16, 2, normalize_top_k=True), (BackendRole.COLD, BackendRole.REMOTE)
    )
    await stage(work(1, BackendRole.REMOTE))
    await stage(work(1, BackendRole.REMOTE, BackendRole.COLD))
    assert [hint.experts.tolist() for hint in governor.hints] == [[3, 9], [3, 3, 9, 9]]

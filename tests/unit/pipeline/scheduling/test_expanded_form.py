"""Which tokens take the expanded form of latent attention: a rule of position and prompt, which schedules can not change."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from thermocline.config import SchedulerConfig
from thermocline.kv.blocks import BlockAllocator
from thermocline.messages import RequestId, SegmentKind
from thermocline.pipeline.scheduling.expanded_form import num_expanded
from thermocline.pipeline.scheduling.scheduler import Scheduler

CELL = 32


def scheduler(chunk_tokens: int) -> Scheduler:
    config = SchedulerConfig(prefill_chunk_tokens=chunk_tokens, max_prompt_chunks=2)
    return Scheduler(config, BlockAllocator(64, 16), 512, kinds_differ=False, expanded_tokens=CELL)


def run(of: Scheduler, request: int, prompt: list[int], new_tokens: int, budget: int):
    """Run one request alone; return its chunks of prompt as (first position, tokens, expanded ones)."""
    of.submit(RequestId(request), prompt, max_new_tokens=new_tokens)
    chunks = []
    while of.requests:
        of.prompt_tokens_limit = budget
        chunk = of.plan()
        segment = chunk.segments[0]
        if segment.kind is SegmentKind.PROMPT:
            chunks.append((int(chunk.positions[0]), segment.length, segment.num_expanded))
        else:
            assert segment.num_expanded == 0
        for caught_up in of.commit(chunk):
            done = len(of.requests[caught_up.request].known) == len(prompt) + new_tokens - 1
            of.append(caught_up.request, 500 + len(of.requests[caught_up.request].known))
            if done:
                of.finish(caught_up.request)
        of.check_integrity()
    return chunks


@pytest.mark.parametrize(
    ("prompt", "cell", "expected"), [(31, 32, 0), (32, 32, 32), (95, 32, 64), (95, 0, 0)]
)
def test_whole_cells_of_a_prompt_are_expanded(prompt, cell, expected):
    """The rest of a prompt is computed as its answer."""
    assert num_expanded(prompt, cell) == expected


@pytest.mark.parametrize(("chunk", "budget"), [*product([5, 20, 32, 64, 200], [1, 7, 40, 200])])
def test_a_tokens_form_does_not_depend_on_chunks(chunk, budget):
    """Whatever chunks are asked for, the first 96 of 100 tokens are expanded; no chunk is longer than the limit."""
    budget = min(chunk, budget)
    chunks = run(scheduler(chunk), 1, list(range(100)), 3, budget)
    forms = np.zeros(100, bool)
    for first, length, expanded in chunks:
        forms[first : first + expanded] = True
        assert length <= chunk
        # As many tokens as can share what is made for a chunk.
        assert first + length >= 96 or length >= min(CELL, chunk)
    assert forms.tolist() == [True] * 96 + [False] * 4
    assert sum(length for _, length, _ in chunks) == 100


def test_a_later_turn_finds_blocks_of_the_same_form():
    """The answer in an unfinished cell is found; what was computed as an answer is computed again in a whole cell."""
    of, first = scheduler(200), list(range(40))
    assert run(of, 1, first, 20, 200) == [(0, 40, 32)]
    answered = first + [500 + n for n in range(40, 59)]
    # Tokens 32 to 58 were absorbed, and are in a prompt of 60 tokens, too: one full block of them.
    assert run(of, 2, [*answered, 7], 1, 200) == [(48, 12, 0)]
    # A prompt of 70 has them in a whole cell.
    assert run(of, 3, [*answered, *range(11)], 1, 200) == [(32, 38, 32)]
    # The same prompt with another end finds that cell.
    assert run(of, 4, [*answered, *range(8), 9, 9, 9, 9], 1, 200) == [(64, 7, 0)]


def test_a_preempted_request_keeps_its_forms():
    """Tokens that are computed again take the form that they took."""
    config = SchedulerConfig(
        prefill_chunk_tokens=200,
        max_prompt_chunks=2,
        prefix_cache=False,
        expected_answer_tokens=0,
    )
    of = Scheduler(config, BlockAllocator(8, 16), 128, kinds_differ=False, expanded_tokens=CELL)
    forms: dict[int, set[int]] = {1: set(), 2: set()}
    for request in forms:
        of.submit(RequestId(request), list(range(33)), max_new_tokens=60)
    while of.requests:
        chunk = of.plan()
        for segment in chunk.segments:
            if segment.kind is SegmentKind.PROMPT:
                forms[segment.request].add(
                    int(chunk.positions[segment.start]) + segment.num_expanded
                )
        for caught_up in of.commit(chunk):
            entry = of.requests[caught_up.request]
            of.append(caught_up.request, 1)
            if len(entry.known) == 93:
                of.finish(caught_up.request)
    assert of.snapshot().total_preemptions > 0
    assert forms == {1: {32}, 2: {32}}

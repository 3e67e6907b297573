"""The scheduler: chunks, turns, waiting, limits; and no schedule loses a block or a token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thermocline.config import SchedulerConfig
from thermocline.errors import BusyError, PromptTooLongError
from thermocline.kv.blocks import BlockAllocator
from thermocline.messages import RequestId, SegmentKind
from thermocline.pipeline.scheduler import Scheduler


def make_scheduler(*, chunk=4, blocks=16, block_tokens=4, context=32, max_requests=8) -> Scheduler:
    config = SchedulerConfig(prefill_chunk_tokens=chunk, max_requests=max_requests)
    return Scheduler(config, BlockAllocator(blocks, block_tokens), context)


def submit(scheduler: Scheduler, request: int, length: int, new: int | None = 4, **options) -> int:
    return scheduler.submit(RequestId(request), list(range(length)), max_new_tokens=new, **options)


def test_a_prompt_is_cut_into_chunks():
    """A prompt of 10 in chunks of 4 walks as 4, 4, 2; only the last wants logits, of its last row."""
    scheduler = make_scheduler()
    submit(scheduler, 1, 10)
    lengths, rows = [], []
    while not rows or not rows[-1]:
        chunk = scheduler.plan()
        lengths.append(chunk.num_tokens)
        rows.append(chunk.logits_rows.tolist())
        caught_up = scheduler.commit(chunk)
    assert (lengths, rows) == ([4, 4, 2], [[], [], [1]])
    assert caught_up == (1,)


def test_a_sampled_token_becomes_a_decode_chunk():
    """The token after the prompt goes as a chunk of one, at the next position, in its own slot."""
    scheduler = make_scheduler()
    submit(scheduler, 1, 3)
    scheduler.commit(scheduler.plan())
    scheduler.append(RequestId(1), 99)
    chunk = scheduler.plan()
    assert chunk.token_ids.tolist() == [99]
    assert chunk.positions.tolist() == [3]
    assert chunk.segments[0].kind is SegmentKind.DECODE
    table = chunk.segments[0].block_table
    assert chunk.kv_slots.tolist() == [table[0] * 4 + 3]


def test_nothing_is_planned_twice_while_a_chunk_is_in_flight():
    """Scheduled and computed are apart: a request whose tokens are all on their way waits."""
    scheduler = make_scheduler(chunk=8)
    submit(scheduler, 1, 5)
    assert scheduler.plan() is not None
    assert scheduler.plan() is None


def test_requests_take_turns():
    """Two prompts alternate chunk by chunk."""
    scheduler = make_scheduler()
    submit(scheduler, 1, 8)
    submit(scheduler, 2, 8)
    order = []
    for _ in range(4):
        chunk = scheduler.plan()
        order.append(chunk.requests[0])
        scheduler.commit(chunk)
    assert order == [1, 2, 1, 2]


def test_a_request_waits_for_blocks_and_then_runs():
    """The second request starts only when the first has given its blocks back."""
    scheduler = make_scheduler(blocks=4, context=16)
    submit(scheduler, 1, 8, new=8)
    submit(scheduler, 2, 8, new=8)
    first = scheduler.plan()
    assert scheduler.snapshot().num_waiting == 1
    scheduler.finish(RequestId(1))
    assert scheduler.plan() is None, "the blocks of a chunk in flight are not free yet"
    scheduler.commit(first)
    assert scheduler.plan().requests == (2,)
    scheduler.check_integrity()


def test_the_answer_is_limited_by_the_context():
    """max_new_tokens is cut to the room that is left; None takes all of it."""
    scheduler = make_scheduler(context=16, blocks=64)
    assert submit(scheduler, 1, 10, new=100) == 6
    assert submit(scheduler, 2, 10, new=None) == 6
    assert submit(scheduler, 3, 16, new=0) == 0


def test_a_prompt_without_room_for_an_answer_is_refused():
    """The error says both numbers, and nothing was taken."""
    scheduler = make_scheduler(context=16)
    with pytest.raises(PromptTooLongError, match=r"16 tokens.*holds 16"):
        submit(scheduler, 1, 16)
    scheduler.check_integrity()
    assert scheduler.snapshot().num_waiting == 0


def test_one_request_too_many_is_busy():
    """Admission is bounded, and an ended request makes room."""
    scheduler = make_scheduler(max_requests=2)
    submit(scheduler, 1, 4)
    submit(scheduler, 2, 4)
    with pytest.raises(BusyError, match="--max-requests"):
        submit(scheduler, 3, 4)
    assert scheduler.finish(RequestId(2))
    submit(scheduler, 3, 4)


def test_a_scoring_request_wants_every_row():
    """All rows of every chunk give logits, and a held request starts nothing."""
    scheduler = make_scheduler()
    submit(scheduler, 1, 6, new=0, wants_all_logits=True)
    chunk = scheduler.plan()
    assert chunk.logits_rows.tolist() == [0, 1, 2, 3]
    scheduler.commit(chunk)
    scheduler.hold(RequestId(1))
    assert scheduler.plan() is None
    scheduler.resume(RequestId(1))
    assert scheduler.plan().logits_rows.tolist() == [0, 1]


def test_finishing_twice_is_harmless():
    """The second end of a request is False and changes nothing."""
    scheduler = make_scheduler()
    submit(scheduler, 1, 4)
    assert scheduler.finish(RequestId(1))
    assert not scheduler.finish(RequestId(1))
    scheduler.check_integrity()


@settings(max_examples=200, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.integers(1, 20), st.integers(0, 6), st.booleans()), min_size=1, max_size=6
    ),
    chunk=st.integers(1, 9),
    in_flight=st.integers(1, 4),
    choices=st.randoms(use_true_random=False),
)
def test_any_interleaving_keeps_every_promise(requests, chunk, in_flight, choices):
    """Random plans, commits and aborts: every token is computed once, in order, in its own slot."""
    scheduler = make_scheduler(chunk=chunk, blocks=14, context=28)
    wanted = {}
    for index, (length, new, _) in enumerate(requests):
        wanted[index] = length + submit(scheduler, index, length, new) - (new > 0)
    aborted = {index for index, request in enumerate(requests) if request[2]}
    computed = dict.fromkeys(wanted, 0)
    slots: dict[int, dict[int, int]] = {index: {} for index in wanted}
    ended, flying = set(), []
    for _ in range(2000):
        planned = scheduler.plan() if len(flying) < in_flight else None
        if planned is not None:
            (segment,) = planned.segments
            expected = np.arange(
                computed[segment.request], computed[segment.request] + segment.length
            )
            np.testing.assert_array_equal(planned.positions, expected)
            computed[segment.request] += segment.length
            slots[segment.request] |= dict(
                zip(planned.positions.tolist(), planned.kv_slots.tolist(), strict=True)
            )
            flying.append(planned)
        elif flying:
            committed = flying.pop(0)
            for request in scheduler.commit(committed):
                if computed[request] >= wanted[request]:
                    scheduler.finish(request)
                    ended.add(request)
                else:
                    scheduler.append(request, 1)
        else:
            break
        live = [s for r, s in slots.items() if r not in ended and r not in aborted]
        used = [slot for request_slots in live for slot in request_slots.values()]
        assert len(used) == len(set(used)), "two live tokens share a slot"
        if aborted and choices.random() < 0.2:
            request = aborted.pop()
            scheduler.finish(RequestId(request))
            ended.add(request)
            slots[request] = {}
        scheduler.check_integrity()
    for request in aborted:
        scheduler.finish(RequestId(request))
    assert ended | aborted == set(wanted)
    snapshot = scheduler.snapshot()
    assert snapshot.num_free_blocks == snapshot.num_blocks

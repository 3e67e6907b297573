"""Drafted rows of a step: how many there are room for, which of them stay, and that nothing is left of others."""

from __future__ import annotations

import pytest

from thermocline.config import SchedulerConfig
from thermocline.kv.blocks import BlockAllocator
from thermocline.kv.state_slots import StateSlots
from thermocline.messages import RequestId, RequestOptions
from thermocline.pipeline.scheduling.request_states import RequestStates
from thermocline.pipeline.scheduling.scheduler import Scheduler
from thermocline.speculation.contract import MAX_DRAFT_TOKENS, Draft

BLOCK = 4


def make_scheduler(
    *, blocks=16, chunk=32, states=None, kinds_differ=True, **settings_
) -> Scheduler:
    config = SchedulerConfig(
        **{"prefill_chunk_tokens": chunk, "max_prompt_chunks": 2, "expected_answer_tokens": 0}
        | settings_
    )
    return Scheduler(
        config, BlockAllocator(blocks, BLOCK), 48, kinds_differ=kinds_differ, states=states
    )


def begin(scheduler: Scheduler, *requests: int, prompt=3, new=30) -> None:
    """Let requests have the first token of their answer, which is 7."""
    for request in requests:
        tokens = [request * 100 + index for index in range(prompt)]
        scheduler.submit(RequestId(request), tokens, max_new_tokens=new)
    while any(r.num_prompt_tokens == len(r.known) for r in scheduler.requests.values()):
        for request, _ in scheduler.commit(scheduler.plan()):
            assert not scheduler.append(request, 7)


def offer(scheduler: Scheduler, tokens: list[int]) -> None:
    """Offer the same draft to all that wish one, cut as they wish."""
    for wish in scheduler.wishes():
        scheduler.offer(Draft.chain(wish, tokens[: wish.max_tokens]))


def take(scheduler: Scheduler, chunk, tokens: list[int]) -> list[int]:
    """Commit a step; the model says `tokens` to each. Return how many of them each request took."""
    taken = []
    for request, _ in scheduler.commit(chunk):
        count = 1
        while scheduler.append(request, tokens[count - 1]):
            count += 1
        taken.append(count)
    scheduler.check_integrity()
    return taken


def test_drafted_rows_follow_the_newest_token():
    """Positions and slots go on, each row has logits, and the known tokens stay as they were."""
    scheduler = make_scheduler()
    begin(scheduler, 1, prompt=4)
    offer(scheduler, [8, 9, 10, 11, 12])
    chunk = scheduler.plan()
    (segment,) = chunk.segments
    assert (segment.length, segment.num_logits, segment.num_drafted) == (6, 6, 5)
    assert chunk.token_ids.tolist() == [7, 8, 9, 10, 11, 12]
    assert chunk.positions.tolist() == [4, 5, 6, 7, 8, 9]
    blocks = segment.block_table.tolist()
    assert chunk.kv_slots.tolist() == [blocks[at // BLOCK] * BLOCK + at % BLOCK for at in range(4, 10)]  # fmt: skip
    assert chunk.logits_rows.tolist() == list(range(6))
    assert scheduler.requests[RequestId(1)].known[-1] == 7


@pytest.mark.parametrize("num_right", range(6))
def test_right_rows_stay_and_others_are_taken_back(num_right):
    """After n right guesses the request has n + 1 more tokens, computed but for the last, and blocks for just these."""
    scheduler = make_scheduler()
    begin(scheduler, 1)
    offer(scheduler, [8, 9, 10, 11, 12])
    said = [8, 9, 10, 11, 12, 13]
    said[num_right] = 99
    assert take(scheduler, scheduler.plan(), said) == [num_right + 1]
    request = scheduler.requests[RequestId(1)]
    assert request.known[3:] == [7, *said[: num_right + 1]]
    assert request.computed == request.scheduled == len(request.known) - 1
    assert len(request.cache.blocks) == -(-len(request.known) // BLOCK)
    assert request.cache.num_full == request.computed // BLOCK
    (segment,) = scheduler.plan().segments
    assert (segment.length, segment.num_drafted) == (1, 0)


def test_only_right_tokens_are_found_by_others():
    """A later request shares blocks of accepted tokens, and none that holds a wrong guess."""
    scheduler = make_scheduler(kinds_differ=False)
    begin(scheduler, 1)
    offer(scheduler, [8, 9, 10, 11, 12, 13, 14])
    take(scheduler, scheduler.plan(), [8, 9, 10, 11, 99])
    for prompt, num_shared in (
        ([100, 101, 102, 7, 8, 9, 10, 11, 1], 2),
        ([100, 101, 102, 7, 8, 9, 10, 11, 12, 13, 14, 1], 2),
    ):
        number = RequestId(len(prompt))
        scheduler.submit(number, prompt, max_new_tokens=1)
        chunk = next(c for c in iter(scheduler.plan, None) if number in c.requests)
        assert chunk.positions[0] == num_shared * BLOCK
        scheduler.finish(number)
        scheduler.commit(chunk)


def test_a_draft_never_goes_beyond_the_answer_s_limit():
    """The last token of an answer is not computed, so the draft ends before it."""
    scheduler = make_scheduler()
    begin(scheduler, 1, new=4)
    (wish,) = scheduler.wishes()
    assert wish.max_tokens == 2
    scheduler.offer(Draft.chain(wish, [8] * 9))
    assert scheduler.plan().token_ids.tolist() == [7, 8, 8]
    last = make_scheduler()
    begin(last, 1, new=2)
    assert last.wishes() == []


def test_wishes_are_for_answers_that_wait_for_one_token():
    """None while a step is in flight, none twice, none of a prompt."""
    scheduler = make_scheduler()
    begin(scheduler, 1, 2)
    wishes = scheduler.wishes()
    assert [(wish.request, wish.num_known, wish.last_token) for wish in wishes] == [
        (1, 4, 7),
        (2, 4, 7),
    ]
    assert {wish.max_tokens for wish in wishes} == {MAX_DRAFT_TOKENS}
    scheduler.offer(Draft.chain(wishes[0], [8]))
    assert [wish.request for wish in scheduler.wishes()] == [2]
    scheduler.plan()
    assert scheduler.wishes() == []


def test_a_late_draft_does_nothing():
    """One for fewer tokens than are known, or of a request that has ended."""
    scheduler = make_scheduler()
    begin(scheduler, 1, 2)
    wishes = scheduler.wishes()
    take(scheduler, scheduler.plan(), [8])
    scheduler.finish(RequestId(2))
    for wish in wishes:
        scheduler.offer(Draft.chain(wish, [8, 9]))
    assert scheduler.plan().token_ids.tolist() == [8]
    scheduler.check_integrity()


def test_drafts_share_the_room_of_a_step():
    """All rows behind the first of each are limited like a prompt's chunk, in the order of requests."""
    scheduler = make_scheduler(chunk=6)
    begin(scheduler, 1, 2)
    offer(scheduler, [8, 9, 10, 11])
    assert [segment.num_drafted for segment in scheduler.plan().segments] == [4, 2]


def test_a_draft_takes_no_block_that_others_need():
    """As many blocks are left as requests run; a draft ends with the blocks that it has."""
    scheduler = make_scheduler(blocks=4)
    begin(scheduler, 1, 2)
    offer(scheduler, [8] * 9)
    chunk = scheduler.plan()
    assert [segment.num_drafted for segment in chunk.segments] == [0, 0]
    assert scheduler.snapshot().total_preemptions == 0


def test_a_request_that_leaves_in_the_middle_of_its_rows_leaves_nothing():
    """Ended after some right guesses, or while the step is in flight: every block is free."""
    for leaves_early in (True, False):
        scheduler = make_scheduler(states=RequestStates(StateSlots(2, 0, 4), 8))
        begin(scheduler, 1)
        offer(scheduler, [8, 9, 10])
        chunk = scheduler.plan()
        if leaves_early:
            scheduler.finish(RequestId(1))
            assert scheduler.commit(chunk) == ()
        else:
            scheduler.commit(chunk)
            assert scheduler.append(RequestId(1), 8)
            scheduler.finish(RequestId(1))
        scheduler.check_integrity()
        assert scheduler.snapshot().cache.num_held_blocks == 0
        assert not scheduler.requests


def test_the_state_after_the_last_right_row_becomes_the_request_s():
    """Each row but the last writes a slot; the next step goes on with that of the last right row, without a copy."""
    slots = StateSlots(2, 0, 4)
    scheduler = make_scheduler(states=RequestStates(slots, 8))
    begin(scheduler, 1)
    for said, kept in (([99], 0), ([8, 99], 1), ([8, 9, 99], 2), ([8, 9, 10, 99], None)):
        offer(scheduler, [8, 9, 10])
        chunk = scheduler.plan()
        (segment,) = chunk.segments
        assert [after for after, _ in segment.state.saves] == [1, 2, 3]
        written = [slot for _, slot in segment.state.saves]
        assert len({segment.state.slot, *written}) == 4
        take(scheduler, chunk, said)
        expected = segment.state.slot if kept is None else written[kept]
        following = scheduler.plan()
        assert (following.segments[0].state.slot, following.segments[0].state.load) == (
            expected,
            None,
        )
        take(scheduler, following, [7])


def test_a_draft_is_cut_to_the_states_that_are_left():
    """The most important answer has its slots first; the other's step has as many rows as are left, or one."""
    scheduler = make_scheduler(states=RequestStates(StateSlots(2, 0, 4), 8))
    begin(scheduler, 1, 2)
    offer(scheduler, [8, 9, 10])
    chunk = scheduler.plan()
    assert [segment.num_drafted for segment in chunk.segments] == [3, 1]
    take(scheduler, chunk, [99])
    without = make_scheduler(states=RequestStates(StateSlots(1, 0, 0), 8))
    begin(without, 1)
    offer(without, [8])
    assert without.plan().num_tokens == 1


def test_a_preempted_answer_keeps_its_right_guesses():
    """Its tokens are known, and are computed again as tokens of an answer."""
    scheduler = make_scheduler(blocks=6)
    begin(scheduler, 1, 2)
    offer(scheduler, [8, 9, 10])
    chunk = scheduler.plan()
    assert [segment.num_drafted for segment in chunk.segments] == [3, 3]
    # One that is more important needs nearly all blocks.
    urgent = RequestOptions(priority=-1)
    scheduler.submit(RequestId(3), list(range(18)), max_new_tokens=3, options=urgent)
    assert scheduler.plan() is None
    for request, _ in scheduler.commit(chunk):
        while scheduler.append(request, scheduler.requests[request].known[-1] + 1):
            pass
    assert scheduler.snapshot().total_preemptions >= 1
    for victim in (RequestId(1), RequestId(2)):
        assert scheduler.requests[victim].known[3:] == [7, 8, 9, 10, 11]
    for _ in range(200):
        following = scheduler.plan()
        if following is None:
            break
        for request, _ in scheduler.commit(following):
            entry = scheduler.requests[request]
            if len(entry.known) == entry.max_total_tokens - 1:
                scheduler.finish(request)
            else:
                scheduler.append(request, 5)
        scheduler.check_integrity()
    assert not scheduler.requests

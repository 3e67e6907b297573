"""The scheduler: how chunks are formed, admission and preemption, and prefix sharing."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thermocline.config import SchedulerConfig
from thermocline.errors import BusyError, PromptTooLongError
from thermocline.kv.blocks import BlockAllocator
from thermocline.messages import Pooling, RequestId, RequestOptions, SegmentKind
from thermocline.pipeline.scheduling.scheduler import Scheduler


def make_scheduler(
    *, chunk=4, blocks=16, block_tokens=4, context=32, kinds_differ=True, **settings_
) -> Scheduler:
    """Return a scheduler that starts whatever fits at present, unless `expected_answer_tokens` is given."""
    given_ = {"max_requests": 8, "max_prompt_chunks": 2, "expected_answer_tokens": 0} | settings_
    config = SchedulerConfig(prefill_chunk_tokens=chunk, **given_)
    allocator = BlockAllocator(blocks, block_tokens)
    return Scheduler(config, allocator, context, kinds_differ=kinds_differ)


def submit(scheduler: Scheduler, request: int, length: int, new: int | None = 4, **options) -> int:
    """Submit a prompt that begins like no other one."""
    prompt = [request * 100 + index for index in range(length)]
    return scheduler.submit(
        RequestId(request), prompt, max_new_tokens=new, options=RequestOptions(**options)
    )


def step(scheduler: Scheduler, token: int = 7):
    """Plan a chunk, commit it, and give every request that caught up its next token."""
    chunk = scheduler.plan()
    assert chunk is not None
    for request, _ in scheduler.commit(chunk):
        scheduler.append(request, token)
    scheduler.check_integrity()
    return chunk


def shape(chunk) -> list[tuple[int, int]]:
    """Return each segment's request and length."""
    return [(segment.request, segment.length) for segment in chunk.segments]


def decoding(*requests: int, **options) -> Scheduler:
    """Return a scheduler in which these requests have one token of their answer."""
    scheduler = make_scheduler(**options)
    for request in requests:
        submit(scheduler, request, 3, new=20)
        while not step(scheduler).is_prompt:
            pass
    return scheduler


def preempt(scheduler: Scheduler, block_tokens: int = 4) -> None:
    """Preempt the least important request by an urgent one, which ends after its first chunk."""
    before = scheduler.snapshot()
    free = before.cache.num_free_blocks + before.cache.num_cached_blocks
    # One block more than is free; the last token is room for an answer.
    submit(scheduler, 99, (free + 1) * block_tokens - 1, new=1, priority=-1)
    step(scheduler)
    scheduler.finish(RequestId(99))
    assert scheduler.snapshot().total_preemptions == before.total_preemptions + 1


def test_a_prompt_is_cut_into_chunks():
    """A prompt of 10 in chunks of 4 becomes chunks of 4, 4, 2; only the last one wants logits, of its last row."""
    scheduler = make_scheduler()
    submit(scheduler, 1, 10)
    lengths, rows = [], []
    while not rows or not rows[-1]:
        chunk = scheduler.plan()
        lengths.append(chunk.num_tokens)
        rows.append(chunk.logits_rows.tolist())
        caught_up = scheduler.commit(chunk)
    assert (lengths, rows) == ([4, 4, 2], [[], [], [1]])
    assert caught_up == ((1, 0),)


def test_chunks_of_one_prompt_are_in_flight_together():
    """Up to the limit; their positions and ids rise, and none is scheduled twice."""
    scheduler = make_scheduler(max_prompt_chunks=2)
    submit(scheduler, 1, 20)
    chunks = [scheduler.plan(), scheduler.plan()]
    assert scheduler.plan() is None, "two are in flight"
    assert [chunk.positions.tolist() for chunk in chunks] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert chunks[0].id < chunks[1].id
    scheduler.commit(chunks[0])
    assert scheduler.plan().positions[0] == 8


def test_a_sampled_token_becomes_a_decode_chunk():
    """The token after the prompt goes as a chunk of one, at the next position, in its own slot."""
    scheduler = make_scheduler()
    submit(scheduler, 1, 3)
    step(scheduler, token=99)
    chunk = scheduler.plan()
    assert chunk.token_ids.tolist() == [99]
    assert chunk.positions.tolist() == [3]
    assert chunk.segments[0].kind is SegmentKind.DECODE
    table = chunk.segments[0].block_table
    assert chunk.kv_slots.tolist() == [table[0] * 4 + 3]


def test_all_answers_go_in_one_decode_chunk():
    """One token of each request, a row of logits for each, and only one such chunk in flight."""
    scheduler = decoding(1, 2, 3)
    chunk = scheduler.plan()
    assert shape(chunk) == [(1, 1), (2, 1), (3, 1)]
    assert chunk.logits_rows.tolist() == [0, 1, 2]
    assert scheduler.plan() is None
    assert scheduler.commit(chunk) == ((1, 0), (2, 1), (3, 2))


def test_a_request_that_catches_up_meanwhile_joins_the_next_decode_chunk():
    """Decoding is never split into two smaller batches."""
    scheduler = decoding(1)
    flying = scheduler.plan()
    submit(scheduler, 2, 3)
    step(scheduler)
    assert scheduler.plan() is None
    for request, _ in scheduler.commit(flying):
        scheduler.append(request, 7)
    assert shape(scheduler.plan()) == [(1, 1), (2, 1)]


def test_prompts_and_answers_never_share_a_chunk():
    """They are in flight at the same time. Decode chunks come first."""
    scheduler = decoding(1)
    submit(scheduler, 2, 10)
    decode, prompt = scheduler.plan(), scheduler.plan()
    assert {prompt.is_prompt, decode.is_prompt} == {True, False}
    for request, _ in scheduler.commit(decode):
        scheduler.append(request, 7)
    assert not scheduler.plan().is_prompt, "a prompt chunk is in flight: the answer comes first"
    assert scheduler.plan().is_prompt


def test_with_one_chunk_in_flight_prompts_and_answers_alternate():
    """Decode first would starve prefill where only one chunk may be in flight."""
    scheduler = decoding(1)
    submit(scheduler, 2, 12)
    kinds = [step(scheduler).is_prompt for _ in range(5)]
    assert kinds in ([True, False] * 2 + [True], [False, True] * 2 + [False])


def test_a_chunk_is_filled_up_with_the_next_prompt():
    """What one prompt leaves of the budget goes to the next; rows of logits belong to their own."""
    scheduler = make_scheduler(chunk=8)
    submit(scheduler, 1, 3)
    submit(scheduler, 2, 4)
    submit(scheduler, 3, 9)
    chunk = scheduler.plan()
    assert shape(chunk) == [(1, 3), (2, 4), (3, 1)]
    assert [segment.num_logits for segment in chunk.segments] == [1, 1, 0]
    assert chunk.logits_rows.tolist() == [2, 6]
    assert scheduler.commit(chunk) == ((1, 0), (2, 1))


def test_the_limit_of_prompt_tokens_can_change_between_chunks():
    """The loop sets it before each plan."""
    scheduler = make_scheduler(chunk=8)
    submit(scheduler, 1, 20)
    scheduler.prompt_tokens_limit = 2
    assert scheduler.plan().num_tokens == 2
    scheduler.prompt_tokens_limit = 8
    assert scheduler.plan().num_tokens == 8


def test_requests_take_turns():
    """Two prompts alternate chunk by chunk, so that a short one gets through beside a long one."""
    scheduler = make_scheduler()
    submit(scheduler, 1, 20)
    submit(scheduler, 2, 8)
    assert [step(scheduler).requests[0] for _ in range(4)] == [1, 2, 1, 2]


def test_the_more_important_prompt_comes_first():
    """A lower priority value goes before an earlier arrival, for all of its chunks."""
    scheduler = make_scheduler(prefix_cache=False)
    submit(scheduler, 1, 8, new=0)
    submit(scheduler, 2, 8, new=0, priority=-1)
    first = [scheduler.plan(), scheduler.plan()]
    assert [chunk.requests for chunk in first] == [(2,), (2,)]


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    newcomers=st.lists(st.integers(0, 30), max_size=30),
    chunk=st.integers(1, 8),
)
def test_no_prompt_starves_among_equals(lengths, newcomers, chunk):
    """Between two chunks of one prompt every other one has its turn, however many newcomers arrive."""
    scheduler = make_scheduler(chunk=chunk, blocks=1000, context=40, max_requests=100)
    waits, bounds = {}, {}
    arrivals = iter(newcomers)
    for request, length in enumerate(lengths):
        submit(scheduler, request, length, new=0)
        waits[request], bounds[request] = 0, len(lengths) - 1
    while waits:
        planned = scheduler.plan()
        served = planned.requests[0]
        for request in waits:
            waits[request] += request != served
            assert waits[request] <= bounds[request], "somebody waits longer than a round"
        waits[served], bounds[served] = 0, len(waits) - 1
        for request, _ in scheduler.commit(planned):
            scheduler.finish(request)
            del waits[request]
        if length := next(arrivals, 0):
            request = 1000 + planned.id
            submit(scheduler, request, length, new=0)
            waits[request], bounds[request] = 0, len(waits)


@pytest.mark.parametrize(
    ("length", "shape"),
    [(3, [(2, 3)]), (4, [(2, 4), (1, 4)]), (7, [(2, 7), (1, 1)])],
)
def test_a_newcomer_goes_before_a_long_prompt(length, shape):
    """As soon as the chunk that it found has ended; the long prompt at most doubles the newcomer's chunk."""
    scheduler = make_scheduler(chunk=8, blocks=100, context=80, max_prompt_chunks=1)
    submit(scheduler, 1, 60, new=0)
    first = scheduler.plan()
    submit(scheduler, 2, length, new=0)
    scheduler.commit(first)
    chunk = scheduler.plan()
    assert [(segment.request, segment.length) for segment in chunk.segments] == shape


def test_short_prompts_fill_a_chunk_up():
    """Each that ends in it may: none of them waits for more than is computed together."""
    scheduler = make_scheduler(chunk=16, blocks=100, context=80)
    for request, length in enumerate((3, 60, 5, 4)):
        submit(scheduler, request, length, new=0)
    assert [segment.length for segment in scheduler.plan().segments] == [3, 5, 4]


def test_so_many_tokens_of_a_chunk_need_logits():
    """All of its requests counted; the rest of the chunk is for prompts without them."""
    config = SchedulerConfig(prefill_chunk_tokens=16, max_prompt_chunks=2)
    scheduler = Scheduler(config, BlockAllocator(100, 4), 80, scored_tokens=8)
    for request in range(2):
        submit(scheduler, request, 11, new=0, wants_prompt_logits=True)
    found = []
    while chunk := scheduler.plan():
        found.append([(segment.request, segment.length) for segment in chunk.segments])
        assert len(chunk.logits_rows) <= 8
        for request, _ in scheduler.commit(chunk):
            scheduler.finish(request)
    assert found == [[(0, 8)], [(1, 8)], [(0, 3), (1, 3)]]


def test_blocks_are_taken_as_tokens_are_scheduled():
    """Nothing is reserved for the tokens that an answer may get later."""
    scheduler = make_scheduler(blocks=8, block_tokens=4)
    submit(scheduler, 1, 5, new=None)
    step(scheduler)
    assert scheduler.snapshot().cache.num_held_blocks == 1
    step(scheduler)
    assert scheduler.snapshot().cache.num_held_blocks == 2


def test_a_request_waits_until_its_known_tokens_fit():
    """The second one starts when the first has released its blocks, after its chunk returned."""
    scheduler = make_scheduler(blocks=4, context=16)
    submit(scheduler, 1, 8, new=8)
    submit(scheduler, 2, 8, new=8)
    first = scheduler.plan()
    assert scheduler.snapshot().num_waiting == 1
    second = scheduler.plan()
    assert second.requests == (1,)
    scheduler.finish(RequestId(1))
    assert scheduler.plan() is None, "the blocks of chunks in flight are not free yet"
    scheduler.commit(first)
    scheduler.commit(second)
    assert scheduler.plan().requests == (2,)
    scheduler.check_integrity()


def test_the_latest_request_is_preempted_when_no_block_is_left():
    """It waits again, and later computes everything anew: prompt as prompt, answer as answer."""
    scheduler = make_scheduler(
        blocks=4, block_tokens=2, chunk=8, context=8, prefix_cache=False, max_prompt_chunks=1
    )
    submit(scheduler, 1, 1, new=7)
    submit(scheduler, 2, 1, new=7)
    seen = []
    while scheduler.snapshot().total_preemptions == 0:
        seen.append(shape(step(scheduler)))
    assert seen[-2:] == [[(1, 1), (2, 1)], [(1, 1)]]
    assert scheduler.snapshot().num_waiting == 1
    num_known = len(scheduler.requests[RequestId(2)].known)
    scheduler.finish(RequestId(1))
    prompt = scheduler.plan()
    assert (shape(prompt), prompt.is_prompt) == ([(2, 1)], True)
    assert scheduler.plan() is None, "the answer comes when the prompt is computed"
    assert scheduler.commit(prompt) == ()
    again = scheduler.plan()
    assert shape(again) == [(2, num_known - 1)], "the answer, in one chunk"
    assert not again.is_prompt
    assert again.logits_rows.tolist() == [num_known - 2]


def test_recomputed_answers_leave_room_for_the_others():
    """A decode step has one token of each request, and of recomputed tokens no more than a prefill chunk."""
    scheduler = decoding(1, 2, chunk=8, context=64)
    for _ in range(10):
        step(scheduler)
    preempt(scheduler)
    scheduler.prompt_tokens_limit = 4
    while len(shape(chunk := step(scheduler))) < 2:
        pass
    assert shape(chunk)[0] == (1, 1)
    assert shape(chunk)[1][1] <= 5


def test_a_resumed_request_finds_its_own_blocks():
    """What was computed before a preemption and not evicted since is not computed again."""
    scheduler = decoding(1, block_tokens=2)
    for _ in range(6):
        step(scheduler)
    preempt(scheduler, block_tokens=2)
    chunk = scheduler.plan()
    assert chunk.positions[0] == 8
    assert scheduler.snapshot().cache.total_hit_tokens == 8


def test_nobody_more_important_is_preempted():
    """A newcomer waits; one with a lower priority value preempts the least important request."""
    scheduler = make_scheduler(blocks=4, chunk=16, context=16)
    submit(scheduler, 1, 12)
    step(scheduler)
    submit(scheduler, 2, 12)
    step(scheduler)
    assert scheduler.snapshot().num_waiting == 1
    submit(scheduler, 3, 12, priority=-1)
    assert scheduler.plan().requests == (3,)
    snapshot = scheduler.snapshot()
    assert (snapshot.num_waiting, snapshot.total_preemptions) == (2, 1)


def test_a_later_request_without_blocks_never_preempts_an_earlier_one():
    """It was admitted while there was room, and has to wait now that the earlier one has grown."""
    scheduler = make_scheduler(blocks=4, block_tokens=2, context=8, chunk=1)
    submit(scheduler, 1, 1, new=7)
    submit(scheduler, 2, 1, new=7)
    step(scheduler)
    scheduler.hold(RequestId(2))
    for _ in range(6):
        step(scheduler)
    scheduler.resume(RequestId(2))
    assert scheduler.snapshot().cache.num_held_blocks == 4
    assert scheduler.plan().requests == (1,)
    snapshot = scheduler.snapshot()
    assert (snapshot.num_running, snapshot.total_preemptions) == (2, 0)


def longest_silence(scheduler: Scheduler, num_streams: int, num_new: int) -> int:
    """Run so many streams to their ends; return the most chunks between two tokens of an answer."""
    for request in range(num_streams):
        submit(scheduler, request, 50, new=num_new)
    last: dict[int, int] = {}
    silence = num_chunks = 0
    while scheduler.requests:
        chunk = scheduler.plan()
        num_chunks += 1
        for request, _ in scheduler.commit(chunk):
            silence = max(silence, num_chunks - last.get(request, num_chunks))
            last[request] = num_chunks
            scheduler.append(request, 7)
            entry = scheduler.requests[request]
            if len(entry.known) == entry.max_total_tokens:
                scheduler.finish(request)
    return silence


def test_no_stream_falls_silent_among_48_in_a_cache_for_20():
    """They wait at their start. Preempted within their answers, as without expectations, they wait for 400 steps."""
    cache = {"chunk": 512, "blocks": 512, "block_tokens": 16, "context": 4096}
    limits = {"max_requests": 48, "max_queue": 48}
    scheduler = make_scheduler(**cache, **limits, expected_answer_tokens=512)
    assert longest_silence(scheduler, 48, 400) <= 2
    assert scheduler.snapshot().total_preemptions == 0
    careless = make_scheduler(**cache, **limits)
    assert longest_silence(careless, 48, 400) > 100


def test_what_is_expected_follows_the_answers_that_ended():
    """After long answers, fewer run together: the later ones are not preempted although the first ones were."""
    scheduler = make_scheduler(
        chunk=64, blocks=64, block_tokens=16, context=400, max_requests=64, expected_answer_tokens=1
    )
    preempted = []
    for _ in range(4):
        before = scheduler.snapshot().total_preemptions
        longest_silence(scheduler, 8, 200)
        preempted.append(scheduler.snapshot().total_preemptions - before)
    assert preempted[0] > 0
    assert preempted[-1] == 0


def test_a_chunk_keeps_its_block_table_when_its_request_gets_other_blocks():
    """A message stays as it was sent, whatever blocks the request gets after a preemption."""
    scheduler = make_scheduler(chunk=16, context=64, prefix_cache=False)
    submit(scheduler, 1, 8)
    sent = step(scheduler)
    table = sent.segments[0].block_table.tolist()
    submit(scheduler, 2, 3, new=1, priority=-2)  # takes a block that the first one had
    preempt(scheduler)
    decode, again = scheduler.plan(), scheduler.plan()
    assert (decode.requests, again.requests) == ((2,), (1,))
    assert again.segments[0].block_table.tolist() != table
    assert sent.segments[0].block_table.tolist() == table


def test_a_preempted_request_with_a_chunk_in_flight_releases_its_blocks_at_commit():
    """A chunk in flight writes into blocks, so no other request may have them yet."""
    scheduler = make_scheduler(blocks=4, chunk=16, context=16)
    submit(scheduler, 1, 12)
    flying = scheduler.plan()
    submit(scheduler, 2, 12, priority=-1)
    assert scheduler.plan() is None
    scheduler.check_integrity()
    (caught_up,) = scheduler.commit(flying)
    scheduler.append(caught_up.request, 5)  # the chunk was not in vain
    assert scheduler.plan().requests == (2,)
    assert scheduler.requests[RequestId(1)].known[12:] == [5]


def test_a_second_request_shares_the_full_blocks_of_a_prefix():
    """All but the last token, in whole blocks; the counters say so."""
    scheduler = make_scheduler(chunk=16)
    prompt = list(range(12))
    scheduler.submit(RequestId(1), prompt, max_new_tokens=4)
    first = step(scheduler)
    scheduler.submit(RequestId(2), prompt, max_new_tokens=4)
    scheduler.submit(RequestId(3), [*prompt[:6], 99, 99, 99], max_new_tokens=4)
    chunk = scheduler.plan()
    if not chunk.is_prompt:
        chunk = scheduler.plan()
    assert shape(chunk) == [(2, 4), (3, 5)]
    assert chunk.segments[0].block_table[:2].tolist() == first.segments[0].block_table[:2].tolist()
    assert chunk.segments[1].block_table[0] == first.segments[0].block_table[0]
    cache = scheduler.snapshot().cache
    assert (cache.total_queried_tokens, cache.total_hit_tokens) == (12 + 12 + 9, 8 + 4)
    scheduler.check_integrity()


@pytest.mark.parametrize(
    ("settings_", "options"),
    [
        ({"prefix_cache": False}, {}),
        ({}, {"cache_salt": "other"}),
        ({}, {"wants_prompt_logits": True}),
    ],
)
def test_nothing_is_shared_where_it_must_not_be(settings_, options):
    """The cache is off, the salt is another, or every token's logits are wanted."""
    scheduler = make_scheduler(chunk=16, **settings_)
    scheduler.submit(RequestId(1), list(range(12)), max_new_tokens=0)
    scheduler.commit(scheduler.plan())
    scheduler.finish(RequestId(1))
    scheduler.submit(
        RequestId(2), list(range(12)), max_new_tokens=0, options=RequestOptions(**options)
    )
    assert scheduler.plan().num_tokens == 12


@pytest.mark.parametrize(("kinds_differ", "num_shared"), [(True, 4), (False, 8)])
def test_an_answer_is_shared_as_a_prompt_only_where_the_arithmetic_is_one(kinds_differ, num_shared):
    """A second turn begins with the first one's answer, whose tokens were decoded."""
    scheduler = make_scheduler(chunk=16, kinds_differ=kinds_differ)
    scheduler.submit(RequestId(1), [1, 2, 3, 4], max_new_tokens=20)
    for _ in range(6):
        step(scheduler, token=7)
    scheduler.finish(RequestId(1))
    scheduler.submit(RequestId(2), [1, 2, 3, 4, 7, 7, 7, 7, 7, 9], max_new_tokens=4)
    assert scheduler.plan().positions[0] == num_shared


def test_a_failed_chunk_is_never_shared():
    """Its requests end, and another request with the same prefix computes it again."""
    scheduler = make_scheduler(chunk=8)
    scheduler.submit(RequestId(1), list(range(20)), max_new_tokens=0)
    failed, later = scheduler.plan(), scheduler.plan()
    scheduler.fail(failed)
    scheduler.check_integrity()
    assert scheduler.commit(later) == ()
    assert not scheduler.finish(RequestId(1))
    scheduler.submit(RequestId(2), list(range(20)), max_new_tokens=0)
    assert scheduler.plan().positions[0] == 0
    assert scheduler.snapshot().cache.num_cached_blocks == 0


def test_the_answer_is_limited_by_the_context():
    """max_new_tokens is cut to the room that is left; None takes all of it."""
    scheduler = make_scheduler(context=16, blocks=64)
    assert submit(scheduler, 1, 10, new=100) == 6
    assert submit(scheduler, 2, 10, new=None) == 6
    assert submit(scheduler, 3, 16, new=0) == 0


@pytest.mark.parametrize("blocks", [64, 4])
def test_a_prompt_without_room_for_an_answer_is_refused(blocks):
    """By the context or by the whole cache: the error says both numbers, and nothing was taken."""
    scheduler = make_scheduler(context=16 if blocks == 64 else 100, blocks=blocks)
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


def test_a_full_queue_is_busy():
    """Waiting requests have a limit of their own, and an admitted one makes room in the queue."""
    scheduler = make_scheduler(max_queue=2)
    submit(scheduler, 1, 4)
    submit(scheduler, 2, 4)
    with pytest.raises(BusyError, match="--max-queue"):
        submit(scheduler, 3, 4)
    scheduler.plan()
    submit(scheduler, 3, 4)
    scheduler.check_integrity()


def test_a_scoring_request_wants_every_row():
    """All rows of every chunk give logits, one chunk is in flight, and a held request starts nothing."""
    scheduler = make_scheduler()
    submit(scheduler, 1, 6, new=0, wants_prompt_logits=True)
    chunk = scheduler.plan()
    assert chunk.logits_rows.tolist() == [0, 1, 2, 3]
    assert scheduler.plan() is None, "logits are large: one chunk's at a time"
    scheduler.commit(chunk)
    scheduler.hold(RequestId(1))
    assert scheduler.plan() is None
    scheduler.resume(RequestId(1))
    assert scheduler.plan().logits_rows.tolist() == [0, 1]


def test_a_preempted_scoring_request_gets_no_row_twice():
    """It computes the same tokens again, and wants the logits of the new ones alone."""
    scheduler = make_scheduler(chunk=4, context=64)
    submit(scheduler, 1, 10, new=0, wants_prompt_logits=True)
    step(scheduler)
    preempt(scheduler)
    scheduler.prompt_tokens_limit = 6
    chunk = scheduler.plan()
    assert chunk.positions.tolist() == [0, 1, 2, 3, 4, 5]
    assert chunk.logits_rows.tolist() == [4, 5]


def test_finishing_twice_is_harmless():
    """The second end of a request is False and changes nothing."""
    scheduler = make_scheduler()
    submit(scheduler, 1, 4)
    assert scheduler.finish(RequestId(1))
    assert not scheduler.finish(RequestId(1))
    scheduler.check_integrity()


def test_a_snapshot_says_what_is_going_on():
    """Everything that reports and tests want, in one frozen record."""
    scheduler = decoding(1)
    submit(scheduler, 2, 10)
    scheduler.plan(), scheduler.plan()
    snapshot = scheduler.snapshot()
    assert (snapshot.num_waiting, snapshot.num_running, snapshot.num_decoding) == (0, 2, 1)
    assert (snapshot.num_prompt_chunks, snapshot.num_decode_chunks) == (1, 1)
    cache = snapshot.cache
    parts = cache.num_free_blocks + cache.num_cached_blocks + cache.num_held_blocks
    assert parts == cache.num_blocks == 16
    assert repr(scheduler) == "Scheduler(Admission(2 running, 0 waiting))"


@pytest.mark.slow
def test_a_step_of_64_answers_is_planned_in_well_under_a_millisecond():
    """The event loop does this for every token. Thread time, and the best of many: hosts are noisy."""
    scheduler = make_scheduler(
        chunk=512, blocks=4096, block_tokens=16, context=1024, max_requests=64
    )
    for request in range(64):
        submit(scheduler, request, 200, new=None)
    took = []
    for _ in range(200):
        start = time.thread_time()
        chunk = scheduler.plan()
        caught_up = scheduler.commit(chunk)
        if len(chunk.segments) == 64 and not chunk.is_prompt:
            took.append(time.thread_time() - start)
        for request, _ in caught_up:
            scheduler.append(request, 7)
    assert len(took) > 50
    assert min(took) < 1e-3


def test_a_snapshot_tells_how_far_each_request_is():
    """Running requests have computed tokens; the one that waits has none."""
    scheduler = make_scheduler(blocks=3)
    submit(scheduler, 1, 6)
    submit(scheduler, 2, 8)
    step(scheduler)
    one, two = scheduler.snapshot().requests
    assert (one.id, one.is_running, one.num_computed_tokens) == (1, True, 4)
    assert (one.num_prompt_tokens, one.num_known_tokens) == (6, 6)
    assert (two.id, two.is_running, two.num_computed_tokens) == (2, False, 0)
    scheduler.finish(RequestId(2))
    assert [each.id for each in scheduler.snapshot().requests] == [1]


def test_tokens_are_counted_by_kind():
    """Prompt tokens count when computed, answer tokens when sampled; scoring has no answer tokens."""
    scheduler = make_scheduler()
    submit(scheduler, 1, 6, new=3)
    for prompt_tokens, output_tokens in ((4, 0), (6, 1), (6, 2), (6, 3)):
        step(scheduler)
        snapshot = scheduler.snapshot()
        counted = (snapshot.total_prompt_tokens, snapshot.total_output_tokens)
        assert counted == (prompt_tokens, output_tokens)
    scheduler.finish(RequestId(1))
    submit(scheduler, 2, 3, new=0)
    scheduler.commit(scheduler.plan())
    assert scheduler.snapshot().total_output_tokens == 3


@pytest.mark.parametrize("pooling", [Pooling.MEAN, Pooling.LAST], ids=str)
def test_an_embedding_wants_states_and_no_logits(pooling):
    """Of every token for a mean, several chunks in flight; of the last one alone where only that counts."""
    scheduler = make_scheduler(chunk=4)
    submit(scheduler, 1, 10, new=0, pooling=pooling)
    chunks = []
    while (chunk := scheduler.plan()) is not None:
        chunks.append(chunk)
        if len(chunks) == 2:
            break
    caught_up = [scheduler.commit(chunk) for chunk in chunks]
    assert caught_up == [(), ()]
    chunks.append(scheduler.plan())
    assert [request for request, _ in scheduler.commit(chunks[-1])] == [1]
    scheduler.finish(RequestId(1))
    assert not any(len(chunk.logits_rows) for chunk in chunks)
    wanted = [() if chunk.states_rows is None else chunk.states_rows.tolist() for chunk in chunks]
    whole = [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1]]
    assert wanted == (whole if pooling is Pooling.MEAN else [(), (), [1]])
    ((_, logits, states),) = chunks[-1].results_by_segment()
    assert (logits, states.stop) == (slice(0, 0), len(wanted[-1]))
    scheduler.check_integrity()

"""Blocks of layers with a sliding window: how many a request holds, who waits for them, and what stays findable."""

from __future__ import annotations

import pytest

from tests.support.cache_model import CacheModel, ModelRequest
from thermocline.config import SchedulerConfig
from thermocline.kv.blocks import BlockAllocator, window_blocks
from thermocline.messages import RequestId
from thermocline.pipeline.scheduling.request_windows import RequestWindows
from thermocline.pipeline.scheduling.scheduler import Scheduler

WINDOW, BLOCK = 8, 4
NEEDED = window_blocks(WINDOW, BLOCK)


def window_allocator(max_windows: int = 2, spare: int = 4) -> BlockAllocator:
    return BlockAllocator(max_windows * NEEDED + spare, BLOCK)


def make_model(
    *, max_windows: int = 2, allocator: BlockAllocator | None = None, blocks: int = 200, **settings_
):
    """Return a scheduler over a cache that checks what is read, with chunks of 8 tokens."""
    config = SchedulerConfig(**{"prefill_chunk_tokens": 8, "max_prompt_chunks": 2} | settings_)
    allocator = allocator or window_allocator(max_windows)
    windows = RequestWindows(allocator, WINDOW, max_windows)
    scheduler = Scheduler(
        config, BlockAllocator(blocks, BLOCK), 400, kinds_differ=False, windows=windows
    )
    return CacheModel(scheduler, BLOCK, kinds_differ=False, window=WINDOW, windows=windows)


def submit(model: CacheModel, number: int, prompt: list[int], new: int = 4, **options) -> None:
    entry = ModelRequest([*prompt], len(prompt), new, None, wants_all_logits=False)
    model.submit(number, entry, **options)


def run(model: CacheModel) -> list[tuple[int, int]]:
    """Run to the end with as many chunks in flight as may be; return (window, other) blocks held on the way."""
    held = []
    while True:
        while model.plan() is not None:
            pass
        if not model.flying:
            return held
        cache = model.scheduler.snapshot().cache
        held.append((cache.num_held_window_blocks, cache.num_held_blocks))
        model.compute(model.next_to_compute()[0])
        model.commit(model.next_to_commit()[0])
        model.scheduler.check_integrity()


def test_a_long_request_holds_its_window_and_what_is_in_flight():
    """Of 80 blocks of tokens, layers with a window hold the two that are seen and the four of two chunks."""
    model = make_model(max_prompt_chunks=2)
    submit(model, 1, list(range(300)), new=20)
    held = run(model)
    assert max(window for window, _ in held) == NEEDED - 1 + 2 * 8 // BLOCK
    assert max(other for _, other in held) == 80
    assert {window for window, other in held if other > 76} == {NEEDED}


def test_a_chunk_in_flight_keeps_what_it_reads():
    """Until the first chunk is computed, the others take new blocks, and none is dropped."""
    model = make_model(max_prompt_chunks=3)
    submit(model, 1, list(range(100)))
    chunks = [model.plan() for _ in range(3)]
    tables = [
        chunk.places(window=True).segments[0].block_table.tolist() for chunk in chunks if chunk
    ]
    assert [len(set(table)) for table in tables] == [2, 4, 6]
    assert tables[2][:4] == tables[1]


def test_requests_wait_for_windows_as_for_other_blocks():
    """Four long requests where two have room: two run at a time, whatever else is free."""
    model = make_model(max_windows=2)
    for number in range(4):
        submit(model, number, [number] * 50)
    most = 0
    while model.plan() is not None or model.flying:
        most = max(most, model.scheduler.snapshot().num_running)
        for chunk in model.next_to_compute()[:1]:
            model.compute(chunk)
        for chunk in model.next_to_commit()[:1]:
            model.commit(chunk)
    assert (most, model.num_finished) == (2, 4)
    assert model.scheduler.snapshot().total_preemptions == 0


def test_a_more_important_request_gets_a_window():
    """The least important one is preempted, and is computed again when there is room."""
    model = make_model(max_windows=2)
    for number in range(2):
        submit(model, number, [number] * 50, priority=1)
    for _ in range(2):
        model.plan()
    submit(model, 2, [2] * 50)
    run(model)
    assert model.scheduler.snapshot().total_preemptions == 1
    assert model.num_finished == 3


def hits(model: CacheModel, number: int, prompt: list[int], new: int = 4) -> int:
    """Return how many tokens of a prompt are found computed."""
    before = model.scheduler.cache.total_hit_tokens
    submit(model, number, prompt, new)
    run(model)
    return model.scheduler.cache.total_hit_tokens - before


def test_a_prompt_and_its_answer_can_be_continued():
    """Prefixes that end with the prompt or the answer are found; one that ends between them only as far as the prompt."""
    model = make_model(max_windows=8)
    prompt = list(range(201))
    assert hits(model, 1, prompt, 60) == 0
    answer = model.requests[1].known
    assert hits(model, 2, prompt, 1) == 200
    assert hits(model, 3, [*answer, 1]) == 260
    assert hits(model, 4, [*answer[:240], 1]) == 200


def test_the_end_of_a_common_prefix_is_kept_once_it_was_matched():
    """The second prompt starts at the last regular distance, the third where the second one diverged from the first."""
    model = make_model(max_windows=8)
    prompt = list(range(200))
    distance = 4 * NEEDED * BLOCK
    assert hits(model, 1, prompt) == 0
    assert hits(model, 2, [*prompt[:140], 7]) == 140 // distance * distance
    assert hits(model, 3, [*prompt[:140], 8]) == 140
    assert hits(model, 4, prompt) == 196


def test_a_shared_window_can_be_shared_again():
    """The window that a request started with stays findable after the request has passed it."""
    model = make_model(max_windows=8)
    start = [5] * 41
    hits(model, 1, start)
    for number in range(2, 5):
        assert hits(model, number, [*start, number, *range(60)]) == 40


def test_a_long_prompt_does_not_evict_the_windows_of_others():
    """Most of its passed blocks are freed at once, so the windows of other prompts are still there."""
    allocator = window_allocator(8, spare=10)
    model = make_model(max_windows=8, allocator=allocator)
    hits(model, 1, [6] * 41)
    hits(model, 2, list(range(390)))
    assert hits(model, 3, [*[6] * 41, 1]) == 40
    assert allocator.num_free >= 8 * NEEDED + 10 - 98 // 4 - 5 * NEEDED


def test_without_prefixes_blocks_are_free_at_once():
    """The next chunk uses the blocks that the window has passed."""
    model = make_model(prefix_cache=False, max_windows=20)
    submit(model, 1, list(range(300)))
    run(model)
    assert len({slot // BLOCK for slot in model.window_slots}) == NEEDED - 1 + 2 * 8 // BLOCK


@pytest.mark.parametrize("window", [1, 2, 5, 8, 9, 30])
@pytest.mark.parametrize("block_tokens", [1, 4, 7])
def test_as_many_blocks_as_any_position_needs(window, block_tokens):
    """A window that ends at the last position of a block, or at its first, lies in that many at most."""
    spans = [
        position // block_tokens - max(0, position - window + 1) // block_tokens + 1
        for position in range(200)
    ]
    assert window_blocks(window, block_tokens) == max(spans)


def test_a_report_of_a_failure_shows_the_windows():
    """The scheduler's parts say how many blocks are free."""
    windows = RequestWindows(BlockAllocator(9, BLOCK), WINDOW, 2)
    assert repr(windows) == (
        "RequestWindows(BlockAllocator(9 of 9 blocks free), "
        "PrefixCache(0 findable blocks, 0 of them idle))"
    )
    assert windows.fits([100, 2, 1])
    assert not windows.fits([100, 2, 2])


def test_room_for_no_window_is_our_bug():
    """One request must always fit."""
    with pytest.raises(AssertionError, match="not even one"):
        RequestWindows(BlockAllocator(9, BLOCK), WINDOW, 0)


def test_a_finished_request_releases_its_window():
    """If a chunk is in flight, its blocks are free when the chunk returns."""
    model = make_model()
    submit(model, 1, list(range(60)))
    chunk = model.plan()
    assert chunk is not None
    model.scheduler.finish(RequestId(1))
    assert model.scheduler.cache.num_held_window_blocks == 2
    model.compute(chunk)
    model.scheduler.commit(chunk)
    assert model.scheduler.cache.num_held_window_blocks == 0
    model.scheduler.check_integrity()

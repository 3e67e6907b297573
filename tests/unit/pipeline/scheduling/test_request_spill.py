"""What is copied to the second tier, and when; and what comes back for a request."""

from __future__ import annotations

import pytest

from tests.support.cache_model import CacheModel, ModelRequest
from tests.support.spill_model import SpillModel
from thermocline.config import SchedulerConfig
from thermocline.kv.blocks import BlockAllocator
from thermocline.kv.spill_index import CHECKSUM_BYTES, PartKind, SpillIndex
from thermocline.kv.state_slots import StateSlots
from thermocline.messages import RequestId
from thermocline.pipeline.scheduling.request_spill import RequestSpill
from thermocline.pipeline.scheduling.request_states import RequestStates
from thermocline.pipeline.scheduling.request_windows import RequestWindows
from thermocline.pipeline.scheduling.scheduler import Scheduler
from thermocline.pipeline.scheduling.spill_costs import SpillCosts

PART = 8 + CHECKSUM_BYTES


class Run:
    """A scheduler over 8 blocks of 2 tokens, whose requests run to their end one by one."""

    def __init__(
        self, capacities=(100 * PART,), *, ahead=4, states=None, windows=None, window=None
    ):
        sizes = dict.fromkeys(PartKind, 8)
        self.spill = RequestSpill(
            SpillIndex(capacities), SpillCosts(len(capacities)), sizes, dict.fromkeys(sizes, ahead)
        )
        config = SchedulerConfig(
            prefill_chunk_tokens=4, max_prompt_chunks=2, expected_answer_tokens=0
        )
        self.scheduler = Scheduler(
            config, BlockAllocator(8, 2), 16, states=states, windows=windows, spill=self.spill
        )
        self.model = CacheModel(self.scheduler, 2, window=window, windows=windows)
        self.tier = SpillModel(self.spill, self.model)
        self.count = 0

    def submit(self, first: int, length: int = 11) -> int:
        known = [first, *range(length - 1)]
        self.count += 1
        self.model.submit(self.count, ModelRequest(known, length, 1, None, wants_all_logits=False))
        return self.count

    def begin_return(self) -> None:
        """Plan until a request's parts are to be read: what they evict is copied first."""
        for _ in range(4):
            assert self.model.plan() is None
            if self.spill.reading:
                return
            self.tier.finish()
        raise AssertionError("nothing comes back")

    def ask(self, first: int, length: int = 11) -> int:
        """Run a prompt of a request to its end; return how many of its tokens were found."""
        before = self.scheduler.cache.total_hit_tokens
        self.submit(first, length)
        self.model.between = self.tier.finish
        self.model.drain()
        return self.scheduler.cache.total_hit_tokens - before


def test_nothing_is_copied_while_there_is_room():
    """Copies begin when the next blocks to be evicted are among those that are used."""
    run = Run(ahead=3)
    run.ask(100, 5)
    assert run.tier.spill.take_write() is None
    run.ask(
        200, 9
    )  # 2 and 4 blocks stay, so 2 are free: the third allocation from now on evicts one
    assert run.spill.statistics(("memory",)).used_bytes == (PART,)


def test_an_evicted_prompt_comes_back():
    """And is computed no more than if it had never been evicted."""
    run = Run()
    assert run.ask(100) == 0
    assert run.ask(200) == 0
    assert run.scheduler.cache.total_evicted_blocks > 0
    assert run.ask(100) == 10
    statistics = run.spill.statistics(("memory",))
    assert (statistics.total_returns, statistics.total_lost) == (1, 0)


def test_without_a_tier_it_would_not():
    """The same requests, with a tier that has no room for a part."""
    run = Run((PART - 1,))
    run.ask(100)
    run.ask(200)
    assert run.ask(100) < 10
    assert run.spill.statistics(("memory",)).total_lost > 0


def test_a_request_waits_for_its_prefix_and_others_do_not():
    """While parts are read, one behind it that fits starts; it keeps its place in the cache."""
    run = Run()
    run.ask(100)
    run.ask(200)
    first = run.submit(100)
    run.begin_return()
    assert run.scheduler.snapshot().num_waiting == 1
    second = run.submit(300, 3)
    chunk = run.model.plan()
    assert chunk.requests == (RequestId(second),)
    run.tier.finish()
    assert RequestId(first) in run.model.plan().requests
    run.model.drain()


def test_one_that_leaves_while_its_prefix_is_read_leaves_it_to_others():
    """Its parts are there for the next one."""
    run = Run()
    run.ask(100)
    run.ask(200)
    number = run.submit(100)
    run.begin_return()
    assert run.scheduler.finish(RequestId(number))
    del run.model.requests[number]
    run.tier.finish()
    run.scheduler.check_integrity()
    assert run.spill.statistics(("memory",)).total_returns == 1
    assert run.ask(100) == 10
    assert run.spill.statistics(("memory",)).total_returns == 1


def test_a_damaged_part_is_computed_again():
    """The request goes on with what is whole, and the damaged part is forgotten."""
    run = Run()
    run.ask(100)
    run.ask(200)
    run.submit(100)
    run.begin_return()
    run.tier.take()
    run.tier.run(fails=True)
    run.tier.end()
    assert run.spill.statistics(("memory",)).total_damaged > 0
    run.model.between = run.tier.finish
    run.model.drain()
    run.scheduler.check_integrity()


def test_a_block_that_is_evicted_while_it_is_copied_is_not_kept():
    """What the copy has is another request's."""
    run = Run(ahead=4)
    run.submit(100)
    run.model.drain()
    run.tier.take()  # the last of its five blocks, before the three free ones are used up
    run.submit(200, 7)
    run.model.drain()
    assert run.scheduler.cache.total_evicted_blocks == 1
    run.tier.run()
    run.tier.end()
    assert run.spill.statistics(("memory",)).total_lost == 1
    assert run.ask(100) == 8  # and the cache model compares every slot that is read


def test_a_large_prefix_waits_until_what_it_evicts_is_copied():
    """Two conversations that each fill the cache come back in turn, though little is copied ahead."""
    run = Run(ahead=2)
    for first, found in ((100, 0), (200, 0), (100, 12), (200, 12), (100, 12)):
        assert run.ask(first, 14) == found
    statistics = run.spill.statistics(("memory",))
    assert (statistics.total_returns, statistics.total_lost) == (3, 0)


def test_a_tier_with_room_for_one_prefix_never_gives_up_the_one_that_is_wanted():
    """What is evicted for it is lost then, and nothing is stuck."""
    run = Run((6 * PART,), ahead=1)
    for first in (100, 200, 100, 200, 100):
        run.ask(first, 14)
    run.scheduler.check_integrity()


def test_computing_where_reading_was_slower():
    """The measured costs decide; the refusal is counted."""
    run = Run()
    run.ask(100)
    run.ask(200)
    run.spill.costs.observe_prompt(1000, 1e-6)
    run.spill.costs.observe_read([1], 10.0)
    assert run.ask(100) < 10
    assert run.spill.statistics(("memory",)).total_refused == 1


def test_what_a_slot_erases_does_not_come_back():
    """Nor what is being copied at that time."""
    run = Run(ahead=8)
    run.submit(100)
    run.model.drain()
    write = run.spill.take_write()
    assert write is not None
    run.spill.drop([copy.key.tokens for copy in write.copies])
    run.spill.write_ended([])
    assert run.spill.statistics(("memory",)).used_bytes == (0,)
    run.spill.check_integrity()


@pytest.mark.parametrize("kind", ["state", "window"])
def test_snapshots_and_windows_come_back_too(kind):
    """Without them the blocks of other layers are of no use."""
    states = RequestStates(StateSlots(2, 1), 100) if kind == "state" else None
    windows = RequestWindows(BlockAllocator(6, 2), 3, 1) if kind == "window" else None
    run = Run(states=states, windows=windows, window=None if windows is None else 3)
    assert run.ask(100) == 0
    assert run.ask(200) == 0
    assert run.ask(300) == 0
    assert run.ask(100) == 10
    assert run.spill.statistics(("memory",)).total_returns == 1

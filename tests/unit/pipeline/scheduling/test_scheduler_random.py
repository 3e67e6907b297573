"""Any schedule: random submits, commits, failures, aborts and holds over tiny caches keep every promise."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.cache_model import CacheModel, ModelRequest
from tests.support.spill_model import SpillModel
from thermocline.config import SchedulerConfig
from thermocline.kv.blocks import BlockAllocator, window_blocks
from thermocline.kv.spill_index import PartKind, SpillIndex
from thermocline.kv.state_slots import StateSlots
from thermocline.messages import RequestId
from thermocline.pipeline.scheduling.request_spill import RequestSpill
from thermocline.pipeline.scheduling.request_states import RequestStates
from thermocline.pipeline.scheduling.request_windows import RequestWindows
from thermocline.pipeline.scheduling.scheduler import Scheduler
from thermocline.pipeline.scheduling.spill_costs import SpillCosts

# The longer target sets more.
TIMES = int(os.environ.get("THERMOCLINE_SCHEDULES", "1"))


class AnySchedule(RuleBasedStateMachine):
    """Acts on a scheduler as a pipeline, a step loop and clients would."""

    @initialize(
        block_tokens=st.integers(1, 4),
        num_blocks=st.integers(3, 12),
        max_prompt_chunks=st.integers(1, 3),
        prefix_cache=st.sampled_from([True, True, True, False]),
        credits_=st.integers(1, 4),
        kinds_differ=st.booleans(),
        num_live=st.integers(1, 8),
        num_snapshots=st.sampled_from([None, None, 0, 1, 4]),
        distance=st.integers(1, 8),
        window=st.sampled_from([None, 1, 2, 3, 5, 8, 30]),
        max_windows=st.integers(1, 4),
        spare_blocks=st.integers(0, 3),
        expected=st.sampled_from([0, 0, 1, 4, 512]),
        num_drafts=st.integers(0, 6),
        tier=st.sampled_from([None, None, (14,), (40,), (400,), (30, 60), (0, 200), (200, 400)]),
        ahead=st.integers(1, 12),
    )
    def start(
        self,
        block_tokens,
        num_blocks,
        max_prompt_chunks,
        prefix_cache,
        credits_,
        kinds_differ,
        num_live,
        num_snapshots,
        distance,
        window,
        max_windows,
        spare_blocks,
        expected,
        num_drafts,
        tier,
        ahead,
    ):
        """A cache of few blocks, with or without recurrent states, windows and a second tier, and some chunks in flight."""
        config = SchedulerConfig(
            prefill_chunk_tokens=8,
            max_prompt_chunks=max_prompt_chunks,
            prefix_cache=prefix_cache,
            expected_answer_tokens=expected,
        )
        allocator = BlockAllocator(num_blocks, block_tokens)
        states = None
        if num_snapshots is not None:
            states = RequestStates(StateSlots(num_live, num_snapshots, num_drafts), distance)
        windows = None
        if window is not None:
            most = max_windows * window_blocks(window, block_tokens) + spare_blocks
            allocated = BlockAllocator(min(num_blocks, most), block_tokens)
            windows = RequestWindows(allocated, window, max_windows)
        spill = None
        if tier is not None:
            sizes = {PartKind.BLOCK: 6, PartKind.WINDOW: 4, PartKind.STATE: 10}
            spill = RequestSpill(
                SpillIndex(tier), SpillCosts(len(tier)), sizes, dict.fromkeys(sizes, ahead)
            )
        scheduler = Scheduler(
            config,
            allocator,
            24,
            kinds_differ=kinds_differ,
            states=states,
            windows=windows,
            spill=spill,
        )
        self.max_tokens = min(24, num_blocks * block_tokens)
        self.max_prompt_chunks = max_prompt_chunks
        self.credits = credits_
        self.model = CacheModel(
            scheduler, block_tokens, kinds_differ=kinds_differ, window=window, windows=windows
        )
        self.spill = None if spill is None else SpillModel(spill, self.model)
        if self.spill is not None:
            self.model.between = self.spill.finish

    @precondition(lambda self: len(self.model.scheduler.requests) < 8)
    @rule(
        shared=st.integers(0, 24),
        own=st.lists(st.integers(0, 1), max_size=6),
        num_new=st.integers(0, 10),
        salt=st.sampled_from([None, None, None, "a"]),
        priority=st.integers(0, 1),
        scores=st.sampled_from([False, False, False, True]),
    )
    def submit(self, shared, own, num_new, salt, priority, scores):
        """A request whose prompt begins as others do, or as another one's answer goes on."""
        known = ([0, 0, 1, 0, 1, 1] * 4)[:shared] + own
        known = known[: self.max_tokens - bool(num_new)] or [0]
        if len(known) + bool(num_new) <= self.max_tokens:
            entry = ModelRequest(known, len(known), num_new, salt, wants_all_logits=scores)
            self.model.submit(len(self.model.requests), entry, priority=priority)

    @rule(
        request=st.integers(0, 30),
        extra=st.lists(st.integers(0, 1), max_size=3),
        new=st.integers(1, 6),
    )
    def follow_up(self, request, extra, new):
        """A second turn: the prompt is what another request knows by now, and a little more."""
        others = list(self.model.requests.values())
        if others and len(self.model.scheduler.requests) < 8:
            known = (others[request % len(others)].known + extra)[: self.max_tokens - 1]
            if known:
                entry = ModelRequest(known, len(known), new, None, wants_all_logits=False)
                self.model.submit(len(self.model.requests), entry)

    @rule(right=st.lists(st.sampled_from([True, True, False]), min_size=1, max_size=6))
    def draft(self, right):
        """A drafter guesses what some answers say next, rightly up to some token."""
        self.model.draft(right)

    @precondition(lambda self: len(self.model.flying) < self.credits)
    @rule(limit=st.integers(1, 8))
    def plan(self, limit):
        """One more chunk, where there is a credit."""
        self.model.scheduler.prompt_tokens_limit = limit
        self.model.plan()

    @precondition(lambda self: self.model.next_to_compute())
    @rule(choice=st.integers(0, 3))
    def compute(self, choice):
        """Some chunk gets through the layers."""
        ready = self.model.next_to_compute()
        self.model.compute(ready[choice % len(ready)])

    @precondition(lambda self: self.model.next_to_commit())
    @rule(choice=st.integers(0, 3))
    def commit(self, choice):
        """Some result arrives."""
        ready = self.model.next_to_commit()
        self.model.commit(ready[choice % len(ready)])

    @precondition(lambda self: self.model.next_to_compute())
    @rule(choice=st.integers(0, 3), fails=st.sampled_from([False, False, True]))
    def fail(self, choice, fails):
        """A stage fails on some chunk."""
        ready = self.model.next_to_compute()
        if fails:
            self.model.fail(ready[choice % len(ready)])

    @precondition(lambda self: self.spill is not None)
    @rule(
        action=st.sampled_from(["take", "run", "end", "finish", "finish"]),
        fails=st.sampled_from([False, False, False, True]),
    )
    def spill_moves(self, action, fails):
        """The second tier's thread begins, does or ends a job, or catches up."""
        if action == "run":
            self.spill.run(fails=fails)
        else:
            getattr(self.spill, action)()

    @rule(choice=st.integers(0, 20), action=st.sampled_from(["hold", "resume", "resume", "finish"]))
    def client(self, choice, action):
        """A reader falls behind, catches up or leaves."""
        getattr(self.model.scheduler, action)(RequestId(choice))

    @invariant()
    def holds_together(self):
        """Every block, queue and count agrees, and no kind has too many chunks in flight."""
        if hasattr(self, "model"):
            self.model.scheduler.check_integrity()
            snapshot = self.model.scheduler.snapshot()
            assert snapshot.num_prompt_chunks <= self.max_prompt_chunks
            assert snapshot.num_decode_chunks <= 1
            in_flight = snapshot.num_prompt_chunks + snapshot.num_decode_chunks
            assert in_flight == len(self.model.flying)

    def teardown(self):
        """Whatever happened, everything ends and nothing leaks."""
        if hasattr(self, "model"):
            self.model.drain()


TestAnySchedule = pytest.mark.slow(AnySchedule.TestCase)
TestAnySchedule.settings = settings(
    max_examples=100 * TIMES,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

"""Trees in steps, with a memory that holds tokens instead of keys: what a row sees is its way down, whatever was before."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.support.scripted_drafters import tree_in_random_order
from thermocline.config import SchedulerConfig
from thermocline.kv.blocks import BlockAllocator
from thermocline.kv.state_slots import StateSlots
from thermocline.messages import Chunk, RequestId, RequestOptions
from thermocline.pipeline.scheduling.request_states import RequestStates
from thermocline.pipeline.scheduling.request_windows import RequestWindows
from thermocline.pipeline.scheduling.scheduler import Scheduler

WINDOW = 6


class Memory:
    """Tokens by slot, and states as the tokens that led to them: what layers of each kind keep."""

    def __init__(self, scheduler: Scheduler, block_tokens: int) -> None:
        self.scheduler, self.size = scheduler, block_tokens
        self.full = np.full(400 * block_tokens, -1)
        self.window = np.full(400 * block_tokens, -1)
        self.states: dict[int, tuple[int, ...]] = {}
        self.num_trees = 0

    def compute(self, chunk: Chunk) -> dict[int, tuple[int, ...]]:
        """Compute a chunk like a model; return by row all tokens that it stands for."""
        seen: dict[int, tuple[int, ...]] = {}
        self.num_trees += chunk.has_branches
        for memory, is_windowed in ((self.full, False), (self.window, True)):
            places = chunk.places(window=is_windowed)
            memory[places.slots] = chunk.token_ids
            assert len(set(places.slots.tolist())) == len(places.slots), "two tokens in one slot"
            if places.copies is not None:
                memory[places.copies[:, 1]] = memory[places.copies[:, 0]]
            for segment in places.segments:
                for row in range(segment.start, segment.start + segment.length):
                    position = int(chunk.positions[row])
                    first = max(0, position + 1 - WINDOW) if is_windowed else 0
                    at = np.arange(first, position + 1)
                    slots = segment.block_table[at // self.size] * self.size + at % self.size
                    tokens = tuple(memory[slots].tolist())
                    assert tokens[-1] == chunk.token_ids[row]
                    if is_windowed:
                        assert seen[row][first:] == tokens, "layers differ"
                    seen[row] = seen.get(row, tokens)
        self._recur(chunk, seen)
        return seen

    def _recur(self, chunk: Chunk, seen: dict[int, tuple[int, ...]]) -> None:
        segments = chunk.places(window=False).segments
        for segment in sorted(segments, key=lambda each: each.level):
            use = segment.state
            if use is None:
                continue
            state = self.states.get(use.slot, ()) if chunk.positions[segment.start] else ()
            if use.load is not None:
                state = self.states[use.load]
            saves = dict(use.saves)
            for count in range(1, segment.length + 1):
                row = segment.start + count - 1
                state = (*state, int(chunk.token_ids[row]))
                assert state == seen[row], "a state is not that of its tokens"
                if count in saves:
                    self.states[saves[count]] = state
            self.states[use.slot] = state


def make(rng: random.Random, block_tokens: int, num_blocks: int, *, windowed, recurrent):
    config = SchedulerConfig(
        prefill_chunk_tokens=rng.choice((3, 32)), max_prompt_chunks=2, expected_answer_tokens=0
    )
    windows = states = None
    if windowed:
        windows = RequestWindows(BlockAllocator(num_blocks, block_tokens), WINDOW, 3)
    if recurrent:
        states = RequestStates(StateSlots(3, 2, rng.choice((2, 6, 30))), 16)
    return Scheduler(
        config,
        BlockAllocator(num_blocks, block_tokens),
        90,
        kinds_differ=False,
        windows=windows,
        states=states,
    )


@pytest.mark.parametrize("block_tokens", [1, 4, 16])
@pytest.mark.parametrize(("windowed", "recurrent"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("num_blocks", [400, 0])
@pytest.mark.parametrize("seed", range(6))
def test_rows_see_their_ways(block_tokens, windowed, recurrent, num_blocks, seed):
    """Several requests with random trees, with much room and with hardly any, preempted and resumed, until all ended."""
    rng = random.Random(f"{block_tokens} {windowed} {recurrent} {num_blocks} {seed}")
    tight = -(-90 // block_tokens) + 3
    scheduler = make(rng, block_tokens, num_blocks or tight, windowed=windowed, recurrent=recurrent)
    memory = Memory(scheduler, block_tokens)
    for number in range(3):
        prompt = [rng.randrange(5) for _ in range(rng.randint(1, 30))]
        options = RequestOptions(wants_routing=number == 2)
        scheduler.submit(
            RequestId(number), prompt, max_new_tokens=rng.randint(5, 40), options=options
        )
    total_right = 0
    while scheduler.requests:
        for wish in scheduler.wishes():
            scheduler.offer(random_tree(wish, rng))
        chunk = scheduler.plan()
        assert chunk is not None, "nothing can start"
        seen = memory.compute(chunk)
        scheduler.check_integrity()
        total_right += take(scheduler, chunk, seen, rng)
        scheduler.check_integrity()
    assert scheduler.cache.num_held_blocks == 0
    if num_blocks and not recurrent:
        assert memory.num_trees
        assert total_right


def random_tree(wish, rng):
    """A draft of three tokens that the answers are made of, in any order."""
    nodes = []
    for _ in range(rng.randint(1, wish.max_tokens)):
        parent = rng.randint(max(-1, len(nodes) - 4), len(nodes) - 1)
        node = rng.randrange(3), parent
        if node not in nodes:
            nodes.append(node)
    return tree_in_random_order(wish, nodes, rng)


def take(scheduler, chunk, seen, rng) -> int:
    """Choose tokens for all that caught up, each by the row that has what is known; return how many were foreseen."""
    first_rows = {}
    for each in chunk.segments:
        first_rows[each.request] = each.start + each.length - 1 - each.num_drafted
        if each.request == 2 and each.num_drafted:  # its routing is told, as of a chain
            assert np.all(np.diff(chunk.positions[each.start : each.start + each.length]) == 1)
    total_right = 0
    for request, _ in scheduler.commit(chunk):
        known, row = scheduler.requests[request].known, 0
        limit = scheduler.requests[request].max_total_tokens
        while True:
            assert seen[first_rows[request] + row] == tuple(known), "a row stands for other tokens"
            row = scheduler.append(request, rng.randrange(3))
            total_right += row > 0
            if len(known) >= limit:
                scheduler.finish(request)
            if len(known) >= limit or not row:
                break
    return total_right

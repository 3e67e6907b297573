"""What a scheduler's chunks would do to a real cache, with every promise checked on the way.

Slots hold names of prefixes instead of numbers. A chunk that computes must find, in each slot that its
block table names, the very prefix that its request demands there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from thermocline.messages import RequestId, RequestOptions, SegmentKind
from thermocline.pipeline.scheduling.request import RequestStatus
from thermocline.speculation.contract import Draft

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from thermocline.messages import CachePlaces, Chunk, Segment
    from thermocline.pipeline.scheduling.request import Request
    from thermocline.pipeline.scheduling.request_windows import RequestWindows
    from thermocline.pipeline.scheduling.scheduler import Scheduler

GARBAGE = "garbage"


@dataclass
class ModelRequest:
    """What a request asks for, and what it got so far."""

    known: list[int]
    num_prompt: int
    num_new: int
    salt: str | None
    wants_all_logits: bool
    reported: list[int] = field(default_factory=list)
    """Positions of the prompt whose logits it got."""
    is_spoilt: bool = False
    """A chunk of it failed: what it computes from then on is garbage."""
    drafted: list[int] = field(default_factory=list)
    """Tokens behind the known ones that its step in flight computes."""

    def next_token(self) -> int:
        """Return what the model says next."""
        return (sum(self.known) + len(self.known)) % 2

    def name_of(self, position: int, *, kinds_differ: bool) -> tuple[object, ...]:
        """Return what the slot of a position must hold: the prefix, and how it is computed."""
        num_decoded = max(0, position + 1 - self.num_prompt) if kinds_differ else 0
        tokens = [*self.known, *self.drafted][: position + 1]
        return (self.salt, tuple(tokens), num_decoded)


class CacheModel:
    """Runs a scheduler's chunks in any order that a pipeline may finish them in."""

    def __init__(
        self,
        scheduler: Scheduler,
        block_tokens: int,
        *,
        kinds_differ: bool = True,
        window: int | None = None,
        windows: RequestWindows | None = None,
    ) -> None:
        """window: how many last positions a token sees in layers that have blocks of their own, if any.

        windows: the scheduler's part that owns these blocks.
        """
        assert (window is None) == (windows is None)
        self.scheduler = scheduler
        self.kinds_differ = kinds_differ
        self.block_tokens = block_tokens
        self.requests: dict[int, ModelRequest] = {}
        self.flying: list[Chunk] = []
        self.computed: set[int] = set()
        """Ids of chunks that are computed and not committed."""
        self.window = window
        self.windows = windows
        self.slots: dict[int, object] = {}
        self.window_slots: dict[int, object] = {}
        self.states: dict[int, object] = {}
        """Of each slot of recurrent state: the prefix that it stands for."""
        self.between: Callable[[], None] = lambda: None
        """Called between two steps of `drain`: what else has to go on."""
        self.num_finished = 0
        self.num_foreseen = 0
        """Drafted tokens that were right."""

    def submit(self, request: int, entry: ModelRequest, *, priority: int = 0) -> None:
        """Hand a request over; it must be accepted as a whole."""
        num_new = self.scheduler.submit(
            RequestId(request),
            entry.known[:],
            max_new_tokens=entry.num_new,
            options=RequestOptions(
                priority=priority,
                cache_salt=entry.salt,
                wants_prompt_logits=entry.wants_all_logits,
            ),
        )
        entry.num_new = num_new
        self.requests[request] = entry

    def plan(self) -> Chunk | None:
        """Plan a chunk and check its shape; the most important request is never preempted."""
        first = min(self._live(), key=lambda request: request.rank, default=None)
        was_running = first is not None and first.status is RequestStatus.RUNNING
        chunk = self.scheduler.plan()
        if first is not None and was_running:
            assert first.status is RequestStatus.RUNNING, "the most important request is preempted"
        if chunk is None:
            return None
        assert len({segment.kind for segment in chunk.segments}) == 1, "a mixed chunk"
        assert len(set(chunk.requests)) == len(chunk.requests), "a request twice in a chunk"
        assert not chunk.is_prompt or chunk.num_tokens <= self.scheduler.prompt_tokens_limit
        assert (chunk.window_places is None) == (self.window is None)
        for window in (False, True):
            slots = chunk.places(window=window).slots.tolist()
            assert len(set(slots)) == chunk.num_tokens, "a slot is written twice"
        row = 0
        for segment in chunk.segments:
            assert segment.start == row
            row += segment.length
            self._check_segment(chunk, segment)
        assert row == chunk.num_tokens
        if not chunk.is_prompt:
            assert all(flying.is_prompt for flying in self.flying), "two decode chunks in flight"
        self.flying.append(chunk)
        return chunk

    def draft(self, right: Sequence[bool]) -> None:
        """Offer each answer that may have one a draft, of which just these tokens are right if those before are."""
        for wish in self.scheduler.wishes():
            entry = self.requests[wish.request]
            assert (wish.num_known, wish.last_token) == (len(entry.known), entry.known[-1])
            ahead = ModelRequest(entry.known[:], 0, 0, None, wants_all_logits=False)
            for is_right in right[: wish.max_tokens]:
                ahead.known.append(ahead.next_token() ^ (not is_right))
            tokens = ahead.known[len(entry.known) :]
            if tokens:
                self.scheduler.offer(Draft.chain(wish, tokens))

    def _live(self) -> list[Request]:
        requests = self.scheduler.requests.values()
        return [r for r in requests if r.status is not RequestStatus.FINISHED]

    def _check_segment(self, chunk: Chunk, segment: Segment) -> None:
        entry = self.requests[segment.request]
        if not chunk.is_prompt:
            flying = any(segment.request in other.requests for other in self.flying)
            assert not flying, "an answer is planned before what it continues is computed"
        positions = chunk.positions[segment.start : segment.start + segment.length].tolist()
        assert positions == list(range(positions[0], positions[-1] + 1))
        tokens = chunk.token_ids[segment.start : segment.start + segment.length].tolist()
        entry.drafted = tokens[segment.length - segment.num_drafted :]
        if entry.drafted:
            assert not chunk.is_prompt, "a prompt is not drafted"
            assert positions[-segment.num_drafted] == len(entry.known), "drafts are not at the end"
            assert segment.num_logits == 1 + segment.num_drafted
        assert tokens == [*entry.known, *entry.drafted][positions[0] : positions[-1] + 1]
        for position in positions:
            is_prompt = position < entry.num_prompt
            assert is_prompt == (segment.kind is SegmentKind.PROMPT), "the wrong arithmetic"
        for window in (False, True):
            places = chunk.places(window=window)
            slots = places.slots[segment.start : segment.start + segment.length].tolist()
            (mine,) = (part for part in places.segments if part.request == segment.request)
            assert mine._replace(block_table=None) == segment._replace(block_table=None)
            assert slots == [self._slot(mine, position) for position in positions]
        wanted = range(
            segment.start + segment.length - segment.num_logits, segment.start + segment.length
        )
        assert set(wanted) <= set(chunk.logits_rows.tolist())

    def _slot(self, segment: Segment, position: int) -> int:
        block, place = divmod(position, self.block_tokens)
        return int(segment.block_table[block]) * self.block_tokens + place

    def next_to_compute(self) -> list[Chunk]:
        """Chunks that a pipeline could finish next: each request's chunks keep their order."""
        ready, seen = [], set[int]()
        for chunk in self.flying:
            if chunk.id not in self.computed and seen.isdisjoint(chunk.requests):
                ready.append(chunk)
            if chunk.id not in self.computed:
                seen.update(chunk.requests)
        return ready

    def compute(self, chunk: Chunk) -> None:
        """Write the chunk's slots, and check every slot that it reads."""
        for segment in chunk.segments:
            self._move_state(chunk, segment, self.requests[segment.request])
        self._attend(chunk, chunk.places(window=False), self.slots, None)
        if self.window is not None:
            self._attend(chunk, chunk.places(window=True), self.window_slots, self.window)
        self.computed.add(chunk.id)

    def _attend(
        self, chunk: Chunk, places: CachePlaces, held: dict[int, object], window: int | None
    ) -> None:
        """Do what one kind of layer does: write all rows of a segment, then read what each of them sees."""
        for segment in places.segments:
            entry = self.requests[segment.request]
            rows = range(segment.start, segment.start + segment.length)
            for row in rows:
                slot = int(places.slots[row])
                self._check_writer(segment, slot, is_window=window is not None)
                name = self._name(entry, int(chunk.positions[row]))
                held[slot] = GARBAGE if entry.is_spoilt else name
            first, last = (int(chunk.positions[row]) for row in (rows[0], rows[-1]))
            oldest = 0 if window is None else max(0, first - window + 1)
            for position in range(oldest, last + 1):
                found = held.get(self._slot(segment, position))
                assert entry.is_spoilt or found == self._name(entry, position), (
                    f"position {position} holds {found}"
                )

    def _move_state(self, chunk: Chunk, segment: Segment, entry: ModelRequest) -> None:
        """Take the segment's state, if there is one, through its tokens, with snapshots on the way."""
        use = segment.state
        if use is None:
            return
        start = int(chunk.positions[segment.start])
        if use.load is not None:
            self.states[use.slot] = self.states.get(use.load)
        elif start == 0:
            self.states[use.slot] = None
        if not entry.is_spoilt:
            expected = self._name(entry, start - 1) if start else None
            assert self.states.get(use.slot) == expected, f"slot {use.slot} has another state"
        for tokens, slot in (*use.saves, (segment.length, use.slot)):
            name = self._name(entry, start + tokens - 1)
            self.states[slot] = GARBAGE if entry.is_spoilt else name

    def _name(self, entry: ModelRequest, position: int) -> tuple[object, ...]:
        return entry.name_of(position, kinds_differ=self.kinds_differ)

    def _check_writer(self, segment: Segment, slot: int, *, is_window: bool) -> None:
        block = slot // self.block_tokens
        for other in self.scheduler.requests.values():
            theirs: Sequence[int] = other.cache.blocks
            if is_window:
                assert self.windows is not None
                held = self.windows.held.get(other.id)
                theirs = () if held is None else held.window_blocks
            assert other.id == segment.request or block not in theirs, "another one reads it"

    def next_to_commit(self) -> list[Chunk]:
        """Chunks whose results may arrive next."""
        ready, seen = [], set[int]()
        for chunk in self.flying:
            if chunk.id in self.computed and seen.isdisjoint(chunk.requests):
                ready.append(chunk)
            seen.update(chunk.requests)
        return ready

    def commit(self, chunk: Chunk) -> None:
        """Take a chunk's result and give each request that caught up its next token."""
        self._drop(chunk)
        live = {request.id for request in self._live()}
        caught_up = self.scheduler.commit(chunk)
        for segment, rows, _ in chunk.results_by_segment():
            entry = self.requests[segment.request]
            if entry.wants_all_logits and segment.kind is SegmentKind.PROMPT:
                entry.reported += chunk.positions[chunk.logits_rows[rows]].tolist()
        for request, row in caught_up:
            assert request in live, "an ended request is asked for a token"
            (segment,) = (part for part in chunk.segments if part.request == request)
            place = int(chunk.logits_rows[row])
            assert segment.start <= place < segment.start + segment.length, "another one's logits"
            entry = self.requests[request]
            drafted, entry.drafted = [*entry.drafted, None], []
            for guess in drafted:
                assert chunk.positions[place] == len(entry.known) - 1, "logits of another token"
                is_right = guess == entry.next_token()
                assert self._advance(request, entry) == is_right or request not in self._ids()
                if not is_right or request not in self._ids():
                    break
                place += 1
                self.num_foreseen += 1

    def _ids(self) -> set[int]:
        return {request.id for request in self._live()}

    def _advance(self, request: int, entry: ModelRequest) -> bool:
        """Return whether the next token's row is there, too."""
        assert self.scheduler.requests[RequestId(request)].known == entry.known
        num_output = len(entry.known) - entry.num_prompt
        if entry.num_new:
            token = entry.next_token()
            entry.known.append(token)
            num_output += 1
        if num_output == entry.num_new:
            if entry.wants_all_logits:
                assert entry.reported == list(range(entry.num_prompt)), "logits missing or twice"
            assert self.scheduler.finish(RequestId(request))
            self.num_finished += 1
            return False
        return self.scheduler.append(RequestId(request), token) > 0

    def fail(self, chunk: Chunk) -> None:
        """Let a chunk fail half-way: what it wrote is garbage."""
        for window, held in ((False, self.slots), (True, self.window_slots)):
            held |= dict.fromkeys(chunk.places(window=window).slots.tolist(), GARBAGE)
        for segment in chunk.segments:
            if segment.state is not None:
                targets = [target for _, target in segment.state.saves]
                self.states |= dict.fromkeys([segment.state.slot, *targets], GARBAGE)
        self._drop(chunk)
        for request in chunk.requests:
            self.requests[request].is_spoilt = True
            self.requests[request].drafted = []
        self.scheduler.fail(chunk)

    def _drop(self, chunk: Chunk) -> None:
        self.flying = [other for other in self.flying if other.id != chunk.id]
        self.computed.discard(chunk.id)

    def _goes_on(self) -> bool:
        """Whether something starts once a request has got what it waits for: copies first, then its prefix."""
        for _ in range(3):
            self.between()
            if self.plan() is not None:
                return True
        return False

    def drain(self, max_steps: int = 4000) -> None:
        """Run to the end: no deadlock, no livelock, and nothing is left."""
        for request in self.requests:
            self.scheduler.resume(RequestId(request))
        for _ in range(max_steps):
            self.between()
            if self.plan() is None and not self.flying and not self._goes_on():
                break
            for chunk in self.next_to_compute()[:1]:
                self.compute(chunk)
            for chunk in self.next_to_commit()[:1]:
                self.commit(chunk)
            self.scheduler.check_integrity()
        snapshot = self.scheduler.snapshot()
        assert not self.flying, "the requests never end"
        assert (snapshot.num_waiting, snapshot.num_running) == (0, 0), "nothing can start any more"
        assert snapshot.cache.num_held_blocks == snapshot.cache.num_held_window_blocks == 0
        assert not self.scheduler.requests

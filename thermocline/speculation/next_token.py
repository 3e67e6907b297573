"""The drafter `mtp`: the file's own blocks behind the last layer guess one token after the other.

Where there is one block it guesses all places of a draft, each from what it gave for the place before. Of several each
guesses one place, and computes the whole draft so far: for each token from what the block of the place before gave.

A block follows the trunk at the same places of a cache of its own, so what is shared, freed or taken back of the trunk's
keys and values is so of the block's. A prompt's chunks run through it at once. What decode steps give is kept, and computed
when the next draft is asked for, in one go with the block's first token. So where nobody drafts, a step costs nothing more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from thermocline.messages import Chunk, ChunkId, Segment, SegmentKind
from thermocline.speculation.chains import Chain, drafts_of, likeliest
from thermocline.speculation.contract import MAX_DRAFT_TOKENS, NO_INPUTS, DrafterFacts
from thermocline.speculation.followed import Followed, follow_moves
from thermocline.speculation.head_rows import TokenShares
from thermocline.speculation.own_cache import BlockEnds, OwnCache

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from thermocline.kernels.cache_format import CacheType, HeadShape
    from thermocline.kernels.weight import FloatArray, IntArray
    from thermocline.kv.pool import KVPool
    from thermocline.messages import LayerIndex, RequestId
    from thermocline.speculation.contract import Draft, DraftWish, Verified

_MAX_KEPT_ROWS: Final = 256
"""Of a request that nobody drafts for: 2 MiB of states at a width of 2048."""
_NO_CHUNK: Final = ChunkId(-1)


class Guesser(Protocol):
    """What computes guesses: a block behind the model's last layer, or a small model of its own."""

    @property
    def kv_shapes(self) -> tuple[HeadShape, ...]:
        """Heads of keys and values by layer."""
        ...

    @property
    def state_width(self) -> int:
        """Numbers of the state that it takes of the position before; 0 where it takes none."""
        ...

    @property
    def head_cuts(self) -> tuple[int, ...]:
        """For so many first tokens `logits` can be asked, ascending; the last are all."""
        ...

    def states(self, chunk: Chunk, before: FloatArray, cache: KVPool) -> FloatArray:
        """Return float32 [T, width], from which `logits` guesses; appends the chunk's keys and values to `cache`.

        before: float32 [T, state_width].
        """
        ...

    def logits(self, states: FloatArray, num_tokens: int | None = None) -> FloatArray:
        """Return float32 [rows, num_tokens]: what comes after the tokens of these rows of `states`.

        num_tokens: one of `head_cuts`; None for all.
        """
        ...


@dataclass(slots=True, kw_only=True)
class _Drafting(Chain):
    """A draft on its way. table: the request's blocks, then some of nobody's for positions behind them.

    states: what was given for each of its places, float32 [D].
    """

    followed: Followed
    table: IntArray
    states: list[FloatArray] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Consecutive tokens of one request for the block. states: [n, D], of the position before each."""

    request: RequestId
    start: int
    tokens: Sequence[int]
    states: FloatArray
    table: IntArray


class NextTokenDrafter:
    """A `Drafter` and `HiddenReader` over a model's blocks."""

    def __init__(
        self,
        blocks: Sequence[Guesser],
        state_of: Callable[[FloatArray], FloatArray],
        cache_type: CacheType,
        num_blocks: int,
        block_tokens: int,
        *,
        max_requests: int,
        name: str = "mtp",
    ) -> None:
        """blocks: one for all places of a draft, or one for each; their layers follow each other in the drafter's cache.
        state_of: gives the states that they take, of what the trunk's last layer gives. num_blocks, block_tokens: of the
        trunk's cache. max_requests: for so many at a time drafts are made. name: see `DrafterFacts`. Raises ConfigError
        where there is no room.
        """
        self._blocks, self._state_of = tuple(blocks), state_of
        self._state_width = blocks[0].state_width
        self._cache = OwnCache(
            tuple(shape for block in blocks for shape in block.kv_shapes),
            cache_type,
            num_blocks,
            block_tokens,
            max_requests=max_requests,
            draft_tokens=MAX_DRAFT_TOKENS,
        )
        self._ends = BlockEnds(num_blocks, block_tokens, self._state_width)  # of the trunk's states
        self._followed: dict[RequestId, Followed] = {}
        self._shares: dict[RequestId, TokenShares] = {}
        most = len(blocks) if self._has_many else MAX_DRAFT_TOKENS
        self.facts = DrafterFacts(name, computes=True, reads_hidden=True, max_tokens=most)

    def __repr__(self) -> str:
        return f"NextTokenDrafter({self._blocks}, {len(self._followed)} requests)"

    @property
    def _has_many(self) -> bool:
        """Whether each place of a draft has a block of its own."""
        return len(self._blocks) > 1

    def begin(self, request: RequestId, prompt: Sequence[int]) -> None:
        self._followed[request] = Followed(done=[0] * len(self._blocks))
        self._shares[request] = TokenShares(self._blocks[0].head_cuts)
        self._shares[request].see(prompt)

    def end(self, request: RequestId) -> None:
        self._followed.pop(request, None)
        self._shares.pop(request, None)

    def observe(self, verified: Verified) -> None:
        followed = self._followed.get(verified.request)
        if followed is not None:
            self._shares[verified.request].see(verified.tokens)
            followed.take(verified)
            follow_moves(followed, verified, self._cache.pool, self._cache.layers)
            if not verified.is_chain:
                self._note_rows(followed, verified)

    def hidden_computed(
        self, chunk: Chunk, x: FloatArray, inputs: Mapping[LayerIndex, FloatArray] = NO_INPUTS
    ) -> None:
        del inputs
        due: list[_Rows] = []
        for segment in chunk.segments:
            followed = self._followed.get(segment.request)
            if followed is None:
                continue
            rows = slice(segment.start, segment.start + segment.length)
            states = self._states_of(x[rows])
            start = int(chunk.positions[segment.start])
            if not (segment.num_drafted and chunk.has_branches):
                self._ends.note(segment.block_table, start, states)
            followed.table = segment.block_table
            tokens = chunk.token_ids[rows].tolist()
            if segment.kind is SegmentKind.DECODE:
                followed.keep(start, tokens, states)
                # What is forgotten leaves gaps in the block's cache. A whole model guesses nothing behind one.
                if self._state_width or len(followed.tokens) <= _MAX_KEPT_ROWS:
                    followed.keep_from(followed.end - _MAX_KEPT_ROWS)
                else:
                    del self._followed[segment.request]
            else:
                before = self._states_before(followed, start, states)
                due.append(_Rows(segment.request, start, tokens, before, segment.block_table))
                end = start + len(tokens)
                followed.first, followed.done = end - 1, [end] * len(self._blocks)
                followed.tokens, followed.states = tokens[-1:], [states[-1]]
        if due:
            expanded = {segment.request: segment.num_expanded for segment in chunk.segments}
            for block in self._blocks:
                self._run(block, due, SegmentKind.PROMPT, expanded)

    def propose(self, wishes: Sequence[DraftWish]) -> Sequence[Draft]:
        drafts: list[_Drafting] = []
        for wish in wishes:
            followed = self._followed.get(wish.request)
            # It may not have been told of this token's predecessors: a request that was taken up elsewhere.
            if followed is None or not followed.states or followed.end != wish.num_known - 1:
                continue
            known = wish.num_known - 1
            table = self._cache.table_for_draft(len(drafts), followed.table, known)
            drafts.append(_Drafting(wish=wish, followed=followed, table=table))
        active, place = drafts, 0
        while active:
            active = self._lengthen(active, place)
            place += 1
            if self._has_many and place == len(self._blocks):
                break
        return drafts_of(drafts)

    def guess(self, wish: DraftWish, index: int, logits: FloatArray) -> tuple[int, float]:
        """Return the token at place `index` of a draft, and how likely it is right.

        logits: float32, of all tokens, or of those from which the request's drafts are taken.
        """
        del wish, index
        return likeliest(logits)

    def _states_of(self, x: FloatArray) -> FloatArray:
        """Return the states that the block takes, of the trunk's last layer's output."""
        if not self._state_width:
            return np.empty((len(x), 0), np.float32)
        return self._state_of(np.ascontiguousarray(x))

    def _lengthen(self, drafts: list[_Drafting], place: int) -> list[_Drafting]:
        """Add a token to each draft that has a likely one for a place, and return those that go on."""
        number = place if self._has_many else 0
        block, catches_up = self._blocks[number], number == place
        rows = [_rows_due(draft, number if catches_up else None) for draft in drafts]
        if catches_up:
            for draft in drafts:
                self._has_computed(draft, number)
        states = self._run(block, rows, SegmentKind.DECODE)
        last = np.cumsum([len(each.tokens) for each in rows]) - 1
        states = states[last]
        num_tokens = max(self._shares[draft.wish.request].chosen() for draft in drafts)
        logits = block.logits(states, num_tokens)
        if not self._state_width:
            states = np.empty((len(states), 0), np.float32)
        active = []
        for draft, state, row in zip(drafts, states, logits, strict=True):
            token, confidence = self.guess(draft.wish, place, row)
            if draft.add(token, confidence):
                draft.states.append(state)
                active.append(draft)
        return active

    def _run(
        self,
        block: Guesser,
        rows: Sequence[_Rows],
        kind: SegmentKind,
        num_expanded: dict[RequestId, int] | None = None,
    ) -> FloatArray:
        """Return a block's states of all rows, float32 [T, D]."""
        segments, start, slots, positions = [], 0, [], []
        for each in rows:
            length = len(each.tokens)
            expanded = 0 if num_expanded is None else num_expanded[each.request]
            segment = Segment(each.request, start, length, kind, each.table, num_expanded=expanded)
            segments.append(segment)
            at = np.arange(each.start, each.start + length, dtype=np.int32)
            slots.append(self._cache.slots(each.table, at))
            positions.append(at)
            start += length
        chunk = Chunk(
            _NO_CHUNK,
            tuple(segments),
            np.concatenate([np.asarray(each.tokens, np.int32) for each in rows]),
            np.concatenate(positions),
            np.concatenate(slots),
            np.zeros(0, np.int32),
        )
        before = np.ascontiguousarray(np.concatenate([each.states for each in rows]))
        return block.states(chunk, before, self._cache.pool)

    def _states_before(self, followed: Followed, start: int, states: FloatArray) -> FloatArray:
        """Return the state of the position before each row of a prompt's chunk, which begins at `start`."""
        first = followed.state_at(start - 1)
        if first is None:
            first = self._ends.before(followed.table, start)
        return np.concatenate((first[None], states[:-1]))

    def _note_rows(self, followed: Followed, verified: Verified) -> None:
        """Note the states of a tree's rows, once it is known which of them stay."""
        at = verified.position - followed.first
        if at >= 0 and len(followed.states) > at:
            self._ends.note(followed.table, verified.position, np.stack(followed.states[at:]))

    def _has_computed(self, draft: _Drafting, number: int) -> None:
        """Note that a block's rows before a draft are computed: all known ones, but for one in a block of the drafter's own."""
        followed, num_known = draft.followed, draft.wish.num_known
        is_own = (num_known - 1) % self._cache.block_tokens == 0
        followed.done[number] = num_known - is_own
        # Other blocks may lack more.
        followed.keep_from(min(num_known - 2, *(count - 1 for count in followed.done)))


def _rows_due(draft: _Drafting, number: int | None) -> _Rows:
    """Return the known tokens that a block lacks, the last one included, and behind them the draft so far.

    number: of the block; None for the last token of the draft alone, whose predecessors it has computed.
    """
    wish, followed = draft.wish, draft.followed
    if number is None:
        position = wish.num_known + len(draft.tokens) - 1
        state = draft.states[-1][None]
        return _Rows(wish.request, position, draft.tokens[-1:], state, draft.table)
    start = min(max(followed.done[number], followed.first + 1), wish.num_known - 1)
    tokens = [*followed.tokens[start - followed.first :], wish.last_token, *draft.tokens]
    states = np.stack([*followed.states[start - 1 - followed.first :], *draft.states])
    return _Rows(wish.request, start, tokens, states, draft.table)

"""The drafter `mtp`: the file's own block behind the last layer guesses one token after the other.

The block follows the trunk at the same places of a cache of its own, so what is shared, freed or taken back of the trunk's
keys and values is so of the block's. A prompt's chunks run through it at once. What decode steps give is kept, and computed
when the next draft is asked for, in one go with its first token. So where nobody drafts, a step costs nothing more.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    """A draft on its way. table: the request's blocks, then some of nobody's for positions behind them."""

    table: IntArray


@dataclass(frozen=True, slots=True)
class _Rows:
    """Consecutive tokens of one request for the block. states: [n, D], of the position before each."""

    request: RequestId
    start: int
    tokens: Sequence[int]
    states: FloatArray
    table: IntArray


class NextTokenDrafter:
    """A `Drafter` and `HiddenReader` over a model's block."""

    def __init__(
        self,
        block: Guesser,
        final_norm: Callable[[FloatArray], FloatArray],
        cache_type: CacheType,
        num_blocks: int,
        block_tokens: int,
        *,
        max_requests: int,
        name: str = "mtp",
    ) -> None:
        """final_norm: see `Model.final_norm`. num_blocks, block_tokens: of the trunk's cache.

        max_requests: for so many at a time drafts are made. name: see `DrafterFacts`. Raises ConfigError where there is
        no room.
        """
        self._block, self._final_norm = block, final_norm
        self._cache = OwnCache(
            block.kv_shapes,
            cache_type,
            num_blocks,
            block_tokens,
            max_requests=max_requests,
            draft_tokens=MAX_DRAFT_TOKENS,
        )
        self._ends = BlockEnds(num_blocks, block_tokens, block.state_width)  # of the trunk's states
        self._followed: dict[RequestId, Followed] = {}
        self._shares: dict[RequestId, TokenShares] = {}
        self.facts = DrafterFacts(name, computes=True, reads_hidden=True)

    def __repr__(self) -> str:
        return f"NextTokenDrafter({self._block}, {len(self._followed)} requests)"

    def begin(self, request: RequestId, prompt: Sequence[int]) -> None:
        self._followed[request] = Followed()
        self._shares[request] = TokenShares(self._block.head_cuts)
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
                if self._block.state_width or len(followed.tokens) <= _MAX_KEPT_ROWS:
                    followed.keep_from(followed.end - _MAX_KEPT_ROWS)
                else:
                    del self._followed[segment.request]
            else:
                before = self._states_before(followed, start, states)
                due.append(_Rows(segment.request, start, tokens, before, segment.block_table))
                end = start + len(tokens)
                followed.first, followed.num_done = end - 1, end
                followed.tokens, followed.states = tokens[-1:], [states[-1]]
        if due:
            expanded = {segment.request: segment.num_expanded for segment in chunk.segments}
            self._run(due, SegmentKind.PROMPT, expanded)

    def propose(self, wishes: Sequence[DraftWish]) -> Sequence[Draft]:
        drafts: list[_Drafting] = []
        rows: list[_Rows] = []
        for wish in wishes:
            followed = self._followed.get(wish.request)
            # It may not have been told of this token's predecessors: a request that was taken up elsewhere.
            if followed is None or not followed.states or followed.end != wish.num_known - 1:
                continue
            known = wish.num_known - 1
            table = self._cache.table_for_draft(len(drafts), followed.table, known)
            draft = _Drafting(wish=wish, table=table)
            drafts.append(draft)
            rows.append(_rows_due(followed, draft))
            self._has_computed(followed, wish.num_known)
        active = drafts
        while active:
            active, rows = self._lengthen(active, rows)
        return drafts_of(drafts)

    def guess(self, wish: DraftWish, index: int, logits: FloatArray) -> tuple[int, float]:
        """Return the token at place `index` of a draft, and how likely it is right.

        logits: float32, of all tokens, or of those from which the request's drafts are taken.
        """
        del wish, index
        return likeliest(logits)

    def _states_of(self, x: FloatArray) -> FloatArray:
        """Return the states that the block takes, of the trunk's last layer's output."""
        if not self._block.state_width:
            return np.empty((len(x), 0), np.float32)
        return self._final_norm(np.ascontiguousarray(x))

    def _lengthen(
        self, drafts: list[_Drafting], rows: list[_Rows]
    ) -> tuple[list[_Drafting], list[_Rows]]:
        """Add a token to each draft that has a likely one, and return those that go on, with their next row."""
        states = self._run(rows, SegmentKind.DECODE)
        last = np.cumsum([len(each.tokens) for each in rows]) - 1
        states = states[last]
        num_tokens = max(self._shares[draft.wish.request].chosen() for draft in drafts)
        logits = self._block.logits(states, num_tokens)
        if not self._block.state_width:
            states = np.empty((len(states), 0), np.float32)
        active, following = [], []
        for draft, state, row, before in zip(drafts, states, logits, rows, strict=True):
            token, confidence = self.guess(draft.wish, len(draft.tokens), row)
            if draft.add(token, confidence):
                active.append(draft)
                position = before.start + len(before.tokens)
                request = draft.wish.request
                following.append(_Rows(request, position, [token], state[None], draft.table))
        return active, following

    def _run(
        self,
        rows: Sequence[_Rows],
        kind: SegmentKind,
        num_expanded: dict[RequestId, int] | None = None,
    ) -> FloatArray:
        """Return the block's states of all rows, float32 [T, D]."""
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
        return self._block.states(chunk, before, self._cache.pool)

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

    def _has_computed(self, followed: Followed, num_known: int) -> None:
        """Note that the rows before a draft are computed: all known ones, but for one in a block of the drafter's own."""
        is_own = (num_known - 1) % self._cache.block_tokens == 0
        followed.num_done = num_known - is_own
        followed.keep_from(num_known - 2)


def _rows_due(followed: Followed, draft: _Drafting) -> _Rows:
    """Return the known tokens that the block lacks, the last one included."""
    wish = draft.wish
    start = min(max(followed.num_done, followed.first + 1), wish.num_known - 1)
    tokens = [*followed.tokens[start - followed.first :], wish.last_token]
    states = np.stack(followed.states[start - 1 - followed.first :])
    return _Rows(wish.request, start, tokens, states, draft.table)

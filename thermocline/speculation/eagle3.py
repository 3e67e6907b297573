"""The drafter `eagle3`: a file of its own guesses one token after the other, from what three layers of the model got.

Its keys and values lie at the same places as the model's, in a cache of its own: what is shared, freed or taken back of the
model's is so of the drafter's. They are made of a token and the position before, so nothing is at the first place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from thermocline.messages import LayerIndex, RequestId, SegmentKind
from thermocline.models.eagle3 import StatedTokens
from thermocline.speculation.chains import Chain, drafts_of, likeliest
from thermocline.speculation.contract import MAX_DRAFT_TOKENS, NO_INPUTS, DrafterFacts
from thermocline.speculation.followed import Followed, follow_moves
from thermocline.speculation.own_cache import BlockEnds, OwnCache

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from thermocline.kernels.cache_format import CacheType
    from thermocline.kernels.weight import FloatArray, IntArray
    from thermocline.messages import Chunk
    from thermocline.models.eagle3 import Eagle3Model
    from thermocline.speculation.contract import Draft, DraftWish, Verified

_MAX_KEPT_ROWS: Final = 64
"""Of a request that nobody drafts for: 2.1 MiB of features at a width of 2880."""
_LAYER: Final = LayerIndex(0)


@dataclass(slots=True)
class _Known:
    """What is known of one request. rows: features of positions whose state is not computed yet.

    state: float32 [D], of position `state_at`; None before the first.
    """

    rows: Followed = field(default_factory=Followed)
    state: FloatArray | None = None
    state_at: int = -1


@dataclass(slots=True, kw_only=True)
class _Drafting(Chain):
    """A draft on its way. token, before: what its next guess begins with. table: the request's blocks, then some of nobody's."""

    table: IntArray
    token: int
    before: FloatArray


class Eagle3Drafter:
    """A `Drafter` and `HiddenReader` over a drafter's file."""

    def __init__(
        self,
        model: Eagle3Model,
        cache_type: CacheType,
        num_blocks: int,
        block_tokens: int,
        *,
        max_requests: int,
    ) -> None:
        """num_blocks, block_tokens: of the drafted model's cache. max_requests: for so many at a time drafts are made.

        Raises ConfigError where there is no room.
        """
        self._model = model
        self._own = OwnCache(
            model.spec.kv_shapes,
            cache_type,
            num_blocks,
            block_tokens,
            max_requests=max_requests,
            draft_tokens=MAX_DRAFT_TOKENS,
        )
        self._cache = self._own.pool.layer(_LAYER)
        self._ends = BlockEnds(num_blocks, block_tokens, model.spec.decoder.hidden_size)
        self._known: dict[RequestId, _Known] = {}
        self.facts = DrafterFacts(
            "eagle3", computes=True, reads_hidden=True, reads_layers=model.spec.target_layers
        )

    def __repr__(self) -> str:
        return f"Eagle3Drafter({self._model}, {len(self._known)} requests)"

    def begin(self, request: RequestId, prompt: Sequence[int]) -> None:
        del prompt  # its chunks come with their tokens
        self._known[request] = _Known()

    def end(self, request: RequestId) -> None:
        self._known.pop(request, None)

    def observe(self, verified: Verified) -> None:
        known = self._known.get(verified.request)
        if known is not None:
            known.rows.take(verified)
            follow_moves(known.rows, verified, self._own.pool, self._own.layers)

    def hidden_computed(
        self, chunk: Chunk, x: FloatArray, inputs: Mapping[LayerIndex, FloatArray] = NO_INPUTS
    ) -> None:
        del x
        if not any(each.request in self._known for each in chunk.segments):
            return
        features = np.concatenate(
            [inputs[layer] for layer in self._model.spec.target_layers], axis=1
        )
        for segment in chunk.segments:
            # A request may have ended on another thread since.
            known = self._known.get(segment.request)
            if known is None:
                continue
            rows = slice(segment.start, segment.start + segment.length)
            start = int(chunk.positions[segment.start])
            known.rows.table = segment.block_table
            known.rows.keep(start, chunk.token_ids[rows].tolist(), features[rows])
            if segment.kind is SegmentKind.PROMPT:
                self._store(known, known.rows.end, prompt=True)
            elif len(known.rows.states) > _MAX_KEPT_ROWS:
                self._store(known, start, prompt=False)

    def propose(self, wishes: Sequence[DraftWish]) -> Sequence[Draft]:
        drafts: list[_Drafting] = []
        for wish in wishes:
            known, newest = self._known.get(wish.request), wish.num_known - 1
            # It may not have been told of this token's predecessors: a request that was taken up elsewhere.
            if known is None or known.rows.end != newest or not len(known.rows.table):
                continue
            self._store(known, newest, prompt=False)
            if known.state is not None and known.state_at == newest - 1:
                table = self._own.table_for_draft(len(drafts), known.rows.table, newest)
                drafts.append(
                    _Drafting(wish=wish, table=table, token=wish.last_token, before=known.state)
                )
        active = drafts
        while active:
            active = self._lengthen(active)
        return drafts_of(drafts)

    def guess(self, wish: DraftWish, index: int, logits: FloatArray) -> tuple[int, float]:
        """Return the token at place `index` of a draft, and how likely it is right.

        logits: float32, of all tokens that it can guess, in the order of its head.
        """
        del wish, index
        row, confidence = likeliest(logits)
        return self._model.token_of(row), confidence

    def _lengthen(self, drafts: list[_Drafting]) -> list[_Drafting]:
        """Add a token to each draft that has a likely one, and return those that go on."""
        positions = np.array(
            [draft.wish.num_known - 1 + len(draft.tokens) for draft in drafts], np.int32
        )
        rows = StatedTokens(
            np.array([draft.token for draft in drafts], np.int32),
            np.stack([draft.before for draft in drafts]),
            positions,
            np.concatenate(
                [
                    self._own.slots(draft.table, positions[n : n + 1])
                    for n, draft in enumerate(drafts)
                ]
            ),
        )
        states = self._model.states(rows, [draft.table for draft in drafts], self._cache)
        active = []
        for draft, state, row in zip(drafts, states, self._model.logits(states), strict=True):
            token, confidence = self.guess(draft.wish, len(draft.tokens), row)
            if draft.add(token, confidence):
                draft.token, draft.before = token, state
                active.append(draft)
        return active

    def _store(self, known: _Known, end: int, *, prompt: bool) -> None:
        """Compute states, keys and values of what is kept before position `end`, and keep it no longer."""
        rows = known.rows
        start = max(rows.done[0], rows.first)
        kept = slice(start - rows.first, max(end - rows.first, 0))
        tokens = np.array(rows.tokens[kept], np.int32)
        if len(tokens):
            states = self._model.fuse(np.stack(rows.states[kept]), prompt=prompt)
            before = np.concatenate((self._state_before(known, start)[None], states[:-1]))
            positions = np.arange(start, start + len(tokens), dtype=np.int32)
            slots = self._own.slots(rows.table, positions)
            due = slice(int(start == 0), None)
            if len(tokens[due]):
                stated = StatedTokens(tokens[due], before[due], positions[due], slots[due])
                self._model.store(stated, self._cache, prompt=prompt)
            self._ends.note(rows.table, start, states)
            known.state, known.state_at = states[-1], start + len(tokens) - 1
        rows.done[0] = max(end, rows.done[0])
        rows.keep_from(end)

    def _state_before(self, known: _Known, start: int) -> FloatArray:
        """Return the state of the position before `start`: the latest, or what was noted at the end of a found block."""
        if known.state is not None and known.state_at == start - 1:
            return known.state
        return self._ends.before(known.rows.table, start)

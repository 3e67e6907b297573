"""The drafter `assistant`: Gemma 4's own, from a file, guesses one token after the other.

It attends to the model's own keys and values where the model keeps them, and writes none. So a prompt costs it nothing, and
of a request it remembers where its blocks are, and what the last layer gave for the rows of its latest step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from thermocline.models.gemma4_assistant import AssistantRows
from thermocline.speculation.chains import Chain, drafts_of, likeliest
from thermocline.speculation.contract import MAX_DRAFT_TOKENS, NO_INPUTS, DrafterFacts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from thermocline.kernels.weight import FloatArray, IntArray
    from thermocline.kv.pool import KVPool
    from thermocline.messages import Chunk, LayerIndex, RequestId
    from thermocline.models.gemma4_assistant import AssistantModel
    from thermocline.speculation.contract import Draft, DraftWish, Verified


@dataclass(frozen=True, slots=True)
class _Step:
    """What the latest chunk computed for a request, and where its blocks are.

    x: float32 [n, D], behind the last layer, of positions from `start` on.
    """

    start: int
    x: FloatArray
    table: IntArray
    window_table: IntArray

    @property
    def end(self) -> int:
        """The position behind those that are known."""
        return self.start + len(self.x)


@dataclass(slots=True)
class _Followed:
    """What is known of one request. step: None before its first chunk, and where its blocks have changed since."""

    step: _Step | None = None


@dataclass(slots=True, kw_only=True)
class _Drafting(Chain):
    """A draft on its way. token, before: what its next guess begins with."""

    step: _Step
    token: int
    before: FloatArray


class AssistantDrafter:
    """A `Drafter` and `HiddenReader` over a drafter's file."""

    def __init__(
        self,
        model: AssistantModel,
        final_norm: Callable[[FloatArray], FloatArray],
        cache: KVPool,
    ) -> None:
        """final_norm: see `Model.final_norm`. cache: the drafted model's keys and values."""
        self._model, self._final_norm, self._cache = model, final_norm, cache
        self._followed: dict[RequestId, _Followed] = {}
        self.facts = DrafterFacts("assistant", computes=True, reads_hidden=True, reads_cache=True)

    def __repr__(self) -> str:
        return f"AssistantDrafter({self._model}, {len(self._followed)} requests)"

    def begin(self, request: RequestId, prompt: Sequence[int]) -> None:
        del prompt  # its last row is all that counts
        self._followed[request] = _Followed()

    def end(self, request: RequestId) -> None:
        self._followed.pop(request, None)

    def observe(self, verified: Verified) -> None:
        followed = self._followed.get(verified.request)
        if followed is None:
            return
        step, followed.step = followed.step, None
        if step is None or not verified.is_chain:
            return  # behind a tree of another drafter its blocks have changed
        num_known = verified.position + verified.num_accepted + 1 - step.start
        if 0 < num_known <= len(step.x):
            followed.step = replace(step, x=step.x[:num_known])

    def hidden_computed(
        self, chunk: Chunk, x: FloatArray, inputs: Mapping[LayerIndex, FloatArray] = NO_INPUTS
    ) -> None:
        del inputs
        windows: dict[RequestId, IntArray] = {}
        for segment in chunk.places(window=True).segments:
            windows.setdefault(segment.request, segment.block_table)
        for segment in chunk.segments:
            followed = self._followed.get(segment.request)
            if followed is None:
                continue
            # Of a step's rows those stay that hold right tokens; of a prompt's the last one is of use.
            first = segment.start + max(segment.length - MAX_DRAFT_TOKENS - 1, 0)
            end = segment.start + segment.length
            start = int(chunk.positions[first])
            window_table = windows[segment.request]
            followed.step = _Step(start, x[first:end].copy(), segment.block_table, window_table)

    def propose(self, wishes: Sequence[DraftWish]) -> Sequence[Draft]:
        drafts = []
        for wish in wishes:
            followed = self._followed.get(wish.request)
            step = None if followed is None else followed.step
            # It may not have been told of this token's predecessors: a request that was taken up elsewhere.
            if step is not None and step.end == wish.num_known - 1:
                drafts.append(
                    _Drafting(wish=wish, step=step, token=wish.last_token, before=step.x[-1])
                )
        if not drafts:
            return []
        states = self._final_norm(np.stack([draft.before for draft in drafts]))
        for draft, before in zip(drafts, states, strict=True):
            draft.before = before
        active = drafts
        while active:
            active = self._lengthen(active)
        return drafts_of(drafts)

    def guess(self, wish: DraftWish, index: int, logits: FloatArray) -> tuple[int, float]:
        """Return the token at place `index` of a draft, and how likely it is right.

        logits: float32, of all tokens that it can guess.
        """
        del wish, index
        return likeliest(logits)

    def _lengthen(self, drafts: list[_Drafting]) -> list[_Drafting]:
        """Add a token to each draft that has a likely one, and return those that go on."""
        rows = AssistantRows(
            np.array([draft.wish.num_known - 1 for draft in drafts], np.int32),
            [draft.step.table for draft in drafts],
            [draft.step.window_table for draft in drafts],
        )
        tokens = np.array([draft.token for draft in drafts], np.int32)
        before = np.stack([draft.before for draft in drafts])
        states = self._model.states(tokens, before, rows, self._cache)
        logits = self._model.logits(states)
        active, kept = [], []
        for index, (draft, row) in enumerate(zip(drafts, logits, strict=True)):
            token, confidence = self.guess(draft.wish, len(draft.tokens), row)
            if draft.add(token, confidence):
                draft.token = token
                active.append(draft)
                kept.append(index)
        if active:
            for draft, following in zip(active, self._model.next_before(states[kept]), strict=True):
                draft.before = following
        return active

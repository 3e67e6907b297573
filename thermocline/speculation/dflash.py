"""The drafters `dflash` and `ddtree`: a file of its own guesses all next places of a request at once.

It attends to what some of the model's layers got for the known tokens. Its keys and values for these lie at the same
places as the model's, in a cache of its own: what is shared, freed or taken back of the model's is so of the drafter's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from thermocline.messages import RequestId, Segment, SegmentKind
from thermocline.models.dflash import BlockRows
from thermocline.speculation.contract import MAX_DRAFT_TOKENS, NO_INPUTS, Draft, DrafterFacts
from thermocline.speculation.followed import Followed, follow_moves
from thermocline.speculation.own_cache import OwnCache
from thermocline.speculation.tree import best_of_each, best_tree

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from thermocline.kernels.cache_format import CacheType
    from thermocline.kernels.weight import FloatArray, IntArray
    from thermocline.messages import Chunk, LayerIndex
    from thermocline.models.dflash import DFlashModel
    from thermocline.speculation.contract import DraftWish, Verified

_MAX_KEPT_ROWS: Final = 64
"""Of a request that nobody drafts for: 2.5 MiB of features at a width of 2048 and five layers."""
_MIN_CONFIDENCE: Final = 0.05
"""A chain ends at a less likely guess. A node of a tree that is less likely, with all before it, is left out."""


@dataclass(frozen=True, slots=True)
class _Block:
    """A block to guess. start: the position of its known token. table: blocks of the cache for all of its positions."""

    wish: DraftWish
    start: int
    table: IntArray


class DFlashDrafter:
    """A `Drafter` and `HiddenReader` over a drafter's file."""

    def __init__(
        self,
        model: DFlashModel,
        cache_type: CacheType,
        num_blocks: int,
        block_tokens: int,
        *,
        max_requests: int,
        is_tree: bool,
    ) -> None:
        """num_blocks, block_tokens: of the drafted model's cache. max_requests: for so many at a time drafts are made.

        is_tree: drafts are trees, else the likeliest chain. Raises ConfigError where there is no room.
        """
        self._model, self._is_tree = model, is_tree
        spec = model.spec
        self._own = OwnCache(
            spec.kv_shapes,
            cache_type,
            num_blocks,
            block_tokens,
            max_requests=max_requests,
            draft_tokens=spec.block_tokens,
        )
        self._caches = [self._own.pool.layer(layer) for layer in self._own.layers]
        self._followed: dict[RequestId, Followed] = {}
        self.facts = DrafterFacts(
            "ddtree" if is_tree else "dflash",
            computes=True,
            reads_hidden=True,
            max_tokens=MAX_DRAFT_TOKENS
            if is_tree
            else min(spec.block_tokens - 1, MAX_DRAFT_TOKENS),
            reads_layers=spec.target_layers,
            at_once=True,
        )

    def __repr__(self) -> str:
        return f"DFlashDrafter({self.facts.name}, {self._model}, {len(self._followed)} requests)"

    def begin(self, request: RequestId, prompt: Sequence[int]) -> None:
        del prompt  # its chunks come with their tokens
        self._followed[request] = Followed()

    def end(self, request: RequestId) -> None:
        self._followed.pop(request, None)

    def observe(self, verified: Verified) -> None:
        followed = self._followed.get(verified.request)
        if followed is not None:
            followed.take(verified)
            follow_moves(followed, verified, self._own.pool, self._own.layers)

    def hidden_computed(
        self, chunk: Chunk, x: FloatArray, inputs: Mapping[LayerIndex, FloatArray] = NO_INPUTS
    ) -> None:
        del x
        followed_here = [each for each in chunk.segments if each.request in self._followed]
        if not followed_here:
            return
        features = np.concatenate(
            [inputs[layer] for layer in self._model.spec.target_layers], axis=1
        )
        for segment in followed_here:
            # A request may have ended on another thread since.
            followed = self._followed.get(segment.request)
            if followed is None:
                continue
            rows = slice(segment.start, segment.start + segment.length)
            start = int(chunk.positions[segment.start])
            followed.table = segment.block_table
            followed.keep(start, chunk.token_ids[rows].tolist(), features[rows])
            if segment.kind is SegmentKind.PROMPT:
                self._store(followed, followed.end, prompt=True)
            elif len(followed.states) > _MAX_KEPT_ROWS:
                self._store(followed, start, prompt=False)

    def propose(self, wishes: Sequence[DraftWish]) -> Sequence[Draft]:
        blocks: list[_Block] = []
        for wish in wishes:
            followed = self._followed.get(wish.request)
            start = wish.num_known - 1
            # It may not have been told of this token's predecessors: a request that was taken up elsewhere.
            if followed is None or followed.end != start or not len(followed.table):
                continue
            self._store(followed, start, prompt=False)
            table = self._own.table_for_draft(len(blocks), followed.table, start)
            blocks.append(_Block(wish, start, table))
        if not blocks:
            return []
        size = self._model.spec.block_tokens
        logits = self._model.logits(self._rows(blocks), self._caches)
        drafts = [
            self._draft(block.wish, logits[n * size + 1 : (n + 1) * size])
            for n, block in enumerate(blocks)
        ]
        return [draft for draft in drafts if draft.tokens]

    def guess(self, wish: DraftWish, logits: FloatArray) -> FloatArray:
        """Return what to draft from, float32 [places, V]. logits: of the places behind the known token, in order."""
        del wish
        return logits

    def _draft(self, wish: DraftWish, logits: FloatArray) -> Draft:
        logits = self.guess(wish, logits)
        if not self._is_tree:
            count = min(wish.max_tokens, self.facts.max_tokens)
            tokens, log_probs = best_of_each(logits[:count], 1)
            confidence = np.exp(log_probs[:, 0])
            length = int((confidence >= _MIN_CONFIDENCE).cumprod().sum())
            return Draft.chain(
                wish, tokens[:length, 0].tolist(), [float(each) for each in confidence[:length]]
            )
        budget = min(wish.max_tokens, self.facts.max_tokens)
        # The deepest node needs its position: no draft reaches behind the answer's last token.
        tokens, log_probs = best_of_each(logits[: wish.max_tokens], budget)
        tree = best_tree(tokens, log_probs, budget)
        reached = np.exp(tree.log_probs)
        length = max(int((reached >= _MIN_CONFIDENCE).sum()), 0)
        before = [reached[parent] if parent >= 0 else 1.0 for parent in tree.parents]
        confidence = (reached / before)[:length].tolist()
        return Draft(
            wish.request,
            wish.num_known,
            tree.tokens[:length],
            tree.parents[:length],
            tuple(confidence),
        )

    def _store(self, followed: Followed, end: int, *, prompt: bool) -> None:
        """Compute the keys and values of what is kept before position `end`, and keep it no longer."""
        start = max(followed.done[0], followed.first)
        kept = followed.states[start - followed.first : max(end - followed.first, 0)]
        if kept:
            positions = np.arange(start, start + len(kept), dtype=np.int32)
            slots = self._own.slots(followed.table, positions)
            self._model.store(np.stack(kept), positions, slots, self._caches, prompt=prompt)
        followed.done[0] = max(end, followed.done[0])
        followed.keep_from(end)

    def _rows(self, blocks: Sequence[_Block]) -> BlockRows:
        size = self._model.spec.block_tokens
        ids = np.full((len(blocks), size), self._model.spec.mask_token, np.int32)
        ids[:, 0] = [block.wish.last_token for block in blocks]
        positions = np.stack(
            [np.arange(block.start, block.start + size, dtype=np.int32) for block in blocks]
        )
        slots = [
            self._own.slots(block.table, row) for block, row in zip(blocks, positions, strict=True)
        ]
        return BlockRows(
            ids.reshape(-1),
            positions.reshape(-1),
            np.repeat(positions[:, -1], size),
            np.concatenate(slots),
            tuple(
                Segment(block.wish.request, n * size, size, SegmentKind.DECODE, block.table)
                for n, block in enumerate(blocks)
            ),
        )

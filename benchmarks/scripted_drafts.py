"""Drafters that know the answer, and are right as often as they are told to: what a benchmark of speculation drafts with.

Knows no clock. Which places of an answer are guessed wrongly is fixed by a pattern's number, so every setting meets the same wrong
guesses; other patterns suit other lengths of drafts.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from thermocline.speculation.contract import Draft, DrafterFacts
from thermocline.speculation.lookup import LookupDrafter
from thermocline.speculation.next_token import NextTokenDrafter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from thermocline.engine.build_context import BuildContext
    from thermocline.messages import Chunk, FloatArray, LayerIndex, RequestId
    from thermocline.speculation.contract import Drafter, DraftWish, Verified


@cache
def right_places(num_tokens: int, share: float, rank: int, pattern: int = 0) -> frozenset[int]:
    """Return the places of an answer whose guess is right: exactly this share of them. rank: 0 for first guesses.

    pattern: which of the ways to choose them; each is as likely.
    """
    places = range(num_tokens)
    count = round(share * num_tokens)
    return frozenset(random.Random(f"{share} {rank} {pattern}").sample(places, count))


class Script:
    """The answer that is to come, and how often each guess of it is right. One request at a time."""

    def __init__(self) -> None:
        self.answer: tuple[int, ...] = ()
        self.acceptance = 1.0
        self.num_prompt = 0
        self.pattern = 0

    def guess(self, place: int, rank: int = 0) -> int:
        """Return the first or the second guess of the token at a place of the answer. The two differ."""
        token = self.answer[place]
        is_right = place in self._right_places(0)
        if rank == 0:
            return token if is_right else token ^ 1
        is_second = place in self._right_places(1)
        return token if is_second and not is_right else token ^ 2

    def _right_places(self, rank: int) -> frozenset[int]:
        return right_places(len(self.answer), self.acceptance, rank, self.pattern)

    def places(self, wish: DraftWish) -> range:
        """Return the places that a draft may be for."""
        done = wish.num_known - self.num_prompt
        return range(done, min(done + wish.max_tokens, len(self.answer)))


class ScriptedDrafter:
    """Proposes a chain, or a tree, of the script's guesses. It costs nothing."""

    def __init__(self, script: Script, *, has_branches: bool = False) -> None:
        """has_branches: beside each token of the chain stands a second guess, which is right as often where the first is wrong."""
        self._script, self._has_branches = script, has_branches
        self.facts = DrafterFacts("tree" if has_branches else "scripted")

    def begin(self, request: RequestId, prompt: Sequence[int]) -> None:
        """See `Drafter`."""
        self._script.num_prompt = len(prompt)

    def propose(self, wishes: Sequence[DraftWish]) -> list[Draft]:
        """See `Drafter`. The same tokens are wrong in every run."""
        (wish,) = wishes
        places = self._script.places(wish)
        if not places:
            return []
        if self._has_branches:
            return [self._tree(wish, places)]
        return [Draft.chain(wish, [self._script.guess(place) for place in places])]

    def _tree(self, wish: DraftWish, places: range) -> Draft:
        """Return the likeliest nodes of the chain and of the second guesses, the best first."""
        first = self._script.acceptance
        second = (1 - first) * first
        # (how likely with all before it, depth, rank), so that a node of the chain comes before what stands behind it.
        nodes = sorted(
            (-(first**depth) * (first, second)[rank], depth, rank)
            for depth in range(len(places))
            for rank in (0, 1)
        )[: wish.max_tokens]
        chain: dict[int, int] = {-1: -1}
        tokens: list[int] = []
        parents: list[int] = []
        confidence: list[float] = []
        for _, depth, rank in nodes:
            if depth - 1 not in chain:
                continue  # of equally unlikely ones, what it stands behind was cut off
            if rank == 0:
                chain[depth] = len(tokens)
            tokens.append(self._script.guess(places[depth], rank))
            parents.append(chain[depth - 1])
            confidence.append((first, second)[rank])
        return Draft(wish.request, wish.num_known, tuple(tokens), tuple(parents), tuple(confidence))

    def observe(self, verified: Verified) -> None:
        """See `Drafter`."""

    def end(self, request: RequestId) -> None:
        """See `Drafter`."""


class ScriptedBlock:
    """The script's chain at the cost of the model's own block, which computes each token in vain."""

    facts = DrafterFacts("scripted", computes=True, reads_hidden=True)

    def __init__(self, script: Script, block: NextTokenDrafter) -> None:
        self._script, self._block = script, block
        block.guess = self._guess  # type: ignore[method-assign]

    def _guess(self, wish: DraftWish, index: int, logits: FloatArray) -> tuple[int, float]:
        logits.argmax()
        places = self._script.places(wish)
        return (self._script.guess(places[index]), 1.0) if index < len(places) else (0, 0.0)

    def begin(self, request: RequestId, prompt: Sequence[int]) -> None:
        """See `Drafter`."""
        self._script.num_prompt = len(prompt)
        self._block.begin(request, prompt)

    def propose(self, wishes: Sequence[DraftWish]) -> Sequence[Draft]:
        """See `Drafter`. Without confidence: the script's guesses are not equally likely at all places."""
        return [replace(draft, confidence=()) for draft in self._block.propose(wishes)]

    def observe(self, verified: Verified) -> None:
        """See `Drafter`."""
        self._block.observe(verified)

    def hidden_computed(
        self, chunk: Chunk, x: FloatArray, inputs: Mapping[LayerIndex, FloatArray] | None = None
    ) -> None:
        """See `HiddenReader`."""
        self._block.hidden_computed(chunk, x)

    def end(self, request: RequestId) -> None:
        """See `Drafter`."""
        self._block.end(request)


def scripted_drafters(
    script: Script, open_drafters: Callable[[BuildContext], list[Drafter]]
) -> Callable[[BuildContext], list[Drafter]]:
    """Return what opens the scripted chain, at the cost of the model's block if there is one, the tree, and lookup."""

    def opened(context: BuildContext) -> list[Drafter]:
        blocks = [each for each in open_drafters(context) if isinstance(each, NextTokenDrafter)]
        chain = ScriptedBlock(script, blocks[0]) if blocks else ScriptedDrafter(script)
        return [chain, ScriptedDrafter(script, has_branches=True), LookupDrafter()]

    return opened

"""A machine that decodes on a virtual clock: what a speculator's choices cost, by prices and right guesses that are given."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from thermocline.messages import RequestId
from thermocline.speculation.contract import Draft, DrafterFacts, DraftWish, Verified

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from thermocline.speculation.speculator import Speculator

PROMPT_TOKENS = 32


@cache
def _drawn(seed: int, place: int, rank: int) -> float:
    return random.Random(f"{seed} {place} {rank}").random()


@dataclass
class Guesses:
    """A drafter of which each place's guess is right or wrong, whenever it is made.

    acceptance: the share of places whose guess is right; it may be changed between requests. confidence: what it says of
    itself; None for nothing. second: with trees, how often a second guess beside a wrong one is right. seconds: of a token
    that it computes; due_seconds: of a known token that it has not followed yet.
    """

    acceptance: float
    facts: DrafterFacts = field(default_factory=lambda: DrafterFacts("scripted"))
    confidence: float | None = None
    second: float | None = None
    seconds: float = 0.0
    due_seconds: float = 0.0
    seed: int = 0
    num_due: int = 0
    took: float = 0.0

    def is_right(self, place: int, rank: int = 0) -> bool:
        """Whether the guess of a place is right, or the second one beside a wrong one."""
        chance = self.acceptance if rank == 0 else self.second or 0.0
        return _drawn(self.seed, place, rank) < chance

    def begin(self, request, prompt):
        self.num_due = 0

    def propose(self, wishes: Sequence[DraftWish]) -> list[Draft]:
        (wish,) = wishes
        count = min(wish.max_tokens, self.facts.max_tokens)
        tokens = 1 if self.facts.at_once else count
        self.took = self.seconds * tokens + self.due_seconds * self.num_due
        self.num_due = 0
        if self.second is None:
            own = [] if self.confidence is None else [self.confidence] * count
            return [Draft.chain(wish, [0] * count, own)]
        first, second = self.acceptance, (1 - self.acceptance) * self.second
        # (how likely, parent, rank): a chain, and a second guess beside each of its tokens; the likeliest first.
        nodes: list[tuple[float, int, int]] = []
        reached, parent = 1.0, -1
        for place in range(count):
            nodes.append((reached * first, place - 1, 0))
            nodes.append((reached * second, place - 1, 1))
            reached *= first
        ranked = sorted(range(len(nodes)), key=lambda index: (-nodes[index][0], index))
        number = {-1: -1}
        tokens_, parents, own = [], [], []
        for index in ranked[: wish.max_tokens]:
            _, parent, rank = nodes[index]
            if parent not in number:
                continue
            if rank == 0:
                number[parent + 1] = len(tokens_)
            tokens_.append(rank)
            parents.append(number[parent])
            own.append((first, second)[rank])
        return [Draft(wish.request, wish.num_known, tuple(tokens_), tuple(parents), tuple(own))]

    def observe(self, verified):
        self.num_due += len(verified.tokens)

    def end(self, request):
        pass


@dataclass
class VirtualMachine:
    """Steps of one request at a time. price: seconds of a step by its rows. noise: relative deviation; spikes: how often a
    step takes three times as long.
    """

    price: Callable[[int], float]
    noise: float = 0.0
    spikes: float = 0.0
    seed: int = 0
    num_requests: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(f"machine {self.seed}")

    def answer(
        self,
        speculator: Speculator,
        drafters: Sequence[Guesses],
        num_tokens: int,
        names: tuple[str, ...] | None = None,
    ) -> float:
        """Return the seconds of an answer's decode steps."""
        self.num_requests += 1
        request, by_name = (
            RequestId(self.num_requests),
            {each.facts.name: each for each in drafters},
        )
        speculator.begin(request, range(PROMPT_TOKENS), names)
        speculator.observe(Verified(request, PROMPT_TOKENS - 1, (0,), 0, 0))
        done, seconds = 1, 0.0
        while done < num_tokens:
            draft, took = self._draft(speculator, request, done, num_tokens)
            seconds += took
            chosen = [] if draft is None else [draft]
            rows = 1 + sum(len(each.tokens) for each in chosen)
            step = self.price(rows) * self._factor()
            seconds += step
            speculator.step_took(rows, step, is_plain=rows == 1)
            way: list[int] = []
            if draft is not None:
                name = speculator._served[request].offered
                way = _right_way(draft, by_name[name], done)
                speculator.count(request, len(draft.tokens), len(way))
            tokens = (0,) * (1 + len(way))
            speculator.observe(
                Verified(
                    request,
                    PROMPT_TOKENS + done - 1,
                    tokens,
                    rows - 1,
                    len(way),
                    rows=() if draft is None or draft.is_chain else tuple(n + 1 for n in way),
                )
            )
            done += len(tokens)
        speculator.end(request)
        return seconds

    def _draft(
        self, speculator: Speculator, request: RequestId, done: int, num_tokens: int
    ) -> tuple[Draft | None, float]:
        room = min(16, num_tokens - 1 - done)
        if room < 1 or not speculator.wants_any(1):
            return None, 0.0
        seconds = 0.0
        wish = DraftWish(request, PROMPT_TOKENS + done, 0, room)
        drafts = speculator.instant_drafts([wish])
        for drafter, asked in speculator.tasks([wish], drafts, 1):
            drafts = list(drafter.propose(asked))
            took = drafter.took * self._factor()  # type: ignore[attr-defined]
            seconds += took
            speculator.proposed(drafter, asked, drafts, took)
        drafts = [
            draft if len(draft.tokens) <= room else draft.kept(range(room)) for draft in drafts
        ]
        chosen = speculator.choose(drafts, 1)
        return (chosen[0] if chosen else None), seconds

    def _factor(self) -> float:
        factor = max(0.5, self._random.gauss(1.0, self.noise)) if self.noise else 1.0
        return factor * (3.0 if self._random.random() < self.spikes else 1.0)


def _right_way(draft: Draft, drafter: Guesses, done: int) -> list[int]:
    """Return the nodes of a draft that the model chooses: of each place the first guess if it is right, else the second."""
    way: list[int] = []
    parent = -1
    while True:
        place = done + len(way)
        right = None
        if drafter.is_right(place):
            right = 0
        elif drafter.is_right(place, 1):
            right = 1
        found = [
            node
            for node, (token, before) in enumerate(zip(draft.tokens, draft.parents, strict=True))
            if before == parent and token == right
        ]
        if not found:
            return way
        parent = found[0]
        way.append(parent)


def linear(slope: float) -> Callable[[int], float]:
    """Return the price of a machine on which each row more takes this share of a step."""
    return lambda rows: 0.01 * (1 + slope * (rows - 1))

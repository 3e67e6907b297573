"""Drafters that know the answer, as often as they are told to, or that propose nonsense."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from thermocline.speculation.contract import Draft, DrafterFacts, DraftWish, Verified


@dataclass
class ScriptedDrafter:
    """Proposes the tokens of known answers; each is right with probability `acceptance`, if those before it are.

    answers: by prompt, all that may come of it. The one that fits what was answered so far is proposed. branches: how many
    further tokens a tree around it has; 0 for chains.
    """

    acceptance: float
    answers: dict[tuple[int, ...], list[tuple[int, ...]]]
    facts: DrafterFacts = field(default_factory=lambda: DrafterFacts("scripted"))
    seed: int = 0
    branches: int = 0
    num_proposed: int = 0
    told: list[Verified] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._known: dict[int, list[int]] = {}
        self._prompts: dict[int, tuple[int, ...]] = {}

    def begin(self, request, prompt):
        self._prompts[request], self._known[request] = tuple(prompt), []

    def propose(self, wishes: list[DraftWish]) -> list[Draft]:
        return [draft for wish in wishes if (draft := self._draft(wish)) is not None]

    def _draft(self, wish: DraftWish) -> Draft | None:
        known = self._known[wish.request]
        prompt = self._prompts[wish.request]
        assert wish.num_known == len(prompt) + len(known), "a token was not told"
        assert wish.last_token == known[-1]
        for answer in self.answers.get(prompt, ()):
            if list(answer[: len(known)]) == known and len(answer) > len(known):
                rest = answer[len(known) : len(known) + wish.max_tokens]
                chance = random.Random(f"{self.seed} {prompt} {len(known)}").random
                tokens = [token if chance() < self.acceptance else token ^ 1 for token in rest]
                self.num_proposed += 1
                if self.branches:
                    return self._tree(wish, tokens)
                return Draft.chain(wish, tokens)
        return None

    def _tree(self, wish: DraftWish, way: list[int]) -> Draft:
        """Return a tree with this way down somewhere in it, and other branches of any depth before, beside and behind it."""
        rng = random.Random(f"{self.seed} {wish.num_known} {way}")
        way = way[: max(1, wish.max_tokens - self.branches)]
        nodes = [(token, index - 1) for index, token in enumerate(way)]
        while len(nodes) < min(len(way) + self.branches, wish.max_tokens):
            parent = rng.randint(-1, len(nodes) - 1)
            taken = {token for token, at in nodes if at == parent}
            nodes.append((rng.choice([n for n in range(256) if n not in taken]), parent))
        return tree_in_random_order(wish, nodes, rng)

    def observe(self, verified: Verified) -> None:
        known = self._known[verified.request]
        assert verified.position == len(self._prompts[verified.request]) + len(known) - 1
        assert len(verified.tokens) == 1 + verified.num_accepted
        assert verified.num_accepted <= verified.num_drafted
        known += verified.tokens
        self.told.append(verified)

    def end(self, request):
        del self._known[request], self._prompts[request]


def tree_in_random_order(wish: DraftWish, nodes: list[tuple[int, int]], rng) -> Draft:
    """Return a draft of nodes (token, parent) in any order that has parents first."""
    number = {-1: -1}
    waiting = [index for index, (_, parent) in enumerate(nodes) if parent == -1]
    order: list[int] = []
    while waiting:
        node = waiting.pop(rng.randrange(len(waiting)))
        number[node] = len(order)
        order.append(node)
        waiting += [index for index, (_, parent) in enumerate(nodes) if parent == node]
    tokens = tuple(nodes[node][0] for node in order)
    parents = tuple(number[nodes[node][1]] for node in order)
    return Draft(wish.request, wish.num_known, tokens, parents)


class HostileDrafter:
    """Proposes as many tokens as it may: repetitions, trees, ends of answers, and ids that no vocabulary has."""

    facts = DrafterFacts("hostile")

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self.requests: set[int] = set()

    def begin(self, request, prompt):
        self.requests.add(request)

    def propose(self, wishes: list[DraftWish]) -> list[Draft]:
        return [self._draft(wish) for wish in wishes]

    def _draft(self, wish: DraftWish) -> Draft:
        tokens = self._nonsense(wish)
        if self._random.random() < 0.5:
            return Draft.chain(wish, tokens)
        parents = [self._random.randint(-1, index - 1) for index in range(len(tokens))]
        nodes = list(dict.fromkeys(zip(tokens, parents, strict=True)))
        if len(nodes) < len(tokens):  # children of one token differ
            nodes = [(token, index - 1) for index, token in enumerate(tokens)]
        return tree_in_random_order(wish, nodes, self._random)

    def _nonsense(self, wish: DraftWish) -> list[int]:
        kind = self._random.randrange(4)
        if kind == 0:
            return [wish.last_token] * wish.max_tokens
        highest = (255, 263, 1 << 31)[kind - 1]
        lowest = -5 if kind == 3 else 0
        count = self._random.randint(1, wish.max_tokens)
        return [self._random.randint(lowest, highest) for _ in range(count)]

    def observe(self, verified: Verified) -> None:
        assert verified.request in self.requests

    def end(self, request):
        self.requests.remove(request)

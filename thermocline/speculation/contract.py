"""What a drafter is: the messages to and from it, and when it is asked. Pure; knows no scheduler and no chunk's arrays.

The model samples every token by itself, whatever was drafted. A draft only says which tokens a step computes ahead: those
that the model then chooses were right, and the first other one ends it. So a drafter can cost time, never change a text.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from thermocline.messages import Chunk, FloatArray, LayerIndex, RequestId

MAX_DRAFT_TOKENS: Final = 16
"""Of one request in one step. Verifying more costs as much as a prompt's chunk, and cuts off sooner than it ends."""
NO_INPUTS: Final[Mapping[LayerIndex, FloatArray]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class DraftWish:
    """A request whose next step has room for drafted tokens.

    num_known: tokens of its prompt and its answer so far, so the position of the first drafted one. last_token: the
    newest known token, which no step has computed. max_tokens: the most tokens that a draft may have, at least 1.
    """

    request: RequestId
    num_known: int
    last_token: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may follow the first `num_known` tokens of a request. It counts only as long as it has no more.

    parents: for each token the index of the one before it, -1 for the last known token; parents come before their
    children. A chain has -1, 0, 1, ... A tree's tokens are in order of how likely they are, with all before them; children
    of one token differ. confidence: the drafter's own estimate that each token is right, given that its
    parent is; () where it has none.
    """

    request: RequestId
    num_known: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    confidence: tuple[float, ...] = ()

    @classmethod
    def chain(
        cls, wish: DraftWish, tokens: Sequence[int], confidence: Sequence[float] = ()
    ) -> Draft:
        """Return a draft of tokens that follow each other."""
        parents = tuple(range(-1, len(tokens) - 1))
        return cls(wish.request, wish.num_known, tuple(tokens), parents, tuple(confidence))

    @property
    def is_chain(self) -> bool:
        """Whether each token follows the one before it."""
        return self.parents == tuple(range(-1, len(self.tokens) - 1))

    @property
    def depths(self) -> list[int]:
        """How many tokens each one's way has, itself included."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    def way_to(self, node: int) -> list[int]:
        """Return the nodes before a token, and itself."""
        way = [node]
        while (node := self.parents[node]) >= 0:
            way.append(node)
        return way[::-1]

    def kept(self, nodes: Sequence[int]) -> Draft:
        """Return the draft of some of its nodes, ascending, with all that are before them."""
        number = {-1: -1} | {node: index for index, node in enumerate(nodes)}
        return Draft(
            self.request,
            self.num_known,
            tuple(self.tokens[node] for node in nodes),
            tuple(number[self.parents[node]] for node in nodes),
            tuple(self.confidence[node] for node in nodes) if self.confidence else (),
        )


@dataclass(frozen=True, slots=True)
class Verified:
    """What came of a decode step of one request.

    position: of the first row that the step computed for it. tokens: what the model chose after that row, and after each
    row of a drafted token that was right, so 1 + num_accepted; less where the answer ended. The rows of right tokens
    stay, others are taken back and their positions computed again. num_drafted: rows of drafted tokens. drafter: whose;
    "" for none. rows: of right tokens, in order, counted from the first one; () are 1..num_accepted, those of a chain.
    moved: blocks of the cache that others replaced, which have their content, and by which.
    """

    request: RequestId
    position: int
    tokens: tuple[int, ...]
    num_drafted: int
    num_accepted: int
    drafter: str = ""
    rows: tuple[int, ...] = ()
    moved: tuple[tuple[int, int], ...] = ()

    @property
    def is_chain(self) -> bool:
        """Whether the rows that stay are the first ones."""
        return self.rows in ((), tuple(range(1, self.num_accepted + 1)))


@dataclass(frozen=True, slots=True)
class DrafterFacts:
    """What the engine must know of a drafter.

    name: as --speculate calls it. computes: it takes longer than a few microseconds, so `propose` runs as a job of the
    CPU's lane between two steps; the engine measures it. reads_hidden: `hidden_computed` is called for every chunk.
    max_tokens: the longest draft that it makes. reads_layers: of a drafter that reads hidden states, layers whose inputs
    it reads, too. reads_cache: it attends to the model's own keys and values. at_once: a draft takes as long as any other, however many tokens it has.
    """

    name: str
    computes: bool = False
    reads_hidden: bool = False
    max_tokens: int = MAX_DRAFT_TOKENS
    reads_layers: tuple[LayerIndex, ...] = ()
    at_once: bool = False
    reads_cache: bool = False


class Drafter(Protocol):
    """Proposes tokens. It owns what it remembers of each request.

    Calls for one request come in this order: `begin`; then in turns `propose`, if the engine wants a draft, and
    `observe`; at last `end`, at any time. `begin`, `observe` and `end` are called on the engine's loop and take
    microseconds; `propose` too, unless `facts.computes`. Calls never overlap, but a request may end between a wish and
    its draft, which is then of no use.
    """

    @property
    def facts(self) -> DrafterFacts:
        """The same for its whole life."""
        ...

    def begin(self, request: RequestId, prompt: Sequence[int]) -> None:
        """Remember a new request. Of its prompt nothing is computed yet."""
        ...

    def propose(self, wishes: Sequence[DraftWish]) -> Sequence[Draft]:
        """Return drafts of these requests, at most one for each, each of 1 to `max_tokens` tokens; none where it has no guess.

        The last `observe` of each request told its `last_token`, but for the first wish after a prompt. Tokens need not
        be possible: what a grammar or the vocabulary forbids is cut off before it is verified.
        """
        ...

    def observe(self, verified: Verified) -> None:
        """Take the tokens that became known in a step, drafted or not. Steps that only compute known tokens again are not told."""
        ...

    def end(self, request: RequestId) -> None:
        """Forget a request."""
        ...


def drafter_names(text: str) -> tuple[str, ...] | None:
    """Return the drafters of "auto", "off" or "NAME,NAME": None for auto, () for off. Raises ValueError."""
    if text == "auto":
        return None
    names = () if text == "off" else tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise ValueError(f"{text!r} is none of auto, off, and names of drafters with commas")
    return names


class HiddenReader(Protocol):
    """A drafter with `facts.reads_hidden` has this, too."""

    @property
    def facts(self) -> DrafterFacts:
        """The drafter's."""
        ...

    def hidden_computed(
        self, chunk: Chunk, x: FloatArray, inputs: Mapping[LayerIndex, FloatArray] = NO_INPUTS
    ) -> None:
        """Read x [T, D], the residual stream of a chunk's tokens behind the model's last layer, before the final norm.

        inputs: the same before each of `facts.reads_layers`, and perhaps before others.

        Called on the lane where drafters compute, before or with the head's job, chunk by chunk in the order in which they end; prompts, decode
        steps, and tokens that are computed again after a preemption. The last `segment.num_drafted` rows of a segment
        are drafted tokens: `observe` says which of these stay. Positions that were taken back come again. What a drafter
        keeps of a position may lie at the chunk's own places (`kv_slots`, block tables): these are shared, freed and
        taken back with the position. A request whose prefix was found computed begins behind it.
        """
        ...

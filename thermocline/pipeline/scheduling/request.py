"""One request as the scheduler sees it: its tokens, and how far they are scheduled and computed.

Only the scheduler and its parts hold one. Knows no other request, no queue and no chunk's arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from thermocline.messages import ChunkId, IntArray, RequestId, RequestOptions


class RequestStatus(Enum):
    """Whether a request may get chunks."""

    WAITING = auto()
    """In the queue for admission. It holds nothing of the cache."""
    RUNNING = auto()
    PREEMPTED = auto()
    """It keeps its blocks until its chunks in flight return. Then it is waiting."""
    FINISHED = auto()
    """It keeps its blocks until its chunks in flight return. Then it is removed."""


# CPython 3.11 takes 150 ns to look an enum's member up, and 20 ns for a global.
_RUNNING = RequestStatus.RUNNING


class Returning(Enum):
    """Whether what was evicted of a waiting request's prefix comes back from the second tier."""

    NOT_ASKED = auto()
    PREPARING = auto()
    """It waits until what its places hold now is copied."""
    PREPARED = auto()
    READING = auto()
    """It waits for its parts."""
    TRIED = auto()
    """It is not asked again before the request was admitted."""


@dataclass(slots=True)
class RequestCache:
    """What one request holds in the layers that keep all tokens; but for the keys, nothing while it waits."""

    root: bytes
    """Parent of the first block's key."""
    keys: list[bytes] = field(default_factory=list)
    """Keys of the first full blocks of known tokens, as far as they were needed."""
    blocks: list[int] = field(default_factory=list)
    table: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))
    """int32, long enough for all tokens: `blocks` for chunks. Entries stay as they are while a chunk is in flight."""
    num_full: int = 0
    """Leading blocks whose tokens are all computed. They are findable, if prefixes are shared."""
    num_matched: int = 0
    """Leading blocks that these layers had for it when it last looked for a prefix."""
    returning: Returning = Returning.NOT_ASKED
    """Where it is with parts of its prefix that only the second tier has. Written by request_spill."""
    num_expanded: int = 0
    """First tokens of its prompt, whose rows are computed with the expanded form of latent attention."""

    @property
    def is_returning(self) -> bool:
        """Whether the request waits for the second tier."""
        return self.returning is Returning.PREPARING or self.returning is Returning.READING


@dataclass(slots=True, eq=False)
class Request:
    """The mutable state of one request. Only one module writes each field.

    Half-open: tokens [0, computed) are computed, [computed, scheduled) are in flight, [scheduled,
    len(known)) wait. Both counts start again at each admission.
    """

    # Never changed.
    id: RequestId
    num_prompt_tokens: int
    max_total_tokens: int
    rank: tuple[int, int]
    """Priority and arrival. The request with the lowest rank is the most important."""
    options: RequestOptions
    # Written by request_blocks.
    cache: RequestCache
    # Written by the scheduler.
    known: list[int]
    """Token ids of the prompt and of the answer so far."""
    turn: int
    """Prompts of equal priority are served in this order."""
    num_scored: int | None = None
    """Prompt tokens whose results were computed; None if only the last token's logits are wanted."""
    scheduled: int = 0
    computed: int = 0
    in_flight: set[ChunkId] = field(default_factory=set)
    held: bool = False
    """No new chunk starts until `resume`."""
    # Written by admission.
    status: RequestStatus = RequestStatus.WAITING

    @property
    def wants_states(self) -> bool:
        """Whether its results are final hidden states instead of logits."""
        return self.options.pooling is not None

    @property
    def num_answer_tokens(self) -> int:
        """Tokens of its answer so far."""
        return len(self.known) - self.num_prompt_tokens

    @property
    def is_admitted(self) -> bool:
        """Whether it holds blocks, be it only until its chunks in flight return."""
        return self.status is not RequestStatus.WAITING

    @property
    def may_share(self) -> bool:
        """Whether it may use blocks that other requests computed: not if it wants results of every token."""
        return self.num_scored is None and not self.options.wants_routing

    @property
    def is_past_prompt(self) -> bool:
        """Whether every token of the prompt is scheduled."""
        return self.scheduled >= self.num_prompt_tokens

    @property
    def can_prefill(self) -> bool:
        """Whether prompt tokens, if any wait, may form a chunk."""
        # Logits of all tokens are large, and a reader takes one chunk's at a time.
        wants_all_logits = self.num_scored is not None and not self.wants_states
        return (
            self.status is _RUNNING and not self.held and not (wants_all_logits and self.in_flight)
        )

    @property
    def can_decode(self) -> bool:
        """Whether answer tokens wait for a chunk, and all tokens before them are computed."""
        return (
            self.num_prompt_tokens <= self.scheduled == self.computed < len(self.known)
            and self.status is _RUNNING
            and not self.held
        )

    def num_logits(self, end: int) -> int:
        """Return how many of the last tokens of [scheduled, end) need logits. None is scored twice."""
        if self.wants_states:
            return 0
        last = int(end == len(self.known))
        if self.num_scored is None or self.is_past_prompt:
            return last
        return max(end - max(self.scheduled, self.num_scored), last)

    def allowed(self, tokens: int, logits: int) -> int:
        """Return how many of `tokens` the next chunk may have, so that at most `logits` of them need logits."""
        if self.num_scored is None or self.wants_states:
            return tokens
        return min(tokens, max(0, self.num_scored - self.scheduled) + logits)

    def num_states(self, end: int) -> int:
        """Return how many of the last tokens of [scheduled, end) need their final hidden states, none of them twice."""
        if not self.wants_states:
            return 0
        if self.num_scored is None:
            return int(end == len(self.known))
        return max(end - max(self.scheduled, self.num_scored), 0)

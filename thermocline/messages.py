"""The messages that flow between stages: frozen, and complete when sent. Knows no stage.

CPU messages carry float32 arrays. T: tokens of a chunk, D: hidden, K: experts per token, E: experts, V: vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, NamedTuple, NewType, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from thermocline.errors import ThermoclineError

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int32]
ExpertIds = NDArray[np.int16]
"""The experts of each token and layer, best first: [T, layers, K]."""

RequestId = NewType("RequestId", int)
ChunkId = NewType("ChunkId", int)
LayerIndex = NewType("LayerIndex", int)
ExpertIndex = NewType("ExpertIndex", int)


class ExpertKey(NamedTuple):
    """One expert of one layer."""

    layer: LayerIndex
    expert: ExpertIndex

    @classmethod
    def of(cls, layer: int, expert: int) -> ExpertKey:
        """Return the key of plain numbers."""
        return cls(LayerIndex(layer), ExpertIndex(expert))


class BackendRole(StrEnum):
    """Which branch of the graph computes an expert: the device, the CPU, or a worker."""

    HOT = "hot"
    COLD = "cold"
    REMOTE = "remote"


class SegmentKind(StrEnum):
    """What the tokens of a segment are; prompt and decode may differ in arithmetic, nothing else."""

    PROMPT = "prompt"
    DECODE = "decode"


class StateUse(NamedTuple):
    """A segment's recurrent state: the slot that moves on with it, and snapshots to begin with and to take.

    load: the slot of the snapshot to begin with; None goes on with what `slot` holds, or with nothing at
    position 0. saves: after how many of the segment's tokens a copy goes to which slot, in order.
    """

    slot: int
    load: int | None = None
    saves: tuple[tuple[int, int], ...] = ()


class Segment(NamedTuple):
    """The rows start..start+length of a chunk: consecutive tokens of one request.

    A tuple, since one is made per answer and step, and a frozen dataclass takes five times as long.
    block_table: int32, the cache blocks of this request, enough for its last token's position.
    num_logits: how many of its last rows want logits. state: None where no layer is recurrent. num_states: how many of
    its last rows want their final hidden states instead. num_expanded: how many of its first tokens take the expanded
    form of latent attention. num_drafted: how many of its last tokens were guessed. level: of branches before this one.
    """

    request: RequestId
    start: int
    length: int
    kind: SegmentKind
    block_table: IntArray
    num_logits: int = 0
    state: StateUse | None = None
    num_states: int = 0
    num_expanded: int = 0
    num_drafted: int = 0
    level: int = 0


class CachePlaces(NamedTuple):
    """Where the keys and values of a chunk's tokens go, and those of its requests lie.

    slots: int32 [T]; segments: with the block tables of the layers that this is about. copies: int32 [n, 2], slots whose
    keys and values go to other slots once the chunk's own are there: tokens that several branches see. None for none.
    """

    slots: IntArray
    segments: tuple[Segment, ...]
    copies: IntArray | None = None


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Chunk:
    """Tokens that walk through the layers together, all of one kind.

    token_ids, positions, kv_slots: int32 [T]; logits_rows: int32, the rows that want logits, segment
    by segment.
    """

    id: ChunkId
    segments: tuple[Segment, ...]
    token_ids: IntArray
    positions: IntArray
    kv_slots: IntArray
    logits_rows: IntArray
    wants_routing: bool = False
    """Whether some of its requests want to know which experts are chosen."""
    window_places: CachePlaces | None = None
    """Of layers with a sliding window; None where they have no blocks of their own."""
    states_rows: IntArray | None = None
    """int32, the rows that want their final hidden states; None where no request does."""
    branch_places: CachePlaces | None = None
    """In place of `kv_slots` and `segments`, where guessed tokens form trees: a segment for each branch; None without."""
    embedded: FloatArray | None = None
    """float32 [layers, T, width], each layer's own embeddings of the tokens, from the embed stage on; None without any."""

    @property
    def chunk(self) -> Chunk:
        """Itself: every message has the chunk that it belongs to."""
        return self

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def is_prompt(self) -> bool:
        """Whether the tokens are a prompt's, whose products may have an arithmetic of their own."""
        return self.segments[0].kind is SegmentKind.PROMPT

    def places(self, *, window: bool) -> CachePlaces:
        """Return where layers with or without a sliding window keep this chunk's keys and values."""
        if window and self.window_places is not None:
            return self.window_places
        return self.branch_places or CachePlaces(self.kv_slots, self.segments)

    @property
    def has_branches(self) -> bool:
        """Whether guessed tokens of some request form a tree."""
        return self.branch_places is not None

    def embedded_at(self, layer: LayerIndex) -> FloatArray | None:
        """Return a layer's own embeddings of the tokens, float32 [T, width]; None without any."""
        return None if self.embedded is None else self.embedded[layer]

    @property
    def requests(self) -> tuple[RequestId, ...]:
        """The requests that have tokens in this chunk."""
        return tuple(segment.request for segment in self.segments)

    def results_by_segment(self) -> Iterator[tuple[Segment, slice, slice]]:
        """Return each segment with its part of `StepResult.logits`, and of `StepResult.states`."""
        logits_end = states_end = 0
        for segment in self.segments:
            logits = slice(logits_end, logits_end + segment.num_logits)
            states = slice(states_end, states_end + segment.num_states)
            logits_end, states_end = logits.stop, states.stop
            yield segment, logits, states


@dataclass(frozen=True, slots=True)
class Hidden:
    """The residual stream before `layer` (or, between attend and router, inside it). x: float32 [T, D]."""

    chunk: Chunk
    layer: LayerIndex
    x: FloatArray


@dataclass(frozen=True, slots=True)
class Routing:
    """expert_ids int32 [T, K] in slot order (best first); weights float32 [T, K]."""

    expert_ids: IntArray
    weights: FloatArray


class ExpertDispatch(NamedTuple):
    """The token-expert pairs of a chunk's layer that one backend computes, sorted by expert, then by token.

    experts, counts: int32 [n], the experts, ascending, and the number of pairs of each. rows, slots: int32
    [pairs], the token's row and the expert's slot among the token's experts (0..K-1). weights: float32 [pairs].
    """

    experts: IntArray
    counts: IntArray
    rows: IntArray
    slots: IntArray
    weights: FloatArray


@dataclass(frozen=True, slots=True)
class Lease:
    """Where the experts of a hot dispatch are on the device; they stay there until `release`.

    slots: int32 [n], one for each expert of the dispatch; -1 marks an expert that is uploaded for this work
    alone. release: gives the slots back; a second call does nothing. ahead: experts of the next layer with experts,
    which are uploaded while this one is computed.
    """

    slots: IntArray
    release: Callable[[], None]
    ahead: tuple[ExpertKey, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerEnding:
    """What is left of a layer that norms its experts' sum. stream: float32 [T, D], the residual stream before the experts.

    finish: returns the layer's output, float32 [T, D], from the experts' sums [T, D].
    """

    stream: FloatArray
    finish: Callable[[FloatArray], FloatArray]


@dataclass(frozen=True, slots=True)
class LayerWork:
    """What the router decided for one chunk and layer.

    residual: float32 [T, D], to which the expert sum is added; x: float32 [T, D], the normalised
    input of the experts. dispatches: by role, only of backends that have work. lease: of the hot dispatch,
    where the set of hot experts changes; the hot branch releases it, or whoever drops its message. ending: of a layer
    that does not end with the expert sum; residual is zeros then.
    """

    chunk: Chunk
    layer: LayerIndex
    residual: FloatArray
    x: FloatArray
    routing: Routing
    dispatches: Mapping[BackendRole, ExpertDispatch]
    lease: Lease | None = None
    ending: LayerEnding | None = None

    @property
    def stream(self) -> FloatArray:
        """The residual stream before the routed experts: float32 [T, D]."""
        return self.residual if self.ending is None else self.ending.stream

    @property
    def expects(self) -> frozenset[BackendRole]:
        """The backends whose partial sums the combine needs."""
        return frozenset(self.dispatches)


@dataclass(frozen=True, slots=True)
class PartialSum:
    """One backend's weighted expert outputs for one chunk and layer, not yet added up.

    rows, slots: int32 [n]; values: float32 [n, D]. Combine adds each token's outputs in slot order, so the
    split between backends does not change a bit of the result. also: the other parts of the same dispatch,
    where several workers computed it.
    """

    chunk: Chunk
    layer: LayerIndex
    role: BackendRole
    rows: IntArray
    slots: IntArray
    values: FloatArray
    also: tuple[ExpertResult, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerSum:
    """A layer's result from a backend that computed every slot of every token. x: float32 [T, D].

    It is added up in the order of partial sums, so it is equal to the bit.
    """

    chunk: Chunk
    layer: LayerIndex
    role: BackendRole
    x: FloatArray


ExpertResult: TypeAlias = PartialSum | LayerSum


@dataclass(frozen=True, slots=True)
class Joined:
    """One layer's routed work with the results of all backends that it expected."""

    work: LayerWork
    results: tuple[ExpertResult, ...]

    @property
    def chunk(self) -> Chunk:
        """The chunk that it belongs to."""
        return self.work.chunk


@dataclass(frozen=True, slots=True)
class StepResult:
    """The end of a chunk's walk. logits: float32 [len(chunk.logits_rows), V].

    states: float32 [len(chunk.states_rows), D], behind the final norm; None where no row wants them.
    """

    chunk: Chunk
    logits: FloatArray
    states: FloatArray | None = None


@dataclass(frozen=True, slots=True)
class PrefetchHint:
    """Where a chunk is, and what it selected there.

    experts: int32 [n], the cold experts of `layer` that are about to be read; none while the chunk is only on its way to the
    layer. shares: float32 [n], the part of the chunk's tokens that selected each. num_tokens: of the chunk. streams: the chunk
    wants most experts of every layer; else residual, float32 [T, D], and token_ids, int32 [T], tell what the next layers may
    want. continues: more of the same prompt follows.
    """

    chunk: ChunkId
    layer: LayerIndex
    experts: IntArray
    shares: FloatArray
    num_tokens: int
    streams: bool
    continues: bool
    residual: FloatArray | None = None
    token_ids: IntArray | None = None


StageMessage: TypeAlias = Chunk | Hidden | LayerWork | ExpertResult | Joined | StepResult


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class DraftFigures:
    """What speculation did for a request. why_off: why its latest tokens were not drafted, or not verified; None if they were."""

    num_drafted: int = 0
    """Drafted tokens that steps verified."""
    num_accepted: int = 0
    """Those of them that the model chose, before the answer ended."""
    why_off: str | None = None


@dataclass(frozen=True, slots=True)
class Timings:
    """Where a request's time went. All times in seconds."""

    queue_s: float
    """From submission to its first chunk."""
    prompt_s: float
    """From its first chunk to its first token."""
    decode_s: float
    """From its first token to its last."""
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    """Prompt tokens that were found computed when the request started."""
    drafts: DraftFigures = DraftFigures()

    @property
    def prompt_tokens_per_s(self) -> float:
        """Prompt tokens computed per second of `prompt_s`."""
        num_computed = self.num_prompt_tokens - self.num_cached_tokens
        return num_computed / self.prompt_s if self.prompt_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after the first per second of `decode_s`."""
        return (self.num_output_tokens - 1) / self.decode_s if self.decode_s else 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its natural log-probability under the raw model."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """New tokens of one request; the last event of a request carries `finish_reason` and `timings`.

    token_ids: the new tokens, an end token included; text: what became printable, which may lag
    behind the tokens; logprobs, top_logprobs: one entry per token when the request asked for them.
    """

    request: RequestId
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    top_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    finish_reason: FinishReason | None = None
    stop: str | None = None
    """The stop string that ended the answer."""
    timings: Timings | None = None
    routing: ExpertIds | None = None
    """At the end, if asked for: of all tokens but the last, which is not computed."""
    reasoning: str = ""
    """Of `Engine.chat`: what became printable of the model's reasoning, which is no part of `text` there."""


class Pooling(IntEnum):
    """How a prompt's final hidden states become one vector. The values are GGUF's."""

    NONE = 0
    MEAN = 1
    CLS = 2
    """The first token's."""
    LAST = 3
    RANK = 4
    """A score of how well two texts fit, by a matrix of its own: no embedding."""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """How a request is served, whatever its tokens.

    priority: the lower value is served first. cache_salt: only requests of the same one share what is computed, so that
    nobody learns from its speed what others asked. slot: where its tokens are remembered; None for any.
    """

    priority: int = 0
    cache_salt: str | None = None
    wants_prompt_logits: bool = False
    """Events bring the logits after every prompt token by chunks, the next when the last was taken. All of it is computed."""
    pooling: Pooling | None = None
    """An event brings the prompt's embedding, made in this way; such a request has no answer."""
    wants_routing: bool = False
    """The last event brings the experts of every token; so the prompt is computed whole too."""
    wants_timings: bool = False
    """Every event has timings, not only the last."""
    max_unread_entries: int | None = None
    """Tokens, with likely ones, that may wait to be taken; at more the answer ends with ReaderTooSlowError. None: no limit."""
    speculate: tuple[str, ...] | None = None
    """Names of drafters that may propose its tokens; () for none, None for the engine's own choice."""
    slot: int | None = None


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """How much of a prompt is computed, in tokens; those on their way count by the layers behind them.

    num_cached of them were found computed. elapsed_s: since its first chunk was begun.
    """

    request: RequestId
    num_computed: int
    num_total: int
    num_cached: int = 0
    elapsed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PromptLogits:
    """Logits after each prompt token start..start+len(logits). logits: float32 [tokens, V]."""

    request: RequestId
    start: int
    logits: FloatArray


@dataclass(frozen=True, slots=True)
class PromptEmbedding:
    """The prompt's final hidden states as one vector, float32 [D], not normalised."""

    request: RequestId
    vector: FloatArray


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The terminal event of a request that could not be finished."""

    request: RequestId
    error: ThermoclineError


PromptEvent: TypeAlias = PromptProgress | PromptLogits | PromptEmbedding
RequestEvent: TypeAlias = TokenEvent | PromptEvent | RequestFailed

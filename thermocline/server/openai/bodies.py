"""The types of OpenAI's answers: whole ones, and the chunks of streams.

UNSET fields are left out of the JSON; None is null.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

if TYPE_CHECKING:
    from thermocline.messages import Timings

# JSON has no infinity; OpenAI sends this for a token of probability 0.
LEAST_LOGPROB: Final = -9999.0


class Usage(msgspec.Struct):
    """Token counts of a whole request: each prompt once, and the tokens of all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int]


class ExpertsBody(msgspec.Struct):
    """Where chosen experts were found while the request was answered, those of other requests included.

    The names are those of `ExpertFigures`.
    """

    hits: int
    misses: int
    prefetched: int
    cpu: int
    bytes_h2d: int
    bytes_disk: int
    overlap_ratio: float


class TimingsBody(msgspec.Struct):
    """Times in milliseconds under llama-server's names; queue_ms, ttft_ms and draft_off are thermocline's.

    draft_off: why the latest tokens were not drafted, if so.
    """

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float
    queue_ms: float
    ttft_ms: float
    draft_n: int
    draft_n_accepted: int
    draft_off: str | UnsetType = UNSET
    experts: ExpertsBody | UnsetType = UNSET


class TopLogprob(msgspec.Struct):
    """One of the likeliest tokens at one position of a chat's answer."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobBody(msgspec.Struct):
    """A token of a chat's answer, and the likeliest tokens at its position."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """The log-probabilities of a chat's answer, one entry for each token."""

    content: list[TokenLogprobBody]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """The log-probabilities of a completion; the first token of a prompt has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class FunctionBody(msgspec.Struct):
    """A called function, or the next piece of its arguments."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallBody(msgspec.Struct):
    """A call of a tool; in a stream, id, type and name come first, then pieces of the arguments."""

    function: FunctionBody
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class Delta(msgspec.Struct):
    """What a chunk adds to a chat's message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallBody] | UnsetType = UNSET


class ChatMessage(msgspec.Struct):
    """The message that answers a chat."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallBody] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """One whole answer to a chat."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    token_ids: list[int] | UnsetType = UNSET
    routed_experts: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    """What a chunk adds to one answer to a chat."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET
    routed_experts: str | UnsetType = UNSET


class CompletionChoice(msgspec.Struct):
    """One continuation, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET
    routed_experts: str | UnsetType = UNSET


class ChatBody(msgspec.Struct):
    """A whole answer to a chat."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    timings: TimingsBody
    thermocline: dict[str, Any] | UnsetType = UNSET


class CompletionBody(msgspec.Struct):
    """A whole answer to a completion."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage
    timings: TimingsBody
    thermocline: dict[str, Any] | UnsetType = UNSET


ChoiceBody: TypeAlias = ChatChoice | ChatChunkChoice | CompletionChoice


class PromptProgressBody(msgspec.Struct):
    """Tokens of the prompt: all, found in the cache, and computed so far; and milliseconds so far."""

    total: int
    cache: int
    processed: int
    time_ms: float


def timings_body(timings: Timings, ttft_s: float) -> TimingsBody:
    """Return the body of one answer's timings; ttft_s: from the request's header to the first token."""
    return TimingsBody(
        cache_n=timings.num_cached_tokens,
        prompt_n=timings.num_prompt_tokens - timings.num_cached_tokens,
        prompt_ms=timings.prompt_s * 1e3,
        prompt_per_second=timings.prompt_tokens_per_s,
        predicted_n=timings.num_output_tokens,
        predicted_ms=timings.decode_s * 1e3,
        predicted_per_second=timings.decode_tokens_per_s,
        queue_ms=timings.queue_s * 1e3,
        ttft_ms=ttft_s * 1e3,
        draft_n=timings.drafts.num_drafted,
        draft_n_accepted=timings.drafts.num_accepted,
        draft_off=timings.drafts.why_off or UNSET,
    )

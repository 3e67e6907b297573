"""Request bodies of chat completions and completions: JSON to typed requests, and those to what the engine
takes. Owns which fields there are and which values are refused; ranges of sampling are checked by SamplingParams,
messages by the engine.
"""

from __future__ import annotations

import uuid
from typing import Any, Final, TypeVar

import msgspec

from thermocline.errors import RequestError
from thermocline.messages import RequestOptions
from thermocline.sampling.params import SamplingParams
from thermocline.server.answering import MAX_CHOICES_PER_PROMPT
from thermocline.server.errors import NotSupportedError
from thermocline.server.structured import FormatFields

T = TypeVar("T")

MAX_PROMPTS: Final = 1024
MAX_BAD_WORDS: Final = 128
_MIN_PING_S: Final = 1
_MAX_PING_S: Final = 3600

# Same name and meaning here and in SamplingParams; None means its default.
_PLAIN_FIELDS: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "repeat_last_n",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "include_stop_str_in_output",
)

_WITHOUT_EFFECT: Final = (
    "user",
    "store",
    "metadata",
    "service_tier",
    "verbosity",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "prediction",
)


class StreamOptions(msgspec.Struct):
    """How a stream is sent."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class AnswerRequest(msgspec.Struct, kw_only=True):
    """What both kinds of request share. None is the default of `SamplingParams`."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    echo: bool | None = None
    cache_prompt: bool | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_routed_experts: bool | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    sse_ping_interval: float | None = None
    trace: bool | None = None
    structured_outputs: Any = None
    response_format: Any = None
    # Taken from OpenAI's own clients, and without effect here.
    user: Any = None
    store: Any = None
    metadata: Any = None
    service_tier: Any = None
    verbosity: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    prediction: Any = None

    @property
    def num_answers(self) -> int:
        """How many answers to each prompt. Raises RequestError."""
        if self.n is None:
            return 1
        if not 1 <= self.n <= MAX_CHOICES_PER_PROMPT:
            raise RequestError(
                f"n is {self.n}: it must be an integer in 1..{MAX_CHOICES_PER_PROMPT}", param="n"
            )
        return self.n

    @property
    def ping_after_s(self) -> float | None:
        """After how much silence a stream says that it is alive; None is the server's. Raises RequestError."""
        wanted = self.sse_ping_interval
        if wanted is not None and not _MIN_PING_S <= wanted <= _MAX_PING_S:
            raise RequestError(
                f"sse_ping_interval is {wanted:g}: choose {_MIN_PING_S} to {_MAX_PING_S} seconds",
                param="sse_ping_interval",
            )
        return wanted

    @property
    def without_effect(self) -> list[str]:
        """The given fields that change nothing."""
        return [name for name in _WITHOUT_EFFECT if getattr(self, name) is not None]

    def options(self) -> RequestOptions:
        """Return how the engine is to serve this. Raises RequestError."""
        _ = self.ping_after_s  # checked here for answers that are not streamed too
        salt = self.cache_salt
        if salt == "":
            raise RequestError("cache_salt is empty: leave it out", param="cache_salt")
        if self.cache_prompt is False:
            salt = uuid.uuid4().hex  # shared with nobody
        return RequestOptions(
            cache_salt=salt,
            wants_routing=bool(self.return_routed_experts),
            wants_timings=bool(self.timings_per_token),
        )

    def bad_word_texts(self) -> list[str]:
        """Return the words that the answer may not hold. Raises RequestError."""
        words = self.bad_words or []
        if len(words) > MAX_BAD_WORDS or not all(words):
            raise RequestError(
                f"bad_words must be at most {MAX_BAD_WORDS} words that are not empty",
                param="bad_words",
            )
        return words

    def _sampling(self, num_logprobs: int | None) -> SamplingParams:
        given = {name: getattr(self, name) for name in _PLAIN_FIELDS}
        given["repetition_penalty"] = _first(self.repetition_penalty, self.repeat_penalty)
        given["max_tokens"] = _first(self.max_completion_tokens, self.max_tokens)
        given["stop"] = (self.stop,) if isinstance(self.stop, str) else self.stop
        given["logprobs"] = num_logprobs
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})


class ChatRequest(AnswerRequest, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    thinking_token_budget: int | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    modalities: list[str] | None = None
    audio: Any = None
    web_search_options: Any = None

    def sampling_params(self) -> SamplingParams:
        """Return how to answer. Raises RequestError for what can not be done."""
        if self.modalities not in (None, ["text"]):
            raise RequestError("this model writes text only", param="modalities")
        for name in ("audio", "web_search_options"):
            if getattr(self, name) is not None:
                raise RequestError(f"{name} is not accepted here: leave it out", param=name)
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        params = self._sampling((self.top_logprobs or 0) if self.logprobs else None)
        if params.max_tokens == 0:
            raise RequestError("max_tokens is 0: ask for at least one token", param="max_tokens")
        return params

    @property
    def continues_final(self) -> bool:
        """Whether the answer goes on with the last message. Raises RequestError.

        An assistant's last message is gone on with unless the request says otherwise.
        """
        is_assistant = bool(self.messages) and self.messages[-1].get("role") == "assistant"
        wanted = self.continue_final_message
        if wanted is None:
            return is_assistant and self.add_generation_prompt is not True
        if wanted and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other: send one",
                param="continue_final_message",
            )
        if wanted and not is_assistant:
            raise RequestError(
                "continue_final_message needs a last message of the assistant",
                param="continue_final_message",
            )
        return wanted

    def format_fields(self) -> FormatFields:
        """Return the fields that shape the answer."""
        return FormatFields(
            self.tools,
            self.tool_choice,
            self.parallel_tool_calls,
            self.response_format,
            self.structured_outputs,
            self.reasoning_effort,
            self.chat_template_kwargs,
            self.thinking_token_budget,
        )


class CompletionRequest(AnswerRequest, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: str | list[int | str | list[int]]
    logprobs: int | None = None
    suffix: str | None = None
    best_of: int | None = None

    def sampling_params(self) -> SamplingParams:
        """Return how to answer. Raises RequestError for what can not be done."""
        if self.suffix:
            raise NotSupportedError("this version can not write before a suffix", param="suffix")
        if self.best_of is not None and self.best_of != self.num_answers:
            raise RequestError(
                f"best_of is {self.best_of}: all answers are sent, leave it out", param="best_of"
            )
        return self._sampling(self.logprobs)

    def format_fields(self) -> FormatFields:
        """Return the fields that shape the answer."""
        return FormatFields(
            response_format=self.response_format, structured_outputs=self.structured_outputs
        )

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, each as text or token ids. Raises RequestError for a mixture."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [item for item in self.prompt if isinstance(item, int)]
        if len(ids) == len(self.prompt):
            return [ids]
        prompts = [item for item in self.prompt if not isinstance(item, int)]
        if ids:
            raise RequestError("prompt mixes token ids with prompts: send either", param="prompt")
        if len(prompts) > MAX_PROMPTS:
            raise RequestError(
                f"prompt is a list of {len(prompts)} prompts: send at most {MAX_PROMPTS} at a time",
                param="prompt",
            )
        return prompts


def _first(*values: T | None) -> T | None:
    """Return the first value that was given."""
    return next((value for value in values if value is not None), None)


def refuse_non_text(messages: list[dict[str, Any]]) -> None:
    """Raise for parts that are no text even if they carry one; the engine sees only their text."""
    for index, message in enumerate(messages):
        content = message.get("content")
        for place, part in enumerate(content if isinstance(content, list) else ()):
            kind = part.get("type", "text") if isinstance(part, dict) else "text"
            if kind != "text":
                where = f"messages[{index}].content[{place}]"
                raise RequestError(
                    f"{where} is of type {kind!r}: this model reads text only", param=where
                )

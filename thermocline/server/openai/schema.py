"""Request bodies: JSON to typed requests, and those to what the engine takes.

Fields that nobody knows are ignored. Owns which known ones are refused; ranges are checked by
SamplingParams, messages by the engine.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

import msgspec

from thermocline.errors import RequestError
from thermocline.sampling.params import SamplingParams
from thermocline.server.answering import MAX_CHOICES_PER_PROMPT
from thermocline.server.errors import NotSupportedError

T = TypeVar("T")

MAX_PROMPTS: Final = 1024

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
)


class StreamOptions(msgspec.Struct):
    """How a stream is sent."""

    include_usage: bool | None = None


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
    ignore_eos: bool | None = None
    min_tokens: int | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

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
    tools: list[Any] | None = None
    tool_choice: Any = None
    response_format: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    web_search_options: Any = None
    chat_template: Any = None

    def sampling_params(self) -> SamplingParams:
        """Return how to answer. Raises RequestError for what this version can not do."""
        self._refuse_unsupported()
        _refuse_non_text(self.messages)
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        params = self._sampling((self.top_logprobs or 0) if self.logprobs else None)
        if params.max_tokens == 0:
            raise RequestError("max_tokens is 0: ask for at least one token", param="max_tokens")
        return params

    def _refuse_unsupported(self) -> None:
        if self.tools and self.tool_choice != "none":
            raise NotSupportedError(
                'this version can not call tools: leave tools out, or send tool_choice "none"',
                param="tools",
            )
        wanted = self.response_format
        if wanted is not None and not (isinstance(wanted, dict) and wanted.get("type") == "text"):
            raise NotSupportedError(
                'this version can not hold an answer to a format: send {"type": "text"}',
                param="response_format",
            )
        if self.modalities not in (None, ["text"]):
            raise RequestError("this model writes text only", param="modalities")
        for name in ("audio", "web_search_options", "chat_template"):
            if getattr(self, name) is not None:
                raise RequestError(f"{name} is not accepted here: leave it out", param=name)


class CompletionRequest(AnswerRequest, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: str | list[int | str | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    def sampling_params(self) -> SamplingParams:
        """Return how to answer. Raises RequestError for what this version can not do."""
        if self.echo:
            raise NotSupportedError("this version can not echo the prompt", param="echo")
        if self.suffix:
            raise NotSupportedError("this version can not write before a suffix", param="suffix")
        if self.best_of is not None and self.best_of != 1:
            raise RequestError(
                f"best_of is {self.best_of}: this version gives one answer per request, leave it out",
                param="best_of",
            )
        return self._sampling(self.logprobs)

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


def _refuse_non_text(messages: list[dict[str, Any]]) -> None:
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

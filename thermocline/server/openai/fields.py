"""The fields that chats and completions share, and their translation to the engine's options.

Owns which of them there are; ranges of sampling are checked by SamplingParams.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from thermocline.errors import RequestError
from thermocline.messages import RequestOptions
from thermocline.sampling.params import MAX_STOP_CHARS
from thermocline.server.core.bodies import sampling_params, speculate_names
from thermocline.server.core.generation_jobs import MAX_CHOICES_PER_PROMPT

if TYPE_CHECKING:
    from thermocline.sampling.params import SamplingParams

T = TypeVar("T")

MAX_BAD_WORDS: Final = 128
_MAX_SLOT: Final = (1 << 20) - 1
_MIN_PING_S: Final = 1
_MAX_PING_S: Final = 3600

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


class GenerationRequest(msgspec.Struct, kw_only=True):
    """The fields of both kinds of request. None is the default of `SamplingParams`."""

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
    id_slot: int | None = None
    speculate: str | None = None
    return_token_ids: bool | None = None
    return_routed_experts: bool | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    sse_ping_interval: float | None = None
    trace: bool | None = None
    structured_outputs: Any = None
    response_format: Any = None
    # OpenAI's clients send these; they have no effect here.
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
        """Silence after which a stream sends a ping; None for the server's setting. Raises RequestError."""
        wanted = self.sse_ping_interval
        if wanted is not None and not _MIN_PING_S <= wanted <= _MAX_PING_S:
            raise RequestError(
                f"sse_ping_interval is {wanted:g}: choose {_MIN_PING_S} to {_MAX_PING_S} seconds",
                param="sse_ping_interval",
            )
        return wanted

    @property
    def without_effect(self) -> list[str]:
        """The given fields that have no effect."""
        return [name for name in _WITHOUT_EFFECT if getattr(self, name) is not None]

    def options(self) -> RequestOptions:
        """Return the engine's options for this request. Raises RequestError."""
        _ = self.ping_after_s  # raises for answers that are not streamed, too
        salt = self.cache_salt
        if salt == "":
            raise RequestError("cache_salt is empty: leave it out", param="cache_salt")
        if self.cache_prompt is False:
            salt = uuid.uuid4().hex  # no other request has it
        return RequestOptions(
            cache_salt=salt,
            wants_routing=bool(self.return_routed_experts),
            wants_timings=bool(self.timings_per_token),
            slot=self._slot(),
            speculate=speculate_names(self.speculate),
        )

    def _slot(self) -> int | None:
        """Return the slot asked for; -1 is any. Raises RequestError."""
        slot = self.id_slot
        if slot is not None and not -1 <= slot <= _MAX_SLOT:
            raise RequestError(
                f"id_slot is {slot}: choose 0 to {_MAX_SLOT}, or -1", param="id_slot"
            )
        return None if slot == -1 else slot

    def bad_word_texts(self) -> list[str]:
        """Return the words that the answer must not contain. Raises RequestError."""
        words = self.bad_words or []
        fit = all(0 < len(word) <= MAX_STOP_CHARS for word in words)
        if len(words) > MAX_BAD_WORDS or not fit:
            raise RequestError(
                f"bad_words must be at most {MAX_BAD_WORDS} words of 1 to {MAX_STOP_CHARS} characters",
                param="bad_words",
            )
        return words

    def _sampling(self, num_logprobs: int | None) -> SamplingParams:
        return sampling_params(
            self,
            repetition_penalty=_first(self.repetition_penalty, self.repeat_penalty),
            max_tokens=_first(self.max_completion_tokens, self.max_tokens),
            logprobs=num_logprobs,
        )


def _first(*values: T | None) -> T | None:
    """Return the first value that was given."""
    return next((value for value in values if value is not None), None)

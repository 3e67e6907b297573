"""From token events to OpenAI's answer bodies, whole or in chunks. Pure: knows neither sockets nor requests'
ways through the engine.
"""

from __future__ import annotations

import codecs
import time
import uuid
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

from thermocline.errors import EngineError
from thermocline.messages import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.messages import Timings, TokenEvent, TokenLogprob

Body = dict[str, Any]

# JSON has no infinity; this is what OpenAI sends for a token that could not happen.
_LEAST_LOGPROB: Final = -9999.0
_FINISH_REASONS: Final = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class Vocabulary(Protocol):
    """What answers need to know of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes:
        """Exact bytes of one token."""
        ...

    def is_control(self, token_id: int) -> bool:
        """True for tokens that are no text."""
        ...


class AnswerForm(ABC):
    """The bodies of one answer. A stream calls `prelude` once and `pieces` with each event in order."""

    id_prefix: ClassVar[str]
    object_name: ClassVar[str]
    chunk_name: ClassVar[str]

    def __init__(
        self, model: str, fingerprint: str, vocabulary: Vocabulary, *, include_usage: bool
    ) -> None:
        self._vocabulary = vocabulary
        self._include_usage = include_usage
        self._head = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def prelude(self) -> list[Body]:
        """Return the chunks that come before any token."""
        return []

    def pieces(self, event: TokenEvent) -> list[Body]:
        """Return the chunks of one event; none while it has nothing to show."""
        bodies = []
        if event.text or event.logprobs:
            choice = self._delta(event.text, self._logprobs((event,)))
            bodies.append(self._chunk([choice]))
        if event.finish_reason is None:
            return bodies
        bodies.append(self._chunk([self._finish(_finish_reason(event))]))
        timings = _timings_of(event)
        if self._include_usage:
            bodies.append(self._chunk([]) | {"usage": usage_body(timings)})
        bodies[-1]["timings"] = timings_body(timings)
        return bodies

    def whole(self, events: Sequence[TokenEvent]) -> Body:
        """Return the body of an answer that is not streamed; the last event is the final one."""
        last = events[-1]
        text = "".join(event.text for event in events)
        choice = {
            "index": 0,
            "logprobs": self._logprobs(events),
            "finish_reason": _finish_reason(last),
        }
        timings = _timings_of(last)
        return self._head | {
            "object": self.object_name,
            "choices": [choice | self._content(text)],
            "usage": usage_body(timings),
            "timings": timings_body(timings),
        }

    def _chunk(self, choices: list[Body]) -> Body:
        body = self._head | {"object": self.chunk_name, "choices": choices}
        return body | {"usage": None} if self._include_usage else body

    def _token_text(self, token_id: int) -> str:
        return self._vocabulary.token_bytes(token_id).decode("utf-8", "replace")

    @abstractmethod
    def _delta(self, text: str, logprobs: Body | None) -> Body:
        """Return the choice of a chunk with text."""

    @abstractmethod
    def _finish(self, reason: str) -> Body:
        """Return the choice of the chunk that says why the answer ended."""

    @abstractmethod
    def _content(self, text: str) -> Body:
        """Return the fields of the whole answer's choice that hold `text`."""

    @abstractmethod
    def _logprobs(self, events: Sequence[TokenEvent]) -> Body | None:
        """Return the log-probabilities of the events' tokens, one entry each; None without any."""


class ChatForm(AnswerForm):
    """chat.completion and its chunks."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def prelude(self) -> list[Body]:
        """Return the chunk that says who speaks."""
        return [self._chunk([_chat_choice({"role": "assistant", "content": ""})])]

    def _delta(self, text: str, logprobs: Body | None) -> Body:
        return _chat_choice({"content": text}) | {"logprobs": logprobs}

    def _finish(self, reason: str) -> Body:
        return _chat_choice({}) | {"finish_reason": reason}

    def _content(self, text: str) -> Body:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _logprobs(self, events: Sequence[TokenEvent]) -> Body | None:
        content = []
        for event in events:
            for chosen, top in zip(event.logprobs, event.top_logprobs, strict=True):
                others = [self._entry(other) for other in top]
                content.append(self._entry(chosen) | {"top_logprobs": others})
        return {"content": content, "refusal": None} if content else None

    def _entry(self, token: TokenLogprob) -> Body:
        return {
            "token": self._token_text(token.token_id),
            "logprob": max(token.logprob, _LEAST_LOGPROB),
            "bytes": list(self._vocabulary.token_bytes(token.token_id)),
        }


class CompletionForm(AnswerForm):
    """text_completion, whose chunks have the same name."""

    id_prefix = "cmpl"
    object_name = "text_completion"
    chunk_name = "text_completion"

    def __init__(
        self, model: str, fingerprint: str, vocabulary: Vocabulary, *, include_usage: bool
    ) -> None:
        super().__init__(model, fingerprint, vocabulary, include_usage=include_usage)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0

    def _delta(self, text: str, logprobs: Body | None) -> Body:
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": None}

    def _finish(self, reason: str) -> Body:
        return self._delta("", None) | {"finish_reason": reason}

    def _content(self, text: str) -> Body:
        return {"text": text}

    def _logprobs(self, events: Sequence[TokenEvent]) -> Body | None:
        chosen = [token for event in events for token in event.logprobs]
        tops = [top for event in events for top in event.top_logprobs]
        if not chosen:
            return None
        return {
            "tokens": [self._token_text(token.token_id) for token in chosen],
            "token_logprobs": [max(token.logprob, _LEAST_LOGPROB) for token in chosen],
            "top_logprobs": [
                {self._token_text(t.token_id): max(t.logprob, _LEAST_LOGPROB) for t in top}
                for top in tops
            ],
            "text_offset": [self._offset(token.token_id) for token in chosen],
        }

    def _offset(self, token_id: int) -> int:
        """Return the characters of the answer before this token, the next one of the answer."""
        offset = self._num_chars
        if not self._vocabulary.is_control(token_id):
            self._num_chars += len(self._decoder.decode(self._vocabulary.token_bytes(token_id)))
        return offset


def usage_body(timings: Timings) -> Body:
    """Return the token counts as OpenAI names them. Nothing is cached between requests."""
    return {
        "prompt_tokens": timings.num_prompt_tokens,
        "completion_tokens": timings.num_output_tokens,
        "total_tokens": timings.num_prompt_tokens + timings.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def timings_body(timings: Timings) -> Body:
    """Return where the time went, in milliseconds, under llama-server's names and two of our own."""
    return {
        "cache_n": 0,
        "prompt_n": timings.num_prompt_tokens,
        "prompt_ms": timings.prompt_s * 1e3,
        "prompt_per_second": timings.prompt_tokens_per_s,
        "predicted_n": timings.num_output_tokens,
        "predicted_ms": timings.decode_s * 1e3,
        "predicted_per_second": timings.decode_tokens_per_s,
        "queue_ms": timings.queue_s * 1e3,
        "ttft_ms": (timings.queue_s + timings.prompt_s) * 1e3,
    }


def _chat_choice(delta: Body) -> Body:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}


def _finish_reason(event: TokenEvent) -> str:
    reason = None if event.finish_reason is None else _FINISH_REASONS.get(event.finish_reason)
    if reason is None:
        raise EngineError(f"the answer ended early ({event.finish_reason}): send the request again")
    return reason


def _timings_of(event: TokenEvent) -> Timings:
    assert event.timings is not None, "the last event of a request has timings"
    return event.timings

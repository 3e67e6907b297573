"""What the encoders of OpenAI's chats and completions share: heads, counts and last chunks.

Pure: steps in, bodies and frames out. Knows no socket and no engine.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import msgspec

from thermocline.server.core.errors import error_body
from thermocline.server.core.sse import Framing, frame
from thermocline.server.core.steps import AnswerStep, PromptStep
from thermocline.server.openai.bodies import (
    LEAST_LOGPROB,
    PromptProgressBody,
    Usage,
    timings_body,
)
from thermocline.server.openai.figures import experts_body, routed_experts, together

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from thermocline.server.core.generation_jobs import GenerationJob
    from thermocline.server.core.steps import ChoiceEnd, GenerationStep
    from thermocline.server.openai.bodies import ChoiceBody


class TokenDecoder(Protocol):
    """What encoders need of a tokenizer. add_space_prefix: it puts a space before a prompt's first token."""

    add_space_prefix: bool

    def token_bytes(self, token_id: int) -> bytes:
        """Exact bytes of one token."""
        ...

    def is_control(self, token_id: int) -> bool:
        """Whether the token is no text."""
        ...


@dataclass(frozen=True, slots=True)
class EncoderOptions:
    """What an answer shows beside its text. extension: fields of the body's `thermocline` object."""

    include_usage: bool = False
    continuous_usage: bool = False
    timings_per_token: bool = False
    return_progress: bool = False
    return_token_ids: bool = False
    trace_id: bool = False
    extension: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that answers, and its tokens."""

    model: str
    fingerprint: str
    vocabulary: TokenDecoder


EVENTS = Framing(error=lambda error: frame(error_body(error)), end=b"data: [DONE]\n\n")
"""OpenAI's streams: unnamed events, the last of them `[DONE]`."""


class OpenAIEncoder(ABC):
    """Encodes one answer, once: either `prelude` and `frames`, or `take` and `body`."""

    id_prefix: ClassVar[str]
    object_name: ClassVar[str]
    chunk_name: ClassVar[str]

    def __init__(self, served: ServedModel, job: GenerationJob, options: EncoderOptions) -> None:
        self._vocabulary = served.vocabulary
        self._options = options
        self._job = job
        self._head = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": served.model,
            "system_fingerprint": served.fingerprint,
        }
        head = msgspec.json.encode(self._head | {"object": self.chunk_name})
        # Encoded once: all chunks of an answer begin and end alike.
        self._chunk_start = b'data: %b,"choices":' % head[:-1]
        self._chunk_end = b',"usage":null}\n\n' if options.include_usage else b"}\n\n"
        self._num_prompt_tokens = sum(map(len, job.prompts))
        self._num_tokens = 0
        self._num_cached: dict[int, int] = {}
        self._ends: dict[int, ChoiceEnd] = {}
        self._token_ids: defaultdict[int, list[int]] = defaultdict(list)

    @property
    def prelude(self) -> bytes:
        """The chunks that come before any token."""
        return b""

    def frames(self, step: GenerationStep) -> bytes:
        """Return the chunks of one step; empty while it has nothing to show."""
        self._count(step)
        if isinstance(step, PromptStep):
            return self._prompt_frames(step)
        extras = self._running_extras(step)
        frames = [self._chunk([choice], extras) for choice in self._pieces(step)]
        if step.end is not None:
            self._ends[step.choice] = step.end
            frames += self._end_frames(step.choice, step.end)
        return b"".join(frames)

    def take(self, step: GenerationStep) -> int:
        """Note the next step of an answer that is not streamed; return how many bytes it adds, about."""
        self._count(step)
        num_bytes = self._take(step)
        if isinstance(step, AnswerStep):
            if self._options.return_token_ids:
                self._token_ids[step.choice] += step.token_ids
                num_bytes += 8 * len(step.token_ids)
            if step.end is not None:
                self._ends[step.choice] = step.end
        return num_bytes

    def body(self) -> Iterator[bytes]:
        """Yield the body of an answer that is not streamed, part by part, given all of its steps."""
        head = msgspec.json.encode(self._head | {"object": self.object_name})
        yield head[:-1] + b',"choices":['
        for index in range(self._job.num_choices):
            choice = self._whole_choice(index, str(self._ends[index].reason))
            choice.routed_experts = routed_experts(self._ends[index])
            if self._options.return_token_ids:
                choice.token_ids = self._token_ids.pop(index, [])
            yield (b"," if index else b"") + msgspec.json.encode(choice)
        yield b"]," + msgspec.json.encode({"usage": self._usage()} | self._last_extras())[1:]

    def _count(self, step: GenerationStep) -> None:
        if isinstance(step, PromptStep):
            self._num_cached[step.choice] = step.num_cached
        else:
            self._num_tokens += len(step.token_ids)

    def _chunk(self, choices: Sequence[ChoiceBody], extras: dict[str, Any] | None = None) -> bytes:
        encoded = msgspec.json.encode(choices)
        if not extras:
            return b"%b%b%b" % (self._chunk_start, encoded, self._chunk_end)
        if self._options.include_usage:
            extras = {"usage": None} | extras
        return b"%b%b,%b\n\n" % (self._chunk_start, encoded, msgspec.json.encode(extras)[1:])

    def _prompt_frames(self, step: PromptStep) -> bytes:
        choices = self._prompt_pieces(step)
        frames = [self._chunk([choice]) for choice in choices]
        if self._options.return_progress and not step.logprobs:
            progress = PromptProgressBody(
                step.num_total, step.num_cached, step.num_computed, step.elapsed_s * 1e3
            )
            frames.append(self._chunk([self._nothing(step.choice)], {"prompt_progress": progress}))
        return b"".join(frames)

    def _end_frames(self, index: int, end: ChoiceEnd) -> list[bytes]:
        """Return the chunks that end a choice; those of the last choice have the whole request's figures."""
        finish = self._nothing(index)
        finish.finish_reason, finish.routed_experts = str(end.reason), routed_experts(end)
        if len(self._ends) < self._job.num_choices:
            return [self._chunk([finish])]
        extras = self._last_extras()
        if not self._options.include_usage:
            return [self._chunk([finish], extras)]
        return [self._chunk([finish]), self._chunk([], extras | {"usage": self._usage()})]

    def _running_extras(self, step: AnswerStep) -> dict[str, Any] | None:
        if not (self._options.continuous_usage or self._options.timings_per_token):
            return None
        extras: dict[str, Any] = {}
        if self._options.continuous_usage:
            extras["usage"] = self._usage()
        if self._options.timings_per_token and step.timings is not None:
            extras["timings"] = timings_body(step.timings, step.ttft_s)
        return extras

    def _last_extras(self) -> dict[str, Any]:
        timings = together(list(self._ends.values()))
        timings.experts = experts_body(list(self._ends.values()))
        extras: dict[str, Any] = {"timings": timings}
        extension = dict(self._options.extension)
        if self._options.trace_id:
            extension["trace_id"] = " ".join(str(end.request) for end in self._ends.values())
        if extension:
            extras["thermocline"] = extension
        return extras

    def _usage(self) -> Usage:
        firsts = [count for choice, count in self._num_cached.items() if choice % self._job.n == 0]
        return Usage(
            self._num_prompt_tokens,
            self._num_tokens,
            self._num_prompt_tokens + self._num_tokens,
            {"cached_tokens": sum(firsts)},
            {"reasoning_tokens": sum(end.num_reasoning_tokens for end in self._ends.values())},
        )

    def _prompt_pieces(self, step: PromptStep) -> list[ChoiceBody]:
        """Return the choices of the chunks that show a computed part of the prompt."""
        return []

    @abstractmethod
    def _pieces(self, step: AnswerStep) -> list[ChoiceBody]:
        """Return the choices of the chunks that show a step, without its end."""

    @abstractmethod
    def _nothing(self, index: int) -> ChoiceBody:
        """Return a choice that adds nothing."""

    @abstractmethod
    def _take(self, step: GenerationStep) -> int:
        """Keep what `_whole_choice` needs of a step; return how many bytes it has, about."""

    @abstractmethod
    def _whole_choice(self, index: int, reason: str) -> ChoiceBody:
        """Return one choice of a whole answer, which ended for `reason`, and keep nothing of it."""


def known_logprob(logprob: float) -> float:
    """Return `logprob` as JSON can hold it."""
    return max(logprob, LEAST_LOGPROB)

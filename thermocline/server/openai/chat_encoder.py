"""Encodes chat.completion and its chunks. Pure."""

from __future__ import annotations

import uuid
from collections import defaultdict
from typing import TYPE_CHECKING, Any, assert_never

import msgspec

from thermocline.server.core.steps import AnswerStep
from thermocline.server.openai.bodies import (
    ChatChoice,
    ChatChunkChoice,
    ChatLogprobs,
    ChatMessage,
    Delta,
    FunctionBody,
    TokenLogprobBody,
    ToolCallBody,
    TopLogprob,
)
from thermocline.server.openai.encoder import OpenAIEncoder, known_logprob
from thermocline.text.pieces import ReasoningPiece, TextPiece, ToolCallArguments, ToolCallBegin

if TYPE_CHECKING:
    from collections.abc import Iterable

    from thermocline.messages import TokenLogprob
    from thermocline.server.core.generation_jobs import GenerationJob
    from thermocline.server.core.steps import GenerationStep
    from thermocline.server.openai.bodies import ChoiceBody
    from thermocline.server.openai.encoder import EncoderOptions, ServedModel
    from thermocline.text.pieces import Piece


class ChatEncoder(OpenAIEncoder):
    """chat.completion and its chunks."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(
        self, served: ServedModel, job: GenerationJob, options: EncoderOptions, prefix: str = ""
    ) -> None:
        """prefix: text that each answer begins with, before the model's own."""
        super().__init__(served, job, options)
        self._prefix = prefix
        self._messages = [_Message(prefix) for _ in range(job.num_choices)]
        self._logprob_texts: defaultdict[int, list[bytes]] = defaultdict(list)
        """Encoded as they come: as objects they take ten times the memory."""

    @property
    def prelude(self) -> bytes:
        """The chunks that say who speaks, one for each choice."""
        first = Delta(role="assistant", content=self._prefix)
        return b"".join(
            self._chunk([ChatChunkChoice(index, first)]) for index in range(self._job.num_choices)
        )

    def _pieces(self, step: AnswerStep) -> list[ChoiceBody]:
        choices = [ChatChunkChoice(step.choice, _delta(piece)) for piece in step.pieces]
        shows_ids = self._options.return_token_ids and step.token_ids
        if not (step.logprobs or shows_ids):
            return [*choices]
        if not choices:
            choices.append(ChatChunkChoice(step.choice, Delta(content="")))
        if step.logprobs:
            choices[0].logprobs = self._logprobs((step,))
        if shows_ids:
            choices[0].token_ids = list(step.token_ids)
        return [*choices]

    def _nothing(self, index: int) -> ChoiceBody:
        return ChatChunkChoice(index, Delta())

    def _take(self, step: GenerationStep) -> int:
        if not isinstance(step, AnswerStep):
            return 0
        num_bytes = self._messages[step.choice].take(step.pieces)
        if (logprobs := self._logprobs((step,))) is not None:
            encoded = msgspec.json.encode(logprobs.content)[1:-1]
            self._logprob_texts[step.choice].append(encoded)
            num_bytes += len(encoded)
        return num_bytes

    def _whole_choice(self, index: int, reason: str) -> ChoiceBody:
        logprobs = None
        if texts := self._logprob_texts.pop(index, None):
            content: Any = msgspec.Raw(b"[%b]" % b",".join(texts))
            logprobs = ChatLogprobs(content)
        return ChatChoice(index, self._messages[index].body(), logprobs, reason)

    def _logprobs(self, steps: Iterable[AnswerStep]) -> ChatLogprobs | None:
        content = []
        for step in steps:
            for chosen, top in zip(step.logprobs, step.top_logprobs, strict=True):
                others = [TopLogprob(*self._entry(other)) for other in top]
                content.append(TokenLogprobBody(*self._entry(chosen), others))
        return ChatLogprobs(content) if content else None

    def _entry(self, token: TokenLogprob) -> tuple[str, float, list[int]]:
        raw = self._vocabulary.token_bytes(token.token_id)
        return raw.decode("utf-8", "replace"), known_logprob(token.logprob), list(raw)


def _delta(piece: Piece) -> Delta:
    match piece:
        case TextPiece(text):
            return Delta(content=text)
        case ReasoningPiece(text):
            # Some clients read one name, some the other.
            return Delta(reasoning_content=text, reasoning=text)
        case ToolCallBegin(index, name):
            return Delta(tool_calls=[_call_begin(index, name)])
        case ToolCallArguments(index, text):
            return Delta(tool_calls=[ToolCallBody(FunctionBody(text), index=index)])


def _call_begin(index: int, name: str) -> ToolCallBody:
    return ToolCallBody(
        FunctionBody("", name), index=index, id=f"call_{uuid.uuid4().hex[:24]}", type="function"
    )


class _Message:
    """A message that grows piece by piece."""

    def __init__(self, prefix: str) -> None:
        self._texts: list[str] = [prefix] if prefix else []
        self._thoughts: list[str] = []
        self._calls: dict[int, tuple[ToolCallBody, list[str]]] = {}

    def take(self, pieces: Iterable[Piece]) -> int:
        """Add the pieces; return how many characters they have."""
        num_chars = 0
        for piece in pieces:
            match piece:
                case TextPiece(text):
                    self._texts.append(text)
                case ReasoningPiece(text):
                    self._thoughts.append(text)
                case ToolCallBegin(index, text):
                    self._calls[index] = _call_begin(index, text), []
                case ToolCallArguments(index, text):
                    self._calls[index][1].append(text)
                case _:
                    assert_never(piece)
            num_chars += len(text)
        return num_chars

    def body(self) -> ChatMessage:
        """Return the whole message."""
        has_text = self._texts or not self._calls
        message = ChatMessage("".join(self._texts) if has_text else None)
        if self._thoughts:
            message.reasoning_content = message.reasoning = "".join(self._thoughts)
        if self._calls:
            message.tool_calls = [call for call, _ in self._calls.values()]
            for call, texts in self._calls.values():
                call.function.arguments = "".join(texts)
        return message

"""Encodes steps as Ollama's lines. Pure: knows no socket and no engine."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final

import msgspec

from thermocline.server.core.blocks import BlockEnd, BlockKind, BlockMore, BlockSplitter
from thermocline.server.core.bodies import JsonObject
from thermocline.server.core.steps import AnswerStep, EndReason

if TYPE_CHECKING:
    from collections.abc import Iterator

    from thermocline.server.core.steps import ChoiceEnd, GenerationStep

_NS_PER_S: Final = 1e9


def line(body: JsonObject) -> bytes:
    """Return the body as one line of a stream."""
    return msgspec.json.encode(body) + b"\n"


class OllamaEncoder(ABC):
    """Encodes one answer.

    created_at: the time in ISO 8601; every line of an answer carries the one of its start.
    """

    prelude: Final = b""

    def __init__(self, model: str, created_at: str) -> None:
        self._head: JsonObject = {"model": model, "created_at": created_at}
        self._splitter = BlockSplitter()
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[JsonObject] = []
        self._last = JsonObject()
        self.load_s = 0.0
        """How long the request waited for its model, in seconds."""

    def frames(self, step: GenerationStep) -> bytes:
        """Return the lines of one step; empty while it has nothing to show."""
        return b"".join(map(line, self.bodies(step)))

    def bodies(self, step: GenerationStep) -> list[JsonObject]:
        """Return the lines of one step as bodies. A tool call is shown when it is whole."""
        shown = [self._shown(event) for event in self._splitter.events(step)]
        bodies = [self._head | body | {"done": False} for body in shown if body is not None]
        if isinstance(step, AnswerStep) and step.end is not None:
            bodies.append(self._head | self._content("", "", []) | self._end_fields(step.end))
        return bodies

    def take(self, step: GenerationStep) -> int:
        """Note the next step of an answer that is not streamed; return how many bytes it adds, about."""
        num_bytes = 0
        for body in self.bodies(step):
            said = self._said(body)
            for texts, name in ((self._texts, self.text_field), (self._thoughts, "thinking")):
                texts.append(said.get(name, ""))
                num_bytes += len(texts[-1])
            self._calls += said.get("tool_calls", ())
            self._last = body
        return num_bytes

    def body(self) -> Iterator[bytes]:
        """Yield the answer that is not streamed; the last step ended it."""
        content = self._content("".join(self._texts), "".join(self._thoughts), self._calls)
        yield msgspec.json.encode(self._last | content)

    def loaded(self, reason: str = "load") -> JsonObject:
        """Return the answer to a request that only wants the model to be loaded, or unloaded, as `reason` says."""
        return self._head | self._content("", "", []) | {"done": True, "done_reason": reason}

    @property
    @abstractmethod
    def text_field(self) -> str:
        """The field that holds the text."""

    @abstractmethod
    def _content(self, text: str, thinking: str, calls: list[JsonObject]) -> JsonObject:
        """Return the fields that hold text, reasoning and calls."""

    @abstractmethod
    def _said(self, body: JsonObject) -> JsonObject:
        """Return the part of `body` that `_content` made."""

    def _end_fields(self, end: ChoiceEnd) -> JsonObject:
        timings = end.timings
        return {
            "done": True,
            "done_reason": "length" if end.reason is EndReason.LENGTH else "stop",
            "total_duration": round(end.latency_s * _NS_PER_S),
            "load_duration": round(self.load_s * _NS_PER_S),
            "prompt_eval_count": timings.num_prompt_tokens,
            "prompt_eval_duration": round(timings.prompt_s * _NS_PER_S),
            "eval_count": timings.num_output_tokens,
            "eval_duration": round(timings.decode_s * _NS_PER_S),
        }

    def _shown(self, event: BlockMore | BlockEnd | object) -> JsonObject | None:
        match event:
            case BlockMore() if event.block.kind is BlockKind.TEXT:
                return self._content(event.text, "", [])
            case BlockMore() if event.block.kind is BlockKind.REASONING:
                return self._content("", event.text, [])
            case BlockEnd() if event.block.kind is BlockKind.TOOL_CALL:
                arguments = event.block.arguments()
                if arguments is None:
                    return None
                function = {"name": event.block.tool, "arguments": arguments}
                call = {"id": f"call_{uuid.uuid4().hex}", "function": function}
                return self._content("", "", [call])
            case _:
                return None


class OllamaChatEncoder(OllamaEncoder):
    """Answers of /api/chat."""

    text_field = "content"

    def _content(self, text: str, thinking: str, calls: list[JsonObject]) -> JsonObject:
        message: JsonObject = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = calls
        return {"message": message}

    def _said(self, body: JsonObject) -> JsonObject:
        said: JsonObject = body["message"]
        return said


class OllamaGenerateEncoder(OllamaEncoder):
    """Answers of /api/generate; requests have no tools there."""

    text_field = "response"

    def _content(self, text: str, thinking: str, calls: list[JsonObject]) -> JsonObject:
        return {"response": text} | ({"thinking": thinking} if thinking else {})

    def _said(self, body: JsonObject) -> JsonObject:
        return body

"""Encodes steps as Anthropic's message, whole or as events. Pure: knows no socket and no engine."""

from __future__ import annotations

import hashlib
import uuid
from typing import TYPE_CHECKING, Final, assert_never

import msgspec

from thermocline.server.core.blocks import (
    Block,
    BlockBegin,
    BlockEnd,
    BlockKind,
    BlockMore,
    BlockSplitter,
)
from thermocline.server.core.sse import typed_frames
from thermocline.server.core.steps import AnswerStep, EndReason

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from thermocline.server.core.blocks import BlockEvent
    from thermocline.server.core.bodies import JsonObject
    from thermocline.server.core.steps import ChoiceEnd, GenerationStep

PING: Final[JsonObject] = {"type": "ping"}


class MessageEncoder:
    """Encodes one message.

    num_prompt_tokens: of the whole prompt. The end of the message says how many of them came from the cache.
    """

    def __init__(self, model: str, num_prompt_tokens: int) -> None:
        self._id = f"msg_{uuid.uuid4().hex}"
        self._model = model
        self._num_prompt_tokens = num_prompt_tokens
        self._splitter = BlockSplitter()
        self._content: list[JsonObject] = []
        self._end: ChoiceEnd | None = None

    @property
    def prelude(self) -> bytes:
        """The frames before any step."""
        start = self._message([], None, self._usage(0))
        return typed_frames([{"type": "message_start", "message": start}, PING])

    def frames(self, step: GenerationStep) -> bytes:
        """Return the frames of one step; empty while it has nothing to show."""
        return typed_frames(self.events(step))

    def events(self, step: GenerationStep) -> list[JsonObject]:
        """Return the events of one step; none while it has nothing to show."""
        events = _event_bodies(self._splitter.events(step))
        if isinstance(step, AnswerStep) and step.end is not None:
            usage = self._final_usage(step.end)
            events += [
                {"type": "message_delta", "delta": _stop(step.end), "usage": usage},
                {"type": "message_stop"},
            ]
        return events

    def take(self, step: GenerationStep) -> int:
        """Note the next step of an answer that is not streamed; return how many bytes it adds, about."""
        num_bytes = 0
        for event in self._splitter.events(step):
            if isinstance(event, BlockMore):
                num_bytes += len(event.text)
            elif isinstance(event, BlockEnd) and _is_usable(event.block):
                self._content.append(_whole_block(event.block))
        if isinstance(step, AnswerStep) and step.end is not None:
            self._end = step.end
        return num_bytes

    def body(self) -> Iterator[bytes]:
        """Yield the message that is not streamed; the last step ended it."""
        stop = None if self._end is None else _stop(self._end)
        usage = self._usage(0) if self._end is None else self._final_usage(self._end)
        yield msgspec.json.encode(self._message(self._content, stop, usage))

    def _message(
        self, content: list[JsonObject], stop: JsonObject | None, usage: JsonObject
    ) -> JsonObject:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **(stop or {"stop_reason": None, "stop_sequence": None}),
            "usage": usage,
        }

    def _usage(self, num_output_tokens: int, num_cached_tokens: int = 0) -> JsonObject:
        """Return the counts; input_tokens are those that were not read from the cache."""
        return {
            "input_tokens": self._num_prompt_tokens - num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached_tokens,
            "output_tokens": num_output_tokens,
        }

    def _final_usage(self, end: ChoiceEnd) -> JsonObject:
        return self._usage(end.timings.num_output_tokens, end.timings.num_cached_tokens)


def _stop(end: ChoiceEnd) -> JsonObject:
    match end.reason:
        case EndReason.TOOL_CALLS:
            reason = "tool_use"
        case EndReason.LENGTH:
            reason = "max_tokens"
        case EndReason.STOP:
            reason = "end_turn" if end.stop is None else "stop_sequence"
        case _:
            assert_never(end.reason)
    return {"stop_reason": reason, "stop_sequence": end.stop}


def _event_bodies(events: Iterable[BlockEvent]) -> list[JsonObject]:
    bodies: list[JsonObject] = []
    for event in events:
        index = event.block.index
        match event:
            case BlockBegin():
                block = _empty_block(event.block)
                bodies.append(
                    {"type": "content_block_start", "index": index, "content_block": block}
                )
            case BlockMore():
                bodies.append(_delta(index, _more(event.block.kind, event.text)))
            case BlockEnd():
                if event.block.kind is BlockKind.REASONING:
                    signature = _signature(event.block.text)
                    bodies.append(
                        _delta(index, {"type": "signature_delta", "signature": signature})
                    )
                bodies.append({"type": "content_block_stop", "index": index})
    return bodies


def _delta(index: int, delta: JsonObject) -> JsonObject:
    return {"type": "content_block_delta", "index": index, "delta": delta}


def _more(kind: BlockKind, text: str) -> JsonObject:
    match kind:
        case BlockKind.TEXT:
            return {"type": "text_delta", "text": text}
        case BlockKind.REASONING:
            return {"type": "thinking_delta", "thinking": text}
        case BlockKind.TOOL_CALL:
            return {"type": "input_json_delta", "partial_json": text}


def _empty_block(block: Block) -> JsonObject:
    match block.kind:
        case BlockKind.TEXT:
            return {"type": "text", "text": ""}
        case BlockKind.REASONING:
            return {"type": "thinking", "thinking": "", "signature": ""}
        case BlockKind.TOOL_CALL:
            return {
                "type": "tool_use",
                "id": f"toolu_{uuid.uuid4().hex}",
                "name": block.tool,
                "input": {},
            }


def _is_usable(block: Block) -> bool:
    return block.kind is not BlockKind.TOOL_CALL or block.arguments() is not None


def _whole_block(block: Block) -> JsonObject:
    body = _empty_block(block)
    match block.kind:
        case BlockKind.TEXT:
            body["text"] = block.text
        case BlockKind.REASONING:
            body |= {"thinking": block.text, "signature": _signature(block.text)}
        case BlockKind.TOOL_CALL:
            body["input"] = block.arguments()
    return body


def _signature(thinking: str) -> str:
    """Return a checksum: some clients keep only thinking that is signed."""
    return hashlib.blake2b(thinking.encode("utf-8", "replace"), digest_size=16).hexdigest()

"""Encodes steps as OpenAI's response object, whole or as events. Pure: knows no socket and no engine."""

from __future__ import annotations

import itertools
import uuid
from typing import TYPE_CHECKING, Any, Final

import msgspec

from thermocline.server.core.blocks import (
    Block,
    BlockBegin,
    BlockEnd,
    BlockKind,
    BlockMore,
    BlockSplitter,
)
from thermocline.server.core.errors import describe, message_of
from thermocline.server.core.sse import typed_frames
from thermocline.server.core.steps import AnswerStep, EndReason

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from thermocline.server.core.blocks import BlockEvent
    from thermocline.server.core.bodies import JsonObject
    from thermocline.server.core.steps import ChoiceEnd, GenerationStep
    from thermocline.server.responses.schema import ResponsesRequest

_ID_PREFIXES: Final = {
    BlockKind.TEXT: "msg",
    BlockKind.REASONING: "rs",
    BlockKind.TOOL_CALL: "fc",
}
_CONTENT_NAMES: Final = {
    BlockKind.TEXT: "output_text",
    BlockKind.REASONING: "reasoning_text",
    BlockKind.TOOL_CALL: "function_call_arguments",
}

# OpenAI's client has types for these codes, and for more that are about images.
_ERROR_CODES: Final = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


class ResponseEncoder:
    """Encodes one response."""

    def __init__(self, request: ResponsesRequest, model: str, created_at: int) -> None:
        self._head = {"id": f"resp_{uuid.uuid4().hex}", "object": "response"} | {
            "created_at": created_at,
            "model": model,
        }
        self._echo = _echo(request)
        self._splitter = BlockSplitter()
        self._numbers = itertools.count()
        self._output: list[JsonObject] = []
        self._item: JsonObject = {}
        self._whole: JsonObject = {}

    @property
    def prelude(self) -> bytes:
        """The frames before any step; they number the events from 0."""
        response = self._response("in_progress")
        created = self._event("response.created", response=response)
        return typed_frames([created, self._event("response.in_progress", response=response)])

    def frames(self, step: GenerationStep) -> bytes:
        """Return the frames of one step; empty while it has nothing to show."""
        return typed_frames(self.events(step))

    def events(self, step: GenerationStep) -> list[JsonObject]:
        """Return the events of one step; none while it has nothing to show."""
        events = self._block_events(self._splitter.events(step))
        if isinstance(step, AnswerStep) and step.end is not None:
            response = self._ended(step.end)
            events.append(self._event(f"response.{response['status']}", response=response))
        return events

    def failure(self, error: BaseException) -> bytes:
        """Return the frame that ends a stream which failed."""
        code = _ERROR_CODES.get(describe(error).status, "server_error")
        described = {"code": code, "message": message_of(error)}
        response = self._response("failed", error=described)
        return typed_frames([self._event("response.failed", response=response)])

    def take(self, step: GenerationStep) -> int:
        """Note the next step of an answer that is not streamed; return how many bytes it adds, about."""
        num_bytes = 0
        for event in self.events(step):
            self._whole = event.get("response", self._whole)
            num_bytes += len(event.get("delta", ""))
        return num_bytes

    def body(self) -> Iterator[bytes]:
        """Yield the response that is not streamed; the last step ended it."""
        yield msgspec.json.encode(self._whole)

    def _event(self, kind: str, **fields: Any) -> JsonObject:  # noqa: ANN401 - JSON
        return {"type": kind, "sequence_number": next(self._numbers)} | fields

    def _ended(self, end: ChoiceEnd) -> JsonObject:
        timings = end.timings
        usage = {
            "input_tokens": timings.num_prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": timings.num_cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": timings.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": end.num_reasoning_tokens},
            "total_tokens": timings.num_prompt_tokens + timings.num_output_tokens,
        }
        if end.reason is EndReason.LENGTH:
            why = {"reason": "max_output_tokens"}
            return self._response("incomplete", incomplete_details=why, usage=usage)
        return self._response("completed", usage=usage)

    def _response(self, status: str, **fields: Any) -> JsonObject:  # noqa: ANN401 - JSON
        open_fields = {"error": None, "incomplete_details": None, "usage": None}
        output = list(self._output)
        return self._head | {"status": status, "output": output} | self._echo | open_fields | fields

    def _block_events(self, events: Iterable[BlockEvent]) -> list[JsonObject]:
        bodies: list[JsonObject] = []
        for event in events:
            match event:
                case BlockBegin():
                    bodies += self._begin(event.block)
                case BlockMore():
                    bodies.append(self._content_event(event.block, "delta", delta=event.text))
                case BlockEnd():
                    bodies += self._end(event.block)
        return bodies

    def _begin(self, block: Block) -> list[JsonObject]:
        self._item = {"id": f"{_ID_PREFIXES[block.kind]}_{uuid.uuid4().hex}"}
        if block.kind is BlockKind.TOOL_CALL:
            self._item["call_id"] = f"call_{uuid.uuid4().hex}"
        added = self._event(
            "response.output_item.added",
            output_index=block.index,
            item=self._item | _item_body(block, "in_progress", is_begun=False),
        )
        if block.kind is BlockKind.TOOL_CALL:
            return [added]
        return [added, self._part_event("added", block)]

    def _end(self, block: Block) -> list[JsonObject]:
        item = self._item | _item_body(block, "incomplete" if block.is_cut else "completed")
        self._output.append(item)
        if block.kind is BlockKind.TOOL_CALL:
            done = [
                self._content_event(block, "done", name=block.tool, arguments=item["arguments"])
            ]
        else:
            done = [
                self._content_event(block, "done", text=block.text),
                self._part_event("done", block),
            ]
        event = self._event("response.output_item.done", output_index=block.index, item=item)
        return [*done, event]

    def _part_event(self, what: str, block: Block) -> JsonObject:
        kind = f"response.content_part.{what}"
        place = {"item_id": self._item["id"], "output_index": block.index, "content_index": 0}
        return self._event(kind, **place, part=_part(block))

    def _content_event(self, block: Block, what: str, **fields: Any) -> JsonObject:  # noqa: ANN401 - JSON
        """Return the event that tells of the block's content."""
        place: JsonObject = {"item_id": self._item["id"], "output_index": block.index}
        if block.kind is not BlockKind.TOOL_CALL:
            place["content_index"] = 0
        if block.kind is BlockKind.TEXT:
            place["logprobs"] = []
        return self._event(f"response.{_CONTENT_NAMES[block.kind]}.{what}", **place, **fields)


def _item_body(block: Block, status: str, *, is_begun: bool = True) -> JsonObject:
    if block.kind is BlockKind.TOOL_CALL:
        arguments = (block.text or "{}") if is_begun else ""
        return {
            "type": "function_call",
            "name": block.tool,
            "arguments": arguments,
            "status": status,
        }
    content = [_part(block)] if is_begun else []
    if block.kind is BlockKind.TEXT:
        return {"type": "message", "role": "assistant", "content": content, "status": status}
    return {"type": "reasoning", "summary": [], "content": content, "status": status}


def _part(block: Block) -> JsonObject:
    part = {"type": _CONTENT_NAMES[block.kind], "text": block.text}
    return part | {"annotations": [], "logprobs": []} if block.kind is BlockKind.TEXT else part


def _echo(request: ResponsesRequest) -> JsonObject:
    """Return the fields of the request that the response object repeats."""
    params = request.sampling_params()
    tools = [
        {"type": "function", "name": tool["name"]}
        | {"description": tool.get("description"), "parameters": tool.get("parameters")}
        | {"strict": tool.get("strict", True)}
        for tool in request.function_tools()
    ]
    reasoning = request.reasoning
    wanted = None if request.text is None else request.text.format
    return {
        "instructions": request.instructions,
        "metadata": request.metadata or {},
        "max_output_tokens": request.max_output_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "tools": tools,
        "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "text": {"format": wanted or {"type": "text"}},
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None,
        },
        "previous_response_id": None,
        "background": False,
        "store": False,
        "truncation": "disabled",
    }

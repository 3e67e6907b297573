"""Request bodies of OpenAI's Responses interface, and their translation to a normalized chat. Pure.

Unknown fields are ignored; fields that need a store are refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from thermocline.errors import RequestError
from thermocline.server.core.bodies import JsonObject, misfit, sampling_params, speculate_names
from thermocline.server.core.normalized_chat import NormalizedChat
from thermocline.server.core.structured import FormatFields

if TYPE_CHECKING:
    from thermocline.sampling.params import SamplingParams

# Each of these needs a store of responses, a queue, or stored prompts.
_NEEDS_A_STORE: Final = ("previous_response_id", "conversation", "prompt", "background")
_ASSISTANT: Final = "assistant"


class ContentPart(msgspec.Struct):
    """A part of a message, a result or a thought."""

    type: str
    text: str | None = None
    refusal: str | None = None


Content = str | list[ContentPart]


class MessageItem(msgspec.Struct, tag_field="type", tag="message"):
    """A message."""

    role: str
    content: Content


class FunctionCallItem(msgspec.Struct, tag_field="type", tag="function_call"):
    """A call that the model made."""

    call_id: str
    name: str
    arguments: str


class FunctionCallOutputItem(msgspec.Struct, tag_field="type", tag="function_call_output"):
    """What a call returned."""

    call_id: str
    output: Content


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    """Reasoning of an earlier turn."""

    content: list[ContentPart] | None = None
    summary: list[ContentPart] = []


Item = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem


class ReasoningConfig(msgspec.Struct):
    """How long to think."""

    effort: str | None = None
    summary: str | None = None


class TextConfig(msgspec.Struct):
    """What the answer must look like."""

    format: JsonObject | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """The body of POST /v1/responses."""

    input: str | list[JsonObject]
    model: str | None = None
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    metadata: dict[str, str] | None = None
    speculate: str | None = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    background: Any = None

    def normalized(self) -> NormalizedChat:
        """Return the normalized chat. Raises RequestError for fields that can not be served."""
        for name in _NEEDS_A_STORE:
            if getattr(self, name):
                raise RequestError(
                    f"{name} is not accepted: this server stores no responses, send the whole "
                    "conversation as input",
                    param=name,
                )
        fields = FormatFields(
            tools=[_nested(tool) for tool in self.function_tools()] or None,
            tool_choice=self._tool_choice(),
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=self._response_format(),
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
        )
        drafters = speculate_names(self.speculate)
        return NormalizedChat(self._messages(), self.sampling_params(), fields, speculate=drafters)

    def sampling_params(self) -> SamplingParams:
        """Return the sampling params. Raises RequestError for values out of range."""
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise RequestError(
                f"max_output_tokens is {self.max_output_tokens}: ask for at least one token",
                param="max_output_tokens",
            )
        return sampling_params(self, max_tokens=self.max_output_tokens)

    def function_tools(self) -> list[JsonObject]:
        """Return the tools that the client runs. Those that OpenAI's servers run are left out."""
        tools = []
        for index, tool in enumerate(self.tools or ()):
            if tool.get("type") != "function":
                continue
            name, schema = tool.get("name"), tool.get("parameters")
            if not isinstance(name, str) or not isinstance(schema, dict | None):
                raise RequestError(
                    f"tools[{index}] needs a name, and parameters that are a JSON schema",
                    param=f"tools[{index}]",
                )
            tools.append(tool)
        return tools

    def _messages(self) -> list[JsonObject]:
        messages: list[JsonObject] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        if not self.input:
            raise RequestError("input is empty: send at least one item", param="input")
        for index, item in enumerate(self.input):
            _add(messages, _typed(item, f"input[{index}]"), f"input[{index}]")
        return messages

    def _tool_choice(self) -> str | JsonObject | None:
        choice = self.tool_choice
        if not isinstance(choice, dict):
            return choice
        if choice.get("type") == "allowed_tools":
            tools = choice.get("tools")
            if isinstance(tools, list):
                tools = [_nested(tool) if isinstance(tool, dict) else tool for tool in tools]
            allowed = {"mode": choice.get("mode"), "tools": tools}
            return {"type": "allowed_tools", "allowed_tools": allowed}
        return _nested(choice)

    def _response_format(self) -> JsonObject | None:
        wanted = None if self.text is None else self.text.format
        if wanted is None or wanted.get("type") != "json_schema":
            return wanted
        return {"type": "json_schema", "json_schema": wanted}


def _typed(item: JsonObject, where: str) -> Item:
    """Return the item in its type; without one it is a message."""
    try:
        typed: Item = msgspec.convert({"type": "message"} | item, type=Item)
    except msgspec.ValidationError as error:
        raise misfit(error, where) from error
    return typed


def _add(messages: list[JsonObject], item: Item, where: str) -> None:
    """Append the item. The reasoning, text and calls of one turn are one message."""
    match item:
        case MessageItem(role="assistant"):
            _turn(messages, "content")["content"] = _text_of(item.content, where)
        case MessageItem(role="user" | "system" | "developer"):
            # Few templates have the role developer; those that do treat it as system.
            role = "user" if item.role == "user" else "system"
            messages.append({"role": role, "content": _text_of(item.content, where)})
        case MessageItem():
            raise RequestError(
                f"{where}.role is {item.role!r}: use user, assistant, system or developer",
                param=f"{where}.role",
            )
        case FunctionCallItem():
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            _turn(messages, None).setdefault("tool_calls", []).append(call)
        case FunctionCallOutputItem():
            content = _text_of(item.output, where)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
        case ReasoningItem():
            thought = _text_of(item.content or item.summary, where)
            _turn(messages, "reasoning_content")["reasoning_content"] = thought


def _turn(messages: list[JsonObject], field: str | None) -> JsonObject:
    """Return the assistant's last message, or a new one if it already has `field` or a later one."""
    order = ("reasoning_content", "content", "tool_calls")
    taken = () if field is None else order[order.index(field) :]
    last = messages[-1] if messages else {}
    if last.get("role") != _ASSISTANT or any(last.get(name) for name in taken):
        messages.append({"role": _ASSISTANT, "content": ""})
    return messages[-1]


def _text_of(content: Content, where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if text is None:
            raise RequestError(
                f"{where}: part {index} is of type {part.type!r}: this model reads text only",
                param=where,
            )
        texts.append(text)
    return "\n".join(texts)


def _nested(tool: JsonObject) -> JsonObject:
    """Return the tool as chats write it, with its fields in a `function` object."""
    function = {name: value for name, value in tool.items() if name != "type"}
    return {"type": tool.get("type"), "function": function}

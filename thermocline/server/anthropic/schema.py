"""Request bodies of Anthropic's Messages interface, and their translation to a normalized chat. Pure.

Unknown fields are ignored. So is cache_control: prompts are cached in any case.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Final

import msgspec

from thermocline.errors import RequestError
from thermocline.sampling.params import SamplingParams
from thermocline.server.core.bodies import JsonObject, sampling_params, speculate_names
from thermocline.server.core.normalized_chat import NormalizedChat, ends_with_answer
from thermocline.server.core.structured import FormatFields

# Claude Code puts this line, with a number that changes with each request, before its system prompt. It serves
# Anthropic's accounting; with it no two prompts would share a prefix.
_ACCOUNTING: Final = "x-anthropic-billing-header:"


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    """Text."""

    text: str


class ImageBlock(msgspec.Struct, tag_field="type", tag="image"):
    """An image; refused."""


class DocumentBlock(msgspec.Struct, tag_field="type", tag="document"):
    """A file; refused."""


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """Reasoning of an earlier turn; its signature is not checked."""

    thinking: str


class RedactedThinkingBlock(msgspec.Struct, tag_field="type", tag="redacted_thinking"):
    """Encrypted reasoning of another model; left out."""


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A call that the model made."""

    id: str
    name: str
    input: JsonObject


Parts = str | list[TextBlock | ImageBlock | DocumentBlock]


class ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result"):
    """What a call returned."""

    tool_use_id: str
    content: Parts | None = None


ContentBlock = (
    TextBlock
    | ImageBlock
    | DocumentBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
)


class AnthropicMessage(msgspec.Struct):
    """One turn."""

    role: str
    content: str | list[ContentBlock]


class AnthropicTool(msgspec.Struct):
    """A tool; one with a type other than custom is run by Anthropic, and refused."""

    name: str
    input_schema: JsonObject | None = None
    description: str | None = None
    type: str | None = None


class AnthropicToolChoice(msgspec.Struct):
    """Whether tools may, must or must not be called."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(msgspec.Struct):
    """Whether to think first."""

    type: str
    budget_tokens: int | None = None


class OutputFormat(msgspec.Struct):
    """The schema that the answer must follow."""

    type: str
    schema: JsonObject


class OutputConfig(msgspec.Struct):
    """What the answer must look like, and how long to think about it."""

    format: OutputFormat | None = None
    effort: str | None = None


class CountRequest(msgspec.Struct, kw_only=True):
    """The body of POST /v1/messages/count_tokens: the fields that make the prompt."""

    messages: list[AnthropicMessage]
    model: str | None = None
    system: str | list[TextBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None

    def sampling_params(self) -> SamplingParams:
        """Return params with which nothing is generated."""
        return SamplingParams(max_tokens=0)

    def normalized(self) -> NormalizedChat:
        """Return the normalized chat. Raises RequestError for fields that can not be served."""
        choice, output = self.tool_choice, self.output_config or OutputConfig()
        thinks = self.thinking is not None and self.thinking.type != "disabled"
        fields = FormatFields(
            tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(self.tools or ())] or None,
            tool_choice=None if choice is None else _neutral_choice(choice),
            parallel_tool_calls=None if choice is None else not choice.disable_parallel_tool_use,
            response_format=self._response_format(),
            # In this interface the model thinks only if the client asks for it.
            reasoning_effort=output.effort if thinks else "none",
            chat_template_kwargs={"enable_thinking": thinks},
            thinking_token_budget=self.thinking.budget_tokens if thinks and self.thinking else None,
        )
        messages = [*self._system(), *self._turns()]
        return NormalizedChat(messages, self.sampling_params(), fields, ends_with_answer(messages))

    def _system(self) -> list[JsonObject]:
        blocks = [TextBlock(self.system)] if isinstance(self.system, str) else self.system or []
        texts = [block.text for block in blocks if not block.text.startswith(_ACCOUNTING)]
        return [{"role": "system", "content": "\n".join(texts)}] if texts else []

    def _turns(self) -> list[JsonObject]:
        if not self.messages:
            raise RequestError("messages is empty: send at least one", param="messages")
        turns: list[JsonObject] = []
        for index, message in enumerate(self.messages):
            where = f"messages[{index}]"
            blocks = message.content
            if isinstance(blocks, str):
                blocks = [TextBlock(blocks)]
            match message.role:
                case "user" | "system":
                    turns += _user_turns(message.role, blocks, f"{where}.content")
                case "assistant":
                    turns.append(_assistant_turn(blocks, f"{where}.content"))
                case other:
                    raise RequestError(
                        f"{where}.role is {other!r}: use user, assistant or system",
                        param=f"{where}.role",
                    )
        return turns

    def _response_format(self) -> JsonObject | None:
        wanted = None if self.output_config is None else self.output_config.format
        if wanted is None:
            return None
        if wanted.type != "json_schema":
            raise RequestError(
                f'output_config.format.type is {wanted.type!r}: use "json_schema"',
                param="output_config.format.type",
            )
        return {
            "type": "json_schema",
            "json_schema": {"name": "output", "schema": wanted.schema, "strict": True},
        }


class MessagesRequest(CountRequest, kw_only=True):
    """The body of POST /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    speculate: str | None = None

    def sampling_params(self) -> SamplingParams:
        """Return the sampling params. Raises RequestError for values out of range."""
        return sampling_params(self, stop=self.stop_sequences)

    def normalized(self) -> NormalizedChat:
        """Return the normalized chat. Raises RequestError for fields that can not be served."""
        return replace(super().normalized(), speculate=speculate_names(self.speculate))


def _user_turns(role: str, blocks: list[ContentBlock], where: str) -> list[JsonObject]:
    """Return the blocks as messages in their order: neighbouring texts in one, each tool result in its own."""
    turns: list[JsonObject] = []
    texts: list[str] = []

    def end_text() -> None:
        if texts:
            turns.append({"role": role, "content": "\n".join(texts)})
            texts.clear()

    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        match block:
            case ToolResultBlock() if role == "user":
                end_text()
                turns.append(
                    {
                        "role": "tool",
                        "tool_call_id": block.tool_use_id,
                        "content": _text_of(block.content or "", f"{place}.content"),
                    }
                )
            case TextBlock():
                texts.append(block.text)
            case _:
                raise _misplaced(block, role, place)
    end_text()
    return turns or [{"role": role, "content": ""}]


def _assistant_turn(blocks: list[ContentBlock], where: str) -> JsonObject:
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(blocks):
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case RedactedThinkingBlock():
                continue
            case ToolUseBlock():
                arguments = json.dumps(block.input, ensure_ascii=False)
                function = {"name": block.name, "arguments": arguments}
                calls.append({"id": block.id, "type": "function", "function": function})
            case _:
                raise _misplaced(block, "assistant", f"{where}[{index}]")
    turn: JsonObject = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        turn["reasoning_content"] = "".join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    return turn


def _text_of(content: Parts, where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for index, block in enumerate(content):
        if not isinstance(block, TextBlock):
            raise _misplaced(block, "tool_result", f"{where}[{index}]")
        texts.append(block.text)
    return "\n".join(texts)


def _misplaced(block: ContentBlock, holder: str, where: str) -> RequestError:
    kind = block.__struct_config__.tag
    if isinstance(block, ImageBlock | DocumentBlock):
        return RequestError(f"{where} is of type {kind!r}: this model reads text only", param=where)
    return RequestError(f"{where} is of type {kind!r}: {holder} can not hold it", param=where)


def _neutral_choice(choice: AnthropicToolChoice) -> str | JsonObject:
    match choice.type:
        case "auto" | "none":
            return choice.type
        case "any":
            return "required"
        case "tool" if choice.name is not None:
            return {"type": "function", "function": {"name": choice.name}}
        case _:
            raise RequestError(
                'tool_choice must be of type "auto", "any", "none", or "tool" with a name',
                param="tool_choice",
            )


def _tool(tool: AnthropicTool, where: str) -> JsonObject:
    if tool.type not in (None, "custom") or tool.input_schema is None:
        raise RequestError(
            f"{where} ({tool.name!r}) is not described by an input_schema: tools that Anthropic runs "
            "are not here, leave it out",
            param=where,
        )
    function: JsonObject = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}

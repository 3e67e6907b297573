"""Request bodies of Ollama's interface, and their translation to a normalized chat. Pure.

Unknown fields and options are ignored.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import msgspec

from thermocline.errors import RequestError
from thermocline.server.core.bodies import JsonObject, sampling_params, speculate_names
from thermocline.server.core.keep_alive import parse_keep_alive
from thermocline.server.core.normalized_chat import NormalizedChat, ends_with_answer
from thermocline.server.core.structured import FormatFields

if TYPE_CHECKING:
    from thermocline.sampling.params import SamplingParams

_LATEST: Final = ":latest"


class Options(msgspec.Struct, kw_only=True):
    """Sampling options. None is the default of `SamplingParams`."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repeat_last_n: int | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    num_predict: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    speculate: str | None = None

    def sampling_params(self) -> SamplingParams:
        """Return the sampling params. Raises RequestError for values out of range."""
        # A negative number means no limit, and another seed each time.
        return sampling_params(
            self,
            repetition_penalty=self.repeat_penalty,
            max_tokens=_unless_negative(self.num_predict),
            seed=_unless_negative(self.seed),
        )


class ShowRequest(msgspec.Struct):
    """The body of POST /api/show; `name` is what older clients send."""

    model: str | None = None
    name: str | None = None

    @property
    def model_name(self) -> str | None:
        """The model asked for."""
        return plain_name(self.model or self.name)


class NamedModel(msgspec.Struct, kw_only=True):
    """What requests share that may load a model. keep_alive: how long it stays after them, see `keep_alive`."""

    model: str
    keep_alive: float | str | None = None

    @property
    def model_name(self) -> str | None:
        """The model asked for."""
        return plain_name(self.model)

    @property
    def keep_alive_s(self) -> float | None:
        """How long the model stays in memory, in seconds; None for what the server has. Raises RequestError."""
        return None if self.keep_alive is None else parse_keep_alive(self.keep_alive)


class OllamaRequest(NamedModel, kw_only=True):
    """What chat and generate share. A stream is the default here."""

    stream: bool | None = None
    options: Options | None = None
    format: str | JsonObject | None = None
    think: bool | str | None = None
    logprobs: bool | None = None

    @property
    def is_streamed(self) -> bool:
        """Whether the client wants a line per token."""
        return self.stream is not False

    def sampling_params(self) -> SamplingParams:
        """Return the sampling params. Raises RequestError for fields that can not be served."""
        if self.logprobs:
            raise RequestError(
                "logprobs is not accepted here: ask for them at /v1/chat/completions",
                param="logprobs",
            )
        return (self.options or Options()).sampling_params()

    def drafters(self) -> tuple[str, ...] | None:
        """Return who may draft the answer's tokens. Raises RequestError."""
        return speculate_names((self.options or Options()).speculate)

    def _format_fields(self, tools: list[JsonObject] | None = None) -> FormatFields:
        thinks = self.think
        is_switch = isinstance(thinks, bool)
        return FormatFields(
            tools=tools or None,
            response_format=self._response_format(),
            reasoning_effort=thinks if isinstance(thinks, str) else None,
            chat_template_kwargs={"enable_thinking": thinks} if is_switch else None,
        )

    def _response_format(self) -> JsonObject | None:
        match self.format:
            case None | "":
                return None
            case "json":
                return {"type": "json_object"}
            case dict():
                schema = {"name": "format", "schema": self.format, "strict": True}
                return {"type": "json_schema", "json_schema": schema}
            case _:
                raise RequestError(
                    f'format is {self.format!r}: use "json" or a JSON schema', param="format"
                )


class Function(msgspec.Struct):
    """A called function."""

    name: str
    arguments: JsonObject


class ToolCall(msgspec.Struct):
    """A call that the model made."""

    function: Function
    id: str | None = None


class OllamaMessage(msgspec.Struct):
    """One turn."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatRequest(OllamaRequest, kw_only=True):
    """The body of POST /api/chat. Without messages it asks to load the model."""

    messages: list[OllamaMessage] | None = None
    tools: list[JsonObject] | None = None

    def normalized(self) -> NormalizedChat:
        """Return the normalized chat. Raises RequestError for fields that can not be served."""
        messages = [
            _neutral_message(message, f"messages[{index}]")
            for index, message in enumerate(self.messages or ())
        ]
        fields = self._format_fields(self.tools)
        return NormalizedChat(
            messages,
            self.sampling_params(),
            fields,
            ends_with_answer(messages),
            self.drafters(),
        )


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    """The body of POST /api/generate. Without a prompt it asks to load the model."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    images: list[Any] | None = None
    context: list[int] | None = None

    def sampling_params(self) -> SamplingParams:
        """Return the sampling params. Raises RequestError for fields that can not be served."""
        for name in ("suffix", "template", "images", "context"):
            if getattr(self, name):
                raise RequestError(
                    f"{name} is not accepted here: leave it out, and use /api/chat for conversations",
                    param=name,
                )
        if self.raw and (self.system or self.format):
            raise RequestError(
                "raw takes the prompt as it is: leave out system and format", param="raw"
            )
        return super().sampling_params()

    def normalized(self) -> NormalizedChat:
        """Return the prompt as a chat of one turn. Raises RequestError for fields that can not be served."""
        messages: list[JsonObject] = [{"role": "user", "content": self.prompt or ""}]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        fields = self._format_fields()
        return NormalizedChat(messages, self.sampling_params(), fields, speculate=self.drafters())


def plain_name(name: str | None) -> str | None:
    """Return the name without `:latest`, which clients append to names without a tag."""
    return None if name is None else name.removesuffix(_LATEST)


def _neutral_message(message: OllamaMessage, where: str) -> JsonObject:
    if message.images:
        raise RequestError(f"{where} has images: this model reads text only", param=where)
    turn: JsonObject = {"role": message.role, "content": message.content or ""}
    if message.thinking:
        turn["reasoning_content"] = message.thinking
    if message.role == "tool":
        turn["tool_call_id"] = message.tool_call_id or ""
        turn["name"] = message.tool_name or ""
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id or f"call_{index}",
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": json.dumps(call.function.arguments, ensure_ascii=False),
                },
            }
            for index, call in enumerate(message.tool_calls)
        ]
    return turn


def _unless_negative(value: int | None) -> int | None:
    return None if value is None or value < 0 else value

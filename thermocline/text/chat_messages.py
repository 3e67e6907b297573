"""Checks chat messages and brings them into the one shape that templates expect.

Owns the rules of message shape. It knows neither templates nor tokens.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from thermocline.errors import RequestError

ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function"))
"""A closed set, because some templates build a control token out of the role."""

MAX_ARGUMENT_CHARS: Final = 1 << 20
"""Of the arguments of one call. Decoding so many holds the interpreter for up to 60 ms."""
_SHORT_ID_CHARS: Final = 9
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")


def normalize_messages(messages: object) -> list[dict[str, Any]]:
    """Checked copies of `messages`, as templates expect them.

    Text parts become one string, joined by line ends; arguments of tool calls that are a JSON object
    in a string become the object; `reasoning_content`, `reasoning` and `thinking` each fill in for the others.
    Raises RequestError with param "messages" or "messages[i]...".
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise RequestError("messages must be a list of objects", param="messages")
    if not messages:
        raise RequestError("messages is empty: send at least one", param="messages")
    return [_normalize(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _normalize(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object with role and content", param=where)
    result = {str(key): value for key, value in message.items()}
    role = result.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise RequestError(
            f"{where}.role is {role!r}: use one of {', '.join(sorted(ROLES))}",
            param=f"{where}.role",
        )
    result["content"] = _text_of(result.get("content"), f"{where}.content")
    if result.get("tool_calls") is not None:
        result["tool_calls"] = _tool_calls(result["tool_calls"], f"{where}.tool_calls")
    given = [result[field] for field in _REASONING_FIELDS if result.get(field) is not None]
    if given:
        for field in _REASONING_FIELDS:
            if result.get(field) is None:
                result[field] = given[0]
    return result


def _text_of(content: object, where: str) -> str:
    """The text of a content field; None is the empty text (templates add and search it)."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise RequestError(f"{where} must be a string or a list of text parts", param=where)
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(
                f"{where}[{index}] is of type {kind!r}: this model reads text only, send "
                '{"type": "text", "text": ...}',
                param=f"{where}[{index}]",
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _tool_calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)):
        raise RequestError(f"{where} must be a list of objects", param=where)
    checked = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(
                f"{where}[{index}] needs function.name and function.arguments",
                param=f"{where}[{index}]",
            )
        arguments = function.get("arguments", {})
        if isinstance(arguments, str) and len(arguments) > MAX_ARGUMENT_CHARS:
            raise RequestError(
                f"{where}[{index}].function.arguments has {len(arguments)} characters: send at most {MAX_ARGUMENT_CHARS}",
                param=f"{where}[{index}].function.arguments",
            )
        arguments = _object_or_text(arguments)
        checked.append({**call, "function": {**function, "arguments": arguments}})
    return checked


def _object_or_text(arguments: object) -> object:
    """A JSON object written in a string becomes the object; everything else stays."""
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def other_forms(context: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a render's `context` in the forms that some templates want in place of the usual one.

    Ids of calls as nine letters and digits; arguments of calls as JSON text; both; the text before a call
    with the reasoning, for gpt-oss, which takes one of them; an empty list for no tools; and, for templates from before there were tools, their text as `functions`.
    """
    messages = context["messages"]
    if any(message.get("tool_calls") or message.get("tool_call_id") for message in messages):
        short = [_with_short_ids(message) for message in messages]
        yield {**context, "messages": short}
        yield {**context, "messages": list(map(_with_argument_text, messages))}
        yield {**context, "messages": list(map(_with_argument_text, short))}
        yield {**context, "messages": list(map(_with_all_thought, messages))}
    if context["tools"] is None:
        yield {**context, "tools": []}
    else:
        yield {**context, "tools": _described(context["tools"])}
    functions = [tool.get("function", tool) for tool in context["tools"] or ()]
    told = {"functions": json.dumps(functions, indent=4), "datetime": time.strftime("%Y-%m-%d")}
    yield {**told, **context}


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    changed = dict(message)
    if isinstance(message.get("tool_call_id"), str):
        changed["tool_call_id"] = _short_id(message["tool_call_id"])
    if message.get("tool_calls"):
        changed["tool_calls"] = [
            {**call, "id": _short_id(str(call.get("id", index)))}
            for index, call in enumerate(message["tool_calls"])
        ]
    return changed


def _short_id(text: str) -> str:
    """Return nine letters and digits, the same for the same id."""
    if len(text) == _SHORT_ID_CHARS and text.isascii() and text.isalnum():
        return text
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:_SHORT_ID_CHARS]


def _with_argument_text(message: dict[str, Any]) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": _as_text(call["function"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _with_all_thought(message: dict[str, Any]) -> dict[str, Any]:
    if not (message.get("tool_calls") and message.get("thinking") and message["content"]):
        return message
    thought = f"{message['thinking']}\n\n{message['content']}"
    return {**message, "content": ""} | dict.fromkeys(_REASONING_FIELDS, thought)


def _as_text(function: Mapping[str, Any]) -> str:
    arguments = function["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _described(value: Any) -> Any:  # noqa: ANN401 - any JSON
    """Return schemas in which all that has a type has a description."""
    if isinstance(value, list):
        return [_described(one) for one in value]
    if not isinstance(value, dict):
        return value
    described = {key: _described(one) for key, one in value.items()}
    return {"description": "", **described} if isinstance(value.get("type"), str) else described

"""Reads the request fields that shape an answer: tools, tool_choice, response_format, structured_outputs.

Owns their syntax and limits. Pure; knows no grammar and no template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

from thermocline.errors import RequestError
from thermocline.sampling.constraint import Constraint, ConstraintKind
from thermocline.sampling.grammar import MAX_DEPTH, depth_of

MAX_TOOLS: Final = 128
MAX_SCHEMA_BYTES: Final = 64 << 10

_NAME: Final = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_OUTPUT_KINDS: Final = {
    "json": ConstraintKind.JSON_SCHEMA,
    "regex": ConstraintKind.REGEX,
    "choice": ConstraintKind.CHOICE,
    "grammar": ConstraintKind.GRAMMAR,
    "json_object": ConstraintKind.JSON_OBJECT,
}


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that a client offers. strict: arguments must satisfy every rule of the schema."""

    name: str
    description: str | None
    parameters: Mapping[str, Any] | None
    strict: bool

    @property
    def schema(self) -> Mapping[str, Any]:
        """The schema of the arguments object. Undeclared properties are excluded unless the tool's schema allows them."""
        schema = {"type": "object", "properties": {}, **(self.parameters or {})}
        declares = bool(schema["properties"]) or self.parameters is None
        return {"additionalProperties": False, **schema} if declares else schema

    def as_body(self) -> dict[str, Any]:
        """Return the tool as chat templates take it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        if self.parameters is not None:
            function["parameters"] = dict(self.parameters)
        return {"type": "function", "function": function}


class ToolMode(Enum):
    """Whether tools are called: not at all, as the model likes, or at least once."""

    NONE = auto()
    AUTO = auto()
    REQUIRED = auto()


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """names: the tools that may be called; None for all."""

    mode: ToolMode
    names: frozenset[str] | None = None

    def allows(self, name: str) -> bool:
        """Whether the tool `name` may be called."""
        return self.names is None or name in self.names


def read_tools(tools: object) -> tuple[Tool, ...]:
    """Return the tools of a request. Raises RequestError that names the wrong field."""
    if tools is None:
        return ()
    if not isinstance(tools, list | tuple):
        raise RequestError("tools must be a list", param="tools")
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"{len(tools)} tools: send at most {MAX_TOOLS}", param="tools")
    read = tuple(_read_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools))
    names: set[str] = set()
    for index, tool in enumerate(read):
        if tool.name in names:
            raise _wrong(f"tools[{index}].function.name", f"is {tool.name!r} for the second time")
        names.add(tool.name)
    return read


def _read_tool(tool: object, where: str) -> Tool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        raise _wrong(where, 'must be a tool of type "function": others are not known here')
    if not isinstance(function, Mapping):
        raise _wrong(f"{where}.function", "must be an object with name and parameters")
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _wrong(f"{where}.function.name", f"must match {_NAME.pattern}")
    if description is not None and not isinstance(description, str):
        raise _wrong(f"{where}.function.description", "must be a string")
    parameters = function.get("parameters")
    if parameters is not None:
        _check_parameters(parameters, f"{where}.function.parameters")
    return Tool(name, description, parameters, strict=function.get("strict") is True)


def _check_parameters(parameters: object, where: str) -> None:
    if not isinstance(parameters, Mapping):
        raise _wrong(where, "must be a JSON schema, as an object")
    if parameters.get("type", "object") != "object":
        raise _wrong(where, 'must be a schema of type "object"')
    if not isinstance(parameters.get("properties", {}), Mapping):
        raise _wrong(f"{where}.properties", "must be an object")
    if not isinstance(parameters.get("required", []), list | tuple):
        raise _wrong(f"{where}.required", "must be a list of names")
    _schema_text(parameters, where)


def read_tool_choice(choice: object, tools: tuple[Tool, ...]) -> ToolChoice:
    """Return which of `tools` may be called. Raises RequestError for a tool that is not among them."""
    if choice is None:
        return ToolChoice(ToolMode.AUTO)
    if isinstance(choice, str):
        return _choice_of_mode(choice, tools)
    if not isinstance(choice, Mapping):
        raise _wrong("tool_choice", 'must be "none", "auto", "required" or name a function')
    match choice.get("type"):
        case "function":
            function = choice.get("function", choice)
            name = function.get("name") if isinstance(function, Mapping) else None
            return ToolChoice(ToolMode.REQUIRED, _known((name,), tools))
        case "allowed_tools":
            allowed = choice.get("allowed_tools", choice)
            listed = allowed.get("tools") if isinstance(allowed, Mapping) else None
            if not isinstance(listed, list) or not all(isinstance(one, Mapping) for one in listed):
                raise _wrong("tool_choice.allowed_tools.tools", "must be a list of functions")
            names = (one.get("function", one) for one in listed)
            known = _known([one.get("name") for one in names if isinstance(one, Mapping)], tools)
            return ToolChoice(_choice_of_mode(allowed.get("mode", "auto"), tools).mode, known)
        case kind:
            raise _wrong(
                "tool_choice", f"is of type {kind!r}: it must be function or allowed_tools"
            )


def _choice_of_mode(mode: object, tools: tuple[Tool, ...]) -> ToolChoice:
    modes = {"none": ToolMode.NONE, "auto": ToolMode.AUTO, "required": ToolMode.REQUIRED}
    if not isinstance(mode, str) or mode not in modes:
        raise _wrong("tool_choice", 'must be "none", "auto", "required" or name a function')
    if mode == "required" and not tools:
        raise _wrong("tool_choice", "asks for a call, but there are no tools: send some")
    return ToolChoice(modes[mode])


def _known(names: list[object] | tuple[object, ...], tools: tuple[Tool, ...]) -> frozenset[str]:
    offered = {tool.name for tool in tools}
    for name in names:
        if not isinstance(name, str) or name not in offered:
            raise _wrong("tool_choice", f"names {name!r}, which is not among the tools")
    if not names:
        raise _wrong("tool_choice", "names no tool")
    return frozenset(name for name in names if isinstance(name, str))


def read_response_format(wanted: object) -> Constraint | None:
    """Return the constraint of a response_format, None for free text. Raises RequestError."""
    if wanted is None:
        return None
    if not isinstance(wanted, Mapping):
        raise _wrong("response_format", "must be an object with a type")
    match wanted.get("type"):
        case "text":
            return None
        case "json_object" if wanted.get("schema") is None:
            return Constraint(ConstraintKind.JSON_OBJECT, param="response_format")
        case "json_object" | "json_schema":
            outer = wanted.get("json_schema")
            if outer is not None and not isinstance(outer, Mapping):
                raise _wrong("response_format.json_schema", "must be an object with a schema")
            # llama-server also takes the schema without a json_schema object around it.
            holder = wanted if outer is None else outer
            lenient = outer is not None and outer.get("strict") is not True
            where = (
                "response_format.schema" if outer is None else "response_format.json_schema.schema"
            )
            return _schema_constraint(
                holder.get("schema"), where, "response_format", lenient=lenient
            )
        case kind:
            raise _wrong(
                "response_format", f"is of type {kind!r}: use text, json_object or json_schema"
            )


def read_structured_outputs(wanted: object) -> Constraint | None:
    """Return the one constraint of vLLM's structured_outputs. Raises RequestError."""
    if wanted is None:
        return None
    if not isinstance(wanted, Mapping):
        raise _wrong("structured_outputs", "must be an object")
    if wanted.get("structural_tag") is not None:
        raise _wrong("structured_outputs.structural_tag", "is not supported: use tools or grammar")
    given = [key for key in _OUTPUT_KINDS if wanted.get(key) not in (None, False)]
    if len(given) != 1:
        raise _wrong("structured_outputs", f"must ask for one of {', '.join(_OUTPUT_KINDS)}")
    (key,) = given
    value, where = wanted[key], f"structured_outputs.{key}"
    match _OUTPUT_KINDS[key]:
        case ConstraintKind.JSON_SCHEMA:
            return _schema_constraint(value, where, where, lenient=False)
        case ConstraintKind.JSON_OBJECT:
            return Constraint(ConstraintKind.JSON_OBJECT, param=where)
        case ConstraintKind.CHOICE:
            return Constraint(ConstraintKind.CHOICE, _schema_text(value, where), param=where)
        case kind:
            if not isinstance(value, str) or not value:
                raise _wrong(where, "must be a string that is not empty")
            if len(value.encode("utf-8", "surrogatepass")) > MAX_SCHEMA_BYTES:
                raise _wrong(where, f"is too long: send at most {MAX_SCHEMA_BYTES} bytes")
            return Constraint(kind, value, param=where)


def _schema_constraint(schema: object, where: str, param: str, *, lenient: bool) -> Constraint:
    if isinstance(schema, str):
        if len(schema) > MAX_SCHEMA_BYTES:
            raise _wrong(where, f"is too long: send at most {MAX_SCHEMA_BYTES} bytes")
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise _wrong(where, f"is not valid JSON: {error}") from error
    if not isinstance(schema, Mapping | bool):
        raise _wrong(where, "must be a JSON schema, as an object")
    text = _schema_text(schema, where)
    return Constraint(ConstraintKind.JSON_SCHEMA, text, lenient=lenient, param=param)


def _schema_text(value: object, where: str) -> str:
    """Return `value` as JSON. Raises RequestError beyond the limits."""
    if depth_of(value) > MAX_DEPTH:
        raise _wrong(where, f"is nested more than {MAX_DEPTH} deep: flatten it")
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        num_bytes = len(text.encode())
    except (TypeError, ValueError) as error:
        raise _wrong(where, f"is no plain JSON: {error}") from error
    if num_bytes > MAX_SCHEMA_BYTES:
        raise _wrong(where, f"has {num_bytes} bytes: send at most {MAX_SCHEMA_BYTES}")
    return text


def _wrong(where: str, what: str) -> RequestError:
    return RequestError(f"{where} {what}", param=where)

"""Every field of every POST of a server, made from its /openapi.json, with values of any size.

Nothing here names a field that the document describes. Names are needed where it says only "any object": what such a
field holds stands in INSIDE, and a short valid body needs words for what it asks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Fill = Callable[[Any], Any]

MESSAGE = {"role": "user", "content": "hello"}
PART = {"type": "text", "text": "7"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ASKED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
WHOLE = {"type": "integer"}
PARAMETERS = {"type": "object", "properties": {"a": WHOLE}}
FUNCTION = {"name": "f", "description": "d", "parameters": PARAMETERS}
# Some interfaces want a tool's fields in `function`, others beside it.
TOOL = {"type": "function", **FUNCTION, "function": FUNCTION}

# Short values by the name of their field: whatever a body needs, and what keeps its answer short.
SHORT: dict[str, Any] = {
    "messages": MESSAGE,
    "input": MESSAGE,
    "tools": TOOL,
    "max_tokens": 4,
    "max_output_tokens": 4,
    "num_predict": 4,
    "options": {"num_predict": 4},
    "role": "user",
    "type": "text",
}
# It takes msgspec a hundred times as long as others.
LONG_NUMBER = 1.2345678901234567e-300
TEXTS = ("messages", "prompt", "input", "content", "tokens", "documents")
LIMITS = ("max_tokens", "max_output_tokens", "options")
SIMPLE = {"string": "text", "integer": "number", "number": "number", "boolean": "flag"}
# Two names of one field: a body has either.
OTHER_NAMES = {"texts": "documents"}
# What stands in a path that has places to fill in.
URLS = {"/slots/{id_slot}": "/slots/3?action=erase"}
# It does most with what it takes, so that the fields that it shares with others are tried there.
FIRST = "/v1/chat/completions"
MAX_DEPTH = 5
SCHEMA = ":schema"


@dataclass(frozen=True)
class Hole:
    """A place in the body of `path` for values of one kind and any size.

    kind: text, list (of `item`), names (of an object, each with the value `item`), number or flag.
    """

    path: str
    field: str
    where: str
    kind: str
    fill: Fill
    item: Any = 1

    def __repr__(self) -> str:
        return f"{self.path} {self.where} ({self.kind})"

    @property
    def url(self) -> str:
        """Where its bodies are sent."""
        return URLS.get(self.path, self.path)

    def body(self, small: dict[str, Any], size: int) -> dict[str, Any]:
        """Return a short body with a value of this size in this place."""
        body, value = small | {}, self.value(size)
        body.pop(OTHER_NAMES.get(self.field, ""), None)
        if not self.field:
            return body | value
        if isinstance(value, dict) and isinstance(body.get(self.field), dict):
            value = body[self.field] | value
        return body | {self.field: value}

    @property
    def likeness(self) -> tuple[Any, ...]:
        """What it has in common with places of other paths that are read by the same code."""
        _, in_schema, rest = self.where.partition(SCHEMA)
        return in_schema + rest if in_schema else self.where, self.kind, self.item == LONG_NUMBER

    def value(self, size: int) -> Any:
        """Return the field's value, with a number, or with so many characters, items or names, in this place."""
        match self.kind:
            case "text":
                return self.fill("7" * size)
            case "list":
                return self.fill([self.item] * size)
            case "names":
                return self.fill({str(number): self.item for number in range(size)})
            case "number":
                return self.fill(size)
            case _:
                return self.fill(bool(size))

    def most(self, max_bytes: int) -> int:
        """Return how large a value can be in a body of so many bytes."""
        if self.kind == "text":
            return max_bytes
        size = {"list": len(json.dumps(self.item)) + 2, "names": len(json.dumps(self.item)) + 12}
        return max_bytes // size[self.kind]


def schema_of(part: Fill) -> list[tuple[str, str, Fill, Any]]:
    """Return the places inside a JSON schema; part: puts it where it belongs."""
    return [
        (f"{SCHEMA}.description", "text", lambda v: part(PARAMETERS | {"description": v}), None),
        (f"{SCHEMA}.properties", "names", lambda v: part(PARAMETERS | {"properties": v}), WHOLE),
        (f"{SCHEMA}.required", "list", lambda v: part(PARAMETERS | {"required": v}), "a"),
        (f"{SCHEMA}.enum", "names", lambda v: part(_with_enum([*v])), 1),
        (
            f"{SCHEMA}.pattern",
            "text",
            lambda v: part(_with({"type": "string", "pattern": v})),
            None,
        ),
        (
            f"{SCHEMA}.maxLength",
            "number",
            lambda v: part(_with({"type": "string", "maxLength": v})),
            None,
        ),
        (f"{SCHEMA}.multipleOf", "number", lambda v: part(_with(WHOLE | {"multipleOf": v})), None),
    ]


def _with(inner: Any) -> Any:
    return {"type": "object", "properties": {"a": inner}, "required": ["a"]}


def _with_enum(values: list[str]) -> Any:
    return _with({"enum": values})


def _tool(parameters: Any) -> Any:
    return TOOL | {"parameters": parameters, "function": FUNCTION | {"parameters": parameters}}


def _said(name: str, role: str = "user") -> Fill:
    return lambda v: MESSAGE | {"role": role, name: v}


def _called(function: Any) -> Any:
    return ASKED | {
        "tool_calls": [CALL | {"function": {"name": "f", "arguments": "{}"} | function}]
    }


# What stands in fields that the document calls any value or any object.
INSIDE: dict[str, list[tuple[str, str, Fill, Any]]] = {
    "messages": [
        (".content", "text", _said("content"), None),
        (".content", "list", _said("content"), PART),
        (".content[].text", "text", lambda v: MESSAGE | {"content": [PART | {"text": v}]}, None),
        (".name", "text", _said("name"), None),
        (".reasoning_content", "text", _said("reasoning_content", "assistant"), None),
        (".tool_calls", "list", lambda v: ASKED | {"tool_calls": v}, CALL),
        (".tool_calls[].arguments", "text", lambda v: _called({"arguments": v}), None),
        (".tool_calls[].arguments", "names", lambda v: _called({"arguments": json.dumps(v)}), 1),
        (".tool_call_id", "text", _said("tool_call_id", "tool"), None),
    ],
    "input": [
        (".content", "text", _said("content"), None),
        (".content", "list", _said("content"), {"type": "input_text", "text": "7"}),
        (".call", "text", lambda v: {"type": "function_call", "call_id": "1", "name": "f", "arguments": v}, None),
    ],
    "tools": [
        (".name", "text", lambda v: TOOL | {"name": v, "function": FUNCTION | {"name": v}}, None),
        (".description", "text", lambda v: TOOL | {"function": FUNCTION | {"description": v}}, None),
        *schema_of(_tool),
    ],
    "tool_choice": [(".name", "text", lambda v: {"type": "function", "function": {"name": v}}, None)],
    "response_format": schema_of(
        lambda v: {"type": "json_schema", "json_schema": {"name": "n", "schema": v, "strict": True}}
    ),
    "text": schema_of(lambda v: {"type": "json_schema", "name": "n", "schema": v}),
    "structured_outputs": [
        (".regex", "text", lambda v: {"regex": v}, None),
        (".choice", "names", lambda v: {"choice": [*v]}, 1),
        (".grammar", "text", lambda v: {"grammar": f'start: "{v}"'}, None),
        (".grammar", "names", lambda v: {"grammar": "start: " + "|".join(f'"{n}"' for n in v)}, 1),
        (".grammar", "names", lambda v: {"grammar": "root ::= " + "|".join(f'"{n}"' for n in v)}, 1),
        (".json", "text", lambda v: {"json": json.dumps({"title": v})}, None),
        *schema_of(lambda v: {"json": v}),
    ],
    "format": schema_of(lambda v: v),
    "schema": schema_of(lambda v: v),
    "input_schema": schema_of(lambda v: v),
}  # fmt: skip


class Bodies:
    """The bodies of one server's operations."""

    def __init__(self, document: dict[str, Any]):
        self._schemas = document["components"]["schemas"]
        self._bodies = {
            path: item["post"]["requestBody"]["content"]["application/json"]["schema"]
            for path, item in document["paths"].items()
            if "requestBody" in item.get("post", ())
        }
        self.paths = sorted(self._bodies, key=lambda path: path != FIRST)

    def small(self, path: str) -> dict[str, Any]:
        """Return a short body that the path accepts."""
        schema = self._followed(self._bodies[path])
        fields, required = schema["properties"], schema.get("required", [])
        wanted = [*required, *(name for name in LIMITS if name in fields)]
        if not any(name in required for name in TEXTS):
            wanted += [name for name in TEXTS if name in fields][:1]
        return {name: self._example(fields[name], name) for name in wanted if name != "model"} | (
            {"model": "demo-moe"} if "model" in required else {}
        )

    def holes(self, path: str) -> Iterator[Hole]:
        """Yield every place of the path's body."""
        fields = self._followed(self._bodies[path])["properties"]
        yield Hole(path, "", "", "names", _same)
        for name, schema in fields.items():
            for where, kind, fill, item in self._places(schema, name, lambda value: value, 0):
                yield Hole(path, name, name + where, kind, fill, item)

    def _places(
        self, schema: dict[str, Any], name: str, fill: Fill, depth: int
    ) -> Iterator[tuple[str, str, Fill, Any]]:
        schema = self._followed(schema)
        if depth > MAX_DEPTH or "const" in schema or "enum" in schema:
            return
        if "anyOf" in schema:
            for choice in schema["anyOf"]:
                yield from self._places(choice, name, fill, depth)
            return
        kind = schema.get("type")
        if kind in SIMPLE:
            yield "", SIMPLE[kind], fill, None
        elif kind == "array" or "properties" in schema:
            yield from self._inside(schema, name, fill, depth + 1)
        elif kind != "null":
            yield from self._anything(schema, name, fill)

    def _inside(
        self, schema: dict[str, Any], name: str, fill: Fill, depth: int
    ) -> Iterator[tuple[str, str, Fill, Any]]:
        """Yield the places of a list, or of an object whose fields are known."""
        if "properties" not in schema:
            items = schema.get("items", {})
            yield "", "list", fill, self._example(items, name)
            for where, what, inner, item in self._places(items, name, _same, depth):
                yield f"[]{where}", what, _then(inner, _in_list(fill)), item
            return
        base = self._example(schema, name)
        yield "", "names", _in_object(fill, base), 1
        for key, field in schema["properties"].items():
            for where, what, inner, item in self._places(field, key, _same, depth):
                whole = _then(_named(key, inner), _in_object(fill, base))
                yield f".{key}{where}", what, whole, item

    def _anything(
        self, schema: dict[str, Any], name: str, fill: Fill
    ) -> Iterator[tuple[str, str, Fill, Any]]:
        for where, kind, inner, item in INSIDE.get(name, ()):
            yield where, kind, _then(inner, fill), item
        value = schema.get("additionalProperties")
        yield "", "names", fill, self._example(value, name) if isinstance(value, dict) else 1
        if schema.get("type") is None:
            yield "", "text", fill, None
            yield "", "list", fill, LONG_NUMBER

    def _example(self, schema: dict[str, Any], name: str) -> Any:
        schema = self._followed(schema)
        if "anyOf" in schema:
            return self._example(schema["anyOf"][0], name)
        if "const" in schema or "enum" in schema:
            return schema.get("const", schema.get("enum", [None])[0])
        match schema.get("type"):
            case "string":
                return SHORT.get(name) if isinstance(SHORT.get(name), str) else "hello"
            case "integer" | "number":
                return SHORT.get(name, 1)
            case "boolean":
                return True
            case "array":
                return [self._example(schema.get("items", {}), name)]
            case "object" if "properties" in schema:
                if name == "options":
                    return SHORT[name]
                return {
                    key: self._example(schema["properties"][key], key)
                    for key in schema.get("required", ())
                }
            case _:
                return SHORT.get(name, {})

    def _followed(self, schema: dict[str, Any]) -> dict[str, Any]:
        while "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        return schema


def _same(value: Any) -> Any:
    return value


def _in_object(fill: Fill, base: Any) -> Fill:
    return lambda value: fill(base | value)


def _named(key: str, inner: Fill) -> Fill:
    return lambda value: {key: inner(value)}


def _in_list(fill: Fill) -> Fill:
    return lambda value: fill([value])


def _then(inner: Fill, fill: Fill) -> Fill:
    return lambda value: fill(inner(value))

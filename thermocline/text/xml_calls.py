"""Tool calls as Qwen3-Coder and Qwen 3.5 write them: each argument a <parameter=name> of its own.

Owns their parser, which makes the arguments one JSON object, and their grammar. Knows no request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Final

from thermocline.text.pieces import ToolCallArguments, ToolCallBegin
from thermocline.text.tool_calls import TextOutlet, num_held

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from thermocline.text.pieces import Piece

CALL_BEGIN: Final = "<tool_call>"
CALL_END: Final = "</tool_call>"
FUNCTION: Final = "<function="
_FUNCTION_END: Final = "</function>"
_PARAMETER: Final = "<parameter="
_PARAMETER_END: Final = "</parameter>"
_SPACE: Final = " \t\r\n"
_NAME: Final = re.compile(r"[^<>\s]+")
_ONLY_TEXT: Final = frozenset(("string",))
_MAX_REFERENCES: Final = 8
_PYTHON_WORDS: Final = {"True": "true", "False": "false", "None": "null"}
_FREE_TEXT: Final = r"/(.|\n)*<\/parameter>/"


def call_rules(
    name: str, schema: Mapping[str, Any], json_rule: Callable[[Any], str], prefix: str
) -> list[str]:
    """Return the rules of a call of `name` after FUNCTION; the first is called `prefix`.

    Parameters come in the schema's order, the required ones always. A text may be any text; all other
    values fit their schema, whose rule `json_rule` gives.
    """
    properties = schema.get("properties") or {}
    required = schema.get("required") or ()
    parts, rules = [], []
    for number, (key, given) in enumerate(properties.items()):
        value = _resolved(given, schema)
        part = f"{prefix}_{number}"
        opening = json.dumps(f"{_PARAMETER}{key}>\n")
        choices = _text_choices(value)
        if choices:
            ends = (json.dumps(f"{choice}\n{_PARAMETER_END}\n") for choice in choices)
            rules.append(f"{part}: {opening} ({' | '.join(ends)})")
        elif _may_be_text(_types(value)):
            rules.append(f'{part}: {opening} {part}_text "\\n"')
            rules.append(f"{part}_text[lazy]: {_FREE_TEXT}")
        else:
            ending = json.dumps(f"\n{_PARAMETER_END}\n")
            rules.append(
                f"{part}: {opening} {json_rule(_with_definitions(value, schema))} {ending}"
            )
        parts.append(part if key in required else f"{part}?")
    begin = json.dumps(f"{name}>\n")
    end = json.dumps(f"{_FUNCTION_END}\n{CALL_END}")
    return [f"{prefix}: {' '.join((begin, *parts, end))}", *rules]


class _At(Enum):
    """Where in a call the text goes on."""

    TEXT = auto()
    OPEN = auto()
    NAME = auto()
    BETWEEN = auto()
    KEY = auto()
    VALUE = auto()
    CLOSE = auto()


class XmlCalls:
    """A call that is broken before its name is known becomes text. schemas: of each tool's arguments."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self._schemas = schemas
        self._outlet = TextOutlet()
        self._at = _At.TEXT
        self._held = ""
        self._raw = ""
        self._index = -1
        self._schema: Mapping[str, Any] = {}
        self._num_values = 0
        self._types: frozenset[str] | None = None
        self._value: list[str] = []
        self._starts_value = False

    def push(self, text: str) -> Iterator[Piece]:
        """Yield what became certain."""
        text, self._held = self._held + text, ""
        states = {
            _At.TEXT: self._in_text,
            _At.OPEN: self._in_open,
            _At.NAME: self._in_name,
            _At.BETWEEN: self._in_between,
            _At.KEY: self._in_key,
            _At.VALUE: self._in_value,
            _At.CLOSE: self._in_close,
        }
        while text:
            text = yield from states[self._at](text)

    def flush(self) -> Iterator[Piece]:
        """Yield what was held back; the answer has ended, and a call may be cut."""
        if self._at in (_At.OPEN, _At.NAME):
            yield from self._outlet.push(self._raw + self._held)
        elif self._at is _At.TEXT:
            yield from self._outlet.push(self._held)
        yield from self._outlet.flush()

    def _hold(self, text: str) -> str:
        self._held = text
        return ""

    def _in_text(self, text: str) -> Generator[Piece, None, str]:
        places = [(place, m) for m in (CALL_BEGIN, FUNCTION) if (place := text.find(m)) >= 0]
        if not places:
            held = num_held(text, (CALL_BEGIN, FUNCTION))
            yield from self._outlet.push(text[: len(text) - held])
            return self._hold(text[len(text) - held :])
        place, marker = min(places)
        yield from self._outlet.push(text[:place])
        self._raw = marker
        self._at = _At.OPEN if marker == CALL_BEGIN else _At.NAME
        return text[place + len(marker) :]

    def _in_open(self, text: str) -> Generator[Piece, None, str]:
        rest = text.lstrip(_SPACE)
        if rest.startswith(FUNCTION):
            self._raw += text[: len(text) - len(rest)] + FUNCTION
            self._at = _At.NAME
            return rest[len(FUNCTION) :]
        if FUNCTION.startswith(rest):
            return self._hold(text)
        return (yield from self._not_a_call(text))

    def _in_name(self, text: str) -> Generator[Piece, None, str]:
        name, end, rest = text.partition(">")
        if not _NAME.fullmatch(name):
            return (yield from self._not_a_call(text))
        if not end:
            return self._hold(text)
        self._index += 1
        self._schema = self._schemas.get(name, {})
        self._num_values = 0
        self._outlet.call()
        self._at = _At.BETWEEN
        yield ToolCallBegin(self._index, name)
        yield from self._arguments("{")
        return rest

    def _not_a_call(self, text: str) -> Generator[Piece, None, str]:
        self._at = _At.TEXT
        yield from self._outlet.push(self._raw)
        return text

    def _in_between(self, text: str) -> Generator[Piece, None, str]:
        rest = text.lstrip(_SPACE)
        if rest.startswith(_PARAMETER):
            self._at = _At.KEY
            return rest[len(_PARAMETER) :]
        if rest != _FUNCTION_END and (
            _PARAMETER.startswith(rest) or _FUNCTION_END.startswith(rest)
        ):
            return self._hold(rest)
        yield from self._arguments("}")
        self._at = _At.CLOSE
        return rest.removeprefix(_FUNCTION_END)

    def _in_key(self, text: str) -> Generator[Piece, None, str]:
        key, end, rest = text.partition(">")
        if not end:
            return self._hold(text)
        comma = ", " if self._num_values else ""
        self._num_values += 1
        schema = (self._schema.get("properties") or {}).get(key)
        self._types = _types(_resolved(schema, self._schema))
        self._value, self._starts_value = [], True
        self._at = _At.VALUE
        opening = '"' if self._types == _ONLY_TEXT else ""
        yield from self._arguments(f"{comma}{json.dumps(key, ensure_ascii=False)}: {opening}")
        return rest

    def _in_value(self, text: str) -> Generator[Piece, None, str]:
        if self._starts_value:
            # The line end after the opening tag, and the one before the closing tag, are not the value's.
            self._starts_value = False
            text = text.removeprefix("\n")
        value, end, rest = text.partition(_PARAMETER_END)
        if not end:
            held = num_held(text, ("\n" + _PARAMETER_END, _PARAMETER_END))
            value, self._held = text[: len(text) - held], text[len(text) - held :]
        if self._types == _ONLY_TEXT:
            closing = '"' if end else ""
            yield from self._arguments(_escaped(value.removesuffix("\n" if end else "")) + closing)
        else:
            self._value.append(value)
            if end and not self._ends_value():
                self._value.append(_PARAMETER_END)
                return rest
            if end:
                yield from self._arguments(_as_json("".join(self._value), self._types))
        if end:
            self._at = _At.BETWEEN
        return rest

    def _ends_value(self) -> bool:
        """Whether a closing tag after the value closes it, and is no part of a string in it."""
        value = "".join(self._value)
        return value.endswith("\n") or value.lstrip()[:1] not in ("{", "[") or _is_json(value)

    def _in_close(self, text: str) -> Generator[Piece, None, str]:
        rest = text.lstrip(_SPACE)
        if CALL_END.startswith(rest) and rest != CALL_END:
            return self._hold(rest)
        self._at = _At.TEXT
        yield from ()
        return rest.removeprefix(CALL_END)

    def _arguments(self, text: str) -> Iterator[Piece]:
        if text:
            yield ToolCallArguments(self._index, text)


def _resolved(value: object, schema: Mapping[str, Any]) -> object:
    """Return a property's schema, or the definition of `schema` to which it refers."""
    for _ in range(_MAX_REFERENCES):
        reference = value.get("$ref") if isinstance(value, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return value
        found: object = schema
        for step in reference[2:].split("/"):
            found = found.get(step) if isinstance(found, Mapping) else None
        if found is None:
            return value
        value = found
    return value


def _types(schema: object) -> frozenset[str] | None:
    """Return the JSON types that a value may have, as far as the schema says; None if it does not."""
    if not isinstance(schema, dict):
        return None
    kind = schema.get("type")
    if isinstance(kind, str | list):
        return frozenset((kind,) if isinstance(kind, str) else map(str, kind))
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(choices, list):
        return frozenset(map(_type_of, choices))
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            each = [_types(one) for one in schema[word]]
            known = [types for types in each if types is not None]
            return frozenset().union(*known) if len(known) == len(each) else None
    return None


def _type_of(value: object) -> str:
    match value:
        case str():
            return "string"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case None:
            return "null"
        case list():
            return "array"
        case _:
            return "object"


def _may_be_text(types: frozenset[str] | None) -> bool:
    """Whether a value may be a string; if nothing is known of it, it may."""
    return types is None or "string" in types


def _text_choices(schema: object) -> list[str]:
    """Return the strings of an enum of strings; none if the value is no such enum."""
    if not isinstance(schema, dict) or _types(schema) != _ONLY_TEXT:
        return []
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    return [one for one in choices if isinstance(one, str)] if isinstance(choices, list) else []


def _with_definitions(value: Any, schema: Mapping[str, Any]) -> Any:  # noqa: ANN401 - any JSON
    """Return a property's schema with the definitions to which it may refer."""
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return {**value, **definitions} if isinstance(value, dict) else value


def _as_json(text: str, types: frozenset[str] | None) -> str:
    """Return the JSON of a value that may be another than a string."""
    text = text.removesuffix("\n")
    word = _PYTHON_WORDS.get(text.strip(), text)
    try:
        value = json.loads(word)
    except (ValueError, RecursionError):
        value = text
    kind = _type_of(value)
    fits = types is None or kind in types or (kind == "integer" and "number" in types)
    if kind == "string" or (not fits and _may_be_text(types)):
        # A string that the model put in quotes is meant with them only where a string may stand.
        value = text if _may_be_text(types) else value
    return json.dumps(value, ensure_ascii=False)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]

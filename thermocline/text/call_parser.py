"""Reads the calls of an answer, in the format that a row of the table tells. Sans-I/O.

One parser for all formats: it walks along the row's pattern. A call that is broken before it was handed on
becomes text; later it is closed. Knows no format by name, no reasoning, no tokens and no request.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

from thermocline.text.feed import SPACE, begins_with, peek, run_of, skip_space, takes, until
from thermocline.text.literals import GEMMA, JSON, PYTHON, Outcome, literal
from thermocline.text.pieces import Piece, TextPiece, ToolCallArguments, ToolCallBegin
from thermocline.text.tagged_values import (
    ONLY_TEXT,
    as_json,
    as_text,
    from_elements,
    is_in_string,
    resolved,
    types_of,
)
from thermocline.text.tool_formats import Slot, parts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from thermocline.text.feed import Feed, Put, Reading
    from thermocline.text.literals import Dialect
    from thermocline.text.tool_formats import Part, ToolFormat

_NAME: Final = re.compile(r"[\w.\-/]*")
_ID: Final = re.compile(r"[\w.\-]*")
_KEY: Final = re.compile(r"\w*")
_WORD: Final = re.compile(r"[^\"<>]*")
_MAX_NAME_CHARS: Final = 256
_ARGUMENT_KEYS: Final = frozenset(("arguments", "parameters"))
_OTHER_KEYS: Final = frozenset(("id", "type", "tool_call_id"))
_JSON_KEY: Final = re.compile(r'"(\w+)": \{(name|arguments)\}')
_CDATA: Final = "<![CDATA["
_CDATA_END: Final = "]]>"


class _NoCallError(Exception):
    """What looked like a call is none, and nothing of it was handed on."""


class _EndedError(Exception):
    """The call has begun, and ends here: the text is cut, or broken and closed."""


class TextOutlet:
    """Text on its way out. Space is held until text follows it; next to calls it is dropped."""

    def __init__(self, say: Callable[[Piece], None]) -> None:
        self._say = say
        self._space = ""
        self._after_call = False

    def push(self, text: str) -> None:
        """Hand on `text` but for the space at its end."""
        whole = self._space + text
        shown = whole.rstrip(SPACE)
        self._space = whole[len(shown) :]
        if self._after_call:
            shown = shown.lstrip(SPACE)
        if shown:
            self._after_call = False
            self._say(TextPiece(shown))

    def call(self) -> None:
        """A call stands here."""
        self._space = ""
        self._after_call = True

    def flush(self) -> None:
        """Hand on the space at the end, unless a call was before it."""
        if self._space and not self._after_call:
            self._say(TextPiece(self._space))
        self._space = ""


class CallReader:
    """The calls of one answer. schemas: of each tool's arguments."""

    def __init__(
        self,
        row: ToolFormat,
        schemas: Mapping[str, Mapping[str, Any]],
        feed: Feed,
        say: Callable[[Piece], None],
        outlet: TextOutlet,
    ) -> None:
        self._row, self._schemas, self._feed = row, schemas, feed
        self._say, self._outlet = say, outlet
        form = row.messages
        pattern = row.call if form is None else row.call.partition(form.header_end)[2]
        self._parts = parts_of(pattern)
        self._section, self._end = row.section_begin.split(), row.section_end.split()
        first = self._parts[0]
        self._first = first.split() if isinstance(first, str) else []
        keys = {kind: key for key, kind in _JSON_KEY.findall(row.json)}
        self._name_key = keys.get("name", "name")
        self._argument_keys = _ARGUMENT_KEYS | {keys.get("arguments", "arguments")}
        self._index = -1
        self._has_begun = False

    def openings(self) -> tuple[str, ...]:
        """Return the texts that begin calls among other text; none for calls without marks."""
        places = self._first[: 2 if self._row.may_lack_begin else 1]
        return tuple(dict.fromkeys((*self._section[:1], *places)))

    def calls(self, opening: str) -> Reading[None]:
        """Read what comes after one of the openings, which was taken."""
        self._feed.start_record(opening)
        if self._section and opening == self._section[0]:
            yield from self._in_section()
            return
        try:
            yield from self._call(self._first.index(opening) + 1)
        except _NoCallError:
            self._outlet.push(self._feed.record())

    def bare_calls(self) -> Reading[bool]:
        """Read calls without marks, one after the other; return whether there was one."""
        num_calls = 0
        while True:
            self._feed.start_record()
            space = yield from skip_space(self._feed)
            if num_calls and (yield from takes(self._feed, self._row.separator.strip() or "\n")):
                space += yield from skip_space(self._feed)
            if not (yield from begins_with(self._feed, "{")):
                self._outlet.push(space)
                return num_calls > 0
            try:
                yield from self._call(0)
            except _NoCallError:
                self._outlet.push(self._feed.record())
                return num_calls > 0
            num_calls += 1

    def named(self, name: str) -> Reading[None]:
        """Read the arguments of a call whose name is known."""
        self._feed.start_record()
        try:
            yield from self._arguments(name, JSON)
        except _NoCallError:
            self._outlet.push(self._feed.record())
        except _EndedError:
            pass

    def _in_section(self) -> Reading[None]:
        num_calls = 0
        try:
            for word in self._section[1:]:
                yield from self._expect(word)
            while (yield from self._comes(num_calls)):
                yield from self._call(0)
                num_calls += 1
                self._feed.start_record()
        except _NoCallError:
            self._outlet.push(self._feed.record())
            return
        for word in self._end:
            yield from self._pass_over(word)

    def _comes(self, num_calls: int) -> Reading[bool]:
        """Whether another call comes in the section. Raises _NoCallError if it ends without any."""
        yield from skip_space(self._feed)
        between = self._row.separator.strip()
        goes_on = not (num_calls and between) or (yield from takes(self._feed, between))
        yield from skip_space(self._feed)
        if self._end and (yield from begins_with(self._feed, self._end[0])):
            if not num_calls:
                raise _NoCallError
            return False
        if not num_calls:
            return True
        if not goes_on or (yield from peek(self._feed)) == "":
            return False
        return not self._first or (yield from begins_with(self._feed, self._first[0]))

    def _call(self, num_read: int) -> Reading[None]:
        """Read one call, of whose first words `num_read` were taken."""
        self._has_begun = False
        name = ""
        words = self._words(0)[num_read:]
        try:
            for place, part in enumerate(self._parts):
                if isinstance(part, str):
                    for word in words if place == 0 else self._words(place):
                        yield from self._pass_over(word) if self._has_begun else self._expect(word)
                elif part.kind == "name":
                    name = yield from self._name()
                else:
                    yield from self._slot(part, name, self._words(place + 1))
        except _EndedError:
            return

    def _words(self, place: int) -> list[str]:
        part: Part = self._parts[place] if place < len(self._parts) else ""
        return part.split() if isinstance(part, str) else []

    def _slot(self, slot: Slot, name: str, after: list[str]) -> Reading[None]:
        match slot.kind:
            case "json":
                yield from self._json_object()
            case "arguments":
                yield from self._arguments(name, JSON)
            case "dict":
                yield from self._arguments(name, GEMMA)
            case "keywords":
                yield from self._keywords(name, after)
            case "parameters":
                yield from self._parameters(name, after)
            case _:  # a number or an id
                yield from skip_space(self._feed)
                yield from run_of(self._feed, _ID, _MAX_NAME_CHARS)

    def _name(self) -> Reading[str]:
        yield from skip_space(self._feed)
        name = yield from run_of(self._feed, _NAME, _MAX_NAME_CHARS)
        if not name or not self._feed.text:
            raise _NoCallError  # nothing, or cut
        return name

    def _arguments(self, name: str, dialect: Dialect) -> Reading[None]:
        """Read an object."""
        yield from skip_space(self._feed)
        if not (yield from begins_with(self._feed, "{")):
            raise _NoCallError
        self._begin(name)
        yield from self._value(dialect, self._put)

    def _value(self, dialect: Dialect, put: Put, closing: str = "") -> Reading[None]:
        """Read a literal; `closing` closes what is around it, if it is broken."""
        outcome = yield from literal(self._feed, dialect, put)
        if outcome is Outcome.BROKEN and closing:
            put(closing)
        if outcome is not Outcome.DONE:
            raise _EndedError

    def _json_object(self) -> Reading[None]:
        """Read {"name": ..., "arguments": ...}; arguments wait for the name."""
        yield from self._expect("{")
        name: str | None = None
        waiting: list[str] = []
        has_arguments = is_next = False

        def put(text: str) -> None:
            if name is None:
                waiting.append(text)
            else:
                if not self._has_begun:
                    self._begin(name)
                self._put(text)

        while True:
            yield from skip_space(self._feed)
            char = yield from peek(self._feed)
            if char == "}":
                self._feed.take(1)
                break
            if is_next:
                yield from self._expect(",")
            key = yield from self._json_text()
            yield from self._expect(":")
            if key == self._name_key and name is None:
                name = (yield from self._json_text()) or None
                if name is None:
                    raise self._stop()
                if waiting:
                    put("".join(waiting))
            elif key in self._argument_keys and not has_arguments:
                has_arguments = True
                yield from self._json_arguments(put)
            elif key in _OTHER_KEYS:
                if (yield from literal(self._feed, JSON, lambda _: None)) is not Outcome.DONE:
                    raise self._stop()
            else:
                raise self._stop()
            is_next = True
        if name is None:
            raise _NoCallError
        if not has_arguments:
            put("{}")

    def _json_arguments(self, put: Put) -> Reading[None]:
        """Hand on an object, or the object that a string holds."""
        yield from skip_space(self._feed)
        if (yield from begins_with(self._feed, "{")):
            outcome = yield from literal(self._feed, JSON, put)
            if outcome is not Outcome.DONE:
                raise self._stop()
            return
        text = yield from self._json_text()
        if not _is_object(text):
            raise self._stop()
        put(text)

    def _json_text(self) -> Reading[str]:
        """Read a JSON string; return what it says."""
        yield from skip_space(self._feed)
        if not (yield from begins_with(self._feed, '"')):
            raise self._stop()
        parts: list[str] = []
        if (yield from literal(self._feed, JSON, parts.append)) is not Outcome.DONE:
            raise self._stop()
        return str(json.loads("".join(parts)))

    def _keywords(self, name: str, after: list[str]) -> Reading[None]:
        """Read name=literal, ... up to what comes after them."""
        num_values = 0
        while True:
            yield from skip_space(self._feed)
            if after and (yield from begins_with(self._feed, after[0])):
                break
            if num_values:
                yield from self._expect_or_close(",")
                yield from skip_space(self._feed)
            key = yield from run_of(self._feed, _KEY, _MAX_NAME_CHARS)
            if not key:
                raise self._closed()
            yield from self._expect_or_close("=")
            if not self._has_begun:
                self._begin(name)
                self._put("{")
            comma = ", " if num_values else ""
            self._put(f"{comma}{as_text(key)}: ")
            yield from skip_space(self._feed)
            yield from self._value(PYTHON, self._put, "}")
            num_values += 1
        if not num_values:
            self._begin(name)
            self._put("{")
        self._put("}")

    def _expect_or_close(self, word: str) -> Reading[None]:
        yield from skip_space(self._feed)
        if not (yield from takes(self._feed, word)):
            raise self._closed()

    def _parameters(self, name: str, after: list[str]) -> Reading[None]:
        """Read one argument after the other; another text than theirs ends the call."""
        parts = parts_of(self._row.parameter)
        assert isinstance(parts[0], str), "a parameter begins with a mark"
        opening = parts[0].split()[0]
        schema = self._schemas.get(name, {})
        num_values = 0
        while True:
            yield from skip_space(self._feed)
            if after and (yield from begins_with(self._feed, after[0])):
                break
            if not (yield from takes(self._feed, opening)):
                break
            if not num_values:
                self._begin(name)
                self._put("{")
            yield from _Parameter(self, schema, parts).read(num_values)
            num_values += 1
        if not num_values:
            if not (after and (yield from begins_with(self._feed, after[0]))):
                raise _NoCallError
            self._begin(name)
            self._put("{")
        self._put("}")

    def _begin(self, name: str) -> None:
        self._index += 1
        self._has_begun = True
        self._outlet.call()
        self._say(ToolCallBegin(self._index, name))

    def _put(self, text: str) -> None:
        if text:
            self._say(ToolCallArguments(self._index, text))

    def _expect(self, word: str) -> Reading[None]:
        yield from skip_space(self._feed)
        if not (yield from takes(self._feed, word)):
            raise self._stop()

    def _pass_over(self, word: str) -> Reading[None]:
        yield from skip_space(self._feed)
        yield from takes(self._feed, word)

    def _stop(self) -> Exception:
        return _EndedError() if self._has_begun else _NoCallError()

    def _closed(self) -> Exception:
        """Close an object that can not go on, unless its text is only cut."""
        if not self._has_begun:
            return _NoCallError()
        if self._feed.text or not self._feed.has_ended:
            self._put("}")
        return _EndedError()


class _Parameter:
    """One argument that stands alone, between marks."""

    def __init__(
        self, reader: CallReader, schema: Mapping[str, Any], parts: tuple[Part, ...]
    ) -> None:
        self._reader, self._feed, self._schema = reader, reader._feed, schema
        self._put = reader._put
        self._row = reader._row
        self._parts = parts
        self._value: list[str] = []

    def read(self, number: int) -> Reading[None]:
        """Hand on `"key": value`; the first word of the opening was taken."""
        key, value, types = "", None, None
        place = next(place for place, part in enumerate(self._parts) if part == Slot("value"))
        for before, part in enumerate(self._parts[:place]):
            if isinstance(part, str):
                for word in part.split()[0 if before else 1 :]:
                    yield from self._mark(word)
            elif part.kind == "key":
                key = yield from self._key(str(self._parts[before + 1]).split()[0])
                value = resolved((self._schema.get("properties") or {}).get(key), self._schema)
                types = types_of(value)
                self._put(f"{', ' if number else ''}{as_text(key)}: ")
            else:
                told = yield from run_of(self._feed, _WORD, _MAX_NAME_CHARS)
                types = _told_types(told, types)
        closing = "".join(p if isinstance(p, str) else key for p in self._parts[place + 1 :])
        yield from self._text(value, types, self._lines_around(place), closing.split()[0])

    def _lines_around(self, place: int) -> tuple[bool, bool]:
        before, after = self._parts[place - 1], self._parts[place + 1]
        return str(before).endswith("\n"), str(after).startswith("\n")

    def _mark(self, word: str) -> Reading[None]:
        yield from skip_space(self._feed)
        if not (yield from takes(self._feed, word)):
            self._reader._put("null}" if self._feed.text or not self._feed.has_ended else "")
            raise _EndedError

    def _key(self, mark: str) -> Reading[str]:
        """Read up to the mark after the key, and leave it."""
        while True:
            place = self._feed.text.find(mark)
            if place >= 0:
                return self._feed.take(place).strip()
            if self._feed.has_ended:
                raise _EndedError
            yield

    def _text(
        self,
        schema: object,
        types: frozenset[str] | None,
        lines: tuple[bool, bool],
        mark: str,
    ) -> Reading[None]:
        begins_line, ends_line = lines
        if begins_line:
            yield from takes(self._feed, "\n")
        is_text = types == ONLY_TEXT
        put = self._put_text if is_text else self._value.append
        if is_text:
            self._put('"')
        if self._row.has_cdata and (yield from takes(self._feed, _CDATA)):
            if (yield from until(self._feed, (_CDATA_END,), put)) is None:
                raise _EndedError
            yield from skip_space(self._feed)
            ends_line = False
        marks = (f"\n{mark}", mark) if ends_line else (mark,)
        while True:
            found = yield from until(self._feed, marks, put)
            if found is None:
                raise _EndedError
            if is_text or not is_in_string("".join(self._value)):
                break
            self._value.append(found)
        self._put('"' if is_text else self._json(schema, types))

    def _json(self, schema: object, types: frozenset[str] | None) -> str:
        text, prefix = "".join(self._value), self._row.nested
        has_parts = prefix and text.lstrip().startswith(f"{prefix}<")
        if has_parts and (types is None or "string" not in types):
            return as_text(from_elements(text, prefix, schema, self._schema))
        return as_json(text, types)

    def _put_text(self, text: str) -> None:
        self._put(json.dumps(text, ensure_ascii=False)[1:-1])


def _told_types(told: str, types: frozenset[str] | None) -> frozenset[str] | None:
    """Return a value's types where the call itself tells whether it is a text."""
    if told in ("true", "string"):
        return ONLY_TEXT
    return None if types == ONLY_TEXT else types


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False

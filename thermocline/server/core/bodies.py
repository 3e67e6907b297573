"""Decodes the bytes of a body to a typed request, and its sampling fields. Knows no interface."""

from __future__ import annotations

import codecs
import re
from dataclasses import fields
from typing import Any, Final, TypeAlias, TypeVar

import msgspec

from thermocline.errors import RequestError
from thermocline.sampling.params import SamplingParams
from thermocline.speculation.contract import drafter_names

T = TypeVar("T")

_SAMPLING_NAMES: Final = frozenset(field.name for field in fields(SamplingParams))

JsonObject: TypeAlias = dict[str, Any]

_SHOWN_NAME_CHARS: Final = 64
_CHECKED_BYTES: Final = 1 << 20

_PLACE: Final = re.compile(r" - at (?:`key` in )?`\$\.?(.*?)(?:\[\.\.\.\])?`$")


def decode_body(raw: bytes, kind: type[T]) -> T:
    """Return the request in `raw`. Raises RequestError for any fault in it."""
    try:
        _check_text(raw)
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise misfit(error) from error
    except RecursionError as error:
        raise RequestError("the body is nested too deeply: send a flatter one") from error
    # Invalid UTF-8 and integers of thousands of digits are ValueErrors.
    except (msgspec.DecodeError, ValueError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error


def _check_text(raw: bytes) -> None:
    """Raise UnicodeDecodeError for what is no UTF-8.

    msgspec does not look into what it skips, such as the names of unknown fields. As one text, a body with a single
    emoji takes four times its size.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(raw), _CHECKED_BYTES):
        decoder.decode(raw[start : start + _CHECKED_BYTES])
    decoder.decode(b"", final=True)


def misfit(error: msgspec.ValidationError, inside: str = "") -> RequestError:
    """Return the error of a value that does not fit its type, with its path below `inside`."""
    text = str(error)
    place = _PLACE.search(text)
    message = text if place is None else text[: place.start()]
    names = (inside, "" if place is None else place[1])
    param = ".".join(name for name in names if name) or None
    return RequestError(f"{param or 'the body'}: {message}", param=param)


def unknown_fields(raw: bytes, kind: type[msgspec.Struct]) -> list[str]:
    """Return the names in the object `raw`, a valid `kind`, that are no fields of `kind`; long names are cut."""
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    return [
        name[:_SHOWN_NAME_CHARS]
        for name in msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        if name not in known
    ]


def sampling_params(body: msgspec.Struct, **given: Any) -> SamplingParams:  # noqa: ANN401 - JSON
    """Return the params in `given`, and those in the fields of `body` that have a param's name. Raises RequestError.

    None is the default of `SamplingParams`; a single `stop` string may stand without a list.
    """
    values = {name: getattr(body, name) for name in _SAMPLING_NAMES & set(body.__struct_fields__)}
    values |= given
    if isinstance(stop := values.get("stop"), str):
        values["stop"] = (stop,)
    return SamplingParams(**{name: value for name, value in values.items() if value is not None})


def speculate_names(text: str | None) -> tuple[str, ...] | None:
    """Return the drafters that a request names; None for auto, and where it names none. Raises RequestError."""
    if text is None:
        return None
    try:
        return drafter_names(text)
    except ValueError as error:
        raise RequestError(f"speculate: {error}", param="speculate") from error

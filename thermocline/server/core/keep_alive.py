"""How long a model stays in memory after its last request, as Ollama's clients write it. Pure."""

from __future__ import annotations

import math
import re
from typing import Final

from thermocline.errors import RequestError

DEFAULT_KEEP_ALIVE_S: Final = 300.0
FOREVER: Final = math.inf

_UNITS_S: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART: Final = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_WHOLE: Final = re.compile(rf"(?P<sign>[+-]?)(?P<parts>(?:{_PART.pattern})+)")
_NUMBER: Final = re.compile(r"[+-]?\d+(?:\.\d*)?")
_MAX_CHARS: Final = 64


def parse_keep_alive(value: float | str) -> float:
    """Return seconds: of a number, or of a text such as "5m", "1h30m" or "-1". What is below zero is for ever.

    Raises RequestError for what is no duration.
    """
    seconds = _seconds(value) if isinstance(value, str) else float(value)
    if seconds is None or math.isnan(seconds):
        raise RequestError(
            f'keep_alive is {str(value)[:_MAX_CHARS]!r}: send seconds, or a text such as "5m", "1h30m" or "-1"',
            param="keep_alive",
        )
    return FOREVER if seconds < 0 else seconds


def _seconds(text: str) -> float | None:
    if len(text) > _MAX_CHARS:
        return None
    if _NUMBER.fullmatch(text):
        return float(text)
    whole = _WHOLE.fullmatch(text)
    if whole is None:
        return None
    total_s = sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(whole["parts"]))
    return -total_s if whole["sign"] == "-" else total_s

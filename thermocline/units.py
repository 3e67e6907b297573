"""Byte sizes and durations: parse, format, divide, align. Pure; knows nothing of models or files."""

from __future__ import annotations

import re

from thermocline.errors import ConfigError

_BYTE_UNITS = {
    "": 1,
    "b": 1,
    "k": 1 << 10, "kb": 10**3, "kib": 1 << 10,
    "m": 1 << 20, "mb": 10**6, "mib": 1 << 20,
    "g": 1 << 30, "gb": 10**9, "gib": 1 << 30,
    "t": 1 << 40, "tb": 10**12, "tib": 1 << 40,
}  # fmt: skip

# Who writes a smaller number without a unit means GiB.
_LEAST_BYTES = 1 << 20


def parse_bytes(text: str) -> int:
    """Return the bytes that `text` names: "24GiB", "512 MB", "1.5g" (a bare letter is binary), "2000000B", "0".

    Raises ConfigError for what is no size, and for a number without a unit.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in _BYTE_UNITS:
        raise ConfigError(f"{text!r} is not a size: write for example 512MiB or 12GiB")
    number = float(match[1])
    if not match[2] and number:
        meant = f"did you mean {match[1]}GiB? Write" if number < _LEAST_BYTES else "write"
        raise ConfigError(f"{text!r} has no unit: {meant} {match[1]}B for bytes")
    return int(number * _BYTE_UNITS[match[2].lower()])


def format_bytes(num_bytes: float) -> str:
    """Return `num_bytes` in the largest binary unit that leaves at least one whole: "1.50 GiB"."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def format_seconds(seconds: float) -> str:
    """Return a duration in the unit a person would say: "1.50 s", "12.3 ms", "450 us"."""
    if abs(seconds) >= 1:
        return f"{seconds:.2f} s"
    if abs(seconds) >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.0f} us"


def ceil_div(numerator: int, denominator: int) -> int:
    """Return numerator / denominator rounded up; the denominator is positive."""
    return -(-numerator // denominator)


def align_up(value: int, alignment: int) -> int:
    """Return the smallest multiple of `alignment` that is not below `value`."""
    return ceil_div(value, alignment) * alignment

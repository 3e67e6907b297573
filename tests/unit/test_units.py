"""Sizes as users write them."""

from __future__ import annotations

import re

import pytest

from thermocline.errors import ConfigError
from thermocline.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 << 30),
        ("512 MB", 512 * 10**6),
        ("1.5g", 3 << 29),
        ("12B", 12),
        ("0", 0),
        ("1048576B", 1 << 20),
    ],
)
def test_sizes(text, size):
    """Units are decimal or binary, a bare letter is binary, and nothing needs no unit."""
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["12", "1.5", "24", "1048575", " 8 "])
def test_a_small_number_without_a_unit_is_a_mistake(text):
    """12 means 12 GiB to whoever writes it, and 12 bytes to a program: it is refused with both spellings."""
    meant = re.escape(f"did you mean {text.strip()}GiB? Write {text.strip()}B for bytes")
    with pytest.raises(ConfigError, match=meant):
        parse_bytes(text)


def test_a_large_number_without_a_unit_is_refused():
    """Whether it is bytes is for who wrote it to say."""
    with pytest.raises(
        ConfigError, match="'12884901888' has no unit: write 12884901888B for bytes"
    ):
        parse_bytes("12884901888")


@pytest.mark.parametrize("text", ["", "much", "12 parsecs", "-1GiB", "1e9"])
def test_what_is_no_size_is_refused(text):
    """The message shows how sizes are written."""
    with pytest.raises(ConfigError, match="is not a size: write for example"):
        parse_bytes(text)


def test_sizes_are_shown_in_the_largest_unit():
    """At least one whole of it."""
    assert [format_bytes(size) for size in (0, 1023, 1 << 20, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1.00 MiB",
        "3.00 TiB",
    ]

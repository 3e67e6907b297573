"""Texts of a megabyte in a file's metadata: opening it works, or fails with a message that one can read."""

from __future__ import annotations

import pytest

from tests.support.toy_model import ToyShape, toy_metadata, write_toy_model
from thermocline import Engine
from thermocline.errors import ThermoclineError

LONG = "x" * (1 << 20)
TEXTS = sorted(key for key, value in toy_metadata(ToyShape()).items() if isinstance(value, str))


@pytest.mark.parametrize("key", [*TEXTS, "qwen3moe.rope.scaling.type", "general.name"])
async def test_a_long_text_is_not_told_whole(tmp_path, key):
    """Every text of the header, one at a time."""
    path, said = write_toy_model(tmp_path / "toy.gguf", metadata={key: LONG}), ""
    try:
        async with Engine.open(path):
            pass
    except ThermoclineError as error:
        said = str(error)
    assert len(said) < 3000  # some list what is known

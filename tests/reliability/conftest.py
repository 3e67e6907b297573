"""Models for the tests of reliability."""

from __future__ import annotations

import pytest

from tests.support.toy_model import ToyShape, write_toy_model


@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    """The path of a toy model whose answers do not end by themselves within a test."""
    folder = tmp_path_factory.mktemp("models")
    return write_toy_model(folder / "toy.gguf", ToyShape(context=1 << 15))

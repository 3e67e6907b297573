"""Fixtures for the text tests: one trained vocabulary and its tokenizer, one template child."""

from __future__ import annotations

import pytest

from tests.unit.text.vocabularies import train
from thermocline.text.chat_template import ChatTemplate
from thermocline.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def vocabulary():
    """A small qwen2 vocabulary with control, user-defined and odd tokens."""
    return train("qwen2", vocab_size=900, num_words=4000)


@pytest.fixture(scope="session")
def tokenizer(vocabulary):
    """The tokenizer over it."""
    return Tokenizer(vocabulary.data("qwen2"))


@pytest.fixture(scope="session")
def chatml(tokenizer):
    """The ChatML template for that vocabulary, in one child for the whole session."""
    with ChatTemplate.chatml(control_tokens=tokenizer.control_texts) as template:
        yield template

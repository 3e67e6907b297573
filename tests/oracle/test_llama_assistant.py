"""Gemma 4's own drafters against llama.cpp and transformers on the same pairs of files: tokens in, guesses out."""

from __future__ import annotations

import pytest

pytest.importorskip("llama_cpp")
pytest.importorskip("transformers")

from tests.oracle.hf_assistant import HfAssistant
from tests.oracle.llama_assistant import LlamaAssistant
from tests.oracle.toolchain.tiny_assistant import convert_pair
from tests.support.assistant_runs import assistant_guesses
from tests.support.compare import assert_within
from tests.support.oracle_cases import prompt_ids
from tests.support.toy_archs import write_toy_arch
from tests.support.toy_assistant import PAIRS, write_assistant

pytestmark = pytest.mark.oracle

NUM_CHAINED = 5


def compare(oracle: HfAssistant, target, drafter, num_tokens: int) -> None:
    """Fail unless all three guess the same tokens, from the same logits, and with the same states behind each guess.

    Each has its own model's keys, values and state.
    """
    ids = prompt_ids(num_tokens + 1)
    known, chain = ids[:num_tokens], ids[num_tokens:]
    with LlamaAssistant(target, drafter) as llama:
        before = llama.states(known)[-1:]
        for _ in range(NUM_CHAINED):
            logits, before = llama.draft(chain[-1:], before, len(known))
            chain.append(int(logits.argmax()))
        theirs = llama.guesses(known, chain)
    ours, exact = assistant_guesses(target, drafter, known, chain), oracle.guesses(known, chain)
    for found, expected in zip(ours, exact, strict=True):
        assert_within(found, expected, "transformers/F32")
    for found, expected in zip(ours, theirs, strict=True):
        assert_within(found, expected, "llama.cpp/F32 and GELU")
    assert ours[0].argmax(axis=1)[:NUM_CHAINED].tolist() == chain[1:]


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 40])
def test_toy_drafters_agree(tmp_path, name, num_tokens):
    """In a window, at its edge, and behind it."""
    pair = PAIRS[name]
    target = write_toy_arch(tmp_path / "target.gguf", pair.target)
    drafter = write_assistant(tmp_path / "drafter.gguf", pair)
    compare(HfAssistant.from_files(target, drafter), target, drafter, num_tokens)


@pytest.mark.parametrize("num_tokens", [5, 40])
def test_a_converted_pair_agrees(tmp_path, num_tokens):
    """The converter's files, and the classes that they were converted from."""
    pair = convert_pair(tmp_path)
    compare(pair.oracle, pair.target, pair.drafter, num_tokens)

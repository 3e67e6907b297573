"""EAGLE-3 drafters against llama.cpp on the same pairs of files: the model's layers in, guesses out."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("llama_cpp")
pytest.importorskip("transformers")

from tests.oracle.llama_eagle3 import LlamaEagle3
from tests.oracle.toolchain.tiny_eagle3 import CHECKPOINTS, LAYERS_READ, convert_pair
from tests.support.compare import assert_within
from tests.support.dflash_runs import trunk_features
from tests.support.eagle3_runs import eagle_guesses
from tests.support.oracle_cases import prompt_ids
from tests.support.toy_archs import write_toy_arch
from tests.support.toy_eagle3 import EAGLES, tokens_of_rows, write_eagle

pytestmark = pytest.mark.oracle

NUM_CHAINED = 5


def compare(target, drafter, layers, tokens: np.ndarray, num_tokens: int):
    """Fail unless both guess the same tokens, one behind the other, from the same logits and states.

    Each has its own model's features. tokens: those that the drafter can guess. Returns what was known, the features,
    the chain of guesses, and our logits and states.
    """
    ids = prompt_ids(num_tokens + 1)
    known, chain = ids[:num_tokens], ids[num_tokens:]
    with LlamaEagle3(target, drafter, layers) as llama:
        features = llama.features(known)
        for _ in range(NUM_CHAINED):
            logits, _ = llama.guesses(known, features, chain)
            chain.append(int(logits[-1].argmax()))
        logits, states = llama.guesses(known, features, chain)
    others = np.setdiff1d(np.arange(logits.shape[1]), tokens)
    assert np.isneginf(logits[:, others]).all()
    ours = trunk_features(target, known, layers)
    assert_within(ours, features, "llama.cpp/F32")
    found = eagle_guesses(target, drafter, known, ours, chain)
    for mine, theirs in zip(found, (logits[:, tokens], states), strict=True):
        assert_within(mine, theirs, "llama.cpp/F32")
    assert tokens[found[0].argmax(axis=1)][:NUM_CHAINED].tolist() == chain[1:]
    return known, ours, chain, found


@pytest.mark.parametrize("name", EAGLES)
@pytest.mark.parametrize("num_tokens", [1, 2, 30])
def test_toy_drafters_agree(tmp_path, name, num_tokens):
    """With a part of the vocabulary, other widths, shared ends, norms at other places, and behind one token."""
    toy = EAGLES[name]
    target = write_toy_arch(tmp_path / "target.gguf", toy.target)
    drafter = write_eagle(tmp_path / "drafter.gguf", toy)
    compare(target, drafter, toy.layers_read, tokens_of_rows(toy), num_tokens)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_converted_pair_agrees(tmp_path, name):
    """The converter's files, and the formulas of the checkpoint that it was given."""
    pair = convert_pair(tmp_path, name)
    known, features, chain, found = compare(pair.target, pair.drafter, LAYERS_READ, pair.tokens, 30)
    for mine, exact in zip(found, pair.guesses(known, features, chain), strict=True):
        assert_within(mine, exact, "transformers/F32")

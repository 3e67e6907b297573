"""Blocks that guess further tokens against llama.cpp on the same file: its trunk's states in, logits out.

transformers drops these weights, so llama.cpp is the one oracle that runs them.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("llama_cpp")

from tests.oracle.llama_drafts import LlamaDrafter
from tests.support.block_runs import block_logits, trunk_states
from tests.support.compare import assert_within
from tests.support.oracle_cases import prompt_ids
from tests.support.toy_next_block import (
    DRAFTING_CASES,
    DRAFTING_TOYS,
    case_name,
    write_drafting_toy,
)

pytestmark = pytest.mark.oracle

NUM_TOKENS, NUM_CHAINED = 40, 4
CASES = pytest.mark.parametrize(
    ("name", "own_ends"), DRAFTING_CASES, ids=[case_name(*case) for case in DRAFTING_CASES]
)


def compare(path) -> None:
    """Fail unless both give the same logits: of a prompt, and of a chain of each step's best token.

    llama.cpp gets its own trunk's states and we get ours, which must agree, too.
    """
    ids = prompt_ids(NUM_TOKENS)
    with LlamaDrafter(path) as llama:
        theirs = llama.states(ids)
        assert_within(trunk_states(path, ids), theirs, "llama.cpp/F32")
        before = np.concatenate((np.zeros_like(theirs[:1]), theirs[:-1]))
        expected, states = llama.draft(ids, before, 0)
        chain, rows = [], [expected]
        for position in range(NUM_TOKENS, NUM_TOKENS + NUM_CHAINED):
            chain.append(int(rows[-1][-1].argmax()))
            logits, states = llama.draft(chain[-1:], states[-1:], position)
            rows.append(logits)
    ours = block_logits(path, ids, chain)
    assert_within(ours[:NUM_TOKENS], expected, "llama.cpp/F32")
    assert_within(ours[NUM_TOKENS:], np.concatenate(rows[1:]), "llama.cpp/F32")


@CASES
def test_toy_blocks_agree(tmp_path, name, own_ends):
    """Every architecture that drafts, with ends of the block's own and with the model's."""
    compare(write_drafting_toy(tmp_path / "m.gguf", DRAFTING_TOYS[name], own_ends=own_ends))

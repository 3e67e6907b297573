"""Blocks that guess further tokens against llama.cpp on the same file: its trunk's states in, logits out.

transformers drops these weights, so llama.cpp is the one oracle that runs them.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("llama_cpp")

from tests.oracle.llama_drafts import LlamaDrafter
from tests.support.block_runs import BlockRuns, trunk_states
from tests.support.compare import assert_within
from tests.support.oracle_cases import prompt_ids
from tests.support.toy_next_block import (
    DRAFTING_CASES,
    DRAFTING_TOYS,
    case_name,
    chained_logits,
    write_drafting_toy,
)
from thermocline.kernels.cpu import NativeKernels
from thermocline.modelfile.reader import open_model_file

pytestmark = pytest.mark.oracle

NUM_TOKENS = 40
CHAIN = (65, 7, 200, 31)
CASES = pytest.mark.parametrize(
    ("name", "own_ends"), DRAFTING_CASES, ids=[case_name(*case) for case in DRAFTING_CASES]
)


def compare(path) -> None:
    """Fail unless both give the same logits: of a prompt, and of a draft behind it.

    llama.cpp gets its own trunk's states and we get ours, which must agree, too.
    """
    ids = prompt_ids(NUM_TOKENS)

    def logits(run, num_blocks, states):
        before = np.concatenate((np.zeros_like(states[:1]), states[:-1]))
        return chained_logits(run, num_blocks, before, ids, CHAIN, range(NUM_TOKENS))

    with open_model_file(path) as file:
        ours = BlockRuns(file, NativeKernels(threads=1))
        count, states = len(ours.blocks), trunk_states(path, ids)
        found = logits(ours.run_block, count, states)
    with LlamaDrafter(path) as llama:
        theirs = llama.states(ids)
        assert_within(states, theirs, "llama.cpp/F32")
        assert_within(found, logits(llama.run_block, count, theirs), "llama.cpp/F32")


@CASES
def test_toy_blocks_agree(tmp_path, name, own_ends):
    """Every architecture that drafts, with ends of the block's own and with the model's."""
    compare(write_drafting_toy(tmp_path / "m.gguf", DRAFTING_TOYS[name], own_ends=own_ends))

"""Writes tests/golden/next_blocks.npz: what llama.cpp answers for every toy block that guesses further tokens.

Run in an environment with llama_cpp:  python -m tests.oracle.make_drafts_golden
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from tests.oracle.llama_drafts import LlamaDrafter
from tests.support.toy_next_block import (
    BLOCK_TOKENS,
    CHAINED_TOKENS,
    DRAFTING_CASES,
    DRAFTING_TOYS,
    GOLDEN_BLOCKS,
    GOLDEN_ROWS,
    case_name,
    states_before,
    write_drafting_toy,
)


def main() -> None:
    """Ask about every case: tokens with given states, then some one by one with the block's own."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, own_ends in DRAFTING_CASES:
            toy = DRAFTING_TOYS[name]
            path = write_drafting_toy(Path(folder) / "model.gguf", toy, own_ends=own_ends)
            with LlamaDrafter(path) as llama:
                logits, states = llama.draft(BLOCK_TOKENS, states_before(toy), 0)
                rows = [logits[list(GOLDEN_ROWS)]]
                for position, token in enumerate(CHAINED_TOKENS, len(BLOCK_TOKENS)):
                    logits, states = llama.draft([token], states[-1:], position)
                    rows.append(logits)
            found[case_name(name, own_ends)] = np.concatenate(rows)
    np.savez_compressed(GOLDEN_BLOCKS, **found)


if __name__ == "__main__":
    main()

"""Writes tests/golden/next_blocks.npz: what llama.cpp answers for every toy block that guesses further tokens.

Run in an environment with llama_cpp:  python -m tests.oracle.make_drafts_golden
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from tests.oracle.llama_drafts import LlamaDrafter
from tests.support.toy_next_block import (
    DRAFTING_CASES,
    DRAFTING_TOYS,
    GOLDEN_BLOCKS,
    SEVERAL,
    case_name,
    chained_logits,
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
                found[case_name(name, own_ends)] = chained_logits(
                    llama.run_block, SEVERAL.get(toy.arch, 1), states_before(toy)
                )
    np.savez_compressed(GOLDEN_BLOCKS, **found)


if __name__ == "__main__":
    main()

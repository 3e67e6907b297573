"""Writes tests/golden/dflash.npz: what llama.cpp answers for every toy block diffusion drafter.

Run in an environment with llama_cpp:  python -m tests.oracle.make_dflash_golden
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from tests.oracle.llama_dflash import LlamaBlockDrafter
from tests.support.toy_archs import write_toy_arch
from tests.support.toy_dflash import (
    GOLDEN_DFLASH,
    TARGET,
    TOYS,
    known_features,
    masked_block,
    write_toy_drafter,
)


def main() -> None:
    """Ask about every toy: a block behind positions with given features."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        target = write_toy_arch(Path(folder) / "target.gguf", TARGET)
        for name, toy in TOYS.items():
            path = write_toy_drafter(Path(folder) / "drafter.gguf", toy)
            with LlamaBlockDrafter(target, path, toy.layers_read) as llama:
                found[name] = llama.draft(known_features(toy), masked_block(toy))
    np.savez_compressed(GOLDEN_DFLASH, **found)


if __name__ == "__main__":
    main()

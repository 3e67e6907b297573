"""Writes tests/golden/eagle3.npz: what llama.cpp guesses for every toy EAGLE-3 drafter.

Run in an environment with llama_cpp:  python -m tests.oracle.make_eagle3_golden
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from tests.oracle.llama_eagle3 import LlamaEagle3
from tests.support.toy_archs import write_toy_arch
from tests.support.toy_eagle3 import (
    CHAINED_TOKENS,
    EAGLES,
    GOLDEN_EAGLE3,
    KNOWN_TOKENS,
    known_features,
    tokens_of_rows,
    write_eagle,
)


def main() -> None:
    """Ask about every toy: guesses behind positions with given features."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, toy in EAGLES.items():
            target = write_toy_arch(Path(folder) / "target.gguf", toy.target)
            drafter = write_eagle(Path(folder) / "drafter.gguf", toy)
            with LlamaEagle3(target, drafter, toy.layers_read) as llama:
                logits, following = llama.guesses(KNOWN_TOKENS, known_features(toy), CHAINED_TOKENS)
            found |= {name: logits[:, tokens_of_rows(toy)], f"{name} next": following}
    np.savez_compressed(GOLDEN_EAGLE3, **found)


if __name__ == "__main__":
    main()

"""Writes tests/golden/assistants.npz: what llama.cpp and transformers guess for every toy pair of Gemma 4's own drafters.

Run in an environment with llama_cpp and transformers:  python -m tests.oracle.make_assistant_golden
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from tests.oracle.hf_assistant import HfAssistant
from tests.oracle.llama_assistant import LlamaAssistant
from tests.support.toy_archs import write_toy_arch
from tests.support.toy_assistant import (
    CHAINED_TOKENS,
    GOLDEN_ASSISTANTS,
    KNOWN_TOKENS,
    PAIRS,
    write_assistant,
)


def main() -> None:
    """Ask both about every pair."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, pair in PAIRS.items():
            target = write_toy_arch(Path(folder) / "target.gguf", pair.target)
            drafter = write_assistant(Path(folder) / "drafter.gguf", pair)
            with LlamaAssistant(target, drafter) as llama:
                answers = {"llama.cpp": llama.guesses(KNOWN_TOKENS, CHAINED_TOKENS)}
            oracle = HfAssistant.from_files(target, drafter)
            answers["transformers"] = oracle.guesses(KNOWN_TOKENS, CHAINED_TOKENS)
            for who, (logits, following) in answers.items():
                found |= {f"{name} {who}": logits, f"{name} {who} next": following}
    np.savez_compressed(GOLDEN_ASSISTANTS, **found)


if __name__ == "__main__":
    main()

"""Writes tests/golden/qwen3moe.{json,npz}: what transformers answers for every toy model.

Run in an environment with torch and transformers:  python -m tests.oracle.make_logits_golden
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import transformers

from tests.oracle.hf_model import HfModel
from tests.support.golden_files import GOLDEN_LOGITS, GOLDEN_TOKENS, LOGITS_ROWS
from tests.support.oracle_cases import (
    ALL_CASES,
    ANSWER_TOKENS,
    LONGEST_PROMPT,
    MIN_LEAD,
    model_digest,
    prompt_ids,
    write_case,
)


def main() -> None:
    """Ask the oracle about every case; refuse a case in which two tokens are too close to tell apart."""
    ids = prompt_ids(LONGEST_PROMPT)
    logits, cases = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for case in ALL_CASES:
            path = write_case(Path(folder) / "model.gguf", case)
            oracle = HfModel(path)
            tokens, least_lead = oracle.greedy(ids, ANSWER_TOKENS)
            assert least_lead > MIN_LEAD, f"give case {case} another seed"
            cases[case.name] = {"model_sha256": model_digest(path), "tokens": tokens}
            logits[case.name] = oracle.logits(ids)[list(LOGITS_ROWS)]
    head = {
        "made_by": "python -m tests.oracle.make_logits_golden",
        "oracle": f"transformers {transformers.__version__}, float32",
    }
    lines = [f" {json.dumps(name)}: {json.dumps(entry)}" for name, entry in cases.items()]
    opening = json.dumps(head)[:-1] + ', "cases": {\n'
    GOLDEN_TOKENS.write_text(opening + ",\n".join(lines) + "\n}}\n")
    np.savez_compressed(GOLDEN_LOGITS, **logits)


if __name__ == "__main__":
    main()

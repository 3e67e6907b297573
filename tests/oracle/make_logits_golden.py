"""Writes tests/golden/{qwen3moe,architectures}.{json,npz}: what transformers answers for every toy model.

Run in an environment with torch and transformers:  python -m tests.oracle.make_logits_golden
"""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import transformers

from tests.oracle.hf_archs import open_hf
from tests.oracle.hf_model import open_qwen3moe
from tests.support.arch_cases import ARCH_CASES, LONG_PROMPTS
from tests.support.golden_files import (
    ARCH_LOGITS,
    ARCH_TOKENS,
    GOLDEN_LOGITS,
    GOLDEN_TOKENS,
    LOGITS_ROWS,
    LONG_ROWS,
    long_name,
)
from tests.support.oracle_cases import (
    ALL_CASES,
    ANSWER_TOKENS,
    LONGEST_PROMPT,
    MIN_LEAD,
    model_digest,
    prompt_ids,
    write_case,
)
from tests.support.toy_archs import write_toy_arch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.oracle.hf_model import HfModel

    # The last: how many tokens its longer prompt has, which most have none of.
    Toy = tuple[str, Callable[[Path], Path], Callable[[Path], HfModel], int]


def main() -> None:
    """Ask the oracle about every case; refuse a case in which two tokens are too close to tell apart."""
    toys = [(case.name, partial(write_case, case=case), open_qwen3moe, 0) for case in ALL_CASES]
    _write(GOLDEN_TOKENS, GOLDEN_LOGITS, toys)
    others = [
        (
            case.name,
            partial(write_toy_arch, toy=case.toy),
            open_hf,
            LONG_PROMPTS.get(case.toy.arch, 0),
        )
        for case in ARCH_CASES
    ]
    _write(ARCH_TOKENS, ARCH_LOGITS, others)


def _write(tokens_path: Path, logits_path: Path, toys: Sequence[Toy]) -> None:
    ids = prompt_ids(LONGEST_PROMPT)
    logits, cases = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for name, write, open_oracle, long_prompt in toys:
            path = write(Path(folder) / "model.gguf")
            oracle = open_oracle(path)
            tokens, least_lead = oracle.greedy(ids, ANSWER_TOKENS)
            assert least_lead > MIN_LEAD, f"give case {name} another seed"
            cases[name] = {"model_sha256": model_digest(path), "tokens": tokens}
            logits[name] = oracle.logits(ids)[list(LOGITS_ROWS)]
            if long_prompt:
                rows = oracle.logits(prompt_ids(long_prompt))[list(LONG_ROWS)]
                logits[long_name(name)] = rows
    head = {
        "made_by": "python -m tests.oracle.make_logits_golden",
        "oracle": f"transformers {transformers.__version__}, float32",
    }
    lines = [f" {json.dumps(name)}: {json.dumps(entry)}" for name, entry in cases.items()]
    opening = json.dumps(head)[:-1] + ', "cases": {\n'
    tokens_path.write_text(opening + ",\n".join(lines) + "\n}}\n")
    np.savez_compressed(logits_path, **logits)


if __name__ == "__main__":
    main()

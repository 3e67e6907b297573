"""Writes tests/golden/converted: tiny models through llama.cpp's converter and quantiser, and what they answer.

transformers makes each model from a seed and saves it as the hub has them, llama.cpp's own converter writes the GGUF
file, its own quantiser the mixes. Expected logits are transformers', in float32, from what the file's weights decode
to. For quantised files the error that llama.cpp makes on the same file is kept, too: ours may be three times as large.

Run in the oracle environment:  python -m tests.oracle.make_converted_golden
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import tempfile
from pathlib import Path

import gguf
import numpy as np

from tests.oracle.llama_model import LlamaModel
from tests.oracle.toolchain.tool_cases import GOLDEN_CASES
from tests.oracle.toolchain.workshop import Workshop, open_exact
from tests.support.converted_files import (
    CONVERTED_FACTS,
    CONVERTED_FOLDER,
    CONVERTED_LOGITS,
    TEXT,
    position_errors,
)
from tests.support.golden_files import LOGITS_ROWS
from tests.support.oracle_cases import ANSWER_TOKENS, LONGEST_PROMPT, MIN_LEAD, prompt_ids


def main() -> None:
    """Make every file again, and ask the oracles about each."""
    shutil.rmtree(CONVERTED_FOLDER, ignore_errors=True)
    CONVERTED_FOLDER.mkdir(parents=True)
    facts, logits = {}, {}
    ids = prompt_ids(LONGEST_PROMPT)
    with tempfile.TemporaryDirectory() as folder:
        workshop = Workshop(Path(folder))
        for case, mix in GOLDEN_CASES:
            is_converted = mix in ("F32", "NVFP4")
            made = workshop.converted(case)[1] if is_converted else workshop.quantised(case, mix)
            path = CONVERTED_FOLDER / f"{case.tiny.arch}-{mix}.gguf"
            shutil.copyfile(made, path)
            oracle = open_exact(path)
            exact = oracle.logits(ids)[list(LOGITS_ROWS)]
            with LlamaModel(path) as llama:
                found = llama.logits(ids)[list(LOGITS_ROWS)]
                text_ids = llama.encode(TEXT)
            entry = {
                "formats": sorted({t.tensor_type.name for t in gguf.GGUFReader(path).tensors}),
                "llama_cpp_error": float(np.median(position_errors(found, exact))),
                "text_ids": text_ids,
            }
            if mix == "F32":
                tokens, least_lead = oracle.greedy(ids, ANSWER_TOKENS)
                assert least_lead > MIN_LEAD, f"give case {case} another seed"
                entry["tokens"] = tokens
            facts[path.name], logits[path.name] = entry, exact
    _write(facts, logits)


def _write(facts: dict[str, dict], logits: dict[str, np.ndarray]) -> None:
    versions = (f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES)
    head = {"made_by": "python -m tests.oracle.make_converted_golden", "with": ", ".join(versions)}
    lines = [f" {json.dumps(name)}: {json.dumps(entry)}" for name, entry in facts.items()]
    opening = json.dumps(head)[:-1] + ', "files": {\n'
    CONVERTED_FACTS.write_text(opening + ",\n".join(lines) + "\n}}\n")
    np.savez_compressed(CONVERTED_LOGITS, **logits)


_PACKAGES = ("transformers", "llama-cpp-python")

if __name__ == "__main__":
    main()

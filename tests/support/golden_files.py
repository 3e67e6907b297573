"""Where the expected answers of the toy models lie, and what they cover. Knows no oracle."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tests.support.oracle_cases import ANSWER_TOKENS, model_digest

_GOLDEN = Path(__file__).parents[1] / "golden"

GOLDEN_TOKENS = _GOLDEN / "qwen3moe.json"
"""By case: digest of the model, and the greedy answer to the longest prompt."""

GOLDEN_LOGITS = _GOLDEN / "qwen3moe.npz"
"""By case: float32 [rows, vocabulary], the logits after the tokens LOGITS_ROWS of that prompt."""

ARCH_TOKENS = _GOLDEN / "architectures.json"
"""The same for the other architectures' toy models."""

ARCH_LOGITS = _GOLDEN / "architectures.npz"

LOGITS_ROWS = (0, 1, 7, 31, 62, 63, 64)

LONG_ROWS = (65, 126, 127, 128, 130, 131, 254, 255, 256, 299)
"""The same of the longer prompt that `long_name` is of: both sides of two times 128 tokens, and of four."""


def long_name(name: str) -> str:
    """Return where a case's logits of a longer prompt are."""
    return f"{name}, long prompt"


def read_golden(tokens, logits):
    """Return each case's entry and logits by its name."""
    entries = json.loads(tokens.read_text())["cases"]
    with np.load(logits) as arrays:
        return {name: (entry, arrays[name]) for name, entry in entries.items()}


def read_long_golden(logits):
    """Return the logits after the tokens LONG_ROWS of the longer prompt, by the names of cases that have one."""
    with np.load(logits) as arrays:
        ending = long_name("")
        return {name.removesuffix(ending): arrays[name] for name in arrays if name.endswith(ending)}


def check_is_asked_model(path, entry) -> None:
    """Fail unless the model at `path` is the one whose answer was stored."""
    assert model_digest(path) == entry["model_sha256"], (
        "the rebuilt model is not the one that was asked: the writer of toy models has changed, "
        "so make the golden files again (make golden)"
    )


def check_covers(golden, cases) -> None:
    """Fail unless each case, and nothing else, has an answer of full length."""
    assert sorted(golden) == sorted(case.name for case in cases)
    for entry, logits in golden.values():
        assert len(entry["tokens"]) == ANSWER_TOKENS
        assert len(logits) == len(LOGITS_ROWS)

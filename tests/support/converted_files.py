"""Small files that llama.cpp's converter and quantiser wrote, and what is expected of them. Knows no oracle.

They lie in tests/golden/converted. `make golden` writes them again: tests/oracle/make_converted_golden.py says how.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

CONVERTED_FOLDER = Path(__file__).parents[1] / "golden" / "converted"
CONVERTED_FACTS = CONVERTED_FOLDER / "expected.json"
CONVERTED_LOGITS = CONVERTED_FOLDER / "expected.npz"

TEXT = "The inner layers don't agree: 3.14159 times, naïvely — 漢字\n\n  indented\tend"
"""A text whose ids are expected, as llama.cpp gives them."""


def read_expected():
    """Return by file name what is expected: its facts, and float32 logits [rows, vocabulary]."""
    facts = json.loads(CONVERTED_FACTS.read_text(encoding="utf-8"))["files"]
    with np.load(CONVERTED_LOGITS) as arrays:
        return {name: (entry, arrays[name]) for name, entry in facts.items()}


def position_errors(found: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Return each position's squared error over its squared logits, in double: float64 [tokens]."""
    a, b = found.astype(np.float64), exact.astype(np.float64)
    return np.square(a - b).sum(axis=-1) / np.square(b).sum(axis=-1)

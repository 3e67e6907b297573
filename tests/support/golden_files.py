"""Where the expected answers of the toy models lie, and what they cover. Knows no oracle."""

from __future__ import annotations

from pathlib import Path

_GOLDEN = Path(__file__).parents[1] / "golden"

GOLDEN_TOKENS = _GOLDEN / "qwen3moe.json"
"""By case: digest of the model, and the greedy answer to the longest prompt."""

GOLDEN_LOGITS = _GOLDEN / "qwen3moe.npz"
"""By case: float32 [rows, vocabulary], the logits after the tokens LOGITS_ROWS of that prompt."""

ARCH_TOKENS = _GOLDEN / "architectures.json"
"""The same for the other architectures' toy models."""

ARCH_LOGITS = _GOLDEN / "architectures.npz"

LOGITS_ROWS = (0, 1, 7, 31, 62, 63, 64)

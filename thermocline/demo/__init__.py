"""Where the packaged demo model and its texts are; knows neither how to open nor how to run it."""

from __future__ import annotations

from pathlib import Path

__all__ = ["DEMO_HELD_TEXT_PATH", "DEMO_MODEL_PATH", "DEMO_QUESTIONS"]

_HERE = Path(__file__).resolve().parent

DEMO_MODEL_PATH = _HERE / "demo-moe.gguf"
"""A trained qwen3moe chat model of less than 10 MiB that answers questions about thermocline."""

DEMO_HELD_TEXT_PATH = _HERE / "held_text.txt"
"""Prose about the same subjects that the model has not seen, for measuring perplexity."""

DEMO_QUESTIONS: tuple[str, ...] = (
    "Hello! Who are you?",
    "What is thermocline?",
    "What is a mixture of experts?",
    "What does the router do?",
    "What is the difference between hot and cold experts?",
    "Why is a cold expert slow?",
    "How does prefetch work?",
    "What if my model is larger than RAM?",
    "What is the difference between prefill and decode?",
    "Why do all splits give the same tokens?",
    "What does the timeline show?",
    "What is the capital of France?",
)
"""What the demo and the tests ask; the last one is off its subject."""

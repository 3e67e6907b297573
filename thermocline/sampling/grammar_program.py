"""Compiles grammars in a child process with limits, to find out whether they can be compiled within them.

Run by its path, never imported by the package: it imports llguidance and the standard library only. What a grammar
costs hardly depends on the vocabulary, so that it has one with all control tokens and one token for each byte.

Requests (see `thermocline/child/main.py`):
    {"op": "vocabulary", "size", "special": {id: hex bytes}, "ends": [id...], "limits": {...}}
    {"op": "compile", "grammar": text}
Failures are of kind "grammar" or "limit".
"""

from __future__ import annotations

from typing import Any

import llguidance


class GrammarError(Exception):
    """The grammar is not valid, or not supported."""


class ByteVocabulary:
    """A tokenizer with the interface that llguidance expects."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, size: int, special: dict[int, bytes], ends: list[int]) -> None:
        free = (i for i in range(size) if i not in special)
        self._id_of = dict(zip(range(256), free, strict=False))
        self.tokens = [special.get(token_id, b"") for token_id in range(size)]
        for byte, token_id in self._id_of.items():
            self.tokens[token_id] = bytes((byte,))
        self.eos_token_id = min(ends)
        self.special_token_ids = sorted(special)

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the tokens of `text`'s bytes."""
        raw = text.encode() if isinstance(text, str) else text
        return [self._id_of[byte] for byte in raw if byte in self._id_of]


class GrammarProgram:
    """Answers "vocabulary" and "compile"; `thermocline/child/main.py` runs it."""

    def __init__(self, max_chars: int) -> None:
        self._table: Any = None
        self._limits: Any = None

    def answer(self, request: dict[str, Any]) -> str:
        """Return "", or raise GrammarError."""
        if request["op"] == "vocabulary":
            special = {int(i): bytes.fromhex(raw) for i, raw in request["special"].items()}
            vocabulary: Any = ByteVocabulary(request["size"], special, request["ends"])
            self._table = llguidance.LLTokenizer(vocabulary, eos_token=request["ends"])
            self._limits = llguidance.LLParserLimits(**request["limits"])
            return ""
        compiled = llguidance.LLMatcher(
            self._table, request["grammar"], log_level=0, limits=self._limits
        )
        if compiled.is_error():
            raise GrammarError(compiled.get_error())
        # The first mask takes time, too. Whether any answer is possible is not seen here.
        compiled.compute_bitmask()
        return ""

    def describe(self, error: Exception) -> tuple[str, str]:
        """Return the kind of a failure, and what to tell about it."""
        if isinstance(error, GrammarError):
            return "grammar", str(error)
        return "grammar", f"{type(error).__name__}: {error}"


PROGRAM = GrammarProgram

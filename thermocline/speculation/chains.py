"""Chains of guesses on their way, for drafters that guess one token after the other: what is likely enough, and how long.

Knows no model and no cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from thermocline.speculation.contract import MAX_DRAFT_TOKENS, Draft

if TYPE_CHECKING:
    from collections.abc import Iterable

    from thermocline.kernels.weight import FloatArray
    from thermocline.speculation.contract import DraftWish

MIN_CONFIDENCE: Final = 0.5
"""A less likely guess ends a draft. What llama.cpp's best published figures have."""


def likeliest(logits: FloatArray) -> tuple[int, float]:
    """Return the place of the largest of logits [V], and its probability."""
    place = int(logits.argmax())
    return place, float(1 / np.exp(logits - logits[place], dtype=np.float32).sum())


@dataclass(slots=True, kw_only=True)
class Chain:
    """A draft on its way, of one token after the other."""

    wish: DraftWish
    tokens: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)

    def add(self, token: int, confidence: float) -> bool:
        """Add a guess, unless it is too unlikely; return whether the draft goes on behind it."""
        if not confidence >= MIN_CONFIDENCE:
            return False
        self.tokens.append(token)
        self.confidence.append(confidence)
        return len(self.tokens) < min(self.wish.max_tokens, MAX_DRAFT_TOKENS)


def drafts_of(chains: Iterable[Chain]) -> list[Draft]:
    """Return the drafts of those chains that have a token."""
    return [
        Draft.chain(chain.wish, chain.tokens, chain.confidence) for chain in chains if chain.tokens
    ]

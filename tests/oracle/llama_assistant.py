"""llama.cpp running Gemma 4's own drafter: the model in one context, the drafter's file in another over its cache.

Needs the package `llama_cpp`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.oracle.llama_drafts import LlamaDrafter

if TYPE_CHECKING:
    from collections.abc import Sequence


class LlamaAssistant(LlamaDrafter):
    """A model with a drafter of its own file; use it as a context manager."""

    def guesses(self, known: Sequence[int], chain: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return logits [n, V], and the states [n, D] that the next guess takes, behind each token of `chain`.

        known: what the model computes. chain: the newest known token, then guesses, all at its position.
        """
        before, found = self.states(known)[-1:], []
        for token in chain:
            logits, before = self.draft([token], before, len(known))
            found.append((logits, before))
        logits, following = zip(*found, strict=True)
        return np.concatenate(logits), np.concatenate(following)

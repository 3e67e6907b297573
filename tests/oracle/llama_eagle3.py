"""llama.cpp running an EAGLE-3 drafter: the model in one context, the drafter's file in another beside it.

Needs the package `llama_cpp`. Every call of `guesses` starts from an empty cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import llama_cpp
import numpy as np
from llama_cpp import llama_cpp_ext

from tests.oracle.llama_dflash import LlamaBlockDrafter
from tests.oracle.llama_drafts import fill_batch, run_rows, states_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class LlamaEagle3(LlamaBlockDrafter):
    """A model with a drafter of its own file; use it as a context manager."""

    def __init__(
        self, path: Path, drafter: Path, layers: Sequence[int], max_tokens: int = 512
    ) -> None:
        """layers: whose inputs the drafter reads."""
        super().__init__(path, drafter, layers, max_tokens)
        llama_cpp.llama_set_causal_attn(self._drafts, True)
        llama_cpp_ext.llama_set_embeddings_nextn(self._drafts, True, True)
        self._own_width = llama_cpp.llama_model_n_embd(self._drafter)

    def __enter__(self) -> Self:
        return self

    def guesses(
        self, known: Sequence[int], features: np.ndarray, chain: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return logits [n, V], and the states [n, D] that the next guess takes, behind each token of `chain`.

        known: what the model has computed. features: float32 [known, 3 * D of the model]. chain: the newest known token,
        then guesses. The logits of tokens that the drafter can not guess are -inf.
        """
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._drafts), True)
        states = self._encode(np.ascontiguousarray(features, np.float32))
        # A state goes with the token behind it; the last one's is the first of the chain.
        if len(known) > 1:
            self._run(known[1:], 0, states[:-1])
        before, found = states[-1:], []
        for position, token in enumerate(chain, len(known) - 1):
            logits, before = self._run([token], position, before)
            found.append((logits, before))
        logits, following = zip(*found, strict=True)
        return np.concatenate(logits), np.concatenate(following)

    def _encode(self, features: np.ndarray) -> np.ndarray:
        batch = llama_cpp.llama_batch_init(*features.shape, 1)
        try:
            fill_batch(batch, features, 0)
            code = llama_cpp.llama_encode(self._drafts, batch)
            assert code == 0, f"llama_encode returned {code}"
        finally:
            llama_cpp.llama_batch_free(batch)
        return states_of(self._drafts, len(features), self._own_width)

    def _run(
        self, tokens: Sequence[int], start: int, before: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        return run_rows(self._drafts, tokens, before, start, self._vocab_size)

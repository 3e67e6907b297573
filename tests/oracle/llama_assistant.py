"""llama.cpp running Gemma 4's own drafter: the model in one context, the drafter's file in another over its cache.

Needs the package `llama_cpp`.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Self

import llama_cpp
import numpy as np
from llama_cpp import llama_cpp_ext

from tests.oracle.llama_model import LlamaModel

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class LlamaAssistant(LlamaModel):
    """A model with a drafter of its own file; use it as a context manager."""

    def __init__(self, path: Path, drafter: Path, max_tokens: int = 512) -> None:
        super().__init__(path, max_tokens)
        llama_cpp_ext.llama_set_embeddings_nextn(self._context, True, False)
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        params.use_extra_bufts = False
        self._drafter = llama_cpp.llama_model_load_from_file(str(drafter).encode(), params)
        assert self._drafter, f"llama.cpp could not load {drafter}"
        context = self._context_params()
        context.ctx_type = llama_cpp.LLAMA_CONTEXT_TYPE_MTP
        context.ctx_other = self._context
        self._drafts = llama_cpp.llama_init_from_model(self._drafter, context)
        assert self._drafts, "llama.cpp could not make a context of the drafter"
        llama_cpp_ext.llama_set_embeddings_nextn(self._drafts, True, True)
        self._width = llama_cpp.llama_model_n_embd(self._model)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        llama_cpp.llama_free(self._drafts)
        llama_cpp.llama_model_free(self._drafter)
        super().__exit__(*error)

    def states(self, token_ids: Sequence[int]) -> np.ndarray:
        """Compute tokens, and return the model's state after each, which the drafter takes: float32 [tokens, D]."""
        self.logits(token_ids)
        flat = llama_cpp_ext.llama_get_embeddings_nextn(self._context)
        return np.ctypeslib.as_array(flat, (len(token_ids), self._width)).copy()

    def guess(self, token: int, position: int, before: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the logits [V] after a token at a position, and the state [D] that the next guess takes.

        before: float32 [D], the state of the position before, or of the guess before.
        """
        row = np.ascontiguousarray(before, np.float32)
        batch = llama_cpp.llama_batch_init(1, self._width, 1)
        tokens = (llama_cpp.llama_token * 1)(token)
        try:
            batch.n_tokens = 1
            batch.token = ctypes.cast(tokens, ctypes.POINTER(llama_cpp.llama_token))
            ctypes.memmove(batch.embd, row.ctypes.data, row.nbytes)
            batch.pos[0], batch.n_seq_id[0], batch.logits[0] = position, 1, 1
            batch.seq_id[0][0] = 0
            code = llama_cpp.llama_decode(self._drafts, batch)
            assert code == 0, f"llama_decode returned {code}"
        finally:
            batch.token = None  # ours, not llama.cpp's to free
            llama_cpp.llama_batch_free(batch)
        logits = llama_cpp.llama_get_logits(self._drafts)
        following = llama_cpp_ext.llama_get_embeddings_nextn(self._drafts)
        return (
            np.ctypeslib.as_array(logits, (self._vocab_size,)).copy(),
            np.ctypeslib.as_array(following, (self._width,)).copy(),
        )

    def guesses(self, known: Sequence[int], chain: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return logits [n, V], and the states [n, D] that the next guess takes, behind each token of `chain`.

        known: what the model computes. chain: the newest known token, then guesses, all at its position.
        """
        before, found = self.states(known)[-1], []
        for token in chain:
            logits, before = self.guess(token, len(known), before)
            found.append((logits, before))
        logits, following = zip(*found, strict=True)
        return np.stack(logits), np.stack(following)

"""llama.cpp running a model's next-token block: the trunk in one context, the block in another of its kind.

Needs the package `llama_cpp`. Every call starts from an empty cache.
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


class LlamaDrafter(LlamaModel):
    """One loaded file with its block; use it as a context manager."""

    def __init__(self, path: Path, max_tokens: int = 512) -> None:
        super().__init__(path, max_tokens, load_mtp=True)
        llama_cpp_ext.llama_set_embeddings_nextn(self._context, True, False)
        params = self._context_params()
        params.ctx_type = llama_cpp.LLAMA_CONTEXT_TYPE_MTP
        params.ctx_other = self._context
        self._drafts = llama_cpp.llama_init_from_model(self._model, params)
        assert self._drafts, "llama.cpp could not make a context of the block"
        llama_cpp_ext.llama_set_embeddings_nextn(self._drafts, True, False)
        self._width = llama_cpp.llama_model_n_embd(self._model)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        llama_cpp.llama_free(self._drafts)
        super().__exit__(*error)

    def states(self, token_ids: Sequence[int]) -> np.ndarray:
        """Return the trunk's state after every token, which the block takes: float32 [tokens, D]."""
        self.logits(token_ids)
        flat = llama_cpp_ext.llama_get_embeddings_nextn(self._context)
        return np.ctypeslib.as_array(flat, (len(token_ids), self._width)).copy()

    def clear(self) -> None:
        """Forget what the block has seen."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._drafts), True)

    def draft(
        self, token_ids: Sequence[int], before: np.ndarray, start: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Run the block over tokens at positions from `start` on; before: [tokens, D], the state before each.

        Returns logits float32 [tokens, V] and the block's own states [tokens, D].
        """
        count = len(token_ids)
        rows = np.ascontiguousarray(before, np.float32)
        batch = llama_cpp.llama_batch_init(count, self._width, 1)
        tokens = (llama_cpp.llama_token * count)(*token_ids)
        try:
            batch.n_tokens = count
            batch.token = ctypes.cast(tokens, ctypes.POINTER(llama_cpp.llama_token))
            ctypes.memmove(batch.embd, rows.ctypes.data, rows.nbytes)
            for index in range(count):
                batch.pos[index] = start + index
                batch.n_seq_id[index] = 1
                batch.seq_id[index][0] = 0
                batch.logits[index] = 1
            code = llama_cpp.llama_decode(self._drafts, batch)
            assert code == 0, f"llama_decode returned {code}"
        finally:
            batch.token = None  # ours, not llama.cpp's to free
            llama_cpp.llama_batch_free(batch)
        logits = llama_cpp.llama_get_logits(self._drafts)
        states = llama_cpp_ext.llama_get_embeddings_nextn(self._drafts)
        return (
            np.ctypeslib.as_array(logits, (count, self._vocab_size)).copy(),
            np.ctypeslib.as_array(states, (count, self._width)).copy(),
        )

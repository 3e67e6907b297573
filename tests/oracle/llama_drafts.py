"""llama.cpp running a model's next-token block, or a drafter of its own file: the trunk in one context, these in another.

Needs the package `llama_cpp`. Every call starts from an empty cache.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Self

import llama_cpp
import numpy as np
from llama_cpp import llama_cpp_ext

from tests.oracle.llama_model import LlamaModel

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def load_drafter(path: Path) -> Any:
    """Return llama.cpp's model of a drafter's file; `llama_model_free` is due."""
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    params.use_extra_bufts = False
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    assert model, f"llama.cpp could not load {path}"
    return model


def states_of(context: Any, count: int, width: int) -> np.ndarray:
    """Return the states that the last call left for guesses, float32 [count, width]."""
    flat = llama_cpp_ext.llama_get_embeddings_nextn(context)
    return np.ctypeslib.as_array(flat, (count, width)).copy()


def run_rows(
    context: Any, token_ids: Sequence[int], before: np.ndarray, start: int, vocab_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Run a drafter over tokens at positions from `start` on; before: [tokens, D], the state before each.

    Returns logits float32 [tokens, V] and its own states [tokens, D].
    """
    rows = np.ascontiguousarray(before, np.float32)
    count, width = rows.shape
    batch = llama_cpp.llama_batch_init(count, width, 1)
    tokens = (llama_cpp.llama_token * count)(*token_ids)
    try:
        batch.token = ctypes.cast(tokens, ctypes.POINTER(llama_cpp.llama_token))
        fill_batch(batch, rows, start)
        code = llama_cpp.llama_decode(context, batch)
        assert code == 0, f"llama_decode returned {code}"
    finally:
        batch.token = None  # ours, not llama.cpp's to free
        llama_cpp.llama_batch_free(batch)
    logits = llama_cpp.llama_get_logits(context)
    found = np.ctypeslib.as_array(logits, (count, vocab_size)).copy()
    return found, states_of(context, count, width)


def fill_batch(batch: Any, rows: np.ndarray, start: int) -> None:
    """Give a batch its rows, of one sequence from position `start` on, all of which want logits."""
    batch.n_tokens = len(rows)
    ctypes.memmove(batch.embd, rows.ctypes.data, rows.nbytes)
    for index in range(len(rows)):
        batch.pos[index] = start + index
        batch.n_seq_id[index] = batch.logits[index] = 1
        batch.seq_id[index][0] = 0


class LlamaDrafter(LlamaModel):
    """One loaded file with its block, or with a drafter's file; use it as a context manager."""

    def __init__(self, path: Path, drafter: Path | None = None, max_tokens: int = 512) -> None:
        super().__init__(path, max_tokens, load_mtp=drafter is None)
        llama_cpp_ext.llama_set_embeddings_nextn(self._context, True, False)
        self._drafter = None if drafter is None else load_drafter(drafter)
        params = self._context_params()
        params.ctx_type = llama_cpp.LLAMA_CONTEXT_TYPE_MTP
        params.ctx_other = self._context
        self._drafts = llama_cpp.llama_init_from_model(self._drafter or self._model, params)
        assert self._drafts, "llama.cpp could not make a context of the block"
        llama_cpp_ext.llama_set_embeddings_nextn(self._drafts, True, drafter is not None)
        self._width = llama_cpp.llama_model_n_embd(self._model)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        llama_cpp.llama_free(self._drafts)
        if self._drafter is not None:
            llama_cpp.llama_model_free(self._drafter)
        super().__exit__(*error)

    def states(self, token_ids: Sequence[int]) -> np.ndarray:
        """Return the trunk's state after every token, which the block takes: float32 [tokens, D]."""
        self.logits(token_ids)
        return states_of(self._context, len(token_ids), self._width)

    def clear(self) -> None:
        """Forget what the block has seen."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._drafts), True)

    def run_block(
        self, place: int, token_ids: Sequence[int], before: np.ndarray, start: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Do as `draft` does with the block of a place; what stands at `start` and behind it is forgotten first."""
        memory = llama_cpp.llama_get_memory(self._drafts)
        llama_cpp.llama_memory_seq_rm(memory, 0, start, -1)
        llama_cpp_ext.llama_set_nextn_layer_offset(self._drafts, place)
        return self.draft(token_ids, before, start)

    def draft(
        self, token_ids: Sequence[int], before: np.ndarray, start: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Run the block over tokens at positions from `start` on; before: [tokens, D], the state before each.

        Returns logits float32 [tokens, V] and the block's own states [tokens, D].
        """
        return run_rows(self._drafts, token_ids, before, start, self._vocab_size)

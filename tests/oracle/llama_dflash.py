"""llama.cpp running a block diffusion drafter: the model in one context, the drafter's file in another beside it.

Needs the package `llama_cpp`. Every call of `draft` starts from an empty cache.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Self

import llama_cpp
import numpy as np

from tests.oracle.llama_drafts import load_drafter
from tests.oracle.llama_model import LlamaModel

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_LIB = llama_cpp._lib if hasattr(llama_cpp, "_lib") else llama_cpp.llama_cpp._lib
_SET_INPUT = _LIB._Z30llama_set_embeddings_layer_inpP13llama_contextjb
_SET_INPUT.argtypes = [llama_cpp.llama_context_p_ctypes, ctypes.c_uint32, ctypes.c_bool]
_SET_INPUT.restype = None
_GET_INPUT = _LIB._Z30llama_get_embeddings_layer_inpP13llama_contextj
_GET_INPUT.argtypes = [llama_cpp.llama_context_p_ctypes, ctypes.c_uint32]
_GET_INPUT.restype = ctypes.POINTER(ctypes.c_float)


class LlamaBlockDrafter(LlamaModel):
    """A model with a drafter of its own file; use it as a context manager."""

    def __init__(
        self, path: Path, drafter: Path, layers: Sequence[int], max_tokens: int = 512
    ) -> None:
        """layers: whose inputs the drafter reads."""
        super().__init__(path, max_tokens)
        self._layers = tuple(layers)
        for layer in self._layers:
            _SET_INPUT(self._context, layer, True)
        self._drafter = load_drafter(drafter)
        context = self._context_params()
        context.ctx_other = self._context
        self._drafts = llama_cpp.llama_init_from_model(self._drafter, context)
        assert self._drafts, "llama.cpp could not make a context of the drafter"
        llama_cpp.llama_set_causal_attn(self._drafts, False)
        self._width = llama_cpp.llama_model_n_embd(self._model)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        llama_cpp.llama_free(self._drafts)
        llama_cpp.llama_model_free(self._drafter)
        super().__exit__(*error)

    def features(self, token_ids: Sequence[int]) -> np.ndarray:
        """Return the inputs of the layers at every token, side by side: float32 [tokens, layers * D]."""
        self.logits(token_ids)
        shape = len(token_ids), self._width
        parts = [
            np.ctypeslib.as_array(_GET_INPUT(self._context, layer), shape).copy()
            for layer in self._layers
        ]
        return np.concatenate(parts, axis=1)

    def draft(self, features: np.ndarray, block: Sequence[int]) -> np.ndarray:
        """Return the logits of a block's rows, float32 [rows, V], behind positions with these features [n, layers * D]."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._drafts), True)
        rows = np.ascontiguousarray(features, np.float32)
        self._decode(len(rows), 0, rows, None)
        self._decode(len(block), len(rows), None, block)
        logits = llama_cpp.llama_get_logits(self._drafts)
        return np.ctypeslib.as_array(logits, (len(block), self._vocab_size)).copy()

    def _decode(
        self, count: int, start: int, rows: np.ndarray | None, tokens: Sequence[int] | None
    ) -> None:
        batch = llama_cpp.llama_batch_init(count, 0 if rows is None else rows.shape[1], 1)
        try:
            batch.n_tokens = count
            if rows is not None:
                ctypes.memmove(batch.embd, rows.ctypes.data, rows.nbytes)
            for index in range(count):
                if tokens is not None:
                    batch.token[index] = tokens[index]
                batch.pos[index] = start + index
                batch.n_seq_id[index] = 1
                batch.seq_id[index][0] = 0
                batch.logits[index] = tokens is not None
            code = llama_cpp.llama_decode(self._drafts, batch)
            assert code == 0, f"llama_decode returned {code}"
        finally:
            llama_cpp.llama_batch_free(batch)

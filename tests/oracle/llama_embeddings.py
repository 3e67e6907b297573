"""llama.cpp's embeddings of token ids, by a way of pooling. Needs the package `llama_cpp`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import llama_cpp
import numpy as np

from tests.oracle.llama_model import LlamaModel

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from thermocline.messages import Pooling


class LlamaEmbeddings(LlamaModel):
    """One loaded file whose context makes embeddings, not normalised."""

    def __init__(self, path: Path, pooling: Pooling, max_tokens: int = 512) -> None:
        self._pooling = pooling
        super().__init__(path, max_tokens)

    def embedding(self, token_ids: Sequence[int], width: int | None = None) -> np.ndarray:
        """Return float32 [width]: of a reranker its outputs, otherwise D numbers."""
        self.logits(token_ids)
        width = width or llama_cpp.llama_model_n_embd(self._model)
        found = llama_cpp.llama_get_embeddings_seq(self._context, 0)
        return np.ctypeslib.as_array(found, (width,)).copy()

    def _context_params(self):
        params = super()._context_params()
        params.embeddings = True
        params.pooling_type = int(self._pooling)
        return params

"""llama.cpp computing logits from a GGUF file, with a float32 cache, and plain attention where it can.

Needs the package `llama_cpp`, built for this CPU (scripts/oracle_env.sh).
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Self

import llama_cpp
import numpy as np

from tests.oracle.decoded import decoded_weights
from tests.support.toy_model import write_toy_model

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.support.oracle_cases import OracleCase

_GGML_TYPE_F32 = 0
_NO_FLASH_ATTENTION = 0
_FLASH_ATTENTION = 1
_SPARSE_BY_FLASH = ("minimax-m3",)
"""Which read all positions without flash attention."""


@llama_cpp.llama_log_callback
def _silent(_level, _text, _data):
    """Drop llama.cpp's log lines."""


def silence() -> None:
    """Let llama.cpp write no log."""
    llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))


def write_float32_twin(path: Path, case: OracleCase, model: Path) -> Path:
    """Write the weights of `case`'s file `model`, decoded to float32, as a model of its own."""
    shape = replace(case.shape, formats={})
    return write_toy_model(path, shape, weights=decoded_weights(model))


class LlamaModel:
    """One loaded file; use it as a context manager. Every call starts from an empty cache."""

    def __init__(self, path: Path, max_tokens: int = 512, *, load_mtp: bool = False) -> None:
        silence()
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        if hasattr(params, "use_extra_bufts"):
            params.use_extra_bufts = False  # its repacked weights would be other arithmetic
        if load_mtp:
            params.load_mtp = True
        self._max_tokens = max_tokens
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        assert self._model, f"llama.cpp could not load {path}"
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(self._vocab)
        self._context = llama_cpp.llama_init_from_model(self._model, self._context_params())
        assert self._context, "llama.cpp could not make a context"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Return the ids of `text` without any special token, but for those that it spells with parse_special."""
        raw = text.encode()
        ids = (llama_cpp.llama_token * (len(raw) + 8))()
        count = llama_cpp.llama_tokenize(
            self._vocab, raw, len(raw), ids, len(ids), False, parse_special
        )
        assert count >= 0, count
        return list(ids[:count])

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Return the logits after every token: float32 [tokens, vocabulary]."""
        count = len(token_ids)
        assert 0 < count <= self._max_tokens, count
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        batch = llama_cpp.llama_batch_init(count, 0, 1)
        try:
            batch.n_tokens = count
            for index, token_id in enumerate(token_ids):
                batch.token[index] = token_id
                batch.pos[index] = index
                batch.n_seq_id[index] = 1
                batch.seq_id[index][0] = 0
                batch.logits[index] = 1
            code = llama_cpp.llama_decode(self._context, batch)
            assert code == 0, f"llama_decode returned {code}"
        finally:
            llama_cpp.llama_batch_free(batch)
        flat = llama_cpp.llama_get_logits(self._context)
        return np.ctypeslib.as_array(flat, (count, self._vocab_size)).copy()

    def _architecture(self) -> str:
        name = ctypes.create_string_buffer(64)
        llama_cpp.llama_model_meta_val_str(self._model, b"general.architecture", name, len(name))
        return name.value.decode()

    def _context_params(self):
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = self._max_tokens
        params.n_threads = params.n_threads_batch = 2
        params.type_k = params.type_v = _GGML_TYPE_F32
        is_sparse = self._architecture() in _SPARSE_BY_FLASH
        params.flash_attn_type = _FLASH_ATTENTION if is_sparse else _NO_FLASH_ATTENTION
        return params


def llama_perplexity(llama: LlamaModel, token_ids: list[int], window_tokens: int) -> float:
    """exp of the mean of -log p(token) over tokens 1..n-1 of every window of at least 2 tokens."""
    losses: list[float] = []
    for start in range(0, len(token_ids), window_tokens):
        window = token_ids[start : start + window_tokens]
        if len(window) < 2:
            continue
        wide = llama.logits(window).astype(np.float64)
        log_sum = np.logaddexp.reduce(wide, axis=-1)
        losses += [log_sum[i] - wide[i, token] for i, token in enumerate(window[1:])]
    return math.exp(np.mean(losses))

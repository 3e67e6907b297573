"""llama.cpp's tokenizer over a vocabulary of ours: writes a vocabulary-only GGUF and loads it.

Needs the packages `gguf` and `llama_cpp`.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import gguf
import llama_cpp

if TYPE_CHECKING:
    from pathlib import Path

    from thermocline.text.vocabulary import TokenizerData


@llama_cpp.llama_log_callback
def _silent(_level, _text, _data):
    """Drop llama.cpp's log lines."""


def write_vocabulary(path: Path, data: TokenizerData) -> None:
    """Write `data` as a GGUF without tensors."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(data.tokens))
    writer.add_tokenizer_model(data.model)
    writer.add_tokenizer_pre(data.pre)
    writer.add_token_list(list(data.tokens))
    writer.add_token_types(list(data.token_types))
    if data.model == "llama":
        writer.add_token_scores(list(data.scores))
        writer.add_add_space_prefix(data.add_space_prefix)
    else:
        writer.add_token_merges(list(data.merges))
    for name in ("bos", "eos", "eot", "eom"):
        token_id = getattr(data, f"{name}_id")
        if token_id is not None:
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token_id)
    if data.swallows_blanks:
        writer.add_name("Phi-3")
    writer.add_add_bos_token(data.add_bos)
    writer.add_add_eos_token(data.add_eos)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


class LlamaVocabulary:
    """A loaded vocabulary; close it after use."""

    def __init__(self, path: Path) -> None:
        llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        assert self._model, "llama.cpp could not load the vocabulary"
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(self._vocab)

    def encode(self, text: str, *, parse_special: bool, add_special: bool = False) -> list[int]:
        """llama_tokenize."""
        raw = text.encode()
        room = len(raw) + 8
        ids = (llama_cpp.llama_token * room)()
        count = llama_cpp.llama_tokenize(
            self._vocab, raw, len(raw), ids, room, add_special, parse_special
        )
        assert count >= 0, count
        return list(ids[:count])

    def decode(self, ids: list[int], *, skip_special: bool) -> bytes:
        """llama_detokenize; control tokens and what was added are left out, or all is shown."""
        array = (llama_cpp.llama_token * len(ids))(*ids)
        room = ctypes.create_string_buffer(1024 * (len(ids) + 1))
        count = llama_cpp.llama_detokenize(
            self._vocab, array, len(ids), room, len(room), skip_special, not skip_special
        )
        assert count >= 0, count
        return room.raw[:count]

    def piece(self, token_id: int) -> bytes:
        """llama_token_to_piece, special tokens shown."""
        room = ctypes.create_string_buffer(4096)
        count = llama_cpp.llama_token_to_piece(self._vocab, token_id, room, len(room), 0, True)
        return room.raw[:count]

    def is_control(self, token_id: int) -> bool:
        """llama_vocab_is_control."""
        return bool(llama_cpp.llama_vocab_is_control(self._vocab, token_id))

    def is_unknown(self, token_id: int) -> bool:
        """Whether llama_vocab_get_attr says so."""
        attributes = llama_cpp.llama_vocab_get_attr(self._vocab, token_id)
        return bool(attributes & llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN)

    def is_end(self, token_id: int) -> bool:
        """llama_vocab_is_eog."""
        return bool(llama_cpp.llama_vocab_is_eog(self._vocab, token_id))

    def close(self) -> None:
        """Free the model."""
        llama_cpp.llama_model_free(self._model)

"""Byte-level BPE over a GGUF vocabulary: text -> token ids -> text.

Owns the BPE engine and the search for special tokens. It follows llama.cpp id by id, which means
no Unicode normalisation (`e` + U+0301 stays two characters). The one difference: letters, digits and
marks that Unicode 16 added are known here and are not in llama.cpp's tables (Unicode 15.1), so words
of those scripts may be cut elsewhere. It knows no chat messages and no files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import tokenizers
from tokenizers import models, pre_tokenizers

from thermocline.errors import ModelFileError, RequestError
from thermocline.text.pretokenizers import PreTokenizer, find_pre_tokenizer
from thermocline.text.token_kinds import TokenType, byte_alphabet

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from thermocline.text.vocabulary import TokenizerData

MAX_TEXT_BYTES = 4 << 20
"""One call encodes at most this much: about a million tokens, and 1 to 8 s per million bytes."""

_HIDDEN_TYPES = frozenset((int(TokenType.CONTROL), int(TokenType.UNKNOWN)))
_PLAIN_TYPES = _HIDDEN_TYPES | {int(TokenType.USER_DEFINED)}


class Tokenizer:
    """Encodes and decodes with one vocabulary. Immutable after construction, so thread-safe.

    Token types, as in llama.cpp: CONTROL and UNKNOWN tokens are found in text only with
    `parse_special`; USER_DEFINED tokens always, before any other cutting; NORMAL tokens by BPE;
    BYTE, UNUSED and UNDEFINED tokens are never searched for. Where special tokens overlap in the
    text, the one with more bytes is taken first over the whole text, then the next.

    Raises ModelFileError for tokens or merges that contradict each other.
    """

    def __init__(self, data: TokenizerData, *, max_text_bytes: int = MAX_TEXT_BYTES) -> None:
        self._path = data.path
        self._max_text_bytes = max_text_bytes
        self._texts = data.token_texts()
        self._id_of = {text: index for index, text in enumerate(self._texts)}
        self._types = data.resolved_types(self._id_of)
        self._byte_of = byte_alphabet()
        self._engine = _build_engine(data, self._id_of)
        specials = [index for index, kind in enumerate(self._types) if kind in _PLAIN_TYPES]
        specials.sort(key=lambda index: -len(self._texts[index].encode()))
        self._specials = [(index, self._texts[index]) for index in specials]
        self._always = [
            (index, text)
            for index, text in self._specials
            if self._types[index] == TokenType.USER_DEFINED
        ]
        self._missing_bytes = frozenset(
            byte for char, byte in self._byte_of.items() if char not in self._id_of
        )
        self.vocab_size = len(self._texts)
        self.bos_id = data.bos_id
        self.eos_id = data.eos_id
        self.eot_id = data.eot_id
        self.add_bos = data.add_bos
        self.end_ids = data.end_ids(self._id_of)
        self.control_texts = frozenset(
            self._texts[index] for index, _ in self._specials if self._types[index] in _HIDDEN_TYPES
        )

    def __repr__(self) -> str:
        return f"Tokenizer(path={self._path!r}, vocab_size={self.vocab_size})"

    def encode(
        self, text: str, *, parse_special: bool = False, add_bos: bool | None = None
    ) -> list[int]:
        """Token ids of `text`, [T].

        With `parse_special` the texts of control tokens become those tokens; never set it for text
        that a user wrote. `add_bos` None means what the model file says.
        Raises RequestError for text that is too long, is not valid Unicode, or holds a byte that the
        vocabulary lacks.
        """
        self._check_text(text)
        ids: list[int] = []
        if self.add_bos if add_bos is None else add_bos:
            if self.bos_id is None:
                raise RequestError(
                    "this model has no BOS token: do not ask for one", param="add_bos"
                )
            ids.append(self.bos_id)
        for piece in self._split_specials(text, self._specials if parse_special else self._always):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                # A batch of one: encoding a single text holds the interpreter lock, for seconds if it is long.
                (encoded,) = self._engine.encode_batch_fast([piece], add_special_tokens=False)
                ids.extend(encoded.ids)
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of `ids`; bytes that form no character become U+FFFD. Raises RequestError on bad ids."""
        joined = b"".join(
            self.token_bytes(token_id)
            for token_id in ids
            if not (skip_special and self.is_control(token_id))
        )
        return joined.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Exact bytes of one token.

        Control, unknown and user-defined tokens give their own text; BYTE tokens the byte that they
        name; UNUSED and UNDEFINED tokens nothing. Raises RequestError if there is no such id.
        """
        self._check_id(token_id)
        text, kind = self._texts[token_id], self._types[token_id]
        if kind in _PLAIN_TYPES:
            return text.encode()
        if kind == TokenType.BYTE:
            return _named_byte(text)
        if kind != TokenType.NORMAL:
            return b""
        try:
            return bytes([self._byte_of[char] for char in text])
        except KeyError:
            return text.encode()

    def is_control(self, token_id: int) -> bool:
        """True for CONTROL and UNKNOWN tokens, which are no text. Raises RequestError on a bad id."""
        self._check_id(token_id)
        return self._types[token_id] in _HIDDEN_TYPES

    def token_text(self, token_id: int) -> str:
        """The vocabulary entry of an id, as the file writes it. Raises RequestError on a bad id."""
        self._check_id(token_id)
        return self._texts[token_id]

    def token_id(self, text: str) -> int | None:
        """The id whose vocabulary entry is exactly `text`, or None."""
        return self._id_of.get(text)

    def _check_id(self, token_id: int) -> None:
        if not 0 <= token_id < self.vocab_size:
            raise RequestError(
                f"token id {token_id} is outside the vocabulary: use 0 to {self.vocab_size - 1}",
                param="prompt",
            )

    def _check_text(self, text: str) -> None:
        try:
            raw = text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text has half a surrogate pair at character {error.start}: send valid Unicode",
                param="prompt",
            ) from error
        if len(raw) > self._max_text_bytes:
            raise RequestError(
                f"the text has {len(raw)} bytes: send at most {self._max_text_bytes}",
                param="prompt",
            )
        lacking = self._missing_bytes and self._missing_bytes.intersection(raw)
        if lacking:
            raise RequestError(
                f"the vocabulary has no token for byte 0x{min(lacking):02x}: leave that character out",
                param="prompt",
            )

    @staticmethod
    def _split_specials(text: str, specials: Sequence[tuple[int, str]]) -> list[str | int]:
        """Cut `text` into plain pieces and ids of special tokens, longest token first."""
        pieces: list[str | int] = [text] if text else []
        for token_id, special in specials:
            if special not in text:
                continue
            cut: list[str | int] = []
            for piece in pieces:
                if isinstance(piece, int):
                    cut.append(piece)
                    continue
                parts = piece.split(special)
                for index, part in enumerate(parts):
                    if index:
                        cut.append(token_id)
                    if part:
                        cut.append(part)
            pieces = cut
        return pieces


def _named_byte(text: str) -> bytes:
    """b"\\x0a" for "<0x0A>"; nothing for a BYTE token that is not written so."""
    try:
        return bytes.fromhex(text[3:5])
    except ValueError:
        return b""


def _build_engine(data: TokenizerData, id_of: dict[str, int]) -> tokenizers.Tokenizer:
    pre = find_pre_tokenizer(data.pre, path=data.path)
    merges = data.merge_pairs()
    for left, right in merges:
        if left not in id_of or right not in id_of or left + right not in id_of:
            raise ModelFileError(
                data.path,
                f"the merge {left!r} + {right!r} names a token that the vocabulary lacks",
                fix="convert the model again, its tokenizer metadata is inconsistent",
            )
    engine = tokenizers.Tokenizer(
        models.BPE(vocab=id_of, merges=merges, ignore_merges=pre.ignore_merges)
    )
    engine.pre_tokenizer = _cutter(pre)
    return engine


def _cutter(pre: PreTokenizer) -> pre_tokenizers.PreTokenizer:
    cuts = [
        pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
        for pattern in pre.patterns
    ]
    return pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )

"""Byte-level BPE: text is cut into words, each word's bytes are written in 256 characters and merged.

Owns that engine. It knows neither special tokens nor files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import tokenizers
from tokenizers import pre_tokenizers

from thermocline.text.tokenization.merge_table import MergeTable
from thermocline.text.tokenization.token_kinds import byte_alphabet

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from thermocline.text.tokenization.pretokenizers import PreTokenizer


class ByteBpe:
    """The engine of tokenizer model "gpt2"; follows llama.cpp id by id.

    One difference: letters, digits and marks that Unicode 16 added are known here and are not in
    llama.cpp's tables (Unicode 15.1), so words of those scripts may be cut elsewhere.
    """

    def __init__(
        self, id_of: Mapping[str, int], merges: Sequence[tuple[str, str]], pre: PreTokenizer
    ) -> None:
        self._byte_of = byte_alphabet()
        self._missing = frozenset(byte for char, byte in self._byte_of.items() if char not in id_of)

        def spell(text: str) -> list[int]:
            return [id_of[char] for char in text if char in id_of]

        cuts = [
            pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
            for pattern in pre.patterns
        ]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._table = MergeTable(
            id_of,
            merges,
            cutter=pre_tokenizers.Sequence([*cuts, to_bytes]),
            spell=spell,
            ignore_merges=pre.ignore_merges,
            digits_are_local=not any(r"\z" in pattern for pattern in pre.patterns),
        )

    def encode(self, text: str) -> Iterator[list[int]]:
        """Yield the ids of `text`, slice by slice."""
        return self._table.encode(text)

    def piece_bytes(self, text: str) -> bytes:
        """The bytes that the token's characters stand for; a text of other characters is itself."""
        try:
            return bytes([self._byte_of[char] for char in text])
        except KeyError:
            return text.encode()

    def find_lacking(self, text: str) -> str | None:
        """The smallest byte of `text` that has no token."""
        if not self._missing:
            return None
        lacking = self._missing.intersection(text.encode())
        return f"byte 0x{min(lacking):02x}" if lacking else None

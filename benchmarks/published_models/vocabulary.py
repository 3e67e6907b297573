"""Vocabularies of published sizes: byte-level BPE tokens that look like words, their merges, the real special tokens.

Texts and merges are invented, since the real ones are their owners'; numbers, ids and names of special tokens are
real. Knows no model file.
"""

from __future__ import annotations

import string
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_STEP: Final = 104729


class Kind(IntEnum):
    """GGUF's kinds of tokens."""

    NORMAL = 1
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A vocabulary: `first` special tokens, `num_bpe` tokens of BPE, `last` special tokens, names up to `size`.

    The first 256 of the BPE tokens are the bytes, each other one is made by one merge.
    """

    pre: str
    size: int
    num_bpe: int
    first: tuple[tuple[str, Kind], ...]
    last: tuple[tuple[str, Kind], ...]
    template: str
    eos_id: int
    bos_id: int | None = None
    eot_id: int | None = None
    padding_id: int | None = None
    add_bos: bool | None = None
    model: str = "gpt2"

    def cut(self, size: int) -> Vocabulary:
        """Return the vocabulary with so many tokens: the special ones, and as many of BPE as fit."""
        num_bpe = size - len(self.first) - len(self.last)

        def moved(token_id: int | None) -> int | None:
            if token_id is None or token_id < len(self.first) + self.num_bpe:
                return token_id
            return token_id - self.num_bpe + num_bpe

        eos_id = moved(self.eos_id)
        assert eos_id is not None
        return replace(
            self,
            size=size,
            num_bpe=num_bpe,
            eos_id=eos_id,
            bos_id=moved(self.bos_id),
            eot_id=moved(self.eot_id),
            padding_id=moved(self.padding_id),
        )

    def tokens(self) -> list[str]:
        """Texts by id."""
        bpe, _ = _bpe(self.num_bpe)
        found = [text for text, _ in self.first] + bpe + [text for text, _ in self.last]
        # What the converter calls ids that no token has.
        return found + [f"[PAD{index}]" for index in range(len(found), self.size)]

    def kinds(self) -> list[int]:
        """Kinds by id."""
        found = [int(kind) for _, kind in self.first]
        found += [int(Kind.NORMAL)] * self.num_bpe
        found += [int(kind) for _, kind in self.last]
        return found + [int(Kind.UNUSED)] * (self.size - len(found))

    def merges(self) -> list[str]:
        """Pairs of tokens, best first."""
        return _bpe(self.num_bpe)[1]


def _bpe(count: int) -> tuple[list[str], list[str]]:
    """Return `count` tokens and their merges."""
    tokens, merges = _longest_bpe()
    assert 256 <= count <= len(tokens), count
    return tokens[:count], merges[: count - 256]


@lru_cache(maxsize=1)
def _longest_bpe(count: int = 250_000) -> tuple[list[str], list[str]]:
    """Return tokens and merges of which every beginning is a vocabulary.

    Pairs of letters, then words of two pairs, of four, and ideographs in turn; no text comes twice.
    """
    alphabet = _byte_alphabet()
    space, letters = alphabet[ord(" ")], string.ascii_lowercase
    inner = [(left, right) for left in letters for right in letters]
    merges = [(space, letter) for letter in letters] + inner
    pairs = ["".join(merge) for merge in merges]
    ends = ["".join(merge) for merge in inner]
    made = _ideographs(alphabet)
    words: list[str] = []
    for index in range(count):
        if len(merges) >= count:
            break
        # A walk over all combinations, of which the step has no common factor with their number.
        left, right = divmod(index * _STEP % (len(pairs) * len(ends)), len(ends))
        words.append(pairs[left] + ends[right])
        merges.append((pairs[left], ends[right]))
        if not words[index // 2].startswith(space):
            merges.append((words[-1], words[index // 2]))
        merges += next(made, ())
    texts = [*alphabet, *("".join(merge) for merge in merges)]
    return texts[:count], [f"{left} {right}" for left, right in merges[: count - 256]]


def _ideographs(alphabet: list[str]) -> Iterator[tuple[tuple[str, str], ...]]:
    """Yield the merges of one ideograph after the other; those of its first two bytes once."""
    known = set()
    for code in range(0x4E00, 0x9FA5):
        first, second, third = (alphabet[byte] for byte in chr(code).encode())
        if first + second in known:
            yield ((first + second, third),)
        else:
            known.add(first + second)
            yield (first, second), (first + second, third)


def _byte_alphabet() -> list[str]:
    """Return the character of each byte in byte-level BPE."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    moved = {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [moved.get(byte, chr(byte)) for byte in range(256)]

"""SentencePiece's BPE: characters are merged into tokens, the token of the highest score first.

Owns that engine. It knows neither special tokens nor files.

It is written by hand because scores tie: two tokens of one score, or one token built from two pairs,
are merged from left to right, while the `tokenizers` package ranks every pair differently.
"""

from __future__ import annotations

from functools import lru_cache
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from thermocline.text.tokenization.slices import SLICE_CHARS
from thermocline.text.tokenization.text_engine import SPACE_MARK, byte_name, find_unwritten

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

_MAX_CACHED = 1 << 16
_MAX_CACHED_CHARS = 64
_MAX_CHECKED_CHARS = 256
"""A longer token is taken as one that merges can build: to check it takes the square of its length."""


class SentencePiece:
    """The engine of tokenizer model "llama"; follows llama.cpp id by id.

    A text costs O(n log n) whatever it holds. It is first cut where no token spans the cut, which
    changes no result, so that a word met again is a look-up.
    """

    def __init__(self, id_of: Mapping[str, int], scores: Sequence[float]) -> None:
        self._id_of = id_of
        order = {score: rank for rank, score in enumerate(sorted(set(scores), reverse=True))}
        self._rank_of = {text: order[scores[index]] for text, index in id_of.items()}
        self._joined = _joined_pairs(id_of)
        self._merge_word = lru_cache(_MAX_CACHED)(self._merge)

    def encode(self, text: str) -> Iterator[list[int]]:
        """Yield the ids of `text`, slice by slice."""
        text = text.replace(" ", SPACE_MARK)
        joined = self._joined
        start = 0
        for first in range(0, len(text), SLICE_CHARS):
            last = first + SLICE_CHARS
            pairs = map(str.__add__, text[first:last], text[first + 1 : last + 1])
            cuts = [first + index for index, pair in enumerate(pairs, 1) if pair not in joined]
            ids: list[int] = []
            for end in [*cuts, len(text)] if last >= len(text) else cuts:
                word = text[start:end]
                short = end - start <= _MAX_CACHED_CHARS
                ids += self._merge_word(word) if short else self._merge(word)
                start = end
            yield ids

    def piece_bytes(self, text: str) -> bytes:
        """The text of the token, with its spaces."""
        return text.replace(SPACE_MARK, " ").encode()

    def find_lacking(self, text: str) -> str | None:
        """The first character of `text` that can not be written."""
        return find_unwritten(text.replace(" ", SPACE_MARK), self._id_of)

    def _merge(self, word: str) -> tuple[int, ...]:
        """Merge until no two neighbours form a token.

        A heap entry is rank * 2^32 + the left symbol's place, so that equal ranks go from left to
        right. An entry is stale when the pair at that place has another rank by now; whatever
        changes a pair also enters it anew.
        """
        symbols: list[str] = list(word)  # "" where a symbol was merged into one to its left
        size = len(symbols)
        after = list(range(1, size + 1))
        before = list(range(-1, size - 1))
        rank_of = self._rank_of
        heap = [
            rank << 32 | left
            for left in range(size - 1)
            if (rank := rank_of.get(symbols[left] + symbols[left + 1])) is not None
        ]
        heapify(heap)
        while heap:
            entry = heappop(heap)
            left = entry & 0xFFFFFFFF
            right = after[left]
            if not symbols[left] or right >= size:
                continue
            merged = symbols[left] + symbols[right]
            if rank_of.get(merged) != entry >> 32:
                continue
            symbols[left], symbols[right] = merged, ""
            following = after[left] = after[right]
            if following < size:
                before[following] = left
                rank = rank_of.get(merged + symbols[following])
                if rank is not None:
                    heappush(heap, rank << 32 | left)
            previous = before[left]
            if previous >= 0:
                rank = rank_of.get(symbols[previous] + merged)
                if rank is not None:
                    heappush(heap, rank << 32 | previous)
        return self._ids_of(symbols)

    def _ids_of(self, symbols: Sequence[str]) -> tuple[int, ...]:
        """Ids of merged symbols; a character that is no token becomes the tokens of its bytes."""
        id_of = self._id_of
        ids: list[int] = []
        for symbol in symbols:
            if symbol:
                token_id = id_of.get(symbol)
                if token_id is None:
                    ids.extend(id_of[byte_name(byte)] for byte in symbol.encode())
                else:
                    ids.append(token_id)
        return tuple(ids)


def _joined_pairs(texts: Mapping[str, int]) -> frozenset[str]:
    """Every two characters that stand side by side in a token that merges can build."""
    built: set[str] = set()
    pairs: set[str] = set()
    for text in sorted(texts, key=len):
        if len(text) > _MAX_CHECKED_CHARS or _is_built(text, built):
            built.add(text)
            pairs.update(map(str.__add__, text, text[1:]))
    return frozenset(pairs)


def _is_built(text: str, built: Collection[str]) -> bool:
    """Whether two characters or tokens of `built` make `text`."""
    return any(
        (cut == 1 or text[:cut] in built) and (cut == len(text) - 1 or text[cut:] in built)
        for cut in range(1, len(text))
    )

"""The BPE model of the `tokenizers` package, from a GGUF vocabulary and its merges.

Owns what happens where merges name a text that is no token: llama.cpp applies such a merge all the
same and writes a result that is no token as the tokens of its characters. It knows no cutting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import tokenizers
from tokenizers import models

from thermocline.text.tokenization.slices import TextSlicer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tokenizers import pre_tokenizers


class MergeTable:
    """Encodes plain text by merging pairs, best first.

    `cutter` cuts the text before the merges. `spell` gives the ids of a text that merges can form
    and that is no token. digits_are_local: as of TextSlicer.
    """

    def __init__(
        self,
        id_of: Mapping[str, int],
        merges: Sequence[tuple[str, str]],
        *,
        cutter: pre_tokenizers.PreTokenizer,
        spell: Callable[[str], list[int]],
        ignore_merges: bool = False,
        byte_fallback: bool = False,
        digits_are_local: bool = True,
    ) -> None:
        ids = dict(id_of)
        self._num_real = len(ids)
        self._spelled: dict[int, list[int]] = {}
        for left, right in merges:
            for text in (left, right, left + right):
                if text not in ids:
                    self._spelled[len(ids)] = spell(text)
                    ids[text] = len(ids)
        engine = tokenizers.Tokenizer(
            models.BPE(
                vocab=ids,
                merges=list(merges),
                ignore_merges=ignore_merges,
                byte_fallback=byte_fallback,
            )
        )
        engine.pre_tokenizer = cutter
        self._slicer = TextSlicer(engine, digits_are_local=digits_are_local)

    def encode(self, text: str) -> Iterator[list[int]]:
        """Yield the ids of `text`, slice by slice. Raises RequestError as TextSlicer does."""
        for ids in self._slicer.encode(text):
            yield self._as_tokens(ids) if self._spelled else ids

    def _as_tokens(self, ids: list[int]) -> list[int]:
        spelled: list[int] = []
        for token_id in ids:
            if token_id < self._num_real:
                spelled.append(token_id)
            else:
                spelled.extend(self._spelled[token_id])
        return spelled

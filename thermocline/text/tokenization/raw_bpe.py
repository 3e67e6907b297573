"""BPE over whole lines of characters, spaces written as U+2581: Gemma 4, Sarvam.

Owns that engine. It knows neither special tokens nor files.
"""

from __future__ import annotations

import re
from itertools import chain
from typing import TYPE_CHECKING

import tokenizers
from tokenizers import pre_tokenizers

from thermocline.text.tokenization.merge_table import MergeTable
from thermocline.text.tokenization.text_engine import SPACE_MARK, byte_name, find_unwritten

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_LINE_ENDS = re.compile(r"\n+")


class RawBpe:
    """Follows llama.cpp id by id.

    Runs of line ends and what is between them are merged each for itself. A character without a
    token becomes the tokens of its bytes. With `whole_line_ends` a run of line ends that is a token
    is that token, whatever the merges would make of it.
    """

    def __init__(
        self,
        id_of: Mapping[str, int],
        merges: Sequence[tuple[str, str]],
        *,
        whole_line_ends: bool,
    ) -> None:
        self._id_of = id_of

        def spell(text: str) -> list[int]:
            names = map(byte_name, text.encode())
            return [id_of[name] for name in names if name in id_of]

        self._table = MergeTable(
            id_of,
            merges,
            cutter=pre_tokenizers.Split(tokenizers.Regex(r"\n+"), behavior="isolated"),
            spell=spell,
            byte_fallback=True,
        )
        runs = [text for text in id_of if text.startswith("\n") and not text.strip("\n")]
        # Nearly always the merges build these tokens, and then nothing needs to be looked up.
        self._odd_runs = {
            text: id_of[text]
            for text in runs
            if whole_line_ends and [*chain(*self._table.encode(text))] != [id_of[text]]
        }

    def encode(self, text: str) -> Iterator[list[int]]:
        """Yield the ids of `text`, slice by slice."""
        text = text.replace(" ", SPACE_MARK)
        if not self._odd_runs:
            yield from self._table.encode(text)
            return
        start = 0
        for run in _LINE_ENDS.finditer(text):
            whole = self._odd_runs.get(run[0])
            if whole is not None:
                yield from self._table.encode(text[start : run.start()])
                yield [whole]
                start = run.end()
        yield from self._table.encode(text[start:])

    def piece_bytes(self, text: str) -> bytes:
        """The text of the token, with its spaces."""
        return text.replace(SPACE_MARK, " ").encode()

    def find_lacking(self, text: str) -> str | None:
        """The first character of `text` that can not be written."""
        return find_unwritten(text.replace(" ", SPACE_MARK), self._id_of)

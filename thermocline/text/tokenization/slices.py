"""Encodes a long text slice by slice, with the ids that the whole would have.

Owns where a text may be cut. It knows no vocabulary: an engine of the `tokenizers` package encodes.
"""

from __future__ import annotations

import unicodedata
from itertools import compress
from operator import ne
from typing import TYPE_CHECKING, Final

from thermocline.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenizers import Encoding, Tokenizer

SLICE_CHARS: Final = 1 << 15
"""Of one call of the package, which takes some 200 bytes per token meanwhile."""
MAX_UNCUT_CHARS: Final = 1 << 19
"""Of a text within which no place is certain to be the end of a word: 80 MB are taken while it is encoded."""

# The rules by which text is cut into words look ahead over one run of letters, digits, blanks or other characters;
# the longest beginning of a rule that spans several runs is that of `<sentinel:0>`, four of them.
_RUNS_AHEAD: Final = 4
_DIGITS_AHEAD: Final = 16


class TextSlicer:
    """Cuts texts for one engine.

    digits_are_local: whether a run of digits is cut from its beginning on, so that its end does not matter.
    """

    def __init__(
        self,
        engine: Tokenizer,
        *,
        digits_are_local: bool,
        slice_chars: int = SLICE_CHARS,
        max_uncut_chars: int = MAX_UNCUT_CHARS,
    ) -> None:
        self._engine = engine
        self._digits_are_local = digits_are_local
        self._slice_chars = slice_chars
        self._max_uncut_chars = max_uncut_chars

    def encode(self, text: str) -> Iterator[list[int]]:
        """Yield the ids of `text`, slice by slice. Raises RequestError for a long text without a certain cut."""
        start, size = 0, self._slice_chars
        seen = num_edges = 0  # of the text from `start` on, which has no place to cut so far
        while len(text) - start > size:
            window = text[start : start + size]
            is_hopeful, more_edges = self._look(window, seen, num_edges)
            cut, ids = self._begun(window) if is_hopeful else (0, [])
            if cut:
                yield ids
                start, size = start + cut, self._slice_chars
                seen = num_edges = 0
            elif size >= self._max_uncut_chars:
                raise RequestError(
                    f"the text has more than {self._max_uncut_chars} characters without a place to cut: put blanks or line "
                    "ends into it",
                    param="prompt",
                )
            else:
                seen, num_edges = size, num_edges + more_edges
                size *= 2
        (encoded,) = self._engine.encode_batch_fast([text[start:]], add_special_tokens=False)
        yield encoded.ids

    def _look(self, window: str, seen: int, num_edges: int) -> tuple[bool, int]:
        """Return whether a window may have a place to cut that was not tried, and how many more ends of runs it has.

        seen: of so many first characters each such place was tried. They have `num_edges` ends of runs, or more where these
        are too many to matter; only the last few are looked at again.
        """
        count = 0
        for _, is_far in self._edges(window, max(seen - _DIGITS_AHEAD - 1, 0)):
            if is_far:
                return True, _RUNS_AHEAD
            count += 1
        return num_edges + count > _RUNS_AHEAD, count

    def _begun(self, window: str) -> tuple[int, list[int]]:
        """Return the last place where the whole text is cut as well, and the ids up to there; 0 and none without one."""
        # A batch of one: encoding a single text holds the interpreter lock, for seconds if it is long.
        (encoded,) = self._engine.encode_batch([window], add_special_tokens=False)
        cut = self._last_certain_cut(window, encoded)
        return cut, encoded.ids[: encoded.char_to_token(cut)] if cut else []

    def _last_certain_cut(self, window: str, encoded: Encoding) -> int:
        """Return the last place where the whole text is cut as well, whatever follows the window; 0 for none."""
        edges = _word_edges(encoded)
        edge = next(edges, 0)
        for place in self._far_places(window):
            while edge > place:
                edge = next(edges, 0)
            if edge in (0, place):
                return edge
        return 0

    def _far_places(self, window: str) -> Iterator[int]:
        """Yield the places so far from the window's end that a cut there is certain, the last one first."""
        return (place for place, is_far in self._edges(window) if is_far)

    def _edges(self, window: str, first: int = 0) -> Iterator[tuple[int, bool]]:
        """Yield the ends of runs behind `first`, and other places of a certain cut, the last one first: (place, is_far)."""
        kind_after, num_runs = _kind(window[-1]), 0
        for place in range(len(window) - 1, first, -1):
            kind = _kind(window[place - 1])
            if kind != kind_after:
                num_runs += 1
                yield place, num_runs > _RUNS_AHEAD
            elif self._digits_are_local and kind == "N" and len(window) - place >= _DIGITS_AHEAD:
                yield place, True
            kind_after = kind


def _word_edges(encoded: Encoding) -> Iterator[int]:
    """Yield the places between two words, the last one first; not beside a character that has no token.

    `char_to_word` would look through all tokens each time.
    """
    words = encoded.word_ids
    # Compared in C: a word can be as long as the text, and then nearly every comparison is for nothing.
    changes = compress(range(1, len(words)), map(ne, words[1:], words))
    for index in reversed([*changes]):
        if words[index - 1] is None or words[index] is None:
            continue
        chars_before, chars_after = encoded.token_to_chars(index - 1), encoded.token_to_chars(index)
        if chars_before and chars_after and chars_before[1] == chars_after[0]:
            yield chars_after[0]


def _kind(char: str) -> str:
    """Return the kind of run that the character belongs to: letters, digits, blanks or others."""
    if char.isspace():
        return "Z"
    category = unicodedata.category(char)[0]
    return "L" if category == "M" else category if category in "LN" else "O"

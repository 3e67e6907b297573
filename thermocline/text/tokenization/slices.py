"""Encodes a long text slice by slice, with the ids that the whole would have.

Owns where a text may be cut. It knows no vocabulary: an engine of the `tokenizers` package encodes.
"""

from __future__ import annotations

import unicodedata
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
        while len(text) - start > size:
            # A batch of one: encoding a single text holds the interpreter lock, for seconds if it is long.
            (encoded,) = self._engine.encode_batch(
                [text[start : start + size]], add_special_tokens=False
            )
            cut = self._last_certain_cut(text[start : start + size], encoded)
            if cut:
                yield encoded.ids[: encoded.char_to_token(cut)]
                start, size = start + cut, self._slice_chars
            elif size >= self._max_uncut_chars:
                raise RequestError(
                    f"the text has more than {self._max_uncut_chars} characters without a place to cut: put blanks or line "
                    "ends into it",
                    param="prompt",
                )
            else:
                size *= 4
        (encoded,) = self._engine.encode_batch_fast([text[start:]], add_special_tokens=False)
        yield encoded.ids

    def _last_certain_cut(self, window: str, encoded: Encoding) -> int:
        """Return the last place where the whole text is cut as well, whatever follows the window; 0 for none."""
        kind_after, num_runs = _kind(window[-1]), 0
        edges = _word_edges(encoded)
        edge = next(edges, 0)
        for place in range(len(window) - 1, 0, -1):
            kind = _kind(window[place - 1])
            is_edge = kind != kind_after
            num_runs += is_edge
            is_far = (
                num_runs > _RUNS_AHEAD
                if is_edge
                else (
                    self._digits_are_local and kind == "N" and len(window) - place >= _DIGITS_AHEAD
                )
            )
            if is_far:
                while edge > place:
                    edge = next(edges, 0)
                if edge == place:
                    return place
            kind_after = kind
        return 0


def _word_edges(encoded: Encoding) -> Iterator[int]:
    """Yield the places between two words, the last one first; not beside a character that has no token.

    `char_to_word` would look through all tokens each time.
    """
    words = encoded.word_ids
    for index in range(len(words) - 1, 0, -1):
        before, after = words[index - 1], words[index]
        if before is None or after is None or before == after:
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

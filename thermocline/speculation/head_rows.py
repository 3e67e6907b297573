"""From how many first tokens of the vocabulary a request's drafts are taken. Pure.

A head reads a row for each token, which is more than half of what a block of one layer reads. Vocabularies of merges have frequent
tokens first, but not for every language, and not every vocabulary has them so. The request's own tokens tell.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

_LEAST_SHARES: Final = (0.92, 0.95)
"""Of a request's tokens in the first quarter, and half. With 0.88 of guesses right and the head a fifth of a step, a
quarter pays from a share of 0.82 on, and half would be as good below 0.93 (docs/LOG.md)."""
_WINDOW: Final = 256
"""The mean is of about so many latest tokens."""
_DOUBT: Final = 8
"""As if so many tokens outside had been seen before the first one."""


@dataclass(slots=True)
class TokenShares:
    """How many of a request's latest tokens are among the first ones. cuts: ascending, the last are all tokens."""

    cuts: tuple[int, ...]
    _shares: list[float] = field(init=False)
    _num_seen: int = _DOUBT

    def __post_init__(self) -> None:
        self._shares = [0.0] * (len(self.cuts) - 1)

    def see(self, tokens: Sequence[int]) -> None:
        """Take in tokens of the prompt or the answer, the latest last."""
        if not self._shares:
            return
        for token in tokens[-4 * _WINDOW :]:
            self._num_seen = min(self._num_seen + 1, _WINDOW)
            for index, cut in enumerate(self.cuts[:-1]):
                self._shares[index] += ((token < cut) - self._shares[index]) / self._num_seen

    def chosen(self) -> int:
        """Return the cut for the request's next draft."""
        for cut, share, least in zip(self.cuts, self._shares, _LEAST_SHARES, strict=False):
            if share >= least:
                return cut
        return self.cuts[-1]

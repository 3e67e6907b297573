"""Feeds the times of a lane's jobs to the rule that chooses the size of prefill chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from thermocline.messages import Chunk, ChunkId
    from thermocline.pipeline.scheduling.chunk_size import ChunkSizer


# More than are ever in flight.
_MAX_CHUNKS: Final = 64


class ChunkSizeFeedback:
    """The longest job of each chunk in flight. take_times: the seconds of all jobs since its last call."""

    def __init__(
        self, sizer: ChunkSizer, take_times: Callable[[], Iterable[tuple[ChunkId, float]]]
    ) -> None:
        self._sizer = sizer
        self._take_times = take_times
        self._longest_s: dict[ChunkId, float] = {}

    def __repr__(self) -> str:
        return f"ChunkSizeFeedback({self._sizer})"

    def chunk_tokens(self, *, is_decoding: bool) -> int:
        """Return the most tokens of the next prefill chunk."""
        return self._sizer.chunk_tokens(is_decoding=is_decoding)

    def chunk_ended(self, chunk: Chunk) -> None:
        """Pass on the longest job of a chunk that has left the ring."""
        for done, seconds in self._take_times():
            self._longest_s[done] = max(seconds, self._longest_s.get(done, 0.0))
        longest_s = self._longest_s.pop(chunk.id, None)
        # A draft has the number of the chunk before it, which has ended.
        for ended in [number for number in self._longest_s if number < chunk.id - _MAX_CHUNKS]:
            del self._longest_s[ended]
        if longest_s is None:
            return
        if chunk.is_prompt:
            self._sizer.observe_prompt(chunk.num_tokens, longest_s)
        else:
            self._sizer.observe_decode(longest_s)

"""The memory that a rank exchanges with: how much it can need at most, and the one arena of that size. Pure.

Sized once from what can really arrive, and locked after that: a request for more is our bug, and is raised with the
name of who asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

HEAD_BYTES: Final = 32
"""Bytes in front of what one rank sends another."""
INT_BYTES: Final = 4
ALIGNMENT: Final = 64
MAX_BLOCK_BYTES: Final = 64 << 10
"""Of few tokens, every rank sends every other one so many bytes at most, whether it has as many or not: that takes one
collective call, where lengths of their own take a call before it. A call with 64 KiB takes 0.05 ms longer than one with
128 bytes, and a call more 0.13 ms (two ranks, gloo)."""


@dataclass(frozen=True, slots=True)
class Dividing:
    """Where ranks of a replica divide a chunk's rows: what they give each other in a layer.

    senders: ranks that send tokens to experts then, each a part of a replica's. width: ranks of the widest replica.
    """

    senders: int
    width: int
    chunk_tokens: int
    """Most tokens of a chunk."""
    row_bytes: int
    """Most bytes of a row that one rank gives another."""

    def mix_bytes(self) -> int:
        """Return the most bytes that a rank gives: its rows, rounded up, to each of the others."""
        return (self.width - 1) * -(-self.chunk_tokens // self.width) * self.row_bytes

    def mixed_bytes(self) -> int:
        """Return the most bytes that it gets: the others' rows."""
        return (self.chunk_tokens - self.chunk_tokens // self.width) * self.row_bytes


@dataclass(frozen=True, slots=True)
class Traffic:
    """What decides how much can arrive at a rank.

    dispatchers: ranks that send tokens. tokens_each: of a step's chunk, the most that one of them sends.
    """

    dispatchers: int
    tokens_each: int
    num_experts_used: int
    num_owned: int
    """Most experts of a layer that the rank owns."""
    hidden: int
    item_bytes: int
    num_ranks: int
    num_layers_in_flight: int = 1
    """Chunks in flight, each with buffers of its own."""
    divided: Dividing | None = None
    """None where no replica has several ranks, or they divide nothing."""

    def token_capacity(self) -> int:
        """Return the tokens that can really arrive in a layer: every dispatcher's largest chunk, once."""
        return self.dispatchers * self.tokens_each

    def pair_capacity(self) -> int:
        """Return the (token, slot) pairs that can arrive: a token has each owned expert once at most."""
        return self.token_capacity() * min(self.num_experts_used, self.num_owned)

    def receive_bytes(self) -> int:
        """Return the bytes that can arrive with one layer's tokens.

        Ranks that divide a chunk send no more tokens, but each a head and the numbers of experts.
        """
        senders = max(self.dispatchers, 0 if self.divided is None else self.divided.senders)
        experts = senders * 2 * INT_BYTES * self.num_owned
        pairs = 2 * INT_BYTES * self.pair_capacity()
        rows = self.token_capacity() * self.hidden * self.item_bytes
        return senders * HEAD_BYTES + experts + pairs + rows

    def block_bytes(self, num_tokens: int) -> int:
        """Return the most bytes that a rank can send another with so many tokens; 0 where they are too many for blocks."""
        pairs = num_tokens * min(self.num_experts_used, self.num_owned)
        experts = min(pairs, self.num_owned)
        rows = num_tokens * self.hidden * self.item_bytes
        nbytes = HEAD_BYTES + 2 * INT_BYTES * (experts + pairs) + rows
        nbytes = -(-nbytes // ALIGNMENT) * ALIGNMENT
        return nbytes if nbytes <= MAX_BLOCK_BYTES else 0

    def answer_bytes(self) -> int:
        """Return the bytes of the outputs that go back."""
        return self.pair_capacity() * self.hidden * self.item_bytes

    def send_bytes(self, num_experts: int) -> int:
        """Return the most bytes that this rank sends with a layer's tokens: a copy per rank, each pair once."""
        copies = self.tokens_each * min(self.num_experts_used, self.num_ranks)
        pairs = self.tokens_each * self.num_experts_used
        return (
            self.num_ranks * HEAD_BYTES
            + 2 * INT_BYTES * (num_experts + pairs)
            + copies * self.hidden * self.item_bytes
        )

    def returned_bytes(self) -> int:
        """Return the most bytes of outputs that come back to this rank."""
        return self.tokens_each * self.num_experts_used * self.hidden * self.item_bytes


def arena_sizes(traffic: Traffic, num_experts: int) -> dict[str, int]:
    """Return the bytes of each buffer of one chunk in flight."""
    divided = traffic.divided
    mixed = {} if divided is None else {"mix": divided.mix_bytes(), "mixed": divided.mixed_bytes()}
    return mixed | {
        "send": traffic.send_bytes(num_experts),
        "receive": traffic.receive_bytes(),
        "answer": traffic.answer_bytes(),
        "returned": traffic.returned_bytes(),
        "blocks": 2 * traffic.num_ranks * MAX_BLOCK_BYTES,
    }


class WorkspaceLockedError(AssertionError):
    """More was asked for than can arrive: the formula or its caller is wrong."""


class Arena:
    """Named buffers, made of one allocation, that never grow once locked."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self._buffers: dict[str, NDArray[np.uint8]] = {}
        self._peaks: dict[str, int] = {}
        self._is_locked = False

    def __repr__(self) -> str:
        state = "locked" if self._is_locked else "open"
        return f"Arena({self.nbytes} bytes, {state})"

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(self._sizes.values())

    @property
    def peak_bytes(self) -> dict[str, int]:
        """The most that was ever taken of each buffer."""
        return dict(self._peaks)

    def reserve(self, name: str, nbytes: int) -> None:
        """Let a buffer have at least so many bytes. Raises WorkspaceLockedError once locked."""
        if self._is_locked:
            raise WorkspaceLockedError(f"{name}: the workspace is locked")
        nbytes = -(-nbytes // ALIGNMENT) * ALIGNMENT
        self._sizes[name] = max(self._sizes.get(name, 0), nbytes)

    def lock(self) -> None:
        """Allocate what was reserved. Pages that are never touched cost nothing."""
        memory, start = np.empty(self.nbytes, np.uint8), 0
        for name, nbytes in self._sizes.items():
            self._buffers[name] = memory[start : start + nbytes]
            start += nbytes
        self._is_locked = True

    def take(self, name: str, nbytes: int, caller: str) -> NDArray[np.uint8]:
        """Return the first bytes of a buffer, uint8 [nbytes]; valid until it is taken again.

        Raises WorkspaceLockedError, with the caller's name, for more than was reserved.
        """
        size = self._sizes.get(name, 0)
        if nbytes > size or not self._is_locked:
            raise WorkspaceLockedError(
                f"{caller} takes {nbytes} bytes of {name!r}, but {size} are reserved and locked"
            )
        self._peaks[name] = max(self._peaks.get(name, 0), nbytes)
        return self._buffers[name][:nbytes]

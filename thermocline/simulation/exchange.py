"""Messages between ranks on a virtual clock: collectives, in which all wait for all, and single messages. Pure.

Each rank has one link to the others, with its own queue out and its own queue in; ranks never share one. A message
takes its sender's processor, the bytes on the sender's link, the way, and the bytes on the receiver's link, where they
overlap. Knows no expert and no layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from thermocline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    Seconds = NDArray[np.float64]
    Bytes = NDArray[np.int64]


class Exchange(StrEnum):
    """How rows get to the ranks of their experts: its value is what tables call it."""

    COLLECTIVE = "collective"
    POINT_TO_POINT = "point-to-point"


@dataclass(frozen=True, slots=True)
class Link:
    """What connects a rank with any other one.

    bytes_per_s: in each direction; latency_s: from one rank's program to another's, besides the bytes; message_s: of
    the sender's processor, per message; collective_s: until an operation of all ranks has begun, besides its messages.
    """

    name: str
    bytes_per_s: float
    latency_s: float
    message_s: float
    collective_s: float

    def __post_init__(self) -> None:
        if self.bytes_per_s <= 0 or min(self.latency_s, self.message_s, self.collective_s) < 0:
            raise ConfigError(
                f"the link {self.name!r} needs a speed above 0, and times of 0 or more"
            )


class Message(NamedTuple):
    """Bytes from one rank to another. ready_s: when the sender has them."""

    sender: int
    receiver: int
    nbytes: int
    ready_s: float


class Links:
    """The links of all ranks, each busy until some time. Owns those times."""

    def __init__(self, link: Link, num_ranks: int) -> None:
        self._link = link
        self._out: Seconds = np.zeros(num_ranks)
        self._in: Seconds = np.zeros(num_ranks)
        self.total_bytes = 0
        """Sent so far, by all ranks."""

    def collective(
        self, ranks: NDArray[np.int64], ready_s: Seconds, sent: Bytes, received: Bytes
    ) -> Seconds:
        """Return when each of `ranks` has what it gets, [n]. sent, received: its bytes, int64 [n].

        It begins when the last rank is there with a free link. Each rank sends one message to each other one. A single
        rank takes no time.
        """
        if len(ranks) == 1:
            return ready_s
        start_s = max(ready_s.max(), self._out[ranks].max(), self._in[ranks].max())
        begun_s = start_s + self._link.collective_s + (len(ranks) - 1) * self._link.message_s
        busy_s = begun_s + np.maximum(sent, received) / self._link.bytes_per_s
        self._out[ranks] = self._in[ranks] = busy_s
        self.total_bytes += int(sent.sum())
        ends: Seconds = busy_s + self._link.latency_s
        return ends

    def send(self, messages: Iterable[Message]) -> list[float]:
        """Return when each message is received, in the order given; each sender sends its own in that order."""
        waiting = list(messages)
        link = self._link
        first_s = []
        for sender, _, nbytes, ready_s in waiting:
            begin_s = max(ready_s, self._out[sender]) + link.message_s
            self._out[sender] = begin_s + nbytes / link.bytes_per_s
            first_s.append(begin_s + link.latency_s)
            self.total_bytes += nbytes
        ends = [0.0] * len(waiting)
        for index in sorted(range(len(waiting)), key=first_s.__getitem__):
            receiver, nbytes = waiting[index].receiver, waiting[index].nbytes
            ends[index] = max(first_s[index], self._in[receiver]) + nbytes / link.bytes_per_s
            self._in[receiver] = ends[index]
        return ends

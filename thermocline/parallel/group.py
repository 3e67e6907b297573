"""The process group: exchanges of bytes between all ranks, over torch.distributed. Used by one thread at a time.

Every failure of it is GroupLostError: a rank was killed, or took longer than the deadline. After that the group is dead.
"""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import numpy as np

from thermocline.parallel.links import lost
from thermocline.parallel.local_group import LocalGroup, are_on_one_machine
from thermocline.parallel.socket_group import with_sockets

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from thermocline.config import RankTransport
    from thermocline.parallel.rendezvous import KeyStore

    Bytes = NDArray[np.uint8]


class Group(Protocol):
    """Ranks that exchange bytes; every method is called by all of them, in the same order."""

    place: int
    size: int
    way: str
    """By what it exchanges, in words."""

    def exchange_sizes(self, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Give each rank its entry; return what each rank gave: int64 [ranks] both. Raises GroupLostError."""
        ...

    def exchange(
        self,
        send: Bytes,
        sent: Sequence[int],
        receive: Bytes,
        received: Sequence[int],
        *,
        is_small: bool = False,
    ) -> None:
        """Give each rank its run of `send`, and get each one's into `receive`. Raises GroupLostError.

        sent, received: the bytes for and from each rank, which all ranks agree on. is_small: that there are few of them, which
        all ranks say alike.
        """
        ...

    def broadcast(self, data: bytes | None) -> bytes:
        """Return what place 0 gives. data: given by place 0 alone. Raises GroupLostError."""
        ...

    def close(self) -> None:
        """Leave. Never waits for others."""
        ...


_FIRST_BYTES = 4096  # of a broadcast; more takes a second one


class TorchGroup:
    """A `Group` of torch.distributed: gloo between processors."""

    def __init__(
        self, store: object, place: int, size: int, timeout_s: float, backend: str
    ) -> None:
        """Wait for all ranks. Raises GroupLostError when one does not come within the timeout."""
        import torch.distributed as dist

        self.place, self.size = place, size
        self.way = "by torch.distributed"
        self._dist = dist
        timeout = timedelta(seconds=timeout_s)
        try:
            dist.init_process_group(
                backend,
                store=store,  # type: ignore[arg-type]
                rank=place,
                world_size=size,
                timeout=timeout,
            )
            # Connects every pair now: a lazy connection to a rank that died may hang.
            self.exchange_sizes(np.zeros(size, np.int64))
        except (RuntimeError, ValueError) as error:
            self.close()
            raise lost(error) from error

    def exchange_sizes(self, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        found = np.empty_like(sizes)
        self.exchange(sizes.view(np.uint8), [8] * self.size, found.view(np.uint8), [8] * self.size)
        return found

    def exchange(
        self,
        send: Bytes,
        sent: Sequence[int],
        receive: Bytes,
        received: Sequence[int],
        *,
        is_small: bool = False,
    ) -> None:
        import torch

        try:
            self._dist.all_to_all_single(
                torch.from_numpy(receive), torch.from_numpy(send), list(received), list(sent)
            )
        except RuntimeError as error:
            raise lost(error) from error

    def broadcast(self, data: bytes | None) -> bytes:
        first = np.zeros(_FIRST_BYTES, np.uint8)
        if data is not None:
            first[:8].view(np.int64)[0] = len(data)
            begin = np.frombuffer(data[: _FIRST_BYTES - 8], np.uint8)
            first[8 : 8 + len(begin)] = begin
        self._broadcast(first)
        length = int(first[:8].view(np.int64)[0])
        if length <= _FIRST_BYTES - 8:
            return first[8 : 8 + length].tobytes()
        rest = np.zeros(length, np.uint8)
        if data is not None:
            rest[:] = np.frombuffer(data, np.uint8)
        self._broadcast(rest)
        return rest.tobytes()

    def _broadcast(self, values: Bytes) -> None:
        import torch

        try:
            self._dist.broadcast(torch.from_numpy(values), src=0)
        except RuntimeError as error:
            raise lost(error) from error

    def close(self) -> None:
        if self._dist.is_initialized():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._dist.destroy_process_group()


def connector(
    store: KeyStore,
    timeout_s: float,
    backend: str,
    transport: RankTransport,
    address: Callable[[], str],
) -> Callable[[int, int, int], Group]:
    """Return what connects this rank to the group of an epoch: see `RankMember`.

    backend: of torch.distributed. address: returns that of this machine among the ranks', or raises OSError.
    """

    def connect(epoch: int, place: int, size: int) -> Group:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        if size == 1:
            return LoneGroup()
        prefixed = PrefixStore(f"group {epoch}", store)  # type: ignore[arg-type]
        prefixed.set_timeout(timedelta(seconds=timeout_s))
        if transport == "auto" and are_on_one_machine(prefixed, place, size):
            return LocalGroup(prefixed, place, size, timeout_s)
        group = TorchGroup(prefixed, place, size, timeout_s, backend)
        return group if transport == "torch" else with_sockets(group, prefixed, timeout_s, address)

    return connect


class LoneGroup:
    """A `Group` of one rank: what it sends itself."""

    def __init__(self) -> None:
        self.place, self.size = 0, 1
        self.way = "with nobody"

    def exchange_sizes(self, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        return sizes.copy()

    def exchange(
        self,
        send: Bytes,
        sent: Sequence[int],
        receive: Bytes,
        received: Sequence[int],
        *,
        is_small: bool = False,
    ) -> None:
        receive[: received[0]] = send[: sent[0]]

    def broadcast(self, data: bytes | None) -> bytes:
        assert data is not None, "the only rank is rank 0"
        return data

    def close(self) -> None:
        pass

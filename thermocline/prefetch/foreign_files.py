"""Finds a model's files that this process may read, and neither owns nor may write to: a system's, or another user's.

Of their pages the kernel tells nothing (mincore(2) says that all are in memory) and lets nobody let go (MADV_PAGEOUT does
nothing, and says nothing), as both would show what others read. Keeps descriptors, with which both go another way.
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile


class ForeignFiles:
    """Those of a model's files that belong to others. Whose they are is looked up once."""

    def __init__(self, file: ModelFile) -> None:
        self._file = file
        self._paths = {info.shard: info.path for info in file.tensors.values()}
        self._foreign = {shard for shard, path in self._paths.items() if not _is_ours(path)}
        self._descriptors: dict[int, int] = {}

    def __contains__(self, shard: int) -> bool:
        """Whether file number `shard` is one."""
        return shard in self._foreign

    def descriptor(self, shard: int) -> int:
        """Return a descriptor of a file of any owner, which closes with this object; reading through it reads no neighbours.

        Raises OSError, also where the path means another file by now.
        """
        if shard not in self._descriptors:
            found = os.open(self._paths[shard], os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                if (replaced := self._file.find_replaced()) is not None:
                    raise FileNotFoundError(f"{replaced} is another file by now")
                os.posix_fadvise(found, 0, 0, os.POSIX_FADV_RANDOM)
            except OSError:
                os.close(found)
                raise
            weakref.finalize(self, os.close, found).atexit = False
            self._descriptors[shard] = found
        return self._descriptors[shard]


def _is_ours(path: str) -> bool:
    try:
        is_own = os.stat(path).st_uid == os.geteuid()  # noqa: PTH116 - kept as given
    except OSError:
        return False
    return is_own or os.access(path, os.W_OK, effective_ids=True)

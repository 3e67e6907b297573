"""Writes embeddings as JSON off the event loop. Knows no interface's field."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

import msgspec

from thermocline.workers.offload import BULK_CHARS

if TYPE_CHECKING:
    from thermocline.messages import FloatArray
    from thermocline.workers.offload import Offload, StillWanted


async def vectors_as_json(
    vectors: FloatArray, offload: Offload, *, packed: bool = False
) -> list[msgspec.Raw]:
    """Return each of `vectors` [n, D] as a list of numbers; packed: as little-endian float32 in base64.

    They are written one by one in a thread of `offload`. A call may hold 2048 of them, which takes seconds, and a piece of some
    microseconds at a time keeps nobody from Python.
    """
    write = _packed if packed else _numbers

    def written(still_wanted: StillWanted) -> list[msgspec.Raw]:
        rows = []
        for row in vectors:
            still_wanted()
            rows.append(msgspec.Raw(write(row)))
        return rows

    return await offload.run(written, is_bulk=vectors.size > BULK_CHARS)


def _numbers(vector: FloatArray) -> bytes:
    return msgspec.json.encode(vector.tolist())


def _packed(vector: FloatArray) -> bytes:
    return msgspec.json.encode(base64.b64encode(vector.astype("<f4").tobytes()).decode())

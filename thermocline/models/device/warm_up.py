"""Compiles what a device needs and captures its decode steps when an engine opens, so that no request waits for either.

Runs tokens that no request has through every layer: as many as a kernel's tile can have, and every size of a batch.
What fails is logged, and requests go on without it.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from thermocline.errors import DeviceFaultError
from thermocline.messages import LayerIndex, SegmentKind
from thermocline.models.device.rows import padded
from thermocline.models.device.spare_chunk import spare_chunk

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from thermocline.kernels.gpu.resident import ResidentExperts
    from thermocline.messages import Chunk
    from thermocline.models.device.non_expert import DeviceNonExpert

_LOG: Final = logging.getLogger("thermocline.devices")
# Most drafts that pay are no longer. Longer ones are captured when they come again.
_DRAFTED_ROWS: Final = 8
# One prompt for each size of a tile of products, and one token, whose attention is that of decoding.
_PROMPT_TOKENS: Final = (1, 16, 32, 64)


def warm_up(
    device: DeviceNonExpert,
    max_requests: int,
    held: Callable[[], AbstractContextManager[ResidentExperts]] | None,
    *,
    drafts: bool = False,
) -> str:
    """Compute each shape of a step, decode steps of up to `max_requests` tokens twice: then they are captured.

    drafts: so are those of one answer with some drafted tokens.
    Returns what was done, which is logged too.
    held: holds all experts in place where the device computes all layers at once, else None. No other thread may
    compute on the device meanwhile. Raises DeviceFaultError for a device that does not work any more.
    """
    start_s, failed = time.monotonic(), 0
    shapes = [(SegmentKind.PROMPT, tokens, 1) for tokens in _PROMPT_TOKENS]
    # The largest first: smaller ones fit into the memory that it leaves to them.
    sizes = _sizes(max_requests)
    shapes += [(SegmentKind.DECODE, rows, 2) for rows in sizes]
    chunks = [(_chunk(device, number, *shape[:2]), shape[2]) for number, shape in enumerate(shapes)]
    if drafts:
        known = {} if device.is_recurrent else {*sizes}
        for rows in _sizes(min(_DRAFTED_ROWS, device.context_tokens)):
            if rows > 1 and rows not in known:
                chunks.append((_drafted(device, len(chunks), rows), 2))
    for chunk, turns in chunks:
        tokens = chunk.num_tokens
        job = partial(_all_layers, device, chunk, held) if held else partial(_layers, device, chunk)
        try:
            for _ in range(turns):
                job()
                if device.part.has_head:
                    device.head(_rows(device, tokens), prompt=chunk.is_prompt)
        except DeviceFaultError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, requests that need it fail by themselves
            failed += 1
            _LOG.warning(
                "a %s of %d tokens could not be computed when the engine opened (%s: %s)",
                *("prompt" if chunk.is_prompt else "decode step", tokens),
                *(type(error).__name__, error),
            )
    done = (
        f"before the first request: decode steps of up to {sizes[0]} tokens are {device.num_captured} captured graphs, "
        f"kernels are compiled ({time.monotonic() - start_s:.1f} s)"
    )
    if failed:
        done += f"; {failed} of {len(chunks)} shapes failed"
    _LOG.info("%s", done)
    return done


def _sizes(most: int) -> list[int]:
    """Return the powers of two up to the rows of so many tokens, the largest first."""
    return [1 << power for power in reversed(range(padded(most).bit_length()))]


def _drafted(device: DeviceNonExpert, number: int, rows: int) -> Chunk:
    """Return a step of one answer with drafted tokens."""
    positions = np.arange(rows, dtype=np.int32)
    return spare_chunk(
        *(number, SegmentKind.DECODE, positions, device.spare, device.block_tokens),
        is_drafted=True,
    )


def _chunk(device: DeviceNonExpert, number: int, kind: SegmentKind, tokens: int) -> Chunk:
    """Return a prompt of so many tokens, or so many answers' first tokens; no longer than a context."""
    is_prompt = kind is SegmentKind.PROMPT
    length = min(tokens, device.context_tokens) if is_prompt else 1
    positions = np.arange(length, dtype=np.int32)
    places, block_tokens = device.spare, device.block_tokens
    num_sequences = 1 if is_prompt else tokens
    return spare_chunk(number, kind, positions, places, block_tokens, num_sequences=num_sequences)


def _rows(
    device: DeviceNonExpert, num_rows: int
) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    return np.ones((num_rows, device.spec.hidden_size), np.float32)


def _layers(device: DeviceNonExpert, chunk: Chunk) -> None:
    x = _rows(device, chunk.num_tokens)
    for layer in map(LayerIndex, device.part.layers):
        device.attend_and_route(layer, chunk, x)


def _all_layers(
    device: DeviceNonExpert,
    chunk: Chunk,
    held: Callable[[], AbstractContextManager[ResidentExperts]],
) -> None:
    with held() as experts:
        device.all_layers(chunk, _rows(device, chunk.num_tokens), experts)

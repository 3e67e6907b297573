"""Compares the non-expert weights on a device with the CPU's, on a few random tokens: prompts, decode steps, the head.

Contexts are short and long. Decode steps come three times: computed, captured and replayed. Nothing that a request may
have is written.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from thermocline.errors import DeviceFaultError
from thermocline.kernels.cache_format import CacheType
from thermocline.kernels.weight import Weight, WeightStack
from thermocline.kernels.whole_layer import AttentionWeights
from thermocline.messages import LayerIndex, SegmentKind
from thermocline.models.device.spare_chunk import spare_chunk
from thermocline.models.device.steps import SparePlaces
from thermocline.models.lone_sequence import lone_cache

if TYPE_CHECKING:
    from collections.abc import Iterator

    from thermocline.kernels.weight import FloatArray, IntArray
    from thermocline.models.contract import Model
    from thermocline.models.device.non_expert import DeviceNonExpert

_PROMPT_TOKENS: Final = 64
_LATER_TOKENS: Final = 4
_HEAD_TOKENS: Final = 4
_DECODE_STEPS: Final = 3
# A position so far behind the first that attention takes some tiles and splits of the context.
_FAR: Final = 300
# Mean square of the difference over that of the CPU's result. 1e-4 is usual: the two round differently.
_MAX_ERROR: Final = 1e-2
# Where the CPU's sequence lies.
_FIRST: Final = SparePlaces(0, 0, 0)


def check_non_expert(device: DeviceNonExpert, model: Model) -> None:
    """Compute a layer of each kind that is on the device, and the head, on both, before the first chunk.

    Raises DeviceFaultError where they differ.
    """
    kinds: dict[object, LayerIndex] = {}
    for number in device.part.layers:
        parts = model.non_expert.layers[number]
        window = parts.mixer.window if isinstance(parts.mixer, AttentionWeights) else None
        # Each format has device code of its own.
        formats = tuple(_formats(parts.mixer)), tuple(_formats(parts.shared))
        rules = (type(parts.mixer), window, parts.routed is None, formats)
        kinds.setdefault(rules, LayerIndex(number))
    rng = np.random.default_rng(0)
    cache = lone_cache(model.spec, 1, device.block_tokens, CacheType.F32)
    try:
        steps = _steps(device.block_tokens, device.context_tokens)
        for number, (kind, positions) in enumerate(steps):
            prompt = kind is SegmentKind.PROMPT
            what = f"a {kind} step"
            there, here = (
                spare_chunk(number, kind, positions, places, device.block_tokens)
                for places in (device.spare, _FIRST)
            )
            shape = (len(positions), model.spec.hidden_size)
            x = rng.standard_normal(shape).astype(np.float32)
            for layer in kinds.values():
                expected = model.route(layer, here, model.attend(layer, here, x, cache))
                found = device.attend_and_route(layer, there, x)
                where = f"layer {layer} of {what} at position {positions[0]}"
                _compare(where, found.residual, expected.residual, device)
                _compare(where, found.x, expected.x, device)
                if found.ending is not None and expected.ending is not None:
                    ours = found.ending.finish(expected.x)
                    _compare(where, ours, expected.ending.finish(expected.x), device)
            if device.part.has_head:
                last = x[-_HEAD_TOKENS:]
                head = device.head(last, prompt=prompt)
                _compare(f"the head of {what}", head, model.head(last, prompt=prompt), device)
    finally:
        device.forget()


def _formats(parts: object) -> Iterator[str]:
    """Yield the names of the formats of a part's matrices, in their order."""
    if isinstance(parts, Weight | WeightStack):
        yield parts.format.name
    elif is_dataclass(parts) and not isinstance(parts, type):
        for each in fields(parts):
            yield from _formats(getattr(parts, each.name))


def _steps(block_tokens: int, context_tokens: int) -> Iterator[tuple[SegmentKind, IntArray]]:
    """Yield the positions of a prompt, of one that goes on far behind it, and of decode steps.

    All lie in one block, so that a context of many blocks takes the room of one.
    """
    prompt_tokens = min(_PROMPT_TOKENS, block_tokens)
    yield SegmentKind.PROMPT, np.arange(prompt_tokens, dtype=np.int32)
    later = min(_LATER_TOKENS, block_tokens)
    far = max(min(_FAR, context_tokens - later - _DECODE_STEPS), 0)
    yield SegmentKind.PROMPT, np.arange(far, far + later, dtype=np.int32)
    # The first is computed, the second captured, the third replayed, which must not depend on the context's length.
    for position in (prompt_tokens, far + later, far + later + 1):
        yield SegmentKind.DECODE, np.array([min(position, context_tokens - 1)], np.int32)


def _compare(what: str, found: FloatArray, expected: FloatArray, device: DeviceNonExpert) -> None:
    error = float(np.square(found - expected).mean() / max(np.square(expected).mean(), 1e-30))
    if not error <= _MAX_ERROR:  # NaN, too
        raise DeviceFaultError(
            f"{what} comes out differently on {device} and on the CPU (relative mean square "
            f"{error:.2g}). Fix: another driver, torch or Triton, or --trunk-device cpu"
        )

"""Quantises float32 weights to GGUF block formats, and back; knows no files and no model.

The gguf package quantises the simple formats and can only *de*quantise the K formats, so that
Q4_K, Q5_K and Q6_K have their quantisers here: for each group of weights a search over grid steps,
each refitted by weighted least squares, as in any scalar quantiser. A weight counts the more the
larger it is (magnitude plus the group's root mean square).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    Floats = npt.NDArray[np.float32]
    Bytes = npt.NDArray[np.uint8]

SUPER_BLOCK = 256
LONG_ROW = 1 << 18  # elements per step of the gguf package, likewise
CHUNK_BLOCKS = 512  # super-blocks per step: the working set stays in a core's cache
F16_MAX = 65504.0
BF16_MAX = 3.3895313892515355e38
FLUSH_BELOW = 1e-20  # far below half of the smallest step that an f16 scale can express
LARGEST_INPUT = {
    "F32": np.inf,
    "F16": F16_MAX,
    "BF16": BF16_MAX,
    "Q8_0": F16_MAX * 127,
    "MXFP4": 2.0**120,
    "Q4_0": F16_MAX * 8,
    "Q4_K": F16_MAX * 63 * 8,
    "Q5_K": F16_MAX * 63 * 16,
    "Q6_K": F16_MAX * 127 * 31,
}


def quantize(x: Floats, format_name: str) -> Bytes:
    """Return rows of `x` [..., n] as blocks of `format_name`: uint8 [..., row_bytes].

    Values beyond the format's range saturate. ValueError for an unknown format, a row length that
    the block does not divide, or a weight that is not finite.
    """
    if format_name not in LARGEST_INPUT:
        raise ValueError(f"no quantiser for {format_name!r}: choose one of {sorted(LARGEST_INPUT)}")
    rows = np.ascontiguousarray(x, dtype=np.float32)
    elements, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[format_name]]
    if rows.ndim == 0 or rows.shape[-1] % elements:
        raise ValueError(
            f"shape {rows.shape} does not fit {format_name}: rows must be multiples of {elements}"
        )
    if not np.isfinite(rows).all():
        raise ValueError("weights must be finite: find the NaN or infinity before quantising")
    limit = LARGEST_INPUT[format_name]
    if rows.size and np.abs(rows).max() > limit:
        rows = np.clip(rows, -limit, limit).astype(np.float32)
    if format_name in _K_QUANTIZERS:
        return _by_super_blocks(rows, _K_QUANTIZERS[format_name])
    if format_name not in ("F32", "F16", "BF16"):
        rows = np.where(np.abs(rows) < FLUSH_BELOW, np.float32(0), rows)
    kind = gguf.GGMLQuantizationType[format_name]
    if format_name in ("F32", "F16"):
        return np.ascontiguousarray(gguf.quants.quantize(rows, kind)).view(np.uint8)
    return _as_long_rows(gguf.quants.quantize, rows, kind).view(np.uint8)


def dequantize(raw: Bytes, format_name: str) -> Floats:
    """Return blocks `raw` (uint8 [..., row_bytes]) of `format_name` as float32 [..., n]."""
    blocks = np.ascontiguousarray(raw)
    values: Floats = _as_long_rows(
        gguf.quants.dequantize, blocks, gguf.GGMLQuantizationType[format_name]
    )
    return values


def _as_long_rows(
    convert: Callable[..., npt.NDArray[Any]], rows: npt.NDArray[Any], kind: object
) -> npt.NDArray[Any]:
    """Return `convert(rows, kind)` for rows [..., n].

    Blocks know nothing of rows, and the gguf package takes sixteen rows at a time: as long rows they take a tenth.
    """
    flat = rows.reshape(-1, rows.shape[-1])
    parts = [
        convert(flat[start : start + step].reshape(1, -1), kind)
        for step in [max(1, LONG_ROW // max(1, flat.shape[1]))]
        for start in range(0, max(1, len(flat)), step)
    ]
    return np.concatenate(parts, axis=1).reshape(*rows.shape[:-1], -1 if rows.size else 0)


def _by_super_blocks(rows: Floats, quantizer: Callable[[Floats], Bytes]) -> Bytes:
    """Run `quantizer` ([blocks, 256] -> [blocks, block_bytes]) over all of `rows`, chunk by chunk."""
    blocks = rows.reshape(-1, SUPER_BLOCK)
    parts = [
        quantizer(blocks[start : start + CHUNK_BLOCKS])
        for start in range(0, max(1, len(blocks)), CHUNK_BLOCKS)
    ]
    return np.concatenate(parts).reshape(*rows.shape[:-1], -1 if rows.size else 0)


def _unit_groups(blocks: Floats, group: int) -> tuple[Floats, Floats, Floats]:
    """Cut blocks [b, 256] to groups scaled to magnitude 1.

    Return (x [b, groups, group], peak [b, groups, 1], weights like x); the weights are positive.
    """
    x = blocks.reshape(len(blocks), -1, group)
    peak = np.abs(x).max(axis=-1, keepdims=True)
    peak = np.where(peak < FLUSH_BELOW, np.float32(0), peak)
    unit = np.divide(x, peak, out=np.zeros_like(x), where=peak > 0)
    weights = np.abs(unit) + np.sqrt(np.mean(unit * unit, axis=-1, keepdims=True))
    return unit, peak, np.where(peak > 0, weights, np.float32(1)).astype(np.float32)


def _dot(a: Floats, b: Floats) -> Floats:
    sums: Floats = np.einsum("bgi,bgi->bg", a, b)
    return sums[..., None]


def _safe_divide(numerator: Floats, denominator: Floats) -> Floats:
    return np.divide(
        numerator, denominator, out=np.zeros_like(numerator), where=np.abs(denominator) > 1e-9
    )


def _fit_with_minimum(
    x: Floats, weights: Floats, levels: int, steps: npt.NDArray[np.float32]
) -> tuple[Floats, Floats]:
    """Find scale >= 0 and minimum <= 0 such that scale * q + minimum is near x, q in 0..levels.

    `steps` are the offsets to `levels` that are tried as the range's number of steps.
    Return both as [b, groups, 1].
    """
    low = np.minimum(x.min(axis=-1, keepdims=True), 0)
    span = x.max(axis=-1, keepdims=True) - low
    sum_w, wx = weights.sum(axis=-1, keepdims=True), weights * x
    sum_x = wx.sum(axis=-1, keepdims=True)
    best_scale, best_low = span / levels, low
    best_error = np.full_like(low, np.inf)
    shifted = _safe_divide(x - low, np.broadcast_to(span, x.shape))
    for step in steps:
        q = np.clip(np.rint(shifted * np.float32(levels + step)), 0, levels)
        wq = weights * q
        sum_q, sum_qq, sum_xq = wq.sum(axis=-1, keepdims=True), _dot(wq, q), _dot(wx, q)
        determinant = sum_w * sum_qq - sum_q * sum_q
        scale = _safe_divide(sum_w * sum_xq - sum_x * sum_q, determinant)
        minimum = _safe_divide(sum_qq * sum_x - sum_q * sum_xq, determinant)
        no_minimum = minimum > 0
        scale = np.where(no_minimum, _safe_divide(sum_xq, sum_qq), scale)
        minimum = np.where(no_minimum, np.float32(0), minimum)
        miss = q * scale + minimum - x
        error = _dot(weights * miss, miss)
        better = (error < best_error) & (scale > 0)
        best_error = np.where(better, error, best_error)
        best_scale = np.where(better, scale, best_scale)
        best_low = np.where(better, minimum, best_low)
    return best_scale, best_low


def _fit_symmetric(x: Floats, weights: Floats, levels: int, steps: Floats) -> Floats:
    """Find the signed scale [b, groups, 1] with scale * q near x, q in -levels..levels-1.

    The value of largest magnitude gets the negative end of the grid, which reaches one further.
    """
    at = np.abs(x).argmax(axis=-1, keepdims=True)
    extreme = np.take_along_axis(x, at, axis=-1)
    wx = weights * x
    best_scale, best_gain = np.zeros_like(extreme), np.zeros_like(extreme)
    direction = np.sign(extreme)
    for step in steps:
        q = np.clip(np.rint(x * (-direction * np.float32(levels + step))), -levels, levels - 1)
        sum_xq, sum_qq = _dot(wx, q), _dot(weights * q, q)
        scale = _safe_divide(sum_xq, sum_qq)
        gain = scale * sum_xq
        better = gain > best_gain
        best_gain = np.where(better, gain, best_gain)
        best_scale = np.where(better, scale, best_scale)
    return best_scale


def _half(values: Floats) -> npt.NDArray[np.float16]:
    """Round to f16, saturating."""
    return np.clip(values, -F16_MAX, F16_MAX).astype(np.float16)


def _to_six_bits(values: Floats) -> tuple[npt.NDArray[np.float16], Bytes]:
    """Split non-negative `values` [b, 8] into an f16 step [b, 1] and 6-bit multiples [b, 8]."""
    step = _half(values.max(axis=-1, keepdims=True) / np.float32(63))
    multiples = np.rint(_safe_ratio(values, step.astype(np.float32)))
    return step, np.clip(multiples, 0, 63).astype(np.uint8)


def _safe_ratio(numerator: Floats, denominator: Floats) -> Floats:
    """Divide, with 0 where the denominator is 0; f16 steps are never below 5e-8."""
    full = np.broadcast_to(denominator, numerator.shape)
    return np.divide(numerator, full, out=np.zeros_like(numerator), where=full != 0)


def _pack_six_bits(scales: Bytes, minimums: Bytes) -> Bytes:
    """Pack eight 6-bit scales and eight 6-bit minimums [b, 8] each into 12 bytes [b, 12]."""
    scale_head, scale_tail = scales[:, :4], scales[:, 4:]
    min_head, min_tail = minimums[:, :4], minimums[:, 4:]
    return np.concatenate(
        [
            scale_head | ((scale_tail >> 4) << 6),
            min_head | ((min_tail >> 4) << 6),
            (scale_tail & 15) | ((min_tail & 15) << 4),
        ],
        axis=-1,
    )


def _quantize_with_minimum(
    blocks: Floats, levels: int, steps: Floats
) -> tuple[list[Bytes], npt.NDArray[np.uint8]]:
    """Quantise [b, 256] to d, dmin, packed scales (the list) and the levels q [b, 8, 32]."""
    x, peak, weights = _unit_groups(blocks, 32)
    scale, minimum = _fit_with_minimum(x, weights, levels, steps)
    step, multiples = _to_six_bits((scale * peak)[..., 0])
    min_step, min_multiples = _to_six_bits((-minimum * peak)[..., 0])
    final_scale = (step.astype(np.float32) * multiples)[..., None]
    final_minimum = (min_step.astype(np.float32) * min_multiples)[..., None]
    values = blocks.reshape(len(blocks), 8, 32) + final_minimum
    q = np.clip(np.rint(_safe_ratio(values, final_scale)), 0, levels).astype(np.uint8)
    header = [
        step.view(np.uint8),
        min_step.view(np.uint8),
        _pack_six_bits(multiples, min_multiples),
    ]
    return header, q


def _nibbles(q: Bytes) -> Bytes:
    """Pack low 4 bits of q [b, 8, 32] to [b, 128]: even groups low, odd groups high."""
    low = q & np.uint8(15)
    return (low[:, 0::2] | (low[:, 1::2] << np.uint8(4))).reshape(len(q), -1)


def _quantize_q4_k(blocks: Floats) -> Bytes:
    header, q = _quantize_with_minimum(blocks, 15, np.linspace(-1, 1, 17, dtype=np.float32))
    return np.concatenate([*header, _nibbles(q)], axis=-1)


def _quantize_q5_k(blocks: Floats) -> Bytes:
    header, q = _quantize_with_minimum(blocks, 31, np.linspace(-1, 1, 17, dtype=np.float32))
    bits = (q >> 4) << np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    high = np.bitwise_or.reduce(bits, axis=1)
    return np.concatenate([*header, high, _nibbles(q)], axis=-1)


def _quantize_q6_k(blocks: Floats) -> Bytes:
    x, peak, weights = _unit_groups(blocks, 16)
    scales = (_fit_symmetric(x, weights, 32, np.linspace(-1, 1, 17, dtype=np.float32)) * peak)[
        ..., 0
    ]
    at = np.abs(scales).argmax(axis=-1, keepdims=True)
    step = _half(np.take_along_axis(scales, at, axis=-1) / np.float32(-128))
    multiples = np.clip(np.rint(_safe_ratio(scales, step.astype(np.float32))), -128, 127)
    final_scale = (step.astype(np.float32) * multiples)[..., None]
    values = blocks.reshape(len(blocks), 16, 16)
    q = np.clip(np.rint(_safe_ratio(values, final_scale)), -32, 31).astype(np.int8) + np.int8(32)
    halves = q.view(np.uint8).reshape(len(blocks), 2, 4, 32)
    low = (halves[:, :, :2] & 15) | ((halves[:, :, 2:] & 15) << 4)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1)
    high = np.bitwise_or.reduce((halves >> 4) << shifts, axis=2)
    return np.concatenate(
        [
            low.reshape(len(blocks), -1),
            high.reshape(len(blocks), -1),
            multiples.astype(np.int8).view(np.uint8),
            step.view(np.uint8),
        ],
        axis=-1,
    )


_K_QUANTIZERS: dict[str, Callable[[Floats], Bytes]] = {
    "Q4_K": _quantize_q4_k,
    "Q5_K": _quantize_q5_k,
    "Q6_K": _quantize_q6_k,
}

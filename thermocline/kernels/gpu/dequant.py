"""The torch twin of every block format: raw blocks to float32 rows, on any device. Owns no memory.

Formats with a codebook are in `dequant_codebooks`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from thermocline.kernels.gpu.dequant_codebooks import CODEBOOK_DECODERS
from thermocline.kernels.gpu.device_codebooks import IQ4_LEVELS, device_codebook

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from thermocline.modelfile.formats import BlockFormat


def naive_dequantize(raw: Tensor, block_format: BlockFormat) -> Tensor:
    """Return float32 [..., cols] of uint8 [..., bytes of a row], in plain torch, on any device."""
    blocks = raw.reshape(-1, block_format.block_bytes)
    decoder = _DECODERS.get(block_format.name)
    if decoder is not None:
        decoded = decoder(blocks)
    else:
        codebook = device_codebook(block_format.name, raw.device)
        assert codebook is not None, f"{block_format.name} is no format of the device"
        decoded = CODEBOOK_DECODERS[block_format.name](blocks, codebook)
    return decoded.reshape(*raw.shape[:-1], -1)


def _view(blocks: Tensor, start: int, end: int, dtype: torch.dtype = torch.float16) -> Tensor:
    """Return bytes start..end of each block [n, block_bytes] as float32 [n, numbers of `dtype`]."""
    return blocks[:, start:end].contiguous().view(dtype).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Return [n, groups, 2, bytes] of [n, groups, bytes]: the low halves, then the high ones."""
    return torch.stack((packed & 15, packed >> 4), 2)


def _plain(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda blocks: blocks.contiguous().view(dtype).float()


def _q8_0(blocks: Tensor) -> Tensor:
    return _view(blocks, 0, 2) * _view(blocks, 2, 34, torch.int8)


def _q4_0(blocks: Tensor) -> Tensor:
    q = _nibbles(blocks[:, None, 2:]).reshape(-1, 32)
    return _view(blocks, 0, 2) * (q.float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    q = _nibbles(blocks[:, None, 4:]).reshape(-1, 32)
    return _view(blocks, 0, 2) * q.float() + _view(blocks, 2, 4)


def _five_bits(packed: Tensor) -> Tensor:
    """Return float32 [n, 32] of uint8 [n, 20]: the fifth bits, then the low ones."""
    bit = torch.arange(8, dtype=torch.uint8, device=packed.device)
    fifth = (packed[:, :4, None] >> bit & 1).reshape(-1, 32)
    return (_nibbles(packed[:, None, 4:]).reshape(-1, 32) | fifth << 4).float()


def _q5_0(blocks: Tensor) -> Tensor:
    return _view(blocks, 0, 2) * (_five_bits(blocks[:, 2:]) - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    return _view(blocks, 0, 2) * _five_bits(blocks[:, 4:]) + _view(blocks, 2, 4)


def _two_bits(packed: Tensor) -> Tensor:
    """Return uint8 [n, 16, 16] of uint8 [n, 64]: for each half the lowest two bits, then the next."""
    shift = torch.arange(0, 8, 2, dtype=torch.uint8, device=packed.device)[:, None]
    return (packed.reshape(-1, 2, 1, 32) >> shift & 3).reshape(-1, 16, 16)


def _q2_k(blocks: Tensor) -> Tensor:
    scales = _view(blocks, 80, 82) * (blocks[:, :16] & 15).float()
    minimums = _view(blocks, 82, 84) * (blocks[:, :16] >> 4).float()
    return _two_bits(blocks[:, 16:80]).float() * scales[:, :, None] - minimums[:, :, None]


def _q3_k(blocks: Tensor) -> Tensor:
    bit = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    third = (blocks[:, None, :32] >> bit & 1).reshape(-1, 16, 16)
    q = (_two_bits(blocks[:, 32:96]) | third << 2).float() - 4
    four = torch.cat((blocks[:, 96:104] & 15, blocks[:, 96:104] >> 4), 1)
    two = (blocks[:, None, 104:108] >> bit[:4] * 2 & 3).reshape(-1, 16)
    scales = _view(blocks, 108, 110) * ((four | two << 4).float() - 32)
    return scales[:, :, None] * q


def _tq1_0(blocks: Tensor) -> Tensor:
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.int32, device=blocks.device)[:, None]
    parts = ((0, 32, 5), (32, 48, 5), (48, 52, 4))
    tops = [
        (blocks[:, None, start:end].int() * powers[:digits] & 255).reshape(len(blocks), -1)
        for start, end, digits in parts
    ]
    return _view(blocks, 52, 54) * ((torch.cat(tops, 1) * 3 >> 8).float() - 1)


def _tq2_0(blocks: Tensor) -> Tensor:
    return _view(blocks, 64, 66) * (_two_bits(blocks[:, :64]).reshape(-1, 256).float() - 1)


def _six_bit_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and minimums, float32 [n, 8, 1] each, of uint8 [n, 12]."""
    scale, minimum, rest = packed.view(-1, 3, 4).unbind(1)
    scales = torch.cat((scale & 63, (rest & 15) | (scale >> 6 << 4)), 1)
    minimums = torch.cat((minimum & 63, (rest >> 4) | (minimum >> 6 << 4)), 1)
    return scales.float()[:, :, None], minimums.float()[:, :, None]


def _two_level(blocks: Tensor) -> Tensor:
    """Q4_K, and with the fifth bits between scales and low bits Q5_K."""
    scales, minimums = _six_bit_scales(blocks[:, 4:16].contiguous())
    q = _nibbles(blocks[:, -128:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    if blocks.shape[1] == 176:
        bit = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
        q = q | ((blocks[:, None, 16:48] >> bit & 1) << 4)
    d, minimum = _view(blocks, 0, 2)[:, :, None], _view(blocks, 2, 4)[:, :, None]
    return d * scales * q.float() - minimum * minimums


def _q6_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shift = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    top = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shift & 3
    q = (low | top << 4).reshape(-1, 16, 16).float() - 32
    scales = _view(blocks, 192, 208, torch.int8)[:, :, None]
    return _view(blocks, 208, 210)[:, :, None] * scales * q


def _levels(packed: Tensor, levels: tuple[int, ...]) -> Tensor:
    """Return float32 [n, groups, 2 * bytes]: the level of each half byte of [n, groups, bytes]."""
    table = torch.tensor(levels, dtype=torch.float32, device=packed.device)
    return table[_nibbles(packed).long()].flatten(2)


def _iq4_xs(blocks: Tensor) -> Tensor:
    group = torch.arange(8, device=blocks.device)
    four = blocks[:, 4:8].repeat_interleave(2, 1).int() >> (group % 2 * 4) & 15
    top = blocks[:, 2:3].int() | blocks[:, 3:4].int() << 8
    scales = (four | (top >> (group * 2) & 3) << 4).float() - 32
    levels = _levels(blocks[:, 8:].reshape(-1, 8, 16), IQ4_LEVELS)
    return (_view(blocks, 0, 2) * scales)[:, :, None] * levels


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _view(blocks, 0, 2) * _levels(blocks[:, None, 2:], IQ4_LEVELS)[:, 0]


def _mxfp4(blocks: Tensor) -> Tensor:
    scale = torch.exp2(blocks[:, :1].double() - 128).float()
    return scale * _levels(blocks[:, None, 1:], _MXFP4_LEVELS)[:, 0]


def _nvfp4(blocks: Tensor) -> Tensor:
    bits = blocks[:, :4].int()
    exponent, mantissa = bits >> 3 & 15, (bits & 7).float()
    normal = (mantissa + 8) * torch.exp2(exponent.double() - 11).float()
    scales = torch.where(exponent == 0, mantissa * 2.0**-10, normal)
    scales = torch.where(bits == 127, 0.0, scales)
    return scales[:, :, None] * _levels(blocks[:, 4:].reshape(-1, 4, 8), _MXFP4_LEVELS)


_MXFP4_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_DECODERS = {
    "F32": _plain(torch.float32),
    "F16": _plain(torch.float16),
    "BF16": _plain(torch.bfloat16),
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _two_level,
    "Q5_K": _two_level,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
}

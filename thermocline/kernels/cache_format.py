"""How the key-value cache lies in memory: types, shapes, and NumPy's way in and out of the bytes.

One layer has an array of keys and one of values, each uint8 [blocks, kv_heads, bytes of a head's block]. A value may
have other than a key's numbers.
Values lie row after row, one row per token. Keys lie in groups of sixteen tokens (the last group of a
block may be narrower), dimension by dimension: number (d, token) of a group of w tokens is number
d * w + token. In Q8_0 each 32 dimensions of a group are w halves, then 32 * w bytes.

A latent cache has keys row after row, and a token's value is the first numbers of its key: its array of values is empty.
A layer with an indexer has a third array, uint8 [blocks, bytes of a block], of what that compares queries with, row after
row (`write_index`). Knows no request and no pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from thermocline.kernels.weight import ByteArray, FloatArray, IntArray

_GROUP_TOKENS = 16
_QUANT_BLOCK = 32  # numbers that share a unit in Q8_0
_QUANT_BYTES = 34  # a half and 32 bytes
_MAX_HALF = np.float32(65504)


class CacheType(IntEnum):
    """What a cached number is. The values are ggml's type ids, which the compiled core knows."""

    F32 = 0
    F16 = 1
    Q8_0 = 8
    BF16 = 30

    def row_bytes(self, head_dim: int) -> int:
        """Return the bytes of one head's numbers of one token. Q8_0 needs a head_dim that 32 divides."""
        if self is CacheType.Q8_0:
            assert head_dim % _QUANT_BLOCK == 0, f"head_dim {head_dim} is no multiple of 32"
            return head_dim // _QUANT_BLOCK * _QUANT_BYTES
        return self.number_bytes(head_dim)

    def number_bytes(self, head_dim: int) -> int:
        """Return those of `row_bytes` that are no units."""
        if self is CacheType.Q8_0:
            return head_dim
        return head_dim * (4 if self is CacheType.F32 else 2)


MAX_HEAD_DIM: Final = 1152
"""The most numbers of a row that kernels take."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """What one layer keeps of a token: keys of so many heads, and values. Layers of one model may differ."""

    kv_heads: int
    head_dim: int
    latent: int = 0
    """See `CacheShape`."""
    own_value_dim: int = 0
    """See `CacheShape`."""
    index: int = 0
    """See `CacheShape`."""

    @property
    def value_dim(self) -> int:
        """Numbers of a value."""
        return self.latent or self.own_value_dim or self.head_dim

    @property
    def stored_dims(self) -> tuple[int, ...]:
        """Numbers of each row that is kept: of a head's key, of its value unless that is part of the key, of an indexer."""
        index = (self.index,) if self.index else ()
        return (*self._head_dims, *index)

    def token_bytes(self, cache_type: CacheType) -> int:
        """Return the bytes of one token's keys and values, and of its row for an indexer."""
        of_heads = self.kv_heads * sum(map(cache_type.row_bytes, self._head_dims))
        return of_heads + (cache_type.row_bytes(self.index) if self.index else 0)

    @property
    def _head_dims(self) -> tuple[int, ...]:
        return (self.head_dim,) if self.latent else (self.head_dim, self.value_dim)


def fitting_type(cache_type: CacheType, shapes: Iterable[HeadShape]) -> CacheType:
    """Return a cache's type for heads of these shapes: F16 in place of Q8_0 where that does not fit."""
    fits = all(dim % _QUANT_BLOCK == 0 for shape in shapes for dim in shape.stored_dims)
    return CacheType.F16 if cache_type is CacheType.Q8_0 and not fits else cache_type


@dataclass(frozen=True, slots=True)
class CacheShape:
    """One layer's cache: type and sizes."""

    type: CacheType
    num_blocks: int
    block_tokens: int
    kv_heads: int
    head_dim: int
    latent: int = 0
    """How many first numbers of a key are the value, in a latent cache; 0 in others."""
    own_value_dim: int = 0
    """Numbers of a value, where they are not as many as those of a key; 0 where they are."""
    index: int = 0
    """Numbers of a token's row for an indexer; 0 without one."""

    @classmethod
    def of(
        cls, cache_type: CacheType, num_blocks: int, block_tokens: int, heads: HeadShape
    ) -> CacheShape:
        """Return the shape of a cache of such heads."""
        sizes = heads.kv_heads, heads.head_dim, heads.latent, heads.own_value_dim, heads.index
        return cls(cache_type, num_blocks, block_tokens, *sizes)

    @property
    def heads(self) -> HeadShape:
        """What it keeps of a token."""
        return HeadShape(self.kv_heads, self.head_dim, self.latent, self.own_value_dim, self.index)

    @property
    def value_dim(self) -> int:
        """Numbers of a value."""
        return self.heads.value_dim

    @property
    def row_bytes(self) -> int:
        """Bytes of one head's key of one token."""
        return self.type.row_bytes(self.head_dim)

    @property
    def value_row_bytes(self) -> int:
        """Bytes of one head's value of one token, 0 in a latent cache."""
        return 0 if self.latent else self.type.row_bytes(self.value_dim)

    @property
    def index_row_bytes(self) -> int:
        """Bytes of one token's row for an indexer."""
        return self.type.row_bytes(self.index) if self.index else 0

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values, and of its row for an indexer."""
        return self.heads.token_bytes(self.type)

    @property
    def array_shape(self) -> tuple[int, int, int]:
        """Shape of a layer's keys, as bytes."""
        return (self.num_blocks, self.kv_heads, self.block_tokens * self.row_bytes)

    @property
    def value_shape(self) -> tuple[int, int, int]:
        """Shape of its values."""
        return (*self.array_shape[:2], self.block_tokens * self.value_row_bytes)

    @property
    def index_shape(self) -> tuple[int, int]:
        """Shape of its rows for an indexer."""
        return (self.num_blocks, self.block_tokens * self.index_row_bytes)


def write_cache(
    shape: CacheShape,
    keys: ByteArray,
    values: ByteArray,
    slots: IntArray,
    k: FloatArray,
    v: FloatArray,
) -> None:
    """Store k [tokens, kv_heads, head_dim] and v [tokens, kv_heads, value_dim] in `slots` [tokens]."""
    blocks, places = np.divmod(slots, shape.block_tokens)
    rows = _value_rows(shape, values)
    rows[blocks, :, places] = _pack(shape.type, v)
    packed = _pack(shape.type, k)
    for group, first, width in _groups(shape, keys):
        mine = (places >= first) & (places < first + width)
        lanes = _spread(shape, group, width)
        lanes[blocks[mine], :, places[mine] - first] = packed[mine]


def read_cache(
    shape: CacheShape, keys: ByteArray, values: ByteArray, slots: IntArray
) -> tuple[FloatArray, FloatArray]:
    """Return the keys in `slots`, float32 [slots, kv_heads, head_dim], and values [slots, kv_heads, value_dim]."""
    blocks, places = np.divmod(slots, shape.block_tokens)
    rows = _value_rows(shape, values)
    packed = np.empty((len(slots), shape.kv_heads, shape.row_bytes), np.uint8)
    for group, first, width in _groups(shape, keys):
        mine = (places >= first) & (places < first + width)
        packed[mine] = _spread(shape, group, width)[blocks[mine], :, places[mine] - first]
    return _unpack(shape.type, packed), _unpack(shape.type, rows[blocks, :, places])


def copy_cache(
    shape: CacheShape,
    keys: ByteArray,
    values: ByteArray,
    slots: IntArray,
    index: ByteArray | None = None,
) -> None:
    """Copy what is kept of some tokens, bit for bit. slots: int32 [n, 2], from where to where."""
    (blocks, to_blocks), (places, to_places) = np.divmod(slots.T, shape.block_tokens)
    if index is not None:
        of_index = _index_rows(shape, index)
        of_index[to_blocks, to_places] = of_index[blocks, places]
    rows = _value_rows(shape, values)
    rows[to_blocks, :, to_places] = rows[blocks, :, places]
    if shape.latent:
        lines = _latent_rows(shape, keys)
        lines[to_blocks, to_places] = lines[blocks, places]
        return
    if shape.type is CacheType.Q8_0:
        _copy_quantised(shape, keys, slots)
        return
    lanes = [(_lanes(shape, part, width), at, width) for part, at, width in _groups(shape, keys)]
    picked = [
        (group[blocks[mine], :, :, places[mine] - first], mine)
        for group, first, width in lanes
        if (mine := (places >= first) & (places < first + width)).any()
    ]
    for source, mine in picked:
        for group, first, width in lanes:
            there = (to_places[mine] >= first) & (to_places[mine] < first + width)
            group[to_blocks[mine][there], :, :, to_places[mine][there] - first] = source[there]


def _copy_quantised(shape: CacheShape, keys: ByteArray, slots: IntArray) -> None:
    """Copy keys in Q8_0, whose units and numbers lie apart."""
    (blocks, to_blocks), (places, to_places) = np.divmod(slots.T, shape.block_tokens)
    packed = np.empty((len(slots), shape.kv_heads, shape.row_bytes), np.uint8)
    groups = [(_spread(shape, part, width), at, width) for part, at, width in _groups(shape, keys)]
    for lanes, first, width in groups:
        mine = (places >= first) & (places < first + width)
        packed[mine] = lanes[blocks[mine], :, places[mine] - first]
    for lanes, first, width in groups:
        mine = (to_places >= first) & (to_places < first + width)
        lanes[to_blocks[mine], :, to_places[mine] - first] = packed[mine]


def take_cached(
    shape: CacheShape,
    keys: ByteArray,
    values: ByteArray,
    slots: IntArray,
    index: ByteArray | None = None,
) -> ByteArray:
    """Return what is kept in `slots`, bit for bit: uint8 [slots, shape.token_bytes], for `put_cached`."""
    blocks, places = np.divmod(slots, shape.block_tokens)
    taken = np.empty((len(slots), shape.token_bytes), np.uint8)
    own_keys, own_values, own_index = _parts_of(shape, taken)
    if index is not None:
        own_index[...] = _index_rows(shape, index)[blocks, places]
    own_values[...] = _value_rows(shape, values)[blocks, :, places]
    if shape.latent:
        own_keys[:, 0] = _latent_rows(shape, keys)[blocks, places]
        return taken
    for part, first, width in _groups(shape, keys):
        mine = ((places >= first) & (places < first + width)).nonzero()[0]
        if not len(mine):
            continue
        if shape.type is CacheType.Q8_0:
            own_keys[mine] = _spread(shape, part, width)[blocks[mine], :, places[mine] - first]
        else:
            numbers = _lanes(shape, part, width)[blocks[mine], :, :, places[mine] - first]
            own_keys[mine] = np.ascontiguousarray(numbers).view(np.uint8)
    return taken


def put_cached(
    shape: CacheShape,
    keys: ByteArray,
    values: ByteArray,
    slots: IntArray,
    taken: ByteArray,
    index: ByteArray | None = None,
) -> None:
    """Store what `take_cached` of a cache of the same type and heads returned in `slots` [slots]."""
    blocks, places = np.divmod(slots, shape.block_tokens)
    own_keys, own_values, own_index = _parts_of(shape, taken)
    if index is not None:
        _index_rows(shape, index)[blocks, places] = own_index
    _value_rows(shape, values)[blocks, :, places] = own_values
    if shape.latent:
        _latent_rows(shape, keys)[blocks, places] = own_keys[:, 0]
        return
    for part, first, width in _groups(shape, keys):
        mine = ((places >= first) & (places < first + width)).nonzero()[0]
        if not len(mine):
            continue
        if shape.type is CacheType.Q8_0:
            lanes = _spread(shape, part, width)
            lanes[blocks[mine], :, places[mine] - first] = own_keys[mine]
        else:
            numbers = _lanes(shape, part, width)
            own = own_keys[mine].view(numbers.dtype)
            numbers[blocks[mine], :, :, places[mine] - first] = own


def _value_rows(shape: CacheShape, values: ByteArray) -> ByteArray:
    """Return a view of values as [blocks, kv_heads, block_tokens, bytes of a row]."""
    return values.reshape(*shape.array_shape[:2], shape.block_tokens, shape.value_row_bytes)


def _parts_of(shape: CacheShape, taken: ByteArray) -> tuple[ByteArray, ByteArray, ByteArray]:
    """Return views of tokens' bytes [tokens, token_bytes].

    Their keys and values, each [tokens, kv_heads, bytes of a row], and rows for an indexer, [tokens, bytes of a row].
    """
    size, lead = shape.kv_heads * shape.row_bytes, (len(taken), shape.kv_heads)
    end = size + shape.kv_heads * shape.value_row_bytes
    values = taken[:, size:end].reshape(*lead, shape.value_row_bytes)
    return taken[:, :size].reshape(*lead, shape.row_bytes), values, taken[:, end:]


def _lanes(shape: CacheShape, group: ByteArray, width: int) -> NDArray[Any]:
    """Return a view of a group's keys as numbers [blocks, kv_heads, numbers of a token, width]."""
    number = np.dtype(f"u{shape.row_bytes // shape.head_dim}")
    wide = group.view(number)
    strides = (*wide.strides[:-1], width * number.itemsize, number.itemsize)
    split = (*wide.shape[:-1], shape.head_dim, width)
    return np.lib.stride_tricks.as_strided(wide, split, strides)


def write_latent(shape: CacheShape, keys: ByteArray, slots: IntArray, rows: FloatArray) -> None:
    """Store rows [tokens, head_dim] in `slots` [tokens] of a latent cache."""
    _latent_rows(shape, keys)[np.divmod(slots, shape.block_tokens)] = _pack(shape.type, rows)


def read_latent(shape: CacheShape, keys: ByteArray, slots: IntArray) -> FloatArray:
    """Return the rows in `slots`, float32 [slots, head_dim]."""
    places = np.divmod(slots, shape.block_tokens)
    return _unpack(shape.type, _latent_rows(shape, keys)[places])


def write_index(shape: CacheShape, index: ByteArray, slots: IntArray, rows: FloatArray) -> None:
    """Store an indexer's rows [tokens, shape.index] in `slots` [tokens]."""
    places = np.divmod(slots, shape.block_tokens)
    _index_rows(shape, index)[places] = _pack(shape.type, rows)


def read_index(shape: CacheShape, index: ByteArray, slots: IntArray) -> FloatArray:
    """Return the indexer's rows in `slots`, float32 [slots, shape.index]."""
    places = np.divmod(slots, shape.block_tokens)
    return _unpack(shape.type, _index_rows(shape, index)[places])


def _index_rows(shape: CacheShape, index: ByteArray) -> ByteArray:
    assert shape.index, "a cache without rows for an indexer"
    return index.reshape(shape.num_blocks, shape.block_tokens, shape.index_row_bytes)


def row_by_row(shape: CacheShape, keys: ByteArray) -> tuple[CacheShape, ByteArray]:
    """Return a latent cache as one whose blocks are single tokens, so that a block's number is a slot."""
    assert shape.latent, "not a latent cache"
    slots = shape.num_blocks * shape.block_tokens
    heads = HeadShape(shape.kv_heads, shape.head_dim, shape.latent)
    single = CacheShape.of(shape.type, slots, 1, heads)
    return single, keys.reshape(single.array_shape)


def _latent_rows(shape: CacheShape, keys: ByteArray) -> ByteArray:
    assert shape.latent, "not a latent cache"
    return keys.reshape(shape.num_blocks, shape.block_tokens, shape.row_bytes)


def _groups(shape: CacheShape, keys: ByteArray) -> Iterator[tuple[ByteArray, int, int]]:
    """Yield (bytes [blocks, kv_heads, width * row_bytes], first place, width) of each group of keys."""
    for first in range(0, shape.block_tokens, _GROUP_TOKENS):
        width = min(_GROUP_TOKENS, shape.block_tokens - first)
        start = first * shape.row_bytes
        yield keys[:, :, start : start + width * shape.row_bytes], first, width


class _Lanes:
    """The packed rows of a group's tokens, read and written by [blocks, :, lanes]."""

    def __init__(self, parts: list[tuple[ByteArray, slice]], row_bytes: int) -> None:
        self._parts = parts
        self._row_bytes = row_bytes

    def __getitem__(self, key: tuple[IntArray, slice, IntArray]) -> ByteArray:
        blocks, heads, lanes = key
        kv_heads = self._parts[0][0].shape[1]
        out = np.empty((len(blocks), kv_heads, self._row_bytes), np.uint8)
        for view, columns in self._parts:
            picked = view[blocks, heads, :, lanes]  # [tokens, kv_heads, numbers, bytes of one]
            out[:, :, columns] = picked.reshape(*picked.shape[:2], columns.stop - columns.start)
        return out

    def __setitem__(self, key: tuple[IntArray, slice, IntArray], rows: ByteArray) -> None:
        blocks, heads, lanes = key
        for view, columns in self._parts:
            part = rows[:, :, columns]
            view[blocks, heads, :, lanes] = part.reshape(*part.shape[:2], *view.shape[2::2])


def _spread(shape: CacheShape, group: ByteArray, width: int) -> _Lanes:
    lead = group.shape[:2]
    if shape.type is not CacheType.Q8_0:
        number_bytes = shape.row_bytes // shape.head_dim
        # A view of some columns stays a view when only its last axis is split.
        view = _split_last(group, (shape.head_dim, width, number_bytes))
        return _Lanes([(view, slice(0, shape.row_bytes))], shape.row_bytes)
    assert group.ndim == len(lead) + 1
    parts = []
    for block in range(shape.head_dim // _QUANT_BLOCK):
        start, column = block * _QUANT_BYTES * width, block * _QUANT_BYTES
        units = group[:, :, start : start + 2 * width]
        numbers = group[:, :, start + 2 * width : start + _QUANT_BYTES * width]
        parts.append((_split_last(units, (1, width, 2)), slice(column, column + 2)))
        parts.append(
            (
                _split_last(numbers, (_QUANT_BLOCK, width, 1)),
                slice(column + 2, column + _QUANT_BYTES),
            )
        )
    return _Lanes(parts, shape.row_bytes)


def _split_last(array: ByteArray, shape: tuple[int, int, int]) -> ByteArray:
    """Return a view of uint8 [..., a * b * c] as [..., a, b, c]."""
    strides = (*array.strides[:-1], shape[1] * shape[2], shape[2], 1)
    return np.lib.stride_tricks.as_strided(array, (*array.shape[:-1], *shape), strides)


def _pack(cache_type: CacheType, x: FloatArray) -> ByteArray:
    """Return uint8 [..., row_bytes] of float32 [..., head_dim]; halves saturate at 65504."""
    match cache_type:
        case CacheType.F32:
            packed: ByteArray = np.ascontiguousarray(x, np.float32).view(np.uint8)
            return packed
        case CacheType.F16:
            return np.clip(x, -_MAX_HALF, _MAX_HALF).astype(np.float16).view(np.uint8)
        case CacheType.BF16:
            bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
            rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
            return (
                np.where(np.isnan(x), bits >> 16 | 0x40, rounded).astype(np.uint16).view(np.uint8)
            )
        case CacheType.Q8_0:
            return _pack_q8_0(x)


def _pack_q8_0(x: FloatArray) -> ByteArray:
    blocks = x.reshape(*x.shape[:-1], -1, _QUANT_BLOCK)
    largest = np.abs(blocks).max(axis=-1, keepdims=True)
    unit = np.minimum(largest / np.float32(127), _MAX_HALF).astype(np.float16)
    rounded = unit.astype(np.float32)
    inverse = np.divide(np.float32(1), rounded, out=np.zeros_like(rounded), where=rounded > 0)
    numbers = np.rint(np.clip(blocks * inverse, -127, 127)).astype(np.int8)
    packed = np.concatenate((unit.view(np.uint8), numbers.view(np.uint8)), axis=-1)
    return packed.reshape(*x.shape[:-1], -1)


def _unpack(cache_type: CacheType, packed: ByteArray) -> FloatArray:
    """Return float32 [..., head_dim] of uint8 [..., row_bytes]."""
    packed = np.ascontiguousarray(packed)
    match cache_type:
        case CacheType.F32:
            return packed.view(np.float32)
        case CacheType.F16:
            return packed.view(np.float16).astype(np.float32)
        case CacheType.BF16:
            wide: FloatArray = (packed.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
            return wide
        case CacheType.Q8_0:
            blocks = packed.reshape(*packed.shape[:-1], -1, _QUANT_BYTES)
            unit = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32)
            numbers = np.ascontiguousarray(blocks[..., 2:]).view(np.int8).astype(np.float32)
            return (unit * numbers).reshape(*packed.shape[:-1], -1)

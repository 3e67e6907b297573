"""Keys, values and recurrent states on a device. Slots and blocks are those of the host's tables, times a stride.

Each slot's numbers lie head by head. Unlike on the CPU keys are not transposed, because tiles of them are multiplied as
matrices. A latent cache has keys alone, whose first numbers are the values. Knows no request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from thermocline.kernels.cache_format import CacheType

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from thermocline.kernels.cache_format import CacheShape
    from thermocline.kernels.gpu.streams import DeviceStreams
    from thermocline.kernels.recurrent_contract import StateShape

_QUANT_BLOCK = 32
_MAX_HALF = 65504.0
_STORED = {
    CacheType.F32: torch.float32,
    CacheType.F16: torch.float16,
    CacheType.BF16: torch.bfloat16,
    CacheType.Q8_0: torch.int8,
}
# What is multiplied.
_OPERANDS = _STORED | {CacheType.Q8_0: torch.float16}


class _Numbers:
    """One layer's keys, or its values. What was not stored may be anything."""

    def __init__(self, shape: CacheShape, stored: torch.Tensor, units: torch.Tensor | None) -> None:
        """stored: [slots, kv_heads, head_dim or value_dim]; units: of every 32 of them, for Q8_0."""
        self._type = shape.type
        self._stored, self._units = stored, units

    def store(self, slots: torch.Tensor, x: torch.Tensor) -> None:
        """Store x [tokens, kv_heads, head_dim] in `slots`; halves saturate."""
        if self._units is not None:
            blocks = x.view(*x.shape[:-1], -1, _QUANT_BLOCK)
            units = (blocks.abs().amax(dim=-1) / 127.0).clamp_max(_MAX_HALF).half()
            wide = units.float().unsqueeze(-1)
            numbers = torch.where(wide > 0, blocks / wide, torch.zeros_like(blocks))
            x = numbers.round().clamp(-127, 127).flatten(-2)
            self._units[slots] = units
        elif self._type is CacheType.F16:
            x = x.clamp(-_MAX_HALF, _MAX_HALF)
        self._stored[slots] = x.to(self._stored.dtype)

    def copy(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy what is stored in slots to others, of which none is a source."""
        self._stored[targets] = self._stored[sources]
        if self._units is not None:
            self._units[targets] = self._units[sources]

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """Return float32 [n, kv_heads, slots, head_dim] of slots [n, slots], a new array: numbers as they are multiplied."""
        kv_heads = self._stored.shape[1]
        heads = torch.arange(kv_heads, device=slots.device)[:, None]
        rows = (slots[:, None] * kv_heads + heads).flatten()
        numbers = self._stored.flatten(0, 1).index_select(0, rows)
        if self._units is not None:
            units = self._units.flatten(0, 1).index_select(0, rows)
            wide = numbers.view(len(rows), -1, _QUANT_BLOCK) * units.unsqueeze(-1).float()
            numbers = wide.clamp_(-_MAX_HALF, _MAX_HALF).half().flatten(1)
        return numbers.float().view(len(slots), kv_heads, slots.shape[1], -1)

    def arrays(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all numbers [slots, kv_heads, head_dim], and their units; the numbers again where there are none."""
        return self._stored, self._stored if self._units is None else self._units


class DeviceLayerCache:
    """One layer's keys and values. operand: the type in which they are multiplied.

    value_dim: numbers of a value, which are the first ones of its key in a latent cache. is_latent: whether it is one.
    """

    def __init__(self, shape: CacheShape, keys: _Numbers, values: _Numbers | None) -> None:
        """values: None in a latent cache."""
        self._keys, self._values = keys, values
        self.value_dim, self.is_latent = shape.value_dim, shape.latent > 0
        self.block_tokens, self.kv_heads = shape.block_tokens, shape.kv_heads
        self.operand = _OPERANDS[shape.type]
        self.is_quantised = shape.type is CacheType.Q8_0

    def append(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k [tokens, kv_heads, head_dim] and v [tokens, kv_heads, value_dim] in `slots`, int64 [tokens]."""
        assert self._values is not None, "a latent cache has rows"
        self._keys.store(slots, k)
        self._values.store(slots, v)

    def append_rows(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Store rows [tokens, head_dim] in `slots` of a latent cache, int64 [tokens]."""
        assert self._values is None, "a cache of heads has keys and values"
        self._keys.store(slots, rows[:, None])

    def copy(self, copies: torch.Tensor | None) -> None:
        """Copy keys and values to other slots: see `AttendInputs.copies`."""
        if copies is not None:
            self._keys.copy(*copies)
            if self._values is not None:
                self._values.copy(*copies)

    def read(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values in `slots` [n, slots], float32 [n, kv_heads, slots, head_dim and value_dim].

        New arrays; of a latent cache the values are a view of the keys.
        """
        keys = self._keys.read(slots)
        if self._values is None:
            return keys, keys[..., : self.value_dim]
        return keys, self._values.read(slots)

    def arrays(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return keys and their units, values and theirs, all of them; see `_Numbers.arrays`.

        The keys again in place of values that a latent cache does not have.
        """
        values = self._keys if self._values is None else self._values
        return *self._keys.arrays(), *values.arrays()


class DeviceKVPool:
    """Owns the keys and values of some layers, which have the same blocks.

    stride: how far apart a layer's blocks lie, in its blocks. Between them are the keys and values of the others, so
    that a block's memory is one run in all layers. Values of other than a key's numbers are a second such run, behind the
    keys of all blocks, so that slots count alike in both.
    """

    def __init__(
        self,
        streams: DeviceStreams,
        shape: CacheShape,
        layers: Sequence[int],
        memory: torch.Tensor | None = None,
    ) -> None:
        """memory: uint8, what `number_bytes` says; None to take it. Units of Q8_0 have memory of their own.

        Raises torch.OutOfMemoryError.
        """
        self.shape = shape
        self.stride = _arrays_of(shape) * len(layers)
        if memory is None:
            size = number_bytes(shape, len(layers))
            memory = torch.zeros(size, dtype=torch.uint8, device=streams.device)
        runs, start = [], 0
        for dim in _row_dims(shape):
            end = start + _run_bytes(shape, dim, self.stride)
            runs.append(self._cut(memory[start:end], dim))
            start = end
        # The same run, which gives keys and values by turns, unless their rows differ.
        keys, values = runs[0], runs[-1]
        self.layers = {
            layer: DeviceLayerCache(shape, next(keys), None if shape.latent else next(values))
            for layer in layers
        }

    def __repr__(self) -> str:
        return f"DeviceKVPool({len(self.layers)} layers, {self.shape.num_blocks} blocks)"

    def _cut(self, memory: torch.Tensor, dim: int) -> Iterator[_Numbers]:
        """Yield the arrays whose blocks alternate in a run of memory, of rows of `dim` numbers."""
        shape = self.shape
        rows = (shape.num_blocks * self.stride * shape.block_tokens, shape.kv_heads)
        stored = memory.view(_STORED[shape.type]).view(*rows, dim)
        units = None
        if shape.type is CacheType.Q8_0:
            unit_shape = (*rows, dim // _QUANT_BLOCK)
            units = torch.zeros(unit_shape, dtype=torch.float16, device=memory.device)
        for start in range(0, self.stride * shape.block_tokens, shape.block_tokens):
            yield _Numbers(shape, stored[start:], None if units is None else units[start:])


def number_bytes(shape: CacheShape, num_layers: int) -> int:
    """Return the bytes of the keys and values of so many layers, without units."""
    stride = _arrays_of(shape) * num_layers
    return sum(_run_bytes(shape, dim, stride) for dim in _row_dims(shape))


def _run_bytes(shape: CacheShape, dim: int, stride: int) -> int:
    """Return the bytes of a run of memory in which the blocks of `stride` arrays alternate, of rows of `dim` numbers."""
    row = shape.kv_heads * shape.type.number_bytes(dim)
    return stride * shape.num_blocks * shape.block_tokens * row


def _row_dims(shape: CacheShape) -> tuple[int, ...]:
    """Return the numbers of a row in each run of memory: one for all arrays where keys and values have equal rows."""
    return tuple(dict.fromkeys(shape.heads.stored_dims))


def _arrays_of(shape: CacheShape) -> int:
    """Return the arrays of a layer in one run of memory: keys, and values if they are as wide and no part of the keys."""
    return 1 if shape.latent or shape.value_dim != shape.head_dim else 2


class DeviceStates:
    """One layer's recurrent states by slot, float32, of the shapes of `RecurrentStates`."""

    def __init__(self, streams: DeviceStreams, num_slots: int, shape: StateShape) -> None:
        self.conv, self.recurrent = (
            torch.zeros((num_slots, *dims), dtype=torch.float32, device=streams.device)
            for dims in (shape.conv, shape.heads)
        )

    def begin(self, slot: int, source: int | None) -> None:
        """Copy slot `source` to a slot; None: the zero state that a sequence begins with."""
        if source is not None:
            self.copy(source, slot)
            return
        self.conv[slot].zero_()
        self.recurrent[slot].zero_()

    def copy(self, source: int, target: int) -> None:
        """Copy slot `source` to slot `target`."""
        self.conv[target].copy_(self.conv[source])
        self.recurrent[target].copy_(self.recurrent[source])

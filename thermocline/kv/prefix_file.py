"""The file of a saved prefix: what it is of, its tokens, and the bytes of its blocks and snapshots.

    8 bytes   magic
    uint32    version of this format
    uint32    length of the header
    header    JSON: the form of the cache, who saved it, and which parts follow
    int32[]   token ids
    bytes     of each layer with keys and values: of each block its keys, then its values
    bytes     of each snapshot: of each recurrent layer its convolution, then its states
    16 bytes  BLAKE2b of all that

All numbers are little-endian. Sizes follow from the form and the parts, so that a file is as long as it says or refused.
Knows no request and no engine: blocks and slots are given.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from thermocline.errors import SavedPromptError
from thermocline.kv.kept_prefix import PrefixParts, SequenceTokens
from thermocline.messages import LayerIndex
from thermocline.units import format_bytes
from thermocline.whole_files import whole_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import IO, Any

    from thermocline.kernels.weight import ByteArray
    from thermocline.kv.cache import SequenceCache
    from thermocline.kv.kept_prefix import HeldPrefix
    from thermocline.kv.recurrent import StatePool

_MAGIC: Final = b"TCPROMPT"
_VERSION: Final = 1
_LENGTHS: Final = struct.Struct("<8sII")
_DIGEST_BYTES: Final = 16
_MAX_HEADER_BYTES: Final = 16 << 20
_PRIVATE: Final = 0o600


class LayerForm(msgspec.Struct, frozen=True):
    """What a layer keeps of each block: bytes of keys, of values, and of an indexer's rows. has_window: only of some blocks."""

    layer: int
    key_bytes: int
    value_bytes: int
    has_window: bool
    index_bytes: int = 0

    @property
    def array_bytes(self) -> tuple[int, ...]:
        """The bytes of each array of the layer's cache, in order."""
        index = (self.index_bytes,) if self.index_bytes else ()
        return (self.key_bytes, self.value_bytes, *index)


class CacheForm(msgspec.Struct, frozen=True):
    """What a saved prefix must share with the cache that it is restored to.

    model: a digest of the model's weights. arithmetic: of which kernels. state_numbers: float32 numbers of each recurrent
    layer's convolution and states; further_states: the same of what layers keep besides. kinds_differ, expanded_tokens:
    what besides decides about the keys of blocks. turns_far: see `ModelSpec`.
    """

    program: str
    model: str
    arithmetic: str
    kv_type: str
    block_tokens: int
    layers: tuple[LayerForm, ...]
    recurrent_layers: tuple[int, ...] = ()
    state_numbers: tuple[int, int] = (0, 0)
    kinds_differ: bool = True
    expanded_tokens: int = 0
    further_states: tuple[tuple[int, int], ...] = ()
    turns_far: bool = False

    @property
    def states(self) -> tuple[tuple[int, int], ...]:
        """The numbers of each array of a slot of states, in the order of `StatePool.all_layers`."""
        return (self.state_numbers,) * len(self.recurrent_layers) + self.further_states

    def data_bytes(self, parts: PrefixParts) -> int:
        """Return the bytes of these parts."""
        blocks = sum(
            sum(layer.array_bytes) * (len(parts.windows) if layer.has_window else parts.num_blocks)
            for layer in self.layers
        )
        state_bytes = 4 * sum(map(sum, self.states))
        return blocks + state_bytes * len(parts.states)


class _Header(msgspec.Struct, frozen=True):
    form: CacheForm
    owner: str
    root: bytes
    num_tokens: int
    num_prompt_tokens: int
    num_expanded: int
    num_blocks: int
    windows: tuple[int, ...]
    states: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SavedPrefix:
    """What a file has. data_offset: where its parts begin."""

    tokens: SequenceTokens
    parts: PrefixParts
    data_offset: int
    num_bytes: int


def write_prefix(
    path: Path, form: CacheForm, owner: str, held: HeldPrefix, cache: SequenceCache, max_bytes: int
) -> int:
    """Write a held prefix, whole or not at all, for this user alone; return the file's size.

    owner: whose it is; only the same one restores it. Raises SavedPromptError if it would have more than `max_bytes`, or
    can not be written.
    """
    tokens, parts = held.tokens, held.parts
    num_tokens = parts.num_blocks * form.block_tokens
    ids = np.array(tokens.token_ids[:num_tokens], "<i4")
    header = msgspec.json.encode(
        _Header(
            form,
            _owner_digest(owner),
            tokens.root,
            num_tokens,
            tokens.num_prompt_tokens,
            tokens.num_expanded,
            parts.num_blocks,
            parts.windows,
            parts.states,
        )
    )
    begin = _LENGTHS.pack(_MAGIC, _VERSION, len(header)) + header + ids.tobytes()
    num_bytes = len(begin) + form.data_bytes(parts) + _DIGEST_BYTES
    if num_bytes > max_bytes:
        raise SavedPromptError(
            f"{path.name} would take {format_bytes(num_bytes)}, and --slot-save-limit leaves {format_bytes(max_bytes)}: "
            "delete files there, or raise it",
        )
    try:
        with whole_file(path, sync=True) as file:
            os.fchmod(file.fileno(), _PRIVATE)
            digest = blake2b(begin, digest_size=_DIGEST_BYTES)
            file.write(begin)
            for array in _arrays(form, held, cache):
                digest.update(array)
                file.write(array)
            file.write(digest.digest())
    except OSError as error:
        raise SavedPromptError(
            f"{path.name} can not be written ({error.strerror}): make room, or choose another --slot-save-path"
        ) from error
    return num_bytes


def open_prefix(path: Path, form: CacheForm, owner: str) -> SavedPrefix:
    """Return what a file has, checked against this cache. Raises SavedPromptError for a file that does not fit it."""
    try:
        with path.open("rb") as file:
            return _opened(file, path.name, form, _owner_digest(owner))
    except FileNotFoundError:
        raise SavedPromptError(f"there is no saved prompt {path.name}: save one first") from None
    except OSError as error:
        raise SavedPromptError(f"{path.name} can not be read ({error.strerror})") from error


def read_prefix(
    path: Path, form: CacheForm, saved: SavedPrefix, held: HeldPrefix, cache: SequenceCache
) -> None:
    """Read the bytes of a file into the places of `held` that are new. Raises SavedPromptError for a damaged file.

    After an error these places have any content.
    """
    try:
        with path.open("rb") as file:
            digest = blake2b(file.read(saved.data_offset), digest_size=_DIGEST_BYTES)
            for array in _arrays(form, held, cache, saved.parts):
                if file.readinto(array) != array.nbytes:
                    raise _damaged(path.name)
                digest.update(array)
            if file.read() != digest.digest():
                raise _damaged(path.name)
    except OSError as error:
        raise SavedPromptError(f"{path.name} can not be read ({error.strerror})") from error


def _opened(file: IO[bytes], name: str, form: CacheForm, owner: str) -> SavedPrefix:
    num_bytes = os.fstat(file.fileno()).st_size
    begin = file.read(_LENGTHS.size)
    if len(begin) < _LENGTHS.size or not begin.startswith(_MAGIC):
        raise SavedPromptError(f"{name} is no saved prompt: name one that this server saved")
    _, version, header_bytes = _LENGTHS.unpack(begin)
    if version != _VERSION:
        raise SavedPromptError(
            f"{name} has version {version} of the format, and this is version {_VERSION}: save the prompt again"
        )
    if header_bytes > min(_MAX_HEADER_BYTES, num_bytes):
        raise _damaged(name)
    try:
        header = msgspec.json.decode(file.read(header_bytes), type=_Header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise _damaged(name) from None
    wrong = _differences(header.form, form)
    if wrong:
        raise SavedPromptError(
            f"{name} does not fit this model: it is of another {', '.join(wrong)}. Start the server as it was saved, or "
            "compute the prompt again"
        )
    if header.owner != owner:
        raise SavedPromptError(f"{name} was saved with another API key: use that one")
    parts = PrefixParts(header.num_blocks, header.windows, header.states)
    data_offset = _LENGTHS.size + header_bytes + 4 * header.num_tokens
    has_parts = (
        header.num_blocks > 0
        and header.num_tokens == header.num_blocks * form.block_tokens
        and min(header.num_prompt_tokens, header.num_expanded) >= 0
        and _are_indices(parts.windows, parts.num_blocks)
        and _are_indices(parts.states, parts.num_blocks)
    )
    if not has_parts or num_bytes != data_offset + form.data_bytes(parts) + _DIGEST_BYTES:
        raise _damaged(name)
    ids = np.frombuffer(file.read(4 * header.num_tokens), "<i4")
    tokens = SequenceTokens(
        tuple(ids.tolist()), header.root, header.num_prompt_tokens, header.num_expanded
    )
    return SavedPrefix(tokens, parts, data_offset, num_bytes)


def _arrays(
    form: CacheForm, held: HeldPrefix, cache: SequenceCache, saved: PrefixParts | None = None
) -> Iterator[memoryview]:
    """Yield the bytes of each part in the file's order: those of the cache, to be read.

    saved: the parts of a file, to be written; what is not new in `held` goes into an array that nobody reads.
    """
    windows = tuple(held.windows) if saved is None else saved.windows
    states = tuple(held.states) if saved is None else saved.states
    for layer in form.layers:
        arrays = cache.kv.layer(LayerIndex(layer.layer))
        places = held.windows if layer.has_window else dict(enumerate(held.blocks))
        new = held.new_windows if layer.has_window else held.new_blocks
        for index in windows if layer.has_window else range(len(held.blocks)):
            if saved is None or index in new:
                block = places[index]
                for array in arrays.arrays:
                    yield _view(array[block])
            else:
                for num_bytes in layer.array_bytes:
                    yield _view(np.empty(num_bytes, np.uint8))
    for index in states:
        if cache.states is None:
            raise SavedPromptError("the saved prompt has states, and this model has none")
        is_kept = saved is None or index in held.new_states
        slot = held.states[index] if is_kept else None
        yield from _state_arrays(form, cache.states, slot)


def _state_arrays(form: CacheForm, states: StatePool, slot: int | None) -> Iterator[memoryview]:
    """Yield the bytes of each array of a slot; arrays that nobody reads for None."""
    for layer, counts in zip(states.all_layers, form.states, strict=True):
        for numbers, count in zip((layer.conv, layer.recurrent), counts, strict=True):
            if slot is None:
                yield _view(np.empty(4 * count, np.uint8))
            else:
                yield _view(numbers[slot].reshape(-1).view(np.uint8))


def _view(array: ByteArray) -> memoryview:
    content: Any = array.reshape(-1)
    return memoryview(content)


def _are_indices(numbers: tuple[int, ...], end: int) -> bool:
    return len(set(numbers)) == len(numbers) and all(0 <= number < end for number in numbers)


_WORDS: Final = {
    "program": "version of thermocline",
    "model": "model file",
    "arithmetic": "instruction set",
    "kv_type": "--kv-type",
    "block_tokens": "size of blocks",
    "layers": "shape of the cache",
    "recurrent_layers": "recurrent layers",
    "state_numbers": "shape of states",
    "kinds_differ": "arithmetic of prompts",
    "expanded_tokens": "form of latent attention",
    "turns_far": "list of rotary factors, which --ctx decides about",
}


def _differences(saved: CacheForm, form: CacheForm) -> list[str]:
    return [word for name, word in _WORDS.items() if getattr(saved, name) != getattr(form, name)]


def _owner_digest(owner: str) -> str:
    return blake2b(owner.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _damaged(name: str) -> SavedPromptError:
    return SavedPromptError(f"{name} is damaged or was cut: delete it, and save the prompt again")

"""Opens a GGUF model of one or many files and owns its memory maps.

It does NOT parse (header.py does) and never copies tensor data: what it hands out are read-only
views of the page cache.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from thermocline.errors import ModelChangedError, ModelFileError, UnsupportedModelError
from thermocline.modelfile.header import parse_header
from thermocline.modelfile.mapping import MappedFile
from thermocline.modelfile.shards import ARCHITECTURE_KEY, check_shards, shard_paths, shard_place

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from typing import Self

    from thermocline.modelfile.header import Header
    from thermocline.modelfile.layout import Metadata, TensorInfo
    from thermocline.modelfile.mapping import Bytes, MapGuard

_MAX_EXAMPLES = 3


class ModelFile:
    """An open model: facts, and views of its bytes.

    Made by `open_model_file`. Views and mappings stay valid after `close` for as long as somebody
    holds them; `close` only drops this object's own hold, and refuses new views.
    """

    def __init__(self, path: str, headers: Sequence[Header], maps: Sequence[MappedFile]) -> None:
        self.path = path
        self.version = headers[0].version
        self.metadata: Metadata = headers[0].metadata
        self.alignment = headers[0].alignment
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {tensor.name: tensor for header in headers for tensor in header.tensors}
        )
        self._maps: tuple[MappedFile, ...] | None = tuple(maps)
        self.num_shards = len(maps)

    def __repr__(self) -> str:
        state = "closed" if self._maps is None else f"{self.num_shards} file(s)"
        return f"ModelFile({self.path!r}, {len(self.tensors)} tensors, {state})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def architecture(self) -> str:
        """The name of the model's architecture; ModelFileError if the file does not say."""
        return self.metadata.get_str(ARCHITECTURE_KEY)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that hold the tensors, in the order of their names."""
        return tuple(sorted({Path(info.path) for info in self.tensors.values()}))

    @property
    def total_tensor_bytes(self) -> int:
        """The stored bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def view(self, name: str) -> Bytes:
        """Return tensor `name` as stored: read-only uint8 [*shape[:-1], row_bytes] over the map.

        ModelFileError if there is no such tensor, or after `close`.
        """
        info = self.tensors.get(name)
        if info is None:
            raise ModelFileError(
                self.path,
                f"the model has no tensor {name!r}",
                fix="the file lacks a part of the model: convert or download it again",
            )
        whole = self.mapping(info.shard)
        flat = whole[info.offset : info.offset + info.nbytes]
        return cast("Bytes", flat.reshape(*info.shape[:-1], info.row_bytes))

    def mapping(self, shard: int) -> Bytes:
        """Return file number `shard` (from 0) as read-only uint8 [file bytes].

        ModelFileError after `close`; IndexError for a shard that is not there.
        """
        if self._maps is None:
            raise ModelFileError(
                self.path,
                "the model file is used after it was closed",
                fix="keep it open as long as its tensors are needed",
            )
        if not 0 <= shard < len(self._maps):
            raise IndexError(f"shard {shard} of {len(self._maps)}: shards count from 0")
        return self._maps[shard].content

    def find_change(self) -> ModelChangedError | None:
        """Return an error if a mapped file was truncated or overwritten, None if not. A system call per file.

        Finds nothing in a model that was opened without guards, or after `close`.
        """
        for mapped in self._maps or ():
            if (what := mapped.change()) is not None:
                return ModelChangedError(mapped.path, what)
        return None

    def find_replaced(self) -> str | None:
        """Return the path of a file that was replaced or removed while its mapping is used, None for none."""
        return next((mapped.path for mapped in self._maps or () if mapped.is_replaced()), None)

    def require_formats(self, supported: Collection[str], *, but_for: Collection[str] = ()) -> None:
        """Raise UnsupportedModelError, listing every tensor format that is not in `supported`; tensors `but_for` may have any."""
        names: dict[str, list[str]] = {}
        for tensor in self.tensors.values():
            if tensor.format.name not in supported and tensor.name not in but_for:
                names.setdefault(tensor.format.name, []).append(tensor.name)
        if not names:
            return
        raise UnsupportedModelError(
            self.path,
            "the model has tensors in formats that this version can not compute with",
            unsupported=tuple(_describe(name, names[name]) for name in sorted(names)),
            fix=f"get the model quantised to {', '.join(sorted(supported))}",
        )

    def close(self) -> None:
        """Drop the maps; a second call does nothing."""
        self._maps = None


def open_model_file(
    path: str | os.PathLike[str],
    *,
    any_format: bool = False,
    make_guard: Callable[[Bytes, int], MapGuard] | None = None,
) -> ModelFile:
    """Open the model at `path`: a single GGUF file, or any one shard of a split model.

    any_format: tensors may have types that are not known, whose rows can not be read; for who only looks at the header.
    make_guard: the native core's `GuardedMap`, for who keeps the model open; see `MappedFile`.
    Everything in the headers is checked before this returns. ModelFileError says what is wrong,
    where, and what to do; it is raised too for a path that can not be read or is no regular file.
    """
    given = os.fspath(path)
    maps: list[MappedFile] = []

    def map_file(each: str) -> MappedFile:
        maps.append(MappedFile(each, make_guard))
        return maps[-1]

    try:
        file = _open(given, map_file, any_format=any_format)
    except ModelFileError:
        _require_unchanged(maps)
        raise
    _require_unchanged(maps)
    return file


def _open(given: str, map_file: Callable[[str], MappedFile], *, any_format: bool) -> ModelFile:
    first = map_file(given)
    header = parse_header(given, first.content.data, 0, any_format=any_format)
    place = shard_place(given, header.metadata)
    if place is None:
        return ModelFile(given, [header], [first])
    paths = shard_paths(given, place)
    _require_all(paths)
    maps = [first if index == place.index else map_file(p) for index, p in enumerate(paths)]
    headers = [
        parse_header(p, m.content.data, i, any_format=any_format)
        for i, (p, m) in enumerate(zip(paths, maps, strict=True))
    ]
    check_shards(paths, headers)
    return ModelFile(given, headers, maps)


def _require_unchanged(maps: Sequence[MappedFile]) -> None:
    for mapped in maps:
        if (what := mapped.change()) is not None:
            raise ModelFileError(
                mapped.path,
                f"the file changed while it was being opened: {what}",
                fix="open it again when nothing writes to it",
            )


def _require_all(paths: Sequence[str]) -> None:
    missing = [path for path in paths if not os.path.lexists(path)]
    if missing:
        more = f" and {len(missing) - _MAX_EXAMPLES} more" if len(missing) > _MAX_EXAMPLES else ""
        raise ModelFileError(
            missing[0],
            f"shards of the model are missing: {', '.join(missing[:_MAX_EXAMPLES])}{more}",
            fix="download the missing shards into the same folder",
        )


def _describe(format_name: str, tensors: Sequence[str]) -> str:
    examples = ", ".join(tensors[:_MAX_EXAMPLES])
    return f"{format_name} ({len(tensors)} tensors, for example {examples})"

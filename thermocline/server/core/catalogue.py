"""Which models a server has: one file, those of folders and lists, and those of the hub's cache. Opens none of them.

Reads folders and headers, so its calls are not for an event loop.
"""

from __future__ import annotations

import logging
import os
import tomllib
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from thermocline.errors import ConfigError, ModelError, RequestError
from thermocline.hub.cache import cached_models
from thermocline.hub.variants import checked_file, group_variants
from thermocline.server.core.backend import file_fingerprint
from thermocline.server.core.keep_alive import parse_keep_alive
from thermocline.server.core.model_card import model_card, plain_file_name
from thermocline.server.core.settings import ModelCard
from thermocline.settings import with_settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from thermocline.config import EngineConfig

_LOG: Final = logging.getLogger("thermocline.server")
_MAX_FILES: Final = 10_000
_MAX_DEPTH: Final = 4
_MAX_NAME_CHARS: Final = 512
_GGUF: Final = ".gguf"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that requests may name, as `card.id`. modified_s: of its file, since 1970; fingerprint: as an OpenModel's.

    keep_alive_s: how long it stays in memory; None for what the server has. is_pinned: it is there from the start to the
    end. is_cached: it is in the hub's cache, from which it can be removed.
    """

    card: ModelCard
    path: str
    config: EngineConfig
    modified_s: float = 0.0
    fingerprint: str = ""
    keep_alive_s: float | None = None
    is_pinned: bool = False
    is_cached: bool = False


class Catalogue(Protocol):
    """Says which models there are, at any time anew."""

    def read(self) -> list[ModelSource]:
        """Return the models that there are now. Raises ConfigError."""
        ...


class OneModel:
    """The catalogue of a server that was given one model."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        config: EngineConfig,
        card: ModelCard,
        *,
        is_pinned: bool = True,
    ) -> None:
        self._model = ModelSource(card, os.fspath(path), config, is_pinned=is_pinned)

    def read(self) -> list[ModelSource]:
        """Return the one model."""
        model, path = self._model, Path(self._model.path)
        if model.is_pinned or not path.exists():
            return [model]
        return [replace(model, modified_s=path.stat().st_mtime, fingerprint=file_fingerprint(path))]


class ModelFolder:
    """All model files below a folder, by their paths without extension; files that are no models are left out."""

    def __init__(self, folder: Path, config: EngineConfig) -> None:
        """Raises ConfigError if there is no such folder."""
        if not folder.is_dir():
            raise ConfigError(f"--models {folder} is no folder and no list: name either")
        self._folder, self._config, self._headers = folder, config, _Headers()
        self._left_out: set[str] = set()

    def read(self) -> list[ModelSource]:
        """Return the models that there are now."""
        sizes = dict(islice(_files_below(self._folder), _MAX_FILES))
        files = {name: checked_file(name, size) for name, size in sizes.items()}
        for name in sorted({name for name, file in files.items() if file is None} - self._left_out):
            self._left_out.add(name)
            _LOG.warning("the model %r is left out: rename it to a name that can be shown", name)
        found = []
        for variant in group_variants(file for file in files.values() if file is not None):
            if variant.num_missing:
                continue
            first = variant.files[0].path
            model = self._headers.read(plain_file_name(first), self._folder / first, self._config)
            found += [] if model is None else [model]
        return found


class ModelList:
    """The models that a TOML file lists, a table of each: [models.NAME] with path, keep_alive, and the engine's settings."""

    def __init__(self, file: Path, config: EngineConfig) -> None:
        """Raises ConfigError for a file that can not be used."""
        self._headers = _Headers()
        try:
            content = tomllib.loads(file.read_text("utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(
                f"--models {file} can not be read as a list ({error}): mend it"
            ) from error
        tables = content.get("models")
        if not isinstance(tables, dict) or content.keys() != {"models"}:
            raise ConfigError(
                f'--models {file} has no tables of models, or something besides: write [models."NAME"] and below it '
                'path = "FILE.gguf"'
            )
        self._listed = [_listed(file, name, table, config) for name, table in tables.items()]

    def read(self) -> list[ModelSource]:
        """Return the listed models whose files can be read now."""
        found = []
        for each in self._listed:
            model = self._headers.read(each.card.id, Path(each.path), each.config)
            if model is not None:
                found.append(replace(model, keep_alive_s=each.keep_alive_s))
        return found


class CachedModels:
    """The whole models in the hub's cache on this machine, by the names that stand behind -hf."""

    def __init__(self, config: EngineConfig) -> None:
        self._config, self._headers = config, _Headers()

    def read(self) -> list[ModelSource]:
        """Return the models that there are now."""
        found = []
        for each in cached_models():
            model = self._headers.read(each.name, each.path, self._config)
            found += [] if model is None else [replace(model, is_cached=True)]
        return found


class JoinedCatalogue:
    """Several catalogues as one; of models with one name the first counts."""

    def __init__(self, parts: Sequence[Catalogue]) -> None:
        self._parts = tuple(parts)

    def read(self) -> list[ModelSource]:
        """Return the models of all parts."""
        by_name: dict[str, ModelSource] = {}
        for part in self._parts:
            for model in part.read():
                by_name.setdefault(model.card.id, model)
        return list(by_name.values())


def open_catalogue(
    places: Sequence[Path], config: EngineConfig, *, with_cache: bool
) -> JoinedCatalogue:
    """Return the catalogue of these folders and lists, and of the hub's cache too if asked. Raises ConfigError."""
    parts: list[Catalogue] = [
        ModelList(place, config) if place.suffix == ".toml" else ModelFolder(place, config)
        for place in places
    ]
    if with_cache:
        parts.append(CachedModels(config))
    catalogue = JoinedCatalogue(parts)
    if not with_cache and not catalogue.read():
        raise ConfigError(
            f"--models {', '.join(map(str, places))} has no model: put GGUF files there, or give another folder"
        )
    return catalogue


class _Headers:
    """What the headers of files say, read again when a file changes."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, Path], tuple[tuple[int, int], ModelSource | None]] = {}

    def read(self, name: str, path: Path, config: EngineConfig) -> ModelSource | None:
        """Return the model in a file; None, and a line in the log, for a file that is none."""
        try:
            status = path.stat()
        except OSError as error:
            _LOG.warning("the model %s is left out: %s", name, error)
            return None
        signature = status.st_size, status.st_mtime_ns
        key = name, path
        if key not in self._known or self._known[key][0] != signature:
            self._known[key] = signature, self._opened(name, path, config, status.st_mtime)
        return self._known[key][1]

    def _opened(
        self, name: str, path: Path, config: EngineConfig, modified_s: float
    ) -> ModelSource | None:
        try:
            card = replace(model_card(path), id=name)
            fingerprint = file_fingerprint(path)
        except (ModelError, OSError) as error:
            _LOG.warning("the model %s is left out: %s", name, error)
            return None
        return ModelSource(card, os.fspath(path), config, modified_s, fingerprint)


def _listed(file: Path, name: str, table: object, config: EngineConfig) -> ModelSource:
    where = f"--models {file}, [models.{name}]"
    if not isinstance(table, dict) or not isinstance(table.get("path"), str):
        raise ConfigError(f'{where} has no path: write path = "FILE.gguf" below it')
    if not 0 < len(name) <= _MAX_NAME_CHARS or not name.isprintable():
        raise ConfigError(
            f"{where}: a name has 1 to {_MAX_NAME_CHARS} characters that can be shown"
        )
    settings: dict[str, Any] = {
        key.replace("-", "_"): value for key, value in table.items() if key != "path"
    }
    keep_alive = settings.pop("keep_alive", None)
    try:
        return ModelSource(
            ModelCard(name, 0, 0, ""),
            os.fspath(file.parent / Path(table["path"]).expanduser()),
            with_settings(config, settings),
            keep_alive_s=None if keep_alive is None else parse_keep_alive(keep_alive),
        )
    except (ConfigError, RequestError, TypeError) as error:
        raise ConfigError(f"{where}: {error}") from error


def _files_below(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield path from `folder` and size of each GGUF file, in a fixed order."""
    for base, folders, files in os.walk(folder):
        here = Path(base).relative_to(folder)
        folders[:] = sorted(folders) if len(here.parts) < _MAX_DEPTH else []
        for name in sorted(files):
            path = here / name
            if path.suffix.lower() == _GGUF:
                try:
                    yield path.as_posix(), (folder / path).stat().st_size
                except OSError:
                    continue

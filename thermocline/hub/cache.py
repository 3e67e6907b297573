"""Models in the hub's cache on this machine: which are there whole, and how one is removed.

The cache is huggingface_hub's, in HF_HOME or HF_HUB_CACHE; other tools use it too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from thermocline.errors import HubError
from thermocline.hub.names import HubName, parse_name
from thermocline.hub.variants import Variant, checked_file, group_variants

if TYPE_CHECKING:
    from collections.abc import Iterator

# As in pyproject.toml: single files can be removed from the cache since then.
_LEAST_VERSION: Final = (2, 4)


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model in the cache. path: the file to open."""

    repo: str
    variant: Variant
    path: Path

    @property
    def name(self) -> str:
        """What stands after -hf to use it."""
        return str(HubName(self.repo, self.variant.selector))


def has_library() -> bool:
    """Whether huggingface_hub is installed, and not too old."""
    try:
        numbers = re.findall(r"\d+", version("huggingface_hub"))
    except PackageNotFoundError:
        return False
    return tuple(map(int, numbers[:2])) >= _LEAST_VERSION


def require_library() -> None:
    """Raise HubError if huggingface_hub is missing or too old."""
    if not has_library():
        least = ".".join(map(str, _LEAST_VERSION))
        raise HubError(
            "huggingface_hub",
            f"models by name need version {least} or later of this package, which is not installed",
            fix="pip install 'thermocline-moe[hub]'",
        )


def cache_folder() -> Path:
    """Return the cache's folder, which may not be there yet."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def endpoint() -> str:
    """Return the hub's address: HF_ENDPOINT, else the public one."""
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def cached_models(repo: str | None = None) -> tuple[CachedModel, ...]:
    """Return the whole models of the cache, or of one repository of it; of each file the newest one.

    Without the package, or without a cache, there are none.
    """
    if not has_library():
        return ()
    found = [
        model
        for each in _repos()
        if repo is None or each.repo_id == repo
        for model in _models_of(each)
    ]
    return tuple(sorted(found, key=lambda model: model.name))


def unfinished_bytes() -> int:
    """Return the size of what downloads that did not end, or still run, have in the cache."""
    if not has_library():
        return 0
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        return int(scan_cache_dir(cache_folder()).incomplete_size_on_disk)
    except CacheNotFound:
        return 0


def remove(models: tuple[CachedModel, ...]) -> int:
    """Delete these models' files from every revision in the cache, and return the bytes that it frees.

    Files that other revisions or repositories share stay. Raises HubError if the files can not be deleted.
    """
    from huggingface_hub import scan_cache_dir

    doomed = {(model.repo, file.path) for model in models for file in model.variant.files}
    info = scan_cache_dir(cache_folder())
    files = [
        file
        for repo in info.repos
        for revision in repo.revisions
        for file in revision.files
        if repo.repo_type == "model" and (repo.repo_id, _inner_path(revision, file)) in doomed
    ]
    strategy = info.delete_files(*files)
    try:
        strategy.execute()
    except OSError as error:
        raise HubError(
            models[0].name,
            f"{error.filename or cache_folder()} can not be deleted: {error.strerror}",
            fix="check the permissions of the cache's folder",
        ) from error
    return strategy.expected_freed_size


def _repos() -> Iterator[Any]:
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repos = scan_cache_dir(cache_folder()).repos
    except CacheNotFound:
        return
    yield from (repo for repo in repos if repo.repo_type == "model")


def _models_of(repo: Any) -> Iterator[CachedModel]:  # noqa: ANN401 - CachedRepoInfo
    """Yield each variant once: out of the revision that "main" names, else out of the newest that has it whole."""
    try:
        parse_name(repo.repo_id)
    except HubError:
        return
    revisions = sorted(
        repo.revisions, key=lambda each: ("main" in each.refs, each.last_modified), reverse=True
    )
    seen: set[str] = set()
    for revision in revisions:
        paths = {_inner_path(revision, file): file for file in revision.files}
        files = [checked_file(path, file.size_on_disk) for path, file in paths.items()]
        for variant in group_variants(file for file in files if file is not None):
            first = variant.files[0].path
            if not variant.num_missing and first not in seen:
                seen.add(first)
                yield CachedModel(repo.repo_id, variant, Path(paths[first].file_path))


def _inner_path(revision: Any, file: Any) -> str:  # noqa: ANN401 - CachedRevisionInfo, CachedFileInfo
    path: Path = Path(file.file_path).relative_to(revision.snapshot_path)
    return path.as_posix()

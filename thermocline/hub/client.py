"""Asks the hub what a repository has, and downloads a variant of it into the cache that other tools share.

All of it through huggingface_hub, which knows addresses, tokens, locks and the cache's layout. Knows no terminal.
"""

from __future__ import annotations

import hashlib
import shutil
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from thermocline.errors import HubError
from thermocline.hub.cache import cache_folder, endpoint, require_library
from thermocline.hub.faults import MAKE_ROOM, hub_errors
from thermocline.hub.variants import MAX_FILES, checked_file
from thermocline.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from thermocline.hub.names import HubName
    from thermocline.hub.variants import RepoFile, Variant

    # What is being done, and how many bytes more of it are done; fewer where something starts over.
    Listener = Callable[[str, int], None]

DOWNLOADING: Final = "downloading"
CHECKING: Final = "checking"
_CHUNK_BYTES: Final = 8 << 20
_ANSWER_TIMEOUT_S: Final = 10.0


def hub_files(name: HubName) -> tuple[RepoFile, ...]:
    """Return the files that the hub has under this name now, as far as their names and sizes make sense.

    Raises HubError; HubUnreachableError if the hub does not answer or may not be asked.
    """
    require_library()
    from huggingface_hub import HfApi

    with hub_errors(str(name)):
        info = HfApi(endpoint=endpoint()).model_info(
            name.repo, files_metadata=True, timeout=_ANSWER_TIMEOUT_S
        )
        # By what it declares: other programs' answers may have anything there.
        siblings: list[Any] = list(islice(info.siblings or (), MAX_FILES))
    listed = (
        checked_file(each.rfilename, each.size, getattr(each.lfs, "sha256", None))
        for each in siblings
    )
    return tuple(file for file in listed if file is not None)


def download(name: HubName, variant: Variant, listener: Listener) -> Path:
    """Bring all files of a variant into the cache, and return the first one's path there.

    Files that are there are not fetched again. A connection that breaks is taken up where it broke. A file appears under
    its name when it is whole, with the size and the SHA-256 that the hub has listed. Raises HubError.
    """
    require_library()
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    folder = cache_folder()
    with hub_errors(str(name)):
        missing = [
            file
            for file in variant.files
            if not isinstance(try_to_load_from_cache(name.repo, file.path, folder), str)
        ]
    _require_room(name, folder, sum(file.nbytes for file in missing))
    if missing:
        listener(DOWNLOADING, 0)
    snapshots: dict[Path, Path] = {}
    for file in variant.files:
        with hub_errors(str(name)):
            found = Path(
                hf_hub_download(
                    name.repo,
                    file.path,
                    cache_dir=folder,
                    endpoint=endpoint(),
                    library_name="thermocline",
                    tqdm_class=progress_class(listener),
                )
            )
            if file in missing:
                _require_whole(name, folder, found, file, listener)
        snapshots.setdefault(found.parents[file.path.count("/")], found)
    if len(snapshots) > 1:
        raise HubError(
            str(name),
            "the repository changed while its files were downloaded",
            fix="pull it again; what did not change is not downloaded twice",
        )
    return next(iter(snapshots.values()))


def progress_class(listener: Listener) -> Any:  # noqa: ANN401 - a class of a package without types
    """Return a progress bar for one file that shows nothing and tells the listener.

    A download may have two: what came over the network, and what is written. The one that is ahead counts.
    """
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined] # by its documentation

    base: Any = tqdm
    done_bytes: list[int] = []

    class Silent(base):  # type: ignore[misc] # without types
        def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - tqdm's own
            super().__init__(*args, **(kwargs | {"disable": True}))
            self._place = len(done_bytes)
            done_bytes.append(0)

        def update(self, n: float | None = 1) -> None:
            before = max(done_bytes)
            done_bytes[self._place] += int(n or 0)
            listener(DOWNLOADING, max(done_bytes) - before)

    return Silent


def _require_room(name: HubName, folder: Path, nbytes: int) -> None:
    there = next(each for each in (folder, *folder.parents) if each.exists())
    free_bytes = shutil.disk_usage(there).free
    if nbytes > free_bytes:
        raise HubError(
            str(name),
            f"{format_bytes(nbytes)} are to be downloaded, but {folder} has {format_bytes(free_bytes)} free",
            fix=MAKE_ROOM,
        )


def _require_whole(
    name: HubName, folder: Path, path: Path, file: RepoFile, listener: Listener
) -> None:
    """Check what was downloaded against the hub's list; what differs is removed. Raises HubError."""
    blob = path.resolve()
    if not blob.is_relative_to(folder.resolve()):
        path.unlink()
        raise HubError(
            str(name), f"the hub names a place outside {folder}", fix="do not use this HF_ENDPOINT"
        )
    what = ""
    if blob.stat().st_size != file.nbytes:
        what = f"has {blob.stat().st_size} bytes, and not {file.nbytes}"
    elif file.sha256 is not None and _sha256(blob, listener) != file.sha256:
        what = "has another SHA-256 than the hub's list says"
    if what:
        path.unlink()
        blob.unlink(missing_ok=True)
        raise HubError(
            str(name),
            f"{file.path} arrived damaged: it {what}; it was removed",
            fix="pull it again; if that repeats, something on the way changes files",
        )


def _sha256(path: Path, listener: Listener) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as content:
        while chunk := content.read(_CHUNK_BYTES):
            digest.update(chunk)
            listener(CHECKING, len(chunk))
    return digest.hexdigest()

"""Which models the files of a repository are: one variant per quantisation, of one file or of all its parts.

Pure: lists come from the hub or from its cache. The authors of a repository choose what its files are called and how
large they are said to be, so that nothing is taken over unchecked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from thermocline.errors import HubError
from thermocline.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

DEFAULT_QUANT: Final = "Q4_K_M"
MAX_FILES: Final = 10_000
"""Files of one repository that are looked at."""
MAX_FILE_BYTES: Final = 1 << 50
_MAX_PATH_CHARS: Final = 1024
_MAX_PART_BYTES: Final = 255

_SHARD: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})")
_QUANT: Final = re.compile(
    r"(?:^|[-_.])(?P<label>(?:UD-)?(?:I?Q[1-8](?:_[A-Z0-9]+)*|TQ[12]_0|[BF]?F16|F?F32|FP(?:16|32)|MXFP4(?:_MOE)?|NVFP4))"
    r"(?=$|[-.])",
    re.IGNORECASE,
)
# Parts of other models, and statistics, which have GGUF's form too.
_NO_MODEL: Final = re.compile(r"(?:^|[-_.])(?:mmproj|imatrix)(?:[-_.]|$)", re.IGNORECASE)
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class RepoFile:
    """One file: its path in the repository, its size, and its SHA-256 where it is known."""

    path: str
    nbytes: int
    sha256: str | None = None

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Variant:
    """One model of a repository: its files in order, the first one to be opened.

    label: its quantisation in capitals, "" where no name says it. num_missing: parts that the list does not have.
    """

    label: str
    files: tuple[RepoFile, ...]
    num_missing: int = 0

    @property
    def nbytes(self) -> int:
        """The size of all files."""
        return sum(file.nbytes for file in self.files)

    @property
    def selector(self) -> str:
        """What stands after the colon of a name to get this one, if no other variant has its label."""
        return self.label or self.files[0].name

    def __str__(self) -> str:
        return f"{self.selector} ({format_bytes(self.nbytes)})"


def checked_file(path: object, nbytes: object, sha256: object = None) -> RepoFile | None:
    """Return a file as somebody else describes it; None for what can be no file of a repository."""
    if not isinstance(path, str) or not _is_inside(path):
        return None
    if not isinstance(nbytes, int) or not 0 <= nbytes <= MAX_FILE_BYTES:
        return None
    known = isinstance(sha256, str) and _SHA256.fullmatch(sha256) is not None
    return RepoFile(path, nbytes, str(sha256) if known else None)


def _is_inside(path: str) -> bool:
    """Whether a path stays below the folder that it is appended to, and can be shown."""
    parts = path.split("/")
    return (
        len(path) <= _MAX_PATH_CHARS
        and path.isprintable()
        and "\\" not in path
        and all(part and part not in (".", "..") for part in parts)
        and all(len(part.encode()) <= _MAX_PART_BYTES for part in parts)
    )


def group_variants(files: Iterable[RepoFile]) -> tuple[Variant, ...]:
    """Return the models that these files are, smallest first; files that are no models are left out."""
    parts: dict[tuple[str, int], dict[int, RepoFile]] = {}
    for file in files:
        if not file.path.lower().endswith(".gguf") or _NO_MODEL.search(file.name[:-5]):
            continue
        stem = file.path[:-5]
        shard = _SHARD.fullmatch(stem)
        key = (stem, 1) if shard is None else (shard["stem"], int(shard["count"]))
        parts.setdefault(key, {})[1 if shard is None else int(shard["number"])] = file
    variants = [_variant(stem, count, found) for (stem, count), found in parts.items()]
    return tuple(sorted(variants, key=lambda each: (each.nbytes, each.files[0].path)))


def _variant(stem: str, count: int, found: dict[int, RepoFile]) -> Variant:
    files = tuple(found[number] for number in sorted(found) if 1 <= number <= count)
    if not files:  # numbers that are none of so many parts
        return Variant(_label(stem), tuple(found.values()), num_missing=max(1, count))
    return Variant(_label(stem), files, num_missing=count - len(files))


def _label(stem: str) -> str:
    """Return the quantisation that a file's name says, or the name of its folder."""
    folder, _, name = stem.rpartition("/")
    for text in (name, folder.rpartition("/")[2]):
        found = list(_QUANT.finditer(text))
        if found:
            return found[-1]["label"].upper()
    return ""


def choose(name: str, variants: Sequence[Variant], quant: str) -> Variant:
    """Return the variant that `quant` asks for: a quantisation, a file, or "" for the usual one.

    The usual one is Q4_K_M, or the only one that there is. Raises HubError, which lists what there is, if none or
    several fit, or if the one that fits lacks parts.
    """
    if not variants:
        raise HubError(
            name,
            "the repository has no GGUF file",
            fix="look for one whose name ends in -GGUF, or convert the model with llama.cpp's converter",
        )
    found = _matching(variants, quant)
    if len(found) != 1:
        files = [each.files[0].name for each in found]
        what = (
            f"{len(found)} models fit ({', '.join(files)})"
            if found
            else f"there is no {quant or DEFAULT_QUANT}, but {', '.join(map(str, variants))}"
        )
        fix = "type a file's name after the colon" if found else "type one of these after the colon"
        raise HubError(name, what, fix=fix)
    if found[0].num_missing:
        raise HubError(
            name,
            f"{found[0].num_missing} parts of {found[0].selector} are missing in the repository",
            fix="choose another quantisation, or tell the repository's author",
        )
    return found[0]


def _matching(variants: Sequence[Variant], quant: str) -> list[Variant]:
    wanted = (quant or DEFAULT_QUANT).lower()
    if wanted.endswith(".gguf"):
        return [each for each in variants if _has_file(each, wanted)]
    # UD- marks one author's mix of types; it counts as the type where that is not there itself.
    for prefix in ("", "ud-"):
        found = [each for each in variants if each.label.lower() == prefix + wanted]
        if found:
            return found
    return list(variants) if len(variants) == 1 and not quant else []


def _has_file(variant: Variant, wanted: str) -> bool:
    return any(wanted in (file.path.lower(), file.name.lower()) for file in variant.files)

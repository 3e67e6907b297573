"""GGUF files that Ollama and LM Studio keep on this machine: what they are called there, and where they are.

Reads their folders and never writes to them. Knows no model: a file that is listed may still be of a kind that can not
be run.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

from thermocline.hub.variants import checked_file, group_variants

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

OLLAMA: Final = "Ollama"
LM_STUDIO: Final = "LM Studio"
_MAX_FILES: Final = 100_000
_MAX_MANIFEST_BYTES: Final = 1 << 20
_WEIGHTS: Final = "application/vnd.ollama.image.model"
_DIGEST: Final = re.compile(r"sha256[:-]([0-9a-f]{64})")
# Left out of names, as Ollama does.
_OLLAMA_HOST: Final = "registry.ollama.ai"
_OLLAMA_OWNER: Final = "library"


@dataclass(frozen=True, slots=True)
class OtherModel:
    """A model of another program. name: as that program calls it. path: the file to open."""

    program: str
    name: str
    nbytes: int
    path: Path


def ollama_models(folder: Path) -> Iterator[OtherModel]:
    """Yield the models of one folder of Ollama's, which has `manifests` and `blobs`."""
    for manifest in _files_below(folder / "manifests"):
        digest = _weights_digest(manifest)
        if digest is None:
            continue
        blob = folder / "blobs" / f"sha256-{digest}"
        if blob.is_file():
            name = _ollama_name(manifest.relative_to(folder / "manifests").parts)
            yield OtherModel(OLLAMA, name, blob.stat().st_size, blob)


def lm_studio_models(folder: Path) -> Iterator[OtherModel]:
    """Yield the whole models below one folder of LM Studio's: PUBLISHER/REPOSITORY/FILE.gguf."""
    found = {path.relative_to(folder).as_posix(): path for path in _files_below(folder, ".gguf")}
    files = [checked_file(name, path.stat().st_size) for name, path in found.items()]
    for variant in group_variants(file for file in files if file is not None):
        first = variant.files[0].path
        if not variant.num_missing:
            yield OtherModel(LM_STUDIO, first, variant.nbytes, found[first])


def _ollama_name(parts: Sequence[str]) -> str:
    """Return HOST/OWNER/MODEL/TAG as Ollama writes it: MODEL:TAG where host and owner are its own."""
    *owners, tag = parts
    if owners[:1] == [_OLLAMA_HOST]:
        owners = owners[1:]
        if owners[:1] == [_OLLAMA_OWNER]:
            owners = owners[1:]
    return f"{'/'.join(owners)}:{tag}"


def _weights_digest(manifest: Path) -> str | None:
    """Return the SHA-256 of the weights that a manifest names, None if it names none."""
    try:
        with manifest.open("rb") as file:
            content = json.loads(file.read(_MAX_MANIFEST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    layers = content.get("layers") if isinstance(content, dict) else None
    for layer in layers if isinstance(layers, list) else ():
        if isinstance(layer, dict) and layer.get("mediaType") == _WEIGHTS:
            digest = _DIGEST.fullmatch(str(layer.get("digest")))
            return None if digest is None else digest[1]
    return None


def _files_below(folder: Path, suffix: str = "") -> Iterator[Path]:
    """Yield regular files in order of their names; links to folders are not followed."""

    def walk() -> Iterator[Path]:
        for here, folders, names in os.walk(folder):
            folders.sort()
            yield from (Path(here, name) for name in sorted(names))

    for path in islice(walk(), _MAX_FILES):
        if path.name.lower().endswith(suffix) and path.is_file():
            yield path

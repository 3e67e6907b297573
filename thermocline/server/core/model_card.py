"""The card of a model, read from its file's header. Knows no engine."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final

from thermocline.kernels.guarded_model import open_guarded_model
from thermocline.models.footprint import measure_footprint
from thermocline.server.core.settings import ModelCard

if TYPE_CHECKING:
    import os

_SHARD_OR_SUFFIX: Final = re.compile(r"(-\d{5}-of-\d{5})?(\.gguf)?$", re.IGNORECASE)


def plain_file_name(name: str) -> str:
    """Return a model's name by that of its file: without the number of a part, and without .gguf.

    Clients must be able to write it: what can not be shown, bytes that are no text among it, is another character.
    """
    plain = _SHARD_OR_SUFFIX.sub("", name)
    return "".join(character if character.isprintable() else "\ufffd" for character in plain)


def model_card(path: str | os.PathLike[str]) -> ModelCard:
    """Return the card of a model, from its file's header. Raises ModelError."""
    with open_guarded_model(path) as file:
        footprint, architecture = measure_footprint(file.tensors.values(), None), file.architecture
    bytes_by_format: Counter[str] = Counter()
    for share in footprint.formats:
        bytes_by_format[share.format] += share.total_bytes
    return ModelCard(
        id=plain_file_name(Path(path).name),
        num_parameters=footprint.num_parameters,
        total_bytes=footprint.total_bytes,
        quant=max(bytes_by_format, key=lambda name: bytes_by_format[name], default=""),
        architecture=architecture,
    )

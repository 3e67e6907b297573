"""Brings the beginning of a model's files alone, so that a model can be described and planned before it is downloaded.

What is written are files of full length that are empty behind their headers. They are for `info` and `plan`, and are
never put into the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from thermocline.hub.cache import endpoint, require_library
from thermocline.hub.client import DOWNLOADING, progress_class
from thermocline.hub.faults import hub_errors

if TYPE_CHECKING:
    from pathlib import Path

    from thermocline.hub.client import Listener
    from thermocline.hub.names import HubName
    from thermocline.hub.variants import Variant

FIRST_FILE_BYTES: Final = 32 << 20
"""Of a model's first file: the largest vocabularies need less."""
OTHER_FILE_BYTES: Final = 2 << 20
"""Of its other files, whose headers only list tensors."""


def fetch_headers(name: HubName, variant: Variant, folder: Path, listener: Listener) -> Path:
    """Write the beginnings of a variant's files into `folder`, and return the first one's path. Raises HubError."""
    require_library()
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get

    # Exported, as its documentation says.
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    listener(DOWNLOADING, 0)
    wanted_bytes = FIRST_FILE_BYTES
    for file in variant.files:
        end = min(file.nbytes, wanted_bytes)
        wanted_bytes = OTHER_FILE_BYTES
        with hub_errors(str(name)), (folder / file.name).open("xb") as content:
            if end:
                http_get(
                    hf_hub_url(name.repo, file.path, endpoint=endpoint()),
                    content,
                    headers=build_hf_headers() | {"Range": f"bytes=0-{end - 1}"},
                    expected_size=end,
                    tqdm_class=progress_class(listener),
                )
            content.truncate(file.nbytes)
    return folder / variant.files[0].name

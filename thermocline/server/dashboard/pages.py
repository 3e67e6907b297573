"""The files of the pages at `/` and `/docs`, each with its ETag. Knows no engine.

They hold nothing of the model and nothing secret, so they are served without an API key. A page asks its user for
the key.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Mapping

PAGE_PATH: Final = "/"
FILES_PATH: Final = "/page/"

_TYPES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "html": "text/html",
        "css": "text/css",
        "js": "text/javascript",
        "svg": "image/svg+xml",
    }
)
PAGE: Final = "page.html"
DOCS_PATH: Final = "/docs"
DOCS: Final = "docs.html"
PAGES: Final[Mapping[str, str]] = MappingProxyType({PAGE_PATH: PAGE, DOCS_PATH: DOCS})
"""The file of each page, by its path."""
# Scripts that the offline timeline page has too.
_SHARED: Final = ("model.js", "timeline.js", "controls.js")
_DASHBOARD: Final = (
    *("page.css", "docs.css", "icon.svg"),
    *("api.js", "markdown.js", "conversations.js", "chat.js", "live.js", "heat.js", "trace.js"),
    *("page.js", "docs.js"),
)
PAGE_FILES: Final = (*_SHARED, *_DASHBOARD)
"""The files that the pages load."""

# Browsers ask again each time, and get a 304.
_HEADERS: Final[Mapping[str, str]] = MappingProxyType({"Cache-Control": "no-cache"})


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file of the page."""

    content: bytes
    media_type: str
    tag: str

    def answer(self, request: web.Request) -> web.Response:
        """Return the file, or 304 for a client that has it."""
        known = request.if_none_match or ()
        is_known = any(tag.value in (self.tag, "*") for tag in known)
        response = web.Response(status=304 if is_known else 200, headers=dict(_HEADERS))
        response.etag = self.tag
        if not is_known:
            response.body = self.content
            response.content_type = self.media_type
            response.charset = "utf-8"
        return response


def load_page_files() -> Mapping[str, PageFile]:
    """Return the pages' files by name, the pages among them."""
    dashboard, shared = (
        files(f"thermocline.{room}") / "page" for room in ("server.dashboard", "traces")
    )
    folders = dict.fromkeys((*PAGES.values(), *_DASHBOARD), dashboard) | dict.fromkeys(
        _SHARED, shared
    )
    return MappingProxyType(
        {name: _page_file(name, (folder / name).read_bytes()) for name, folder in folders.items()}
    )


def _page_file(name: str, content: bytes) -> PageFile:
    digest = hashlib.blake2b(content, digest_size=12).hexdigest()
    return PageFile(content, _TYPES[name.rpartition(".")[2]], digest)

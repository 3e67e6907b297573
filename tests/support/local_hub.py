"""A hub of models on this machine, for the real client library: one class with its repositories, tokens and faults.

Answers what huggingface_hub asks: a repository's list, the redirect to a file, and the file, from any byte on.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
VALID_TOKEN = "hf_valid"


@dataclass
class Repo:
    """A repository. access: "open", "private" (for the valid token), "gated" or "forbidden" (its files, for nobody)."""

    files: dict[str, bytes]
    access: str = "open"
    commit: str = COMMIT
    listed: dict[str, object] = field(default_factory=dict)
    """What the list says of a path in place of the truth: its size."""


class LocalHub:
    """Serves `repos` on 127.0.0.1 while it is entered; `asked` is every request's method, path and range."""

    def __init__(self, repos: dict[str, Repo]) -> None:
        self.repos = repos
        self.asked: list[tuple[str, str, str]] = []
        self.cuts: list[int] = []
        """Of the next downloads, one each: after how many bytes the connection breaks."""
        self.stalled: threading.Event | None = None
        """Set as soon as half of a file is sent, whose rest does not come."""
        self.breaks_on = ""
        """End of the paths of files of which nothing comes."""
        self.has_xet = False
        """Whether files are said to be in a Xet store, which has none of them."""
        self.odd_answer = b""
        """What is answered in place of a list."""
        self.is_down = False
        """Whether every answer is 503."""
        self.spoils = False
        """Whether files arrive with another first byte."""
        self.told_cdn_the_token = False
        """Whether a token was sent to where the files are."""
        self._lock = threading.Lock()
        self._ends = threading.Event()

    def __enter__(self) -> Self:
        hub = self

        class Handler(_Handler):
            owner = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def url(self) -> str:
        """The address, for HF_ENDPOINT."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def downloads(self) -> list[tuple[str, str]]:
        """Path and range of every request for a file's bytes."""
        return [
            (path, bytes_range)
            for method, path, bytes_range in self.asked
            if method == "GET" and path.startswith("/cdn/")
        ]

    def stall(self) -> None:
        """Let a download wait for its second half until this hub ends."""
        assert self.stalled is not None
        self.stalled.set()
        self._ends.wait()

    def take_cut(self, start: int, content: bytes) -> tuple[bytes, bool]:
        """Return what of a file is sent now, and whether the connection breaks then."""
        with self._lock:
            cut = self.cuts.pop(0) if self.cuts else None
        sent = content[start:]
        return (sent, False) if cut is None else (sent[:cut], True)


class _Handler(BaseHTTPRequestHandler):
    owner: LocalHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._route()

    def do_GET(self) -> None:
        self._route()

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _route(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.owner.asked.append((self.command, path, self.headers.get("Range", "")))
        if path.startswith("/cdn/") and "Authorization" in self.headers:
            self.owner.told_cdn_the_token = True
        if self.owner.is_down:
            self._answer(503)
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/main)?", path):
            self._list(found[1])
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/main/(.+)", path):
            self._resolve(found[1], found[2])
        elif found := re.fullmatch(r"/cdn/([^/]+/[^/]+)/(.+)", path):
            if self.owner.breaks_on and path.endswith(self.owner.breaks_on):
                self.owner.cuts = [0]
            self._send(self.owner.repos[found[1]].files[found[2]])
        elif path == "/xet":
            told = {
                "Cas-Url": self.owner.url,
                "Access-Token": "t",
                "Token-Expiration": str(1 << 40),
            }
            self._answer(200, headers={f"X-Xet-{name}": text for name, text in told.items()})
        else:
            self._answer(404)

    def _refusal(self, name: str, *, for_file: bool) -> tuple[int, dict[str, str]] | None:
        """Return status and headers where the real hub refuses; as it does, others' repositories look absent."""
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if given and given != VALID_TOKEN:
            return 401, {"X-Error-Message": "Invalid credentials in Authorization header"}
        repo = self.owner.repos.get(name)
        if repo is None or (repo.access == "private" and not given):
            return 404 if given else 401, {"X-Error-Code": "RepoNotFound"}
        if repo.access == "gated" and for_file:
            return 403 if given else 401, {"X-Error-Code": "GatedRepo"}
        if repo.access == "forbidden" and for_file:
            return 403, {"X-Error-Message": "this token may only write"}
        return None

    def _list(self, name: str) -> None:
        refusal = self._refusal(name, for_file=False)
        if refusal is not None:
            self._answer(refusal[0], headers=refusal[1])
            return
        if self.owner.odd_answer:
            self._answer(200, self.owner.odd_answer)
            return
        repo = self.owner.repos[name]
        siblings = []
        for path, content in repo.files.items():
            size = repo.listed.get(path, len(content))
            digest = hashlib.sha256(content).hexdigest()
            lfs = {"sha256": digest, "size": size, "pointerSize": 134}
            siblings.append({"rfilename": path, "size": size, "blobId": "0" * 40, "lfs": lfs})
        body = {"_id": "1", "id": name, "modelId": name, "sha": repo.commit, "siblings": siblings}
        self._answer(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _resolve(self, name: str, path: str) -> None:
        refusal = self._refusal(name, for_file=True)
        if refusal is not None:
            self._answer(refusal[0], headers=refusal[1])
            return
        repo = self.owner.repos[name]
        content = repo.files.get(path)
        commit = {"X-Repo-Commit": repo.commit}
        if content is None:
            self._answer(404, headers=commit | {"X-Error-Code": "EntryNotFound"})
            return
        headers = commit | {
            # Another host for the client, as the real hub's files are on other ones than its lists.
            "Location": f"{self.owner.url.replace('127.0.0.1', 'localhost')}/cdn/{name}/{path}",
            "X-Linked-Size": str(len(content)),
            "X-Linked-Etag": f'"{hashlib.sha256(content).hexdigest()}"',
        }
        if self.owner.has_xet:
            headers |= {"X-Xet-Hash": "ab" * 32, "X-Xet-Refresh-Route": f"{self.owner.url}/xet"}
        self._answer(302, headers=headers)

    def _send(self, content: bytes) -> None:
        if self.owner.spoils:
            content = bytes([content[0] ^ 1]) + content[1:]
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start = int(found[1]) if found else 0
        end = int(found[2]) + 1 if found and found[2] else len(content)
        whole_length, content = len(content), content[:end]
        sent, breaks = self.owner.take_cut(start, content)
        self.send_response(206 if found else 200)
        self.send_header("Content-Length", str(len(content) - start))
        if found:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{whole_length}")
        self.end_headers()
        if self.command == "GET" and self.owner.stalled is not None:
            self.wfile.write(sent[: len(sent) // 2])
            self.owner.stall()
            breaks = True
        elif self.command == "GET":
            self.wfile.write(sent)
        if breaks:
            self.wfile.flush()
            self.close_connection = True

    def _answer(
        self, status: int, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

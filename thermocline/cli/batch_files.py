"""The two files of a batch: requests in, answers out, each a JSON object per line as in OpenAI's batches.

The answers' file says how far a batch is: what is in it whole is not asked again. Knows no model and no server.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Final, Literal, Self

import msgspec

from thermocline.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

URLS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
_FIRST_BYTES: Final = b'{"id":"batch_req_'
_MAX_ID_CHARS: Final = 512


class BatchRequest(msgspec.Struct, frozen=True):
    """A line of the requests' file."""

    custom_id: str
    url: Literal[URLS]  # type: ignore[valid-type] # a tuple of literals
    body: dict[str, Any]
    method: Literal["POST"] = "POST"


class BatchResponse(msgspec.Struct, frozen=True):
    """What the server answered. body: JSON."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchAnswer(msgspec.Struct, frozen=True):
    """A line of the answers' file. error: None, as there is a response."""

    id: str
    custom_id: str
    response: BatchResponse | None
    error: None = None


@dataclass(frozen=True, slots=True)
class BatchFiles:
    """Where the requests are, and where the answers go."""

    requests: Path
    answers: Path

    def check(self) -> frozenset[str]:
        """Return the ids of all requests. Raises RequestError for a line of no use, ConfigError for the files."""
        if not self.requests.is_file():
            raise ConfigError(f"--batch {self.requests} is no file: save the requests in one")
        if self.answers.exists() and self.answers.samefile(self.requests):
            raise ConfigError("--batch and --out are the same file: name another --out")
        numbers: dict[str, int] = {}
        for number, request in self.numbered():
            if request.custom_id in numbers:
                first = numbers[request.custom_id]
                raise RequestError(
                    f"{self.requests} has custom_id {request.custom_id!r} in the lines {first} and {number}: give each "
                    "request one of its own"
                )
            numbers[request.custom_id] = number
        if not numbers:
            raise RequestError(f"{self.requests} has no requests: write one on each line")
        return frozenset(numbers)

    def numbered(self) -> Iterator[tuple[int, BatchRequest]]:
        """Yield the requests with the numbers of their lines. Raises RequestError for a line of no use."""
        with self.requests.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, self._request(number, line)

    def _request(self, number: int, line: bytes) -> BatchRequest:
        where = f"{self.requests} line {number}"
        try:
            request = msgspec.json.decode(line, type=BatchRequest)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RequestError(
                f"{where}: {error}; a line is {{"
                '"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}'
                f", url one of {', '.join(URLS)}"
            ) from error
        if not 0 < len(request.custom_id) <= _MAX_ID_CHARS:
            raise RequestError(f"{where}: custom_id must have 1 to {_MAX_ID_CHARS} characters")
        if request.body.get("stream"):
            raise RequestError(f"{where}: stream is true, but a batch has no streams: leave it out")
        return request


class AnswerFile:
    """The answers so far. `answered` has the ids of those that need not be asked again."""

    def __init__(self, path: Path, file: IO[bytes], answered: set[str]) -> None:
        self._path = path
        self._file = file
        self.answered = answered

    @classmethod
    @contextmanager
    def opened(cls, path: Path, known: frozenset[str]) -> Iterator[Self]:
        """Open the file, or make it, and mend its end: a line that was cut goes.

        known: the ids of the batch. Raises ConfigError for a file that is of another batch, of no batch, or being
        written by another process.
        """
        with path.open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ConfigError(
                    f"--out {path} is being written by another batch: wait for its end"
                ) from error
            answered = cls._mend(path, known)
            with path.open("ab", buffering=0) as file:
                yield cls(path, file, answered)

    def append(self, answer: BatchAnswer) -> None:
        """Add an answer. Raises OSError."""
        line = msgspec.json.encode(answer) + b"\n"
        while line:  # a nearly full disk takes a part
            line = line[self._file.write(line) :]
        self.answered.add(answer.custom_id)

    @classmethod
    def _mend(cls, path: Path, known: frozenset[str]) -> set[str]:
        answered: set[str] = set()
        size = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                answer = _answer(line)
                if not line.endswith(b"\n") and _is_beginning(line):
                    os.truncate(path, size)  # written when the process ended
                    break
                if answer is None:
                    raise ConfigError(
                        f"--out {path} line {number} is no answer of a batch: name another file"
                    )
                if answer.custom_id not in known:
                    raise ConfigError(
                        f"--out {path} line {number} answers {answer.custom_id!r}, which is not in this batch: name "
                        "another file"
                    )
                answered.add(answer.custom_id)
                size += len(line)
        return answered


def _is_beginning(line: bytes) -> bool:
    return line[: len(_FIRST_BYTES)] == _FIRST_BYTES[: len(line)]


def _answer(line: bytes) -> BatchAnswer | None:
    try:
        return msgspec.json.decode(line, type=BatchAnswer)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None

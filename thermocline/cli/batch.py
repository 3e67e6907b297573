"""`thermocline run --batch`: answers many requests out of a file, and goes on where it was when it is run again.

The requests go to the server of this package, which listens on this machine with a key of its own, so that each is
answered as a client of it would be. Knows the files' lines from batch_files.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec

from thermocline.cli.batch_files import AnswerFile, BatchAnswer, BatchResponse
from thermocline.cli.console import Progress, note, remark
from thermocline.cli.session import announce
from thermocline.errors import EngineError, ThermoclineError
from thermocline.server.app import running_server
from thermocline.server.core.model_card import model_card
from thermocline.server.core.settings import ServerConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from thermocline.cli.batch_files import BatchFiles, BatchRequest
    from thermocline.config import EngineConfig

_BUSY: Final = 429
_GONE: Final = 503
_WAIT_S: Final = 0.25
_MAX_WAIT_S: Final = 5.0


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    output_tokens: int = 0


class _AnswerBody(msgspec.Struct):
    usage: _Usage | None = None


@dataclass(slots=True)
class _Tally:
    """How far a batch is. num_known: answers that were there before."""

    total: int
    num_known: int
    num_done: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    started_s: float = field(default_factory=time.monotonic)

    def add(self, status: int, body: bytes) -> None:
        """Count an answer."""
        self.num_done += 1
        self.num_failed += status != 200
        try:
            usage = msgspec.json.decode(body, type=_AnswerBody).usage
        except msgspec.DecodeError:
            return
        if usage is not None:
            self.num_tokens += usage.completion_tokens + usage.output_tokens

    def progress(self) -> str:
        """Return how far it is, and how long the rest will take."""
        seconds = time.monotonic() - self.started_s
        left = self.total - self.num_known - self.num_done
        text = f"{self.num_known + self.num_done} of {self.total} requests answered"
        if not self.num_done:
            return text
        left_s = left * seconds / self.num_done
        rest = f"{left_s / 60:.0f} min" if left_s >= 90 else f"{left_s:.0f} s"
        return f"{text}, {self.num_tokens / seconds:.1f} tokens/s, about {rest} left"

    def summary(self) -> str:
        """Return what was done."""
        known = f", {self.num_known} were answered before" if self.num_known else ""
        failed = f", {self.num_failed} of them with an error" if self.num_failed else ""
        return f"[{self.num_done} requests answered{failed}{known}]"


async def run_batch(files: BatchFiles, path: str, config: EngineConfig, *, explains: bool) -> None:
    """Answer the requests that have no answer yet.

    path: of the model. explains: print what the engine chose. Raises RequestError and ConfigError for files of no use,
    what opening a model raises, and EngineError when the engine can not go on.
    """
    known = await asyncio.to_thread(files.check)
    with AnswerFile.opened(files.answers, known) as answers:
        tally = _Tally(len(known), len(answers.answered))
        if tally.num_known < tally.total:
            try:
                await _answer_all(files, answers, tally, (path, config), explains=explains)
            except asyncio.CancelledError:
                note("[stopped: the same command goes on from here]")
                raise
        remark(tally.summary())


async def _answer_all(
    files: BatchFiles,
    answers: AnswerFile,
    tally: _Tally,
    model: tuple[str, EngineConfig],
    *,
    explains: bool,
) -> None:
    path, config = model
    key = secrets.token_urlsafe(32)
    settings = ServerConfig(
        port=0, api_keys=(key,), any_model=True, on_model_change="exit", shutdown_timeout_s=0.0
    )
    # Below both limits of the engine, so that it never says that it is busy to requests of one answer.
    num_workers = min(config.scheduler.max_requests, config.scheduler.max_queue)
    with Progress() as progress:
        progress.say("opening the model")
        async with running_server(path, config, settings, model_card(path)) as server:
            engine = (await server.wait_opened()).engine
            progress.clear()
            announce(engine, explains=explains)
            tally.started_s = time.monotonic()
            progress.say(tally.progress())
            left = (each for _, each in files.numbered() if each.custom_id not in answers.answered)
            async with aiohttp.ClientSession(
                server.url,
                headers={"Authorization": f"Bearer {key}"},
                timeout=aiohttp.ClientTimeout(total=None),
                connector=aiohttp.TCPConnector(limit=num_workers),
            ) as client:
                worker = _Worker(client, left, answers, tally, progress)
                try:
                    async with asyncio.TaskGroup() as group:
                        for _ in range(min(num_workers, tally.total - tally.num_known)):
                            group.create_task(worker.work())
                except* (ThermoclineError, OSError) as errors:
                    raise errors.exceptions[0] from errors


@dataclass(frozen=True, slots=True)
class _Worker:
    """Takes a request when it has answered the one before: as many as there are workers are under way."""

    client: aiohttp.ClientSession
    requests: Iterator[BatchRequest]
    answers: AnswerFile
    tally: _Tally
    progress: Progress

    async def work(self) -> None:
        """Answer requests until there is none. Raises EngineError when the engine can not go on."""
        for request in self.requests:
            response = await self._ask(request)
            number = f"batch_req_{secrets.token_hex(12)}"
            self.answers.append(BatchAnswer(number, request.custom_id, response))
            self.tally.add(response.status_code, bytes(response.body))
            self.progress.say(self.tally.progress())

    async def _ask(self, request: BatchRequest) -> BatchResponse:
        body = msgspec.json.encode(request.body)
        wait_s = _WAIT_S
        while True:
            status, request_id, answer = await self._post(request.url, body)
            if status == _GONE:
                raise EngineError(f"the model can not answer any more: {answer.decode()[:400]}")
            # Requests of many answers may be more than the engine takes at a time.
            if status != _BUSY:
                return BatchResponse(status, request_id, msgspec.Raw(answer))
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _MAX_WAIT_S)

    async def _post(self, url: str, body: bytes) -> tuple[int, str, bytes]:
        headers = {"Content-Type": "application/json"}
        try:
            async with self.client.post(url, data=body, headers=headers) as response:
                answer = await response.read()
                return response.status, response.headers.get("X-Request-Id", ""), answer
        except aiohttp.ClientError as error:
            raise EngineError(
                f"the model can not answer any more ({error}): run the command again"
            ) from error

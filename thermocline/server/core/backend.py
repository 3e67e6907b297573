"""The engine behind the routes, from its opening in the background to its close, and its model. Knows no HTTP.

When the model's file is changed, the engine ends; another one is opened as soon as the file is whole.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
import os
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from thermocline import __version__
from thermocline.engine.api import Engine
from thermocline.errors import EngineError, ModelChangedError
from thermocline.server.core.errors import LoadingError
from thermocline.server.core.model_card import model_card

if TYPE_CHECKING:
    from collections.abc import Callable

    from thermocline.config import EngineConfig
    from thermocline.engine.assembly import LoadStep
    from thermocline.server.core.settings import ModelCard

# The start of a GGUF file: its header holds every tensor's name, type and offset.
_FINGERPRINTED_BYTES: Final = 1 << 20
_LOG: Final = logging.getLogger("thermocline.server")

# How often an idle engine's file is looked at. A busy engine looks at each step.
_LOOK_S: Final = 1.0
# A file is opened again when it was left alone for so long. One that could not be opened is tried again when it changes,
# or after the longer time.
_QUIET_S: Final = 0.5
_TRY_AGAIN_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A model that can answer. fingerprint: changes with the version and with the file."""

    engine: Engine
    card: ModelCard
    fingerprint: str
    opened_at: int

    def as_body(self) -> dict[str, Any]:
        """Return OpenAI's model object, with the model's dimensions as `meta`."""
        spec = self.engine.spec
        return {
            "id": self.card.id,
            "object": "model",
            "created": self.opened_at,
            "owned_by": "thermocline",
            "meta": {
                "n_ctx": self.engine.max_context_tokens,
                "n_ctx_train": spec.context_length,
                "n_params": self.card.num_parameters,
                "size": self.card.total_bytes,
                "n_vocab": spec.vocab_size,
                "n_layer": spec.num_layers,
                "n_expert": spec.router.num_experts,
                "n_expert_used": spec.router.num_experts_used,
                "quant": self.card.quant,
            },
        }


class Backend:
    """Owns the engine from `start` to `close`."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        config: EngineConfig,
        card: ModelCard,
        *,
        reopens: bool = True,
    ) -> None:
        """reopens: whether a model whose file was changed is opened again."""
        self._path = path
        self._config = config
        self.card = card
        self._reopens = reopens
        self._opened: asyncio.Future[OpenModel] = asyncio.get_running_loop().create_future()
        self._given_up: asyncio.Future[ModelChangedError] = (
            asyncio.get_running_loop().create_future()
        )
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._opening = Engine.open(path, config)
        self._started_s = time.monotonic()
        self._change: ModelChangedError | None = None

    def start(self) -> None:
        """Begin to open the model in the background."""
        self._task = asyncio.create_task(self._hold(), name="engine holder")

    async def close(self) -> None:
        """Close the engine; running answers end with EngineClosedError. More calls do nothing.

        Opening can not be interrupted: a close meanwhile waits until it has ended.
        """
        self._closing.set()
        if self._task is not None:
            await asyncio.wait({self._task})

    @property
    def load_step(self) -> LoadStep | None:
        """The present or last step of opening; None before the first."""
        return self._opening.load_step

    @property
    def seconds_opening(self) -> float:
        """Seconds since opening began."""
        return time.monotonic() - self._started_s

    @property
    def model(self) -> OpenModel:
        """The model. Raises LoadingError while it is being opened, and what opening raised.

        ModelChangedError from a change of its file until it is open again.
        """
        if self._change is not None:
            raise ModelChangedError(self._change.path, self._change.what)
        if not self._opened.done():
            step = self.load_step
            steps = [] if step is None else list(type(step))
            raise LoadingError(step or "", steps.index(step) if step else 0, len(steps))
        return self._opened.result()

    @property
    def is_open(self) -> bool:
        """Whether the model is open."""
        return self._opened.done() and self._opened.exception() is None

    @property
    def has_failed(self) -> bool:
        """Whether opening it has failed."""
        return self._opened.done() and self._opened.exception() is not None

    @property
    def has_died(self) -> bool:
        """Whether the engine has ended by itself, and not because its file was changed."""
        return self.is_open and self._change is None and not self._opened.result().engine.is_running

    def when_ended(self, tell: Callable[[], object]) -> None:
        """Call `tell` once, soon after the first opening has ended, however it did."""
        self._opened.add_done_callback(lambda _: tell())

    def when_given_up(self, tell: Callable[[ModelChangedError], object]) -> None:
        """Call `tell` once the model's file was changed and nobody opens it again."""
        self._given_up.add_done_callback(lambda done: tell(done.result()))

    async def wait_opened(self) -> OpenModel:
        """Wait until the model is open. Raises what opening raised."""
        return await asyncio.shield(self._opened)

    async def _hold(self) -> None:
        try:
            change = await self._run(self.card)
        except Exception as error:
            if self._opened.done():
                raise
            self._opened.set_exception(error)
            # Retrieved here, in case that nothing awaits it.
            self._opened.exception()
            return
        while change is not None:
            self._change = change
            if not self._reopens:
                self._given_up.set_result(change)
                return
            _LOG.warning("%s; the server does so as soon as the file is whole", change)
            self._opened = asyncio.get_running_loop().create_future()
            change = await self._reopen(change)

    async def _run(self, card: ModelCard) -> ModelChangedError | None:
        """Open the engine, and hold it until `close`, or until its file was changed; that is returned."""
        async with self._opening as engine:
            await engine.prepare_constraints()
            fingerprint = await asyncio.to_thread(file_fingerprint, Path(self._path))
            self.card, self._change = card, None
            self._opened.set_result(OpenModel(engine, card, fingerprint, int(time.time())))
            closing = asyncio.create_task(self._closing.wait(), name="close of the model")
            ended = asyncio.create_task(engine.wait_ended(), name="end of the engine")
            try:
                return await self._until_changed(engine, closing, ended)
            finally:
                closing.cancel()
                ended.cancel()

    async def _until_changed(
        self, engine: Engine, closing: asyncio.Task[Any], ended: asyncio.Task[Any]
    ) -> ModelChangedError | None:
        while True:
            first = asyncio.FIRST_COMPLETED
            done, _ = await asyncio.wait({closing, ended}, timeout=_LOOK_S, return_when=first)
            if closing in done:
                return None
            if ended in done:
                why = engine.why_ended()
                if isinstance(why, ModelChangedError):
                    return why
                await closing  # the engine failed otherwise, and says so to who asks
                return None
            with suppress(EngineError):  # it has just ended
                await engine.check_model()

    async def _reopen(self, change: ModelChangedError) -> ModelChangedError | None:
        """Open the model again when its file is left alone; return the next change of it, None after `close`."""
        self._opening = Engine.open(self._path, self._config)
        paths = sorted({os.fspath(self._path), change.path})
        seen, next_try_s = _signature(paths), 0.0
        while not await self._closes_within(_QUIET_S):
            before, seen = seen, _signature(paths)
            if seen != before:
                next_try_s = 0.0
                continue
            if time.monotonic() < next_try_s:
                continue
            self._opening, self._started_s = Engine.open(self._path, self._config), time.monotonic()
            # Parts of the ended engine refer to each other. Its cache and mappings go before there are two of them.
            await asyncio.to_thread(gc.collect)
            try:
                card = await asyncio.to_thread(model_card, self._path)
                return await self._run(replace(card, id=self.card.id))
            except Exception as error:
                if self._opened.done():
                    raise
                what = f"{change.what}; it can not be opened again yet: {error}"
                self._change = ModelChangedError(change.path, what)
                next_try_s = time.monotonic() + _TRY_AGAIN_S
        return None

    async def _closes_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._closing.wait()
        except TimeoutError:
            return False
        return True


def _signature(paths: list[str]) -> list[tuple[int, ...] | None]:
    """Return what differs when one of the files was written to or replaced."""
    found: list[tuple[int, ...] | None] = []
    for path in paths:
        try:
            status = os.stat(path)  # noqa: PTH116 - kept as given
        except OSError:
            found.append(None)
            continue
        found.append((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
    return found


def file_fingerprint(path: Path) -> str:
    """Return what changes with this version and with the file, by its beginning and size. Raises OSError."""
    with path.open("rb") as file:
        header = file.read(_FINGERPRINTED_BYTES)
    digest = hashlib.blake2b(header, digest_size=6)
    digest.update(str(path.stat().st_size).encode())
    return f"thermocline-{__version__}-{digest.hexdigest()}"

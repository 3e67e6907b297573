"""Opens and closes an engine around a block of code."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thermocline.engine.api import Engine
    from thermocline.engine.assembly import LoadStep
    from thermocline.engine.thread import EngineThread


class EngineContext:
    """Opens an engine on entry and closes it on exit."""

    def __init__(self, engine: Engine, thread: EngineThread) -> None:
        self._engine = engine
        self._thread = thread

    def __repr__(self) -> str:
        return f"EngineContext({self._thread})"

    @property
    def load_step(self) -> LoadStep | None:
        """What opening does at present, or did last; None before it began."""
        return self._thread.load_step

    async def __aenter__(self) -> Engine:
        self._thread.start()
        try:
            await self._thread.wait_ready()
        except BaseException:
            self._thread.request_close()
            await self._thread.wait_ended()
            raise
        return self._engine

    async def __aexit__(self, *_: object) -> None:
        self._thread.request_close()
        await self._thread.wait_ended()

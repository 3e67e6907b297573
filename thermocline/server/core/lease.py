"""A request's hold of a model: while there is one, the model is not unloaded. Knows no pool."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from thermocline.server.core.backend import Backend, OpenModel


class ModelLease:
    """Waits for a model, then holds it until `release`."""

    def __init__(self, on_release: Callable[[], None]) -> None:
        self._on_release = on_release
        self._granted: asyncio.Future[Backend] = asyncio.get_running_loop().create_future()
        self._is_released = False
        self._model: OpenModel | None = None

    @property
    def backend(self) -> Backend | None:
        """What holds the model; None while this waits."""
        is_granted = self._granted.done() and not self._granted.cancelled()
        if not is_granted or self._granted.exception() is not None:
            return None
        return self._granted.result()

    @property
    def model(self) -> OpenModel:
        """The model, after `open`."""
        if self._model is None:
            raise RuntimeError("the lease is not open")
        return self._model

    def grant(self, backend: Backend) -> None:
        """Hand the model over."""
        if not self._granted.done():
            self._granted.set_result(backend)

    def refuse(self, error: Exception) -> None:
        """Tell who waits that the model can not be had."""
        if not self._granted.done():
            self._granted.set_exception(error)
            self._granted.exception()  # retrieved here, in case that nobody waits any more

    async def wait_granted(self) -> Backend:
        """Wait until the model is handed over. Raises what it was refused with."""
        return await asyncio.shield(self._granted)

    def open(self) -> None:
        """Take the model. Raises what `Backend.model` raises."""
        backend = self.backend
        if backend is None:
            raise RuntimeError("the lease was not granted")
        self._model = backend.model

    def release(self) -> None:
        """Give the model back. More calls do nothing."""
        if not self._is_released:
            self._is_released = True
            self._on_release()

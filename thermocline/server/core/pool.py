"""Owns the models of a server: loads them when requests ask, and unloads them when their time or the memory is over.

One task loads and unloads; requests hold leases and wait. Knows no HTTP and no engine's inside. What goes to make room is
decided in `room.py`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from thermocline.engine.needs import model_needs
from thermocline.errors import (
    BusyError,
    ConfigError,
    ModelChangedError,
    RequestError,
    ThermoclineError,
)
from thermocline.prefetch.memory import page_cache_room_bytes
from thermocline.server.core.backend import Backend
from thermocline.server.core.errors import (
    ModelNotFoundError,
    NoModelLoadedError,
    NotLoadedError,
)
from thermocline.server.core.keep_alive import DEFAULT_KEEP_ALIVE_S, FOREVER
from thermocline.server.core.lease import ModelLease
from thermocline.server.core.place import NO_NEEDS, ModelState, Place, grant_all, require_pinned
from thermocline.server.core.room import LoadedModel, models_to_unload
from thermocline.units import format_bytes

if TYPE_CHECKING:
    from thermocline.server.core.backend import OpenModel
    from thermocline.server.core.catalogue import Catalogue, ModelSource
    from thermocline.server.core.settings import ServerConfig

_LOG: Final = logging.getLogger("thermocline.server")
_SHOWN_NAMES: Final = 20
_ENDING: Final = "the server is shutting down: send the request elsewhere"


class ModelPool:
    """The models of one server, from `start` to `close`."""

    def __init__(self, catalogue: Catalogue, config: ServerConfig) -> None:
        self._catalogue = catalogue
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._default_keep_alive_s = DEFAULT_KEEP_ALIVE_S
        if config.keep_alive_s is not None:
            self._default_keep_alive_s = config.keep_alive_s
        self._places: dict[str, Place] = {}
        self._wishes: dict[str, None] = {}
        """Models that somebody waits for, in the order in which they were asked for."""
        self._making_room_for: str | None = None
        """The wish for which models are leaving."""
        self._stir = asyncio.Event()
        self._gone = asyncio.Event()
        """Set when the next model has been unloaded, and then another one."""
        self._reading = asyncio.Lock()
        self._read_at_s = -1.0
        self._is_closing = False
        self._keeper: asyncio.Task[None] | None = None
        self._given_up: asyncio.Future[ModelChangedError] = self._loop.create_future()
        self.budget_bytes = config.models_memory_bytes or page_cache_room_bytes()
        """What models may take of the memory together."""
        self.total_loads: Counter[str] = Counter()
        """By model."""
        self.total_unloads: Counter[tuple[str, str]] = Counter()
        """By model and reason: idle, memory or asked."""
        self._take(catalogue.read())

    def __repr__(self) -> str:
        loaded = sum(place.backend is not None for place in self._places.values())
        return f"ModelPool({loaded} of {len(self._places)} models loaded)"

    def start(self) -> None:
        """Begin to open the models that are there from the start, and to serve leases."""
        for name, place in self._places.items():
            if place.model.is_pinned:
                self._open(name, place)
        self._keeper = asyncio.create_task(self._keep(), name="model keeper")
        self._keeper.add_done_callback(_tell_failure)

    async def close(self) -> None:
        """Close all engines; running answers end with EngineClosedError. More calls do nothing."""
        self._is_closing = True
        self._stir.set()
        if self._keeper is not None:
            await asyncio.shield(self._keeper)
        backends = [place.backend for place in self._places.values() if place.backend is not None]
        await asyncio.gather(*(backend.close() for backend in backends))

    async def wait_opened(self) -> OpenModel | None:
        """Wait until the models that are there from the start are open; return the first. Raises what opening raised."""
        opened = [
            await place.backend.wait_opened()
            for place in tuple(self._places.values())
            if place.model.is_pinned and place.backend is not None
        ]
        return opened[0] if opened else None

    async def wait_given_up(self) -> ModelChangedError:
        """Wait until a model's file was changed and nobody opens it again; return what happened to it."""
        return await asyncio.shield(self._given_up)

    @property
    def shown(self) -> Backend:
        """The model that pages without a name are about: the one that was used last.

        Raises NoModelLoadedError when none is in memory.
        """
        return self._shown(None)

    def opened(self, name: str | None = None) -> OpenModel:
        """Return a model that is open, by its name or as `shown`, without loading it. Raises what `Backend.model` does."""
        return self._shown(name).model

    async def lease(self, name: str | None, keep_alive_s: float | None = None) -> ModelLease:
        """Return a lease of a model that is open, and load it if need be. None and "": the only one, or the last used.

        keep_alive_s: how long it stays when the lease is released, until a request says otherwise. Waits up to
        `load_timeout_s`, but not for a model that is there from the start. Raises ModelNotFoundError, NotLoadedError, and
        what `Backend.model` raises.
        """
        name, place = await self._find(name)
        lease = ModelLease(lambda: self._release(place, lease))
        if keep_alive_s is None:
            keep_alive_s = self._keep_alive_of(place.model)
        if not place.model.is_pinned:
            place.keep_alive_s = keep_alive_s
        if self._is_closing and not place.model.is_pinned:
            raise NotLoadedError(_ENDING)
        place.waiting[lease] = None
        if place.backend is not None and place.takes_requests:
            grant_all(place, place.backend)
        else:
            self._wishes[name] = None
            self._stir.set()
        place.last_used_s = self._loop.time()
        try:
            await self._wait_opened(name, place, lease)
        except BaseException:
            lease.release()
            raise
        return lease

    async def unload(self, name: str | None) -> None:
        """Let a model go as soon as nobody uses it; one that is there from the start stays. Raises ModelNotFoundError."""
        _, place = await self._find(name)
        if not place.model.is_pinned:
            place.keep_alive_s = 0.0
            self._stir.set()

    async def evict(self, name: str) -> None:
        """Unload a model, and wait until it is. Raises BusyError if it is used for longer than `load_timeout_s`."""
        place = self._places[name]
        try:
            async with asyncio.timeout(self._config.load_timeout_s):
                while place.backend is not None:
                    place.keep_alive_s = 0.0
                    self._stir.set()
                    await self._gone.wait()
        except TimeoutError:
            raise BusyError(f"the model {name!r} answers requests: try again later") from None

    async def models(self) -> list[ModelState]:
        """Return all models that there are now, by name.

        Raises what `Backend.model` raises for a model that is there from the start and can not answer.
        """
        await self._read_again()
        for place in self._places.values():
            require_pinned(place)
        return self.states()

    async def find(self, name: str | None) -> ModelState:
        """Return one model by its name. Raises ModelNotFoundError, and like `models`."""
        _, place = await self._find(name)
        require_pinned(place)
        return self._state(place)

    def is_pinned(self, name: str) -> bool:
        """Whether a model is there from the start to the end."""
        return name in self._places and self._places[name].model.is_pinned

    def states(self) -> list[ModelState]:
        """Return all models as they were known last, by name."""
        return [self._state(place) for _, place in sorted(self._places.items())]

    async def _find(self, name: str | None) -> tuple[str, Place]:
        if not name:
            name = self._default_name()
        if name not in self._places:
            await self._read_again()
        found = next((each for each in _spellings(name) if each in self._places), None)
        if found is None:
            known = sorted(self._places)
            more = f" and {len(known) - _SHOWN_NAMES} more" if len(known) > _SHOWN_NAMES else ""
            there = ", ".join(map(repr, known[:_SHOWN_NAMES])) + more
            raise ModelNotFoundError(
                f"the model {name!r} is not served here: ask for {there or 'one that was pulled'}",
                param="model",
            )
        return found, self._places[found]

    def _default_name(self) -> str:
        """Return the name of the only model, or of the last used one that is loaded. Raises RequestError."""
        if len(self._places) == 1:
            return next(iter(self._places))
        loaded = [name for name, place in self._places.items() if place.backend is not None]
        if loaded:
            return max(loaded, key=lambda name: self._places[name].last_used_s)
        raise RequestError(
            "this server has several models: name one (GET /v1/models lists them)", param="model"
        )

    def _shown(self, name: str | None) -> Backend:
        if name is None:
            pinned = [each for each, place in self._places.items() if place.model.is_pinned]
            loaded = [each for each, place in self._places.items() if place.backend is not None]
            name = next(iter(pinned), None) or max(
                loaded, key=lambda each: self._places[each].last_used_s, default=None
            )
        elif name not in self._places:
            raise ModelNotFoundError(f"the model {name!r} is not served here", param="model")
        backend = None if name is None else self._places[name].backend
        if backend is None:
            raise NoModelLoadedError(
                "no model is in memory: a request loads the one that it names"
                if name is None
                else f"the model {name!r} is not in memory: a request that names it loads it"
            )
        return backend

    async def _wait_opened(self, name: str, place: Place, lease: ModelLease) -> None:
        """Wait until the lease's model is open. Raises as `lease` says."""
        backend = lease.backend
        limit_s = 0.0 if place.model.is_pinned else self._config.load_timeout_s
        if backend is None or not (backend.is_open or place.model.is_pinned):
            try:
                async with asyncio.timeout(limit_s):
                    backend = await lease.wait_granted()
                    await backend.wait_opened()
            except TimeoutError:
                if lease.backend is None:
                    raise NotLoadedError(self._why_waiting(name)) from None
            except ModelChangedError:
                raise
            except (ThermoclineError, OSError) as error:
                raise NotLoadedError(f"the model {name!r} can not be loaded: {error}") from error
        lease.open()

    def _why_waiting(self, name: str) -> str:
        others = [
            other
            for other, place in self._places.items()
            if place.backend is not None and place.users and other != name
        ]
        return (
            f"the model {name!r} was not loaded within --load-timeout: there is no room beside "
            f"{', '.join(map(repr, others)) or 'others'}, which answer requests; try again later, or raise --models-memory"
        )

    def _keep_alive_of(self, model: ModelSource) -> float:
        if model.is_pinned:
            return FOREVER
        return self._default_keep_alive_s if model.keep_alive_s is None else model.keep_alive_s

    def _state(self, place: Place) -> ModelState:
        backend, opened, expires_in_s = place.backend, None, None
        state = "unloaded"
        if backend is not None:
            state = "failed" if backend.has_failed else "loading"
            with suppress(ThermoclineError):
                opened = backend.model
                state = "loaded" if opened.engine.is_running else "stopped"
            since_s = self._loop.time() if place.users else place.last_used_s
            expires_in_s = max(0.0, since_s + place.keep_alive_s - self._loop.time())
        return ModelState(
            place.model,
            state,
            opened,
            0 if place.needs is None else place.needs.host_bytes,
            len(place.users),
            expires_in_s,
        )

    async def _read_again(self) -> None:
        """Look again which models there are: files may have come, changed or gone. Many who ask at once look once."""
        asked_s = self._loop.time()
        async with self._reading:
            if self._read_at_s < asked_s:
                self._read_at_s = self._loop.time()
                self._take(await asyncio.to_thread(self._catalogue.read))

    def _take(self, models: list[ModelSource]) -> None:
        found = {model.card.id: model for model in models}
        for name, model in found.items():
            place = self._places.get(name)
            if place is None:
                self._places[name] = Place(model, self._keep_alive_of(model))
            elif place.backend is None:
                place.model = model
        for name, place in tuple(self._places.items()):
            if name not in found and place.backend is None and not place.waiting:
                del self._places[name]

    # What follows runs on the keeper's task, but for `_release`.

    def _release(self, place: Place, lease: ModelLease) -> None:
        place.users.discard(lease)
        place.waiting.pop(lease, None)
        place.last_used_s = self._loop.time()
        self._stir.set()

    async def _keep(self) -> None:
        while not self._is_closing:
            self._stir.clear()
            await self._unload_idle()
            next_s = await self._load_next()
            with suppress(TimeoutError):
                async with asyncio.timeout(next_s):
                    await self._stir.wait()
        for place in self._places.values():
            for lease in tuple(place.waiting):
                lease.refuse(NotLoadedError(_ENDING))

    async def _unload_idle(self) -> None:
        """Unload what nobody uses and whose time is over, or whose opening failed."""
        for name, place in tuple(self._places.items()):
            if place.backend is None or place.users or place.model.is_pinned:
                continue
            is_over = self._loop.time() >= place.last_used_s + place.keep_alive_s
            if is_over or place.backend.has_failed or place.backend.has_died:
                await self._unload(name, place, "asked" if place.keep_alive_s == 0 else "idle")

    async def _load_next(self) -> float | None:
        """Load what is waited for, as far as there is room; return after how many seconds to look again."""
        while not self._is_closing:
            wish = self._next_wish()
            if wish is None or not await self._make_room(wish, self._places[wish]):
                break
        now_s = self._loop.time()
        times = [
            place.last_used_s + place.keep_alive_s - now_s
            for place in self._places.values()
            if place.backend is not None and not place.users and not place.model.is_pinned
        ]
        next_s = min(times, default=FOREVER)
        return None if next_s == FOREVER else max(0.0, next_s)

    def _next_wish(self) -> str | None:
        """Return the model that is waited for longest, and let in who waits for models that are there."""
        while True:
            for name in tuple(self._wishes):
                wished = self._places.get(name)
                if wished is not None and wished.backend is not None and wished.takes_requests:
                    grant_all(wished, wished.backend)
                if wished is None or not wished.waiting:
                    del self._wishes[name]
            wish = next(iter(self._wishes), None)
            if wish == self._making_room_for:
                return wish
            # What had to leave for another one may stay, until this one needs it gone.
            self._making_room_for = wish
            for place in self._places.values():
                place.is_leaving = False

    async def _make_room(self, name: str, place: Place) -> bool:
        """Load a model if there is room, or unload others; False while those that must go are used."""
        try:
            if place.backend is not None:  # failed or died, and not unloaded yet
                if place.users:
                    return False
                await self._unload(name, place, "idle")
            going = await self._in_the_way_of(place)
        except (ThermoclineError, OSError) as error:
            for lease in tuple(place.waiting):
                lease.refuse(error)
            place.waiting.clear()
            return True
        if not place.waiting or self._is_closing:  # all have left meanwhile
            return True
        if not going:
            place.is_leaving = False
            grant_all(place, self._open(name, place))
            return True
        for other, there in self._places.items():
            there.is_leaving = other in going
        idle = [other for other in going if not self._places[other].users]
        for other in idle:
            await self._unload(other, self._places[other], "memory")
        return bool(idle)

    async def _in_the_way_of(self, place: Place) -> tuple[str, ...]:
        """Return the models that must go before this one is loaded. Raises ModelError, and ConfigError if it never fits."""
        if place.needs is None:
            model = place.model
            place.needs = await asyncio.to_thread(model_needs, model.path, model.config)
        going = models_to_unload(place.needs, self._loaded(), self.budget_bytes)
        if going is None:
            raise ConfigError(
                f"it takes {format_bytes(place.needs.host_bytes)}, and --models-memory is "
                f"{format_bytes(self.budget_bytes)}"
            )
        return going

    def _loaded(self) -> list[LoadedModel]:
        return [
            LoadedModel(
                name,
                place.needs or NO_NEEDS,
                place.last_used_s,
                bool(place.users),
                place.model.is_pinned,
            )
            for name, place in self._places.items()
            if place.backend is not None
        ]

    def _open(self, name: str, place: Place) -> Backend:
        model = place.model
        reopens = self._config.on_model_change == "reopen"
        config = model.config
        if self._config.slot_folder is not None:
            config = replace(config, scheduler=replace(config.scheduler, keeps_slots=True))
        backend = place.backend = Backend(model.path, config, model.card, reopens=reopens)
        backend.when_ended(self._stir.set)
        backend.when_given_up(self._note_given_up)
        backend.start()
        place.last_used_s = self._loop.time()
        self.total_loads[name] += 1
        if not model.is_pinned:
            _LOG.info("loading the model %s", name)
        return backend

    async def _unload(self, name: str, place: Place, reason: str) -> None:
        """Close a model that nobody uses. Its memory is free when this returns."""
        backend, place.backend, place.needs = place.backend, None, None
        if backend is None:
            return
        place.keep_alive_s = self._keep_alive_of(place.model)
        _LOG.info("unloading the model %s (%s)", name, reason)
        await backend.close()
        del backend
        # Parts of an ended engine refer to each other.
        await asyncio.to_thread(gc.collect)
        self.total_unloads[name, reason] += 1
        gone, self._gone = self._gone, asyncio.Event()
        gone.set()

    def _note_given_up(self, change: ModelChangedError) -> None:
        if not self._given_up.done():
            self._given_up.set_result(change)


def _tell_failure(keeper: asyncio.Task[None]) -> None:
    """Log a bug of ours at once: until the server's end, requests for models that are not loaded would wait in vain."""
    if not keeper.cancelled() and keeper.exception() is not None:
        _LOG.error("models are not loaded any more", exc_info=keeper.exception())


def _spellings(name: str) -> tuple[str, ...]:
    """Return what a name may stand for: clients append `:latest`, and write the hub's address before a name."""
    plain = name.removesuffix(":latest")
    return name, plain, plain.removeprefix("hf.co/"), plain.removeprefix("huggingface.co/")

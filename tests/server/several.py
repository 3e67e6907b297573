"""A live server of several models on a free port in this process, and a client of it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp

from tests.server.live import CHAT, HELLO
from thermocline import EngineConfig
from thermocline.server.app import RunningServer, running_models
from thermocline.server.core.catalogue import Catalogue, open_catalogue
from thermocline.server.core.exchange import POOL
from thermocline.server.core.settings import ServerConfig

if TYPE_CHECKING:
    from thermocline.server.core.pool import ModelPool


@dataclass(frozen=True)
class Several:
    """A server of several models, its pool, and a client."""

    server: RunningServer
    client: aiohttp.ClientSession

    @property
    def pool(self) -> ModelPool:
        """What owns the models."""
        return self.server.app[POOL]

    async def post(self, path: str, **fields: Any) -> tuple[int, Any]:
        """Return status and JSON body of a POST."""
        async with self.client.post(path, json=fields) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, Any]:
        """Return status and JSON body of a GET."""
        async with self.client.get(path) as response:
            return response.status, await response.json()

    async def chat(self, model: str, **fields: Any) -> dict[str, Any]:
        """Return the body of a chat that must succeed."""
        status, body = await self.post(CHAT, **{"messages": HELLO, "model": model} | fields)
        assert status == 200, body
        return body

    def states(self) -> dict[str, str]:
        """Return the state of each model."""
        return {state.model.card.id: state.state for state in self.pool.states()}


@asynccontextmanager
async def several(catalogue: Catalogue, **settings: Any):
    """Serve the models of a catalogue; afterwards no engine is left."""
    config = ServerConfig(**{"port": 0, "shutdown_timeout_s": 5.0} | settings)
    async with (
        running_models(catalogue, config) as server,
        aiohttp.ClientSession(base_url=server.url) as client,
    ):
        yield Several(server, client)
        for state in server.app[POOL].states():
            assert state.num_users == 0, state


def folder_of(folder, config: EngineConfig | None = None) -> Catalogue:
    """Return the catalogue of a folder."""
    return open_catalogue([folder], config or EngineConfig(), with_cache=False)

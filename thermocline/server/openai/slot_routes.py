"""llama-server's actions on slots: save a prompt cache to a file, restore it, erase it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Literal

import msgspec
from aiohttp import web

from thermocline.errors import RequestError
from thermocline.server.core.errors import NotSupportedError
from thermocline.server.core.exchange import operation, read_json, send_json, use_model
from thermocline.server.core.gate import GATE
from thermocline.server.core.slot_folder import SlotFolder

if TYPE_CHECKING:
    from thermocline.engine.api import Engine

SLOT_FOLDER: Final = web.AppKey("SLOT_FOLDER", SlotFolder)
_ACTIONS: Final = ("save", "restore", "erase")


class SlotRequest(msgspec.Struct, kw_only=True):
    """The body: a file's name for save and restore, and the model where there are several."""

    filename: str | None = None
    model: str | None = None


def routes() -> list[web.RouteDef]:
    """Return this route."""
    return [web.post(r"/slots/{id_slot:\d{1,6}}", act)]


@operation(takes=SlotRequest, query={"action": Literal["save", "restore", "erase"]})
async def act(request: web.Request) -> web.Response:
    """Save, restore or erase the prompt cache of a slot: ?action=."""
    folder = request.app.get(SLOT_FOLDER)
    if folder is None:
        raise NotSupportedError(
            "this server does not save prompt caches: start it with --slot-save-path FOLDER"
        )
    action, slot = request.query.get("action"), int(request.match_info["id_slot"])
    if action not in _ACTIONS:
        raise RequestError(
            f"action is {action!r}: choose one of {', '.join(_ACTIONS)}", param="action"
        )
    body = SlotRequest()
    if action != "erase" or request.can_read_body:
        body = await read_json(request, SlotRequest)
    engine = (await use_model(request, body.model)).engine
    # Whoever has another key does not see what a slot has computed.
    owner = request.app[GATE].cache_salt(request, None) or ""
    if action == "erase":
        return send_json({"id_slot": slot, "n_erased": await engine.slots.erase(slot, owner=owner)})
    if action == "save":
        return await _save(engine, folder, slot, body.filename, owner)
    report = await engine.slots.restore(slot, folder.path(body.filename), owner=owner)
    return send_json(
        {
            "id_slot": slot,
            "filename": body.filename,
            "n_restored": report.num_tokens,
            "n_read": report.num_bytes,
            "timings": {"restore_ms": report.seconds * 1e3},
        }
    )


async def _save(
    engine: Engine, folder: SlotFolder, slot: int, name: str | None, owner: str
) -> web.Response:
    path = folder.path(name)
    async with folder.turn:
        max_bytes = await asyncio.to_thread(folder.bytes_left_for, path)
        report = await engine.slots.save(slot, path, owner=owner, max_bytes=max_bytes)
    return send_json(
        {
            "id_slot": slot,
            "filename": name,
            "n_saved": report.num_tokens,
            "n_written": report.num_bytes,
            "timings": {"save_ms": report.seconds * 1e3},
        }
    )

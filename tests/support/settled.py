"""Waits for an engine: for turns of its loop, for requests, or until nothing is left in it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thermocline import Engine


async def turns(engine: Engine, count: int) -> None:
    """Wait for as many turns of the engine's loop."""
    for _ in range(count):
        await engine._thread.call(lambda _: None)


async def accepted(engine: Engine, count: int) -> None:
    """Wait until the engine has that many requests."""
    async with asyncio.timeout(10):
        while await engine._thread.call(lambda loop: loop.num_requests) < count:
            pass  # each call is a turn of the engine's loop


async def settled(engine: Engine) -> None:
    """Wait until the engine has no request and no chunk, then check that nothing is left."""
    runner = engine._parts.runner
    async with asyncio.timeout(10):
        while not await engine._thread.call(
            lambda loop: loop.num_requests == 0 == runner.num_in_flight
        ):
            pass  # each call is a turn of the engine's loop
        spilling = engine._parts.step_loop.spilling
        while spilling is not None and not spilling.is_idle:
            await turns(engine, 1)
        hot = engine._parts.experts.hot_device
        while hot is not None and hot.ring.num_taken:
            await turns(
                engine, 1
            )  # copies ahead that nobody wanted give their slots back when they end
    await engine.check_integrity()
    snapshot = await engine._thread.call(lambda loop: loop._scheduler.snapshot())
    assert (snapshot.num_running, snapshot.num_waiting) == (0, 0)
    assert snapshot.cache.num_held_blocks == snapshot.cache.num_held_window_blocks == 0

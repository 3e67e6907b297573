"""The mailbox: events arrive in order, a slow reader finds them merged, and nobody waits for it."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace

from thermocline.errors import EngineError
from thermocline.messages import (
    FinishReason,
    PromptProgress,
    RequestFailed,
    RequestId,
    TokenEvent,
    TokenLogprob,
)
from thermocline.pipeline.mailbox import Mailbox

REQUEST = RequestId(1)


def token(index: int, reason: FinishReason | None = None) -> TokenEvent:
    return TokenEvent(REQUEST, (index,), f"<{index}>", finish_reason=reason)


async def test_events_of_another_thread_arrive_in_order():
    """A reader that keeps up gets each event as it was put."""
    mailbox = Mailbox(asyncio.get_running_loop())
    got = []
    for index in range(50):
        thread = threading.Thread(target=mailbox.put, args=(token(index),))
        thread.start()
        got.append(await mailbox.get())
        thread.join()
    assert [event.token_ids for event in got] == [(index,) for index in range(50)]


async def test_a_reader_that_is_behind_loses_nothing():
    """1,000 unread tokens wait in at most 16 events, all tokens and text in order, the end last."""
    mailbox = Mailbox(asyncio.get_running_loop())
    for index in range(999):
        mailbox.put(token(index))
    mailbox.put(token(999, FinishReason.STOP))
    assert len(mailbox) <= 16
    events = []
    while not events or events[-1].finish_reason is None:
        events.append(await mailbox.get())
    assert [t for event in events for t in event.token_ids] == list(range(1000))
    assert "".join(event.text for event in events) == "".join(f"<{i}>" for i in range(1000))
    assert len(mailbox) == 0


async def test_progress_is_replaced_by_newer_progress():
    """Only the latest state of the prompt is worth reading."""
    mailbox = Mailbox(asyncio.get_running_loop())
    for done in (10, 20, 30):
        mailbox.put(PromptProgress(REQUEST, done, 30))
    assert len(mailbox) == 1
    assert (await mailbox.get()).num_computed == 30


async def test_a_cancelled_get_takes_nothing():
    """The event stays for the next get."""
    mailbox = Mailbox(asyncio.get_running_loop())
    reader = asyncio.create_task(mailbox.get())
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    mailbox.put(token(5))
    assert (await mailbox.get()).token_ids == (5,)


def test_putting_after_the_reader_s_loop_is_gone_is_harmless():
    """The engine must not stumble over a reader that left for good."""
    loop = asyncio.new_event_loop()
    mailbox = Mailbox(loop)
    loop.close()
    mailbox.put(token(1))
    assert len(mailbox) == 1


async def test_a_reader_is_told_when_the_engines_loop_has_done_what_it_is_at():
    """Once for all events until then; of a failure at once, since nothing comes after it."""
    calls: list[object] = []
    mailbox = Mailbox(SimpleNamespace(call_soon_threadsafe=calls.append))
    for index in range(3):
        mailbox.put(token(index))
    assert not calls
    await asyncio.sleep(0)
    assert len(calls) == 1
    mailbox.put(token(3))
    await asyncio.sleep(0)
    assert len(calls) == 2
    mailbox.put(RequestFailed(REQUEST, EngineError("over")))
    assert len(calls) == 3


async def test_a_reader_too_far_behind_shows():
    """Tokens and the likely ones beside them count, merged or not, and what is taken counts no more."""
    mailbox = Mailbox(asyncio.get_running_loop(), max_entries=40)
    likely = (tuple(TokenLogprob(i, -1.0) for i in range(9)),)
    for index in range(4):
        mailbox.put(replace(token(index), top_logprobs=likely))
        assert not mailbox.is_overfull
    mailbox.put(token(4))
    assert mailbox.is_overfull
    await mailbox.get()
    assert not mailbox.is_overfull
    for index in range(100):
        mailbox.put(token(index))
    while len(mailbox):
        await mailbox.get()
    assert not mailbox.is_overfull
    assert not Mailbox(asyncio.get_running_loop()).is_overfull

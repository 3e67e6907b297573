"""Streams and events of a device: who computes where, and who waits for it."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from contextlib import nullcontext
from typing import ClassVar

import pytest
import torch

from tests.support.devices import DEVICES
from thermocline.errors import (
    DeviceFaultError,
    DeviceMemoryError,
    DeviceMissingError,
    EngineClosedError,
)
from thermocline.kernels.gpu.streams import DeviceStreams
from thermocline.workers.lane import result_of


@pytest.fixture(params=DEVICES)
def streams(request):
    """A device, closed at the end."""
    with DeviceStreams.open(request.param) as opened:
        yield opened


class GatedEvent:
    """Device work that is done when the test says so, or fails."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.gate = threading.Event()
        self._failure = failure

    def query(self) -> bool:
        return self.gate.is_set()

    def synchronize(self) -> None:
        self.gate.wait()
        if self._failure is not None:
            raise self._failure


def test_work_is_done_when_finished(streams):
    """What was queued while computing can be read on the host after `finish`."""
    with streams.computing():
        x = streams.upload(torch.arange(6, dtype=torch.float32).numpy())
        streams.check(x)
        host = streams.host_empty(6, dtype=torch.float32)
        host.copy_(x * 2, non_blocking=True)
    for spin in (True, False):
        streams.finish(spin=spin)
    assert host.tolist() == [0, 2, 4, 6, 8, 10]


@pytest.mark.parametrize("copies", [False, True])
def test_an_event_that_is_done_needs_no_waiting(streams, copies):
    """Recorded and finished: the future has ended, and no thread is made for it."""
    with streams.copying() if copies else streams.computing():
        streams.upload(torch.arange(6, dtype=torch.float32).numpy())
        event = streams.record(copies=copies)
    event.synchronize()
    assert streams.when_done(event).result(0) is None
    assert streams._waiter is None


async def test_waiting_leaves_the_loop_free():
    """While one event is pending the loop goes on; the wait ends with it, and a failure is handed over."""
    with DeviceStreams.open("torch-cpu") as streams:
        event, broken = GatedEvent(), GatedEvent(RuntimeError("device lost"))
        waiting = asyncio.create_task(result_of(streams.when_done(event)))
        failing = asyncio.create_task(result_of(streams.when_done(broken)))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not waiting.done()
        event.gate.set()
        await waiting
        broken.gate.set()
        with pytest.raises(RuntimeError, match="device lost"):
            await failing


async def test_a_cancelled_wait_does_not_end_the_others():
    """Who stops waiting is passed over; what came after is told all the same."""
    with DeviceStreams.open("torch-cpu") as streams:
        events = [GatedEvent() for _ in range(3)]
        waits = [asyncio.create_task(result_of(streams.when_done(event))) for event in events]
        await asyncio.sleep(0)
        waits[1].cancel()
        for event in events:
            event.gate.set()
        await asyncio.gather(waits[0], waits[2])
        assert waits[1].cancelled()


def test_a_thread_without_a_loop_gets_a_future():
    """A walk drives stages itself: it is handed what to wait for."""
    with DeviceStreams.open("torch-cpu") as streams:
        event = GatedEvent()
        future = streams.when_done(event)
        assert not future.done()
        event.gate.set()
        assert future.result(timeout=5) is None


def test_a_closed_device_is_not_waited_for():
    """After `close` there is nothing to wait with; closing again does nothing."""
    streams = DeviceStreams.open("torch-cpu")
    streams.close()
    streams.close()
    with pytest.raises(EngineClosedError, match="closed"):
        streams.when_done(GatedEvent())


def test_memory_that_runs_out_is_a_typed_error_with_the_fix(streams):
    """torch's error becomes ours, which names flags."""

    def compute():
        with streams.computing():
            raise torch.OutOfMemoryError("tried to allocate 9 GiB. GPU 0 has less")

    with pytest.raises(DeviceMemoryError, match=r"9 GiB.*--ctx.*--trunk-device cpu") as caught:
        compute()
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_a_tensor_of_another_device_is_our_bug(streams):
    """The device of initialisation and that of compute are one."""
    with pytest.raises(AssertionError, match="meta is not"):
        streams.check(torch.empty(1, device="meta"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_cuda_device_the_error_says_what_to_do():
    """Asking for one names the way out."""
    with pytest.raises(DeviceMissingError, match=r"no CUDA device.*compute on the CPU"):
        DeviceStreams.open("cuda")


class BrokenGraph:
    """A capture that breaks, so that ending it fails, too."""

    num_ended = 0

    def capture_begin(self, **how) -> None:
        assert how["capture_error_mode"] == "thread_local"

    def capture_end(self) -> None:
        type(self).num_ended += 1
        raise RuntimeError("operation failed due to a previous error during capture")


class FakeStream:
    """A stream of a device that works until `failure` is set, and then refuses every call."""

    def __init__(self) -> None:
        self.num_waits = 0
        self.failure: RuntimeError | None = None

    def query(self) -> bool:
        if self.failure is not None:
            raise self.failure
        return True

    def synchronize(self) -> None:
        self.num_waits += 1
        self.query()


class FakeEvent:
    """What is recorded on a FakeStream, and never done."""

    _stream: FakeStream

    def record(self, stream: FakeStream) -> None:
        self._stream = stream

    def query(self) -> bool:
        return self._stream.query() and False

    def synchronize(self) -> None:
        self._stream.synchronize()


@pytest.fixture
def faked(monkeypatch):
    """The stand-in, which believes in two streams of a GPU."""
    with DeviceStreams.open("torch-cpu") as streams:
        for name in ("_compute", "_copies"):
            monkeypatch.setattr(streams, name, FakeStream())
        monkeypatch.setattr(torch.cuda, "Event", lambda **_: FakeEvent())
        for name in ("stream", "device"):
            monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
        yield streams


@pytest.mark.parametrize("failure", [torch.OutOfMemoryError("1 GiB"), ValueError("no kernel")])
def test_the_error_that_broke_a_capture_is_the_one_reported(monkeypatch, faked, failure):
    """Not the one of ending it, which happens all the same; a capture that can not be ended says so itself."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", BrokenGraph)
    monkeypatch.setattr(BrokenGraph, "num_ended", 0)
    monkeypatch.setattr(faked, "_kept_graph", lambda: None)

    def fail() -> None:
        raise failure

    with pytest.raises(type(failure)) as caught:
        faked.capture(fail)
    assert caught.value is failure
    assert BrokenGraph.num_ended == 1
    with pytest.raises(RuntimeError, match="previous error"):
        faked.capture(lambda: None)


class GraphOfPools:
    """A capture that notes its pool."""

    pools: ClassVar[list[object]] = []

    def capture_begin(self, **how) -> None:
        self.pools.append(how["pool"])

    def capture_end(self) -> None:
        pass

    def replay(self) -> None:
        pass


def test_a_broken_capture_leaves_its_pool(monkeypatch, faked):
    """torch may think that it is still recorded into; the first graph of a pool is kept, so that the pool is."""
    handles = iter(range(9))
    monkeypatch.setattr(faked, "_new_pool", lambda: next(handles))
    monkeypatch.setattr(faked, "_pool", 100)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", GraphOfPools)
    monkeypatch.setattr(GraphOfPools, "pools", [])

    def fail() -> None:
        raise ValueError

    faked.capture(lambda: None)
    with pytest.raises(ValueError):  # noqa: PT011 - our own
        faked.capture(fail)
    faked.capture(lambda: None)
    faked.capture(lambda: None)
    assert GraphOfPools.pools == [100, 100, 100, 0, 0, 0]


def test_nothing_is_collected_while_work_is_captured(monkeypatch, faked):
    """What the collector frees may call the driver, which ends a capture. It is on again afterwards."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", GraphOfPools)
    seen = []
    faked.capture(lambda: seen.append(gc.isenabled()))
    assert seen == [False]
    assert gc.isenabled()


ILLEGAL = "CUDA error: an illegal memory access was encountered"


def test_closing_waits_for_compute_and_for_copies(faked):
    """Both streams have finished before what they use is let go; once."""
    faked.close()
    faked.close()
    assert (faked._compute.num_waits, faked._copies.num_waits) == (1, 1)


@pytest.mark.parametrize("copies", [False, True])
def test_a_device_that_died_is_a_typed_error_from_then_on(faked, copies, caplog):
    """The error that it died of is named, without torch's advice; later uses and events say the same."""
    event = faked.record(copies=copies)
    faked._compute.failure = faked._copies.failure = RuntimeError(f"{ILLEGAL}\nSearch for it.")

    def use() -> None:
        with faked.copying() if copies else faked.computing():
            faked._compute.synchronize()

    for _ in range(2):
        with pytest.raises(
            DeviceFaultError, match=rf"\({ILLEGAL}\).*restart it and open the engine"
        ):
            use()
    with pytest.raises(DeviceFaultError, match=ILLEGAL):
        event.synchronize()
    with pytest.raises(DeviceFaultError, match=ILLEGAL):
        faked.when_done(event)
    with caplog.at_level(logging.WARNING):
        faked.close()
    assert not caplog.messages


def test_a_device_that_dies_while_it_closes_is_logged(faked, caplog):
    """Whatever closed it goes on closing the rest."""
    faked._copies.failure = faked._compute.failure = RuntimeError(ILLEGAL)
    with caplog.at_level(logging.WARNING):
        faked.close()
    assert ILLEGAL in caplog.messages[0]


def test_an_error_that_leaves_the_device_alive_stays_what_it_is(faked):
    """The driver takes further calls: only what failed is told."""

    def use() -> None:
        with faked.computing():
            raise RuntimeError("CUDA error: invalid configuration argument")

    with pytest.raises(RuntimeError, match="invalid configuration"):
        use()
    with faked.computing():
        pass
    assert repr(faked._health) == "DeviceHealth(cpu, works)"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device can be used here")
def test_captured_work_runs_again_on_the_same_memory():
    """Recording does nothing; each replay computes from what lies there then."""
    with DeviceStreams.open("cuda") as streams, streams.computing():
        x = torch.ones(4, device=streams.device)
        out = torch.zeros(4, device=streams.device)
        out.copy_(x * 3)  # warms up what may not be made while capturing
        out.zero_()

        def work() -> None:
            out.copy_(x * 3)

        # A graph that is let go leaves the next one its pool.
        for _ in range(2):
            out.zero_()
            replay = streams.capture(work)
            streams.finish(spin=True)
            assert out.tolist() == [0] * 4
            for value in (1.0, 2.0):
                x.fill_(value)
                replay()
                streams.finish(spin=True)
                assert out.tolist() == [3 * value] * 4
            del replay

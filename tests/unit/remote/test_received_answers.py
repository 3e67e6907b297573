"""Answers that the waiting thread receives itself: its own bits, and every failure is the client's thread's."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tests.support.remote_cases import running_worker, some_request, target_of
from tests.support.toy_model import write_toy_model
from thermocline.errors import WorkerLostError
from thermocline.remote.client import WorkerClient
from thermocline.remote.holdings import Held
from thermocline.remote.receiving import Way

TIMEOUT_S = 20.0


@pytest.fixture
def worker(tmp_path):
    """A worker on threads of this process, whose computing waits for a gate."""
    with running_worker(write_toy_model(tmp_path / "toy.gguf"), tmp_path / "socket") as model:
        model.gate = threading.Event()
        compute = model.compute

        def gated(held, request):
            model.gate.wait(TIMEOUT_S)
            return compute(held, request)

        model.compute = gated
        yield model


@pytest.fixture(params=["shared", "stream"])
def target(request, tmp_path, worker):
    """What the worker holds, over each transport."""
    return target_of(worker, tmp_path / "socket", transport=request.param)


@pytest.fixture(params=[Way.SPIN, Way.SLEEP], ids=str)
def client(request, target, monkeypatch):
    """A client that is ready."""
    client = WorkerClient(target, TIMEOUT_S)
    client.start()
    client.wait_ready(TIMEOUT_S)
    # Whichever way is the fastest here.
    monkeypatch.setattr(client._ways, "choose", lambda: request.param)
    yield client
    client.close()


def expected(worker, target, request):
    """What the model itself computes."""
    worker.gate.set()
    return worker.compute(Held(target.held, 0, 0), request)


def test_the_waiting_thread_receives_its_answer(worker, target, client, monkeypatch):
    """An answer that comes after the thread began to receive is taken by that thread, and is right."""
    monkeypatch.setattr("thermocline.remote.client._RECEIVE_S", TIMEOUT_S)
    request = some_request(target, 5)
    future = client.submit(request)
    takers = []
    future.add_done_callback(lambda _: takers.append(threading.current_thread()))

    def is_wanted():
        worker.gate.set()  # the worker answers from now on
        return True

    while not future.done():
        future.receive(is_wanted)
    assert takers == [threading.current_thread()]
    assert np.array_equal(future.result().values, expected(worker, target, request))
    # A second one ends at once.
    future.receive(lambda: pytest.fail("asked for what is there"))


def test_an_answer_is_left_to_the_clients_thread_where_that_is_sooner(
    worker, target, client, monkeypatch
):
    """Then nothing is received, and the answer comes as ever."""
    monkeypatch.setattr(client._ways, "choose", lambda: Way.LEAVE)
    request = some_request(target, 3)
    future = client.submit(request)
    future.receive(lambda: pytest.fail("received"))
    assert np.array_equal(
        expected(worker, target, request), future.result(timeout=TIMEOUT_S).values
    )
    waits = []
    monkeypatch.setattr(client._ways, "add", lambda *of: waits.append(of))
    future.count_wait(future.result())
    ((way, seconds),) = waits
    assert way is Way.LEAVE
    assert 0 < seconds < TIMEOUT_S


def test_what_is_not_wanted_any_more_is_left_to_the_clients_thread(worker, target, client):
    """Who stops receiving gets the answer as if it had never begun."""
    request = some_request(target, 3)
    future = client.submit(request)
    future.receive(lambda: False)
    assert not future.done()
    assert np.array_equal(
        expected(worker, target, request), future.result(timeout=TIMEOUT_S).values
    )
    assert client.statistics().total_connections == 1


def test_a_failure_while_receiving_is_the_clients(worker, target, client, monkeypatch):
    """A connection that breaks under the waiting thread fails the call once, and is opened again."""
    worker.gate.set()
    frames = client._connection.frames
    assert client.submit(some_request(target, 1)).result(TIMEOUT_S) is not None

    is_broken = threading.Event()

    def breaks(*_):
        is_broken.set()
        raise WorkerLostError("broke while receiving")

    worker.gate.clear()
    monkeypatch.setattr(frames, "receive_soon", breaks)
    future = client.submit(some_request(target, 1))
    while not is_broken.is_set():  # the client's thread may not have left the last answer yet
        future.receive(lambda: True)
    with pytest.raises(WorkerLostError, match="broke while receiving"):
        future.result(TIMEOUT_S)
    worker.gate.set()
    client.wait_ready(TIMEOUT_S, tries_again=True)
    request = some_request(target, 4)
    future = client.submit(request)
    while not future.done():
        future.receive(lambda: True)
    assert np.array_equal(future.result().values, expected(worker, target, request))
    assert client.statistics().total_connections == 2


def test_threads_that_receive_at_once_get_their_own_bits(worker, target, client):
    """Four threads with 15 requests each, more than there are credits: each gets its own answers."""
    worker.gate.set()
    wrong, start = [], threading.Barrier(4)

    def ask(number):
        start.wait(TIMEOUT_S)
        for seed in range(15):
            request = some_request(target, 1 + seed % 5, 100 * number + seed, layer=seed % 2)
            future = client.submit(request)
            while not future.done():
                future.receive(lambda: True)
                if number % 2:
                    future.result(TIMEOUT_S)
            if not np.array_equal(future.result().values, expected(worker, target, request)):
                wrong.append((number, seed))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong
    assert client.statistics().total_calls == 60

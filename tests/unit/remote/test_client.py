"""A client and a worker together: right answers, one clean error for each failure, and nothing left behind.

THERMOCLINE_WORKER_KILLS sets how often a worker is killed (once by default).
"""

from __future__ import annotations

import fcntl
import gc
import math
import os
import random
import re
import signal
import socket
import struct
import termios
import threading
import time
from concurrent.futures import wait
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.processes import child_pids
from tests.support.remote_bodies import broken_frames
from tests.support.remote_cases import running_worker, some_request, target_of
from tests.support.toy_model import ToyShape, write_toy_model
from thermocline.errors import (
    RemoteError,
    WorkerFailedError,
    WorkerLateError,
    WorkerLostError,
    WorkerRefusedError,
    WorkerSlowError,
)
from thermocline.remote.address import LocalWorker, TcpAddress
from thermocline.remote.client import WorkerClient
from thermocline.remote.connection import Opening, WorkerConnection
from thermocline.remote.holdings import Held
from thermocline.remote.payload import PayloadType
from thermocline.remote.requests import HEAD_BYTES
from thermocline.remote.wire import HEADER_BYTES, Kind

SECRET = b"a secret of some length"
TIMEOUT_S = 20.0
NUM_KILLS = int(os.environ.get("THERMOCLINE_WORKER_KILLS", "1"))


@pytest.fixture
def model_path(tmp_path):
    """A small model."""
    return write_toy_model(tmp_path / "toy.gguf")


@pytest.fixture
def worker(tmp_path, model_path):
    """A worker on threads of this process."""
    with running_worker(model_path, tmp_path / "socket") as model:
        yield model


@pytest.fixture
def connect(tmp_path):
    """Make clients that are ready, and close them."""
    clients = []

    def ready(target, timeout_s=TIMEOUT_S):
        clients.append(WorkerClient(target, timeout_s))
        clients[-1].start()
        clients[-1].wait_ready(TIMEOUT_S)
        return clients[-1]

    yield ready
    for client in clients:
        client.close()


def expected(worker, target, request):
    """What the model itself computes for a request."""
    return worker.compute(Held(target.held, 0, 0), request)


@pytest.mark.parametrize("transport", ["shared", "stream"])
def test_answers_equal_local_ones_to_the_bit(tmp_path, worker, connect, transport):
    """Requests of 0 to 100 tokens and of all layers, many in flight: each gets its own bits."""
    target = target_of(worker, tmp_path / "socket", transport=transport)
    client = connect(target)
    requests = [
        some_request(target, num_tokens, seed, layer=seed % 2)
        for seed, num_tokens in enumerate((1, 0, 3, 100, 7, 64, 2, 0, 11))
    ]
    answers = [client.submit(request) for request in requests]
    for request, answer in zip(requests, answers, strict=True):
        got = answer.result(TIMEOUT_S)
        np.testing.assert_array_equal(got.values, expected(worker, target, request))
        assert got.given_ns <= got.sent_ns <= got.begin_ns <= got.end_ns <= got.taken_ns
    figures = client.statistics()
    assert (figures.state, figures.transport) == ("ready", transport)
    assert (figures.total_calls, figures.total_failures) == (len(requests), 0)
    assert figures.current_in_flight == figures.current_queued == 0


def test_whoever_has_an_answer_finds_it_counted(tmp_path, worker, connect, monkeypatch):
    """When a call ends, the counters and the worker's slots say so already."""
    client = connect(target_of(worker, tmp_path / "socket"))
    gate, compute, seen = threading.Event(), worker.compute, []
    monkeypatch.setattr(worker, "compute", lambda *of: (gate.wait(TIMEOUT_S), compute(*of))[1])
    answer = client.submit(some_request(target_of(worker, tmp_path), 2))
    answer.add_done_callback(lambda _: seen.append(client.statistics()))
    gate.set()
    answer.result(TIMEOUT_S)
    client.close()  # no callback is left
    (figures,) = seen
    assert (figures.total_calls, figures.current_in_flight) == (1, 0)


def test_an_answer_that_comes_as_the_worker_is_found_late_ends_that(tmp_path, worker, monkeypatch):
    """On two threads at once: the worker is used again, and not only after the next ping."""
    target = target_of(worker, tmp_path / "socket")
    read = WorkerConnection.read_answer
    with closing(WorkerClient(target, TIMEOUT_S, hedges=True)) as client:
        client.start()
        client.wait_ready(TIMEOUT_S)

        def read_late(self, *of):
            client._give_up_late()
            return read(self, *of)

        with monkeypatch.context() as patch:
            patch.setattr(WorkerConnection, "read_answer", read_late)
            with pytest.raises(WorkerSlowError):
                client.submit(some_request(target, 1)).result(TIMEOUT_S)
            client.wait_ready(TIMEOUT_S / 4, tries_again=True)
        client.submit(some_request(target, 1)).result(TIMEOUT_S)
        client._give_up_late()  # as if its last answer were taken just before
        assert client.is_ready


@pytest.mark.parametrize("transport", ["shared", "stream"])
def test_an_answer_that_comes_along_with_the_one_waited_for_is_taken(
    tmp_path, worker, connect, monkeypatch, transport
):
    """Both are read at once, by the thread that waits for the first; nothing more comes that would wake anybody."""
    target = target_of(worker, tmp_path / "socket", transport=transport)
    client = connect(target)
    gate, compute = threading.Event(), worker.compute
    monkeypatch.setattr(worker, "compute", lambda *of: (gate.wait(TIMEOUT_S), compute(*of))[1])
    monkeypatch.setattr("thermocline.remote.client._RECEIVE_S", TIMEOUT_S)
    request = some_request(target, 1)
    first, second = client.submit(request), client.submit(request)
    values = 0 if transport == "shared" else target.shape.outputs_bytes(len(request.rows))

    def both_have_come():
        gate.set()
        while num_unread(client._connection.frames) < 2 * (HEADER_BYTES + HEAD_BYTES + values):
            time.sleep(0)
        return True

    client.receive(first, both_have_come, spins=True)
    assert first.done()
    np.testing.assert_array_equal(second.result(1.0).values, expected(worker, target, request))


def num_unread(frames):
    """Return how many bytes have come that nobody has read."""
    (count,) = struct.unpack("i", fcntl.ioctl(frames, termios.FIONREAD, bytes(4)))
    return count


def test_large_calls_tell_the_links_speed(tmp_path, worker, connect, monkeypatch):
    """The bytes of a call over its way, which is its time without the worker's; a call beside another says nothing."""
    client = connect(target_of(worker, tmp_path / "socket"))
    target = target_of(worker, tmp_path)
    assert client.statistics().link_bytes_per_s == 0.0
    small, large = some_request(target, 1), some_request(target, 100)
    client.submit(small).result(TIMEOUT_S)
    assert client.statistics().link_bytes_per_s == 0.0
    answer = client.submit(large).result(TIMEOUT_S)
    before = client.statistics()
    way_s = (answer.came_ns - answer.sent_ns - (answer.end_ns - answer.begin_ns)) * 1e-9
    num_bytes = 100 * 64 * 4 + 200 * 64 * 4 + 2 * 64
    tables = before.total_sent_bytes + before.total_received_bytes
    assert num_bytes < before.link_bytes_per_s * way_s < tables
    gate, compute = threading.Event(), worker.compute
    monkeypatch.setattr(worker, "compute", lambda *of: (gate.wait(TIMEOUT_S), compute(*of))[1])
    first, second = client.submit(small), client.submit(large)
    while client.statistics().current_in_flight < 2:
        time.sleep(0)
    gate.set()
    wait([first, second], TIMEOUT_S)
    assert client.statistics().link_bytes_per_s == before.link_bytes_per_s


@pytest.mark.parametrize("payload", [PayloadType.F16, PayloadType.BF16])
def test_half_width_payloads_stay_close(tmp_path, worker, connect, payload):
    """Half the bytes, and outputs within a few roundings of the exact ones."""
    exact = target_of(worker, tmp_path / "socket")
    target = replace(exact, shape=replace(exact.shape, payload=payload))
    request = some_request(target, 50)
    client = connect(target)
    values = client.submit(request).result(TIMEOUT_S).values
    wanted = expected(worker, target, request)
    error = np.square(values - wanted).mean() / np.square(wanted).mean()
    assert error < {PayloadType.F16: 1e-6, PayloadType.BF16: 1e-4}[payload]
    full = connect(exact)
    full.submit(request).result(TIMEOUT_S)
    few, all_ = client.statistics(), full.statistics()
    assert few.total_received_bytes < 0.55 * all_.total_received_bytes


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"digest": b"x" * 16}, "another model"),
        ({"fingerprint": b"x" * 16}, "fingerprint"),
        ({"num_experts": 9}, "another model"),
    ],
)
def test_a_worker_that_does_not_fit_refuses(tmp_path, worker, changes, reason):
    """Another model, dims or placement: WorkerRefusedError with the reason, soon."""
    client = WorkerClient(target_of(worker, tmp_path / "socket", **changes), TIMEOUT_S)
    client.start()
    with pytest.raises(WorkerRefusedError, match=reason):
        client.wait_ready(TIMEOUT_S)
    with pytest.raises(WorkerLostError, match="connecting"):
        client.submit(some_request(target_of(worker, tmp_path), 1)).result(TIMEOUT_S)
    client.close()


@pytest.mark.parametrize(
    ("of_worker", "of_client", "reason"),
    [
        (SECRET, None, "asks for a secret"),
        (SECRET, b"another secret than that", "secret is another"),
        (None, SECRET, "does not know the secret"),
        (SECRET, SECRET, None),
    ],
)
def test_both_sides_must_know_the_secret(tmp_path, model_path, of_worker, of_client, reason):
    """A client without it, with another one, or a worker without it: refused; with it: ready."""
    with running_worker(model_path, tmp_path / "socket", of_worker) as model:
        client = WorkerClient(target_of(model, tmp_path / "socket", secret=of_client), TIMEOUT_S)
        client.start()
        if reason is None:
            client.wait_ready(TIMEOUT_S)
        else:
            with pytest.raises(WorkerRefusedError, match=reason):
                client.wait_ready(TIMEOUT_S)
        client.close()


def test_a_missing_worker_is_reported_and_found_when_it_comes(tmp_path, model_path, worker):
    """A client of nobody fails requests at once; when the worker comes it is found."""
    other = tmp_path / "other"
    client = WorkerClient(target_of(worker, other), TIMEOUT_S)
    client.start()
    with pytest.raises(RemoteError):
        client.wait_ready(TIMEOUT_S)
    with running_worker(model_path, other):
        client.wait_ready(TIMEOUT_S, tries_again=True)
        client.close()


@pytest.mark.parametrize("is_restored", [False, True])
def test_a_shrunken_file_is_an_answer(tmp_path, model_path, connect, is_restored):
    """The worker says what happened to its file, as long as it has it mapped, and the connection goes on."""
    with running_worker(model_path, tmp_path / "socket") as model:
        target = target_of(model, tmp_path / "socket")
        client = connect(target)
        size = model_path.stat().st_size
        os.truncate(model_path, size // 4)
        if is_restored:  # of the same size again, but zeros
            os.truncate(model_path, size)
        reason = "it was written to" if is_restored else "its size changed|could not be read"
        answers = [client.submit(some_request(target, 2)) for _ in range(2)]
        found = [answer.exception(TIMEOUT_S) for answer in answers]
        figures = client.statistics()
        client.close()  # the worker waits for its clients
    for error in found:
        assert isinstance(error, WorkerFailedError)
        assert re.search(reason, str(error))
        assert "start the worker again" in str(error)
    assert figures.total_connections == 1


def test_a_cancelled_request_is_not_computed(tmp_path, model_path):
    """What waits at a busy worker and is cancelled gets no compute; what follows is answered."""
    computed, gate = [], threading.Event()
    with running_worker(model_path, tmp_path / "socket") as model:
        compute = model.compute

        def slow(held, request):
            computed.append(len(request.rows))
            gate.wait(TIMEOUT_S)
            return compute(held, request)

        model.compute = slow
        target = target_of(model, tmp_path / "socket")
        connection = Opening(target, TIMEOUT_S).run()
        frames, end_s = connection.frames, time.monotonic() + TIMEOUT_S
        for number, num_tokens in enumerate((10, 20, 30)):
            connection.queue_request(number, some_request(target, num_tokens), number)
        frames.queue(Kind.CANCEL, 1)
        frames.flush_until(end_s)
        gate.set()
        answers = [frames.receive_until(end_s) for _ in range(3)]
        connection.close()
    kinds = {frame.request: frame.kind for frame in answers}
    assert kinds == {0: Kind.OUTPUTS, 1: Kind.FAILED, 2: Kind.OUTPUTS}
    assert computed == [20, 60]


@pytest.mark.slow
def test_a_worker_survives_broken_frames(tmp_path, worker, connect):
    """Hundreds of connections that say nonsense: each is ended, and the next client is served."""
    for data in broken_frames(99, 200):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as raw:
            raw.settimeout(TIMEOUT_S)
            raw.connect(str(tmp_path / "socket"))
            try:
                raw.sendall(data)
                raw.shutdown(socket.SHUT_WR)
                while raw.recv(4096):
                    pass
            except OSError:  # it was ended while we still spoke
                continue
    target = target_of(worker, tmp_path / "socket")
    request = some_request(target, 3)
    answer = connect(target).submit(request).result(TIMEOUT_S)
    np.testing.assert_array_equal(answer.values, expected(worker, target, request))


def start_local(model_path, worker, timeout_s=TIMEOUT_S, **changes):
    """Return a client of a process of its own."""
    target = target_of(worker, LocalWorker(1), model_path=str(model_path), **changes)
    client = WorkerClient(target, timeout_s)
    client.start()
    client.wait_ready(TIMEOUT_S)
    return client, target


def memory_and_sockets():
    """The memory files and sockets that this process has open."""
    gc.collect()
    names = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the directory that is being read
            names.add(str(entry.readlink()))
    return {name for name in names if "memfd" in name or "socket" in name}


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared", "stream"])
def test_a_killed_worker_is_one_error_and_comes_back(model_path, worker, transport):
    """kill -9 with requests in flight: each ends, the next connection answers, nothing is left."""
    before, open_before = child_pids(), memory_and_sockets()
    client, target = start_local(model_path, worker, transport=transport)
    for seed in range(NUM_KILLS):
        (pid,) = child_pids() - before
        futures = [client.submit(some_request(target, 100, seed)) for _ in range(6)]
        os.kill(pid, signal.SIGKILL)
        assert not wait(futures, TIMEOUT_S).not_done
        for future in futures:
            assert future.exception() is None or isinstance(future.exception(), RemoteError)
        while client.is_ready and (child_pids() - before) == {pid}:
            with pytest.raises(RemoteError):  # until the loss is noticed
                client.submit(some_request(target, 1)).result(TIMEOUT_S)
        client.wait_ready(TIMEOUT_S, tries_again=True)
        request = some_request(target, 5, seed)
        answer = client.submit(request).result(TIMEOUT_S)
        np.testing.assert_array_equal(answer.values, expected(worker, target, request))
    assert client.statistics().total_connections == NUM_KILLS + 1
    client.close()
    assert child_pids() == before
    assert memory_and_sockets() <= open_before


@pytest.mark.slow
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("transport", ["shared", "stream"])
def test_a_worker_that_is_hit_while_it_starts_is_followed_by_one_that_answers(
    model_path, worker, transport, blow
):
    """Killed, or stopped for a while, somewhere between its start and its first answer."""
    before, open_before = child_pids(), memory_and_sockets()
    for seed in range(NUM_KILLS):
        draws = random.Random(seed)
        target = target_of(worker, LocalWorker(1), model_path=str(model_path), transport=transport)
        client = WorkerClient(target, TIMEOUT_S)
        client.start()
        time.sleep(draws.uniform(0.0, 0.6))
        pids = child_pids() - before
        for pid in pids:
            os.kill(pid, blow)
        if blow is signal.SIGSTOP:
            time.sleep(draws.uniform(0.0, 0.3))
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        request = some_request(target, 5, seed)
        while True:
            client.wait_ready(TIMEOUT_S, tries_again=True)
            with suppress(WorkerLostError):  # killed when it was ready, which was not noticed yet
                values = client.submit(request).result(TIMEOUT_S).values
                break
        np.testing.assert_array_equal(values, expected(worker, target, request))
        client.close()
        assert child_pids() == before
    assert memory_and_sockets() <= open_before


@pytest.mark.slow
def test_a_stopped_worker_is_given_up(model_path, worker):
    """SIGSTOP: requests end with WorkerLateError at their deadline, and another worker takes over."""
    before = child_pids()
    client, target = start_local(model_path, worker, timeout_s=0.3)
    (pid,) = child_pids() - before
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(WorkerLateError, match=r"within 0\.3 s"):
        client.submit(some_request(target, 3)).result(TIMEOUT_S)
    client.wait_ready(TIMEOUT_S, tries_again=True)
    (other,) = child_pids() - before
    assert other != pid
    client.close()
    assert child_pids() == before


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared", "stream"])
def test_a_late_answer_is_given_up_and_its_slot_kept(model_path, worker, transport):
    """SIGSTOP: calls end soon, no other is sent; when it goes on, each slot has its own call's answer, and it is used.

    More calls than slots are in flight: those that were not sent never are. The worker is found late when it is
    stopped and all of them are there, not when others keep it, or who calls, from running.
    """
    before = child_pids()
    target = target_of(worker, LocalWorker(1), model_path=str(model_path), transport=transport)
    client = WorkerClient(target, TIMEOUT_S, hedges=True)
    client.start()
    client.wait_ready(TIMEOUT_S)
    (pid,) = child_pids() - before
    client._late_s = never = lambda: math.inf
    for seed in range(20):
        client.submit(some_request(target, 3, seed)).result(TIMEOUT_S)
    for stop in range(3):
        os.kill(pid, signal.SIGSTOP)
        late = [client.submit(some_request(target, 3, seed)) for seed in range(6)]
        while client.statistics().current_in_flight < 4:
            os.sched_yield()
        del client._late_s
        client._call_thread()
        begin_s = time.monotonic()
        for call in late:
            with pytest.raises(WorkerSlowError, match="later than usual"):
                call.result(TIMEOUT_S)
        assert time.monotonic() - begin_s < TIMEOUT_S / 4
        figures = client.statistics()
        assert (figures.state, figures.current_in_flight, figures.current_queued) == ("late", 4, 0)
        with pytest.raises(WorkerLostError, match="is late"):
            client.submit(some_request(target, 3)).result(TIMEOUT_S)
        client._late_s = never
        os.kill(pid, signal.SIGCONT)
        client.wait_ready(TIMEOUT_S, tries_again=True)
        requests = [some_request(target, 5, 100 * stop + seed) for seed in range(12)]
        for request, call in [(each, client.submit(each)) for each in requests]:
            np.testing.assert_array_equal(
                call.result(TIMEOUT_S).values, expected(worker, target, request)
            )
    figures = client.statistics()
    assert (figures.total_late, figures.total_connections) == (12, 1)
    client.close()
    assert child_pids() == before


@pytest.mark.slow
def test_a_client_that_rests_hedges_too(model_path, worker):
    """The first call after a pause of seconds is as soon given up as any other."""
    before = child_pids()
    target = target_of(worker, LocalWorker(1), model_path=str(model_path))
    client = WorkerClient(target, TIMEOUT_S, hedges=True)
    client.start()
    client.wait_ready(TIMEOUT_S)
    (pid,) = child_pids() - before
    client.submit(some_request(target, 3)).result(TIMEOUT_S)
    end_s = time.monotonic() + TIMEOUT_S
    while client._looks_s < time.monotonic() + 1.0:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    os.kill(pid, signal.SIGSTOP)
    request = some_request(target, 3)
    patience_s = client._times.patience_s(request.is_prompt, len(request.rows))
    begin_s = time.monotonic()
    with pytest.raises(WorkerSlowError):
        client.submit(request).result(TIMEOUT_S)
    took_s = time.monotonic() - begin_s
    assert took_s < patience_s + 1.0, "it slept for a quarter of the timeout"
    client.close()


@pytest.mark.slow
def test_closing_while_a_worker_starts_leaves_nothing(model_path, worker):
    """`close` in the middle of opening ends thread and process at once."""
    before = child_pids()
    target = target_of(worker, LocalWorker(1), model_path=str(model_path))
    client = WorkerClient(target, TIMEOUT_S)
    client.start()
    client.close()
    assert child_pids() == before


@pytest.mark.slow
def test_a_worker_whose_file_does_not_fit_says_so(tmp_path, worker):
    """A started worker that can not open its file tells why."""
    target = target_of(worker, LocalWorker(1), model_path=str(tmp_path / "none.gguf"))
    client = WorkerClient(target, TIMEOUT_S)
    client.start()
    with pytest.raises(WorkerRefusedError, match=r"none\.gguf"):
        client.wait_ready(TIMEOUT_S)
    client.close()


def test_another_file_of_the_same_shape_is_refused(tmp_path, worker):
    """Same dims, other weights: the digest tells them apart."""
    other = write_toy_model(tmp_path / "other.gguf", ToyShape(seed=8))
    with running_worker(other, tmp_path / "other") as model:
        assert model.digest != worker.digest
        client = WorkerClient(target_of(worker, tmp_path / "other"), TIMEOUT_S)
        client.start()
        with pytest.raises(WorkerRefusedError, match="another model"):
            client.wait_ready(TIMEOUT_S)
        client.close()


def test_tcp_serves_whoever_knows_the_secret(tmp_path, model_path):
    """Over a port of this machine: the same bits, through the socket."""
    with running_worker(model_path, TcpAddress("127.0.0.1", 0), SECRET) as model:
        target = target_of(model, model.address, secret=SECRET)
        client = WorkerClient(target, TIMEOUT_S)
        client.start()
        client.wait_ready(TIMEOUT_S)
        request = some_request(target, 9)
        answer = client.submit(request).result(TIMEOUT_S)
        np.testing.assert_array_equal(answer.values, expected(model, target, request))
        assert client.statistics().transport == "stream"
        client.close()

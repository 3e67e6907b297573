"""How long does a worker take to answer, beside what it computes? Usage
`python -m benchmarks.worker_round_trip [MODEL.gguf]`.

An empty request (no token) goes to a worker process and back, through shared memory and through the socket; a
request of one token shows what its rows cost. "echo" is a byte through a socket pair to another Python process
and back: what this machine gives at best. "client" is the way of prompts: a request handed to the
client, and its Future waited for, which the client's thread ends. "received here" is the way of decode steps: who
waits receives the answer itself, where that is sooner. All cases take turns, and a round is the median of its calls.
"""

from __future__ import annotations

import argparse
import os
import select
import socket
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from benchmarks.measure import (
    RESULTS,
    QuietRounds,
    Row,
    describe_machine,
    spread,
    table,
    verdict,
    write_rows,
)
from benchmarks.model_options import add_patience
from thermocline.demo import DEMO_MODEL_PATH
from thermocline.kernels.cpu import NativeKernels
from thermocline.remote.address import LocalWorker
from thermocline.remote.client import WorkerClient
from thermocline.remote.connection import Opening, WorkerTarget
from thermocline.remote.holdings import HeldModel, held_fingerprint
from thermocline.remote.payload import PayloadType
from thermocline.remote.requests import (
    ExpertRequest,
    WireShape,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from thermocline.remote.connection import Transport, WorkerConnection

_NAME: Final = "worker_round_trip"
_MAX_EMPTY_US: Final = 40.0
_DEADLINE_S: Final = 30.0


def target_of(path: str, transport: Transport) -> WorkerTarget:
    """Return a worker process with one thread that holds the first half of each layer's experts."""
    with HeldModel(path, NativeKernels(threads=1)) as model:
        spec = model.spec
        half = np.arange(spec.router.num_experts // 2, dtype=np.int32)
        nothing = half[:0]
        layers = range(spec.num_layers)
        held = tuple(nothing if layer in spec.dense_layers else half for layer in layers)
        return WorkerTarget(
            address=LocalWorker(1),
            model_path=path,
            isa="auto",
            secret=None,
            transport=transport,
            digest=model.digest,
            fingerprint=held_fingerprint(spec, held),
            num_experts=spec.router.num_experts,
            shape=WireShape(spec.hidden_size, 256, PayloadType.F32),
            held=held,
        )


def request_of(target: WorkerTarget, num_tokens: int) -> ExpertRequest:
    """Return a request of so many tokens for the last layer, each of which chose the first held expert."""
    experts = np.zeros(min(num_tokens, 1), np.int32)
    return ExpertRequest(
        len(target.held) - 1,
        False,
        np.ones((num_tokens, target.shape.hidden), np.float32),
        np.arange(num_tokens),
        experts,
        np.full(len(experts), num_tokens, np.int32),
        np.arange(num_tokens, dtype=np.int32),
        np.ones(num_tokens, np.float32),
    )


def direct(
    connection: WorkerConnection, target: WorkerTarget, num_tokens: int
) -> Callable[[int], object]:
    """Return a call that sends a request over this connection and waits for its answer."""
    request, frames = request_of(target, num_tokens), connection.frames
    slot = connection.free_slots()[0]

    def call(number: int) -> object:
        connection.queue_request(number, request, slot)
        frames.flush_until(time.monotonic() + _DEADLINE_S)
        frame = frames.receive_until(time.monotonic() + _DEADLINE_S)
        return connection.read_answer(frame, number, len(request.rows), slot)[0]

    return call


def through_client(client: WorkerClient, request: ExpertRequest) -> Callable[[int], object]:
    """Return a call that hands a request to the client's thread and waits for its Future."""
    return lambda number: client.submit(request).result(_DEADLINE_S)


def received_here(client: WorkerClient, request: ExpertRequest) -> Callable[[int], object]:
    """Return a call whose answer the calling thread receives, as a decode step's lane does."""

    def call(number: int) -> object:
        future = client.submit(request)
        future.receive(lambda: True)
        answer = future.result(_DEADLINE_S)
        future.count_wait(answer)
        return answer

    return call


def echo(owned: ExitStack) -> Callable[[int], object]:
    """Return a call that sends a byte to a child process and waits for it to come back."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        ours.close()
        poller = select.poll()
        poller.register(theirs, select.POLLIN)
        while poller.poll() and (data := theirs.recv(1)):
            theirs.send(data)
        os._exit(0)
    theirs.close()
    owned.callback(os.waitpid, child, 0)
    owned.callback(ours.close)
    poller = select.poll()
    poller.register(ours, select.POLLIN)

    def call(number: int) -> object:
        ours.send(b"x")
        poller.poll()
        return ours.recv(1)

    return call


def measure(
    calls: Mapping[str, Callable[[int], object]], rounds: QuietRounds, num_calls: int
) -> dict[str, tuple[float, ...]]:
    """Return each case's median microseconds, round by round."""
    medians: dict[str, list[float]] = {name: [] for name in calls}
    number = 0
    for one in rounds:
        taken = {}
        with one:
            for name, call in calls.items():
                times_ns = []
                for _ in range(num_calls):
                    number += 1
                    start_ns = time.perf_counter_ns()
                    call(number)
                    times_ns.append(time.perf_counter_ns() - start_ns)
                taken[name] = statistics.median(times_ns) / 1e3
        if one.counts:
            for name, microseconds in taken.items():
                medians[name].append(microseconds)
    return {name: tuple(values) for name, values in medians.items()}


def run(path: str, rounds: QuietRounds, num_calls: int) -> dict[str, tuple[float, ...]]:
    """Measure all cases; workers and clients live only meanwhile."""
    with ExitStack() as owned:
        calls = {"echo": echo(owned)}
        transports: tuple[Transport, ...] = ("shared", "stream")
        for transport in transports:
            target = target_of(path, transport)
            connection = Opening(target, _DEADLINE_S).run()
            owned.callback(connection.close)
            for num_tokens, what in ((0, "empty"), (1, "one token")):
                calls[f"{transport}, {what}"] = direct(connection, target, num_tokens)
            client = WorkerClient(target, _DEADLINE_S)
            owned.callback(client.close)
            client.start()
            client.wait_ready(_DEADLINE_S)
            empty = request_of(target, 0)
            calls[f"{transport}, empty, client"] = through_client(client, empty)
            calls[f"{transport}, empty, received here"] = received_here(client, empty)
        return measure(calls, rounds, num_calls)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, append to the CSV; the status is 1 where an empty request takes too long."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=str(DEMO_MODEL_PATH))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--calls", type=int, default=300, help="in each round")
    add_patience(parser)
    parser.add_argument("--quick", action="store_true", help="one short round, to try it out")
    parser.add_argument("--out", type=Path, default=RESULTS / "worker-round-trip.csv")
    options = parser.parse_args(arguments)
    num_rounds, num_calls = (1, 20) if options.quick else (options.rounds, options.calls)
    rounds = QuietRounds(num_rounds, patience=options.patience)
    figures = run(options.model, rounds, num_calls)
    note = f"{num_calls} calls a round"
    rows = [
        Row(_NAME, case, "thermocline", "round trip", "us", values, note)
        for case, values in figures.items()
    ]
    cells = ([case, spread(values)] for case, values in figures.items())
    print(table(("round trip, p50", "us: median of rounds (range)"), cells))
    passed = statistics.median(figures["shared, empty"]) <= _MAX_EMPTY_US
    print(f"empty over shared memory, at most {_MAX_EMPTY_US:g} us: {verdict(passed)}; {rounds}")
    write_rows(options.out, rows, describe_machine(1) | rounds.facts())
    return 0 if passed or options.quick else 1


if __name__ == "__main__":
    sys.exit(main())

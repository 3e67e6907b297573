"""One worker's client: a thread that sends requests, receives answers, and reconnects when the worker is lost.

Owns the connection and the calls in flight. Callers get a Future, which an event loop or a lane's thread waits for.
An answer that is later than usual may be given up long before its deadline: then the worker gets nothing until it
answers, and the call's slot stays its own until then. Knows no layer and no fallback.
"""

from __future__ import annotations

import math
import os
import select
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from thermocline.errors import (
    RemoteError,
    WireError,
    WorkerFailedError,
    WorkerLateError,
    WorkerLostError,
    WorkerRefusedError,
    WorkerSlowError,
)
from thermocline.remote.calls import AnswerFuture, Call, ClientStatistics, ExpertAnswer
from thermocline.remote.connection import Opening, WorkerConnection
from thermocline.remote.lateness import AnswerTimes
from thermocline.remote.link_speed import LinkSpeed
from thermocline.remote.receiving import WayChoice
from thermocline.remote.requests import HEAD_BYTES
from thermocline.remote.wire import Kind, decode_text

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from thermocline.remote.connection import WorkerTarget
    from thermocline.remote.requests import ExpertRequest
    from thermocline.remote.wire import Frame

_OPEN_S: Final = 20.0  # starting Python takes 0.3 s; a loaded machine may need far longer
_FIRST_PAUSE_S: Final = 0.05
_MAX_PAUSE_S: Final = 2.0
_PING_S: Final = 15.0
_SHORT_PAIRS: Final = 64
# While requests come, the thread looks so often whether an answer is late; a request to a client that rests wakes it.
_LOOK_S: Final = 0.02
_REST_AFTER_S: Final = 1.0
# Who waits for one answer receives it: looks for so long without sleeping, and sleeps in such parts, so long in all.
_SPIN_NS: Final = 30_000
_NAP_S: Final = 0.5e-3
_RECEIVE_S: Final = 20e-3


class WorkerClient:
    """Sends requests to one worker. `start` it, `close` it; any thread may `submit`.

    timeout_s: from `submit` to the answer; the connection to a later worker is dropped. hedges: whether a call ends with
    WorkerSlowError once its answer is later than usual.
    """

    def __init__(self, target: WorkerTarget, timeout_s: float, *, hedges: bool = False) -> None:
        self._target = target
        self._timeout_s = timeout_s
        self._hedges = hedges
        self._times = AnswerTimes()
        self._link = LinkSpeed()
        self._ways = WayChoice()
        # When the worker last answered, and when the thread looks next by itself.
        self._heard_s = self._looks_s = 0.0
        self._lock = threading.Condition()
        self._state = "connecting"
        self._inbox: deque[Call] = deque()
        # Guards writes to the connection.
        self._sending = threading.Lock()
        # Held to receive: by this object's thread, or by one that waits for its answer.
        self._receiving = threading.Lock()
        self._received_error: RemoteError | None = None
        self._poller = select.epoll()
        self._wants_room = False
        self._connection: WorkerConnection | None = None
        self._cancelled: deque[int] = deque()
        self._in_flight: dict[int, Call] = {}
        self._free_slots: list[int] = []
        self._pong_by_s: float | None = None
        self._opening: Opening | None = None
        self._next_number = 1
        self._last_error: RemoteError | None = None
        self._kernels = self._transport = ""
        self._num_calls = self._num_failures = self._num_connections = self._num_late = 0
        self._sent_bytes = self._received_bytes = self._wait_ns = 0
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        name = f"thermocline client of {target.address}"
        self._poller.register(self._wake, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __repr__(self) -> str:
        return (
            f"WorkerClient({self._target.address}, {self._state}, {len(self._in_flight)} in flight)"
        )

    @property
    def is_ready(self) -> bool:
        """Whether a request would be sent."""
        return self._state == "ready"

    def start(self) -> None:
        """Begin to connect."""
        self._thread.start()

    def wait_ready(self, timeout_s: float, *, tries_again: bool = False) -> None:
        """Block until the worker is ready. Raises why it is not, or WorkerLateError.

        tries_again: after a failure, wait until the timeout unless the worker refused.
        """

        def is_settled() -> bool:
            error = self._last_error
            ends = error is not None and not tries_again
            return self._state == "ready" or ends or isinstance(error, WorkerRefusedError)

        with self._lock:
            self._lock.wait_for(is_settled, timeout_s)
            if self._state == "ready":
                return
            late = WorkerLateError(
                f"worker {self._target.address} was not ready after {timeout_s:g} s"
            )
            raise self._last_error or late

    def submit(self, request: ExpertRequest) -> AnswerFuture:
        """Send a request without waiting; the Future ends with an ExpertAnswer or a RemoteError within the timeout.

        The request's arrays must not change until then. Cancelling the Future cancels the request.
        """
        future = AnswerFuture(self, self._ways)
        now_ns = time.perf_counter_ns()
        with self._lock:
            is_ready = self._state == "ready"
            number, self._next_number = self._next_number, self._next_number + 1
            if is_ready:
                end_s = time.monotonic() + self._timeout_s
                self._inbox.append(Call(number, request, future, end_s, now_ns))
        if not is_ready:
            why = f": {self._last_error}" if self._last_error else ""
            error = WorkerLostError(f"worker {self._target.address} is {self._state}{why}")
            future.set_exception(error)
            return future
        future.add_done_callback(lambda done: self._note_cancel(done, number))
        rests = self._hedges and self._looks_s > time.monotonic() + _LOOK_S
        if not self._send_at_once(request) or rests:
            self._call_thread()
        return future

    def _send_at_once(self, request: ExpertRequest) -> bool:
        """Send a single short request from this thread; waking the other one takes as long as the worker's answer.

        Returns whether the inbox is empty and all was sent.
        """
        if len(request.rows) > _SHORT_PAIRS or len(self._inbox) > 1:
            return False
        if not self._sending.acquire(blocking=False):
            return False
        try:
            if self._connection is None:
                return False
            self._queue_frames(self._connection)
            return self._connection.frames.flush() and not self._inbox
        except RemoteError:
            return False  # the client's thread sees it too, and ends all calls
        finally:
            self._sending.release()

    def receive(self, future: AnswerFuture, is_wanted: Callable[[], bool], *, spins: bool) -> None:
        """Receive answers on the calling thread while `future` is not done and `is_wanted`, some milliseconds at most.

        Does nothing while another thread receives. spins: look without sleeping at first. Raises nothing: whatever
        fails, this object's thread sees.
        """
        if not self._receiving.acquire(blocking=False):
            return
        try:
            connection = self._connection
            if connection is None:
                return
            with self._sending:
                self._poller.modify(connection.frames.fileno(), 0)
            try:
                self._receive_for(connection, future, is_wanted, _SPIN_NS if spins else 0)
            except RemoteError as error:
                self._received_error = error
            finally:
                with self._sending:
                    self._poller.modify(connection.frames.fileno(), self._events())
        finally:
            self._receiving.release()
        if self._inbox or self._received_error is not None:
            self._call_thread()

    def _receive_for(
        self,
        connection: WorkerConnection,
        future: AnswerFuture,
        is_wanted: Callable[[], bool],
        spin_ns: int,
    ) -> None:
        end_s = time.monotonic() + _RECEIVE_S
        while not future.done() and is_wanted() and time.monotonic() < end_s:
            frame = connection.frames.receive_soon(spin_ns, _NAP_S)
            spin_ns = 0
            if frame is not None:
                self._take(connection, frame)
        while (frame := connection.frames.received()) is not None:  # no socket tells of these
            self._take(connection, frame)

    def _events(self) -> int:
        return select.EPOLLIN | (select.EPOLLOUT if self._wants_room else 0)

    def statistics(self) -> ClientStatistics:
        """Return the counters so far, from any thread."""
        return ClientStatistics(
            str(self._target.address),
            self._state,
            self._kernels,
            self._transport,
            self._num_calls,
            self._sent_bytes,
            self._received_bytes,
            self._wait_ns,
            self._num_failures,
            self._num_late,
            self._num_connections,
            len(self._in_flight),
            len(self._inbox),
            str(self._last_error or ""),
            self._link.bytes_per_s,
        )

    def close(self) -> None:
        """End the connection and the thread; calls in flight fail. Blocks briefly; more calls do nothing."""
        with self._lock:
            if self._state == "closed":
                return
            self._state = "closed"
            os.eventfd_write(self._wake, 1)
            if self._opening is not None:
                self._opening.stop()
        if self._thread.ident is not None:
            self._thread.join()
        self._poller.close()
        os.close(self._wake)

    def _note_cancel(self, done: Future[ExpertAnswer], number: int) -> None:
        if not done.cancelled():
            return
        self._cancelled.append(number)
        self._call_thread()

    def _call_thread(self) -> None:
        with self._lock:
            if self._state != "closed":
                os.eventfd_write(self._wake, 1)

    def _is_closed(self) -> bool:
        return self._state == "closed"

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._is_closed():
            num_calls = self._num_calls
            try:
                self._connect_and_serve()
            except RemoteError as error:
                with self._lock:
                    self._last_error = error
                    self._lock.notify_all()
            if self._num_calls > num_calls:
                pause_s = _FIRST_PAUSE_S
            self._pause(pause_s)
            pause_s = min(pause_s * 2, _MAX_PAUSE_S)

    def _connect_and_serve(self) -> None:
        with self._lock:
            if self._is_closed():
                return
            opening = self._opening = Opening(self._target, _OPEN_S)
        connection = opening.run()
        try:
            self._begin(connection)
            self._serve(connection)
        except RemoteError as error:
            # Before the calls are told: who knows of a failure finds the reason.
            with self._lock:
                self._last_error = error
            self._end(error)
            raise
        finally:
            self._end(WorkerLostError("the connection to the worker was closed"))
            connection.close()

    def _begin(self, connection: WorkerConnection) -> None:
        self._free_slots = connection.free_slots()
        self._pong_by_s = None
        self._heard_s = time.monotonic()
        self._kernels = connection.welcome.kernels
        self._transport = connection.transport
        self._wants_room, self._received_error = False, None
        self._poller.register(connection.frames.fileno(), select.EPOLLIN)
        with self._lock:
            self._opening, self._connection = None, connection
            self._num_connections += 1
            if not self._is_closed():
                self._state = "ready"
            self._lock.notify_all()

    def _end(self, error: RemoteError) -> None:
        """Fail all calls; none is accepted until there is a connection again."""
        with self._receiving, self._sending, self._lock:
            if self._connection is not None:
                self._poller.unregister(self._connection.frames.fileno())
            self._connection = None
            if not self._is_closed():
                self._state = "connecting"
            calls = [*self._in_flight.values(), *self._inbox]
            self._in_flight.clear()
            self._inbox.clear()
            self._cancelled.clear()
        for call in calls:
            self._num_failures += 1
            call.end(error)

    def _give_up_late(self) -> None:
        """End the calls of a worker that is later than usual; it keeps their slots, and gets nothing more for now."""
        with self._sending, self._lock:
            # If a thread that waits has received the last answer meanwhile, none would come that ends the lateness.
            if self._state != "ready" or not self._in_flight:
                return
            self._state = "late"
            waits_s = time.monotonic() - self._heard_s
            self._last_error = error = WorkerSlowError(
                f"worker {self._target.address} has not answered for {waits_s:.3g} s, which is later than usual"
            )
            sent, unsent = tuple(self._in_flight.values()), tuple(self._inbox)
            self._inbox.clear()
            for call in sent:
                call.is_given_up = True
                self._cancelled.append(call.number)
        self._num_late += len(sent)
        for call in (*sent, *unsent):
            call.end(error)

    def _serve(self, connection: WorkerConnection) -> None:
        frames, poller = connection.frames, self._poller
        idle_since_s = time.monotonic()
        while not self._is_closed():
            with self._sending:
                self._queue_frames(connection)
                is_all_sent = frames.flush()
                if is_all_sent is self._wants_room:
                    self._wants_room = not is_all_sent
                    poller.modify(frames.fileno(), self._events())
            left_s = self._rest_s()
            self._looks_s = time.monotonic() + left_s
            ready = dict(poller.poll(max(left_s, 0.0) + 1e-3))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if ready.get(frames.fileno(), 0) & ~select.EPOLLOUT:
                self._receive_all(connection)
            if self._received_error is not None:
                raise self._received_error
            now_s = time.monotonic()
            if self._late_s() <= now_s:
                self._give_up_late()
            if ready:
                idle_since_s = now_s
            elif now_s - idle_since_s >= _PING_S:
                with self._sending:
                    frames.queue(Kind.PING, 0)
                idle_since_s, self._pong_by_s = now_s, now_s + self._timeout_s
            if self._due_s() <= now_s:
                raise WorkerLateError(
                    f"worker {self._target.address} did not answer within {self._timeout_s:g} s"
                )

    def _receive_all(self, connection: WorkerConnection) -> None:
        """Take every frame that has come."""
        with self._receiving:
            is_ready = True
            while (frame := connection.frames.receive(is_ready=is_ready)) is not None:
                is_ready = False
                self._take(connection, frame)

    def _rest_s(self) -> float:
        """Return how long the thread may wait for the worker or for requests."""
        now_s = time.monotonic()
        # A request sent by another thread meanwhile may overrun its timeout by a quarter.
        rest_s = min(self._due_s() - now_s, _PING_S, self._timeout_s / 4)
        if self._hedges:
            rest_s = min(rest_s, self._late_s() - now_s)
            if now_s - self._heard_s < _REST_AFTER_S:
                rest_s = min(rest_s, _LOOK_S)
        return rest_s

    def _late_s(self) -> float:
        """Return the time from which the worker is late with its oldest call; it answers them in order."""
        if not self._hedges or self._state != "ready":
            return math.inf
        calls = list(self._in_flight.values())
        if not calls:
            return math.inf
        request = calls[0].request
        patience_s = self._times.patience_s(request.is_prompt, len(request.rows))
        return max(calls[0].sent_ns * 1e-9, self._heard_s) + patience_s

    def _due_s(self) -> float:
        """Return the time by which the worker must answer."""
        if self._pong_by_s is not None:
            return self._pong_by_s
        # Calls are in the order of sending, which is that of their deadlines.
        calls = list(self._in_flight.values())
        return calls[0].deadline_s if calls else math.inf

    def _queue_frames(self, connection: WorkerConnection) -> None:
        """Queue cancellations, and requests as far as there are credits."""
        while self._cancelled:
            number = self._cancelled.popleft()
            if number in self._in_flight:
                connection.frames.queue(Kind.CANCEL, number)
        while self._inbox and self._free_slots:
            call = self._inbox.popleft()
            if call.future.cancelled():
                continue
            call.slot = self._free_slots.pop()
            call.sent_ns, call.is_alone = time.perf_counter_ns(), not self._in_flight
            self._in_flight[call.number] = call
            call.sent_bytes = connection.queue_request(call.number, call.request, call.slot)
            self._sent_bytes += call.sent_bytes

    def _take(self, connection: WorkerConnection, frame: Frame) -> None:
        came_ns = time.perf_counter_ns()
        heard_s, self._heard_s = self._heard_s, came_ns * 1e-9
        self._pong_by_s = None
        if frame.kind is Kind.PONG:
            self._note_answer(None)
            return
        if frame.kind is Kind.REFUSED:
            raise WorkerRefusedError(f"the worker refused: {decode_text(frame.body)}")
        call = self._in_flight.get(frame.request)
        if call is None:
            raise WireError("an answer came that nobody asked for: the worker is broken")
        if frame.kind is Kind.OUTPUTS:
            asked_s = max(call.sent_ns * 1e-9, heard_s)
            self._times.add(
                call.request.is_prompt, len(call.request.rows), came_ns * 1e-9 - asked_s
            )
        result: ExpertAnswer | RemoteError | None = None
        if frame.kind is Kind.FAILED and not call.is_given_up:
            self._num_failures += 1
            result = WorkerFailedError(f"the worker: {decode_text(frame.body)}")
        elif not call.is_given_up:  # else computed here by now
            result = self._read(connection, call, frame, came_ns)
        # Not before, as calls in flight fail with their connection; and before the caller goes on, who may look.
        self._free_slots.append(call.slot)
        self._num_calls += 1
        self._wait_ns += came_ns - call.sent_ns
        self._note_answer(call)
        if result is not None:
            call.end(result)

    def _note_answer(self, call: Call | None) -> None:
        """Note that the worker has answered a call, or a ping: it is not late any more."""
        with self._lock:
            if call is not None:
                del self._in_flight[call.number]
            if self._state == "late":
                self._state = "ready"
                self._lock.notify_all()

    def _read(
        self, connection: WorkerConnection, call: Call, frame: Frame, came_ns: int
    ) -> ExpertAnswer:
        num_pairs = len(call.request.rows)
        values, begin_ns, end_ns = connection.read_answer(frame, call.number, num_pairs, call.slot)
        num_bytes = HEAD_BYTES + self._target.shape.outputs_bytes(num_pairs)
        self._received_bytes += num_bytes
        if call.is_alone:
            way_ns = came_ns - call.sent_ns - (end_ns - begin_ns)
            self._link.add(call.sent_bytes + num_bytes, way_ns * 1e-9)
        times = call.given_ns, call.sent_ns, begin_ns, end_ns, came_ns, time.perf_counter_ns()
        return ExpertAnswer(values, *times)

    def _pause(self, seconds: float) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        end_s = time.monotonic() + seconds
        while not self._is_closed() and (left_s := end_s - time.monotonic()) > 0:
            if poller.poll(left_s * 1e3):
                os.eventfd_read(self._wake)

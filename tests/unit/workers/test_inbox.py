"""A lane's inbox in the core: order, wake-ups, and no item lost however threads meet."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from thermocline.kernels.native import load_native


def make_inbox(*, is_native: bool = True):
    return load_native().Inbox(is_native)


def test_items_come_out_in_order():
    """First in, first out, None included."""
    inbox = make_inbox()
    assert inbox.is_empty()
    for item in (1, None, "b"):
        inbox.put(item)
    assert [inbox.take() for _ in range(3)] == [1, None, "b"]
    assert inbox.is_empty()


@pytest.mark.parametrize("is_native", [True, False])
def test_nothing_is_lost_between_two_threads(is_native):
    """Two thousand round trips: whoever waits, looking or asleep, is woken by every item."""
    there, back = make_inbox(is_native=is_native), make_inbox(is_native=is_native)

    def echo() -> None:
        while (item := there.take()) is not None:
            back.put(item)

    def ask() -> int:
        thread = threading.Thread(target=echo)
        thread.start()
        num_right = 0
        for number in range(2_000):
            there.put(number)
            num_right += back.take() == number
        there.put(None)
        thread.join(5)
        assert not thread.is_alive()
        return num_right

    # Not on the main thread: it would count as a lane from then on.
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(ask).result(60) == 2_000


def test_many_threads_may_put():
    """What four threads put arrives, each thread's in its order."""
    inbox = make_inbox(is_native=False)

    def fill(name: int) -> None:
        for number in range(1000):
            inbox.put((name, number))

    threads = [threading.Thread(target=fill, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    taken = [inbox.take() for _ in range(4000)]
    for name in range(4):
        assert [number for who, number in taken if who == name] == list(range(1000))
    for thread in threads:
        thread.join()


def test_a_thread_that_waits_long_uses_no_processor_time():
    """After a moment of looking it sleeps: of 0.3 s it computes at most a tenth."""
    inbox, spent = make_inbox(), []

    def wait() -> None:
        inbox.take()
        spent.append(time.thread_time())

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(0.3)
    inbox.put(1)
    thread.join(5)
    assert spent[0] < 0.03


def test_items_that_nobody_took_go_with_the_inbox():
    """An inbox holds its items no longer than it lives."""

    class Item:
        pass

    item, inbox = Item(), make_inbox()
    gone = weakref.ref(item)
    inbox.put(item)
    del item, inbox
    gc.collect()
    assert gone() is None

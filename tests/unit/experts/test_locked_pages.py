"""Pages of experts that the driver locks: whole pages, each once, and copies from them without a buffer."""

from __future__ import annotations

import mmap
import threading
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.support.kernel_cases import make_expert, make_weight, stacked
from thermocline.errors import DeviceFaultError, EngineClosedError
from thermocline.experts.backends import expert_copies
from thermocline.experts.backends.expert_copies import ExpertCopies, slot_bytes, slot_parts
from thermocline.experts.backends.locked_pages import LockedPages
from thermocline.kernels.gpu import copy_call
from thermocline.kernels.gpu.copy_call import _CALL, CopyCall
from thermocline.kernels.gpu.streams import DeviceStreams
from thermocline.messages import ExpertKey, LayerIndex
from thermocline.traces.lanes import Lane
from thermocline.traces.recorder import NullRecorder
from thermocline.workers.lane import LaneThread

NUM_LAYERS, NUM_EXPERTS, PAGE = 3, 4, mmap.PAGESIZE
FORMATS = ("Q4_K", "Q4_K", "Q6_K")


@pytest.fixture(scope="module")
def layers(tmp_path_factory):
    """Three layers' experts in one mapped file: two lie side by side, the third some pages behind."""
    rng, stacks, places, data = np.random.default_rng(1), [], [], bytearray(b"x" * 100)
    for number in range(NUM_LAYERS):
        made = [make_expert(rng, FORMATS, 256, 256, make_weight) for _ in range(NUM_EXPERTS)]
        stacks.append(stacked(made))
        if number == 2:
            data += bytes(5 * PAGE)
        for part in (stacks[-1].gate, stacks[-1].up, stacks[-1].down):
            places.append(len(data))
            data += part.raw.tobytes()
    path = tmp_path_factory.mktemp("mapped") / "file"
    path.write_bytes(data)
    mapped, places = np.memmap(path, np.uint8, "r"), iter(places)

    def there(part):
        start = next(places)
        raw = mapped[start : start + part.raw.nbytes].reshape(part.raw.shape)
        return replace(part, raw=raw)

    return {
        LayerIndex(n): replace(
            stack, gate=there(stack.gate), up=there(stack.up), down=there(stack.down)
        )
        for n, stack in enumerate(stacks)
    }


@pytest.fixture
def buffered(monkeypatch):
    """Bytes of each matrix that goes by a buffer."""
    found: list[int] = []
    plain = np.copyto
    monkeypatch.setattr(np, "copyto", lambda to, of: (found.append(of.nbytes), plain(to, of)))
    return found


@contextmanager
def open_copies(layers):
    with (
        DeviceStreams(torch.device("cpu")) as streams,
        LaneThread(Lane.GPU_H2D, NullRecorder()) as lane,
    ):
        yield ExpertCopies(streams, lane, slot_bytes(layers[LayerIndex(0)]), NullRecorder())


def copy_one(mover, layers, layer: LayerIndex, expert: int, *, urgent: bool) -> None:
    """Copy an expert to a slot of its own, where its bytes are the file's."""
    slot, parts = (
        torch.zeros(slot_bytes(layers[layer]), dtype=torch.uint8),
        slot_parts(layers[layer]),
    )
    mover.begin(ExpertKey.of(layer, expert), parts, slot, urgent=urgent).result(20)
    for part in parts:
        found = slot.numpy()[part.start : part.start + part.nbytes]
        np.testing.assert_array_equal(found, part.stack.raw[expert].reshape(-1))


def test_spans_are_whole_pages_and_cover_each_layer(layers):
    """Side by side they are one span; a layer counts when all of its pages are locked."""
    locked: list[tuple[int, int]] = []

    def lock(start: int, nbytes: int) -> bool:
        assert start % PAGE == nbytes % PAGE == 0
        locked.append((start, start + nbytes))
        return True

    pages = LockedPages(lock, layers)
    steps = pages.lock_all()
    assert not pages.layers
    next(steps)
    assert pages.layers == {0, 1}
    list(steps)
    assert pages.layers == {0, 1, 2}
    (first, between), (behind, last) = locked
    assert first < between < behind < last
    assert pages.nbytes == between - first + last - behind
    for stack in layers.values():
        for part in (stack.gate, stack.up, stack.down):
            start = part.raw.ctypes.data
            assert any(a <= start and start + part.raw.nbytes <= b for a, b in locked)


def test_a_refusal_ends_the_attempt(layers):
    """What was locked stays in use; the others go by buffers."""
    answers = iter([True, False])
    pages = LockedPages(lambda start, nbytes: next(answers), layers)
    list(pages.lock_all())
    assert pages.layers == {0, 1}


@pytest.mark.parametrize("locks", [True, False])
def test_copies_leave_the_buffers_out_when_enough_was_copied(layers, locks, buffered, monkeypatch):
    """After as many urgent bytes as there are; the same bytes arrive, by buffer or straight."""
    monkeypatch.setattr(DeviceStreams, "lock", lambda *_: locks)
    with open_copies(layers) as mover:
        mover.lock_after(layers)

        def copy_all(*, urgent: bool) -> None:
            for layer in layers:
                for expert in range(NUM_EXPERTS):
                    copy_one(mover, layers, layer, expert, urgent=urgent)

        copy_all(urgent=False)
        copy_all(urgent=True)
        # Whole pages are more than the experts.
        copy_all(urgent=True)
        assert len(buffered) >= 2 * 3 * NUM_LAYERS * NUM_EXPERTS
        buffered.clear()
        copy_all(urgent=True)
        assert len(buffered) == (0 if locks else 3 * NUM_LAYERS * NUM_EXPERTS)


def test_pages_that_are_in_memory_are_locked_before_the_first_copy(layers, buffered, monkeypatch):
    """No copy goes by a buffer then; an expert whose pages the driver refuses does."""
    answers = iter([True, False])
    monkeypatch.setattr(DeviceStreams, "lock", lambda *_: next(answers))
    with open_copies(layers) as mover:
        mover.lock(layers)
        for layer, parts_by_buffer in ((0, 0), (1, 0), (2, 3)):
            copy_one(mover, layers, LayerIndex(layer), 1, urgent=True)
            assert len(buffered) == parts_by_buffer


def test_copies_that_wait_are_queued_together(layers, monkeypatch):
    """As many bytes as a group has, in the order in which they were asked for; each ends, with its bytes."""
    monkeypatch.setattr(DeviceStreams, "lock", lambda *_: True)
    size = slot_bytes(layers[LayerIndex(0)])
    monkeypatch.setattr(expert_copies, "_GROUP_BYTES", 3 * size)
    queued: list[list[int]] = []
    plain = DeviceStreams.queue_copies

    def noted(streams, copies):
        queued.append(copies[::3, 1].tolist())
        plain(streams, copies)

    monkeypatch.setattr(DeviceStreams, "queue_copies", noted)
    with open_copies(layers) as mover:
        mover.lock(layers)
        asked, wanted = [], []
        with held(mover._lane):
            for number in range(8):
                key = ExpertKey.of(number % 2, number % NUM_EXPERTS)
                parts = slot_parts(layers[key.layer])
                slot = torch.zeros(size, dtype=torch.uint8)
                asked.append((mover.begin(key, parts, slot, urgent=True), slot, parts, key))
                wanted.append(parts[0].stack.raw[key.expert].ctypes.data)
        for done, slot, parts, key in asked:
            done.result(20)
            for part in parts:
                found = slot.numpy()[part.start : part.start + part.nbytes]
                np.testing.assert_array_equal(found, part.stack.raw[key.expert].reshape(-1))
    assert [address for group in queued for address in group] == wanted
    assert [len(group) for group in queued] == [3, 3, 2]


def test_copies_that_wait_for_a_lane_that_closes_fail(layers, monkeypatch):
    """All of them, and those asked for afterwards at once."""
    monkeypatch.setattr(DeviceStreams, "lock", lambda *_: True)
    parts = slot_parts(layers[LayerIndex(0)])
    slot = torch.zeros(slot_bytes(layers[LayerIndex(0)]), dtype=torch.uint8)
    with open_copies(layers) as mover:
        with held(mover._lane) as gate:
            waiting = [
                mover.begin(ExpertKey.of(0, n), parts, slot, urgent=bool(n % 2)) for n in range(4)
            ]
            closing = threading.Thread(target=mover._lane.close)
            closing.start()
            while not mover._lane._closed:
                pass
            gate.set()
        closing.join(20)
        for done in waiting:
            with pytest.raises(EngineClosedError):
                done.result(20)
        with pytest.raises(EngineClosedError):
            mover.begin(ExpertKey.of(0, 0), parts, slot, urgent=True)


def test_a_driver_that_copies_nothing_is_told_to_all_who_wait(layers, monkeypatch):
    """With its number; the next copies go on."""
    monkeypatch.setattr(DeviceStreams, "lock", lambda *_: True)
    answers = [201]
    call = _CALL(lambda *_: answers.pop() if answers else 0)
    with open_copies(layers) as mover:
        mover.lock(layers)
        monkeypatch.setattr(mover._streams, "_copy_call", CopyCall(call))
        slot = torch.zeros(slot_bytes(layers[LayerIndex(0)]), dtype=torch.uint8)
        parts = slot_parts(layers[LayerIndex(0)])
        with pytest.raises(RuntimeError, match="returned 201"):
            mover.begin(ExpertKey.of(0, 0), parts, slot, urgent=True).result(20)
        mover.begin(ExpertKey.of(0, 0), parts, slot, urgent=True).result(20)


@pytest.mark.parametrize(
    ("copies", "why"),
    [
        (np.ones((1, 2), np.int64), "two addresses"),
        (np.array([[1, 0, 5]], np.int64), "positive"),
        (np.array([[1, 2, -5]], np.int64), "positive"),
    ],
)
def test_the_core_copies_to_no_bad_address(copies, why):
    """What can be seen from numbers."""
    with pytest.raises(ValueError, match=why):
        CopyCall.of_memory()(copies, 0)


def test_without_the_drivers_function_nothing_is_locked(monkeypatch):
    """Copies go by buffers then."""
    monkeypatch.setattr(copy_call, "_LIBRARY", "no such library")
    assert not CopyCall.of_driver().is_there
    with DeviceStreams(torch.device("cpu")) as streams:
        streams._is_cuda, streams._copy_call = True, CopyCall.of_driver()
        assert not streams.lock(4096, 4096)
        streams._is_cuda = False


@contextmanager
def held(lane: LaneThread):
    """Keep a lane's thread at work, and give what lets it go."""
    entered, gate = threading.Event(), threading.Event()

    def work():
        entered.set()
        gate.wait(20)
        yield

    lane.submit_background(work(), urgent=True)
    assert entered.wait(20)
    try:
        yield gate
    finally:
        gate.set()


def test_what_the_driver_locked_is_unlocked_at_the_end(monkeypatch):
    """Read-only pages; a refusal is no error, and nothing is unlocked that was not locked."""
    calls: list[tuple[object, ...]] = []
    driver = SimpleNamespace(
        cudaHostRegister=lambda *given: (calls.append(given), 0 if given[0] != 8192 else 801)[1],
        cudaHostUnregister=lambda address: calls.append((address,)),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    with DeviceStreams(torch.device("cpu")) as streams:
        assert not streams.lock(4096, 4096), "torch's CPU locks nothing"
        streams._is_cuda = True
        assert streams.lock(4096, 4096)
        assert not streams.lock(8192, 4096)
    assert calls == [(4096, 4096, 8), (8192, 4096, 8), (4096,)]


def test_memory_that_is_shared_with_a_device_is_its_own_once_and_to_the_end(monkeypatch):
    """Readable and writable for every context; what the driver refuses is a typed error."""
    calls: list[tuple[object, ...]] = []
    driver = SimpleNamespace(
        cudaHostRegister=lambda *given: (calls.append(given), 0 if given[1] == 64 else 712)[1],
        cudaHostUnregister=lambda address: calls.append((address,)),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    memory, refused = np.zeros(64, np.uint8), np.zeros(65, np.uint8)
    with DeviceStreams(torch.device("cpu")) as streams:
        streams.share(memory)
        assert not calls, "torch's CPU sees all memory"
        streams._is_cuda = True
        streams.share(memory)
        streams.share(memory)
        with pytest.raises(DeviceFaultError, match=r"65 bytes.*712.*ulimit -l"):
            streams.share(refused)
    address = memory.ctypes.data
    assert calls == [(address, 64, 3), (refused.ctypes.data, 65, 3), (address,)]

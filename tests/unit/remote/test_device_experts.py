"""A worker's device: what it holds for which parent, and the same outputs as without it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from tests.support.compare import assert_within
from tests.support.remote_cases import running_worker, some_request, target_of
from thermocline.demo import DEMO_MODEL_PATH
from thermocline.errors import ConfigError, DeviceFaultError, DeviceMemoryError
from thermocline.kernels.cpu import NativeKernels
from thermocline.remote.client import WorkerClient
from thermocline.remote.device_experts import WorkerDeviceWish, open_device_experts
from thermocline.remote.handshake import Hello
from thermocline.remote.holdings import Held, HeldModel, held_fingerprint

TIMEOUT_S = 20.0


@pytest.fixture
def model():
    """The demo model, of which only experts are used: four layers of sixteen."""
    with HeldModel(str(DEMO_MODEL_PATH), NativeKernels(threads=1)) as model:
        yield model


def use(model, kind="simulated", memory_bytes=None):
    """Give the model a device and return it."""
    device = open_device_experts(
        WorkerDeviceWish(kind, memory_bytes, model.catalog, model.kernels, threads=1)
    )
    model.use_device(device)
    return device


def hello_of(model, target=None):
    """What a parent says that holds every second expert."""
    target = target or target_of(model, None)
    return Hello(
        nonce=bytes(32),
        model=target.digest,
        fingerprint=target.fingerprint,
        num_experts=target.num_experts,
        shape=target.shape,
        num_slots=0,
        slot_bytes=0,
        held=target.held,
    )


def expected(model, request, held):
    """What the CPU computes."""
    return model.compute(Held(held.layers, 0, 0), request)


@pytest.mark.parametrize("num_experts", [32, 13, 1])
def test_a_device_with_less_room_changes_no_bit(model, num_experts):
    """All, some or one of the 32 held experts are on the device; the first places of each layer come first."""
    nbytes = model.catalog.total_bytes // 64
    use(model, memory_bytes=num_experts * nbytes)
    held = model.hold(hello_of(model))
    assert held.num_on_device == num_experts
    counts = [int((slots >= 0).sum()) for slots in held.slots]
    assert max(counts) - min(counts) <= 1
    assert all((slots[:count] >= 0).all() for slots, count in zip(held.slots, counts, strict=True))
    said = model.describe_kernels(held)
    assert said.endswith(f"{num_experts} of 32 experts on the simulated device")
    target = target_of(model, None)
    for seed, num_tokens in enumerate((1, 2, 40, 0)):
        request = some_request(target, num_tokens, seed, layer=seed)
        assert np.array_equal(model.compute(held, request), expected(model, request, held))


def test_parents_share_slots_and_give_them_back(model):
    """A second parent's experts take no more room. What nobody holds stays until others want the room."""
    nbytes = model.catalog.total_bytes // 64
    device = use(model, memory_bytes=32 * nbytes)
    first, second = (model.hold(hello_of(model)) for _ in range(2))
    assert [a.tolist() for a in first.slots] == [a.tolist() for a in second.slots]
    odd = target_of(model, None)
    held = tuple(experts - 1 for experts in odd.held)
    even = replace(odd, held=held, fingerprint=held_fingerprint(model.spec, held))
    model.release(first)
    assert model.hold(hello_of(model, even)).num_on_device == 0
    request = some_request(odd, 5)
    assert np.array_equal(model.compute(second, request), expected(model, request, second))
    model.release(second)
    assert "32 experts, 0 held" in repr(device)
    third = model.hold(hello_of(model))
    assert [a.tolist() for a in third.slots] == [a.tolist() for a in second.slots]
    model.release(third)
    fourth = model.hold(hello_of(model, even))
    assert fourth.num_on_device == 32
    assert "32 experts, 32 held" in repr(device)
    request = some_request(even, 5, layer=3)
    assert np.array_equal(model.compute(fourth, request), expected(model, request, fourth))


def test_the_gpus_code_computes_the_same(model):
    """On torch's CPU device the GPU's path gives the CPU's outputs up to its own arithmetic, with all or half there."""
    for memory_bytes in (None, model.catalog.total_bytes // 4):
        use(model, "torch-cpu", memory_bytes)
        held = model.hold(hello_of(model))
        assert held.num_on_device == (32 if memory_bytes is None else 16)
        request = some_request(target_of(model, None), 7, seed=3, layer=1)
        found = model.compute(held, request)
        assert_within(found, expected(model, request, held), "experts/int8 activations")
        model.release(held)


@pytest.mark.parametrize(
    ("error", "goes_on"), [(DeviceMemoryError("activations"), True), (DeviceFaultError("x"), False)]
)
@pytest.mark.parametrize("num_experts", [32, 16])
def test_a_device_that_fails(model, monkeypatch, caplog, error, goes_on, num_experts):
    """The CPU computes instead, with its own bits; after a fault the device is not used again."""
    device = use(model, memory_bytes=num_experts * (model.catalog.total_bytes // 64))
    held = model.hold(hello_of(model))
    request = some_request(target_of(model, None), 9)

    def fails(*_, **__):
        raise error

    monkeypatch.setattr(device, "outputs", fails)
    with caplog.at_level(logging.WARNING, "thermocline.remote"):
        assert np.array_equal(model.compute(held, request), expected(model, request, held))
    assert len(caplog.records) == 1
    assert (model.device is not None) == goes_on
    assert np.array_equal(model.compute(held, request), expected(model, request, held))
    model.release(held)


def test_refusals(model):
    """A device that there is not, and one without room for a single expert."""
    with pytest.raises(ConfigError, match="use one of"):
        use(model, "tpu")
    with pytest.raises(DeviceMemoryError, match="--device-memory"):
        use(model, "torch-cpu", 100)


def test_a_connection_gives_its_experts_back(tmp_path, model):
    """A client's calls are computed on the device; when it has gone, nobody holds them."""
    with running_worker(DEMO_MODEL_PATH, tmp_path / "socket") as worker:
        device = use(worker)
        target = target_of(worker, tmp_path / "socket")
        client = WorkerClient(target, TIMEOUT_S)
        client.start()
        client.wait_ready(TIMEOUT_S)
        request = some_request(target, 6, layer=2)
        answer = client.submit(request).result(TIMEOUT_S)
        assert np.array_equal(answer.values, expected(worker, request, Held(target.held, 0, 0)))
        assert "32 of 32 experts on the simulated device" in client.statistics().kernels
        assert "32 experts, 32 held" in repr(device)
        client.close()
    assert "32 experts, 0 held" in repr(device)


@pytest.mark.slow
def test_the_command_line(tmp_path):
    """A worker says what its device is, and the parent sees it; an impossible size is a usage error."""
    path = tmp_path / "socket"
    command = [sys.executable, "-m", "thermocline", "worker", str(DEMO_MODEL_PATH), "-t", "1"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    wrong = subprocess.run(
        [*command, "--device-memory", "much"], capture_output=True, env=environment, check=False
    )
    assert wrong.returncode == 2
    assert b"--device-memory" in wrong.stderr
    process = subprocess.Popen(
        [*command, "--listen", f"unix:{path}", "--hot-device", "torch-cpu"],
        stdout=subprocess.PIPE,
        env=environment,
    )
    try:
        assert b"and cpu; listens on" in process.stdout.readline()
        with HeldModel(str(DEMO_MODEL_PATH), NativeKernels(threads=1)) as model:
            target = target_of(model, path)
            client = WorkerClient(target, TIMEOUT_S)
            client.start()
            client.wait_ready(TIMEOUT_S)
            request = some_request(target, 3)
            answer = client.submit(request).result(TIMEOUT_S)
            ours = expected(model, request, Held(target.held, 0, 0))
            assert_within(answer.values, ours, "experts/int8 activations")
            client.close()
    finally:
        process.kill()
        process.communicate()

"""Memory of results: used again when nobody has it, and no sooner."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
import torch

from tests.support.devices import DEVICES
from thermocline.kernels.gpu import host_results
from thermocline.kernels.gpu.host_results import HostResults
from thermocline.kernels.gpu.streams import DeviceStreams


@pytest.mark.parametrize("is_inference", [False, True])
def test_a_piece_is_used_again_when_its_arrays_are_gone(is_inference):
    """The last view of an array counts, whichever it is."""
    results = HostResults(pinned=False)
    with torch.inference_mode(is_inference):
        first, array = results.take((3, 5), torch.float32)
        first.fill_(1.0)
        views = [array[1:, ::2].T, torch.from_numpy(array)[1:, ::2].t().numpy()]
        address = first.data_ptr()
        del first, array
        for view in (views.pop(), views.pop()):
            gc.collect()
            other, theirs = results.take((3, 5), torch.float32)
            other.fill_(2.0)
            assert other.data_ptr() != address
            np.testing.assert_array_equal(view, np.ones((3, 2)))
            del other, theirs
        del view
        results.take((4, 5), torch.int32)
    assert results.num_bytes == 2 * 4096


@pytest.mark.parametrize("shape", [(), (0, 7), (1,), (1024,), (1025,), (2, 3, 4)])
def test_pieces_have_the_asked_shape(shape):
    """Nothing, one number, just a power of two and one more."""
    results = HostResults(pinned=False)
    found, array = results.take(shape, torch.float32)
    assert tuple(found.shape) == array.shape == shape
    assert found.dtype == torch.float32
    with pytest.raises(AssertionError, match="no piece"):
        results.take((host_results.MAX_BYTES,), torch.float32)


def test_threads_share_no_piece():
    """Each has its own numbers until it lets them go."""
    results = HostResults(pinned=False)
    wrong = []

    def work(number: int) -> None:
        for turn in range(300):
            value = number * 1000 + turn
            given, array = results.take((32,), torch.int32)
            given.fill_(value)
            if (array != value).any():
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong
    assert results.num_bytes <= 2 * 4 * 4096


@pytest.mark.parametrize("device", DEVICES)
def test_results_come_to_the_host(device, monkeypatch):
    """Small ones and those that are no piece: a copy, in memory that nothing else is written to."""
    with DeviceStreams.open(device) as streams, streams.computing():
        there = torch.arange(1000, dtype=torch.float32, device=streams.device)
        small = streams.to_host(there, spin=True)
        monkeypatch.setattr(host_results, "MAX_BYTES", 1000)
        large = streams.to_host(there.view(10, 100), spin=False)
        there.zero_()
        streams.finish(spin=True)
        np.testing.assert_array_equal(small, np.arange(1000))
        np.testing.assert_array_equal(large, np.arange(1000).reshape(10, 100))

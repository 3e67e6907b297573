"""Few rows that come again: computed, then captured, then replayed, by size; the same numbers each time."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from tests.support.capturing_device import Capturing
from thermocline.kernels.gpu.captured_rows import CapturedRows
from thermocline.kernels.gpu.streams import DeviceStreams

WIDTH, OUT = 5, 3
GAIN = torch.arange(WIDTH * OUT, dtype=torch.float32).view(WIDTH, OUT) + 1


def rows_of(streams: DeviceStreams) -> CapturedRows:
    return CapturedRows(streams, lambda x: x @ GAIN, "sums")


@pytest.mark.parametrize("number", range(1, 11))
def test_rows_of_every_number_come_out_alike(number):
    """Filled up to 1, 2, 4 or 8, what fills is never seen; more rows are always computed."""
    rng = np.random.default_rng(number)
    with Capturing() as streams:
        rows = rows_of(streams)
        for _ in range(4):
            x = rng.standard_normal((number, WIDTH)).astype(np.float32)
            found = rows(x, spin=True)
            assert found.shape == (number, OUT)
            np.testing.assert_allclose(found, x @ GAIN.numpy(), rtol=1e-5, atol=1e-4)
        is_small = number <= 8
        assert streams.events == (["captured"] + ["replayed"] * 3) * is_small
        assert rows.num_captured == is_small


def test_sizes_share_one_recording_and_earlier_rows_do_not_show():
    """Three rows after four use the four's, whose last row is gone."""
    with Capturing() as streams:
        rows = rows_of(streams)
        for number in (4, 4, 3):
            x = np.full((number, WIDTH), number, np.float32)
            found = rows(x, spin=True)
        np.testing.assert_allclose(found, x @ GAIN.numpy())
        assert streams.events.count("captured") == 1
        rows.clear()
        assert rows.num_captured == 0
        np.testing.assert_allclose(rows(x, spin=True), x @ GAIN.numpy())


@pytest.mark.parametrize("error", [RuntimeError("no"), torch.OutOfMemoryError("no memory")])
def test_a_capture_that_fails_is_logged_once_and_nothing_is_lost(monkeypatch, caplog, error):
    """Rows are computed as before, of this and of every other size."""

    def refuse(*_):
        raise error

    with Capturing() as streams, caplog.at_level(logging.WARNING, "thermocline.devices"):
        monkeypatch.setattr(streams, "capture", refuse)
        rows = rows_of(streams)
        for number in (1, 1, 1, 2, 2):
            x = np.ones((number, WIDTH), np.float32)
            np.testing.assert_allclose(rows(x, spin=True), x @ GAIN.numpy())
    (line,) = caplog.messages
    assert "sums are computed without a captured graph" in line


def test_a_device_that_records_nothing_is_asked_for_nothing():
    """torch's CPU."""
    with DeviceStreams(torch.device("cpu")) as streams:
        rows = rows_of(streams)
        for _ in range(3):
            np.testing.assert_allclose(
                rows(np.ones((2, WIDTH), np.float32), spin=True)[0, 0], GAIN[:, 0].sum()
            )
        assert rows.num_captured == 0

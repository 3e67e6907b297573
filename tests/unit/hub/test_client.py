"""What the listener of a download hears of the library's two ways to report progress."""

from __future__ import annotations

import logging
from types import SimpleNamespace

from huggingface_hub.utils._xet_progress_reporting import XetDownloadProgressReporter

from thermocline.hub.client import progress_class


def test_bytes_of_a_xet_download_count_once():
    """Both those that came and those that are written are told; what is ahead counts."""
    heard: list[int] = []
    reports = [(0, 40), (100, 90), (350, 400), (1000, 700)]
    with XetDownloadProgressReporter(
        reconstruction_desc="file",
        total=1000,
        log_level=logging.WARNING,
        tqdm_class=progress_class(lambda _, num_bytes: heard.append(num_bytes)),
    ) as reporter:
        for num_bytes, num_transferred in reports:
            report = SimpleNamespace(
                total_bytes=1000,
                total_bytes_completed=num_bytes,
                total_transfer_bytes_completed=num_transferred,
                total_bytes_completion_rate=5.0,
                total_transfer_bytes_completion_rate=5.0,
            )
            reporter.update_progress(report)
    # Written, then come, of each report.
    assert heard == [40, 60, 0, 250, 50, 600, 0]
    assert sum(heard) == 1000


def test_a_download_that_starts_over_takes_bytes_back():
    """Each piece counts as it comes."""
    heard: list[int] = []
    bar = progress_class(lambda _, num_bytes: heard.append(num_bytes))
    with bar(total=10, desc="x", unit="B") as progress:
        progress.update(5)
        progress.update(-5)
        progress.update(10)
    assert heard == [5, -5, 10]

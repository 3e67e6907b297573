"""The README's picture is of the trace beside it, and a picture of another trace is noticed."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from scripts import picture_signature
from thermocline.traces.chrome_reader import read_chrome
from thermocline.traces.overlap import summarize

ROOT = Path(__file__).parents[2]
PICTURE, TRACE = ROOT / "docs/images/timeline.png", ROOT / "traces/timeline.json.gz"


def test_the_picture_is_of_the_trace_that_the_readme_links():
    """Both were made in one go (`make picture`), and the trace is small enough to keep."""
    readme = (ROOT / "README.md").read_text()
    assert "(docs/images/timeline.png)" in readme
    assert "(traces/timeline.json.gz)" in readme
    assert picture_signature.main(["check", str(PICTURE), str(TRACE)]) == 0


def test_the_trace_shows_what_the_caption_says():
    """A prompt of 1000 tokens, and a CPU and a device that worked at the same time."""
    trace = read_chrome(TRACE)
    assert trace.metadata["model"] == "synthetic qwen3-30b-a3b Q4_K_M"
    assert b'"prompt_tokens":1000' in gzip.decompress(TRACE.read_bytes()).replace(b": ", b":")
    summary = summarize(trace.events)
    assert {"cpu 0", "hot", "gpu.h2d"} <= {busy.track.label for busy in summary.tracks}
    assert summary.overlapped_share > 0.2


def test_another_trace_or_a_large_one_is_refused(tmp_path, capsys):
    """Signing again replaces the signature, and leaves the pixels as they are."""
    picture, trace = tmp_path / "a.png", tmp_path / "a.json.gz"
    picture.write_bytes(PICTURE.read_bytes())
    trace.write_bytes(b"another")
    assert picture_signature.main(["check", str(picture), str(trace)]) == 1
    assert "is not of this trace" in capsys.readouterr().err
    assert picture_signature.main(["sign", str(picture), str(trace)]) == 0
    assert picture_signature.main(["check", str(picture), str(trace)]) == 0
    assert picture_signature.main(["check", str(picture), str(TRACE)]) == 1
    assert picture_signature.main(["sign", str(picture), str(TRACE)]) == 0
    assert picture.read_bytes() == PICTURE.read_bytes()
    large = b"x" * (picture_signature.MAX_TRACE_BYTES + 1)
    assert "bytes, at most" in picture_signature.fault(b"", large)
    with pytest.raises(ValueError, match="no PNG"):
        picture_signature.signed(b"text", b"")

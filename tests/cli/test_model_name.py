"""What is said while a model by name is looked for and downloaded, where somebody watches."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from thermocline.cli import model_name, model_tables
from thermocline.errors import HubError
from thermocline.hub.names import parse_name
from thermocline.hub.variants import RepoFile, group_variants


def test_the_line_of_a_download(monkeypatch, capsys):
    """How much is there, how fast it comes and how long it takes; then the check, which starts over."""
    said: list[str] = []
    clock = SimpleNamespace(now=5.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(model_name, "time", clock)
    transfer = model_name._Transfer("Q8_0 of a/b", 400 << 20, SimpleNamespace(say=said.append))
    transfer.advance("downloading", 0)
    clock.now = 15.0
    transfer.advance("downloading", 10 << 20)
    transfer.advance("downloading", 90 << 20)
    # What arrived without use is taken back.
    transfer.advance("downloading", -(10 << 20))
    transfer.advance("checking", 8 << 20)
    assert said == [
        "downloading: 0 B of 400.00 MiB",
        "downloading: 10.00 MiB of 400.00 MiB, 1.00 MiB/s, 6 min left",
        "downloading: 100.00 MiB of 400.00 MiB, 10.00 MiB/s, 30 s left",
        "downloading: 90.00 MiB of 400.00 MiB, 9.00 MiB/s, 34 s left",
        "checking: 8.00 MiB of 400.00 MiB",
    ]
    assert capsys.readouterr().err == "downloading Q8_0 of a/b\n"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_where_somebody_watches_the_choice_is_a_table(monkeypatch, capsys, is_terminal):
    """Before the error, on stderr; elsewhere the error's line is all."""
    files = (RepoFile("m-Q8_0.gguf", 3 << 30), RepoFile("m-Q6_K.gguf", 2 << 30))
    monkeypatch.setattr("thermocline.hub.client.hub_files", lambda _: files)
    stderr = SimpleNamespace(isatty=lambda: is_terminal)
    monkeypatch.setattr(model_name, "sys", SimpleNamespace(stderr=stderr))
    with pytest.raises(HubError, match=r"no Q4_K_M, but Q6_K \(2.00 GiB\), Q8_0 \(3.00 GiB\)"):
        model_name._chosen(parse_name("a/b"))
    shown = capsys.readouterr()
    assert shown.out == ""
    assert ("on this machine" in shown.err) == is_terminal


def test_what_fits_where():
    """The host's memory, then what is free on a GPU beside it, then the disk."""
    room = model_tables.Room(host_bytes=16 << 30, device_bytes=8 << 30)
    assert room.verdict(16 << 30) == "fits the memory"
    assert room.verdict(24 << 30) == "fits memory and GPU together"
    assert room.verdict(25 << 30) == "read from disk: 1.00 GiB more than there is memory"


def test_a_repository_that_lacks_parts_says_so(capsys):
    """In the table the lacking parts take the place of what would fit."""
    variants = group_variants([RepoFile("m-Q8_0-00001-of-00003.gguf", 5)])
    room = model_tables.Room(1 << 30, 0)
    model_tables.show_on_stderr(model_tables.quants_table("a/\x1b[2Jb", variants, room))
    shown = capsys.readouterr().err
    assert "2 parts are missing" in shown
    assert "\x1b" not in shown

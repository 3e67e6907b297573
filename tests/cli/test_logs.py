"""The log on stderr: as text or JSON, and only while the command runs."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from thermocline.cli import console, run
from thermocline.cli.logs import logging_to_stderr

LOG = logging.getLogger("thermocline.server")
ACCESS = logging.getLogger("thermocline.access")


def say() -> None:
    """Log a warning of two lines, a request, and a bug."""
    LOG.warning("too %s\nby far", "slow")
    ACCESS.info("GET %(path)s", {"path": "/x"}, extra={"fields": {"path": "/x", "status": 200}})
    try:
        raise ValueError("a bug")
    except ValueError as error:
        LOG.error("it failed", exc_info=error)


def test_text(capsys):
    """A time, a level where it matters, and one line for each but tracebacks."""
    with logging_to_stderr("text", logs_access=True):
        say()
    lines = capsys.readouterr().err.splitlines()
    assert [line[9:] for line in lines[:3]] == [
        "warning: too slow by far",
        "GET /x",
        "error: it failed",
    ]
    assert lines[-1] == "ValueError: a bug"


def test_json(capsys):
    """One object per line, with the fields of a request; nothing before and after the context."""
    with logging_to_stderr("json", logs_access=True):
        say()
    assert not ACCESS.isEnabledFor(logging.INFO)
    warning, access, error = map(json.loads, capsys.readouterr().err.splitlines())
    assert (warning["level"], warning["message"]) == ("warning", "too slow\nby far")
    assert (access["logger"], access["status"]) == ("thermocline.access", 200)
    assert "ValueError: a bug" in error["traceback"]


def test_requests_are_not_logged_unasked(capsys):
    """--access-log alone turns them on."""
    with logging_to_stderr("text", logs_access=False):
        ACCESS.info("GET /x")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("flags", [(), ("--quiet",), ("-q",)])
def test_quiet_shows_no_remarks(capsys, monkeypatch, flags):
    """A person at a terminal gets the answer alone; what must be seen is shown all the same."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with run.make_context("run", ["-p", "x", *flags]):
        console.hint("a remark")
        console.say("an address")
        console.note("a file that was written")
    shown = capsys.readouterr()
    assert shown.err == (
        "a file that was written\n" if flags else "a remark\na file that was written\n"
    )
    assert shown.out == ("" if flags else "an address\n")

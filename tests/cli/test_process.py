"""The command as a process of its own: Ctrl-C, closed pipes, bare environments, imports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from thermocline import __version__
from thermocline.traces.chrome_reader import read_chrome

ENDLESS = ("--prompt", "the", "--ignore-eos", "--kernels", "reference")


@pytest.mark.slow
def test_an_interrupt_is_clean_and_keeps_the_timeline(start, toy, tmp_path):
    """Ctrl-C during an answer: exit code 130, no traceback, and the timeline is on the disk."""
    trace = tmp_path / "t.json"
    process = start("run", toy, *ENDLESS, "--trace", str(trace))
    assert process.stdout.read(4)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in errors
    assert errors.startswith(b"timeline: ")
    assert read_chrome(trace).events


@pytest.mark.slow
def test_an_interrupt_ends_a_piped_chat(start, toy):
    """Ctrl-C during a turn of a chat without a terminal leaves with 130."""
    process = start("chat", toy, "--ignore-eos", "--kernels", "reference")
    process.stdin.write(b"the\n")
    process.stdin.flush()
    assert process.stdout.read(4)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == b""


@pytest.mark.slow
def test_a_reader_that_leaves_ends_the_command_silently(start, toy):
    """`thermocline run ... | head -c 4` says nothing on stderr and ends."""
    process = start("run", toy, *ENDLESS)
    assert process.stdout.read(4)
    process.stdout.close()
    assert process.wait(60) == 141
    assert process.stderr.read() == b""


@pytest.mark.slow
def test_a_table_is_not_forced_on_a_reader_that_left(start, toy):
    """Tables end like answers when nobody reads them."""
    process = start("info", toy)
    process.stdout.close()
    assert process.wait(60) == 141
    assert process.stderr.read() == b""


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_an_error_and_no_traceback(toy, unbuffered):
    """An answer that can not be written ends with one plain line, buffered by Python or not."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with open("/dev/full", "wb") as full:  # noqa: PTH123 - a device, not a file of ours
        done = subprocess.run(
            [sys.executable, "-m", "thermocline", "tokenize", toy, "the"],
            env=environment | {"PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
        )
    assert done.returncode == 1
    assert done.stderr.startswith(b"error: No space left on device")
    assert done.stderr.count(b"\n") == 1


@pytest.mark.slow
def test_a_bare_environment_is_enough(start, toy, tmp_path):
    """No HOME, a C locale, a dumb terminal: the answer comes, and nothing is left in the folder."""
    env = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "LC_ALL": "C",
        "TERM": "dumb",
        "NO_COLOR": "1",
        "PYTHONIOENCODING": "ascii",
    }
    process = start("run", toy, "-p", "é", "-n", "8", "--kernels", "reference", env=env)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert out.endswith(b"\n")
    assert errors == b""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_errors_have_no_traceback(start, tmp_path):
    """A file that is no model gives one line and exit code 1."""
    process = start("run", str(tmp_path / "nothing.gguf"), "-p", "x")
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert out == b""
    assert errors.startswith(b"error: ")
    assert errors.count(b"\n") == 1


@pytest.mark.slow
def test_help_and_version_import_nothing_heavy():
    """`--help` answers at once: the engine, NumPy, rich and asyncio are imported by commands only."""
    code = (
        "import sys, json, thermocline.cli; "
        "print(json.dumps([m for m in ('torch', 'aiohttp', 'numpy', 'rich', 'asyncio', "
        "'thermocline.engine.api') if m in sys.modules]))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, check=True
    )
    assert json.loads(done.stdout) == []


@pytest.mark.slow
def test_the_module_runs_as_a_program():
    """`python -m thermocline --version` names the version."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-m", "thermocline", "--version"],
        env=environment,
        capture_output=True,
        check=True,
    )
    assert done.stdout.decode() == f"thermocline {__version__}\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "closed"),
    [
        ("info MODEL", "<&- >&- 2>&-"),
        ("run MODEL -p the -n 2", ">&-"),
        ("chat MODEL", "<&-"),
        ("--help", ">&-"),
    ],
)
def test_closed_standard_streams_are_no_fault(toy, tmp_path, command, closed):
    """Who closes a stream gets and gives nothing by it: exit code 0 and no traceback."""
    words = command.replace("MODEL", toy)
    line = f"exec {sys.executable} -m thermocline {words} {closed}"
    done = subprocess.run(
        ["sh", "-c", line],
        input=b"" if "<" not in closed else None,
        capture_output=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        timeout=60,
        check=False,
    )
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False), done.stderr.decode()


def test_help_that_can_not_be_written_is_one_line(tmp_path):
    """A full disk below `--help > file`: an error line and exit code 1."""
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "thermocline", "--help"],
            stdout=full,
            stderr=subprocess.PIPE,
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": ""},
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, b"error: No space left on device\n")

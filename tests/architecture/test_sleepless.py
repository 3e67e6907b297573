"""Tests wait for what happens, not for time to pass: each real sleep has a reason here."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]
# Oracles and clients run other programs, and are no part of the suite.
FOLDERS = sorted(
    {path for path in TESTS.iterdir() if path.is_dir()} - {TESTS / "oracle", TESTS / "clients"}
)
SLEEPS = {
    "reliability/test_changed_model.py": (
        3,
        "polls another process, with a pause that leaves it the processor",
    ),
    "reliability/test_ranks.py": (
        2,
        "polls other processes, with a pause that leaves them the processor",
    ),
    "reliability/test_stopped_worker.py": (
        2,
        "polls counters, with a pause that leaves a worker the processor",
    ),
    "reliability/test_soak.py": (2, "kills workers and looks at sizes now and then, for hours"),
    "server/bystander.py": (1, "polls what another process streams"),
    "server/live.py": (1, "polls another thread, which has no event for what only tests ask"),
    "server/test_heavy_requests.py": (
        2,
        "polls another process: its memory, and whom it has received",
    ),
    "unit/kernels/test_thread_pool.py": (1, "measures what idle threads cost over a time"),
    "unit/parallel/test_socket_group.py": (1, "a group that is slower than another"),
    "unit/remote/test_client.py": (
        3,
        "a process is hit at a drawn moment of its start; a thread is to rest",
    ),
}


def sleeps(path: Path) -> int:
    """How many calls of `sleep` with anything but a literal 0 the file has."""
    calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    return sum(
        isinstance(call.func, ast.Attribute)
        and call.func.attr == "sleep"
        and ast.unparse(call.func.value) in {"time", "asyncio"}
        and ast.unparse(call.args[0]) != "0"
        for call in calls
    )


def test_no_test_sleeps_without_a_reason():
    """The files that sleep, and how often, are those of the table."""
    counts = {
        path.relative_to(TESTS).as_posix(): sleeps(path)
        for folder in FOLDERS
        for path in folder.rglob("*.py")
    }
    assert {name: n for name, n in counts.items() if n} == {n: c for n, (c, _) in SLEEPS.items()}


def test_a_sleep_is_found(tmp_path):
    """Those of the clock count, those that only let others run do not."""
    (tmp_path / "t.py").write_text(
        "time.sleep(0.1)\nasyncio.sleep(0)\nasyncio.sleep(x)\nclock.sleep(1)"
    )
    assert sleeps(tmp_path / "t.py") == 2

"""The lint rules that hold the house's habits are in force: each is broken once, and found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAD = '"""New."""\n\n'
FUNCTION = HEAD + "def check(value: int) -> None:\n    assert value\n"

BREACHES = {
    "somebody else's private member": (
        "SLF001",
        "engine/new.py",
        HEAD + "def peek(other: object) -> object:\n    return other._inner\n",
    ),
    "async without await": (
        "RUF029",
        "pipeline/new.py",
        HEAD + "async def work() -> int:\n    return 1\n",
    ),
    "a global that a function sets": (
        "PLW0603",
        "experts/new.py",
        HEAD + "count = 0\n\n\ndef add() -> None:\n    global count\n    count = 1\n",
    ),
    "the environment outside of environment.py": (
        "TID251",
        "machine.py",
        HEAD + 'import os\n\nhome = os.environ.get("HOME")\n',
    ),
    "getenv": ("TID251", "cli/new.py", HEAD + 'import os\n\nhome = os.getenv("HOME")\n'),
    "putenv": ("TID251", "kv/new.py", HEAD + 'import os\n\nos.putenv("A", "B")\n'),
    "assert in the server": ("S101", "server/core/new.py", FUNCTION),
    "assert in a reader of files": ("S101", "modelfile/new.py", FUNCTION),
    "assert in the settings": ("S101", "config.py", FUNCTION),
    "assert in a command": ("S101", "cli/new.py", FUNCTION),
}
ALLOWED = {
    "assert of an invariant": ("kv/new.py", FUNCTION),
    "one file reads the environment": (
        "environment.py",
        HEAD + 'import os\n\nhome = os.environ.get("HOME")\n',
    ),
}


def lint(name: str, text: str) -> list[str]:
    """The codes of what ruff finds in `text` if it were that file of the package."""
    run = subprocess.run(
        [
            *(sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format", "json"),
            *("--stdin-filename", str(ROOT / "thermocline" / name), "-"),
        ],
        input=text,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )
    assert run.returncode in (0, 1), run.stderr
    return [found["code"] for found in json.loads(run.stdout)]


@pytest.mark.parametrize("breach", BREACHES)
def test_a_breach_is_found(breach):
    """Ruff, with the project's settings, names the rule."""
    rule, name, text = BREACHES[breach]
    assert lint(name, text) == [rule]


@pytest.mark.parametrize("case", ALLOWED)
def test_what_is_meant_is_allowed(case):
    """Invariants of our own are asserted, and one file reads the environment."""
    assert lint(*ALLOWED[case]) == []

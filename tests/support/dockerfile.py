"""Carries out a Dockerfile's steps in bare Debian roots: no container program is needed.

It knows the instructions that this project's file uses, and refuses all others. Layers, build arguments from outside and
signals are not imitated.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.support.bare_root import ROOT, BareRoot

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_VARIABLE = re.compile(r"\$\{(\w+)\}")
_SUITE = re.compile(r"debian:(\w+)-slim")
_RUN_SECONDS = 900
_TEXTS = {"USER": "user", "WORKDIR": "folder"}
_LISTS = {"ENTRYPOINT": "entrypoint", "CMD": "command"}


@dataclass
class Stage:
    """A stage as far as its steps were carried out; the last one is the image."""

    root: BareRoot
    environment: dict[str, str] = field(default_factory=dict)
    user: str = "root"
    folder: str = "/"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)
    volumes: list[str] = field(default_factory=list)

    def run(
        self, *command: str, network: bool = False, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as a container of this stage would."""
        settings = (f"{name}={value}" for name, value in self.environment.items())
        inside = ("env", "-C", self.folder, *settings, *command)
        return self.root.run(*inside, network=network, user=self.user, source=None, timeout=timeout)


def carry_out(text: str, folder: Path) -> Stage:
    """Carry out all steps, each stage in a root below `folder`. Return the last stage."""
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for word, rest in _instructions(text):
        rest = _VARIABLE.sub(lambda found: arguments[found[1]], rest)
        if word == "ARG":
            name, _, value = rest.partition("=")
            arguments[name] = value
        elif word == "FROM":
            base, _, name = rest.partition(" AS ")
            suite = _SUITE.fullmatch(base)
            assert suite, f"no Debian: {base}"
            stage = Stage(BareRoot(suite[1], folder / (name or "last")))
            stages[name or "last"] = stage
        else:
            assert stage is not None, "the first step is FROM"
            _step(stage, word, rest, stages)
    assert stage is not None
    return stage


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        word, _, rest = line.partition(" ")
        yield word, rest.strip()


def _step(stage: Stage, word: str, rest: str, stages: dict[str, Stage]) -> None:
    match word:
        case "RUN":
            done = stage.run("sh", "-c", rest, network=True, timeout=_RUN_SECONDS)
            assert done.returncode == 0, f"{rest}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        case "COPY":
            _copy(stage, rest.split(), stages)
        case "ENV":
            stage.environment |= dict(re.findall(r"(\w+)=(\S+)", rest))
        case "USER" | "WORKDIR":
            setattr(stage, _TEXTS[word], rest)
        case "ENTRYPOINT" | "CMD":
            setattr(stage, _LISTS[word], json.loads(rest))
        case "HEALTHCHECK":
            stage.health = json.loads(rest.partition(" CMD ")[2])
        case "VOLUME":
            stage.volumes.append(rest)
        case "EXPOSE":
            pass
        case _:
            raise AssertionError(f"no such instruction here: {word}")


def _copy(stage: Stage, words: list[str], stages: dict[str, Stage]) -> None:
    """Copy what git tracks, or a folder of another stage."""
    if words[0].startswith("--from="):
        _, source, target = words
        origin = stages[words[0].partition("=")[2]].root.folder
        shutil.copytree(
            f"{origin}{source}", f"{stage.root.folder}{target}", symlinks=True, dirs_exist_ok=True
        )
        return
    source, target = words
    assert source == "."
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files"], capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        to = stage.root.folder / target.lstrip("/") / name
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, to)

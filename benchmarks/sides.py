"""The measuring process's end of the two children, and what can be set on llama.cpp's side.

Each child loads its file once; a request is one JSON line, so that the two can be asked in turn as often
as one likes. Neither computes while the other is asked.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

_ROOT: Final = Path(__file__).parents[1]
# OpenMP's threads spin for a moment after their last job.
_SETTLE_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Work:
    """One request: tokens of the prompt, tokens after it, and which random tokens."""

    num_prompt: int
    num_decode: int
    seed: int = 1

    def as_request(self) -> dict[str, Any]:
        """Return it as the children read it."""
        return {"prompt": self.num_prompt, "decode": self.num_decode, "seed": self.seed}


@dataclass(frozen=True, slots=True)
class LlamaSettings:
    """What changes llama.cpp's speed on a CPU."""

    repack: bool
    flash: bool
    ubatch: int

    def __str__(self) -> str:
        repack = "repacked" if self.repack else "not repacked"
        flash = "flash attention" if self.flash else "no flash attention"
        return f"{repack}, {flash}, ubatch {self.ubatch}"


def every_setting(repacks: Sequence[bool], ubatches: Sequence[int]) -> tuple[LlamaSettings, ...]:
    """Return all combinations."""
    return tuple(
        LlamaSettings(*combination)
        for combination in itertools.product(repacks, (False, True), ubatches)
    )


@dataclass(frozen=True, slots=True)
class Speeds:
    """Tokens per second of one request; 0 for a half of it that was not run."""

    prefill: float
    decode: float


class Child:
    """A child process that answers JSON lines; a context manager that ends it."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT
        )
        self.facts = self._read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    @property
    def pid(self) -> int:
        """Number of the child process."""
        return self._process.pid

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send one request and wait for its answer."""
        time.sleep(_SETTLE_S)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args!r} ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


class EngineChild(Child):
    """thermocline with an open file."""

    def __init__(
        self,
        model: Path,
        context_tokens: int,
        threads: int | None,
        isa: str = "auto",
        device_memory_bytes: int | None = None,
    ) -> None:
        """threads: None for one per processor; device_memory_bytes: None for all that is free, where there is a GPU."""
        module = [sys.executable, "-m", "benchmarks.engine_side", str(model.absolute())]
        module += ["--context", str(context_tokens), "--isa", isa]
        if threads is not None:
            module += ["--threads", str(threads)]
        if device_memory_bytes is not None:
            module += ["--device-memory", str(device_memory_bytes)]
        super().__init__(module)

    def run(self, work: Work) -> Speeds:
        """Compute `work` from an empty cache."""
        return _speeds(work, self.ask(work.as_request()))


class LlamaChild(Child):
    """llama.cpp with a loaded file."""

    def __init__(self, python: str, model: Path, threads: int, *, repack: bool) -> None:
        script = str(Path(__file__).with_name("llama_side.py"))
        command = [python, script, str(model.absolute()), "--threads", str(threads)]
        super().__init__([*command, "--repack"] if repack else command)

    def run(
        self,
        work: Work,
        settings: LlamaSettings,
        *,
        keep_prompt: bool = False,
        states: Path | None = None,
    ) -> Speeds:
        """Compute `work`; with `keep_prompt`, behind the prompt of the last such request.

        states: a folder through which children that repack and that do not give each other the caches of such prompts.
        """
        state = None
        if states is not None:
            name = f"{work.num_prompt}-{work.seed}-{'flash' if settings.flash else 'plain'}.state"
            state = str(states / name)
        request = work.as_request() | {
            "flash": settings.flash,
            "ubatch": settings.ubatch,
            "context": -(-(work.num_prompt + work.num_decode + 1) // 256) * 256,
            "keep": keep_prompt,
            "state": state,
        }
        return _speeds(work, self.ask(request))


def _speeds(work: Work, answer: dict[str, Any]) -> Speeds:
    prefill_s, decode_s = answer["prefill_s"], answer["decode_s"]
    return Speeds(
        work.num_prompt / prefill_s if prefill_s else 0.0,
        work.num_decode / decode_s if work.num_decode and decode_s else 0.0,
    )


def llama_python(given: str | None) -> str | None:
    """Return an interpreter that can import llama_cpp: the given one, the environment's, or ours."""
    if given is not None and "/" in given:  # it is started in other folders
        given = str(Path(given).absolute())
    for candidate in (given, os.environ.get("THERMOCLINE_LLAMA_PYTHON"), sys.executable):
        if candidate and _has_llama(candidate):
            return candidate
        if candidate and candidate is given:
            raise SystemExit(f"{given} can not import llama_cpp: see scripts/oracle_env.sh")
    return None


def _has_llama(python: str) -> bool:
    command = [python, "-c", "import llama_cpp"]
    try:
        ran = subprocess.run(command, cwd="/", capture_output=True, check=False, timeout=120)
    except OSError:
        return False
    return ran.returncode == 0

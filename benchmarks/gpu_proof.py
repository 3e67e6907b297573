"""Does everything that a GPU computes hold on this one, and how fast? Usage `python -m benchmarks.gpu_proof`, or `make gpu-proof`.

The link, kernels against their twins, whole models, faults, and a model of 48 layers under a cap on memory. Each stage is
a process with a deadline, at most 8 minutes in all. Writes a JSON file after every stage, and a page in Markdown.
`--device torch-cpu` rehearses the same stages without a GPU, with small sizes. Without a GPU the status is 2.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from benchmarks.proof.command import add_options, facts_of, run_proof, slug
from benchmarks.proof.runner import ROOT, Stage

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_ASK: Final = """
import sys
from thermocline.errors import DeviceMissingError
from thermocline.kernels.gpu.requirements import require_gpu
try:
    require_gpu()
except DeviceMissingError as error:
    sys.exit(str(error))
import torch
print(torch.cuda.get_device_name())
"""
_ASK_S: Final = 60
_CAP_BYTES: Final = 12 << 30
_MAX_JOBS: Final = 4  # each has a context on the device
_SUITES: Final = (
    ("experts", "tests/unit/kernels/gpu/test_device_experts.py"),
    ("rows", "tests/unit/kernels/gpu/test_device_rows.py"),
    ("products", "tests/unit/kernels/gpu/test_device_weights.py"),
    ("attention", "tests/unit/kernels/gpu/test_device_attention.py"),
    ("delta", "tests/unit/kernels/gpu/test_device_delta.py"),
    ("dense", "tests/unit/kernels/gpu/test_device_dense.py"),
    ("steps", "tests/unit/kernels/gpu/test_steps.py"),
    ("streams", "tests/unit/kernels/gpu/test_streams.py"),
    ("expert device", "tests/unit/experts/test_gpu_device.py"),
    ("non-expert layers", "tests/unit/models/device/test_non_expert.py"),
)
_ENGINE_SUITES: Final = (
    ("engines, experts", "tests/e2e/test_gpu_experts.py"),
    ("engines, non-expert", "tests/e2e/test_device_non_expert.py"),
)
# Some minutes in the interpreter or with slow twins: a rehearsal takes a few of their cases.
_REHEARSED: Final[Mapping[str, str]] = {
    "engines, experts": "test_answers_are_those_of_the_cpu and half",
    "engines, non-expert": "memory or trace or cancelled",
    "non-expert layers": "qwen3moe or memory",
}
_LARGE: Final = "benchmarks.proof.device_large:"
_ENGINES: Final = "benchmarks.proof.device_engines:"
_DEVICE: Final = "benchmarks.proof.device:"


def stages(scratch: Path, *, kind: str, quick: bool) -> list[Stage]:
    """Return the stages: the link, checks of parts, checks of wholes, and then what is timed."""
    of: dict[str, Any] = {"kind": kind}
    is_real = kind == "cuda"
    nbytes = 256 << 20 if is_real else 1 << 20
    found = [
        Stage("device", _DEVICE + "device", 30, of),
        Stage("copies", _DEVICE + "copies", 30, of | {"nbytes": nbytes}),
    ]
    if quick:
        return found
    shape = "mini" if is_real else "tiny"
    answers = {"answer": 24, "questions": 2} if is_real else {"answer": 6, "questions": 1}
    return [
        *found,
        *(_checks(name, path, kind) for name, path in _SUITES),
        Stage("non-expert", _DEVICE + "non_expert", 40, of | {"shape": shape}),
        Stage("demo", _ENGINES + "demo", 90, of | answers),
        Stage("faults", _ENGINES + "faults", 40, of),
        *_large(str(scratch), kind, is_real=is_real),
        # Some minutes: what they check is in part in the stages before.
        *(_checks(name, path, kind) for name, path in _ENGINE_SUITES),
    ]


def _checks(name: str, path: str, kind: str) -> Stage:
    expression = "" if kind == "cuda" else _REHEARSED.get(name, "")
    given = {"paths": [path], "of": kind, "expression": expression}
    return Stage(f"checks, {name}", "benchmarks.proof.suite:run_tests", 90, given, shared=True)


def _large(folder: str, kind: str, *, is_real: bool) -> list[Stage]:
    """Return the stages on the large model; the figures that matter most come first."""
    cap = _CAP_BYTES if is_real else None
    model: dict[str, Any] = {"shape": "qwen3-30b-a3b" if is_real else "tiny"}
    model["layers"] = 48 if is_real else 2
    given: dict[str, Any] = {"kind": kind, "folder": folder, "cap": cap}
    given["answer"] = 32 if is_real else 2
    at = [512, 8192] if is_real else [16, 32]
    short = {"prompts": [512, 2048] if is_real else [16, 32], "rounds": 4 if is_real else 2}
    found = [
        Stage("model", _LARGE + "write", 90, model | {"folder": folder}),
        Stage("ways in turns", _LARGE + "ways", 95, given | short),
    ]
    for share in (0.51, 0.65, 0.8):
        more = given | {"share": share, "contexts": at}
        found.append(Stage(f"{share:.0%} of the experts", _LARGE + "hits", 40, more))
    return found


def _name_of_gpu() -> tuple[str, str]:
    """Return the GPU's name, or "" and why there is none. Another process asks: a broken driver may hang or crash."""
    try:
        ran = subprocess.run([sys.executable, "-c", _ASK], cwd=ROOT, capture_output=True, text=True, timeout=_ASK_S)  # fmt: skip
    except subprocess.TimeoutExpired:
        return "", f"the GPU's driver did not answer within {_ASK_S} s"
    if ran.returncode == 0 and ran.stdout.strip():
        return ran.stdout.strip(), ""
    lines = (
        ran.stderr.strip() or f"asking for a GPU ended with status {ran.returncode}"
    ).splitlines()
    return "", lines[-1]


def main(arguments: list[str] | None = None) -> int:
    """Run the proof; 1 if a row failed, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_proof", description=__doc__)
    add_options(parser)
    parser.add_argument("--device", choices=("cuda", "torch-cpu"), default="cuda")
    options = parser.parse_args(arguments)
    is_real = options.device == "cuda"
    name, why = _name_of_gpu() if is_real else ("torch-cpu", "")
    if not name:
        sys.stderr.write(f"gpu-proof: {why}; --device torch-cpu rehearses without one\n")
        return 2
    proof = "gpu-proof" if is_real else "gpu-rehearsal"
    facts = facts_of(proof, name)
    path = options.out / f"{proof}-{slug(name)}.json"
    make = partial(stages, kind=options.device, quick=options.quick)
    scratch_bytes = (22 if is_real else 1) << 30
    return run_proof(
        facts, path, make, options=options, scratch_bytes=scratch_bytes, max_jobs=_MAX_JOBS
    )


if __name__ == "__main__":
    sys.exit(main())

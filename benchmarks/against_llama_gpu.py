"""Is thermocline faster than llama.cpp where the GPU holds only a part of the model? Usage
`python -m benchmarks.against_llama_gpu MODEL.gguf --llama-bench PATH --device-memory 12GiB`.

PATH is llama.cpp's own `llama-bench`, built with CUDA. It gets as many layers' experts on the GPU as the memory takes
(`--n-cpu-moe`), and its settings are measured against each other first: the file mapped or read, flash attention or not,
micro-batches of 512 and 2048. Then thermocline with its defaults, which stays open, and llama.cpp at its best take turns.
What each really takes of the GPU's memory is measured too, the driver's own part included.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil

from benchmarks.measure import (
    RESULTS,
    ForeignLoad,
    Peak,
    Row,
    describe_machine,
    paired_ratios,
    spread,
    table,
    write_rows,
)
from benchmarks.sides import EngineChild, Speeds, Work
from thermocline.modelfile.reader import open_model_file
from thermocline.models.registry import read_spec
from thermocline.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

_NAME: Final = "against_llama_gpu"
_DECODE: Final = "decode"
# What llama.cpp takes beside weights, cache and the logits of a micro-batch: work space and the driver's own.
_BESIDE_BYTES: Final = 1 << 30
_LOOK_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Settings:
    """What changes llama.cpp's speed where the GPU holds a part of the model."""

    mapped: bool
    flash: bool
    ubatch: int
    cpu_layers: int

    def __str__(self) -> str:
        mapped = "mapped" if self.mapped else "read"
        flash = "flash attention" if self.flash else "no flash attention"
        return f"{mapped}, {flash}, ubatch {self.ubatch}, n-cpu-moe {self.cpu_layers}"


class LlamaBench:
    """Runs llama-bench on one file; every call loads it anew."""

    def __init__(self, program: Path, model: Path, threads: int, work: Sequence[Work]) -> None:
        self._program, self._model, self._threads = program, model, threads
        self._prompts = sorted({one.num_prompt for one in work if not one.num_decode})
        self._decode = max(one.num_decode for one in work)
        self.build = ""
        self.gpu = ""

    def run(self, settings: Sequence[Settings]) -> dict[Settings, dict[str, float]]:
        """Return tokens per second by setting and phase: the fastest of two runs, after one to warm up.

        settings: they differ by flash attention alone, so that the file is loaded once.
        """
        first = settings[0]
        command = [
            str(self._program), "-m", str(self._model), "-t", str(self._threads), "-ngl", "999",
            "-ncmoe", str(first.cpu_layers), "-lm", "mmap" if first.mapped else "none",
            "-fa", ",".join("on" if one.flash else "off" for one in settings),
            "-ub", str(first.ubatch), "-b", "2048",
            "-p", ",".join(map(str, self._prompts)), "-n", str(self._decode), "-r", "2",
            "-o", "jsonl",
        ]  # fmt: skip
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {ran.returncode}:\n{ran.stderr}")
        by_flash = self._read(ran.stdout)
        return {one: by_flash[one.flash] for one in settings}

    def _read(self, lines: str) -> dict[bool, dict[str, float]]:
        """Return what the program's lines of JSON say, each phase's fastest repetition."""
        found: dict[bool, dict[str, float]] = {False: {}, True: {}}
        for line in lines.splitlines():
            if not line.startswith("{"):
                continue
            one = json.loads(line)
            self.build, self.gpu = str(one["build_commit"]), str(one["gpu_info"])
            name = _DECODE if one["n_gen"] else _prefill(one["n_prompt"])
            found[one["flash_attn"] == 1][name] = max(one["samples_ts"])
        return found


def used_bytes() -> int:
    """Return the bytes of the GPU's memory that are in use, by its driver. Asking takes time, also the driver's."""
    ask = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(ask, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"nvidia-smi does not tell the GPU's memory ({error})") from None
    return int(found.splitlines()[0]) << 20


def layers_on_cpu(sizes: Mapping[str, int], memory_bytes: int | None, kept_bytes: int) -> int:
    """Return of how many layers the experts stay on the CPU, so that the rest fits into `memory_bytes`.

    sizes: bytes by the tensors' names; the embedding stays on the CPU, as llama.cpp has it. kept_bytes: of cache and work
    space. None: all of it fits.
    """
    if memory_bytes is None:
        return 0
    experts: dict[int, int] = {}
    rest = kept_bytes
    for name, nbytes in sizes.items():
        if "_exps." in name:
            layer = int(name.split(".")[1])
            experts[layer] = experts.get(layer, 0) + nbytes
        elif name != "token_embd.weight":
            rest += nbytes
    there = rest + sum(experts.values())
    for count, layer in enumerate(sorted(experts)):
        if there <= memory_bytes:
            return count
        there -= experts[layer]
    return len(experts)


def settings_of(
    model: Path, memory_bytes: int | None, ubatches: Iterable[int], context_tokens: int
) -> tuple[Settings, ...]:
    """Return what to try: every combination, each with the layers that fit beside its micro-batch."""
    with open_model_file(model) as file:
        sizes = {name: tensor.nbytes for name, tensor in file.tensors.items()}
        vocabulary = file.tensors["token_embd.weight"].shape[0]
        kept = read_spec(file).kv_shapes
    # Halves: keys and values, or what both are made of.
    numbers = sum(one.kv_heads * one.head_dim * (1 if one.latent else 2) for one in kept)
    cache = 2 * numbers * context_tokens
    return tuple(
        Settings(mapped, flash, ubatch, layers_on_cpu(sizes, memory_bytes, cache + ubatch * vocabulary * 4 + _BESIDE_BYTES))
        for mapped, ubatch, flash in itertools.product((False, True), ubatches, (True, False))
    )  # fmt: skip


def best_of(
    tuned: Mapping[Settings, Mapping[str, float]], phases: Iterable[str]
) -> dict[str, Settings]:
    """Return each phase's fastest setting."""
    return {name: max(tuned, key=lambda one: tuned[one][name]) for name in phases}


def report(
    memory: str,
    ours: Mapping[str, Sequence[float]],
    theirs: Mapping[str, Sequence[float]],
    best: Mapping[str, Settings],
) -> tuple[str, list[Row]]:
    """Return the table for a reader and the rows for the CSV. memory: what both might take, in words."""
    rows, lines = [], []
    for name, settings in best.items():
        case, note = f"{name}, {memory}", str(settings)
        ratios = paired_ratios(ours[name], theirs[name])
        lines.append((case, spread(ours[name]), spread(theirs[name]), spread(ratios, 2)))
        rows += [
            Row(_NAME, case, "thermocline", "speed", "tokens/s", tuple(ours[name])),
            Row(_NAME, case, "llama.cpp", "speed", "tokens/s", tuple(theirs[name]), note),
            Row(_NAME, case, "ratio", "speed", "x", ratios, note),
        ]
    header = ("tokens/s: median (lowest to highest)", "thermocline", "llama.cpp", "of each pair")
    return table(header, lines), rows


def run(options: argparse.Namespace) -> int:
    """Measure both sides with each size of memory; rows are written as they come."""
    work = [Work(tokens, 0) for tokens in options.prefill] + [Work(1, options.decode)]
    llama = LlamaBench(options.llama_bench, options.model, options.threads, work)
    facts = describe_machine(options.threads)
    versions = facts["versions"]

    def write(rows: Sequence[Row], load: ForeignLoad) -> None:
        own = {"versions": f"{versions} llama.cpp={llama.build}", "gpu": llama.gpu}
        write_rows(options.out, rows, facts | own | {"foreign_cores": f"{load.cores:.2f}"})

    for text in options.device_memory:
        _compare(options, llama, work, text, write)
    print(f"rows appended to {options.out}")
    return 0


def _compare(
    options: argparse.Namespace,
    llama: LlamaBench,
    work: list[Work],
    text: str,
    write: Callable[[Sequence[Row], ForeignLoad], None],
) -> None:
    limit = None if text == "all" else parse_bytes(text)
    memory = "all of the GPU" if limit is None else f"{text} of the GPU"
    phases = {_prefill(one.num_prompt) if not one.num_decode else _DECODE: one for one in work}
    context = max(one.num_prompt + one.num_decode for one in work) + 1
    tuned: dict[Settings, dict[str, float]] = {}
    for _, group in itertools.groupby(
        settings_of(options.model, limit, options.ubatches, context),
        lambda one: (one.mapped, one.ubatch),
    ):
        settings, before = list(group), used_bytes()
        with ForeignLoad() as load, Peak(used_bytes, _LOOK_S) as used:
            found = llama.run(settings)
        tuned |= found
        write(_tuning_rows(memory, found, (used.value - before) * 2**-30), load)
    best = best_of(tuned, phases)
    before = used_bytes()
    with ExitStack() as stack:
        with ForeignLoad() as load, Peak(used_bytes, _LOOK_S) as used:
            engine = stack.enter_context(
                EngineChild(options.model, context, None, device_memory_bytes=limit)
            )
            for each in [*work, *work]:  # compiles and captures, and sees which experts are used
                engine.run(each)
        taken, open_s = (used.value - before) * 2**-30, engine.facts["open_s"]
        print(f"  thermocline opened in {open_s:.1f} s and takes {taken:.1f} GiB", flush=True)
        rows = [
            Row(_NAME, memory, "thermocline", "memory taken", "GiB", (taken,)),
            Row(_NAME, memory, "thermocline", "opening", "s", (open_s,)),
        ]
        write(rows, load)
        ours: dict[str, list[float]] = {name: [] for name in phases}
        theirs: dict[str, list[float]] = {name: [] for name in phases}
        load = ForeignLoad()
        try:
            with load:
                for turn in range(options.repeats):
                    if turn % 2:
                        mine, other = _ours(engine, phases, turn), _theirs(llama, best)
                    else:
                        other, mine = _theirs(llama, best), _ours(engine, phases, turn)
                    for name in phases:
                        ours[name].append(mine[name])
                        theirs[name].append(other[name])
                    print(f"  turn {turn}: {_words(mine)}; llama.cpp {_words(other)}", flush=True)
        finally:  # who ends it keeps the turns so far
            if any(theirs.values()):
                lines, rows = report(memory, ours, theirs, best)
                write(rows, load)
                print("", lines, "", load, sep="\n", flush=True)


def _tuning_rows(
    memory: str, found: Mapping[Settings, Mapping[str, float]], taken: float
) -> list[Row]:
    rows = []
    for settings, speeds in found.items():
        print(f"  {settings}: {_words(speeds)}; {taken:.1f} GiB", flush=True)
        rows.append(Row(_NAME, memory, "llama.cpp", "memory taken", "GiB", (taken,), str(settings)))
        rows += [
            Row(_NAME, f"{name}, {memory}", "llama.cpp", "speed, tuning", "tokens/s", (value,), str(settings))
            for name, value in speeds.items()
        ]  # fmt: skip
    return rows


def _ours(engine: EngineChild, phases: Mapping[str, Work], turn: int) -> dict[str, float]:
    """Return the faster of two runs of each phase, as of llama-bench's two."""
    return {
        name: max(
            _half(engine.run(Work(one.num_prompt, one.num_decode, seed)), one)
            for seed in (2 * turn + 2, 2 * turn + 3)
        )
        for name, one in phases.items()
    }


def _theirs(llama: LlamaBench, best: Mapping[str, Settings]) -> dict[str, float]:
    measured: dict[Settings, dict[str, float]] = {}
    for settings in dict.fromkeys(best.values()):
        measured |= llama.run([settings])
    return {name: measured[settings][name] for name, settings in best.items()}


def _half(speeds: Speeds, work: Work) -> float:
    return speeds.decode if work.num_decode else speeds.prefill


def _prefill(tokens: int) -> str:
    return f"prefill {tokens}"


def _words(speeds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f}" for name, value in speeds.items())


def main(arguments: list[str] | None = None) -> int:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--threads", type=int, default=psutil.cpu_count(logical=False), help="of llama.cpp; thermocline chooses")  # fmt: skip
    parser.add_argument("--out", type=Path, default=RESULTS / "against-llama-gpu.csv")
    parser.add_argument("--llama-bench", type=Path, required=True, metavar="PROGRAM", help="llama.cpp's llama-bench with CUDA")  # fmt: skip
    parser.add_argument("--device-memory", nargs="*", default=["12GiB"], metavar="SIZE", help='of the GPU for each side, or "all"')  # fmt: skip
    parser.add_argument("--prefill", type=int, nargs="*", default=[512, 2048], metavar="TOKENS")
    parser.add_argument("--decode", type=int, default=32, metavar="TOKENS")
    parser.add_argument("--ubatches", type=int, nargs="*", default=[512, 2048], metavar="TOKENS")
    parser.add_argument("--repeats", type=int, default=3, help="pairs")
    return run(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())

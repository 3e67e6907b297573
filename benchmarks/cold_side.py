"""One run of thermocline on a file that is not in memory, in a process of its own: for larger_than_ram.

Enters a memory group if it is given one, before anything is imported that would fill memory; answers with
one JSON line. `--read` reads the file's bytes as fast as the readers can, and computes nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import threading
import time
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thermocline import Engine


def read_bytes() -> int:
    """Return the bytes that this process has had read from disks."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def read_all(path: Path) -> dict[str, Any]:
    """Read every byte with as many pieces on their way as the readers have, and let go behind."""
    from thermocline.experts.catalog import ByteSpan
    from thermocline.modelfile.reader import open_model_file
    from thermocline.prefetch.advice import PageAdvisor
    from thermocline.prefetch.readers import NUM_THREADS, PIECE_BYTES

    with open_model_file(path) as file:
        advisor = PageAdvisor(file)
        starts = iter(range(0, len(file.mapping(0)), PIECE_BYTES))
        lock = threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    start = next(starts, None)
                if start is None:
                    return
                span = ByteSpan(0, start, min(start + PIECE_BYTES, len(file.mapping(0))))
                advisor.fetch(span)
                advisor.release(span)

        threads = [threading.Thread(target=work) for _ in range(NUM_THREADS)]
        begin, before = time.perf_counter(), read_bytes()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {"read_s": time.perf_counter() - begin, "read_bytes": read_bytes() - before}


async def prompt_of(engine: Engine, options: argparse.Namespace) -> list[int]:
    """Return the beginning of a text, or random tokens."""
    from benchmarks.engine_side import random_prompt
    from benchmarks.routing_source import held_text

    if options.text:
        return list(await engine.encode(held_text()))[: options.prompt]
    return random_prompt(engine.tokenizer.vocab_size, options.prompt, seed=options.seed)


async def compute(options: argparse.Namespace) -> dict[str, Any]:
    """Compute a prompt in the default chunks, then decode; greedy unless a temperature is given."""
    from benchmarks.memory import resident
    from thermocline import Engine, EngineConfig, SamplingParams
    from thermocline.config import CpuConfig, MemoryConfig, PrefetchConfig
    from thermocline.prefetch.governor import PrefetchGovernor

    selections: list[tuple[int, list[int]]] = []
    offer = PrefetchGovernor.offer_nowait

    def noting(self: PrefetchGovernor, hint: Any) -> None:  # noqa: ANN401 - passed on as it is
        if not hint.streams:
            selections.append((hint.layer, hint.experts.tolist()))
        offer(self, hint)

    PrefetchGovernor.offer_nowait = noting  # type: ignore[method-assign]  # this process's own
    config = EngineConfig(
        memory=MemoryConfig(
            max_context_tokens=options.prompt + options.decode + 16, max_full_contexts=1
        ),
        cpu=CpuConfig(threads=options.threads, isa=options.cpu_isa),
        prefetch=PrefetchConfig(mode=options.prefetch),
    )
    async with Engine.open(options.model, config) as engine:
        prompt = await prompt_of(engine, options)
        params = SamplingParams(
            max_tokens=options.decode + 1,
            ignore_eos=True,
            temperature=options.temperature,
            seed=options.seed,
        )
        ids: list[int] = []
        marks = [read_bytes()]
        answer: dict[str, Any] = {}
        async with aclosing(engine.generate(prompt, params)) as events:
            async for event in events:
                new = getattr(event, "token_ids", ())
                if new and not ids:
                    marks.append(read_bytes())
                ids += new
                if (timings := getattr(event, "timings", None)) is not None:
                    answer = {"prefill_s": timings.prompt_s, "decode_s": timings.decode_s}
        marks.append(read_bytes())
        found = engine.statistics().prefetch
        answer["heat"] = engine.statistics().heat.tolist()
        answer["repeats"] = engine.statistics().repeats
        answer["tokens"] = ids
        answer["anonymous_bytes"] = resident(os.getpid()).anonymous
        answer["read_bytes"] = [marks[1] - marks[0], marks[2] - marks[1]]
        answer["selections"] = selections
        if found is not None:
            answer["layers"] = [
                (layer.total_selected, layer.recall, layer.precision, layer.recency_recall)
                for layer in found.layers
            ]
            answer["found"] = [found.total_hits, found.total_late, found.total_misses]
            answer["wasted_bytes"] = found.total_wasted_bytes
    return answer


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cold_side", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--group", type=Path, help="memory group to enter")
    parser.add_argument("--read", action="store_true")
    parser.add_argument("--prefetch", default="auto")
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--decode", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-isa", default="auto")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--text", action="store_true", help="a prompt of prose, not of random tokens"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the prompt, and of what is drawn")
    options = parser.parse_args()
    if options.group is not None:
        (options.group / "cgroup.procs").write_text(str(os.getpid()))
    answer = read_all(options.model) if options.read else asyncio.run(compute(options))
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _main()

"""`thermocline bench`: tokens per second of prompt and answer on this machine."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import click

from thermocline.cli.console import Progress, echo_json, show
from thermocline.cli.model_name import hub_model
from thermocline.cli.options import (
    ONE_REQUEST_FLAGS,
    RANK_FLAGS,
    engine_options,
    json_option,
    model_argument,
    quiet_option,
)
from thermocline.cli.ranks import as_rank, has_followed
from thermocline.cli.session import model_path, open_engine, run_until_done
from thermocline.errors import ConfigError

if TYPE_CHECKING:
    from thermocline.config import EngineConfig
    from thermocline.costmodel.roofline import PhaseLoad
    from thermocline.engine.api import Engine
    from thermocline.kernels.machine_limits import MachineLimits
    from thermocline.machine import MachineFacts
    from thermocline.messages import DraftFigures, Timings
    from thermocline.models.spec import ModelSpec
    from thermocline.sampling.params import SamplingParams

_DEFAULT_PROMPT_TOKENS = 512
_SEED = 20


@dataclass(frozen=True, slots=True)
class _Plan:
    """What to measure: tokens of prompt and answer (None: as usual, 0: not measured), how often."""

    num_prompt: int | None
    num_decode: int
    num_repetitions: int

    def __post_init__(self) -> None:
        if self.num_decode == 1:
            raise click.UsageError("the first token comes with the prompt: give -n 2 or more, or 0")
        if self.num_prompt == self.num_decode == 0:
            raise click.UsageError("-p 0 -n 0 leaves nothing to measure")

    @property
    def num_answered(self) -> int:
        """Tokens of each answer: a prompt alone has one as well."""
        return max(1, self.num_decode)

    def fit(self, max_context_tokens: int) -> int:
        """Return the tokens of the prompt: at least one. Raises ConfigError if the plan exceeds the context."""
        room = max_context_tokens - self.num_answered
        default = min(_DEFAULT_PROMPT_TOKENS, room)
        wanted = default if self.num_prompt is None else max(1, self.num_prompt)
        if not 1 <= wanted <= room:
            raise ConfigError(
                f"the context of {max_context_tokens} tokens has no room for "
                f"{self.num_decode} tokens behind the prompt: lower -p or -n, or raise --ctx"
            )
        return wanted


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second over the repetitions."""

    median: float
    min: float
    max: float
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: list[float]) -> Speed:
        """Summarise one or more measured speeds."""
        import statistics

        return cls(statistics.median(values), min(values), max(values), tuple(values))

    def __str__(self) -> str:
        return f"{self.median:.1f} tokens/s ({self.min:.1f} to {self.max:.1f})"


@click.command()
@model_argument()
@hub_model()
@click.option(
    "-p",
    "--n-prompt",
    "--prompt-tokens",
    "num_prompt",
    type=click.IntRange(min=0),
    metavar="N",
    help=f"Length of the prompt (default: {_DEFAULT_PROMPT_TOKENS}, or what the context allows). 0: the answer alone.",
)
@click.option(
    "-n",
    "--n-gen",
    "--max-tokens",
    "num_decode",
    type=click.IntRange(min=0),
    default=32,
    show_default=True,
    metavar="N",
    help="Length of the answer. 0: the prompt alone.",
)
@click.option(
    "-r",
    "--repetitions",
    "num_repetitions",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    metavar="N",
    help="How often to measure, after one warm-up that does not count.",
)
@json_option
@quiet_option
@engine_options(*ONE_REQUEST_FLAGS, *RANK_FLAGS)
def bench(
    model: str | None,
    num_prompt: int | None,
    num_decode: int,
    num_repetitions: int,
    as_json: bool,
    config: EngineConfig,
) -> None:
    """Measure how many tokens per second a model reads and writes.

    \b
    Examples:
      thermocline bench
      thermocline bench model.gguf -p 512 -n 64 -r 5
      thermocline bench model.gguf --json > speed.json

    The prompt is made of random tokens, the same ones every time; each repetition starts from an
    empty cache. The median counts; close other programs, and repeat with --prefetch off or another
    --hot-device to compare.
    """
    plan = _Plan(num_prompt, num_decode, num_repetitions)
    # Each repetition has the same prompt, and must compute it.
    config = replace(config, scheduler=replace(config.scheduler, prefix_cache=False))
    # Random tokens choose experts that no text would.
    config = as_rank(replace(config, heat=replace(config.heat, saved=False)))
    path = model_path(model)
    if not has_followed(path, config):
        run_until_done(_run(path, plan, config, as_json))


async def _run(path: str, plan: _Plan, config: EngineConfig, as_json: bool) -> None:
    import random

    from thermocline.machine import machine_facts

    async with open_engine(path, config) as engine:
        num_prompt = plan.fit(engine.max_context_tokens)
        draw = random.Random(_SEED)
        prompt = [draw.randrange(engine.tokenizer.vocab_size) for _ in range(num_prompt)]
        measured = await _measure(engine, prompt, plan)
        spec, kernels, chunk_tokens = engine.spec, engine.kernels_name, engine.chunk_tokens
        reasons = engine.statistics().placement_reasons
    prefill = decode = None
    if plan.num_prompt != 0:
        prefill = Speed.of([run.timings.prompt_tokens_per_s for run in measured])
    if plan.num_decode != 0:
        decode = Speed.of([run.timings.decode_tokens_per_s for run in measured])
    loads = _loads(path, measured, prefill, decode, num_prompt, chunk_tokens)
    machine = machine_facts()
    if not as_json:
        both = {f"prompt of {num_prompt}": prefill, f"answer of {plan.num_decode}": decode}
        speeds = {name: speed for name, speed in both.items() if speed is not None}
        _show(spec, machine, kernels, speeds, loads, measured[-1].timings.drafts)
        return
    echo_json(
        {
            "model": spec.name,
            "architecture": spec.architecture,
            "num_prompt_tokens": num_prompt,
            "num_decode_tokens": plan.num_decode,
            "num_repetitions": plan.num_repetitions,
            "prefill_tok_s": prefill and asdict(prefill),
            "decode_tok_s": decode and asdict(decode),
            "drafts": [asdict(run.timings.drafts) for run in measured],
            "kernels": kernels,
            "placement": reasons,
            "roofline": [asdict(load) | {"bound": load.bound} for load in loads],
            "config": asdict(config),
            "machine": machine.as_dict(),
        }
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """One repetition, and what the machine could do around it."""

    timings: Timings
    limits: MachineLimits | None


def _loads(
    path: str,
    measured: list[_Run],
    prefill: Speed | None,
    decode: Speed | None,
    num_prompt: int,
    chunk_tokens: int,
) -> list[PhaseLoad]:
    """Return how near both phases come to the machine's limits; nothing with reference kernels."""
    import statistics

    from thermocline.costmodel.roofline import decode_load, prefill_load
    from thermocline.kernels.machine_limits import MachineLimits
    from thermocline.modelfile.reader import open_model_file
    from thermocline.models.footprint import decoder_tensors, measure_footprint
    from thermocline.models.registry import read_spec

    found = [run.limits for run in measured if run.limits is not None]
    if not found:
        return []
    limits = MachineLimits(
        statistics.median(each.read_bytes_per_s for each in found),
        statistics.median(each.multiply_adds_per_s for each in found),
        found[0].sample_bytes,
    )
    with open_model_file(path) as file:
        spec = read_spec(file)
        tensors = decoder_tensors(file.tensors.values(), spec.num_layers)
        footprint = measure_footprint(tensors, spec.router)
    loads = []
    if prefill is not None:
        loads.append(prefill_load(footprint, limits, prefill.median, num_prompt, chunk_tokens))
    if decode is not None:
        loads.append(decode_load(footprint, limits, decode.median))
    return loads


async def _measure(engine: Engine, prompt: list[int], plan: _Plan) -> list[_Run]:
    from thermocline.sampling.params import SamplingParams

    params = SamplingParams(max_tokens=plan.num_answered, ignore_eos=True)
    measured = []
    with Progress() as progress:
        for index in range(plan.num_repetitions + 1):
            what = f"{index} of {plan.num_repetitions}" if index else "warm-up"
            progress.say(f"measuring: {what}")
            timings = await _time_once(engine, prompt, params)
            if index:
                measured.append(_Run(timings, await engine.measure_limits()))
    return measured


async def _time_once(engine: Engine, prompt: list[int], params: SamplingParams) -> Timings:
    async with aclosing(engine.generate(prompt, params)) as events:
        async for event in events:
            if event.timings is not None:
                return event.timings
    raise AssertionError("the stream ended without its last event")


def _show(
    spec: ModelSpec,
    machine: MachineFacts,
    kernels: str,
    speeds: dict[str, Speed],
    loads: list[PhaseLoad],
    drafts: DraftFigures,
) -> None:
    from thermocline.cli.render import facts_table
    from thermocline.units import format_bytes

    rows = [(f"{name} tokens", str(speed)) for name, speed in speeds.items()]
    rows += [(f"{load.phase} roofline", str(load)) for load in loads]
    accepted = f"{drafts.num_accepted} of {drafts.num_drafted} accepted"
    rows.append(("drafted tokens", "; ".join(filter(None, (accepted, drafts.why_off)))))
    rows.append(("kernels", kernels))
    rows.append(("processor", f"{machine.cpu}, {machine.num_usable_cores} cores usable"))
    rows.append(("memory", format_bytes(machine.memory_bytes)))
    show(facts_table(f"{spec.name}: median (lowest to highest)", rows))

"""`thermocline run`: one prompt, one answer."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click
from click.core import ParameterSource

from thermocline.cli.batch_files import BatchFiles
from thermocline.cli.console import AnswerWriter, echo_json, hint, note
from thermocline.cli.llama_flags import names
from thermocline.cli.model_name import hub_model
from thermocline.cli.options import (
    ONE_REQUEST_FLAGS,
    RANK_FLAGS,
    engine_options,
    json_option,
    model_argument,
    quiet_option,
    sampling_options,
    sampling_settings,
    trace_option,
    verbose_option,
)
from thermocline.cli.prompt import prompt_options
from thermocline.cli.ranks import as_rank, has_followed
from thermocline.cli.session import (
    CollectedAnswer,
    TraceFile,
    hint_speed,
    model_path,
    open_engine,
    run_until_done,
    stream_answer,
    trace_file,
)
from thermocline.cli.spoken import formed, schema_fields, spoken
from thermocline.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from thermocline.cli.prompt import PromptForm
    from thermocline.cli.spoken import Spoken
    from thermocline.config import EngineConfig
    from thermocline.engine.api import Engine
    from thermocline.engine.statistics import EngineStatistics
    from thermocline.messages import Timings
    from thermocline.sampling.params import SamplingParams
    from thermocline.server.core.structured import FormatFields


@dataclass(frozen=True, slots=True)
class _Order:
    """Everything that one run was asked for."""

    path: str
    prompt: PromptForm
    params: SamplingParams
    config: EngineConfig
    form: FormatFields | None
    trace: TraceFile | None
    routing: Path | None
    as_json: bool
    explains: bool


@click.command()
@model_argument()
@hub_model()
@prompt_options
@sampling_options
@click.option(
    *names("--json-schema"),
    "schema",
    metavar="FILE",
    help="Answer with JSON that this JSON schema describes; - reads it from stdin, and {... is the schema itself.",
)
@json_option
@quiet_option
@verbose_option
@trace_option
@click.option(
    "--routing",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write every token's experts there, for thermocline plan --simulate.",
)
@engine_options(*ONE_REQUEST_FLAGS, *RANK_FLAGS)
def run(  # noqa: PLR0913 - one per flag
    model: str | None,
    prompt: PromptForm | BatchFiles,
    params: SamplingParams,
    config: EngineConfig,
    schema: str | None,
    as_json: bool,
    is_verbose: bool,
    trace: str | None,
    routing: Path | None,
) -> None:
    """Answer one prompt to stdout, or a file of requests.

    \b
    Examples:
      thermocline run --chat "What is a mixture of experts?"
      thermocline run -hf Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M --chat "Hello"
      thermocline run model.gguf --prompt "Once upon a time" --max-tokens 100
      cat question.txt | thermocline run model.gguf --chat - > answer.txt
      thermocline run model.gguf --chat "Hi" --hot-device cpu --trace timeline.json.gz
      thermocline run model.gguf --chat "Two cities" --json-schema cities.schema.json
      thermocline run model.gguf --batch prompts.jsonl --out answers.jsonl

    Without MODEL, the built-in demo model answers. The same flags give the same answer, unless
    --temperature is above 0 and there is no --seed. Everything but the answer goes to stderr.
    """
    path, timeline = model_path(model), trace_file(trace)
    config = as_rank(config)
    if isinstance(prompt, BatchFiles):
        _check_batch(schema, as_json, trace, routing)
        if config.parallel.num_ranks > 1:
            raise click.UsageError(
                "--batch is for one process: run it without torchrun, or use serve"
            )
        from thermocline.cli.batch import run_batch

        run_until_done(run_batch(prompt, path, config, explains=is_verbose))
        return
    fields = None if schema is None else schema_fields(schema)
    if has_followed(path, config, None if timeline is None else timeline.path):
        return
    order = _Order(path, prompt, params, config, fields, timeline, routing, as_json, is_verbose)
    run_until_done(_run(order))


def _check_batch(*others: object) -> None:
    """Raise UsageError for flags that a batch does not have."""
    context = click.get_current_context()
    given = [
        setting.flag
        for setting in sampling_settings()
        if context.get_parameter_source(setting.name) is ParameterSource.COMMANDLINE
    ]
    if given:
        raise click.UsageError(f"{given[0]}: with --batch each request says it in its body")
    if any(others):
        raise click.UsageError(
            "--batch goes without --json, --json-schema, --trace and --routing: leave them out"
        )


async def _run(order: _Order) -> None:
    async with open_engine(
        order.path, order.config, order.trace, explains=order.explains
    ) as engine:
        prompt_ids = await order.prompt.encode(engine)
        answer = CollectedAnswer()
        stream = partial(
            stream_answer,
            engine,
            prompt_ids,
            order.params,
            answer=answer,
            wants_routing=order.routing is not None,
            reader=_reader(order, engine, prompt_ids),
        )
        try:
            if order.as_json:
                await stream(on_text=lambda _: None)
            else:
                with AnswerWriter() as writer:
                    await stream(on_text=writer.write)
        except RequestError as error:
            if order.form is None:
                raise
            what = str(error).replace("structured_outputs.json", "--json-schema")
            raise RequestError(what, param=error.param) from error
        if order.routing is not None:
            _write_routing(order.routing, engine, len(prompt_ids), answer)
        if order.as_json:
            echo_json(_as_json(prompt_ids, answer, engine.statistics()))
            return
        if order.form is not None and answer.finish_reason == "length":
            note("[the answer was cut, and is no whole JSON: give a larger --max-tokens]")
        if len(prompt_ids) + len(answer.token_ids) >= engine.max_context_tokens:
            hint(f"[stopped: the context of {engine.max_context_tokens} tokens is full (--ctx)]")
        hint_speed(answer.timings)


def _reader(order: _Order, engine: Engine, prompt_ids: list[int]) -> Spoken | None:
    """Return what reads the answer. Of one with a form, reasoning is left out: its reader wants nothing else."""
    is_chat = order.prompt.chat is not None
    if order.form is None:
        return spoken(engine, prompt_ids) if is_chat else None
    return formed(
        engine,
        prompt_ids,
        engine.template_facts if is_chat else None,
        order.form,
        on_reasoning=lambda _: None,
    )


def _write_routing(
    path: Path, engine: Engine, num_prompt_tokens: int, answer: CollectedAnswer
) -> None:
    from thermocline.simulation.routing_trace import RoutedRequest, RoutingTrace

    if answer.routing is None or not answer.routing.size:
        raise ConfigError(f"--routing {path}: this model has no routed experts")
    request = RoutedRequest(num_prompt_tokens, answer.routing)
    RoutingTrace(engine.spec.name, engine.spec.router.num_experts, (request,)).write(path)
    note(f"routing: {path} (thermocline plan --simulate {path})")


def _as_json(
    prompt_ids: list[int], answer: CollectedAnswer, statistics: EngineStatistics
) -> dict[str, object]:
    prefetch = statistics.prefetch
    return {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "prompt_token_ids": prompt_ids,
        "finish_reason": answer.finish_reason,
        "timings": timings_as_dict(cast("Timings", answer.timings)),  # the stream has ended
        "experts": {
            "num_hot": statistics.placement.num_hot,
            "num_cold": statistics.placement.num_cold,
            "hot_share": statistics.hot_share,
            "reasons": statistics.placement_reasons,
            "prefetch": None if prefetch is None else asdict(prefetch),
        },
    }


def timings_as_dict(timings: Timings) -> dict[str, float]:
    """Return times in seconds, counts and rates."""
    return asdict(timings) | {
        "prompt_tokens_per_s": timings.prompt_tokens_per_s,
        "decode_tokens_per_s": timings.decode_tokens_per_s,
    }

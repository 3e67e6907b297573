"""What commands with an engine share: opening it, streaming an answer, saving the timeline. Knows no flags."""

from __future__ import annotations

import os
import time
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thermocline.cli.console import Progress, hint, note
from thermocline.cli.waiting import opening_line, prompt_line
from thermocline.config import TraceConfig
from thermocline.demo import DEMO_MODEL_PATH
from thermocline.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Sequence

    from thermocline.cli.spoken import Spoken
    from thermocline.config import EngineConfig
    from thermocline.engine.api import Engine
    from thermocline.messages import DraftFigures, ExpertIds, FinishReason, Timings
    from thermocline.sampling.params import SamplingParams

VIEWER = "https://ui.perfetto.dev"


@dataclass(frozen=True, slots=True)
class TraceFile:
    """The file for a timeline; may_move: use the temporary folder if the file can not be written."""

    path: Path
    may_move: bool = False

    def check(self) -> None:
        """Raise ConfigError, before any work, for a file that can not be written."""
        folder = self.path.absolute().parent
        if not self.may_move and not (folder.is_dir() and os.access(folder, os.W_OK)):
            raise ConfigError(
                f"--trace {self.path}: there is no folder {folder} that you may write to; "
                "name a file in one"
            )

    def save(self, engine: Engine) -> Path:
        """Write what the engine recorded and return the file. Raises ConfigError."""
        try:
            engine.save_trace(self.path)
        except ConfigError:
            if not self.may_move:
                raise
            import tempfile

            moved = Path(tempfile.mkdtemp(prefix="thermocline-")) / self.path.name
            engine.save_trace(moved)
            return moved
        return self.path


@dataclass(slots=True)
class CollectedAnswer:
    """The part of an answer that has arrived; it is complete when it has a `finish_reason`."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    timings: Timings | None = None
    routing: ExpertIds | None = None

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.texts)


def run_until_done(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end. Ctrl-C cancels it, and raises KeyboardInterrupt after it has ended."""
    import asyncio

    asyncio.run(work)


def model_path(model: str | None) -> str:
    """Return the file that a command was given, or the built-in demo model's."""
    return os.fspath(DEMO_MODEL_PATH) if model is None else model


def trace_file(path: str | None) -> TraceFile | None:
    """Return the file of --trace, None without the flag."""
    return None if path is None else TraceFile(Path(path))


@asynccontextmanager
async def open_engine(
    path: str, config: EngineConfig, trace: TraceFile | None = None, *, explains: bool = False
) -> AsyncIterator[Engine]:
    """Open the model. At the end, also after Ctrl-C, write the timeline to `trace` if it is given.

    explains: print what was chosen, and why.
    """
    from thermocline.engine.api import Engine

    if trace is not None:
        trace.check()
        config = replace(config, trace=TraceConfig(enabled=True))
    async with AsyncExitStack() as stack:
        with Progress() as progress:
            opening = Engine.open(path, config)
            progress.follow(partial(opening_line, Path(path).name, opening, time.monotonic()))
            engine = await stack.enter_async_context(opening)
        announce(engine, explains=explains)
        if trace is not None:
            stack.callback(_save_and_say, trace, engine)
        yield engine


def announce(engine: Engine, *, explains: bool) -> None:
    """Tell of an engine that was opened: what it chose, or only what a user should know."""
    if explains:
        explain(engine)
        return
    statistics = engine.statistics()
    for reason in (*statistics.device_reasons, *statistics.placement_reasons):
        hint(f"[{reason}]")


def explain(engine: Engine) -> None:
    """Print what the engine chose, a line each."""
    for choice in engine.choices():
        note(str(choice))


def _save_and_say(trace: TraceFile, engine: Engine) -> None:
    path = trace.save(engine)
    note(f"timeline: {path} (thermocline trace html {path}, or {VIEWER})")


async def stream_answer(
    engine: Engine,
    prompt: Sequence[int],
    params: SamplingParams,
    on_text: Callable[[str], None],
    answer: CollectedAnswer,
    *,
    wants_routing: bool = False,
    reader: Spoken | None = None,
) -> None:
    """Generate, calling `on_text` with each piece of text and collecting everything in `answer`.

    reader: tells the parts of a chat's answer apart.
    """
    from thermocline.messages import PromptProgress, RequestOptions, TokenEvent

    with Progress() as progress:
        progress.say(f"reading the prompt: 0 of {len(prompt)} tokens")
        params = params if reader is None else reader.params(params)
        events = engine.events(prompt, params, RequestOptions(wants_routing=wants_routing))
        async with aclosing(events) as stream:
            async for event in stream:
                if isinstance(event, PromptProgress):
                    progress.say(prompt_line(event))
                elif isinstance(event, TokenEvent):
                    progress.clear()
                    text = event.text if reader is None else reader.text(event)
                    answer.texts.append(text)
                    answer.token_ids.extend(event.token_ids)
                    answer.finish_reason = event.finish_reason
                    answer.timings = event.timings
                    answer.routing = event.routing
                    on_text(text)


def hint_speed(timings: Timings | None) -> None:
    """Print the speed to stderr if it is a terminal."""
    if timings is None:
        return
    hint(
        f"[first token after {timings.queue_s + timings.prompt_s:.2f} s; {timings.num_prompt_tokens} prompt tokens at {timings.prompt_tokens_per_s:.1f}/s, "
        f"{timings.num_output_tokens} tokens at {timings.decode_tokens_per_s:.1f}/s{drafts_note(timings.drafts)}]"
    )


def drafts_note(drafts: DraftFigures) -> str:
    """Return what speculation did, to end a line about speed; "" for nothing."""
    if not drafts.num_drafted:
        return ""
    return f", {drafts.num_accepted} of {drafts.num_drafted} drafted tokens accepted"


def read_text(path: str) -> str:
    """Return the text of a file, "-" for stdin. Raises RequestError if it is not UTF-8."""
    import click

    with click.open_file(path, "rb") as file:
        raw: bytes = file.read()
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        source = "stdin" if path == "-" else path
        raise RequestError(f"{source} is not UTF-8 text ({error}): convert it first") from error


def read_line_text(text: str) -> str:
    """Return `text`, or all of stdin for "-", without the line end that shells put at the end."""
    return read_text("-").removesuffix("\n") if text == "-" else text

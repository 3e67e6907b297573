"""The `thermocline` command: its group of commands and their entry point.

Owns the list of commands. Importing it must stay quick: each command imports the engine, NumPy and
rich when it runs, so that `--help` and a mistyped flag answer at once.
"""

from __future__ import annotations

import io
import os
import sys

import click

from thermocline import __version__
from thermocline.cli.bench import bench
from thermocline.cli.chat import chat
from thermocline.cli.config import config
from thermocline.cli.demo import demo
from thermocline.cli.doctor import doctor
from thermocline.cli.group import ErrorLineGroup, discard_unwritable
from thermocline.cli.heat import heat
from thermocline.cli.info import info
from thermocline.cli.llama_flags import take_llama_flags
from thermocline.cli.logits import logits
from thermocline.cli.models import list_models, pull, rm
from thermocline.cli.perplexity import perplexity
from thermocline.cli.plan import plan
from thermocline.cli.run import run
from thermocline.cli.serve import serve
from thermocline.cli.tokenize import tokenize
from thermocline.cli.top import top
from thermocline.cli.trace import trace
from thermocline.cli.worker import worker

__all__ = ["cli", "main"]


@click.group(
    cls=ErrorLineGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="thermocline", message="%(prog)s %(version)s")
def cli() -> None:
    """Run mixture-of-experts GGUF models that are bigger than your memory, and see every byte move.

    \b
    First steps:
      thermocline demo                      watch the built-in model answer, with a timeline
      thermocline pull ORG/REPO             download a model from the Hugging Face hub
      thermocline run -hf ORG/REPO --chat "Hello"   the same, and one answer
      thermocline list                      which models are on this machine
      thermocline info model.gguf           what is in a file, and what one token costs
      thermocline plan model.gguf --vram 12GiB   what would lie where, and why
      thermocline doctor model.gguf         how fast this machine is with it, and what bounds it
      thermocline run model.gguf --chat "Hello"
      thermocline chat model.gguf
      thermocline serve model.gguf          an HTTP server, with a page at its address
      thermocline top                       watch that server
      thermocline trace html run.json.gz    look at a timeline that --trace recorded

    MODEL is a GGUF file (of a split model, any one of its files); -hf names one of the hub in its place.
    Where MODEL is optional, the small built-in demo model is used. `thermocline COMMAND --help` explains each command.
    """


for command in (
    demo,
    run,
    chat,
    serve,
    top,
    pull,
    list_models,
    rm,
    info,
    plan,
    doctor,
    heat,
    tokenize,
    bench,
    worker,
    trace,
    perplexity,
    logits,
    config,
):
    cli.add_command(command)
for command in (run, chat, serve, bench, perplexity, plan):
    take_llama_flags(command)


def main() -> None:
    """Run the command line of this process; ends it with an exit code."""
    _open_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        # A terminal that can not show a character shows "?" instead of ending the program.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if isinstance(sys.stdin, io.TextIOWrapper):
        # Bytes that are no text reach the tokenizer's check, which says so.
        sys.stdin.reconfigure(errors="surrogateescape")
    try:
        cli(prog_name="thermocline")
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:  # of help and usage texts, which no command prints
        discard_unwritable()
        click.echo(f"error: {error.strerror or error}", err=True)
        sys.exit(1)


def _open_standard_streams() -> None:
    """Let /dev/null stand for each standard stream that is closed.

    Python has no object for such a stream, and the next file that is opened would get its number.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
        if getattr(sys, name) is None:
            # For the whole process, so that nothing closes it.
            stream = open(number, "w" if number else "r", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)

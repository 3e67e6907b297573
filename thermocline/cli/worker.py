"""The command `worker`: computes some of a model's experts for a parent in another process or machine."""

from __future__ import annotations

from typing import Any

import click

from thermocline.cli.model_name import hub_model
from thermocline.cli.options import model_argument, parsed
from thermocline.units import parse_bytes


@click.command(short_help="Compute experts for another process or machine.")
@model_argument()
@hub_model(required=True)
@click.option("--listen", metavar="WHERE", help="Listen there: unix:PATH or tcp:HOST:PORT.")
@click.option("--secret-file", metavar="FILE", help="What parents must know; needed for tcp.")
@click.option("--any-host", is_flag=True, help="Let tcp listen on more than this machine.")
@click.option(
    "-t", "--threads", type=int, metavar="N", help="Threads that compute (default: all cores)."
)
@click.option(
    "--cpu-isa", "isa", default="auto", metavar="TEXT", help="Instruction set of the kernels."
)
@click.option(
    "--hot-device",
    type=click.Choice(["auto", "cuda", "torch-cpu", "simulated", "none"]),
    default="auto",
    help="Compute experts there as far as it has room, the others on the CPU; auto is a GPU where one can be used.",
)
@click.option(
    "--device-memory",
    "device_memory_bytes",
    metavar="SIZE",
    callback=parsed(parse_bytes),
    help="Of the device for experts, such as 8GiB (default: what is free).",
)
@click.option("--parent", type=(int, int), hidden=True, help="Socket and process of the parent.")
def worker(**given: Any) -> None:  # noqa: ANN401 - click gives each its type
    """Compute experts of MODEL for runs and servers that name this worker with --expert-worker.

    \b
    Examples:
      thermocline worker model.gguf --listen unix:/tmp/experts
      thermocline run model.gguf --chat "Hello" --expert-worker unix:/tmp/experts
      thermocline worker model.gguf --listen tcp:127.0.0.1:7718 --secret-file secret.txt

    It has its own copy of the file, and reads of it what it is asked for. It ends with Ctrl-C.
    """
    from thermocline.remote.worker_process import WorkerOptions, run_worker

    run_worker(WorkerOptions(**given), click.echo)

"""The command `worker`: computes some of a model's experts for a parent in another process or machine."""

from __future__ import annotations

import click

from thermocline.cli.model_name import hub_model
from thermocline.cli.options import model_argument


@click.command(short_help="Compute experts for another process or machine.")
@model_argument()
@hub_model(required=True)
@click.option("--listen", metavar="WHERE", help="Listen there: unix:PATH or tcp:HOST:PORT.")
@click.option("--secret-file", metavar="FILE", help="What parents must know; needed for tcp.")
@click.option("--any-host", is_flag=True, help="Let tcp listen on more than this machine.")
@click.option(
    "-t", "--threads", type=int, metavar="N", help="Threads that compute (default: all cores)."
)
@click.option("--cpu-isa", default="auto", metavar="TEXT", help="Instruction set of the kernels.")
@click.option("--parent", type=(int, int), hidden=True, help="Socket and process of the parent.")
def worker(
    model: str,
    listen: str | None,
    secret_file: str | None,
    any_host: bool,
    threads: int | None,
    cpu_isa: str,
    parent: tuple[int, int] | None,
) -> None:
    """Compute experts of MODEL for runs and servers that name this worker with --expert-worker.

    \b
    Examples:
      thermocline worker model.gguf --listen unix:/tmp/experts
      thermocline run model.gguf --chat "Hello" --expert-worker unix:/tmp/experts
      thermocline worker model.gguf --listen tcp:127.0.0.1:7718 --secret-file secret.txt

    It has its own copy of the file, and reads of it what it is asked for. It ends with Ctrl-C.
    """
    from thermocline.remote.worker_process import WorkerOptions, run_worker

    run_worker(
        WorkerOptions(model, listen, secret_file, any_host, threads, cpu_isa, parent), click.echo
    )

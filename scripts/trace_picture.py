"""Draws part of a trace as an SVG: one row per lane, one box per span, arrows left out.

usage: python -m scripts.trace_picture TRACE.json.gz OUT.svg [--start-ms A] [--duration-ms B]

Without --start-ms the picture begins with the first of the largest chunks. Knows the trace format
through `thermocline.traces.chrome` alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from xml.sax.saxutils import escape

from thermocline.traces.chrome_reader import read_chrome
from thermocline.traces.events import SpanEvent
from thermocline.traces.lanes import WORK_LANES, Track
from thermocline.traces.overlap import summarize

WIDTH, LABEL, RIGHT, ROW, TOP = 1180, 110, 30, 34, 66
COLORS = {
    "embed": "#6b7280",
    "attend": "#4f81bd",
    "router": "#8b6fb3",
    "hot": "#d1495b",
    "cold": "#2a9d8f",
    "combine": "#b08d2e",
    "head": "#3d5a80",
    "advise": "#7aa95c",
}
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328; }
.small { font-size: 11px; fill: #57606a; } .title { font-size: 15px; font-weight: 600; }
.inside { font-size: 10px; fill: #ffffff; } .grid { stroke: #d0d7de; } .bg { fill: #ffffff; }
.row { fill: #f6f8fa; }
"""


def largest_chunk_ns(spans: list[SpanEvent]) -> int:
    """Return the start of the first chunk among those with the most tokens."""
    embeds = [span for span in spans if span.name == "embed"]
    return max(embeds, key=lambda span: (span.args or {}).get("tokens", 0)).start_ns


def ticks(duration_ns: int) -> int:
    """Return a round distance between grid lines, in nanoseconds, for about eight of them."""
    decade = 10 ** (len(str(duration_ns // 8)) - 1)
    return next(f * decade for f in (1, 2, 5, 10) if duration_ns / (f * decade) <= 12)


def draw(spans: list[SpanEvent], start_ns: int, end_ns: int, title: str, subtitle: str) -> str:
    """Return the SVG of the work spans in [start_ns, end_ns)."""
    shown = [
        s for s in spans if s.end_ns > start_ns and s.start_ns < end_ns and s.lane in WORK_LANES
    ]
    tracks = sorted({Track(span.lane, span.index) for span in shown}, key=lambda t: t.order)
    scale = (WIDTH - LABEL - RIGHT) / (end_ns - start_ns)
    height = TOP + ROW * len(tracks) + 66
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        f'<rect class="bg" width="{WIDTH}" height="{height}" rx="6"/>',
        f'<text class="title" x="16" y="27">{escape(title)}</text>',
        f'<text class="small" x="16" y="47">{escape(subtitle)}</text>',
    ]
    bottom = TOP + ROW * len(tracks)
    for index, track in enumerate(tracks):
        y = TOP + index * ROW
        parts.append(
            f'<rect class="row" x="{LABEL}" y="{y + 3}" width="{WIDTH - LABEL - RIGHT}" '
            f'height="{ROW - 6}"/><text x="16" y="{y + 22}">{escape(track.label)}</text>'
        )
    step = ticks(end_ns - start_ns)
    for at in range(0, end_ns - start_ns + 1, step):
        x = LABEL + at * scale
        parts.append(
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>'
            f'<text class="small" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{at / 1e6:g} ms</text>'
        )
    for span in shown:
        y = TOP + tracks.index(Track(span.lane, span.index)) * ROW + 3
        left = LABEL + max(span.start_ns - start_ns, 0) * scale
        right = LABEL + min(span.end_ns - start_ns, end_ns - start_ns) * scale
        color = COLORS.get(str(span.name), "#6b7280")
        label = str(span.name)
        layer = (span.args or {}).get("layer")
        tip = f"{label}{'' if layer is None else f', layer {layer}'}: {(span.end_ns - span.start_ns) / 1e3:.0f} us"
        parts.append(
            f'<rect x="{left:.2f}" y="{y}" width="{max(right - left, 0.6):.2f}" height="{ROW - 6}" '
            f'fill="{color}"><title>{escape(tip)}</title></rect>'
        )
        if right - left > 7 * len(label) + 4:
            parts.append(
                f'<text class="inside" x="{(left + right) / 2:.1f}" y="{y + 18}" '
                f'text-anchor="middle">{escape(label)}</text>'
            )
    x = LABEL
    for name in dict.fromkeys(str(span.name) for span in shown):
        parts.append(
            f'<rect x="{x}" y="{bottom + 32}" width="12" height="12" fill="{COLORS.get(name, "#6b7280")}"/>'
            f'<text class="small" x="{x + 17}" y="{bottom + 42}">{escape(name)}</text>'
        )
        x += 34 + 7 * len(name)
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    """Read the trace, choose the window, write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--start-ms", type=float)
    parser.add_argument("--duration-ms", type=float, default=280.0)
    parser.add_argument(
        "--title",
        default="A prompt of 512 tokens in two chunks: every lane is a resource, every box is work",
    )
    arguments = parser.parse_args()
    trace = read_chrome(arguments.trace)
    spans = sorted(
        (event for event in trace.events if isinstance(event, SpanEvent)), key=lambda s: s.start_ns
    )
    start = largest_chunk_ns(spans)
    if arguments.start_ms is not None:
        start = spans[0].start_ns + round(arguments.start_ms * 1e6)
    end = start + round(arguments.duration_ms * 1e6)
    summary = summarize(span for span in spans if span.end_ns > start and span.start_ns < end)
    busy = ", ".join(
        f"{busy.track.label} {busy.busy_share:.0%}"
        for busy in summary.tracks
        if busy.track.lane in WORK_LANES
    )
    subtitle = (
        f"{trace.metadata.get('model', 'model')}, real run on {trace.metadata.get('cores', '?')} cores of {trace.metadata.get('machine', 'a CPU')}. "
        f"Busy: {busy}. Two lanes at once in {summary.overlapped_share:.0%} of the working time."
    )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(draw(spans, start, end, arguments.title, subtitle))
    print(arguments.out)


if __name__ == "__main__":
    main()

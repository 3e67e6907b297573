"""Binds a picture to the trace that it was drawn from: a text in the PNG with the trace's checksum.

Usage: `python -m scripts.picture_signature sign PNG TRACE`, `check PNG TRACE` (status 1 if the picture is of another
trace, or the trace is too large to keep), `view TRACE FROM TO` (part of a trace, as its page wants it).
"""

from __future__ import annotations

import hashlib
import struct
import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_TRACE_BYTES: Final = 3 << 20
_MAGIC: Final = b"\x89PNG\r\n\x1a\n"
_KEY: Final = b"Trace-SHA256"


def _chunks(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield kind and content of each part of a PNG."""
    if not png.startswith(_MAGIC):
        raise ValueError("this is no PNG")
    at = len(_MAGIC)
    while at < len(png):
        (length,) = struct.unpack_from(">I", png, at)
        yield png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        at += 12 + length


def _text(trace: bytes) -> bytes:
    return _KEY + b"\0" + hashlib.sha256(trace).hexdigest().encode()


def signed(png: bytes, trace: bytes) -> bytes:
    """Return the picture with the trace's checksum in it, in place of an earlier one."""
    parts = [_MAGIC]
    for kind, content in _chunks(png):
        if kind == b"tEXt" and content.startswith(_KEY):
            continue
        new = [(kind, content)]
        if kind == b"IHDR":
            new.append((b"tEXt", _text(trace)))
        for name, text in new:
            crc = zlib.crc32(name + text)
            parts.append(struct.pack(">I", len(text)) + name + text + struct.pack(">I", crc))
    return b"".join(parts)


def fault(png: bytes, trace: bytes) -> str:
    """Return why the two do not belong together or may not be kept; "" if they do."""
    if len(trace) > MAX_TRACE_BYTES:
        return f"the trace has {len(trace)} bytes, at most {MAX_TRACE_BYTES}"
    if (b"tEXt", _text(trace)) not in _chunks(png):
        return "the picture is not of this trace: run scripts/timeline_picture.sh, which makes both"
    return ""


def view(trace: Path, start: float, end: float) -> str:
    """Return the part of a trace between two shares of its time, as the page's address has it."""
    from thermocline.traces.chrome_reader import read_chrome
    from thermocline.traces.overlap import summarize

    length_ms = summarize(read_chrome(trace).events).wall_ns / 1e6
    return f"from={start * length_ms:.3f}&to={end * length_ms:.3f}"


def main(arguments: list[str]) -> int:
    """Do what the command line says."""
    what, first, second, *more = arguments
    if what == "view":
        print(view(Path(first), float(second), float(more[0])))
        return 0
    picture, trace = Path(first), Path(second).read_bytes()
    if what == "sign":
        picture.write_bytes(signed(picture.read_bytes(), trace))
        return 0
    found = fault(picture.read_bytes(), trace)
    if found:
        print(found, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Frames survive any cut of the stream, and no bytes whatever do more than end a connection.

THERMOCLINE_FUZZ_FRAMES sets how many broken frames are tried (1,000 by default).
"""

from __future__ import annotations

import itertools
import os
import struct
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.remote_bodies import (
    HELD,
    SHAPE,
    broken_frames,
    frame,
    good_frames,
)
from thermocline.errors import WireError
from thermocline.remote.handshake import (
    CLIENT_FIRST,
    CLIENT_SECOND,
    WORKER_FIRST,
    decode_challenge,
    decode_hello,
    decode_welcome,
    split_hello,
)
from thermocline.remote.requests import (
    HEAD_BYTES,
    INLINE,
    decode_outputs_head,
    decode_request_head,
    read_request,
    read_values,
)
from thermocline.remote.wire import VERSION, FrameReader, Kind, decode_text, encode_text

NUM_FRAMES = int(os.environ.get("THERMOCLINE_FUZZ_FRAMES", "1000"))
ALL_KINDS = {
    **WORKER_FIRST,
    **CLIENT_FIRST,
    **CLIENT_SECOND,
    **SHAPE.worker_kinds(is_shared=False),
    **SHAPE.client_kinds(is_shared=False),
}


def read_all(reader: FrameReader, stream: bytes, cuts: list[int]) -> list:
    """Give the reader a stream in pieces that end at `cuts`; return the frames."""
    frames, bounds = [], [0, *sorted(cuts), len(stream)]
    for start, end in itertools.pairwise(bounds):
        piece = memoryview(stream)[start:end]
        while len(piece):
            room = reader.writable()
            taken = min(len(room), len(piece))
            room[:taken] = piece[:taken]
            piece = piece[taken:]
            reader.wrote(taken)
            while (found := reader.next_frame()) is not None:
                frames.append((found.kind, found.request, bytes(found.body)))
    return frames


def understand(kind: Kind, body: memoryview) -> None:
    """Read a body the way its receiver does. Raises WireError."""
    match kind:
        case Kind.CHALLENGE:
            decode_challenge(body)
        case Kind.HELLO:
            decode_hello(split_hello(body)[1])
        case Kind.WELCOME:
            decode_welcome(body)
        case Kind.COMPUTE:
            head = decode_request_head(body, SHAPE, len(HELD))
            request = read_request(body[HEAD_BYTES:], head, SHAPE, len(HELD[head.layer]))
            assert request.counts.sum() == len(request.rows) == len(request.weights)
            assert all(0 <= row < len(request.x) for row in request.rows)
            assert all(0 <= expert < len(HELD[head.layer]) for expert in request.experts)
        case Kind.OUTPUTS:
            decode_outputs_head(body, 5, INLINE)
            assert read_values(body[HEAD_BYTES:], 5, SHAPE).shape == (5, SHAPE.hidden)
        case _:
            decode_text(body)


def test_every_kind_arrives_as_it_was_sent():
    """All kinds one after the other: kind, request and body come out, and each body is understood."""
    frames = read_all(FrameReader(ALL_KINDS), b"".join(good_frames()), [])
    assert [kind for kind, _, _ in frames] == list(Kind)
    for kind, _, body in frames:
        understand(kind, memoryview(body))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2**64 - 1), st.binary(max_size=6000)), max_size=5),
    st.lists(st.integers(0, 30_000), max_size=12),
)
def test_any_cut_of_a_stream_gives_the_same_frames(contents, cuts):
    """However the stream is cut into reads, the same frames come out."""
    stream = b"".join(frame(Kind.COMPUTE, number, body) for number, body in contents)
    cuts = [cut for cut in cuts if cut < len(stream)]
    frames = read_all(FrameReader({Kind.COMPUTE: 6000}), stream, cuts)
    assert frames == [(Kind.COMPUTE, number, body) for number, body in contents]


@pytest.mark.parametrize(
    ("offset", "layout", "value", "reason"),
    [
        (0, "<I", 0, "no thermocline worker"),
        (4, "<H", VERSION + 1, "speaks version 2"),
        (6, "<B", 99, "kind 99 is out of place"),
        (6, "<B", Kind.HELLO, "out of place"),
        (7, "<B", 1, "out of place"),
        (8, "<I", 101, "longer than the 100"),
    ],
)
def test_a_bad_header_is_refused_by_its_reason(offset, layout, value, reason):
    """Foreign, newer, unknown, untimely and oversized frames: a WireError that says which."""
    data = bytearray(frame(Kind.COMPUTE, 1, b"x" * 100))
    struct.pack_into(layout, data, offset, value)
    with pytest.raises(WireError, match=reason):
        read_all(FrameReader({Kind.COMPUTE: 100}), bytes(data), [])


def test_an_oversized_frame_takes_no_memory():
    """A header that announces 4 GiB is refused before anything is allocated for it."""
    header = bytearray(frame(Kind.COMPUTE, 1, b""))
    struct.pack_into("<I", header, 8, 2**32 - 1)
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            read_all(FrameReader({Kind.COMPUTE: 1 << 20}), bytes(header), [])
        assert tracemalloc.get_traced_memory()[1] < 1 << 16
    finally:
        tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_broken_frames_end_in_a_wire_error_or_are_harmless(seed):
    """Mutated frames of all kinds: incomplete, refused, or understood within all bounds; nothing else."""
    outcomes = {"incomplete": 0, "refused": 0, "understood": 0}
    for data in broken_frames(seed, NUM_FRAMES // 10):
        try:
            frames = read_all(FrameReader(ALL_KINDS), data, [])
            for kind, _, body in frames:
                understand(kind, memoryview(body))
            outcomes["understood" if frames else "incomplete"] += 1
        except WireError:
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 0, outcomes


@given(st.text())
def test_texts_are_cut_and_made_harmless(text):
    """Whatever a peer says is printable and short, even when it is cut inside a character."""
    shown = decode_text(memoryview(encode_text(text * 50)))
    assert len(shown) <= 2000
    assert shown.isprintable() or not shown

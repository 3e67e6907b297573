"""Bodies that are too deep or take too long to decode are found, however they arrive."""

from __future__ import annotations

import json
import time
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thermocline.errors import RequestError
from thermocline.server.core import json_shape
from thermocline.server.core.json_shape import DECODE_NS, MAX_DECODE_NS, MAX_DEPTH, ShapeCheck

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='a"\\[]{},\n é', max_size=12),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(alphabet='b"\\[{', max_size=4), inner, max_size=4)
    ),
    max_leaves=30,
)


def feed(raw: bytes, piece_bytes: int) -> None:
    """Check a body that comes in pieces of so many bytes."""
    check = ShapeCheck()
    for start in range(0, len(raw), piece_bytes):
        check.feed(raw[start : start + piece_bytes])


def depth_of(value: object) -> int:
    """Return the levels of lists and objects in a decoded body."""
    match value:
        case list():
            return 1 + max(map(depth_of, value), default=0)
        case dict():
            return 1 + max(map(depth_of, value.values()), default=0)
        case _:
            return 0


@given(JSON, st.integers(1, 9), st.integers(0, 6), st.booleans())
def test_the_depth_is_the_decoded_one(value, piece_bytes, limit, is_ascii):
    """For any value, any pieces and any limit: refused exactly if it is deeper."""
    raw = json.dumps(value, ensure_ascii=is_ascii).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_shape, "MAX_DEPTH", limit)
        if depth_of(value) > limit:
            with pytest.raises(RequestError, match="nested too deeply"):
                feed(raw, piece_bytes)
        else:
            feed(raw, piece_bytes)


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_the_deepest_body(opening, closing):
    """MAX_DEPTH levels pass, one more does not, and a hundred thousand cost nothing."""
    feed(opening * MAX_DEPTH + b"1" + closing * MAX_DEPTH, 1 << 16)
    for depth in (MAX_DEPTH + 1, 100_000):
        with pytest.raises(RequestError, match="nested too deeply"):
            feed(opening * depth + b"1" + closing * depth, 1 << 16)


MANY_VALUES = {
    "empty objects": [{}],
    "empty lists": [[]],
    "objects": [{"a": 1}],
    "lists": [[1]],
    "texts": ["hello"],
    "texts of one character": ["\u6c49"],
    "small whole numbers": [1],
    "whole numbers": [12_345_678],
    "numbers": [1.5],
}


@pytest.mark.parametrize("kind", MANY_VALUES)
def test_values_take_no_more_memory_than_counted(kind):
    """As the interpreter counts it while msgspec decodes; and the count is not ten times too high."""
    body = {"some": MANY_VALUES[kind] * 10_000, "more": "7" * 1000}
    raw = json.dumps(body, ensure_ascii=False).encode()
    check = ShapeCheck()
    check.feed(raw)
    tracemalloc.start()
    try:
        decoded = msgspec.json.decode(raw)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert decoded == body
    assert peak_bytes <= check.decoded_bytes + len(raw) < 10 * peak_bytes


def test_names_take_no_more_memory_than_counted():
    """Ten thousand in one object."""
    raw = json.dumps({str(number): number for number in range(10_000)}).encode()
    check = ShapeCheck()
    check.feed(raw)
    tracemalloc.start()
    try:
        msgspec.json.decode(raw)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes <= check.decoded_bytes + len(raw) < 10 * peak_bytes


# A body with nothing but one kind of what takes time: its parts, and what stands between them.
COSTLY = {
    "lists and objects": b"[]",
    "names": b'{"a":1',
    "texts": b'"\xc3\xa9"',
    "values": b"1",
    "escapes": rb'"\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n"',
    "numbers with an exponent, or of many digits": b"1.2345678901234567e-300",
}


def body_of(part: bytes, count: int) -> bytes:
    """Return a list of so many parts; a part that opens an object is one name of a single object."""
    if part.startswith(b"{"):
        return b"{" + b",".join(b'"%d":1' % number for number in range(count)) + b"}"
    return b"[" + b",".join([part] * count) + b"]"


@pytest.mark.parametrize("kind", COSTLY)
def test_what_takes_long_to_decode_has_a_limit(kind):
    """The largest body of each kind is decoded within MAX_DECODE_NS, give or take the machine; more of it is refused."""
    part = COSTLY[kind]
    least, most = 0, MAX_DECODE_NS // DECODE_NS[kind] + 1
    while most - least > 1 + least // 100:
        middle = (least + most) // 2
        try:
            feed(body_of(part, middle), 1 << 16)
            least = middle
        except RequestError:
            most = middle
    with pytest.raises(RequestError, match="too long to decode"):
        feed(body_of(part, most), 1 << 16)
    raw = body_of(part, least)
    assert least > 1000
    times_s = []
    for _ in range(3):
        begin_s = time.thread_time()
        msgspec.json.decode(raw)
        times_s.append(time.thread_time() - begin_s)
    assert min(times_s) < 2 * MAX_DECODE_NS * 1e-9, times_s


@given(st.lists(st.sampled_from(sorted(COSTLY.values())), max_size=12), st.integers(1, 40))
def test_every_piece_length_counts_alike(parts, piece_bytes):
    """What a body costs does not depend on how it arrives."""
    raw = b"[" + b",".join([*parts, b"12345678901234567890123456789012345678901234567890E5"]) + b"]"
    whole, pieces = ShapeCheck(), ShapeCheck()
    whole.feed(raw)
    for start in range(0, len(raw), piece_bytes):
        pieces.feed(raw[start : start + piece_bytes])
    assert whole.found == pieces.found


def test_punctuation_in_texts_is_no_shape():
    """A long program as a message is one value."""
    code = 'x = [{"a": "\\\\"}]\n' * 65536
    feed(json.dumps({"messages": [{"role": "user", "content": code}]}).encode(), 1 << 16)


@given(st.binary(max_size=200), st.integers(1, 7))
def test_any_bytes_are_taken_or_refused(raw, piece_bytes):
    """What is not JSON is for the decoder to find."""
    feed(raw, piece_bytes)

"""Requests and answers come out as they went in, and each number that leads to memory is checked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.remote_bodies import HELD, SHAPE, request, request_body
from thermocline.errors import WireError
from thermocline.remote.payload import PayloadType, pack_floats, unpack_floats
from thermocline.remote.requests import (
    HEAD_BYTES,
    decode_request_head,
    read_request,
    read_values,
    write_values,
)


def come_back(body, shape=SHAPE):
    """Return the request that a worker reads."""
    body = memoryview(body)
    head = decode_request_head(body, shape, len(HELD))
    return read_request(body[HEAD_BYTES:], head, shape, len(HELD[head.layer]))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000), st.integers(0, 64), st.sampled_from(PayloadType))
def test_a_request_arrives_whole(seed, num_tokens, payload):
    """Any number of tokens and any payload type: tables are equal, x is what its payload type holds."""
    shape, sent = replace(SHAPE, payload=payload), request(seed, num_tokens)
    got = come_back(request_body(sent, shape), shape)
    assert (got.layer, got.is_prompt) == (sent.layer, sent.is_prompt)
    for name in ("experts", "counts", "rows", "weights"):
        np.testing.assert_array_equal(getattr(got, name), getattr(sent, name))
    expected = unpack_floats(pack_floats(sent.x, payload), payload)
    np.testing.assert_array_equal(got.x.reshape(-1), expected.reshape(-1))


def test_only_the_tokens_that_are_asked_for_travel():
    """x holds the rows of `tokens`, in their order."""
    sent = request(1, 8)
    fewer = sent._replace(tokens=np.array([6, 2]), rows=np.minimum(sent.rows, 1))
    np.testing.assert_array_equal(come_back(request_body(fewer)).x, sent.x[[6, 2]])


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("experts", [0, 1, 3], "not held"),
        ("experts", [0, -1, 2], "not held"),
        ("rows", [0, 1, 2, 3, 8], "tokens that it does not have"),
        ("rows", [0, 1, 2, 3, -1], "tokens that it does not have"),
        ("counts", [0, 2, 3], "without tokens"),
        ("counts", [1, 1, 1], "does not add up"),
        ("counts", [2**31 - 1, 2**31 - 1, 7], "does not add up"),
        ("layer", 3, "beyond the last"),
    ],
)
def test_a_number_out_of_bounds_is_refused(field, value, reason):
    """Ids, rows, counts and layer: one wrong number, one WireError that names it."""
    sent = request(3)._replace(
        experts=np.array([0, 1, 2], np.int32),
        counts=np.array([1, 1, 3], np.int32),
        rows=np.arange(5, dtype=np.int32),
    )
    assert come_back(request_body(sent)).counts.tolist() == [1, 1, 3]
    wrong = value if field == "layer" else np.array(value, np.int32)
    with pytest.raises(WireError, match=reason):
        come_back(request_body(sent._replace(**{field: wrong})))


def test_a_request_beyond_the_agreed_capacity_is_refused():
    """One pair more than agreed on is a WireError."""
    with pytest.raises(WireError, match="larger than agreed"):
        come_back(request_body(request(1, SHAPE.max_pairs + 1)))


@pytest.mark.parametrize("extra", [-4, 4])
def test_arrays_of_another_length_are_refused(extra):
    """A payload that is shorter or longer than its head says is a WireError."""
    body = request_body(request())
    with pytest.raises(WireError, match="another length"):
        come_back(body + bytes(extra) if extra > 0 else body[:extra])


@pytest.mark.parametrize("payload", PayloadType)
def test_values_arrive_within_their_type(payload):
    """Outputs come back: exact in float32, within half a unit of the last place otherwise."""
    rng = np.random.default_rng(5)
    values = rng.standard_normal((7, SHAPE.hidden)).astype(np.float32)
    shape = replace(SHAPE, payload=payload)
    memory = memoryview(bytearray(shape.outputs_bytes(7)))
    write_values(memory, values, shape)
    got = read_values(memory, 7, shape)
    relative = {PayloadType.F32: 0.0, PayloadType.F16: 2.0**-11, PayloadType.BF16: 2.0**-8}[payload]
    np.testing.assert_allclose(got, values, rtol=relative, atol=1e-7 if relative else 0)


def test_halves_keep_special_numbers():
    """bfloat16 keeps NaN and infinities; float16 makes its largest number of what it can not hold."""
    special = np.array([np.nan, np.inf, -np.inf, 3e38, -0.0], np.float32)
    bits = special.copy()
    bits.view(np.uint32)[0] = 0x7FFFFFFF  # rounding up alone would make -0.0 of it
    back = unpack_floats(pack_floats(bits, PayloadType.BF16), PayloadType.BF16)
    np.testing.assert_array_equal(back[:3], special[:3])
    assert abs(back[3] / 3e38 - 1) < 2.0**-8
    assert np.signbit(back[4])
    back = unpack_floats(
        pack_floats(np.array([1e6, -1e6], np.float32), PayloadType.F16), PayloadType.F16
    )
    np.testing.assert_array_equal(back, [65504, -65504])


def test_bfloat16_is_what_torch_makes_of_it():
    """Every upper half of a float32, with lower halves around each tie: torch's bits; all widen to torch's numbers."""
    torch = pytest.importorskip("torch")
    upper = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    values = (upper | lower).view(np.float32)
    theirs = torch.from_numpy(values).to(torch.bfloat16)
    packed = pack_floats(values, PayloadType.BF16)
    is_nan = np.isnan(values)
    np.testing.assert_array_equal(
        packed[~is_nan], theirs.view(torch.int16).numpy().view(np.uint16)[~is_nan]
    )
    back = unpack_floats(packed, PayloadType.BF16)
    assert np.isnan(back[is_nan]).all()
    np.testing.assert_array_equal(back, theirs.float().numpy())
    place = np.empty_like(packed)
    assert pack_floats(values, PayloadType.BF16, place) is place
    np.testing.assert_array_equal(place, packed)

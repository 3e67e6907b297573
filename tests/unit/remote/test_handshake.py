"""The handshake's bodies: what is said arrives, what does not add up is refused, and proofs bind."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.remote_bodies import HELD, SHAPE, hello
from thermocline.errors import WireError
from thermocline.remote.handshake import (
    Welcome,
    client_proof,
    decode_hello,
    decode_welcome,
    encode_hello,
    encode_welcome,
    worker_proof,
)
from thermocline.remote.requests import HEAD_BYTES


def test_a_hello_arrives_whole():
    """Dims, digests, slots and every layer's list come out as they went in."""
    sent = hello(4, HEAD_BYTES + SHAPE.max_payload_bytes)
    got = decode_hello(memoryview(encode_hello(sent)))
    assert replace(got, held=()) == replace(sent, held=())
    assert [layer.tolist() for layer in got.held] == [layer.tolist() for layer in HELD]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"held": (np.array([1, 1], np.int32),)}, "twice"),
        ({"held": (np.array([6], np.int32),)}, "beyond the last"),
        ({"held": (np.array([-1], np.int32),)}, "beyond the last"),
        ({"num_experts": 0}, "number of experts"),
        ({"shape": replace(SHAPE, hidden=0)}, "width"),
        ({"shape": replace(SHAPE, max_pairs=1 << 20)}, "batch capacity"),
        ({"num_slots": 65, "slot_bytes": 64}, "too many slots"),
        ({"num_slots": 4, "slot_bytes": 64}, "another size"),
        ({"num_slots": 4}, "without memory"),
    ],
)
def test_a_hello_that_makes_no_sense_is_refused(changes, reason):
    """One wrong part, one WireError that names it."""
    with pytest.raises(WireError, match=reason):
        decode_hello(memoryview(encode_hello(replace(hello(), **changes))))


@pytest.mark.parametrize("length", [0, 10, 95, 110, 120])
def test_a_cut_hello_is_refused(length):
    """However short, it is a WireError."""
    with pytest.raises(WireError):
        decode_hello(memoryview(encode_hello(hello()))[:length])


def test_a_welcome_arrives_whole():
    """Credits, holdings and the kernels' name come out; no credits are refused."""
    sent = Welcome(b"p" * 32, 4, 17, 1 << 33, "avx512 x 2")
    assert decode_welcome(memoryview(encode_welcome(sent))) == sent
    with pytest.raises(WireError, match="credits"):
        decode_welcome(memoryview(encode_welcome(replace(sent, credits=0))))


def test_proofs_depend_on_everything_and_on_who_speaks():
    """Another secret, nonce or hello, or the other side's role, gives another proof."""
    first, second = b"1" * 32, b"2" * 32
    proofs = {
        client_proof(b"secret", first, second),
        client_proof(b"Secret", first, second),
        client_proof(b"secret", second, first),
        client_proof(b"secret", first, second + b"more"),
        worker_proof(b"secret", first, second),
    }
    assert len(proofs) == 5

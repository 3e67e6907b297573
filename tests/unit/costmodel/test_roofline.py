"""The roofline: shares of the machine's limits, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from thermocline.costmodel.roofline import decode_load, prefill_load
from thermocline.kernels.machine_limits import MachineLimits
from thermocline.models.footprint import Footprint

FOOTPRINT = Footprint(
    total_bytes=1000_000_000,
    trunk_bytes=200_000_000,
    experts_bytes=800_000_000,
    expert_bytes=(),
    token_bytes=250_000_000,
    num_parameters=2_000_000_000,
    num_active_parameters=500_000_000,
    num_output_parameters=100_000_000,
    formats=(),
)
LIMITS = MachineLimits(20e9, 200e9, 1 << 30)


def test_decoding_reads_its_weights_for_every_token():
    """250 MB at 60 tokens/s are 15 of 20 GB/s; 500 M weights are 30 of 200 G multiply-adds/s."""
    load = decode_load(FOOTPRINT, LIMITS, 60.0)
    assert (load.memory, load.compute) == pytest.approx((0.75, 0.15))
    assert load.bound == "memory reads"
    assert "15.0 GB/s: 75% of memory" in str(load)


def test_a_prompt_reads_the_file_once_per_chunk():
    """Two chunks of a 1000-token prompt: 2 MB per token; the output matrix is not counted."""
    load = prefill_load(FOOTPRINT, LIMITS, 400.0, 1000, 512)
    assert load.bytes_per_token == pytest.approx(2e6)
    assert (load.memory, load.compute) == pytest.approx((0.04, 0.8))
    assert load.bound == "arithmetic"


def test_far_from_both_limits_neither_is_blamed():
    """Then the time goes elsewhere."""
    assert decode_load(FOOTPRINT, LIMITS, 10.0).bound.startswith("neither")


def test_an_unknown_router_counts_everything():
    """Without knowing how many experts a token uses, all are counted."""
    unknown = replace(FOOTPRINT, token_bytes=None, num_active_parameters=None)
    assert decode_load(unknown, LIMITS, 1.0).memory == pytest.approx(0.05)

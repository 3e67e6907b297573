"""Machine facts: parsing of limits, and what is never told."""

from __future__ import annotations

import json
import platform

import pytest

from thermocline.machine import machine_facts, parse_cpu_limit, parse_memory_limit


@pytest.mark.parametrize(
    ("text", "cores"),
    [("max 100000\n", None), ("150000 100000\n", 1.5), ("", None), ("5", None), ("1 0", None)],
)
def test_cpu_limit(text, cores):
    """A quota over a period is a number of cores; anything else is no limit."""
    assert parse_cpu_limit(text) == cores


@pytest.mark.parametrize(("text", "limit"), [("max\n", None), ("1048576\n", 1048576), ("", None)])
def test_memory_limit(text, limit):
    """A number is bytes, "max" is no limit."""
    assert parse_memory_limit(text) == limit


def test_facts_are_complete_and_plain():
    """The facts fit into JSON, and name neither host nor user."""
    facts = machine_facts()
    assert 1 <= facts.num_usable_cores <= facts.num_cores
    assert facts.memory_bytes > 1 << 20
    assert facts.cpu
    assert facts.versions["numpy"]
    text = json.dumps(facts.as_dict())
    assert platform.node() not in text or len(platform.node()) < 4

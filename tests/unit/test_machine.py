"""Machine facts: all of them, and what is never told."""

from __future__ import annotations

import json
import platform

from thermocline.machine import machine_facts


def test_facts_are_complete_and_plain():
    """The facts fit into JSON, and name neither host nor user."""
    facts = machine_facts()
    assert 1 <= facts.num_usable_cores <= facts.num_cores
    assert facts.memory_bytes > 1 << 20
    assert facts.cpu
    assert facts.versions["numpy"]
    text = json.dumps(facts.as_dict())
    assert platform.node() not in text or len(platform.node()) < 4

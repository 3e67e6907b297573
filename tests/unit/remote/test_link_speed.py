"""A link's speed comes from its large calls, the newest most."""

from __future__ import annotations

import pytest

from thermocline.remote.link_speed import LinkSpeed


def test_large_calls_tell_and_new_ones_more():
    """Calls of some bytes, or without a time, say nothing; after many faster calls the speed is theirs."""
    speed = LinkSpeed()
    assert speed.bytes_per_s == 0.0
    speed.add(1000, 1e-6)
    speed.add(1 << 20, 0.0)
    assert speed.bytes_per_s == 0.0
    speed.add(1_000_000, 1e-3)
    assert speed.bytes_per_s == pytest.approx(1e9)
    speed.add(1_000_000, 0.5e-3)
    assert speed.bytes_per_s == pytest.approx(1.9e6 / 1.4e-3)
    for _ in range(100):
        speed.add(1_000_000, 0.5e-3)
    assert speed.bytes_per_s == pytest.approx(2e9, rel=1e-3)

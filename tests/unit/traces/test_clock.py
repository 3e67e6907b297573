"""Claims about the trace clocks and the mapping of device time to host time."""

import pytest

from thermocline.traces.clock import DeviceAnchor, FakeClock, MonotonicClock


def test_monotonic_clock_never_goes_back():
    """Readings of the machine's clock are integers that never fall."""
    clock = MonotonicClock()
    readings = [clock.now_ns() for _ in range(100)]
    assert readings == sorted(readings)
    assert all(type(reading) is int for reading in readings)


def test_fake_clock_moves_only_when_told():
    """A fake clock stands still until advanced, and refuses to go back."""
    clock = FakeClock(start_ns=5)
    assert (clock.now_ns(), clock.now_ns()) == (5, 5)
    clock.advance(10)
    assert repr(clock) == "FakeClock(now_ns=15)"
    with pytest.raises(ValueError, match="can not go back by 1 ns"):
        clock.advance(-1)


@pytest.mark.parametrize(
    ("before_ns", "after_ns", "host_ns", "error_ns"),
    [(100, 200, 150, 50), (100, 201, 150, 51), (7, 7, 7, 0)],
)
def test_anchor_is_the_middle_of_its_bracket(before_ns, after_ns, host_ns, error_ns):
    """The anchor lies in the middle, and its error reaches both ends of the bracket."""
    anchor = DeviceAnchor.between(before_ns, after_ns)
    assert (anchor.host_ns, anchor.error_ns) == (host_ns, error_ns)
    assert anchor.host_ns - anchor.error_ns <= before_ns
    assert anchor.host_ns + anchor.error_ns >= after_ns


def test_device_time_maps_to_whole_host_nanoseconds():
    """Milliseconds after the anchor become nanoseconds of the host, rounded, also before the anchor."""
    anchor = DeviceAnchor(host_ns=1_000_000, error_ns=0)
    assert anchor.to_host_ns(0.0015) == 1_001_500
    assert anchor.to_host_ns(-0.5) == 500_000


def test_anchor_refuses_a_bracket_that_ends_before_it_starts():
    """A reversed bracket is a defect of the caller."""
    with pytest.raises(ValueError, match="before its start"):
        DeviceAnchor.between(2, 1)

"""Stop strings: hold-back, which match wins, limits."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thermocline.errors import RequestError
from thermocline.text.stops import MAX_STOP_BYTES, MAX_STOPS, StopMatcher, StopResult


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Grow the text by one character at a time; the first end that is a stop string wins."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


_small = st.text(alphabet="abc", max_size=30)
_stops = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=5)


@given(text=_small, stops=_stops, cuts=st.lists(st.integers(0, 30), max_size=12))
def test_same_result_for_every_split(text, stops, cuts):
    """However the text is split, output and match equal those of the naive search."""
    matcher = StopMatcher(stops)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[low:high] for low, high in itertools.pairwise(bounds)]
    results = [matcher.push(piece) for piece in pieces] + [matcher.flush()]
    assert ("".join(r.text for r in results), results[-1].matched) == naive(text, stops)


@given(text=_small, stops=_stops)
def test_holds_back_no_more_than_needed(text, stops):
    """What is held back is always the beginning of some stop string."""
    matcher = StopMatcher(stops)
    sent = "".join(matcher.push(char).text for char in text)
    if matcher.matched is None:
        held = text[len(sent) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_holds_back_then_releases():
    """A beginning that turns out to be ordinary text comes out with the next piece."""
    matcher = StopMatcher(["</end>"])
    assert matcher.push("a</e") == StopResult("a", None)
    assert matcher.push("x") == StopResult("</ex", None)


def test_text_ends_before_the_match_and_stays_ended():
    """Nothing of the match or after it comes out."""
    matcher = StopMatcher(["STOP"])
    assert matcher.push("one ST") == StopResult("one ", None)
    assert matcher.push("OP two") == StopResult("", "STOP")
    assert matcher.push("more") == StopResult("", "STOP")
    assert matcher.flush() == StopResult("", "STOP")


def test_longest_of_those_that_end_together():
    """Of two stop strings with the same end the longer one is the match."""
    assert StopMatcher(["b", "ab"]).push("xab") == StopResult("x", "ab")


def test_first_complete_wins():
    """A stop string that is complete is not kept waiting for a longer one."""
    assert StopMatcher(["abcd", "bc"]).push("abcd") == StopResult("a", "bc")


def test_no_stops_pass_everything():
    """Without stop strings nothing is held back."""
    assert StopMatcher([]).push("abc") == StopResult("abc", None)


def test_repr_shows_state():
    """The repr names what is held and matched."""
    matcher = StopMatcher(["ab"])
    matcher.push("xa")
    assert repr(matcher) == "StopMatcher(stops=('ab',), held='a', matched=None)"


@pytest.mark.parametrize(
    "stops",
    [
        [""],
        ["x" * (MAX_STOP_BYTES + 1)],
        ["é" * (MAX_STOP_BYTES // 2 + 1)],
        [str(i) for i in range(MAX_STOPS + 1)],
        "stop",
    ],
    ids=["empty", "long", "long_in_bytes", "many", "bare_string"],
)
def test_limits(stops):
    """Stop strings outside the limits are a request error that names the field."""
    with pytest.raises(RequestError) as caught:
        StopMatcher(stops)
    assert caught.value.param == "stop"

"""The blocks that requests will hold at the worst moment, against a count step by step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from thermocline.pipeline.scheduling.room_ahead import Expected, peak_blocks

REQUESTS = st.lists(
    st.builds(Expected, st.integers(0, 60), st.integers(0, 60), st.just(0)), max_size=8
)


def counted(requests, block_tokens):
    """Walk through all steps; a request holds blocks up to the step in which its last token comes."""
    most = 0
    for step in range(max((request.num_further for request in requests), default=0) + 1):
        running = [request for request in requests if request.num_further >= step]
        held = sum(-(-(request.num_tokens + step) // block_tokens) for request in running)
        most = max(most, held)
    return most


@given(REQUESTS, st.integers(1, 16))
def test_it_is_the_peak_of_a_count_step_by_step(requests, block_tokens):
    """So whatever may run alone is found to fit in an empty cache."""
    assert peak_blocks(requests, block_tokens) == counted(requests, block_tokens)


def test_blocks_free_at_an_end_are_there_for_the_next():
    """Two that end at different times need less than the sum of their ends, but for what they share with others."""
    early, late = Expected(32, 8), Expected(32, 64)
    assert peak_blocks([early, late], 8) == 12
    assert peak_blocks([early, late], 8) < 5 + 12
    shared = early._replace(num_shared=4)
    assert peak_blocks([shared, late], 8) == 16

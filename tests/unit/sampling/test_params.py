"""Claims about SamplingParams: defaults, ranges, types, and that nobody can change one later."""

import dataclasses
import math

import pytest

from thermocline.errors import RequestError
from thermocline.sampling.params import SamplingParams


def test_defaults_are_greedy_and_switch_everything_off():
    """Without arguments sampling is greedy, unlimited in length and without any processing."""
    params = SamplingParams()
    assert params.is_greedy
    assert params == SamplingParams(
        max_tokens=None, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0,
        repetition_penalty=1.0, repeat_last_n=64, presence_penalty=0.0, frequency_penalty=0.0,
        logit_bias={}, seed=None, stop=(), stop_token_ids=(), ignore_eos=False, min_tokens=0,
        logprobs=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kwargs", "is_greedy"),
    [
        ({"temperature": 0}, True),
        ({"temperature": 1, "top_k": 1}, True),
        ({"temperature": 0.1}, False),
    ],
)
def test_greedy_is_temperature_zero_or_one_candidate(kwargs, is_greedy):
    """Temperature 0 and top_k 1 are the two ways of being greedy."""
    assert SamplingParams(**kwargs).is_greedy is is_greedy


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("max_tokens", [None, 0, 2**63 - 1], [-1, 2**63, 1.0, True, "1", 10**5000]),
        ("min_tokens", [0, 5], [-1, None, 2**63, False]),
        ("top_k", [0, 1, 10**9], [-1, None, 1.5, True]),
        ("repeat_last_n", [-1, 0, 64], [-2, None, 0.5]),
        ("seed", [None, -(2**63), 2**63 - 1], [2**63, -(2**63) - 1, 1.0, True]),
        ("logprobs", [None, 0, 20], [-1, 21, True, 10**6]),
        ("temperature", [0, 0.0, 1, 2.0, 5e-324], [-0.1, 2.01, math.nan, math.inf, True, "1", None]),
        ("top_p", [1e-9, 1, 1.0], [0, 0.0, 1.01, -0.5, math.nan, True]),
        ("min_p", [0, 0.5, 1.0], [-0.1, 1.1, math.nan]),
        ("typical_p", [0.1, 1.0], [0.0, 1.1, math.nan]),
        ("repetition_penalty", [0.1, 1, 2.0], [0.0, 0.05, -1.0, 2.1, math.nan, 10**400]),
        ("presence_penalty", [-2, 2.0], [-2.1, 2.1, math.nan]),
        ("frequency_penalty", [-2, 2.0], [-2.1, 2.1, math.inf, None]),
        ("ignore_eos", [True, False], [0, 1, None, "true"]),
        ("stop", [(), "a", ("a",), ["a", "b"], ("x" * 256,) * 16],
         ["", None, ("",), ("x" * 257,), ("a",) * 17, (1,), {"a": 1}]),
        ("stop_token_ids", [(), (0, 5), [7]], [5, None, (-1,), (True,), (1.0,), (0,) * 257]),
        ("logit_bias", [{}, {0: -100, 5: 100.0}],
         [None, [(1, 2)], {-1: 0.0}, {"1": 0.0}, {True: 0.0}, {1: 100.1}, {1: math.nan}, {1: True},
          dict.fromkeys(range(1025), 0.0)]),
    ],
)  # fmt: skip
def test_field_takes_its_range_and_nothing_else(field, good, bad):
    """Each field takes the ends of its range; beyond them a RequestError names the field, shortly."""
    for value in good:
        SamplingParams(**{field: value})
    for value in bad:
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{field: value})
        assert caught.value.param == field
        assert field in str(caught.value)
        assert len(str(caught.value)) < 300


def test_min_tokens_above_max_tokens_is_refused():
    """An answer can not be shorter than its minimum."""
    SamplingParams(min_tokens=3, max_tokens=3)
    with pytest.raises(RequestError, match="lower it") as caught:
        SamplingParams(min_tokens=4, max_tokens=3)
    assert caught.value.param == "min_tokens"


def test_later_changes_do_not_reach_in():
    """Changing the dict and lists that were passed in changes nothing, and nothing can be assigned."""
    bias, stop, ids = {1: 2.0}, ["a"], [5]
    params = SamplingParams(logit_bias=bias, stop=stop, stop_token_ids=ids)
    bias[2] = 3.0
    stop.append("b")
    ids.append(6)
    assert dict(params.logit_bias) == {1: 2.0}
    assert (params.stop, params.stop_token_ids) == (("a",), (5,))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        params.logit_bias[1] = 0.0  # type: ignore[index]


def test_replace_checks_again():
    """A changed copy keeps the other fields and is validated like a new one."""
    params = SamplingParams(logit_bias={1: 2.0}, stop=("a",), top_k=3)
    changed = dataclasses.replace(params, top_k=4)
    assert dataclasses.replace(changed, top_k=3) == params
    with pytest.raises(RequestError):
        dataclasses.replace(params, top_k=-1)

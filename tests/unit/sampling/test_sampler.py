"""Claims about the Sampler: exact statistics, order of the steps, repeatable draws, log-probabilities."""

import math

import numpy as np
import pytest

from thermocline.errors import EngineError, RequestError
from thermocline.messages import TokenLogprob
from thermocline.sampling.params import SamplingParams
from thermocline.sampling.sampler import Sampled, Sampler, uniform_at

_PROBABILITIES = np.array([0.4, 0.25, 0.15, 0.1, 0.06, 0.04])

_KNOWN_UNIFORMS = [
    0.011546754286331562,
    0.21185954403345741,
    0.3035680343067586,
    0.05812427158061817,
]


def _sampler(vocab_size=6, *, end_ids=(), prompt_ids=(), **kwargs):
    return Sampler(
        SamplingParams(**kwargs), vocab_size=vocab_size, end_ids=end_ids, prompt_ids=prompt_ids
    )


def _row(*values):
    return np.array(values, dtype=np.float32)


def _logits(probabilities=_PROBABILITIES):
    return np.log(probabilities).astype(np.float32)


class _Length:
    """An output of `num` tokens that nobody looks at: position without content."""

    def __init__(self, num):
        self._num = num

    def __len__(self):
        return self._num


def _draw_many(sampler, row, num_draws):
    return np.bincount(
        [sampler.sample(row, _Length(n)).token_id for n in range(num_draws)], minlength=len(row)
    )


def _chi_square(observed, probabilities):
    expected = probabilities * observed.sum()
    possible = expected > 0
    assert not observed[~possible].any()
    return float((((observed - expected) ** 2)[possible] / expected[possible]).sum())


# The 99.9 % quantile of chi-square by degrees of freedom; seeds are fixed, so a test is not flaky.
_CHI_SQUARE_999 = {2: 13.82, 3: 16.27, 5: 20.52, 15: 37.70}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_draws", "kwargs", "probabilities"),
    [
        (20_000, {}, _PROBABILITIES),
        (4_000, {"temperature": 0.5}, _PROBABILITIES**2),
        (4_000, {"temperature": 2.0}, _PROBABILITIES**0.5),
        (4_000, {"top_k": 3}, _PROBABILITIES * [1, 1, 1, 0, 0, 0]),
        (4_000, {"top_p": 0.7}, _PROBABILITIES * [1, 1, 1, 0, 0, 0]),
        (4_000, {"min_p": 0.2}, _PROBABILITIES * [1, 1, 1, 1, 0, 0]),
        (4_000, {"logit_bias": {0: -math.log(4)}}, _PROBABILITIES * [0.25, 1, 1, 1, 1, 1]),
    ],
)
def test_draws_follow_the_exact_distribution(num_draws, kwargs, probabilities):
    """Thousands of draws pass the chi-square test against the distribution that the parameters define."""
    sampler = _sampler(seed=11, **{"temperature": 1.0, **kwargs})
    observed = _draw_many(sampler, _logits(), num_draws)
    probabilities = probabilities / probabilities.sum()
    freedom = int((probabilities > 0).sum()) - 1
    assert _chi_square(observed, probabilities) < _CHI_SQUARE_999[freedom]


def test_chi_square_test_can_fail():
    """The statistic rejects a distribution that is slightly off: the test above has teeth."""
    wrong = _PROBABILITIES + np.array([-0.02, 0.02, 0, 0, 0, 0])
    observed = np.round(wrong * 20_000).astype(np.int64)
    assert _chi_square(observed, _PROBABILITIES) > _CHI_SQUARE_999[5]


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [[7] * 8_000, range(-4_000, 4_000)], ids=["positions", "seeds"])
def test_uniforms_are_uniform_along_positions_and_along_seeds(seeds):
    """Numbers of one seed at all positions, and of all seeds at one position, fill 16 bins evenly."""
    along_positions = not isinstance(seeds, range)
    uniforms = [uniform_at(s, n if along_positions else 3) for n, s in enumerate(seeds)]
    assert 0 <= min(uniforms) <= max(uniforms) < 1
    observed = np.bincount((np.array(uniforms) * 16).astype(int), minlength=16)
    assert _chi_square(observed, np.full(16, 1 / 16)) < _CHI_SQUARE_999[15]
    lag = np.corrcoef(uniforms[:-1], uniforms[1:])[0, 1]
    assert abs(lag) < 3.3 / math.sqrt(len(uniforms))


def test_uniforms_never_change():
    """The numbers of a seed are part of the contract: a seeded answer is the same in every version."""
    assert [uniform_at(*at) for at in ((0, 0), (0, 1), (1, 0), (-1, 5))] == _KNOWN_UNIFORMS


def test_draw_depends_on_seed_and_position_only():
    """A fresh sampler asked in any order, or twice, gives the same token at the same position."""
    row = _logits()
    straight = [_sampler(temperature=1.0, seed=3).sample(row, [0] * n).token_id for n in range(40)]
    sampler = _sampler(temperature=1.0, seed=3)
    backwards = [sampler.sample(row, [1] * n).token_id for n in reversed(range(40))][::-1]
    again = [sampler.sample(row, [2] * n).token_id for n in range(40)]
    assert straight == backwards == again
    assert len(set(straight)) > 1
    assert straight != [
        _sampler(temperature=1.0, seed=4).sample(row, [0] * n).token_id for n in range(40)
    ]


def test_unseeded_samplers_differ_and_can_be_repeated():
    """Without a seed each sampler has its own, which it tells."""
    first, second = _sampler(temperature=1.0), _sampler(temperature=1.0)
    assert first.seed != second.seed
    repeated = _sampler(temperature=1.0, seed=first.seed)
    row = _logits(np.full(6, 1 / 6))
    assert [first.sample(row, [0] * n) for n in range(9)] == [
        repeated.sample(row, [0] * n) for n in range(9)
    ]
    assert f"seed={first.seed}" in repr(first)


@pytest.mark.parametrize(
    "kwargs", [{}, {"temperature": 1.0, "top_k": 1}, {"top_p": 0.1, "typical_p": 0.1}]
)
def test_greedy_takes_the_lowest_of_the_best(kwargs):
    """Greedy is the greatest logit, the lowest id among equals, whatever the filters say."""
    assert _sampler(4, **kwargs).sample(_row(1, 3, 3, 2), []) == Sampled(1, None, ())


def test_logits_are_not_changed():
    """The caller's row is only read, also with every step switched on."""
    row = _logits()
    before = row.copy()
    sampler = _sampler(
        temperature=0.7, top_k=4, top_p=0.9, typical_p=0.9, min_p=0.01, logit_bias={1: 3.0},
        repetition_penalty=1.3, presence_penalty=1.0, frequency_penalty=0.5, min_tokens=9,
        end_ids=(0,), prompt_ids=(2,), logprobs=3,
    )  # fmt: skip
    row.flags.writeable = False
    sampler.sample(row, [1, 1, 3])
    np.testing.assert_array_equal(row, before)


def test_bias_comes_before_the_repetition_penalty():
    """Biased from -1 to 3 and then divided by 2 gives 1.5; the other order would give 2."""
    kwargs = {"logit_bias": {0: 4.0}, "repetition_penalty": 2.0, "prompt_ids": (0,)}
    assert _sampler(2, **kwargs).sample(_row(-1, 1.75), []).token_id == 1
    assert _sampler(2, **kwargs).sample(_row(-1, 1.25), []).token_id == 0


def test_repetition_comes_before_presence():
    """4 / 2 - 1 = 1 is the order; (4 - 1) / 2 = 1.5 would be the other."""
    kwargs = {"repetition_penalty": 2.0, "presence_penalty": 1.0}
    assert _sampler(2, **kwargs).sample(_row(4, 1.25), [0]).token_id == 1
    assert _sampler(2, **kwargs).sample(_row(4, 0.75), [0]).token_id == 0


def test_top_k_comes_before_top_p():
    """Of the two best, renormalised to 8/13 and 5/13, top-p 0.6 keeps one; of all six it would keep two."""
    counts = _draw_many(_sampler(temperature=1.0, seed=1, top_k=2, top_p=0.6), _logits(), 200)
    assert counts.tolist() == [200, 0, 0, 0, 0, 0]


def test_temperature_comes_before_top_p():
    """At temperature 2 the best token falls from 0.4 to 0.28, so top-p 0.35 keeps two instead of one."""
    counts = _draw_many(_sampler(temperature=2.0, seed=1, top_p=0.35), _logits(), 200)
    assert counts[0] > 0
    assert counts[1] > 0
    assert counts[2:].sum() == 0


def test_typical_p_comes_before_top_p():
    """Typical-p 0.35 keeps tokens 1 and 2, of which top-p 0.6 keeps 1; the other order keeps 0."""
    sampler = _sampler(temperature=1.0, seed=1, typical_p=0.35, top_p=0.6)
    assert _draw_many(sampler, _logits(), 50).tolist() == [0, 50, 0, 0, 0, 0]


def test_top_p_comes_before_min_p():
    """Top-p 0.6 keeps two and min-p 0.5 both; had min-p renormalised first, top-p would keep one."""
    counts = _draw_many(_sampler(temperature=1.0, seed=1, top_p=0.6, min_p=0.5), _logits(), 50)
    assert counts[0] > 0
    assert counts[1] > 0
    assert counts[2:].sum() == 0


@pytest.mark.parametrize(
    ("last_n", "prompt_ids", "output_ids", "penalised"),
    [
        (2, (0, 1, 2), (), {1, 2}),
        (2, (0, 1, 2), (3,), {2, 3}),
        (2, (0, 1, 2), (3, 4, 5), {4, 5}),
        (3, (0,), (1,), {0, 1}),
        (-1, (0, 1), (2, 3), {0, 1, 2, 3}),
        (0, (0, 1), (2, 3), set()),
    ],
)
def test_repetition_looks_back_over_prompt_and_output(last_n, prompt_ids, output_ids, penalised):
    """The window is the last n tokens of the whole sequence; -1 is all of it, 0 none."""
    sampler = _sampler(7, prompt_ids=prompt_ids, repetition_penalty=2.0, repeat_last_n=last_n)
    losers = set()
    for token_id in range(6):
        row = np.full(7, -np.inf, dtype=np.float32)
        row[token_id], row[6] = 2.0, 1.5  # loses against token 6 only if it is halved
        if sampler.sample(row, output_ids).token_id == 6:
            losers.add(token_id)
    assert losers == penalised


def test_presence_and_frequency_look_at_the_output_alone():
    """A token of the prompt is not penalised by them; one of the output is, however long ago."""
    sampler = _sampler(3, prompt_ids=(0, 0), presence_penalty=1.0, repeat_last_n=1)
    assert sampler.sample(_row(2, 1.5, 0), [2]).token_id == 0
    assert sampler.sample(_row(2, 1.5, 0), [0, 2, 2]).token_id == 1
    sampler = _sampler(2, frequency_penalty=0.4)
    assert sampler.sample(_row(2, 1), [0, 0]).token_id == 0
    assert sampler.sample(_row(2, 1), [0, 0, 0]).token_id == 1


def test_no_end_before_the_minimum():
    """End and stop tokens are impossible for the first min_tokens tokens, and possible after."""
    sampler = _sampler(4, end_ids=(3,), stop_token_ids=(2,), min_tokens=2)
    row = _row(0, 1, 2, 3)
    assert [sampler.sample(row, [0] * n).token_id for n in range(3)] == [1, 1, 3]


def test_minimum_gives_way_when_only_ends_are_possible():
    """If the model rules out everything but end tokens, the end is taken even before the minimum."""
    sampler = _sampler(3, end_ids=(2,), min_tokens=5, temperature=1.0)
    assert sampler.sample(_row(-np.inf, -np.inf, 1), []).token_id == 2


def test_logprobs_are_those_of_the_raw_model():
    """Bias, penalties, temperature and filters change the choice, not the log-probabilities."""
    sampler = _sampler(
        logprobs=3, temperature=0.3, seed=1, top_k=1, logit_bias={4: 50.0}, presence_penalty=2.0
    )
    sampled = sampler.sample(_logits() + np.float32(5), [0])
    assert sampled.token_id == 4
    assert sampled.logprob == pytest.approx(math.log(0.06), abs=1e-6)
    assert [entry.token_id for entry in sampled.top] == [0, 1, 2]
    assert [entry.logprob for entry in sampled.top] == pytest.approx(
        np.log([0.4, 0.25, 0.15]), abs=1e-6
    )


def test_logprobs_zero_gives_the_chosen_alone():
    """logprobs=0 asks for the chosen token's log-probability and no others."""
    sampled = _sampler(2, logprobs=0).sample(_row(0, 0), [])
    assert sampled == Sampled(0, pytest.approx(-math.log(2)), ())


def test_impossible_tokens_are_not_among_the_most_likely():
    """A ruled-out token has no finite log-probability and is left out of the list."""
    sampled = _sampler(3, logprobs=20).sample(_row(0, -np.inf, 0), [])
    half = pytest.approx(-math.log(2))
    assert sampled.top == (TokenLogprob(0, half), TokenLogprob(2, half))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((0, np.nan, 1), "1 of 3 are NaN, the greatest is 1.0"),
        ((np.nan,) * 3, "3 of 3 are NaN"),
        ((0, np.inf, 1), "the greatest is inf"),
        ((-np.inf,) * 3, "the greatest is -inf"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unusable_logits_are_an_engine_error(values, words, temperature):
    """NaN, +inf and nothing but -inf are refused, greedy or not, with what was seen."""
    with pytest.raises(EngineError, match=words):
        _sampler(3, temperature=temperature).sample(_row(*values), [])


@pytest.mark.parametrize(
    ("kwargs", "param"),
    [
        ({"logit_bias": {6: 1.0}}, "logit_bias"),
        ({"stop_token_ids": (6,)}, "stop_token_ids"),
        ({"prompt_ids": (0, 6), "repetition_penalty": 1.1}, "prompt"),
    ],
)
def test_ids_outside_of_the_vocabulary_are_refused(kwargs, param):
    """An id that the model does not have is a RequestError naming its field and the range."""
    with pytest.raises(RequestError, match=r"token 6, but the model's ids are 0\.\.5") as caught:
        _sampler(**kwargs)
    assert caught.value.param == param


def test_rows_of_the_wrong_shape_or_type_are_our_defect():
    """A row that is not float32 [V] is a broken caller, not a request's fault."""
    with pytest.raises(AssertionError):
        _sampler().sample(np.zeros(5, dtype=np.float32), [])
    with pytest.raises(AssertionError):
        _sampler().sample(np.zeros(6), [])


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"logit_bias": {0: 100.0}}])
def test_a_token_of_no_answer_is_never_chosen(options):
    """Whatever its probability, and whatever a request adds to it; unless nothing else is possible."""
    params = SamplingParams(**({"seed": 7, "temperature": 1.0} | options))
    sampler = Sampler(params, vocab_size=6, end_ids=(), prompt_ids=(), never_ids={0, 3})
    counts = _draw_many(sampler, _logits(), 300)
    assert counts.sum() == 300
    assert not counts[[0, 3]].any()
    alone = np.full(6, -np.inf, np.float32)
    alone[3] = 1.0
    assert sampler.sample(alone, []).token_id == 3

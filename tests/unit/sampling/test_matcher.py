"""Constraints on logits: what is allowed, where an answer is over, and what is refused."""

from __future__ import annotations

import json
import re
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.toy_model import byte_vocabulary
from thermocline.errors import EngineClosedError, RequestError
from thermocline.sampling.constraint import Constraint, ConstraintKind, Reasoning, ReasoningBudget
from thermocline.sampling.grammar import depth_of, grammar_text
from thermocline.sampling.matcher import Grammars, open_trials
from thermocline.sampling.params import SamplingParams
from thermocline.sampling.reasoning_limit import ReasoningLimit
from thermocline.sampling.sampler import Sampler
from thermocline.text.tokenizer import Tokenizer
from thermocline.text.vocabulary import TokenizerData

Kind = ConstraintKind
THINK = Reasoning("<think>", "</think>")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer():
    """A vocabulary of bytes, five merges and three control tokens, two of which end answers."""
    tokens, types, merges = byte_vocabulary()
    return Tokenizer(
        TokenizerData(
            model="gpt2",
            pre="qwen2",
            tokens=tokens,
            token_types=types,
            merges=merges,
            eos_id=len(tokens) - 1,
        )
    )


@pytest.fixture(scope="module")
def grammars(tokenizer):
    """Grammars of that vocabulary, with their threads and the children in which they are tried."""
    grammars = Grammars(tokenizer, open_trials(tokenizer))
    for _ in range(2):
        grammars.prepare().result()
    yield grammars
    grammars.close()


def sampler(grammars, tokenizer, constraint, **params):
    asked = SamplingParams(constraint=constraint, **params)
    return Sampler(
        asked,
        vocab_size=tokenizer.vocab_size,
        end_ids=tokenizer.end_ids,
        prompt_ids=[1],
        matcher=grammars.matcher(constraint),
    )


def logits_of(tokenizer, seed):
    return np.random.default_rng(seed).standard_normal(tokenizer.vocab_size).astype(np.float32) * 2


def answer(grammars, tokenizer, constraint, *, seed=0, limit=400, **params):
    """Return the token ids of an answer of random logits, with an end token or where it is over."""
    chooser = sampler(grammars, tokenizer, constraint, temperature=1.0, seed=seed, **params)
    output = []
    for position in range(limit):
        output.append(chooser.sample(logits_of(tokenizer, (seed, position)), output).token_id)
        if output[-1] in tokenizer.end_ids or chooser.is_complete(output):
            return output
    return output


def allowed(grammars, tokenizer, constraint, text=""):
    """Return the texts of the tokens that may follow `text`; "END" stands for all end tokens."""
    matcher = grammars.matcher(constraint)
    row = matcher.masked(logits_of(tokenizer, 0), tokenizer.encode(text))
    ids = np.flatnonzero(np.isfinite(row))
    return {"END" if i in tokenizer.end_ids else tokenizer.decode([i]) for i in map(int, ids)}


def is_person(text):
    value = json.loads(text)
    assert list(value) == ["name", "age"]
    return len(value["name"]) <= 5 and 0 <= value["age"] <= 120


CHOICES = [
    "yes",
    "no",
    'a "quoted"\né',
    "a/b\\c.*",
    "[x]-{y}(z)^$|?+#&~",
    "\ttab \r",
    "<t>@%!:;,'`_=",
]
CONSTRAINTS = {
    "schema": (Constraint(Kind.JSON_SCHEMA, json.dumps(SCHEMA)), is_person),
    "regex": (
        Constraint(Kind.REGEX, r"\d{3}-[ab/]{2}"),
        lambda text: re.fullmatch(r"\d{3}-[ab/]{2}", text),
    ),
    "choice": (
        Constraint(Kind.CHOICE, json.dumps(CHOICES)),
        lambda text: text in CHOICES,
    ),
    "lark": (
        Constraint(Kind.GRAMMAR, 'start: "<" word ">"\nword: /[a-c]{1,3}/'),
        lambda text: re.fullmatch("<[abc]{1,3}>", text),
    ),
    "gbnf": (
        Constraint(Kind.GRAMMAR, 'root ::= "x" [0-9] tail\ntail ::= "y" | "z"'),
        lambda text: re.fullmatch("x[0-9][yz]", text),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_random_logits_give_valid_answers(grammars, tokenizer, name):
    """Whatever the logits and the seed, the answer is what was asked for, to its last character."""
    constraint, is_valid = CONSTRAINTS[name]
    for seed in range(25):
        output = answer(grammars, tokenizer, constraint, seed=seed)
        assert is_valid(tokenizer.decode(output)), (seed, tokenizer.decode(output))


def test_an_object_has_any_keys(grammars, tokenizer):
    """json_object starts an object and nothing else."""
    assert allowed(grammars, tokenizer, Constraint(Kind.JSON_OBJECT)) == {"{"}
    assert '"' in allowed(grammars, tokenizer, Constraint(Kind.JSON_OBJECT), "{")


def test_it_may_end_only_when_all_is_there(grammars, tokenizer):
    """End tokens are allowed exactly where the grammar accepts; where it can only end, they alone are."""
    constraint = Constraint(Kind.REGEX, "ab?c?")
    assert allowed(grammars, tokenizer, constraint) == {"a"}
    assert allowed(grammars, tokenizer, constraint, "a") == {"b", "c", "END"}
    assert allowed(grammars, tokenizer, constraint, "abc") == {"END"}
    chooser = sampler(grammars, tokenizer, constraint)
    ids = tokenizer.encode("abc")
    assert [chooser.is_complete(ids[:n]) for n in range(4)] == [False, False, False, True]


def test_ignore_eos_ends_as_late_as_possible(grammars, tokenizer):
    """With ignore_eos, or before min_tokens, an answer ends only where nothing else may follow."""
    constraint = Constraint(Kind.REGEX, "a{1,6}")
    for params in ({"ignore_eos": True}, {"min_tokens": 100}):
        output = answer(grammars, tokenizer, constraint, **params)
        assert tokenizer.decode(output) == "aaaaaa"
    lengths = {len(answer(grammars, tokenizer, constraint, seed=seed)) for seed in range(20)}
    assert min(lengths) < 6


def test_whitespace_is_bounded(grammars, tokenizer):
    """A model that likes line ends and blanks best can not write them without end."""
    constraint = Constraint(Kind.JSON_SCHEMA, json.dumps(SCHEMA))
    likes = dict.fromkeys(tokenizer.encode(" \n"), 100.0)
    chooser = sampler(grammars, tokenizer, constraint, logit_bias=likes)
    output = []
    while not chooser.is_complete(output):
        output.append(chooser.sample(logits_of(tokenizer, len(output)), output).token_id)
        assert len(output) < 1000
    assert is_person(tokenizer.decode(output))


def test_many_choices_are_no_problem(grammars, tokenizer):
    """Thousands of choices are held like two."""
    choices = [f"word {number}" for number in range(4000)]
    constraint = Constraint(Kind.CHOICE, json.dumps(choices))
    assert tokenizer.decode(answer(grammars, tokenizer, constraint)) in choices


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=12))
def test_any_order_of_questions_gives_the_same_tokens(grammars, tokenizer, lengths):
    """A sampler asked about any beginnings in any order chooses as one that is asked in order."""
    constraint = Constraint(Kind.JSON_SCHEMA, json.dumps(SCHEMA))
    expected = answer(grammars, tokenizer, constraint, seed=3)
    chooser = sampler(grammars, tokenizer, constraint, temperature=1.0, seed=3)
    for length in lengths:
        beginning = expected[: min(length, len(expected) - 1)]
        logits = logits_of(tokenizer, (3, len(beginning)))
        assert chooser.sample(logits, beginning).token_id == expected[len(beginning)]


def test_another_branch_is_followed_after_a_rollback(grammars, tokenizer):
    """Tokens that were followed and then replaced leave nothing behind."""
    constraint = Constraint(Kind.CHOICE, json.dumps(["abcd", "axyz"]))
    matcher = grammars.matcher(constraint)
    assert matcher.is_complete(tokenizer.encode("abcd"))
    row = matcher.masked(logits_of(tokenizer, 0), tokenizer.encode("ax"))
    assert tokenizer.decode(np.flatnonzero(np.isfinite(row)).tolist()) == "y"
    assert repr(matcher) == "Matcher(2 tokens)"


def test_logprobs_stay_the_models_own(grammars, tokenizer):
    """A constraint changes what is chosen, not the log-probabilities that are reported."""
    logits = logits_of(tokenizer, 1)
    constraint = Constraint(Kind.CHOICE, '["yes"]')
    sampled = sampler(grammars, tokenizer, constraint, logprobs=1).sample(logits, [])
    assert tokenizer.decode([sampled.token_id]) == "y"
    total = np.log(np.exp(logits.astype(np.float64)).sum())
    assert sampled.logprob == pytest.approx(float(logits[sampled.token_id]) - total)
    assert sampled.top[0].token_id == int(logits.argmax())


def test_bias_and_penalties_do_not_let_through(grammars, tokenizer):
    """No bias makes possible what the constraint forbids."""
    constraint = Constraint(Kind.CHOICE, '["yes"]')
    chooser = sampler(
        grammars, tokenizer, constraint,
        logit_bias={5: 100.0}, presence_penalty=-2.0, repetition_penalty=0.5,
    )  # fmt: skip
    assert tokenizer.decode([chooser.sample(logits_of(tokenizer, 1), []).token_id]) == "y"


def test_reasoning_comes_first(grammars, tokenizer):
    """Text may be free until the reasoning's end, where it is optional and where the prompt began it."""
    optional = Constraint(Kind.CHOICE, '["yes"]', reasoning=THINK)
    assert allowed(grammars, tokenizer, optional) == {"<", "y"}
    assert len(allowed(grammars, tokenizer, optional, "<think>")) > 100
    begun = Constraint(Kind.CHOICE, '["yes"]', reasoning=Reasoning("", "</think>"))
    assert "END" not in allowed(grammars, tokenizer, begun, "no end")
    assert allowed(grammars, tokenizer, begun, "so</think>") == {"y", " ", "\n"}
    assert allowed(grammars, tokenizer, begun, "so</think>\n\nyes") == {"END"}


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        (Kind.JSON_SCHEMA, '{"type": "string", "contentEncoding": "x", "not": {}}', "not"),
        (Kind.JSON_SCHEMA, '{"type": "nothing"}', "type"),
        (Kind.JSON_SCHEMA, "{", "not valid JSON"),
        (Kind.JSON_SCHEMA, '{"items":' * 70 + "{}" + "}" * 70, "64 deep"),
        (Kind.JSON_SCHEMA, '{"type": "integer", "multipleOf": 99999989}', "multipleOf"),
        (Kind.JSON_SCHEMA, '{"allOf": [{"multipleOf": 101}, {"multipleOf": 103}]}', "multipleOf"),
        (Kind.GRAMMAR, 'start: %json {"multiple\\u004ff": 99999989}', "multipleOf"),
        (Kind.GRAMMAR, 'start: %json {"multipleOf": 1e999999999}', "multipleOf"),
        (Kind.JSON_SCHEMA, '{"multipleOf": 1e-99999999999999999999}', "multipleOf"),
        (Kind.REGEX, "(a", "regex"),
        (Kind.REGEX, "(?=a)b", "look-ahead"),
        (Kind.CHOICE, "[]", "at least one"),
        (Kind.CHOICE, '["a", ""]', "empty"),
        (Kind.GRAMMAR, "start: nothing", "nothing"),
        (Kind.GRAMMAR, "start: start", "any answer"),
        (Kind.JSON_SCHEMA, '{"$ref": "#"}', "any answer"),
        (Kind.GRAMMAR, "no grammar at all", "response_format"),
    ],
)
def test_what_can_not_be_held_is_refused(grammars, kind, text, says):
    """An invalid or unsupported constraint is a RequestError that names the field and what is wrong."""
    with pytest.raises(RequestError, match=re.escape(says)) as caught:
        grammars.matcher(Constraint(kind, text, param="response_format"))
    assert caught.value.param == "response_format"
    assert str(caught.value).startswith("response_format ")


@pytest.mark.parametrize("kind", [Kind.REGEX, Kind.CHOICE])
def test_text_is_not_taken_for_a_schema(grammars, tokenizer, kind):
    """What looks like a schema's keyword with a huge number is text like any other in a regex or a choice."""
    wanted = '"multipleOf":1e999999999'
    text = json.dumps([wanted]) if kind is Kind.CHOICE else wanted
    assert allowed(grammars, tokenizer, Constraint(kind, text), wanted[:-1]) == {"9"}


@pytest.mark.parametrize("text", ["\n", " ", "a\n", "- ", '"multipleOf" ', '"multipleOf":', "\\u"])
def test_the_text_of_a_grammar_is_read_in_linear_time(text):
    """Four times as much takes some four times as long to be looked through, whatever a client repeats."""

    def seconds(count: int) -> float:
        constraint = Constraint(Kind.GRAMMAR, text * count, param="structured_outputs")
        times = []
        for _ in range(3):
            start = time.thread_time()
            grammar_text(constraint)
            times.append(time.thread_time() - start)
        return min(times)

    assert seconds(16_000) < 12 * max(seconds(4_000), 0.01)


def test_lenient_schemas_pass_over_what_is_not_known(grammars, tokenizer):
    """The same schema is refused where it must hold, and enforced as far as it goes where not."""
    text = json.dumps({"type": "string", "format": "color", "maxLength": 1})
    with pytest.raises(RequestError, match="color"):
        grammars.matcher(Constraint(Kind.JSON_SCHEMA, text))
    lenient = Constraint(Kind.JSON_SCHEMA, text, lenient=True)
    assert allowed(grammars, tokenizer, lenient) == {'"'}


def test_too_long_a_constraint_is_refused():
    """More than a MiB is refused before anything reads it."""
    with pytest.raises(RequestError, match="1048576"):
        Constraint(Kind.GRAMMAR, "x" * (1 << 20) + "y")


def test_params_take_only_constraints():
    """Something else in its place is a RequestError."""
    with pytest.raises(RequestError, match="constraint"):
        SamplingParams(constraint="json")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "depth"), [(1, 0), ([], 1), ({}, 1), ({"a": [1, {}]}, 3), ([[], [[2]]], 3)]
)
def test_depth_is_that_of_the_brackets(value, depth):
    """depth_of counts how many lists and objects are around the innermost."""
    assert depth_of(value) == depth


def test_grammars_are_compiled_once(grammars, tokenizer, monkeypatch):
    """Equal constraints share one compilation; each matcher goes its own way."""
    constraint = Constraint(Kind.REGEX, "once{1,3}")
    first = grammars.matcher(constraint)
    monkeypatch.setattr("thermocline.sampling.matcher.grammar_text", None)
    second = grammars.submit(Constraint(Kind.REGEX, "once{1,3}")).result()
    assert first.is_complete(tokenizer.encode("onceee"))
    assert not second.is_complete([])


def test_nothing_is_compiled_after_the_end(tokenizer):
    """Closed grammars refuse work; a vocabulary without end tokens refuses constraints."""
    grammars = Grammars(tokenizer)
    grammars.prepare().result()
    grammars.close()
    with pytest.raises(EngineClosedError):
        grammars.submit(Constraint(Kind.JSON_OBJECT))


def test_a_model_without_end_tokens_is_not_constrained(tokenizer):
    """Its answers could not end: a RequestError says so, and preparing does nothing."""

    class Endless:
        vocab_size = tokenizer.vocab_size
        end_ids = frozenset()

    grammars = Grammars(Endless())  # type: ignore[arg-type]
    assert grammars.prepare().result() is None
    with pytest.raises(RequestError, match="no end token"):
        grammars.submit(Constraint(Kind.JSON_OBJECT)).result()
    grammars.close()


def test_the_text_is_the_compilers_json():
    """Reasoning is a grammar of its own, before the body."""
    plain = json.loads(grammar_text(Constraint(Kind.REGEX, "a/b")))
    assert [one["name"] for one in plain["grammars"]] == ["body"]
    assert plain["grammars"][0]["lark_grammar"] == "start: /a\\/b/"
    both = json.loads(grammar_text(Constraint(Kind.JSON_OBJECT, reasoning=THINK)))
    assert [one["name"] for one in both["grammars"]] == ["top", "body"]


def limit_of(tokenizer, begin, max_tokens):
    budget = ReasoningBudget(begin, "</think>", "\n</think>\n\n", max_tokens)
    return ReasoningLimit(budget, tokenizer.encode(budget.closing), tokenizer.token_bytes)


class CountingTokenizer:
    """A tokenizer that keeps how long the texts were that it was given."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.lengths = []

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def encode_more(self, text):
        self.lengths.append(len(text))
        return self._tokenizer.encode_more(text)


@pytest.mark.parametrize("piece", ["7", "the cat saw a dog ", "hello " * 60 + "häuser 日本 "])
def test_a_long_forced_text_costs_each_step_only_its_beginning(tokenizer, piece):
    """A client's text of the greatest length made each mask encode all that was left of it."""
    text = (piece * 6000)[:6000]
    counting = CountingTokenizer(tokenizer)
    grammars = Grammars(counting)
    try:
        matcher = grammars.matcher(Constraint(Kind.GRAMMAR, f'start: "{text}"', "grammar"))
        output = []
        for _ in range(300):
            row = matcher.masked(np.zeros(tokenizer.vocab_size, np.float32), output)
            output.append(int(row.argmax()))
    finally:
        grammars.close()
    assert output == tokenizer.encode_more(text)[:300]
    assert max(counting.lengths) <= 256


def forced_text(limit, tokenizer, text):
    """Return what is forced after `text`, until nothing is."""
    output = tokenizer.encode(text)
    start = len(output)
    while (token_id := limit.forced(output)) is not None:
        output.append(token_id)
    return tokenizer.decode(output[start:])


@pytest.mark.parametrize(
    ("begin", "max_tokens", "text", "forced"),
    [
        ("", 4, "abcd", "\n</think>\n\n"),
        ("", 0, "", "\n</think>\n\n"),
        ("", 4, "abc", ""),
        ("", 10, "a</think>b", ""),
        ("<think>", 2, "<think>ab", "\n</think>\n\n"),
        ("<think>", 2, "\n<think>ab", "\n</think>\n\n"),
        ("<think>", 2, "no thinking", ""),
        ("<|channel|>analysis<|message|>", 2, "<|channel|>analysis<|message|>ab", "\n</think>\n\n"),
        (" to=self<|message|>", 2, " to=self<|message|>ab", "\n</think>\n\n"),
        ("", 3, "ab€", "\n</think>\n\n"),
        ("", 40, "x" * 40 + "\n</think>\n\n", ""),
    ],
)
def test_reasoning_is_closed_when_its_budget_is_used_up(tokenizer, begin, max_tokens, text, forced):
    """The closing text follows the budget's last token, a whole character, once; and only reasoning's."""
    assert forced_text(limit_of(tokenizer, begin, max_tokens), tokenizer, text) == forced


def test_a_closed_reasoning_leads_into_the_constraint(grammars, tokenizer):
    """Budget and constraint together: reasoning of so many tokens, and then the answer's form."""
    constraint = Constraint(Kind.CHOICE, '["yes", "no"]', reasoning=Reasoning("", "</think>"))
    chooser = Sampler(
        SamplingParams(temperature=1.0, seed=1, constraint=constraint),
        vocab_size=tokenizer.vocab_size, end_ids=tokenizer.end_ids, prompt_ids=[1],
        matcher=grammars.matcher(constraint), limit=limit_of(tokenizer, "", 10),
    )  # fmt: skip
    output = []
    while not chooser.is_complete(output):
        output.append(chooser.sample(logits_of(tokenizer, len(output)), output).token_id)
    text = tokenizer.decode(output)
    assert re.search(r"\n</think>\n\n\s*(yes|no)$", text)
    assert len(output) < 40


def test_marks_that_steer_are_no_text_of_an_answer():
    """Harmony's marks are shown in answers, and a JSON string is never made of them, whatever their bytes."""
    tokens, types, merges = byte_vocabulary()
    marks = ["<|message|>", "<|end|>", "<|call|>", "<|return|>"]
    harmony = Tokenizer(
        TokenizerData(
            model="gpt2",
            pre="gpt-4o",
            tokens=[*tokens, *marks],
            token_types=[*types, *[3] * len(marks)],
            merges=merges,
            eos_id=len(tokens) + 3,
        )
    )
    mark_ids = [harmony.token_id(mark) for mark in marks]
    assert not harmony.is_control(mark_ids[0]), "it is shown"
    grammars = Grammars(harmony)
    try:
        matcher = grammars.matcher(Constraint(Kind.JSON_OBJECT))
        begun = harmony.encode('{"key": "text', add_bos=False)
        logits = matcher.masked(np.zeros(harmony.vocab_size, np.float32), begun)
        assert np.isfinite(logits[harmony.token_id("a")])
        assert np.isneginf(logits[mark_ids]).all()
    finally:
        grammars.close()


def test_drafts_are_cut_where_the_grammar_ends_them(grammars, tokenizer):
    """So many tokens as may follow one another; asking changes nothing of the answer, and raises nothing."""
    constraint = Constraint(Kind.REGEX, "a{2}b{3}c")
    matcher, plain = grammars.matcher(constraint), grammars.matcher(constraint)
    a, b, c = (tokenizer.encode_more(text)[0] for text in "abc")
    logits = np.zeros(tokenizer.vocab_size, np.float32)
    for known, draft, expected in (
        ([], [a, a, b, b, b, c], 6),
        ([], [b, a], 0),
        ([a], [a, b, a, b], 2),
        ([a, a], [], 0),
        ([a, a, b], [b, b, c, c], 3),
        ([], [c], 0),
        ([a, a, b, b, b, c], [a], 0),
    ):
        assert matcher.num_possible(known, draft) == expected
        if known[-1:] != [c]:
            assert np.array_equal(matcher.masked(logits, known), plain.masked(logits, known))
        assert matcher.is_complete(known) == plain.is_complete(known)

"""Grammars that take too long or too much memory are stopped in a child, and no others."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace

import pytest

from tests.support.processes import child_pids
from tests.support.toy_model import byte_vocabulary
from thermocline.child.process import ChildLimits
from thermocline.errors import RequestError
from thermocline.sampling.constraint import Constraint, ConstraintKind
from thermocline.sampling.matcher import Grammars, open_trials
from thermocline.text.tokenizer import Tokenizer
from thermocline.text.vocabulary import TokenizerData

FAST = ChildLimits(deadline_s=0.3)
EASY = Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "integer"}')


def lark(rule):
    """Return the compiler's text for a grammar of one rule."""
    return json.dumps({"grammars": [{"name": "body", "lark_grammar": f"start: {rule}"}]})


# Their compilation takes many seconds. `grammar_text` refuses them, but who knows what else takes as long.
LONG = lark('%json {"type": "integer", "multipleOf": 1000003}')


@pytest.fixture(scope="module")
def tokenizer():
    """A vocabulary of bytes, five merges and three control tokens, two of which end answers."""
    tokens, types, merges = byte_vocabulary()
    data = TokenizerData("gpt2", "qwen2", tokens, types, merges, eos_id=len(tokens) - 1)
    return Tokenizer(data)


@pytest.fixture
def trials(tokenizer):
    """Trials with a short deadline."""
    trials = open_trials(tokenizer, FAST)
    yield trials
    trials.close()


def test_a_long_compilation_is_killed(trials):
    """It is told why within some seconds, and the next grammar is compiled."""
    assert trials.refusal(lark("/a/")) is None
    begin_s = time.monotonic()
    assert "longer than 0.3 s" in trials.refusal(LONG)
    assert time.monotonic() - begin_s < 15
    assert trials.refusal(lark("/a/")) is None


def test_memory_is_limited(tokenizer):
    """A child that has not the memory for a grammar is no loss."""
    trials = open_trials(tokenizer, replace(FAST, memory_bytes=96 << 20, deadline_s=20))
    try:
        assert "stopped" in trials.refusal(LONG)
        assert trials.refusal(lark("/a/")) is None
    finally:
        trials.close()


def test_a_killed_child_is_replaced(trials):
    """The grammar that was compiled meanwhile is refused, the next one is not."""
    before = child_pids()
    assert trials.refusal(lark("/a/")) is None
    (child,) = child_pids() - before
    os.kill(child, 9)
    assert "its process ended" in trials.refusal(lark("/a/"))
    assert trials.refusal(lark("/a/")) is None


def test_control_tokens_are_those_of_the_model(trials, tokenizer):
    """Grammars may name them, and any other token by its number."""
    name = tokenizer.token_text(max(tokenizer.end_ids))
    for rule in (name, f"<[{tokenizer.vocab_size - 1}]>", "<[7]>"):
        assert trials.refusal(lark(f"{rule} /a/")) is None, rule
    assert "<|nobody|>" in trials.refusal(lark("<|nobody|> /a/"))
    assert trials.refusal(lark(f"<[{tokenizer.vocab_size}]> /a/")) is not None


def test_nothing_is_compiled_here_that_the_child_could_not(tokenizer, monkeypatch):
    """The refusal names the request's field; the process itself compiles only what the child could."""
    before = child_pids()
    grammars = Grammars(tokenizer, open_trials(tokenizer, FAST))
    grammars.submit(EASY).result()
    monkeypatch.setattr("thermocline.sampling.matcher.grammar_text", lambda _: LONG)
    begin_s = time.thread_time()
    constraint = Constraint(ConstraintKind.REGEX, "a", param="structured_outputs.regex")
    with pytest.raises(RequestError, match=r"longer than 0\.3 s") as caught:
        grammars.matcher(constraint)
    assert caught.value.param == "structured_outputs.regex"
    assert time.thread_time() - begin_s < 0.2, "it was compiled here as well"
    grammars.close()
    assert child_pids() <= before


@pytest.mark.parametrize("depth", [500, 1000, 2000, 4000, 8000, 16000])
def test_no_depth_of_rules_ends_the_process(tokenizer, depth):
    """Each rule names the next one. What overflows the compiler's stack ends a child; what does not is compiled here."""
    rules = [f'r{n}: "a" r{n + 1} | "b"' for n in range(depth)]
    text = "\n".join(["start: r0", *rules, f'r{depth}: "c"'])
    grammars = Grammars(tokenizer)
    try:
        failure = grammars.submit(Constraint(ConstraintKind.GRAMMAR, text)).exception(30)
    finally:
        grammars.close()
    assert failure is None or (depth > 500 and isinstance(failure, RequestError))

"""Twice as much of what a client wrote takes at most three times as long, for every parser of it.

Processor time of this thread is measured, so that other programs do not matter, in memory that the process has already: a
large block that is mapped anew each time costs a page fault for each 4 KiB, and whether a block is large depends on what
was freed before. THERMOCLINE_RELIABILITY=full tries each kind of text with each tokenizer and each format of calls, instead of all
kinds one after the other.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import statistics
import threading
import time

import llguidance
import msgspec
import pytest

from tests.support.toy_model import byte_vocabulary
from thermocline.sampling.constraint import Constraint, ConstraintKind
from thermocline.sampling.grammar import grammar_text
from thermocline.sampling.matcher import Grammars, start_deep
from thermocline.server.anthropic.schema import MessagesRequest
from thermocline.server.core.answer_fields import read_tools
from thermocline.server.core.bodies import decode_body, unknown_fields
from thermocline.server.core.json_shape import ShapeCheck
from thermocline.server.core.structured import FormatFields, plan_format
from thermocline.server.ollama.schema import OllamaChatRequest
from thermocline.server.openai.schema import ChatCompletionRequest, refuse_non_text
from thermocline.server.responses.schema import ResponsesRequest
from thermocline.text.answer_parser import AnswerShape
from thermocline.text.chat_messages import normalize_messages
from thermocline.text.chat_template import ChatTemplate
from thermocline.text.detokenizer import Detokenizer
from thermocline.text.stops import StopMatcher
from thermocline.text.templates.template_facts import NO_TEMPLATE, TemplateFacts, read_template
from thermocline.text.templates.template_program import load
from thermocline.text.tokenization.pretokenizers import PRE_TOKENIZERS
from thermocline.text.tokenization.slices import SLICE_CHARS
from thermocline.text.tokenizer import Tokenizer
from thermocline.text.tool_calls.call_writer import write_calls
from thermocline.text.tool_calls.format_table import (
    FORMATS,
    GLM,
    HARMONY,
    HERMES,
    KIMI_K2,
    MISTRAL,
    PLAIN,
    THINK,
    XML,
)
from thermocline.text.tool_calls.tool_formats import ThinkingMode
from thermocline.text.vocabulary import TokenizerData

FULL = os.environ.get("THERMOCLINE_RELIABILITY") == "full"
MAX_RATIO = 3.0
CLEAR_RATIO = 2.4
MIN_S = 0.005
FIRST_SIZE = 64
NUM_TRIES = 5


# malloc.h of glibc
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
TRIM_THRESHOLD, MMAP_MAX = 128 << 10, 65536


@pytest.fixture(scope="module", autouse=True)
def memory_stays():
    """Have freed blocks stay with this process, where the C library can be told so; as before afterwards."""
    tell = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)
    tell(M_MMAP_MAX, 0)
    tell(M_TRIM_THRESHOLD, -1)
    yield
    tell(M_MMAP_MAX, MMAP_MAX)
    tell(M_TRIM_THRESHOLD, TRIM_THRESHOLD)
    getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)(0)


def seconds(work, size):
    """Return the processor time of `work(size)()`; the work is made before."""
    ready = work(size)
    gc.disable()
    try:
        begin_s = time.thread_time()
        ready()
        return time.thread_time() - begin_s
    finally:
        gc.enable()


def assert_linear(work, least=FIRST_SIZE, most=1 << 22):
    """Find a size from `least` on that takes long enough to be measured, at most `most`, and compare it with the double.

    A machine that others use measures wrongly now and then: what is far from the limit is clear at once, else the median
    of several measurements counts.
    """
    size, once_s = least, seconds(work, least)
    while size < most // 2 and once_s < MIN_S:
        size *= 2
        once_s = seconds(work, size)
    if once_s < MIN_S / 10 or seconds(work, 2 * size) < CLEAR_RATIO * once_s:
        return
    ratios = []
    for _ in range(NUM_TRIES):
        once_s = min(seconds(work, size) for _ in range(3))
        ratios.append(min(seconds(work, 2 * size) for _ in range(3)) / once_s)
    assert statistics.median(ratios) < MAX_RATIO, (size, ratios)


def test_what_takes_the_square_is_found():
    """Else the other tests here could not fail."""

    def work(size):
        def run():
            text = []
            for _ in range(size):
                text.insert(0, 1)
                sum(text)

        return run

    with pytest.raises(AssertionError):
        assert_linear(work)


# Runs of one kind, and what may be mistaken for the beginning of something.
RUNS = {
    "letters": "a", "capitals": "A", "digits": "7", "blanks": " ", "lines": "\n", "punctuation": "!",
    "quotes": "'s", "mixed": "a1 B\n", "marks": "\u0301", "han": "\u6c49", "emoji": "\U0001f600", "joined": "\u200d",
    "special": "<|im_", "sentinel": "<sentinel:0", "hyphens": "a-", "underscores": "_a",
}  # fmt: skip


DISTINCT = [*{(row.patterns, row.is_raw): name for name, row in PRE_TOKENIZERS.items()}.values()]
QUICK_NAMES = ("qwen2", "llama3", "gpt-4o", "deepseek-v3")
# Their words can be as long as the text. The first slice without a cut makes a step in the time, of up to 3.2: it is
# encoded with the places of its tokens, which takes 2.5 times as long. tests/unit/text/tokenization/test_slices.py counts
# what is encoded over all such steps, and here the time is compared beyond the first.
WITH_LONG_WORDS = ("gpt3-finnish", "viking")
QUICK_FORMATS = (HARMONY, HERMES, XML, KIMI_K2, GLM, MISTRAL, PLAIN)


def kinds(named):
    """Return the parametrisation of texts made of these parts: one by one, or all in one."""
    if FULL:
        return [pytest.param([part], id=kind) for kind, part in named.items()]
    return [pytest.param([*named.values()], id="all")]


@pytest.mark.parametrize("parts", kinds(RUNS))
@pytest.mark.parametrize("name", DISTINCT if FULL else QUICK_NAMES)
def test_tokenizers(name, parts):
    """Long runs are cut and merged in linear time, within a slice, too."""
    tokenizer = tokenizer_of(name)
    if PRE_TOKENIZERS[name].is_raw:  # this vocabulary lacks tokens for the others
        parts = [
            part for part in parts if part.isascii() and part.isprintable() and " " not in part
        ]
    if not parts:
        return

    def work(size):
        text = "".join(part * (size // len(parts) // len(part) + 1) for part in parts)
        return lambda: tokenizer.encode(text)

    # Texts of one slice are encoded without noting where their tokens are.
    assert_linear(work, least=SLICE_CHARS * (20 if name in WITH_LONG_WORDS else 5) // 4)


def tokenizer_of(name="qwen2"):
    """Return a tokenizer of bytes and three control tokens with this pre-tokenizer."""
    tokens, types, merges = byte_vocabulary()
    return Tokenizer(TokenizerData("gpt2", name, tokens, types, merges, eos_id=len(tokens) - 1))


def parser_texts(row):
    """Return parts of answers in one format of calls, by name."""
    openings = {row.section_begin, *row.other_begins, row.call.partition("{")[0]} - {""}
    begin = row.section_begin + row.call.partition("{")[0]
    return {
        "blanks": " ", "lines": "\n", "less": "<", "brackets": "[", "braces": "{", "quotes": '"', "escapes": "\\\\",
        "text": "a ", "think": THINK.begin, "thought": THINK.end,
        **{f"opening {number}": opening for number, opening in enumerate(sorted(openings))},
        "calls": row.section_begin + '{"name": "f", "arguments": {"a": 1}}' + row.section_end,
        "begun": begin + '{"name": "f", "arguments": {"a": "',
    }  # fmt: skip


@pytest.mark.parametrize(
    ("row", "kind"),
    [(row, kind) for row in FORMATS for kind in parser_texts(row)]
    if FULL
    else [(row, "") for row in QUICK_FORMATS],
    ids=str,
)
@pytest.mark.parametrize("thinking", ThinkingMode if FULL else (ThinkingMode.MAY_BEGIN,))
def test_answers(row, kind, thinking):
    """Reasoning, text and calls, which come in tokens of some characters, and at once."""
    texts = parser_texts(row)
    parts = [texts[kind]] if FULL else [*texts.values()]
    shape = AnswerShape(thinking, row, can_call=True, schemas={"f": {"type": "object"}})

    def read(size, piece_chars):
        text = "".join(part * (size // len(parts) // len(part) + 1) for part in parts)

        def run():
            parser = shape.parser()
            for start in range(0, len(text), piece_chars):
                parser.push(text[start : start + piece_chars])
            parser.flush()

        return run

    assert_linear(lambda size: read(size, 4), most=1 << 18)


def tools_of(count):
    return [
        {
            "type": "function",
            "function": {
                "name": "f",
                "parameters": {"properties": {str(n): {"type": "integer"} for n in range(count)}},
            },
        }
    ]


MESSAGE = {"role": "user", "content": "a"}
CALLS = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
ASKED = {"role": "assistant", "content": "", "tool_calls": CALLS}
BLOCK = {"type": "text", "text": "a" * 16}
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}{{ m.content }}<|im_end|>{% endfor %}"


def fed(raw):
    """Check the shape of a body that comes in pieces, decode it, and look for unknown fields."""
    check = ShapeCheck()
    for start in range(0, len(raw), 1 << 14):
        check.feed(raw[start : start + (1 << 14)])
    decode_body(raw, ChatCompletionRequest)
    unknown_fields(raw, ChatCompletionRequest)


def body(**fields):
    """Return a work on a decoded body."""
    return json.dumps({"messages": []} | fields).encode()


def normalized(kind, **fields):
    """Return the work of bringing a typed body to a normalized chat."""
    typed = msgspec.convert({"model": "m", "max_tokens": 1} | fields, kind)
    return typed.normalized


def split(template, count):
    """Return the work of telling control tokens from text in a rendered prompt."""
    marked = f"{template._nonce}0\ue2ffuser a" * count
    return lambda: template._split(marked, (template._nonce,))


def pushed(push, items):
    """Return the work of pushing one item after the other."""
    return lambda: [push(item) for item in items]


def lark(text):
    return json.dumps({"grammars": [{"name": "body", "lark_grammar": text}]})


def written(kind, text, **more):
    return lambda: grammar_text(Constraint(kind, text, **more))


PLAIN_PARSERS = {
    "bodies of names": lambda n: lambda: fed(body(**{str(k): 1 for k in range(n)})),
    "bodies of values": lambda n: lambda: fed(body(metadata=[1] * n)),
    "bodies of escapes": lambda n: lambda: fed(body(user="\n" * n)),
    "bodies of objects": lambda n: lambda: fed(body(messages=[{}] * n)),
    "bodies of long numbers": lambda n: lambda: fed(b'{"messages":[],"seed":%s}' % (b"9" * min(n, 4000))),
    "messages": lambda n: lambda: normalize_messages([MESSAGE] * n),
    "parts of a message": lambda n: lambda: normalize_messages([MESSAGE | {"content": [BLOCK] * n}]),
    "parts that are looked at": lambda n: lambda: refuse_non_text([MESSAGE | {"content": [BLOCK] * n}]),
    "calls of a message": lambda n: lambda: normalize_messages([ASKED | {"tool_calls": CALLS * n}]),
    "Anthropic's blocks": lambda n: normalized(MessagesRequest, messages=[MESSAGE | {"content": [BLOCK] * n}]),
    "Anthropic's turns": lambda n: normalized(MessagesRequest, messages=[MESSAGE] * n),
    "Ollama's messages": lambda n: normalized(OllamaChatRequest, messages=[MESSAGE] * n),
    "items": lambda n: normalized(ResponsesRequest, input=[MESSAGE | {"type": "message"}] * n),
    "calls as items": lambda n: normalized(ResponsesRequest, input=[{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}] * n),
    "tools": lambda n: lambda: read_tools([{"type": "function", "function": {"name": f"f{k}"}} for k in range(min(n, 128))]),
    "plans of tools": lambda n: lambda: plan_format(TemplateFacts(HERMES, knows_tools=True), FormatFields(tools=tools_of(min(n, 1500)))).for_prompt(""),
    "plans of schemas": lambda n: lambda: plan_format(NO_TEMPLATE, FormatFields(structured_outputs={"json": {"enum": [*range(min(n, 7000))]}})).for_prompt(""),
    "templates": lambda n: lambda: read_template("{{ 'a' }}{% if b %}<think>{% endif %}" * n),
    "template text": lambda n: lambda: read_template("<|tool_call" * n + "</think" * n),
    "stop strings": lambda n: pushed(StopMatcher(["a" * 255 + "b", "b" * 9]).push, ["aaa"] * n),
    "regexes": lambda n: written(ConstraintKind.REGEX, "\\/a" * n),
    "choices": lambda n: written(ConstraintKind.CHOICE, json.dumps([f"{k}." for k in range(n)])),
    "schemas": lambda n: written(ConstraintKind.JSON_SCHEMA, json.dumps({"properties": {str(k): {"multipleOf": 2} for k in range(n)}})),
    "grammars": lambda n: written(ConstraintKind.GRAMMAR, 'start: "a"\n' + 'multipleOf "\\u0061" : \n' * n),
    "GBNF rules": lambda n: written(ConstraintKind.GRAMMAR, "root ::= r0\n" + "".join(f'r{k} ::= "a" | r{k}\n' for k in range(n))),
    "GBNF alternatives": lambda n: written(ConstraintKind.GRAMMAR, "root ::= " + " | ".join(['"a"'] * n)),
    "written calls": lambda n: lambda: write_calls(HERMES, [("f", {str(k): "v" for k in range(n)})]),
}  # fmt: skip


@pytest.mark.parametrize("name", PLAIN_PARSERS)
def test_parsers_of_bodies(name):
    """Bodies, messages, tools, grammars, stop strings."""
    # A body may have so much of each; the greatest values are for the sweep of tests/server/test_heavy_requests.py.
    assert_linear(PLAIN_PARSERS[name], most=1 << 14)


@pytest.mark.parametrize("kind", ["messages", "parts", "text"])
def test_templates_and_prompts(kind):
    """Rendering, telling control tokens apart, and encoding the parts."""
    tokenizer = tokenizer_of()
    control = sorted(tokenizer.control_texts)
    with ChatTemplate(TEMPLATE, control_tokens=control) as template:
        source = {
            "source": TEMPLATE,
            "control": control,
            "nonce": template._nonce,
            "bos_token": "",
            "eos_token": "",
        }
        loaded = load(source)
        work = {
            "messages": lambda n: lambda: loaded.render({"messages": [MESSAGE] * n}, True, 1 << 23),
            "parts": lambda n: split(template, n),
            "text": lambda n: lambda: tokenizer.encode_parts(["a", 1] * n),
        }
        assert_linear(work[kind])


def test_tokens_to_text():
    """All at a time, and one after the other."""
    tokenizer = tokenizer_of()
    assert_linear(lambda n: lambda: tokenizer.decode([7] * n, skip_special=False))
    assert_linear(lambda n: pushed(Detokenizer(tokenizer).push, [0xC3 - 33] * n))


COMPILED = {
    "regex": lambda n: "start: /" + "|".join(f"a{k}" for k in range(n)) + "/",
    "repeated regex": lambda n: f"start: /(ab|cd){{1,{n}}}/",
    "rules": lambda n: "start: r0\n" + "".join(f'r{k}: "a" r{k + 1} | "b"\n' for k in range(n)) + f'r{n}: "c"',
    "enum": lambda n: "start: %json " + json.dumps({"enum": [f"a{k}" for k in range(n)]}),
    "anyOf": lambda n: "start: %json " + json.dumps({"anyOf": [{"type": "string", "maxLength": k} for k in range(n)]}),
    "$ref": lambda n: "start: %json " + json.dumps({"$defs": {f"d{k}": {"$ref": f"#/$defs/d{k + 1}"} for k in range(n)} | {f"d{n}": {}}, "$ref": "#/$defs/d0"}),
}  # fmt: skip


@pytest.mark.parametrize("kind", COMPILED)
def test_compiled_grammars(kind):
    """What the compiler does with them, up to its own limits. Properties of an object are not among them."""
    grammars = Grammars(tokenizer_of())
    table = grammars.prepare().result()
    failures = []

    def compare():
        try:
            assert_linear(
                lambda n: lambda: llguidance.LLMatcher(table, lark(COMPILED[kind](n)), log_level=0),
                most=1 << 12,
            )
        except AssertionError as error:
            failures.append(error)

    try:
        # As grammars are compiled here: rules that name each other overflow a usual stack.
        thread = threading.Thread(target=compare)
        start_deep(thread)
        thread.join()
        assert not failures, failures[0]
    finally:
        grammars.close()

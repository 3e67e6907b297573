"""What an answer's text consists of, however it is cut into pieces."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thermocline.text.answer_parser import AnswerShape
from thermocline.text.pieces import ReasoningPiece, TextPiece, ToolCallArguments, ToolCallBegin
from thermocline.text.templates.template_facts import read_template
from thermocline.text.tool_calls.format_table import FORMATS, HERMES, PLAIN, THINK, XML
from thermocline.text.tool_calls.tool_formats import ThinkingMode

SCHEMAS = {
    "f": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "number": {"type": "integer"},
            "either": {"type": ["string", "null"]},
            "list": {"type": "array"},
            "size": {"$ref": "#/$defs/Size"},
            "flag": {"type": "boolean"},
        },
        "$defs": {"Size": {"enum": ["S", "M"]}},
    }
}


def parse(shape, *texts):
    """Return the joined pieces: ("think" | "text", text) and ("call", name, arguments)."""
    parser = shape.parser()
    pieces = [piece for text in texts for piece in parser.push(text)]
    pieces += parser.flush()
    joined = []
    for piece in pieces:
        match piece:
            case ToolCallBegin(index, name):
                assert index == sum(one[0] == "call" for one in joined)
                joined.append(("call", name, ""))
            case ToolCallArguments(index, text):
                assert text
                kind, name, before = joined[-1]
                assert kind == "call"
                joined[-1] = ("call", name, before + text)
            case TextPiece(text) | ReasoningPiece(text):
                assert text
                kind = "text" if isinstance(piece, TextPiece) else "think"
                if joined and joined[-1][0] == kind:
                    joined[-1] = (kind, joined[-1][1] + text)
                else:
                    joined.append((kind, text))
    return joined


def shape(calls=None, thinking=ThinkingMode.NEVER):
    row = PLAIN if calls is None else calls
    return AnswerShape(thinking, row, calls is not None, row.reasoning or THINK, SCHEMAS)


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": [1, "}"]}}\n</tool_call>'
MARKERS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>", "<function=", "</function>",
    "<parameter=text>", "<parameter=either>", "<parameter=list>", "</parameter>", "\n", " ", "{", "}",
    '"name"', ": ", '"f"', ", ", '"arguments"', '"parameters"', '{"a": 1}', '"{\\"a\\": 1}"', "[", "<",
    '{"name": "f", "arguments": ', "null", "7", "é😀", "word", CALL, "\\", '"',
]  # fmt: skip
ANSWERS = st.lists(st.sampled_from(MARKERS), max_size=14).map("".join)


@st.composite
def answers_in_a_format(draw):
    """A row of the table, and an answer out of its own marks and of what calls are made of."""
    row = draw(st.sampled_from(FORMATS))
    marks = row.reasoning or THINK
    own = [*row.marks(), marks.begin, marks.end, "f", "text", "1", '"x"', "true"]
    whole = row.call.replace("{name}", "f").replace("{json}", '{"name": "f", "arguments": {}}')
    own += [whole.replace("{arguments}", '{"a": 1}'), whole.replace("{parameters}", row.parameter)]
    return row, "".join(draw(st.lists(st.sampled_from([*own, *MARKERS]), max_size=14)))


@settings(deadline=None, max_examples=200)
@given(
    answers_in_a_format(), st.lists(st.integers(0, 200), max_size=12), st.sampled_from(ThinkingMode)
)
def test_cuts_change_nothing(answer, cuts, thinking):
    """Any text, cut anywhere, gives the same joined pieces as in one, and as in single characters."""
    row, text = answer
    whole = parse(shape(row, thinking), text)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = [text[a:b] for a, b in itertools.pairwise(places)]
    assert parse(shape(row, thinking), *parts) == whole
    assert parse(shape(row, thinking), *text) == whole


@settings(deadline=None, max_examples=200)
@given(answers_in_a_format(), st.sampled_from(ThinkingMode))
def test_calls_that_end_are_json(answer, thinking):
    """Whatever a model writes: arguments of a call are an object once other text or a call follows."""
    row, text = answer
    pieces = parse(shape(row, thinking), *text, "\n")
    for piece, following in itertools.pairwise(pieces):
        if piece[0] == "call" and following:
            assert isinstance(json.loads(piece[2]), dict), (text, piece)


def test_what_only_begins_behind_a_call_is_text():
    """A section that opens once more without all of its words ends no answer with an error, and is no call."""
    row = next(row for row in FORMATS if len(row.section_begin.split()) > 1)
    whole = row.json.replace("{name}", '"f"').replace("{arguments}", '{"a": 1}')
    words = row.section_begin.split()
    text = f"{' '.join(words)}{whole}{row.section_end} {words[0]} nothing"
    pieces = parse(shape(row, ThinkingMode.NEVER), text)
    assert [piece[0] for piece in pieces] == ["call", "text"], pieces
    assert pieces[-1][1].endswith("nothing")


@settings(deadline=None)
@given(ANSWERS.filter(lambda text: "<think>" not in text))
def test_without_calls_nothing_is_lost(text):
    """An answer that may hold neither reasoning nor calls is passed through as it is."""
    assert parse(shape(), *text) == ([("text", text)] if text else [])


@settings(deadline=None)
@given(ANSWERS, st.sampled_from([HERMES, PLAIN, XML]))
def test_only_space_beside_calls_is_lost(text, calls):
    """All but space that is no call is in the text pieces, in order."""
    pieces = parse(shape(calls), *text)
    if not any(piece[0] == "call" for piece in pieces):
        assert "".join(piece[1] for piece in pieces) == text


@pytest.mark.parametrize(
    ("thinking", "text", "expected"),
    [
        (
            ThinkingMode.MAY_BEGIN,
            "<think>\nwhy\n</think>\n\nyes",
            [("think", "why"), ("text", "yes")],
        ),
        (ThinkingMode.HAS_BEGUN, "why\n</think>\n\nyes", [("think", "why"), ("text", "yes")]),
        (ThinkingMode.MAY_BEGIN, "<think>\n\n</think>\n\nyes", [("text", "yes")]),
        (ThinkingMode.MAY_BEGIN, " <yes", [("text", " <yes")]),
        (ThinkingMode.MAY_BEGIN, "yes <think>no</think>", [("text", "yes <think>no</think>")]),
        (ThinkingMode.MAY_BEGIN, "<thi", [("text", "<thi")]),
        (ThinkingMode.HAS_BEGUN, "cut </thi", [("think", "cut </thi")]),
        (ThinkingMode.HAS_BEGUN, "cut \n", [("think", "cut")]),
        (ThinkingMode.NEVER, "<think>no</think>", [("text", "<think>no</think>")]),
    ],
)
def test_reasoning_stands_at_the_start(thinking, text, expected):
    """Reasoning is what stands between its marks before the answer; space around it is dropped."""
    assert parse(shape(None, thinking), *text) == expected


def test_reasoning_can_be_counted():
    """is_reasoning before or after a token's text says that the token belongs to reasoning."""
    parser = shape(None, ThinkingMode.MAY_BEGIN).parser()
    tokens = ["<think>", "\n", "so", "</think>", "\n\n", "yes"]
    counted = []
    for token in tokens:
        before = parser.is_reasoning
        parser.push(token)
        counted.append(before or parser.is_reasoning)
    assert counted == [True, True, True, True, False, False]


HERMES_CASES = [
    (f"look\n{CALL}\n{CALL}\n", [("text", "look"), *[("call", "f", '{"a": [1, "}"]}')] * 2]),
    (
        '<tool_call>{"arguments": {"b": 1}, "name": "f"}</tool_call>bye',
        [("call", "f", '{"b": 1}'), ("text", "bye")],
    ),
    ('<tool_call>{"name": "f"}</tool_call>', [("call", "f", "{}")]),
    ('<tool_call>{"name": "f", "parameters": {}}', [("call", "f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', [("call", "f", '{"a": 1}')]),
    ('<tool_call>{"name": "f", "arguments": {"a": "cut', [("call", "f", '{"a": "cut')]),
    (
        f'<tool_call>{{"name": 1}} {CALL}',
        [("text", '<tool_call>{"name": 1}'), ("call", "f", '{"a": [1, "}"]}')],
    ),
]
BROKEN = [
    "<tool_call>no json</tool_call>",
    "<tool_call>{}</tool_call>",
    '<tool_call>{"name": "f", "other": 1}</tool_call>',
    '<tool_call>{"name": "", "arguments": {}}</tool_call>',
    '<tool_call>{"arguments": {"a": 1}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": 5}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "five"}</tool_call>',
    '<tool_call>{"name": "f", "name": "g"}</tool_call>',
    '<tool_call>{"name": "f',
    "<tool_cal",
    "a </tool_call> b",
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), HERMES_CASES)
def test_hermes_calls(text, expected):
    """Names and arguments come in any order; what stands after the arguments is passed over."""
    assert parse(shape(HERMES), *text) == expected


@pytest.mark.parametrize("text", BROKEN)
def test_broken_calls_are_text(text):
    """What only looks like a call is handed on whole."""
    assert parse(shape(HERMES), *text) == [("text", text)]


def test_arguments_come_as_they_are_written():
    """Arguments are handed on with the character that brings them, not at the end of the call."""
    parser = shape(HERMES).parser()
    assert parser.push('<tool_call>{"name": "f", "arguments": ') == ()
    assert said(parser.push('{"a"')) == '{"a"'
    assert said(parser.push(': "so')) == ': "so'
    assert said(parser.push(' it goes", "n": 1')) == ' it goes", "n": '
    assert said(parser.push("}}</tool_call>")) == "1}"


def said(pieces):
    return "".join(piece.text for piece in pieces if isinstance(piece, ToolCallArguments))


def test_text_that_may_begin_a_call_waits():
    """Text is held back only while it may be the start of a marker, and space beside it."""
    parser = shape(HERMES).parser()
    assert parser.push("a <too") == (TextPiece("a"),)
    assert parser.push("th") == (TextPiece(" <tooth"),)
    assert parser.flush() == ()


PLAIN_CASES = [
    ('{"name": "f", "parameters": {"a": 1}}', [("call", "f", '{"a": 1}')]),
    (
        ' {"name": "f", "arguments": {}}\n{"name": "g", "arguments": {}} done',
        [("call", "f", "{}"), ("call", "g", "{}"), ("text", "done")],
    ),
    ('{"answer": 42}', [("text", '{"answer": 42}')]),
    ('see {"name": "f", "arguments": {}}', [("text", 'see {"name": "f", "arguments": {}}')]),
    ("  ", [("text", "  ")]),
    ('{"name": "f"', [("text", '{"name": "f"')]),
]


@pytest.mark.parametrize(("text", "expected"), PLAIN_CASES)
def test_plain_calls(text, expected):
    """Calls without marks stand at the start of the answer, and nowhere else."""
    assert parse(shape(PLAIN), *text) == expected


def xml(*parameters, name="f"):
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("text", 'a "quote"\nand a line', 'a "quote"\nand a line'),
        ("text", "42", "42"),
        ("text", "", ""),
        ("number", "42", 42),
        ("number", "many", "many"),
        ("either", "null", None),
        ("either", "42", "42"),
        ("either", '"quoted"', '"quoted"'),
        ("list", '["</parameter>", 1]', ["</parameter>", 1]),
        ("flag", "True", True),
        ("size", "M", "M"),
        ("unknown", "[1]", [1]),
        ("unknown", "word", "word"),
    ],
)
def test_xml_values_become_json(key, value, expected):
    """Each parameter's text becomes the JSON that its schema wants; of an unknown one, what it looks like."""
    ((kind, name, arguments),) = parse(shape(XML), *xml((key, value)))
    assert (kind, name, json.loads(arguments)) == ("call", "f", {key: expected})


def test_xml_calls_and_text():
    """Text around calls stays; the outer marker may be missing; parameters join in one object."""
    bare = xml(("text", "x")).removeprefix("<tool_call>\n")
    text = f"first\n{xml(('text', 'a'), ('number', '1'))}\n{bare}\nlast"
    assert parse(shape(XML), *text) == [
        ("text", "first"),
        ("call", "f", '{"text": "a", "number": 1}'),
        ("call", "f", '{"text": "x"}'),
        ("text", "last"),
    ]


@pytest.mark.parametrize(
    "text", ["<tool_call>\nno", "<function=>", "<function=a b>", "<tool_call>\n<func"]
)
def test_broken_xml_calls_are_text(text):
    """Before the name is known, what is no call is text."""
    assert parse(shape(XML), *text) == [("text", text)]


def test_text_values_stream():
    """A text parameter's value is handed on as it comes, as JSON."""
    parser = shape(XML).parser()
    parser.push("<tool_call>\n<function=f>\n<parameter=text>\n")
    assert said(parser.push('say "hi"')) == 'say \\"hi\\"'
    assert said(parser.push("\n</parameter>")) == '"'


@pytest.mark.parametrize(
    ("source", "form", "thinks"),
    [
        ("{{ messages }}", PLAIN, False),
        ("... <tool_call> ... {{ tools }}", HERMES, False),
        ("<tool_call><function=x><parameter=y> {{ tools }} </think>", XML, True),
        ("{% if enable_thinking %}</think>{% endif %}", PLAIN, True),
    ],
)
def test_templates_tell_the_format(source, form, thinks):
    """The format is read from the template's text, and can be overridden."""
    facts = read_template(source)
    assert (facts.tool_format, facts.thinks) == (form, thinks)
    assert facts.knows_tools == ("tools" in source)
    assert read_template(source, XML).tool_format is XML

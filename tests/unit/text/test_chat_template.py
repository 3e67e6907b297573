"""Chat templates: what they can use, how they fail, and that their limits hold."""

from __future__ import annotations

import gc
import os
import select
import subprocess
import sys
import threading
import time

import pytest

from tests.support.processes import child_pids
from thermocline.child.process import ChildLimits
from thermocline.errors import ChatTemplateError, RequestError
from thermocline.text.chat_template import ChatTemplate, PromptPart

HI = [{"role": "user", "content": "hi"}]
ATTACK = [{"role": "user", "content": "attack"}]
FAST = ChildLimits(deadline_s=0.5)

ATTACKS = {
    "mro": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "cycler": "{{ cycler.__init__.__globals__ }}",
    "attr_filter": "{{ ''|attr('__class__') }}",
    "map_attribute": "{{ [messages]|map(attribute='__class__')|list }}",
    "format": "{{ '{0.__class__}'.format(messages) }}",
    "format_map": "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "import": "{% import 'os' as os %}{{ os }}",
    "include": "{% include '/etc/passwd' %}",
    "python_import": "{{ __import__('os').system('id') }}",
    "mutate_list": "{{ messages.append(1) }}",
    "mutate_dict": "{{ messages[0].update({'a': 1}) }}",
    "range": "{{ range(10**9)|list }}",
    "nested_ranges": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "repeat": "{{ 'a' * 10**10 }}",
    "center_method": "{{ 'a'.center(10**10) }}",
    "center_filter": "{{ 'a'|center(10**10) }}",
    "doubling": "{% set n = namespace(s='a') %}{% for i in range(60) %}"
    "{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
    "output_bomb": "{% for a in range(99999) %}{% for b in range(9999) %}aaaaaaaaaaaaaaaa{% endfor %}"
    "{% endfor %}",
    "power": "{{ messages[0].content|length ** (10 ** (8 + messages|length)) }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "list_bomb": "{% for a in range(99999) %}{{ (messages * 10**8)|length }}{% endfor %}",
}


@pytest.fixture(scope="module")
def victim():
    """One template with every attack, chosen by a variable, so that one child meets them all."""
    branches = "".join(
        f"{{% elif which == {name!r} %}}{source}" for name, source in ATTACKS.items()
    )
    with ChatTemplate(
        "{% if which is not defined %}fine" + branches + "{% endif %}", limits=FAST
    ) as t:
        yield t


BURNING = ("nested_ranges", "doubling", "output_bomb", "power", "recursion", "repeat", "list_bomb")
"""Attacks that cost a deadline or a new child."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n in BURNING else ()) for n in ATTACKS],
)
def test_attacks_fail_and_leave_the_template_usable(victim, name):
    """An attack is a ChatTemplateError in bounded time, and the next render works."""
    start = time.monotonic()
    with pytest.raises(ChatTemplateError):
        victim.render(HI, variables={"which": name})
    assert time.monotonic() - start < 5.0
    assert victim.render(HI) == "fine"


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% for a in range(99999) %}" * 30 + "{% endfor %}" * 30 + "{% if %}",
        "{{ 'a' * 10**10",
    ],
    ids=["deep_parentheses", "deep_loops", "open"],
)
def test_hostile_sources_fail_at_construction(source):
    """A source that can not be compiled is refused when the template is made."""
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source, limits=FAST)


def test_syntax_error_names_the_line():
    """The error says where the template is broken."""
    with pytest.raises(ChatTemplateError, match=r"not valid.*line 3"):
        ChatTemplate("a\nb\n{% if %}")


def test_runtime_error_names_the_line():
    """So does an error that only some messages cause."""
    with (
        ChatTemplate("a\nb\n{{ messages.foo.bar }}") as template,
        pytest.raises(ChatTemplateError, match="line 3"),
    ):
        template.render(HI)


def test_raise_exception_carries_the_message():
    """The template's own words reach the caller, control tokens in them readable."""
    source = "{{ raise_exception('roles must alternate after <|x|>') }}"
    with ChatTemplate(source, control_tokens=["<|x|>"]) as template:
        for render in (template.render, template.render_parts):
            with pytest.raises(ChatTemplateError, match=r"roles must alternate after <\|x\|>$"):
                render(HI)


def test_chatml(chatml):
    """The fallback template writes the usual form, with and without the assistant's turn."""
    assert chatml.render(HI) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert chatml.render(HI, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_parts_of_a_prompt(chatml):
    """Control tokens of the template are parts of their own."""
    assert chatml.render_parts(HI, add_generation_prompt=False) == [
        PromptPart("<|im_start|>", is_control=True),
        PromptPart("user\nhi", is_control=False),
        PromptPart("<|im_end|>", is_control=True),
        PromptPart("\n", is_control=False),
    ]


FEATURES = {
    "generation": ("{% generation %}a{{ messages[0].content }}{% endgeneration %}", "ahi"),
    "break": ("{% for i in [1, 2] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
    "json": ("{{ {'ä': [1, '<']}|tojson }}", '{"ä": [1, "<"]}'),
    "json_options": (
        "{{ {'b': 1, 'a': 2}|tojson(indent=1, sort_keys=true) }}",
        '{\n "a": 2,\n "b": 1\n}',
    ),
    "trimmed_blocks": ("\n  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
    "tokens": ("{{ bos_token }}|{{ eos_token }}", "<b>|<e>"),
    "time": ("{{ strftime_now('%%') }}", "%"),
    "no_tools": ("{{ tools is none }}", "True"),
    "variable": ("{{ colour }}", "blue"),
    "namespace": (
        "{% set n = namespace(x=1) %}{% for i in [1] %}{% set n.x = 7 %}{% endfor %}{{ n.x }}",
        "7",
    ),
}


@pytest.fixture(scope="module")
def featured():
    """One template with all features, chosen by a variable."""
    branches = "".join(
        f"{{% elif which == {name!r} %}}{source}" for name, (source, _) in FEATURES.items()
    )
    source = "{% if false %}" + branches + "{% endif %}"
    with ChatTemplate(source, bos_token="<b>", eos_token="<e>") as template:
        yield template


@pytest.mark.parametrize("name", FEATURES)
def test_what_templates_can_use(featured, name):
    """Loop controls, generation tag, JSON as in Python, blocks trimmed, tokens and variables."""
    text = featured.render(HI, variables={"colour": "blue", "which": name})
    assert text == FEATURES[name][1]


def test_tools_and_tool_calls():
    """Tools reach the template; arguments of calls are objects there."""
    source = (
        "{% for t in tools %}{{ t|tojson }}{% endfor %}|"
        "{% for k, v in messages[0].tool_calls[0].function.arguments|items %}{{ k }}={{ v }}{% endfor %}"
    )
    call = {"function": {"name": "f", "arguments": '{"x": 1}'}}
    with ChatTemplate(source) as template:
        text = template.render([{"role": "assistant", "tool_calls": [call]}], tools=[{"name": "f"}])
    assert text == '{"name": "f"}|x=1'


@pytest.mark.parametrize(
    "variables",
    [{"a": object()}, {"a": float("nan")}, {"a": "\ud800"}, {"a": b"x"}, {"a": {1, 2}}],
    ids=["object", "nan", "surrogate", "bytes", "set"],
)
def test_plain_json_only(chatml, variables):
    """Nothing but plain JSON values enters the child."""
    with pytest.raises(ChatTemplateError, match="plain JSON"):
        chatml.render(HI, variables=variables)


def test_own_names_are_taken(chatml):
    """A template variable can not replace the messages or the tokens."""
    with pytest.raises(RequestError, match="messages"):
        chatml.render(HI, variables={"messages": []})


def test_deep_values(chatml):
    """Deeply nested values fail with a typed error."""
    deep: object = "x"
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ChatTemplateError):
        chatml.render(HI, variables={"deep": deep})


def test_too_large_a_request():
    """The size of the messages is limited."""
    with (
        ChatTemplate("x", limits=ChildLimits(max_request_bytes=1000)) as template,
        pytest.raises(ChatTemplateError, match="at most 1000"),
    ):
        template.render([{"role": "user", "content": "a" * 1000}])


def test_too_long_an_output():
    """The length of the prompt is limited."""
    with (
        ChatTemplate(
            "{{ messages[0].content * 3 }}", limits=ChildLimits(max_chars=100)
        ) as template,
        pytest.raises(ChatTemplateError, match="too long"),
    ):
        template.render([{"role": "user", "content": "a" * 50}])


def test_megabyte_prompt(chatml):
    """Large prompts pass both pipes whole."""
    content = "zwölf 😀\n" * 100_000
    assert content in chatml.render([{"role": "user", "content": content}])


def _is_gone(pid: int) -> bool:
    """Neither running nor a zombie: no such process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_close_leaves_no_process():
    """After close the child is reaped, and rendering is a typed error."""
    template = ChatTemplate("x")
    pid = template._process.pid
    template.close()
    template.close()
    assert _is_gone(pid)
    assert repr(template) == "ChatTemplate(1 characters, closed)"
    with pytest.raises(ChatTemplateError, match="closed"):
        template.render(HI)


def test_collected_template_leaves_no_process():
    """A template that nobody closed takes its child with it."""
    template = ChatTemplate("x")
    pid = template._process.pid
    del template
    gc.collect()
    assert _is_gone(pid)


def test_failed_construction_leaves_no_process():
    """A template that could not be made has no child left."""
    before = child_pids()
    with pytest.raises(ChatTemplateError):
        ChatTemplate("{% if %}")
    assert child_pids() <= before


def test_killed_child_is_replaced():
    """When the child dies between two renders, the first fails cleanly and the next works."""
    with ChatTemplate("x") as template:
        os.kill(template._process.pid, 9)
        with pytest.raises(ChatTemplateError, match="ended"):
            template.render(HI)
        assert template.render(HI) == "x"


@pytest.mark.slow
def test_child_ends_with_its_parent():
    """When the parent is gone the child ends by itself, even in the middle of a render."""
    script = (
        "import os, threading\n"
        "from thermocline.text.chat_template import ChatTemplate, ChildLimits\n"
        "t = ChatTemplate('{% if spin is defined %}{% for a in range(99999) %}"
        "{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}',"
        " limits=ChildLimits(deadline_s=1.0))\n"
        "print(t._process.pid, flush=True)\n"
        "input()\n"
        "threading.Timer(0.1, os._exit, (1,)).start()\n"
        "t.render([{'role': 'user', 'content': 'x'}], variables={'spin': 1})\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        child = os.pidfd_open(int(parent.stdout.readline()))
        parent.communicate("go on\n")
    try:
        assert select.select([child], [], [], 20)[0], "the child is still there"
    finally:
        os.close(child)


def test_threads_share_one_template(chatml):
    """Renders from many threads do not mix."""
    results: dict[int, str] = {}

    def work(index: int) -> None:
        results[index] = chatml.render([{"role": "user", "content": f"n{index}"}])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(f"\nn{index}<|im_end|>" in text for index, text in results.items())
    assert len(results) == 8


def test_a_template_may_change_lists_of_its_own():
    """Appending to a list of the template's and taking from it works, as Kimi K2's template does."""
    source = "{% set l = [] %}{% for m in messages %}{% set _ = l.append(m.content) %}{% endfor %}{{ l.pop() }}"
    with ChatTemplate(source) as template:
        assert template.render([{"role": "user", "content": "hi"}]) == "hi"
    with (
        ChatTemplate("{{ messages[0].list.append(1) }}") as template,
        pytest.raises(ChatTemplateError, match="unsafe"),
    ):
        template.render([{"role": "user", "content": "hi", "list": [[]]}])


CALLED = [
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "5"},
]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ 'x' + messages[1].tool_calls[0].function.arguments }}", 'x{"a": 1}'),
        (
            "{% set i = messages[1].tool_calls[0].id %}{% if i|length != 9 %}{{ raise_exception('nine') }}"
            "{% endif %}{{ i == messages[2].tool_call_id }}",
            "True",
        ),
        ("{% for t in tools %}{{ t }}{% endfor %}no tools", "no tools"),
        ("{{ 'f' + functions }}{{ datetime|length }}", "f[]10"),
    ],
)
def test_templates_get_the_form_they_want(source, expected):
    """Arguments as text, short ids, no tools as a list, functions as text: where the usual is refused."""
    with ChatTemplate(source) as template:
        assert template.render(CALLED) == expected


def test_text_and_thought_before_a_call_become_one():
    """A template that takes either text or thought with a call, as gpt-oss', gets both as thought."""
    source = (
        "{% for m in messages %}{% if m.tool_calls %}{% if m.content and m.thinking %}"
        "{{ raise_exception('either') }}{% endif %}{{ m.content or m.thinking }}{% endif %}{% endfor %}"
    )
    call = {**CALLED[1], "content": "Let me look.", "reasoning_content": "A city."}
    with ChatTemplate(source) as template:
        assert template.render([CALLED[0], call, CALLED[2]]) == "A city.\n\nLet me look."
        assert template.render([CALLED[0], {**call, "content": None}]) == "A city."


def test_arguments_without_a_description_get_one():
    """A template that adds descriptions up renders tools that have none."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}}]  # fmt: skip
    source = "{{ 'd' + tools[0].function.parameters.properties.a.description }}"
    with ChatTemplate(source) as template:
        assert template.render(CALLED, tools=tools) == "d"


def test_what_no_form_helps_is_the_first_error():
    """A template that refuses every form is refused for what it said first."""
    with (
        ChatTemplate("{{ raise_exception('never') }}") as template,
        pytest.raises(ChatTemplateError, match="never"),
    ):
        template.render(CALLED)

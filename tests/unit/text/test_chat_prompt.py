"""Prompts as token ids: no text of the caller becomes a control token."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.text.vocabularies import CONTROL
from thermocline.errors import ChatTemplateError, ConfigError
from thermocline.text.chat_prompt import encode_chat
from thermocline.text.chat_template import ChatTemplate
from thermocline.text.tokenizer import Tokenizer

# Every operation here can put characters of the caller side by side, or beside the template's own.
TWISTED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}{{ m.name }}|{{ m.content|trim }}{{ m.content[::-1] }}{{ m.content|lower }}"
    "{{ m.content|replace(' ', '') }}{{ m.content.replace('<think>', '') }}"
    "{{ m.content.split('</think>')[-1].lstrip('\\n') }}{{ m.content.split('x')|join('') }}"
    "{{ m.content|list|join }}{{ m.content|tojson }}{{ m.content|upper|lower }}"
    "<|im_{{ m.content }}end|>{{ '<|im_' + m.name }}{{ m.content[1:] }}{{ m.content|reverse }}"
    "{{ '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>' ~ 'assistant\\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def twisted(tokenizer):
    """A template that does to the caller's text whatever a string allows."""
    with ChatTemplate(TWISTED, control_tokens=tokenizer.control_texts) as template:
        yield template


def control_ids(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """The control tokens among `ids`, in order."""
    return [token_id for token_id in ids if tokenizer.is_control(token_id)]


def between(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """Decoded text between the control tokens."""
    texts, run = [], []
    for token_id in ids:
        if tokenizer.is_control(token_id):
            texts.append(tokenizer.decode(run))
            run = []
        else:
            run.append(token_id)
    return [*texts, tokenizer.decode(run)]


_fragments = st.sampled_from(
    [
        *CONTROL,
        "<|im_",
        "end|>",
        "<|",
        "|>",
        "start|>",
        "im_end",
        "<unk>",
        "<|IM_END|>",
        "<| im_end|>",
        ">|dne_mi|<",
        "<|im_<|im_end|>end|>",
        "<|im_<think>end|>",
        "<|ixm_end|>",
        "</think>",
        "\n",
        "\ue000\ue001",
        "\ue2ff",
        "\ue0000\ue2ff",
        "0",
        "1",
        " ",
        "<s>",
    ]
)
hostile = st.one_of(
    st.text(max_size=20),
    st.lists(st.one_of(_fragments, st.text(max_size=3)), max_size=6).map("".join),
)


@pytest.mark.slow
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(content=hostile, name=hostile)
def test_control_tokens_are_those_of_the_template(tokenizer, twisted, content, name):
    """The control tokens of the prompt do not depend on what the caller wrote."""

    def ids(text: str, other: str) -> list[int]:
        message = {"role": "user", "content": text, "name": other}
        return encode_chat(tokenizer, twisted, [message])

    assert control_ids(tokenizer, ids(content, name)) == control_ids(tokenizer, ids("hi", "ann"))


@pytest.mark.slow
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(content=hostile)
def test_the_callers_text_comes_back_whole(tokenizer, chatml, content):
    """Between the template's control tokens stands exactly what the caller wrote, encoded as text."""
    ids = encode_chat(tokenizer, chatml, [{"role": "user", "content": content}])
    assert between(tokenizer, ids) == ["", f"user\n{content}", "\n", "assistant\n"]
    start, end = tokenizer.token_id("<|im_start|>"), tokenizer.token_id("<|im_end|>")
    assert ids[ids.index(start) + 1 : ids.index(end)] == tokenizer.encode(f"user\n{content}")


def test_tools_and_variables_can_not_forge(tokenizer):
    """Not only messages: tool definitions, tool arguments and template variables are plain text too."""
    source = (
        "<|im_start|>{{ tools|tojson }}{{ messages[0].tool_calls[0].function.arguments|tojson }}"
        "{{ extra }}{{ messages[0].reasoning_content }}<|im_end|>"
    )
    bad = "<|im_end|>"
    call = {"function": {"name": bad, "arguments": {bad: bad}}}
    with ChatTemplate(source, control_tokens=tokenizer.control_texts) as template:
        ids = encode_chat(
            tokenizer,
            template,
            [{"role": "assistant", "tool_calls": [call], "reasoning": bad}],
            tools=[{"name": bad}],
            variables={"extra": bad},
        )
    assert len(control_ids(tokenizer, ids)) == 2


def test_secret_marks_do_not_help_even_when_known(tokenizer, chatml):
    """Text that holds the current marks makes the template choose new ones."""
    nonce = chatml._nonce
    forged = f"{nonce}{chatml._control.index('<|im_end|>')}\ue2ff"
    ids = encode_chat(tokenizer, chatml, [{"role": "user", "content": forged}])
    assert between(tokenizer, ids)[1] == f"user\n{forged}"
    assert chatml._nonce != nonce


def test_same_ids_as_encoding_the_rendered_text(tokenizer, chatml):
    """With harmless messages the ids are those of the whole text with control tokens parsed."""
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "  what's\n\n2+2? "},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "ok 👍"},
    ]
    assert encode_chat(tokenizer, chatml, messages) == tokenizer.encode(
        chatml.render(messages), parse_special=True
    )


def test_searches_of_the_template_still_work(tokenizer):
    """A control token that the template only looks for is found in the caller's text."""
    source = (
        "{% set c = messages[0].content %}{% if '<|im|>' in c %}found{% endif %}"
        "{{ c.split('<|im|>')[-1] }}{{ c|replace('<|im|>', '!') }}<|im_end|>"
    )
    with ChatTemplate(source, control_tokens=tokenizer.control_texts) as template:
        ids = encode_chat(tokenizer, template, [{"role": "user", "content": "a<|im|>b"}])
    assert between(tokenizer, ids) == ["foundba!b", ""]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ '<|' + 'im_start|>' }}", "<|im_start|>"),
        ("{% set n = '<|im_start|>' %}{{ n[:5] }}", "<|im_"),
    ],
    ids=["joined", "cut"],
)
def test_assembled_control_tokens_are_refused(tokenizer, source, text):
    """A template that joins or cuts control tokens is refused, never misread."""
    with ChatTemplate(source, control_tokens=tokenizer.control_texts) as template:
        assert template.render([{"role": "user", "content": "x"}]) == text
        with pytest.raises(ChatTemplateError, match="joins or cuts"):
            encode_chat(tokenizer, template, [{"role": "user", "content": "x"}])


def test_bos_comes_once(vocabulary):
    """BOS stands first once, whether the template or only the model file asks for it."""
    tokenizer = Tokenizer(vocabulary.data("qwen2", add_bos=True))
    for source in ("{{ bos_token }}hi", "hi"):
        with ChatTemplate(
            source, bos_token="<|endoftext|>", control_tokens=tokenizer.control_texts
        ) as template:
            ids = encode_chat(tokenizer, template, [{"role": "user", "content": "x"}])
        assert ids == [tokenizer.bos_id, *tokenizer.encode("hi", add_bos=False)]


def test_template_for_another_vocabulary(tokenizer):
    """A template made without this vocabulary's control tokens is a configuration error."""
    with (
        ChatTemplate("x", control_tokens=["<|other|>"]) as template,
        pytest.raises(ConfigError, match="control_tokens"),
    ):
        encode_chat(tokenizer, template, [{"role": "user", "content": "x"}])

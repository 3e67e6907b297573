"""Chat messages to token ids, such that no message can forge a control token.

Owns nothing; it joins template and tokenizer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from thermocline.errors import ConfigError, RequestError
from thermocline.text.chat_messages import normalize_messages

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from thermocline.text.chat_template import ChatTemplate
    from thermocline.text.tokenizer import Tokenizer


def encode_chat(  # noqa: PLR0913 - all that a prompt is made of
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final: bool = False,
    text_header: str = "",
    variables: Mapping[str, object] | None = None,
    max_tokens: int | None = None,
    on_slice: Callable[[], None] | None = None,
) -> list[int]:
    """Token ids of the prompt that `template` makes of `messages`, [T].

    Arguments as of `ChatTemplate.render_parts`. Control tokens are only those that the template
    itself wrote; everything else is text, in which only user-defined tokens are found. The template
    decides about BOS; where it wrote none and the model file wants one, it is put first. EOS is never
    put last, whatever the file says: the answer is still to come. continue_final: the last message's
    text is what the answer begins with. text_header: what the format writes before such a text. max_tokens, on_slice: as of
    `Tokenizer.encode`.

    Raises RequestError and ChatTemplateError as `render_parts` and `encode` do, and ConfigError if the
    template was built for other control tokens.
    """
    if template.control_tokens != tokenizer.control_texts:
        raise ConfigError(
            "template and tokenizer differ in their control tokens: build the template with "
            "control_tokens=tokenizer.control_texts"
        )
    beginning: list[str | int] = []
    if continue_final:
        if len(messages) == 1:
            raise RequestError(
                "messages has nothing but the beginning of the answer: put a message of the user before it",
                param="messages",
            )
        final = normalize_messages(messages)[-1]["content"]
        header = tokenizer.encode(text_header, parse_special=True, add_bos=False)
        beginning = [*header, final]
        messages = messages[:-1]
    rendered = template.render_parts(
        messages, tools=tools, add_generation_prompt=add_generation_prompt, variables=variables
    )
    parts: list[str | int] = []
    for part in rendered:
        if part.is_control:
            token_id = tokenizer.token_id(part.text)
            assert token_id is not None, part
            parts.append(token_id)
        else:
            parts.append(part.text)
    if tokenizer.add_bos and parts[:1] != [tokenizer.bos_id]:
        parts[:0] = tokenizer.encode("", add_bos=True)
    return tokenizer.encode_parts([*parts, *beginning], max_tokens=max_tokens, on_slice=on_slice)

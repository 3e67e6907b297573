"""Routes of tokens: encoding texts and chats, decoding, and a chat's prompt as text.

Takes the fields of llama-server and of vLLM, and answers with the names of both.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
from aiohttp import web

from thermocline.errors import RequestError
from thermocline.server.core.exchange import (
    CONFIG,
    operation,
    read_json,
    send_json,
    send_parts,
    use_model,
)
from thermocline.server.core.memory import MEMORY
from thermocline.server.openai.jobs import ResponseOptions, encode_chat
from thermocline.server.openai.schema import ChatCompletionRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from thermocline.engine.api import Engine
    from thermocline.workers.offload import StillWanted

MAX_TOKENIZED_CHARS: Final = 1 << 20
"""Of one text for /tokenize, which may be longer than the context."""
_QUICK_TOKENS: Final = 1 << 12
# An id is an object in a list, then digits; a piece is an object with names.
_BYTES_PER_ID: Final = 48
_BYTES_PER_PIECE: Final = 40


class TokenizeRequest(ChatCompletionRequest, kw_only=True):
    """The body of POST /tokenize: content or prompt or messages."""

    messages: list[dict[str, Any]] = msgspec.field(default_factory=list)
    content: str | None = None
    prompt: str | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None
    return_token_strs: bool | None = None


class TokenPiece(msgspec.Struct):
    """A token and its text, or its bytes where they are not UTF-8."""

    id: int
    piece: str | list[int]


class TokenizeResult(msgspec.Struct):
    """Token ids, with pieces or texts if the request wants them; count, and the model's limit."""

    tokens: list[int | TokenPiece]
    count: int
    max_model_len: int
    token_strs: list[str] | None


class DetokenizeRequest(msgspec.Struct):
    """The body of POST /detokenize."""

    tokens: list[int]
    model: str | None = None


class DetokenizeResult(msgspec.Struct):
    """One text, under llama-server's name and vLLM's."""

    content: str
    prompt: str


class TemplateResult(msgspec.Struct):
    """A chat's prompt as text."""

    prompt: str


def routes() -> list[web.RouteDef]:
    """Return these routes, under / and under /v1."""
    return [
        route
        for start in ("", "/v1")
        for route in (
            web.post(f"{start}/tokenize", tokenize),
            web.post(f"{start}/detokenize", detokenize),
            web.post(f"{start}/apply-template", apply_template),
        )
    ]


@operation(takes=TokenizeRequest, gives=TokenizeResult)
async def tokenize(request: web.Request) -> web.StreamResponse:
    """Return the token ids of a text or a chat."""
    body = await read_json(request, TokenizeRequest)
    engine = (await use_model(request, body.model)).engine
    text = body.content if body.prompt is None else body.prompt
    if text is None and not body.messages:
        raise RequestError("send content, prompt or messages", param="content")
    if text is None:
        _, ids = await encode_chat(engine, body, ResponseOptions.of(request.app[CONFIG], engine))
    else:
        if len(text) > MAX_TOKENIZED_CHARS:
            raise RequestError(
                f"the text has {len(text)} characters: send at most {MAX_TOKENIZED_CHARS} at a time",
                param="content" if body.prompt is None else "prompt",
            )
        wanted = [body.add_special, body.add_special_tokens]
        # None: as the model file says.
        ids = await engine.encode(
            text,
            parse_special=body.parse_special is not False,
            add_bos=False if False in wanted else None,
        )
    if len(ids) > _QUICK_TOKENS:
        # Many may wait with their ids until others are encoded.
        num_pieces = bool(body.with_pieces) + bool(body.return_token_strs)
        request[MEMORY].add(len(ids) * (_BYTES_PER_ID + num_pieces * _BYTES_PER_PIECE))
    work = partial(_tokenized, engine, body, ids)
    parts = await engine.offload.run(work, is_bulk=len(ids) > _QUICK_TOKENS)
    return await send_parts(request, parts)


@operation(takes=DetokenizeRequest, gives=DetokenizeResult)
async def detokenize(request: web.Request) -> web.Response:
    """Return the text of token ids, control tokens shown."""
    body = await read_json(request, DetokenizeRequest)
    engine = (await use_model(request, body.model)).engine
    try:
        text = await _decoded(engine, body.tokens)
    except RequestError as error:
        raise RequestError(str(error), param="tokens") from error
    return send_json(DetokenizeResult(text, text))


@operation(takes=ChatCompletionRequest, gives=TemplateResult)
async def apply_template(request: web.Request) -> web.Response:
    """Return a chat's prompt as text."""
    body = await read_json(request, ChatCompletionRequest)
    engine = (await use_model(request, body.model)).engine
    _, ids = await encode_chat(engine, body, ResponseOptions.of(request.app[CONFIG], engine))
    return send_json(TemplateResult(await _decoded(engine, ids)))


async def _decoded(engine: Engine, ids: Sequence[int]) -> str:
    return await engine.offload.run(
        lambda _: engine.tokenizer.decode(ids, skip_special=False),
        is_bulk=len(ids) > _QUICK_TOKENS,
    )


def _tokenized(
    engine: Engine, body: TokenizeRequest, ids: list[int], still_wanted: StillWanted
) -> list[bytes]:
    """Return the answer to /tokenize in parts. Takes some microseconds per token: not for the event loop."""
    tokenizer = engine.tokenizer

    def shown(token_id: int) -> int | TokenPiece:
        if not body.with_pieces:
            return token_id
        return TokenPiece(token_id, _piece(tokenizer.token_bytes(token_id)))

    def written(show: Callable[[int], object]) -> Iterator[bytes]:
        for start in range(0, len(ids), _QUICK_TOKENS):
            still_wanted()
            some = msgspec.json.encode([*map(show, ids[start : start + _QUICK_TOKENS])])
            yield (b"," if start else b"[") + some[1:-1]
        yield b"]" if ids else b"[]"

    counts = {"count": len(ids), "max_model_len": engine.max_context_tokens}
    texts = written(tokenizer.token_text) if body.return_token_strs else [b"null"]
    return [
        b'{"tokens":',
        *written(shown),
        b"," + msgspec.json.encode(counts)[1:-1] + b',"token_strs":',
        *texts,
        b"}",
    ]


def _piece(raw: bytes) -> str | list[int]:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)

"""A model with a SentencePiece vocabulary behind the server: texts, chats, constraints, stops."""

from __future__ import annotations

import pytest

from tests.server.live import HELLO, TEXT, live
from tests.support.toy_model import TURN_END, TURN_START, ToyShape, write_toy_model

FIRST_BYTE = 3
TOKENS = (
    "<unk>",
    "<s>",
    "</s>",
    *[f"<0x{byte:02X}>" for byte in range(256)],
    "\u2581",
    "h",
    "\u2581h",
    TURN_START,
    TURN_END,
)
SPACE, H, SPACE_H, START, END = range(FIRST_BYTE + 256, FIRST_BYTE + 261)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """The path of a toy model of random weights whose tokens are bytes and three pieces."""
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [*TOKENS],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * 3, *[3] * 2],
        "tokenizer.ggml.scores": [0.0] * len(TOKENS),
        "tokenizer.ggml.eos_token_id": END,
        "tokenizer.ggml.padding_token_id": len(TOKENS),
        "tokenizer.ggml.add_bos_token": True,
    }
    path = tmp_path_factory.mktemp("models") / "pieces.gguf"
    return write_toy_model(path, ToyShape(context=1 << 12), metadata=metadata)


@pytest.mark.slow
async def test_texts_become_tokens_and_come_back(pieces):
    """BOS and the space before a text are there as in llama-server, and a text comes back exactly."""
    async with live(pieces) as server:
        _, whole = await server.post("/tokenize", content="hé", add_special=True)
        _, bare = await server.post("/tokenize", content="h h", add_special=False)
        _, text = await server.post("/detokenize", tokens=bare["tokens"])
        _, chat = await server.post("/tokenize", messages=HELLO)
    assert whole["tokens"] == [1, SPACE_H, FIRST_BYTE + 0xC3, FIRST_BYTE + 0xA9]
    assert bare["tokens"] == [SPACE_H, SPACE_H]
    assert text["content"] == "h h"
    assert chat["tokens"][:2] == [1, START]
    assert chat["tokens"].count(1) == 1
    assert END not in chat["tokens"][-1:]


@pytest.mark.slow
async def test_constraints_and_stops(pieces):
    """An answer follows a regular expression through pieces and bytes; a stop string cuts within."""
    async with live(pieces) as server:
        whole = await server.chat(max_tokens=40, structured_outputs={"regex": "h héh"})
        cut = await server.chat(max_tokens=40, structured_outputs={"regex": "h héh"}, stop=["éh"])
        _, echoed = await server.post(TEXT, prompt="h h", max_tokens=0, echo=True, logprobs=0)
    for body, text in ((whole, "h héh"), (cut, "h h")):
        (choice,) = body["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    (choice,) = echoed["choices"]
    assert (choice["text"], choice["logprobs"]["text_offset"]) == ("h h", [0, 0, 1])

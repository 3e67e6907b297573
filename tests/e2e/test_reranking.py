"""Reranking: scores against the hidden state's product with the head, the form of a pair, routes, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from click.testing import CliRunner

from tests.server.live import live
from tests.support.engine_runs import EXACT_CACHE
from tests.support.reranker import TEMPLATE, TOY, write_reranker
from tests.support.toy_archs import toy_arch_weights, write_toy_arch
from thermocline import Engine, EngineConfig, MemoryConfig, SamplingParams
from thermocline.cli import cli
from thermocline.errors import (
    ModelFileError,
    PromptTooLongError,
    RequestError,
    UnsupportedModelError,
)
from thermocline.messages import Pooling, PromptEmbedding, RequestOptions

QUERY = "the heat"
DOCUMENTS = ["an inner thing", "", "the inn", "the inn", "{query} and {document}"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A toy reranker."""
    return write_reranker(tmp_path_factory.mktemp("toy") / "reranker.gguf")


async def states(engine, prompts):
    """Return the final state of each prompt's last token."""
    options = RequestOptions(pooling=Pooling.LAST)
    found = []
    for prompt in prompts:
        events = engine.events(prompt, SamplingParams(max_tokens=0), options)
        found += [event.vector async for event in events if isinstance(event, PromptEmbedding)]
    return np.array(found, np.float64)


async def test_a_score_is_the_first_output_s_share(path):
    """The softmax over the head's outputs, of the pair's last state; each pair by itself, to the bit."""
    head = 2 * toy_arch_weights(TOY)["token_embd.weight"][[100, 110]].astype(np.float64)
    async with Engine.open(path, EngineConfig(memory=EXACT_CACHE)) as engine:
        found = await engine.rerank(QUERY, DOCUMENTS)
        prompts = [
            await engine.encode(
                TEMPLATE.replace("{query}", QUERY).replace("{document}", document),
                parse_special=True,
                add_bos=False,
            )
            for document in DOCUMENTS[:4]
        ]
        outputs = await states(engine, prompts) @ head.T
        alone = [(await engine.rerank(QUERY, [each])).scores[0] for each in DOCUMENTS]
    expected = 1 / (1 + np.exp(outputs[:, 1] - outputs[:, 0]))
    np.testing.assert_allclose(found.scores[:4], expected, rtol=1e-6)
    assert list(found.scores) == alone
    assert found.num_tokens[:4] == tuple(map(len, prompts))
    assert found.scores[2] == found.scores[3]
    assert len({round(score, 6) for score in found.scores}) == 4


async def test_no_text_forges_a_control_token(path):
    """A document that spells the template's markers is text, and so longer than one that is the markers."""
    async with Engine.open(path) as engine:
        plain, forged = (await engine.rerank(QUERY, ["x", "<|im_end|>"])).num_tokens
    assert forged == plain + len("<|im_end|>") - 1


async def test_the_route_sorts_and_cuts(path):
    """The best first, ties in the order that was sent; top_n; documents returned; the other form of an answer."""
    async with live(path) as server:
        scores = (await server.engine.rerank(QUERY, DOCUMENTS)).scores
        order = sorted(range(5), key=lambda n: -scores[n])
        for route in ("/v1/rerank", "/rerank", "/v1/reranking", "/reranking"):
            status, body = await server.post(route, query=QUERY, documents=DOCUMENTS)
            assert status == 200, body
            assert [each["index"] for each in body["results"]] == order
            assert [each["relevance_score"] for each in body["results"]] == [
                scores[n] for n in order
            ]
        assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] > 0
        fields = {"query": QUERY, "documents": DOCUMENTS, "top_n": 2, "return_documents": True}
        _, body = await server.post("/v1/rerank", **fields)
        assert [each["document"]["text"] for each in body["results"]] == [
            DOCUMENTS[n] for n in order[:2]
        ]
        _, ranked = await server.post("/rerank", query=QUERY, texts=DOCUMENTS, return_text=True)
        assert ranked[0] == {
            "index": order[0],
            "score": scores[order[0]],
            "text": DOCUMENTS[order[0]],
        }
        for fields, param in (
            ({"documents": []}, "documents"),
            ({"documents": ["a"], "texts": ["a"]}, "texts"),
            ({"documents": ["a"], "top_n": 0}, "top_n"),
            ({"documents": ["a" * 2000]}, "documents"),
            ({"documents": ["a"] * 2049}, "documents"),
        ):
            status, body = await server.post("/v1/rerank", query=QUERY, **fields)
            assert (status, body["error"]["param"]) == (400, param), body
        for route, fields in (
            ("/v1/completions", {"prompt": "hi"}),
            ("/v1/embeddings", {"input": "hi"}),
        ):
            status, body = await server.post(route, **fields)
            assert status == 400
            assert "/v1/rerank" in body["error"]["message"]


async def test_what_is_no_reranker_says_so(tmp_path, path):
    """A text model scores no documents; a reranker writes no text, and a pair that is too long is told apart."""
    text = write_toy_arch(tmp_path / "text.gguf", TOY)
    async with Engine.open(text) as engine:
        with pytest.raises(RequestError, match="does not score documents"):
            await engine.rerank(QUERY, DOCUMENTS)
    async with Engine.open(
        path, EngineConfig(memory=MemoryConfig(max_context_tokens=64))
    ) as engine:
        with pytest.raises(RequestError, match="writes no text"):
            await anext(engine.generate([1, 2], SamplingParams()))
        with pytest.raises(PromptTooLongError):
            await engine.rerank(QUERY, ["x" * 65])
        with pytest.raises(RequestError, match="at least one document"):
            await engine.rerank(QUERY, [])


@pytest.mark.parametrize(
    ("metadata", "error", "what"),
    [
        ({"tokenizer.chat_template.rerank": None}, UnsupportedModelError, "the form of a pair"),
        ({"qwen3.pooling_type": None}, UnsupportedModelError, "cls.output.weight"),
        ({"qwen3.embedding_length": 60}, ModelFileError, "token_embd"),
    ],
)
async def test_files_that_lack_a_part_are_refused(tmp_path, metadata, error, what):
    """Without the form of a pair, or without saying what the head is for."""
    broken = write_reranker(tmp_path / "broken.gguf", metadata)
    with pytest.raises(error, match=what):
        async with Engine.open(broken):
            pass


def test_info_says_what_it_is_for(path):
    """It describes a reranker as one."""
    done = CliRunner().invoke(cli, ["info", str(path)])
    assert done.exit_code == 0
    assert "scores documents, 2 outputs" in done.output

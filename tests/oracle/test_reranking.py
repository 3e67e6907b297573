"""Rerankers: the scores that llama.cpp gives for the same file and pairs."""

from __future__ import annotations

import pytest

pytest.importorskip("llama_cpp")

from tests.oracle.llama_embeddings import LlamaEmbeddings
from tests.support.engine_runs import EXACT_CACHE
from tests.support.reranker import NUM_OUTPUTS, TEMPLATE, write_reranker
from thermocline.config import EngineConfig
from thermocline.engine.api import Engine
from thermocline.messages import Pooling

pytestmark = pytest.mark.oracle

QUERY = "Where does warm water lie?"
DOCUMENTS = ["The thermocline is a layer in the ocean.", "a", "", "Warm water " * 12]


async def test_scores_agree(tmp_path):
    """llama.cpp's first output behind its softmax, of the tokens that it finds in the filled template."""
    path = write_reranker(tmp_path / "model.gguf")
    async with Engine.open(path, EngineConfig(memory=EXACT_CACHE)) as engine:
        found = await engine.rerank(QUERY, DOCUMENTS)
    with LlamaEmbeddings(path, Pooling.RANK) as llama:
        for number, document in enumerate(DOCUMENTS):
            pair = TEMPLATE.replace("{query}", QUERY).replace("{document}", document)
            token_ids = llama.encode(pair, parse_special=True)
            assert found.num_tokens[number] == len(token_ids)
            scores = llama.embedding(token_ids, NUM_OUTPUTS)
            assert found.scores[number] == pytest.approx(float(scores[0]), abs=1e-6)
            assert sum(scores) == pytest.approx(1.0, abs=1e-6)

"""The model's file is cut, overwritten or replaced while the engine answers from it."""

from __future__ import annotations

import asyncio
import os
import shutil

import numpy as np
import pytest

from tests.support.engine_runs import greedy_tokens
from tests.support.toy_model import ToyShape, write_toy_model
from thermocline import Engine, EngineConfig, PlacementConfig, RemoteConfig, SamplingParams
from thermocline.errors import ModelChangedError

PROMPT = list(range(40))
NUM_TOKENS = 120
SHAPE = ToyShape(layers=2, hidden=256, heads=4, head_dim=64, intermediate=256, used=3, context=512)
PLAIN = EngineConfig()
SIMULATED = EngineConfig(placement=PlacementConfig(hot_device="simulated"))
WORKER = EngineConfig(remote=RemoteConfig(("local:1",), mode="batched"))


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A toy model that no test changes."""
    return write_toy_model(tmp_path_factory.mktemp("change") / "toy.gguf", SHAPE)


@pytest.fixture
def path(tmp_path, original):
    """A copy of it."""
    return shutil.copyfile(original, tmp_path / "toy.gguf")


@pytest.fixture(scope="module")
def expected(original):
    """The tokens of the unchanged model."""

    async def tokens():
        async with Engine.open(original) as engine:
            return await greedy_tokens(engine, PROMPT, NUM_TOKENS)

    return asyncio.run(tokens())


def cut(path):
    """Leave less than the tensors need."""
    os.truncate(path, path.stat().st_size // 3)


def empty_and_write_again(path):
    """Cut it to nothing, then write the same bytes again, as `cp` over it does."""
    content = path.read_bytes()
    path.write_bytes(content)


def overwrite(path):
    """Other bytes in the middle; the size stays."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(np.random.default_rng(1).bytes(1 << 16))


async def answer(engine, found, *, change=None):
    """Add the tokens of an answer to `found`; `change` happens after the fifth."""
    async for event in engine.generate(
        PROMPT, SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    ):
        found += event.token_ids
        if change is not None and len(found) >= 5:
            change()
            change = None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "change"),
    [
        pytest.param(PLAIN, cut, id="cpu-cut"),
        pytest.param(PLAIN, empty_and_write_again, id="cpu-again"),
        pytest.param(PLAIN, overwrite, id="cpu-overwrite"),
        pytest.param(SIMULATED, cut, id="device-cut"),
        pytest.param(WORKER, cut, id="worker-cut"),
    ],
)
async def test_no_token_comes_of_a_changed_file(path, expected, change, config):
    """Three answers at once: each ends with ModelChangedError, and its tokens until then are the right ones."""
    async with Engine.open(path, config) as engine:
        found = [[], [], []]
        outcomes = await asyncio.gather(
            answer(engine, found[0], change=lambda: change(path)),
            answer(engine, found[1]),
            answer(engine, found[2]),
            return_exceptions=True,
        )
        assert [type(outcome) for outcome in outcomes] == [ModelChangedError] * 3
        assert all(len(tokens) < NUM_TOKENS for tokens in found)
        assert all(tokens == expected[: len(tokens)] for tokens in found)
        await engine.wait_ended()
        assert not engine.is_running
        with pytest.raises(ModelChangedError, match="open the model again"):
            await greedy_tokens(engine, PROMPT, 1)


async def test_an_idle_engine_says_so_at_the_next_request(path):
    """Nothing runs when the file is cut: the request after it is refused, and the engine ends."""
    async with Engine.open(path) as engine:
        cut(path)
        with pytest.raises(ModelChangedError, match="size changed"):
            await greedy_tokens(engine, PROMPT, 1)
        await engine.wait_ended()
        assert isinstance(engine.why_ended(), ModelChangedError)


async def test_an_engine_that_is_asked_looks(path):
    """`check_model` finds an idle engine's change, and does nothing before it."""
    async with Engine.open(path) as engine:
        await engine.check_model()
        assert engine.is_running
        overwrite(path)
        await engine.check_model()
        await engine.wait_ended()
        with pytest.raises(ModelChangedError):
            await engine.check_model()


async def test_a_replaced_file_is_served_on(path, original, expected):
    """A rename over the path changes no token, since the old file is still mapped."""
    async with Engine.open(path) as engine:
        other = write_toy_model(path.with_name("other.gguf"), ToyShape(seed=5))
        other.rename(path)
        assert await greedy_tokens(engine, PROMPT, 30) == expected[:30]
        await engine.check_model()
        assert engine.is_running

"""Models for the tests of the server."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tests.support.toy_model import ToyShape, toy_weights, write_toy_model
from thermocline.kernels.cpu import NativeKernels
from thermocline.kernels.dense import NativeDense
from thermocline.kernels.whole_step import NativeStep

SPELLED = "é€😀"
THINKING_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n<tool_call>{{ tools | tojson }}</tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    """The path of a toy model whose answers do not end by themselves within a test."""
    folder = tmp_path_factory.mktemp("models")
    return write_toy_model(folder / "toy.gguf", ToyShape(context=1 << 15))


@pytest.fixture(scope="session")
def small_toy(tmp_path_factory):
    """The path of a toy model with a context of 64 tokens."""
    folder = tmp_path_factory.mktemp("models")
    return write_toy_model(folder / "small.gguf", ToyShape(context=64))


@pytest.fixture(scope="session")
def speller(tmp_path_factory):
    """A model that writes SPELLED again and again, one byte per token, after the byte 0x80."""
    shape = ToyShape(context=512)
    weights = toy_weights(shape)
    for name in weights:
        if "attn_output" in name or "ffn_down" in name:
            weights[name][:] = 0
        elif "norm" in name:
            weights[name][:] = 1
    embedding = weights["token_embd.weight"]
    letters = list(SPELLED.encode())
    weights["output.weight"][:] = 0
    for before, after in zip([letters[-1], *letters[:-1]], letters, strict=True):
        weights["output.weight"][after] = embedding[before] / np.linalg.norm(embedding[before])
    folder = tmp_path_factory.mktemp("models")
    return write_toy_model(folder / "speller.gguf", shape, weights=weights)


@pytest.fixture(scope="session")
def thinker(tmp_path_factory):
    """The path of a model of random weights whose template knows tools and thinking."""
    path = tmp_path_factory.mktemp("models") / "thinker.gguf"
    shape = ToyShape(context=1 << 13)
    return write_toy_model(path, shape, metadata={"tokenizer.chat_template": THINKING_TEMPLATE})


class Gate:
    """Holds every attention call until it is opened, and counts them."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._open = threading.Event()

    def open(self) -> None:
        """Let calls pass from now on."""
        self._open.set()

    def wait(self) -> None:
        """Count a call and hold it."""
        self.num_calls += 1
        self._open.wait(10)


@pytest.fixture
def gate(monkeypatch):
    """A gate in front of the engine's attention, in whole layers and steps too; open at the end in any case."""
    gate = Gate()

    def held(real):
        def call(self, *args, **kwargs):
            gate.wait()
            return real(self, *args, **kwargs)

        return call

    monkeypatch.setattr(NativeDense, "attention", held(NativeDense.attention))
    monkeypatch.setattr(NativeKernels, "whole_layer", held(NativeKernels.whole_layer))
    monkeypatch.setattr(NativeStep, "__call__", held(NativeStep.__call__))
    yield gate
    gate.open()

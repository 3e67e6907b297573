"""The lines for who waits: opening a model, and reading a prompt."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from thermocline.cli import waiting
from thermocline.cli.console import _Changing
from thermocline.engine.assembly import LoadStep
from thermocline.messages import PromptProgress, RequestId


@pytest.mark.parametrize(
    ("done", "cached", "elapsed_s", "line"),
    [
        (0, 0, 0.0, "reading the prompt: 0 of 4096 tokens"),
        (512, 0, 2.0, "reading the prompt: 512 of 4096 tokens, 256 tokens/s, 14 s left"),
        # What was found computed took no time.
        (1024, 512, 2.0, "reading the prompt: 1024 of 4096 tokens, 256 tokens/s, 12 s left"),
        (512, 512, 2.0, "reading the prompt: 512 of 4096 tokens"),
        (96, 0, 9.6, "reading the prompt: 96 of 4096 tokens, 10 tokens/s, 7 min left"),
        (8, 0, 0.01, "reading the prompt: 8 of 4096 tokens"),
        (4096, 0, 4.0, "reading the prompt: 4096 of 4096 tokens, 1024 tokens/s, 0 s left"),
    ],
)
def test_how_far_a_prompt_is(done, cached, elapsed_s, line):
    """Tokens, rate and time left; no rate before there is one."""
    progress = PromptProgress(RequestId(1), done, 4096, cached, elapsed_s)
    assert waiting.prompt_line(progress) == line


@pytest.mark.parametrize("step", [None, *LoadStep])
def test_how_far_opening_is(monkeypatch, step):
    """Each step has its words and its number; before the first one there is only the name."""
    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: 17.2))
    line = waiting.opening_line("m.gguf", SimpleNamespace(load_step=step), 5.0)
    assert line.startswith("opening m.gguf")
    if step is not None:
        number = list(LoadStep).index(step) + 1
        assert line.endswith(f"(step {number} of {len(LoadStep)}, 12 s)")


def test_a_followed_line_is_asked_for_each_time():
    """What is drawn is what is true then, on one line."""
    lines = iter(["a\nb", "c"])
    changing = _Changing(lambda: next(lines))
    assert [changing.__rich__(), changing.__rich__()] == ["a b", "c"]

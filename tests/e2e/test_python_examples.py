"""Every Python example runs: those of the README and of docs/python.md, and those in docstrings.

That of a client is among the tests of clients: `tests/server/test_clients.py`.
"""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

import thermocline
from thermocline import LLM
from thermocline.demo import DEMO_MODEL_PATH
from thermocline.engine import api, llm

ROOT = Path(__file__).parents[2]


def examples(page: str) -> list[str]:
    """Return the Python blocks of a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def run(source: str) -> None:
    """Run an example as a script of its own."""
    exec(compile(source, "<example>", "exec"), {"__name__": "__main__"})


def test_the_readme_has_three_examples():
    """One for scripts, one for asyncio, one for a client of the server."""
    told = ("LLM(", "Engine.open(", "OpenAI(")
    assert [[word in source for word in told].index(True) for source in examples("README.md")] == [
        0,
        1,
        2,
    ]


@pytest.mark.slow
async def test_the_example_for_scripts_prints_an_answer(capsys):
    """As it stands there; in a running event loop, such as a Jupyter cell has."""
    run(examples("README.md")[0])
    assert "expert" in capsys.readouterr().out


@pytest.mark.slow
def test_the_example_for_asyncio_prints_an_answer(capsys):
    """As it stands there."""
    run(examples("README.md")[1])
    assert "expert" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(examples("docs/python.md"))))
def test_an_example_of_the_python_page_runs(index, tmp_path, monkeypatch):
    """Each block stands alone."""
    monkeypatch.chdir(tmp_path)
    run(examples("docs/python.md")[index])


@pytest.mark.slow
def test_examples_in_docstrings_are_true():
    """They run, and give what they say; methods of LLM speak of an `llm` that is open."""
    engine = doctest.testmod(api, optionflags=doctest.ELLIPSIS)
    with LLM(DEMO_MODEL_PATH, ctx=512) as opened:
        scripts = doctest.testmod(llm, extraglobs={"llm": opened})
    assert min(engine.attempted, scripts.attempted) > 4
    assert engine.failed == scripts.failed == 0


def test_every_public_name_has_a_docstring():
    """So that `help()` and the reference say something of each."""
    names = [name for name in thermocline.__all__ if name != "__version__"]
    bare = [name for name in names if not (getattr(thermocline, name).__doc__ or "").strip()]
    assert not bare
    assert set(thermocline.__all__) <= set(dir(thermocline))

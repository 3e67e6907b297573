"""A real Jupyter kernel: the README's example as a cell, `await` in a cell, and an interrupted cell."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import pytest

pytest.importorskip("ipykernel")

from jupyter_client import KernelManager

pytestmark = pytest.mark.clients

ROOT = Path(__file__).parents[2]
_LIMIT_S = 120


class _Notebook:
    """Runs cells in a kernel of its own."""

    def __init__(self) -> None:
        packages = os.environ.get("THERMOCLINE_CLIENTS_PACKAGES")
        if packages is None:
            pytest.skip(
                "the package's dependencies are not named: these tests run by `make clients`"
            )
        self.manager = KernelManager()
        self.manager.start_kernel(env=os.environ | {"PYTHONPATH": str(ROOT)})
        self._client = self.manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=_LIMIT_S)
        # Not by PYTHONPATH: that leaves out the .pth files, which say where the compiled core is.
        said, status = self.run(f"import site; site.addsitedir({packages!r})")
        assert status == "ok", said

    def run(self, source: str, on_text=lambda text: None) -> tuple[str, str]:
        """Return what a cell printed, and "ok" or the name of its error. on_text: called with all that it printed so far."""
        texts: list[str] = []

        def collect(message) -> None:
            if message["msg_type"] == "stream":
                texts.append(message["content"]["text"])
                on_text("".join(texts))

        reply = self._client.execute_interactive(
            source, timeout=_LIMIT_S, output_hook=collect, allow_stdin=False
        )["content"]
        return "".join(texts), reply["ename"] if reply["status"] == "error" else reply["status"]

    def close(self) -> None:
        """End the kernel."""
        self._client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def notebook():
    """A kernel, ended after the test."""
    opened = _Notebook()
    yield opened
    opened.close()


def test_cells(notebook):
    """The README's example runs as it is; `async with` works beside it; Ctrl-C stops a cell and not the model."""
    example = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    said, status = notebook.run(example)
    assert (status, "expert" in said) == ("ok", True), said
    asked = (
        "from thermocline import LLM, Engine\nasync with Engine.open(DEMO_MODEL_PATH) as engine:\n"
        "    async for event in engine.chat('What is an expert?', max_tokens=9):\n"
        "        print(event.text, end='')"
    )
    assert notebook.run(asked) == ("An expert is a small feed-forward", "ok")

    def interrupt(said: str) -> None:
        if said == "begun\n":
            # Off this thread, which reads what the kernel says.
            threading.Thread(target=notebook.manager.interrupt_kernel).start()

    long = (
        "llm = LLM(DEMO_MODEL_PATH)\n"
        "for n, answer in enumerate(llm.generate_each(map(str, range(10**6)), max_tokens=50, ignore_eos=True)):\n"
        "    if n == 3: print('begun')"
    )
    assert notebook.run(long, interrupt) == ("begun\n", "KeyboardInterrupt")
    again = "print(len(llm.generate('An expert', max_tokens=4).token_ids)); llm.close()"
    assert notebook.run(again) == ("4\n", "ok")

"""npm's openai, @ai-sdk/openai-compatible, @anthropic-ai/sdk and ollama: each in a program of its own."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.clients

NODE = Path(__file__).parent / "node"


@pytest.mark.parametrize("program", sorted(NODE.glob("*.mjs")), ids=lambda path: path.stem)
def test_an_npm_client(program, url, model):
    """What the program asserts holds."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    if not (NODE / "node_modules").is_dir():
        pytest.skip("the npm packages are not installed: scripts/clients.sh does it, given npm")
    done = subprocess.run(
        [node, program, url, model], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr

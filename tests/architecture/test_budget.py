"""Files stay small enough to read, and say what they own."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "thermocline"
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 500
FORBIDDEN_NAMES = {"utils.py", "helpers.py", "common.py", "misc.py"}


def test_files_are_short_and_introduce_themselves():
    """At most 500 lines, a docstring at the top, and a name that says something."""
    assert len(FILES) > 500
    for path in FILES:
        name, text = path.relative_to(PACKAGE), path.read_text()
        assert len(text.splitlines()) <= MAX_LINES, f"{name} is too long"
        assert ast.get_docstring(ast.parse(text)), f"{name} does not say what it owns"
        assert path.name not in FORBIDDEN_NAMES, f"{name} says nothing by its name"


def test_messages_are_frozen_and_complete_at_birth():
    """No message class is mutable or has fields that are filled in later."""
    tree = ast.parse((PACKAGE / "messages.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            for decorator in node.decorator_list:
                assert "frozen=True, slots=True" in ast.unparse(decorator), node.name
    assert "init=False" not in (PACKAGE / "messages.py").read_text()

"""The assembly stays an overview: how a part is made is known elsewhere."""

from __future__ import annotations

import ast
from pathlib import Path

ASSEMBLY = Path(__file__).parents[2] / "thermocline" / "engine" / "assembly.py"
MAX_MODULES = 21


def imported_modules(source: str) -> set[str]:
    """Return the package's modules that `source` imports anywhere, also for types alone."""
    nodes = list(ast.walk(ast.parse(source)))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name for name in names if name.partition(".")[0] == "thermocline"}


def test_the_assembly_imports_few_modules():
    """At most 21 modules of the package, those imported for types included."""
    assert len(imported_modules(ASSEMBLY.read_text())) <= MAX_MODULES


def test_every_form_of_import_counts():
    """At the top, for types, within a function, and as a plain import."""
    source = (
        "import os\nimport thermocline.a\nfrom thermocline.b import x, y\n"
        "if TYPE_CHECKING:\n    from thermocline.c import z\n"
        "def f():\n    from thermocline.d import w\n"
    )
    assert imported_modules(source) == {f"thermocline.{name}" for name in "abcd"}

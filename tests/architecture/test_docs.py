"""The documentation names every file, and no file that is not there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def test_every_module_has_its_line():
    """Each file of the package and of the native core is in docs/architecture.md, and nothing else."""
    tables = PAGE.partition("## Files")[2].partition("### Elsewhere")[0]
    package, native = tables.split("### native/")
    listed = set(re.findall(r"^\| `([\w/.]+)`", package, re.MULTILINE))
    files = {
        str(path.relative_to(ROOT / "thermocline"))
        for path in (ROOT / "thermocline").rglob("*.py")
        if path.name != "__init__.py" or path.parent.name in ("thermocline", "demo")
    }
    assert listed == files
    listed = set(re.findall(r"^\| `([\w/.]+)`", native, re.MULTILINE))
    native_files = (ROOT / "native").rglob("*.*")
    sources = [path for path in native_files if path.suffix in {".h", ".cpp", ".inl"}]
    assert listed == {str(path.relative_to(ROOT / "native")) for path in sources}


def test_links_lead_somewhere():
    """Every relative link in the documentation and the README has a target."""
    tops = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "THREAT_MODEL.md")]
    pages = [*tops, *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_defence_names_tests_that_exist():
    """Each row of the threat model's defences has at least one test, and it is there."""
    page = (ROOT / "THREAT_MODEL.md").read_text()
    rows = page.partition("## Defended")[2].partition("## Not defended")[0].splitlines()
    rows = [row for row in rows if row.startswith("| ")][1:]
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert named, row
        for path, name in named:
            assert re.search(
                rf"^(?:async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE
            ), name

"""The documentation names every file, and no file that is not there."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import thermocline

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "thermocline"
TOPS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "THREAT_MODEL.md", "SECURITY.md")]
# History says what was: decisions and the log name files as they were then. The table of files has a test of its own.
PAGES = [
    *TOPS,
    *(page for page in (ROOT / "docs").glob("*.md") if page.name not in ("LOG.md", "files.md")),
]


def test_the_table_of_files_is_what_the_files_say():
    """docs/files.md names every file, and says of each what its own first sentence says."""
    script = ROOT / "scripts" / "file_table.py"
    run = subprocess.run(
        [sys.executable, script, "--check"], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr


def test_links_lead_somewhere():
    """Every relative link in the documentation and the README has a target."""
    for page in (*TOPS, *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_architecture_that_is_shown_whole_is_the_file():
    """The page on adding an architecture shows the file as it is."""
    page = (ROOT / "docs" / "adding-an-architecture.md").read_text()
    (shown,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (name,) = re.findall(r"there \(`(models/architectures/\w+\.py)`\)", page)
    assert shown == (PACKAGE / name).read_text()


@pytest.mark.parametrize(
    ("page", "begin", "end"),
    [
        ("THREAT_MODEL.md", "## Defended", "## Not defended"),
        ("docs/reliability.md", "", "Not tested"),
    ],
)
def test_every_promise_names_tests_that_exist(page, begin, end):
    """Each row of the threat model's defences, and each point of reliability, has at least one test that is there."""
    text = (ROOT / page).read_text()
    rows = text.partition(begin)[2] if begin else text
    rows = [row for row in rows.partition(end)[0].splitlines() if row.startswith("| ")][1:]
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", row)
        assert named, row
        for path, name in named:
            assert not name or re.search(
                rf"^(?:async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE
            ), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page):
    """A path is one of the repository or of the package; a bare name is a file of that name somewhere in them."""
    text = page.read_text().replace("llama.cpp", "")
    paths = {path for path in re.findall(r"`([\w./-]+/[\w.-]*)`", text) if _is_ours(path)}
    paths |= set(re.findall(r"(?<![\w./])[\w./-]+\.(?:py|cpp|inl|h|sh)\b", text))
    missing = {path for path in paths if not _exists(path)}
    assert not missing


def test_the_reference_has_every_public_name():
    """make docs shows each once, from where it is defined."""
    shown = [
        name
        for page in sorted((ROOT / "docs" / "api").glob("*.md"))
        for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE)
    ]
    public = [getattr(thermocline, name) for name in thermocline.__all__ if name != "__version__"]
    assert sorted(shown) == sorted(f"{each.__module__}.{each.__name__}" for each in public)


def test_the_architecture_page_is_short():
    """A newcomer reads it in ten minutes."""
    assert len((ROOT / "docs" / "architecture.md").read_text().splitlines()) < 150


def test_the_glossary_is_short_and_names_what_there_is():
    """At most 40 terms; its code names are defined in the package, its flags and fields occur in it."""
    lines = (ROOT / "docs" / "glossary.md").read_text().splitlines()
    rows = [line.strip("|").split("|") for line in lines if line.startswith("| ")][1:]
    assert 20 < len(rows) <= 40
    sources = [path.read_text() for path in PACKAGE.rglob("*.py")]
    defined = {name for source in sources for name in _defined(source)}
    names = {part for row in rows for name in _quoted(row[2]) for part in name.split(".")}
    assert names - defined == set()
    public = {name for row in rows for name in _quoted(row[3])}
    assert {name for name in public if not any(name in source for source in sources)} == set()
    long = [row[1] for row in rows if not 1 <= len(re.findall(r"\.(?= |$)", row[1].strip())) <= 2]
    assert not long, "one or two sentences each"


def _quoted(cell: str) -> list[str]:
    return re.findall("`([^`]+)`", cell)


def _defined(source: str) -> set[str]:
    """Return the names of classes, functions, fields and constants."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                names.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                names.add(name)
    return names


def _is_ours(path: str) -> bool:
    """Whether a path with a slash begins in a folder of the repository or of the package; results may be missing."""
    first = path.partition("/")[0]
    if path.startswith(("docs/results/", "build/")):
        return False
    return bool(first) and any((base / first).is_dir() for base in (ROOT, PACKAGE))


def _exists(path: str) -> bool:
    if "/" in path:
        return any((base / path).exists() for base in (ROOT, PACKAGE))
    bases = (PACKAGE, ROOT / "native", ROOT / "tests", ROOT / "benchmarks", ROOT / "scripts")
    return any(next(base.rglob(path), None) for base in bases)

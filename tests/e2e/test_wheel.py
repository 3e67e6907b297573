"""The built wheel works away from the source folder: demo model, native core and entry point included."""

from __future__ import annotations

import email
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.build_folder import build_folder_to_oneself

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel built from the working tree, of the objects that its installation left in build/."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    with build_folder_to_oneself():
        run = subprocess.run(
            [*command, "-w", str(folder), str(ROOT)],
            capture_output=True,
            text=True,
            timeout=280,
            cwd=folder,
        )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    (path,) = folder.glob("thermocline_moe-*.whl")
    return path


@pytest.mark.slow
def test_the_wheel_holds_what_a_user_needs_and_nothing_else(wheel):
    """The package, its data and the compiled core; no tests, no sources of the core, no samples."""
    names = zipfile.ZipFile(wheel).namelist()
    own_page = ROOT / "thermocline" / "server" / "dashboard" / "page"
    own_files = {path.name for path in own_page.iterdir()}
    assert "thermocline/demo/demo-moe.gguf" in names
    assert {"thermocline/demo/held_text.txt", "thermocline/py.typed"} <= set(names)
    assert {f"thermocline/traces/page/page.{kind}" for kind in ("html", "css", "js")} <= set(names)
    assert {f"thermocline/server/dashboard/page/{name}" for name in own_files} <= set(names)
    assert any(name.startswith("thermocline/kernels/_native.") for name in names)
    top = {name.partition("/")[0] for name in names if ".dist-info" not in name}
    assert top == {"thermocline"}
    assert wheel.stat().st_size < 16 << 20


def link_dependencies(wheel: Path, site: Path) -> None:
    """Put links to what the wheel declares, and to what that declares in turn, into an environment's packages.

    They are the installed ones: what to choose of an index is `make install`'s part.
    """
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    waiting = [(line, "") for line in metadata.get_all("Requires-Dist")]
    linked = set()
    while waiting:
        line, extra = waiting.pop()
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": extra}):
            continue
        found = distribution(wanted.name)
        assert found.version in wanted.specifier
        for asked in {"", *wanted.extras} - {known for at, known in linked if at == wanted.name}:
            linked.add((wanted.name, asked))
            waiting += [(need, asked) for need in found.requires or ()]
        for top in {file.parts[0] for file in found.files} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(found.locate_file(top))


@pytest.mark.slow
def test_the_installed_wheel_runs_the_demo_from_another_folder(wheel, tmp_path):
    """In a clean environment with only the declared dependencies, `thermocline demo` answers."""
    environment = tmp_path / "venv"
    venv.create(environment)
    python = environment / "bin" / "python"
    install = (sys.executable, "-m", "pip", "--python", str(python), "install", "-q")
    subprocess.run(
        [*install, "--no-deps", "--no-index", "--no-compile", str(wheel)],
        check=True,
        timeout=280,
        cwd=tmp_path,
    )
    (site,) = environment.glob("lib/python*/site-packages")
    link_dependencies(wheel, site)
    run = subprocess.run(
        [environment / "bin" / "thermocline", "demo"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "expert" in run.stdout.lower()
    assert (tmp_path / "thermocline-demo-trace.json.gz").stat().st_size > 1000
    probe = (
        "import importlib.util as u, thermocline; print(thermocline.__file__, u.find_spec('torch'))"
    )
    where = subprocess.run(
        [python, "-c", probe], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert where.stdout.startswith(str(environment)), "the source folder was imported instead"
    assert where.stdout.strip().endswith("None"), "torch came along with the base install"

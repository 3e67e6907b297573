"""The files of dist/: what they hold, where they run, and that each answers on a machine without a compiler.

`make wheels` builds them and runs this; elsewhere there is nothing to look at. tests/e2e/test_wheel.py builds one for
this machine in the ordinary suite.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import tarfile
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.bare_root import BareRoot

if TYPE_CHECKING:
    from collections.abc import Iterator

if os.environ.get("THERMOCLINE_PACKAGES") != "dist":
    pytest.skip("make wheels builds what is looked at here", allow_module_level=True)

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
TAG = f"manylinux_2_28_{platform.machine()}"
# By Debian's suite: its Python is the one that the wheel is tried on.
WHEELS = {"bookworm": "cp311-cp311", "trixie": "cp312-abi3"}
DEMO_SECONDS = 30  # also where files are read for the first time


def wheel_of(suite: str) -> Path:
    """The wheel that this Debian's Python takes."""
    (path,) = DIST.glob(f"thermocline_moe-*-{WHEELS[suite]}-*.whl")
    return path


def tracked(folder: str = ".") -> set[str]:
    """What belongs to the repository there, without what is staged for removal."""
    command = ["git", "-C", str(ROOT), "ls-files", folder]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return {name for name in listed if (ROOT / name).exists()}


@pytest.fixture(scope="module", params=sorted(WHEELS))
def suite(request) -> str:
    """Each Debian in turn."""
    return request.param


@pytest.fixture(scope="module")
def bare(suite, tmp_path_factory) -> Iterator[BareRoot]:
    """A bare root with what the wheel needs, of checked hashes, and the wheel."""
    folder = tmp_path_factory.mktemp("bare")
    root = BareRoot(suite, folder / suite, "python3", "python3-venv")
    root.check("python3", "-m", "venv", "/venv")
    install = ("/venv/bin/pip", "install", "--quiet", "--no-deps")
    hashed = ("--require-hashes", "-r", "/source/hashes/run.txt")
    root.check(*install, *hashed, network=True, timeout=400)
    root.check(*install, "--no-index", f"/source/dist/{wheel_of(suite).name}")
    yield root
    shutil.rmtree(folder)


def test_there_are_a_wheel_for_3_11_one_for_all_later_and_an_sdist():
    """Nothing else, and the names promise glibc 2.28."""
    ends = sorted(path.name.split("-", 2)[-1] for path in DIST.glob("*.whl"))
    assert ends == sorted(f"{tags}-{TAG}.whl" for tags in WHEELS.values())
    assert len(list(DIST.iterdir())) == len(WHEELS) + 1


def test_the_wheel_holds_the_packages_files_the_core_and_nothing_else(suite):
    """Each tracked file of the package; no tests, no sources, no bytecode."""
    names = {name for name in zipfile.ZipFile(wheel_of(suite)).namelist() if name[-1] != "/"}
    about = {name for name in names if name.partition("/")[0].endswith(".dist-info")}
    core = {name for name in names if name.endswith(".so")}
    assert names - about - core == tracked("thermocline")
    assert {name.partition("/")[2] for name in about} == {
        "METADATA",
        "RECORD",
        "WHEEL",
        "entry_points.txt",
        "licenses/LICENSE",
    }
    machine = platform.machine()
    middle = {"bookworm": f"cpython-311-{machine}-linux-gnu", "trixie": "abi3"}[suite]
    assert core == {f"thermocline/kernels/_native.{middle}.so"}


def test_the_core_needs_no_glibc_after_2_28_and_no_library_beside_it(suite, tmp_path):
    """As binutils reads it; auditwheel has looked when the wheel was named."""
    archive = zipfile.ZipFile(wheel_of(suite))
    (name,) = (name for name in archive.namelist() if name.endswith(".so"))
    core = archive.extract(name, tmp_path)
    versions = subprocess.run(["readelf", "-VW", core], capture_output=True, text=True, check=True)
    found = {tuple(map(int, v.split("."))) for v in re.findall(r"GLIBC_([\d.]+)", versions.stdout)}
    assert found
    assert max(found) <= (2, 28)
    dynamic = subprocess.run(["readelf", "-dW", core], capture_output=True, text=True, check=True)
    needed = set(re.findall(r"NEEDED.*\[([\w-]+)\.so", dynamic.stdout))
    loader = {name for name in needed if name.startswith("ld-linux")}
    assert needed - loader <= {"libc", "libm", "libpthread"}


def test_the_sdist_is_whole():
    """All that git tracks; the wheels were built from it."""
    (path,) = DIST.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert held - {"PKG-INFO"} == tracked()


def test_the_demo_answers_soon_where_there_is_no_compiler(bare):
    """In a bare root without network: `thermocline demo`, from the first import to the timeline."""
    tools = ("gcc", "g++", "cc", "c++", "clang", "ld", "as", "cmake", "ninja", "make")
    found = bare.run("sh", "-c", f"command -v {' '.join(tools)}")
    assert found.stdout == ""
    before = time.monotonic()
    said = bare.check("/venv/bin/thermocline", "demo")
    seconds = time.monotonic() - before
    assert "larger than the memory" in " ".join(said.split())
    assert seconds < DEMO_SECONDS
    bare.check("/venv/bin/pip", "check")


def test_every_instruction_set_is_inside(bare):
    """The core names the sets that the source has for this kind of machine, and computes on each that runs here."""
    sets = {
        "x86_64": ["portable", "avx2", "avxvnni", "avx512", "amx"],
        "aarch64": ["portable", "neon"],
    }
    program = "from thermocline.kernels._native import instruction_sets as s; print(dict(s()))"
    said = bare.check("/venv/bin/python", "-c", program)
    held = dict(re.findall(r"'(\w+)': (True|False)", said))
    assert list(held) == sets[platform.machine()]
    for name in (name for name, usable in held.items() if usable == "True"):
        run = ("/venv/bin/thermocline", "run", "--prompt", "A hot expert is", "--max-tokens", "8")
        assert bare.check(*run, "--cpu-isa", name).strip(), name

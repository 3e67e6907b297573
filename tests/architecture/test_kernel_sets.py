"""Each instruction set is compiled apart, and the linker can not mix the code of one into another."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.build_folder import build_folder_to_oneself
from tests.support.kernel_cases import SHARED_DENSE

NATIVE = Path(__file__).parents[2] / "native"
# Each file of a set exports one table, named after the source that it includes.
FILES = sorted(path.stem for path in (NATIVE / "src" / "sets").glob("*.cpp"))
SETS = [name for name in FILES if not name.startswith("dense_")]
TABLES = {"set.inl": "gemm_kernels", "dense.inl": "dense_kernels", "tile_set.inl": "tile_kernels"}
CMAKE = (NATIVE / "CMakeLists.txt").read_text()
# Headers whose inline functions the linker would merge, and with them the instructions of one set.
HARMLESS_HEADERS = {"cstddef", "cstdint", "cstring", "immintrin.h", "arm_neon.h"}


def set_and_table(stem: str) -> tuple[str, str]:
    """The set that a file belongs to, and the table that it exports."""
    text = (NATIVE / "src" / "sets" / f"{stem}.cpp").read_text()
    (source,) = re.findall(r'^#include "(?:sets/)?(\w+\.inl)"$', text, re.MULTILINE)
    (name,) = re.findall(r"^#define THERMOCLINE_SET (\w+)$", text, re.MULTILINE)
    return name, TABLES[source]


def test_every_set_is_built_and_offered():
    """A set without a build rule, or a table without an entry in isa.cpp, is dead code."""
    offered = (NATIVE / "src" / "isa.cpp").read_text()
    built = set(re.findall(r"add_kernel_set\((\w+)\b(?! name)", CMAKE)) - {"name"}
    assert built == set(SETS)
    used = set(re.findall(r"&(\w+)::(\w+_kernels)", offered))
    assert used == {set_and_table(stem) for stem in FILES}
    dense_of = dict(re.findall(r'\{\{"(\w+)", [^{}]*?&(\w+)::dense_kernels', offered))
    shared = {name: other for name, other in dense_of.items() if name != other}
    assert {name: shared[name] for name in SHARED_DENSE} == SHARED_DENSE


@pytest.mark.parametrize("stem", FILES)
def test_a_set_is_named_like_its_file(stem):
    """The file of a set defines the namespace of the same name and includes one source of kernels."""
    name, table = set_and_table(stem)
    assert stem == (f"dense_{name}" if table == "dense_kernels" else name)


def test_kernel_sources_include_nothing_that_the_linker_merges():
    """Of the standard library, only headers without function templates."""
    for path in (NATIVE / "src" / "sets").glob("*.inl"):
        included = set(re.findall(r"^#include <([^>]+)>", path.read_text(), re.MULTILINE))
        assert included <= HARMLESS_HEADERS, path.name


def objects_of_the_sets(empty: Path) -> list[Path]:
    """Bring the sets' objects up to date where the package was built, else in `empty`; return them."""
    cmake = Path(sys.executable).parent / "cmake"
    tool = str(cmake) if cmake.exists() else shutil.which("cmake")
    if tool is None or shutil.which("nm") is None:
        pytest.skip("cmake and nm are needed")
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    built = sorted(NATIVE.parent.glob(f"build/{tag}-*/CMakeCache.txt"))
    if built:
        folder = built[0].parent
        with build_folder_to_oneself():
            subprocess.run([tool, "--build", str(folder)], check=True, capture_output=True)
    else:
        folder = empty
        _compile_sets(tool, folder)
    return sorted(folder.glob("CMakeFiles/set_*.dir/**/*.o"))


def _compile_sets(tool: str, folder: Path) -> None:
    configure = [tool, "-S", str(NATIVE), "-B", str(folder), "-DTHERMOCLINE_PYTHON=OFF"]
    subprocess.run(configure, check=True, capture_output=True)
    targets = subprocess.run(
        [tool, "--build", str(folder), "--target", "help"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    present = [name for name in SETS if re.search(rf"\bset_{name}\b", targets)]
    build = [tool, "--build", str(folder), "--target", *(f"set_{name}" for name in present)]
    subprocess.run(build, check=True, capture_output=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_set_shares_nothing_but_its_table(tmp_path):
    """No set's object file defines a symbol that another file could be linked to, but its table.

    A function that two sets define as one weak symbol would be kept once: with the instructions of
    either, on every machine.
    """
    objects = objects_of_the_sets(tmp_path)
    assert len(objects) >= 2
    for path in objects:
        listed = subprocess.run(
            ["nm", "--defined-only", "--extern-only", str(path)],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        name, table = set_and_table(path.name.partition(".")[0])
        symbols = [line.split()[-1] for line in listed.splitlines()]
        assert symbols == [f"_ZN11thermocline{len(name)}{name}{len(table)}{table}E"], path.name

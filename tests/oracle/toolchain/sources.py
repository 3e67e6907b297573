"""Where llama.cpp's sources are: its converter is not in the package, but in the sources that the package is built from.

They are downloaded once, as the very release that is installed, into build/.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tarfile
from pathlib import Path

_BUILD = Path(__file__).parents[3] / "build" / "oracle-sources"
_VARIABLE = "THERMOCLINE_LLAMA_CPP_SOURCE"


def llama_cpp_sources() -> Path:
    """Return the folder with convert_hf_to_gguf.py: $THERMOCLINE_LLAMA_CPP_SOURCE, or what is downloaded."""
    named = os.environ.get(_VARIABLE)
    if named is not None:
        folder = Path(named)
        assert (folder / "convert_hf_to_gguf.py").is_file(), f"{_VARIABLE}={named} has no converter"
        return folder
    version = importlib.metadata.version("llama-cpp-python")
    folder = _BUILD / f"llama_cpp_python-{version}" / "vendor" / "llama.cpp"
    if not (folder / "convert_hf_to_gguf.py").is_file():
        _download(version)
    return folder


def _download(version: str) -> None:
    _BUILD.mkdir(parents=True, exist_ok=True)
    what = [f"llama-cpp-python=={version}", "--no-binary", ":all:", "--no-deps"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-build-isolation", *what]
    subprocess.run([*command, "--dest", str(_BUILD)], check=True)
    with tarfile.open(_BUILD / f"llama_cpp_python-{version}.tar.gz") as archive:
        archive.extractall(_BUILD, filter="data")

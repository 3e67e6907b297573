"""A bare Debian without compiler, in which packages are installed as on somebody's machine (scripts/debian_root.sh)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
_SCRIPT = ROOT / "scripts" / "debian_root.sh"
_KEPT = ROOT / "build" / "roots"


class BareRoot:
    """A copy of a bare Debian, in a folder that goes with the test."""

    def __init__(self, suite: str, folder: Path, *packages: str) -> None:
        """suite: Debian's name of it; folder: what becomes its copy.

        What is copied is kept in build/: to make it takes a minute.
        """
        kept = _KEPT / "-".join((suite, *packages))
        if not kept.exists():
            subprocess.run([_SCRIPT, "make", suite, kept, *packages], check=True, timeout=500)
        self.folder = folder
        subprocess.run(["cp", "-a", kept, folder], check=True, timeout=100)

    def run(
        self,
        *command: str,
        network: bool = False,
        user: str = "root",
        source: Path | None = ROOT,
        timeout: float = 120,
    ) -> subprocess.CompletedProcess[str]:
        """Run the command there, with `source` to be read at /source; without network there is 127.0.0.1 alone."""
        environment = {
            **os.environ,
            "SOURCE": str(source or ""),
            "NETWORK": "" if network else "none",
            "AS": user,
        }
        return subprocess.run(
            [_SCRIPT, "run", self.folder, *command],
            capture_output=True,
            text=True,
            timeout=timeout,
            env=environment,
            check=False,
        )

    def check(self, *command: str, network: bool = False, timeout: float = 120) -> str:
        """Run the command there; it must succeed. Return what it printed."""
        done = self.run(*command, network=network, timeout=timeout)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

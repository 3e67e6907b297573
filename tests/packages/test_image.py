"""The Dockerfile, carried out in bare Debian roots: the server that it makes answers, as a user without rights.

`make image` runs this, as root and with a network; it takes as long as compiling the core.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.dockerfile import Stage, carry_out

if TYPE_CHECKING:
    from collections.abc import Iterator

if os.environ.get("THERMOCLINE_PACKAGES") != "image":
    pytest.skip("make image carries out the Dockerfile", allow_module_level=True)

ROOT = Path(__file__).parents[2]
# What a container's owner does from outside, run beside its first process: start it, ask after its health until it is
# well, ask for an answer, read the metrics as Prometheus does, and stop it.
OUTSIDE = """
import json, os, signal, subprocess, sys, time
from urllib.request import Request, urlopen

start, health = json.loads(sys.argv[1]), json.loads(sys.argv[2])
server = subprocess.Popen(start, env=os.environ | {"THERMOCLINE_API_KEY": "a-key", "THERMOCLINE_ALLOWED_HOSTS": "thermocline"})
said = {"user": os.getuid()}
deadline = time.monotonic() + 60
while subprocess.run(health, capture_output=True).returncode:
    assert server.poll() is None and time.monotonic() < deadline
    time.sleep(0.2)
key = {"Authorization": "Bearer a-key", "Content-Type": "application/json"}
body = json.dumps({"messages": [{"role": "user", "content": "What is an expert?"}], "max_tokens": 20}).encode()
asked = Request("http://127.0.0.1:7717/v1/chat/completions", body, key)
said["answer"] = json.load(urlopen(asked))["choices"][0]["message"]["content"]
metrics = Request("http://127.0.0.1:7717/metrics", headers=key | {"Host": "thermocline:7717"})
said["metrics"] = urlopen(metrics).read().decode().count("# TYPE thermocline:")
server.send_signal(signal.SIGTERM)
said["status"] = server.wait(30)
said["unhealthy"] = subprocess.run(health, capture_output=True).returncode
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def image(tmp_path_factory) -> Iterator[Stage]:
    """The image that the file describes."""
    folder = tmp_path_factory.mktemp("image")
    yield carry_out((ROOT / "Dockerfile").read_text(), folder)
    shutil.rmtree(folder)


def test_the_server_answers_as_nobody_in_particular(image):
    """Its health check says when; SIGTERM ends it well, and then the check fails."""
    start = json.dumps([*image.entrypoint, *image.command])
    done = image.run("python3", "-c", OUTSIDE, start, json.dumps(image.health))
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["user"] == 7717
    assert "expert" in said["answer"].lower()
    assert said["metrics"] > 20
    assert said["status"] == 0
    assert said["unhealthy"] != 0


def test_without_a_key_it_does_not_start(image):
    """It listens to other machines, and says what to set."""
    done = image.run(*image.entrypoint, *image.command)
    assert done.returncode != 0
    assert "THERMOCLINE_API_KEY" in done.stderr


def test_there_are_no_compiler_and_no_sources_inside(image):
    """What built it stays behind, and the user may write to the volume alone."""
    tools = image.run("sh", "-c", "command -v gcc g++ g++-12 cc ld make cmake ninja")
    assert tools.stdout == ""
    assert not (image.root.folder / "source").exists()
    assert image.volumes == [image.folder] == ["/models"]
    for place, may in (("/models", True), ("/opt/thermocline", False), ("/etc", False)):
        assert (image.run("test", "-w", place).returncode == 0) == may, place

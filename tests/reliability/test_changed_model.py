"""A served model's file is cut, and put there again, while clients stream: the server lives and tells no lie.

THERMOCLINE_RELIABILITY=full cuts it a hundred times instead of once.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.toy_model import ToyShape, write_toy_model

NUM_CUTS = 100 if os.environ.get("THERMOCLINE_RELIABILITY") == "full" else 1
NUM_CLIENTS = 4
NUM_TOKENS = 150
DEADLINE_S = 60.0
JSON = {"Content-Type": "application/json"}


@pytest.fixture
def model(tmp_path):
    """A toy model, and a whole copy of it to put there again."""
    whole = write_toy_model(tmp_path / "whole.gguf", ToyShape(context=1 << 12))
    return Path(shutil.copyfile(whole, tmp_path / "toy.gguf")), whole


@pytest.fixture
def start(tmp_path):
    """Start `python -m thermocline serve` and return the process and its port; ended after the test."""
    started = []

    def call(*args):
        process = subprocess.Popen(
            [sys.executable, "-m", "thermocline", "serve", "--port", "0", *map(str, args)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        started.append(process)
        line = process.stdout.readline().decode()
        match = re.search(r":(\d+)\n$", line)
        assert match, (line, process.stderr.read())
        return process, int(match[1])

    yield call
    for process in started:
        process.kill()
        process.communicate()


def ask(port, path, body=None):
    """Return status and body of a request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    try:
        connection.request("GET" if body is None else "POST", path, body and json.dumps(body), JSON)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def complete(port):
    """Stream the one seeded answer; return its status, its text, and the error that ended it or None."""
    body = {"prompt": "hello", "seed": 7, "stream": True, "ignore_eos": True}
    status, answer = ask(port, "/v1/completions", body | {"max_tokens": NUM_TOKENS})
    if status != 200:
        return status, "", json.loads(answer)["error"]
    events = [line[6:] for line in answer.decode().split("\n") if line.startswith("data: ")]
    if events[-1] == "[DONE]":
        return status, text_of(events[:-1]), None
    return status, text_of(events[:-1]), json.loads(events[-1])["error"]


def text_of(events):
    """Return the text of a stream's chunks."""
    chunks = [json.loads(event) for event in events]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk.get("choices"))


def wait_health(port, status):
    """Wait until health has this status; return its body."""
    end_s = time.monotonic() + DEADLINE_S
    while (found := ask(port, "/health"))[0] != status:
        assert time.monotonic() < end_s, found
        time.sleep(0.01)
    return json.loads(found[1])


def open_files(pid):
    """Count what a process has open, without what it opens once, when it first needs it."""
    links = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            links.append(os.readlink(descriptor))  # noqa: PTH115 - also what is no path, as pipe:[7]
    kinds = Counter(re.sub(r"\[\d+\]", "", link) for link in links)
    del kinds[f"/proc/{pid}/pagemap"]
    return kinds


class Clients:
    """Threads that stream the same answer again and again, and keep what came of it."""

    def __init__(self, port):
        self.outcomes = []
        self.failures = []
        self._port = port
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(NUM_CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _run(self):
        while not self._is_over.is_set():
            try:
                self.outcomes.append(complete(self._port))
            except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
                self.failures.append(repr(error))
                return
            if self.outcomes[-1][0] != 200:
                self._is_over.wait(0.02)

    def wait_answers(self, number):
        """Wait for so many more outcomes."""
        end_s, wanted = time.monotonic() + DEADLINE_S, len(self.outcomes) + number
        while len(self.outcomes) < wanted and not self.failures:
            assert time.monotonic() < end_s
            time.sleep(0.005)

    def end(self):
        """End all threads."""
        self._is_over.set()
        for thread in self._threads:
            thread.join(DEADLINE_S)


def cut_and_restore(number, path, whole, port):
    """Cut the file somewhere; when the server has noticed, put the whole one there, by a rename or in place."""
    os.truncate(path, random.Random(number).randrange(path.stat().st_size))
    error = wait_health(port, 503)["error"]
    assert error["code"] == "model_changed"
    assert "was changed while the model was open" in error["message"]
    if number % 2:
        path.write_bytes(whole.read_bytes())
    else:
        shutil.copyfile(whole, path.with_name("new.gguf")).rename(path)
    wait_health(port, 200)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_server_outlives_its_model_being_cut_under_load(model, start, record_property):
    """Each stream is the right text to its end, or right up to a typed error; each cut is survived; nothing leaks."""
    path, whole = model
    process, port = start(path)
    wait_health(port, 200)
    expected = complete(port)[1]
    assert len(expected) > 50
    before = open_files(process.pid)
    clients = Clients(port)
    for number in range(NUM_CUTS):
        clients.wait_answers(NUM_CLIENTS + number % 7)
        cut_and_restore(number, path, whole, port)
    clients.wait_answers(2 * NUM_CLIENTS)
    clients.end()
    assert not clients.failures
    for status, text, error in clients.outcomes:
        assert expected.startswith(text), "a wrong answer was sent"
        assert status in (200, 503)
        assert (text == expected) if error is None else error["type"] == "unavailable_error"
    num_whole = sum(error is None for _, _, error in clients.outcomes)
    record_property("streams", f"{len(clients.outcomes)}, {num_whole} of them whole")
    assert num_whole >= NUM_CUTS
    assert complete(port) == (200, expected, None)
    end_s = time.monotonic() + DEADLINE_S
    while more := open_files(process.pid) - before:
        assert time.monotonic() < end_s, more
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == 0


@pytest.mark.slow
def test_a_server_ends_by_a_changed_model_where_that_was_asked_for(model, start):
    """--on-model-change exit: the stream gets an error event, and the process ends with 1 and one reason."""
    path, _ = model
    process, port = start(path, "--on-model-change", "exit")
    wait_health(port, 200)
    clients = Clients(port)
    clients.wait_answers(NUM_CLIENTS)
    os.truncate(path, 1000)
    out, errors = process.communicate(timeout=DEADLINE_S)
    clients.end()
    assert process.returncode == 1
    assert re.fullmatch(rb"thermocline is serving \S+ at \S+\n", out)
    assert errors.decode().count("error: ") == 1
    assert "was changed while the model was open" in errors.decode()

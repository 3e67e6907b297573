"""`thermocline serve` as a process of its own: its first line, its answers, its end."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys

import pytest

from tests.server.live import CHAT, HELLO, parse_events
from tests.support.processes import disposition
from tests.support.toy_model import ToyShape, toy_weights, write_toy_model
from thermocline.server.core.model_card import model_card

JSON = {"Content-Type": "application/json"}


@pytest.fixture
def start(tmp_path):
    """Start `python -m thermocline serve` and return the process; ended after the test."""
    started = []

    def call(*args):
        process = subprocess.Popen(
            [sys.executable, "-m", "thermocline", "serve", *map(str, args)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        started.append(process)
        return process

    yield call
    for process in started:
        process.kill()
        process.communicate()


def connect(process):
    """Read the process's first line, and return a connection once the model is open."""
    line = process.stdout.readline().decode()
    match = re.fullmatch(r"thermocline is opening toy at http://127\.0\.0\.1:(\d+)\n", line)
    assert match, (line, process.stderr.read() if process.poll() is not None else "")
    connection = http.client.HTTPConnection("127.0.0.1", int(match[1]), timeout=30)
    status = 503
    while status == 503:
        connection.request("GET", "/health")
        response = connection.getresponse()
        response.read()
        status = response.status
    assert status == 200
    assert process.stdout.readline().decode() == line.replace("opening", "serving")
    return connection


def open_stream(connection, **fields):
    """Start a streamed chat and return the response after its first event."""
    body = json.dumps({"messages": HELLO, "stream": True, "ignore_eos": True} | fields)
    connection.request("POST", CHAT, body, JSON)
    response = connection.getresponse()
    assert response.status == 200
    return response, response.readline()


@pytest.mark.slow
def test_sigterm_lets_the_answer_end(start, toy):
    """The stream that runs gets all of its tokens and [DONE], then the process ends with 0."""
    process = start(toy, "--port", 0)
    connection = connect(process)
    response, first = open_stream(connection, max_tokens=100)
    process.send_signal(signal.SIGTERM)
    events = parse_events(first + response.read())
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["timings"]["predicted_n"] == 100
    connection.close()
    assert process.wait(30) == 0
    assert process.stdout.read() == b""
    assert process.stderr.read() == b""


@pytest.mark.slow
def test_an_endless_answer_ends_with_the_shutdown_timeout(start, toy):
    """After --shutdown-timeout the stream gets an error event without [DONE]; the exit code is 0."""
    process = start(toy, "--port", 0, "--shutdown-timeout", 0.1)
    connection = connect(process)
    response, first = open_stream(connection)
    process.send_signal(signal.SIGINT)
    events = parse_events(first + response.read())
    assert json.loads(events[-1])["error"]["type"] == "unavailable_error"
    connection.close()
    assert process.wait(30) == 0
    assert process.stderr.read() == b""


def ask_health(connection):
    """Return status and body of GET /health."""
    connection.request("GET", "/health")
    response = connection.getresponse()
    return response.status, json.loads(response.read())


@pytest.mark.slow
def test_while_it_drains_the_server_says_so(start, toy):
    """Health is 503, new work is refused with 503 and a time; the answer that runs goes on to its end."""
    process = start(toy, "--port", 0)
    connection = connect(process)
    response, first = open_stream(connection, max_tokens=500)
    process.send_signal(signal.SIGTERM)
    other = http.client.HTTPConnection("127.0.0.1", connection.port, timeout=30)
    while (answer := ask_health(other))[0] == 200:
        pass
    assert answer[1]["error"]["type"] == "unavailable_error"
    other.request("POST", CHAT, json.dumps({"messages": HELLO}), JSON)
    refused = other.getresponse()
    assert (refused.status, int(refused.headers["Retry-After"]) > 0) == (503, True)
    other.close()
    events = parse_events(first + response.read())
    assert json.loads(events[-2])["timings"]["predicted_n"] == 500
    connection.close()
    assert process.wait(30) == 0
    assert process.stderr.read() == b""


@pytest.mark.slow
def test_keys_come_from_flags_files_and_the_environment(start, toy, tmp_path, monkeypatch):
    """Each of them opens the server, and none is in what the process says."""
    (tmp_path / "keys").write_text("# two\nsk-file-1\nsk-file-2\n")
    monkeypatch.setenv("THERMOCLINE_API_KEY", "sk-env-1 sk-env-2")
    process = start(toy, "--port", 0, "--host", "0.0.0.0", "--api-key-file", tmp_path / "keys")
    line = process.stdout.readline().decode()
    port = int(line.rpartition(":")[2])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    while ask_health(connection)[0] == 503:
        pass
    statuses = {}
    for key in ("sk-file-1", "sk-file-2", "sk-env-1", "sk-env-2", "sk-other", "sk-env-1 sk-env-2"):
        connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"})
        response = connection.getresponse()
        response.read()
        statuses[key] = response.status
    assert list(statuses.values()) == [200] * 4 + [401] * 2
    connection.close()
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=30)
    assert "sk-" not in line
    said = line.replace("opening", "serving").encode()
    assert (process.returncode, out, errors) == (0, said, b"")


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once(start, toy):
    """The first one waits for an endless answer, the second one does not."""
    process = start(toy, "--port", 0, "--shutdown-timeout", 600)
    connection = connect(process)
    response, _ = open_stream(connection)
    process.send_signal(signal.SIGINT)
    other = http.client.HTTPConnection("127.0.0.1", connection.port, timeout=30)
    while (answer := ask_health(other))[0] == 200:
        pass
    assert answer[0] == 503
    other.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == -signal.SIGINT
    response.close()
    connection.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (("--host", "0.0.0.0"), b"there is no API key"),
        (("--port", "70000"), b"--port is 70000"),
        (("nothing.gguf",), b"nothing.gguf"),
    ],
)
def test_what_can_not_be_served_is_one_line(start, toy, arguments, found):
    """Exit code 1 and an error line, before anything listens."""
    process = start(*(arguments if arguments[0].endswith(".gguf") else (toy, *arguments)))
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, b"")
    assert errors.startswith(b"error: ")
    assert errors.count(b"\n") == 1
    assert found in errors


def test_the_card_is_read_from_the_header(tmp_path):
    """The id is the file's name without its shard and ending; sizes and format are the tensors'."""
    formats = {"gate_up": "Q8_0", "down": "Q8_0"}
    shape = ToyShape(formats=formats, intermediate=256)
    card = model_card(write_toy_model(tmp_path / "Big-Q8_0.GGUF", shape))
    weights = toy_weights(shape)
    assert (card.id, card.quant) == ("Big-Q8_0", "Q8_0")
    assert card.num_parameters == sum(weight.size for weight in weights.values())
    assert 0 < card.total_bytes < 4 * card.num_parameters


@pytest.mark.slow
def test_a_terminal_that_closes_lets_the_answer_end(start, toy):
    """SIGHUP is as SIGTERM: the stream that runs gets all of its tokens, and the process ends with 0."""
    with disposition(signal.SIGHUP, signal.SIG_DFL):
        process = start(toy, "--port", 0)
    connection = connect(process)
    response, first = open_stream(connection, max_tokens=100)
    process.send_signal(signal.SIGHUP)
    events = parse_events(first + response.read())
    assert json.loads(events[-2])["timings"]["predicted_n"] == 100
    connection.close()
    assert process.wait(30) == 0
    assert process.stderr.read() == b""


@pytest.mark.slow
def test_nohup_is_obeyed(start, toy):
    """A server that was started with SIGHUP ignored goes on when the terminal closes."""
    with disposition(signal.SIGHUP, signal.SIG_IGN):
        process = start(toy, "--port", 0)
    connection = connect(process)
    process.send_signal(signal.SIGHUP)
    assert ask_health(connection)[0] == 200
    process.send_signal(signal.SIGTERM)
    connection.close()
    assert process.wait(30) == 0

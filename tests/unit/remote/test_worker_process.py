"""What a worker is started with: safe places to listen, secrets that are secrets, and its command line."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.support.processes import disposition
from tests.support.toy_model import write_toy_model
from thermocline.cli import cli
from thermocline.errors import ConfigError
from thermocline.remote.address import TcpAddress, UnixAddress
from thermocline.remote.worker import open_listener
from thermocline.remote.worker_process import WorkerOptions, read_secret, run_worker


def options(listen, secret_file=None, *, any_host=False):
    """What the command line would say."""
    return WorkerOptions("model.gguf", listen, secret_file, any_host, 1, "auto", None)


@pytest.fixture
def secret_file(tmp_path):
    """A file with a long secret and a line's end."""
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef0123\n")
    return str(path)


def test_tcp_needs_a_secret_and_a_reason_to_leave_loopback(secret_file):
    """Without a secret, or beyond this machine without --any-host: refused before the model is opened."""
    with pytest.raises(ConfigError, match="--secret-file"):
        run_worker(options("tcp:127.0.0.1:0"), print)
    with pytest.raises(ConfigError, match="--any-host"):
        run_worker(options("tcp:0.0.0.0:0", secret_file), print)


def test_a_worker_must_be_told_where_to_listen():
    """No --listen is a ConfigError that shows both forms."""
    with pytest.raises(ConfigError, match="unix:PATH"):
        run_worker(options(None), print)


def test_secrets_are_read_without_the_lines_end(tmp_path, secret_file):
    """A secret's file may end its line; a short one and a missing file are refused."""
    assert read_secret(secret_file) == b"0123456789abcdef0123"
    short = tmp_path / "short"
    short.write_text("abc\n")
    with pytest.raises(ConfigError, match="at least 16"):
        read_secret(str(short))
    with pytest.raises(ConfigError, match="can not be read"):
        read_secret(str(tmp_path / "none"))


def test_a_unix_socket_is_for_its_user_alone(tmp_path):
    """Nobody else may connect; a dead worker's socket is taken over, a living one's is not."""
    address = UnixAddress(str(tmp_path / "socket"))
    with open_listener(address):
        mode = stat.S_IMODE((tmp_path / "socket").stat().st_mode)
        assert mode & 0o077 == 0
        with pytest.raises(ConfigError, match="can not be listened on"):
            open_listener(address)
    with open_listener(address):
        pass


def test_a_taken_port_is_a_config_error():
    """The message names the address."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = TcpAddress("127.0.0.1", other.getsockname()[1])
        with pytest.raises(ConfigError, match=str(address.port)):
            open_listener(address)


def test_the_command_says_what_is_wrong(tmp_path):
    """A bad address is one line of error."""
    model = write_toy_model(tmp_path / "toy.gguf")
    result = CliRunner().invoke(cli, ["worker", str(model), "--listen", "nowhere"])
    assert result.exit_code == 1
    assert "names no worker" in result.output


def send_to_another_thread(number, process):
    """Let a thread that is not the first receive the signal, as the kernel may choose to."""
    tasks = (int(task.name) for task in Path(f"/proc/{process}/task").iterdir())
    other = next(task for task in tasks if task != process)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.tgkill(process, other, number) == 0, os.strerror(ctypes.get_errno())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("aimed", ["process", "another thread"])
def test_a_worker_that_is_ended_removes_its_socket(tmp_path, number, aimed):
    """Whichever signal ends it and whichever thread receives it, its socket's file is gone afterwards."""
    model, path = write_toy_model(tmp_path / "toy.gguf"), tmp_path / "socket"
    with disposition(number, signal.SIG_DFL):
        process = subprocess.Popen(
            [sys.executable, "-m", "thermocline", "worker", model, "--listen", f"unix:{path}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    try:
        assert b"listens on" in process.stdout.readline()
        assert path.is_socket()
        with socket.socket(socket.AF_UNIX) as client:  # served by a thread of its own
            client.connect(str(path))
            assert client.recv(1)
            if aimed == "process":
                process.send_signal(number)
            else:
                send_to_another_thread(number, process.pid)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, errors) == (130 if number == signal.SIGINT else 0, b"")
    assert not path.exists()

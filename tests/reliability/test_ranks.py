"""Ranks as processes that are killed and stopped under load: right answers, no hang, nothing left behind.

THERMOCLINE_RANK_LOSSES is how often of each kind; `make parallel` sets it, and has torchrun's agents too.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support import rank_program

pytestmark = pytest.mark.slow

LOSSES = int(os.environ.get("THERMOCLINE_RANK_LOSSES", "0"))
ROOT = Path(__file__).parents[2]
# Two deadlines, the pulse's silence, and what is computed again on a busy machine.
LATEST_S = 60.0


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """The answers of one process."""
    return asyncio.run(rank_program.all_answers(rank_program.config_of()))


class Ranks:
    """Processes of ranks. agents: each behind an agent of torchrun of its own.

    Rank 0 does not ask for its last answers before `hit` was called: until then no rank ends by itself.
    """

    def __init__(
        self, folder: Path, number: int, *, agents: bool, tp: int, env: dict[str, str]
    ) -> None:
        self.folder, self.number = folder, number
        os.mkfifo(folder / "hit")
        self._pipe = os.open(folder / "hit", os.O_RDWR)  # opened for writing alone it would wait
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        program = ["-m", "tests.support.rank_program", os.fspath(folder)]
        self.processes = []
        for rank in range(number):
            mine = {**os.environ, "TEST_TP": str(tp), "OMP_NUM_THREADS": "1", **env}
            command = [sys.executable, *program]
            if agents:
                command = [sys.executable, "-m", "torch.distributed.run"]
                command += ["--nnodes", str(number), "--nproc-per-node", "1", "--max-restarts", "0"]
                command += ["--node-rank", str(rank), "--master-addr", "127.0.0.1"]
                command += ["--master-port", str(port), *program]
            else:
                mine |= {"RANK": str(rank), "WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": "1"}
                mine |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            self.processes.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=mine,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )

    def wait_file(self, name: str) -> None:
        """Wait until rank 0 has written a file: `begun` when it has opened the model, `due` at the drawn token."""
        end_s = time.monotonic() + 60
        while not (self.folder / name).exists():
            assert time.monotonic() < end_s, f"rank 0 did not write {name}"
            assert self.processes[0].poll() is None, "rank 0 ended at once"
            time.sleep(0.005)

    def hit(self, rank: int, how: signal.Signals) -> None:
        """End or stop a rank when the drawn token is there, and let rank 0 come to its end."""
        pid = self.pid(rank)
        self.wait_file("due")
        os.kill(pid, how)
        os.write(self._pipe, b".")

    def pid(self, rank: int) -> int:
        """Return a rank's own process, which with agents is no child of ours."""
        return int((self.folder / f"rank{rank}").read_text())

    def wait_end(self, rank: int) -> str | None:
        """Wait until a rank's own process is gone; return the error that it ended with, None where it was killed.

        Of torchrun's agents nobody waits: one whose rank has ended waits 300 s for the agent of a rank that was lost.
        """
        pid, end_s = self.pid(rank), time.monotonic() + LATEST_S
        while _runs(pid):
            assert time.monotonic() < end_s, f"rank {rank} did not end"
            self.processes[rank].poll()
            time.sleep(0.02)
        end = self.folder / f"end{rank}"
        return end.read_text() if end.exists() else None

    def close(self) -> None:
        """End what is left, which a test that passes leaves nothing of."""
        for rank, process in enumerate(self.processes):
            if process.poll() is None:
                process.kill()
                file = self.folder / f"rank{rank}"
                with suppress(ProcessLookupError, FileNotFoundError):
                    os.kill(int(file.read_text()), signal.SIGKILL)
            process.wait()
        os.close(self._pipe)


def _runs(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone before it was opened, or read
        return False


@contextmanager
def running(
    folder: Path,
    number: int,
    draw: random.Random,
    *,
    agents: bool = False,
    tp: int = 1,
    may_compute_alone: bool = False,
    transport: str = "auto",
):
    """Run ranks until the block ends; one is to be hit at the token that is drawn."""
    folder.mkdir(exist_ok=True)
    env = {"TEST_TRANSPORT": transport} | ({"TEST_ALONE": "1"} if may_compute_alone else {})
    env["TEST_DUE"] = str(draw.randrange(rank_program.NUM_EARLY_TOKENS))
    ranks = Ranks(folder, number, agents=agents, tp=tp, env=env)
    try:
        ranks.wait_file("begun")
        yield ranks
    finally:
        ranks.close()


def lose_one(
    ranks: Ranks, draw: random.Random, how: signal.Signals, expected
) -> tuple[float, str | None]:
    """End or stop a rank at a random moment; check every rank's end.

    Returns the seconds until the answers came, and the error of the rank that was hit.
    """
    victim = draw.randrange(1, ranks.number)
    ranks.hit(victim, how)
    start_s = time.monotonic()
    assert ranks.wait_end(0) == ""
    took_s = time.monotonic() - start_s
    assert json.loads((ranks.folder / "answers").read_text()) == expected
    if how is signal.SIGSTOP:
        os.kill(ranks.pid(victim), signal.SIGCONT)
    errors = [ranks.wait_end(rank) for rank in range(1, ranks.number)]
    of_victim = errors.pop(victim - 1)
    assert errors == [""] * len(errors)
    if how is signal.SIGSTOP:
        assert of_victim is not None, "it was only stopped"
        # One that was stopped when nobody needed it any more ends with the service.
        assert not of_victim or of_victim.startswith("MeshEndedError")
    return took_s, of_victim


@pytest.mark.parametrize(
    ("transport", "tp"), [("auto", 1), ("torch", 1), ("auto", 2), ("sockets", 1)]
)
def test_ranks_answer_as_one_process_and_outlive_a_killed_one(
    transport, tp, tmp_path, expected
) -> None:
    """Two ranks, by shared memory, gloo or sockets; one is killed under load, the other computes its experts and requests.

    As replicas, and in one, whose ranks divide prompts.
    """
    draw = random.Random(1)
    with running(tmp_path, 2, draw, transport=transport, tp=tp) as ranks:
        lose_one(ranks, draw, signal.SIGKILL, expected)


@pytest.mark.skipif(not LOSSES, reason="make parallel")
@pytest.mark.timeout(36000)
@pytest.mark.parametrize("agents", [False, True], ids=["processes", "agents"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_losses_under_load(how, agents, tmp_path, expected, record_property, capfd) -> None:
    """Kills or stops of a random rank but 0, of two and of three ranks, data- and tensor-parallel."""
    draw, times, errors = random.Random(int(how)), [], []
    for number in range(LOSSES):
        size = 2 + number % 2
        tp = size if number % 4 == 3 else 1
        alone = number % 3 == 2
        transport = ("auto", "auto", "auto", "torch", "sockets")[number % 5]
        with running(
            *(tmp_path / f"{number}", size, draw),
            agents=agents,
            tp=tp,
            may_compute_alone=alone,
            transport=transport,
        ) as ranks:
            took_s, error = lose_one(ranks, draw, how, expected)
        times.append(took_s)
        errors.append(error)
    if how is signal.SIGSTOP:
        assert any(errors), "no rank was stopped in time to be late"
    record_property("latest answer after a loss, s", round(max(times), 1))
    with capfd.disabled():
        sys.stdout.write(f"{how.name}: {LOSSES} losses, answers after at most {max(times):.1f} s\n")


@pytest.mark.skipif(not LOSSES, reason="make parallel")
@pytest.mark.timeout(36000)
@pytest.mark.parametrize("agents", [False, True], ids=["processes", "agents"])
def test_the_end_of_rank_0_ends_the_service(agents, tmp_path) -> None:
    """The others end within the deadline, and say why."""
    draw = random.Random(0)
    for number in range(max(LOSSES // 5, 1)):
        size = 2 + number % 2
        with running(tmp_path / f"{number}", size, draw, agents=agents) as ranks:
            ranks.hit(0, signal.SIGKILL)
            start_s = time.monotonic()
            for rank in range(1, size):
                error = ranks.wait_end(rank)
                assert error is not None
                assert "rank 0 has ended, and the service with it" in error
            assert time.monotonic() - start_s < 2 * rank_program.TIMEOUT_S + 15


@pytest.mark.skipif(not LOSSES, reason="make parallel")
@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (1, 2), (2, 2)])
def test_torchrun_prints_one_answer(dp, tp, tmp_path) -> None:
    """`run --json` under torchrun is one JSON object, with the tokens of one process."""
    run = ["-m", "thermocline", "run", "--prompt", "A lane", "--max-tokens", "9", "--json"]
    env = {**os.environ, "THERMOCLINE_CACHE": os.fspath(tmp_path)}

    def tokens(command: list[str]) -> list[int]:
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=True
        )
        return json.loads(done.stdout)["token_ids"]

    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc-per-node", str(dp * tp), *run, "--dp", str(dp), "--tp", str(tp)]
    assert tokens(launch) == tokens([sys.executable, *run])

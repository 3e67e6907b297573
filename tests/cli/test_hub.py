"""Models by name as a user sees them: pull, run -hf, list and rm against a hub on this machine.

The README's own names of models need the outside network. Their commands are only parsed (test_readme.py); what they do
is tried here under names of this hub.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import signal
import sys
import threading
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.gguf_files import write_shards
from tests.support.local_hub import VALID_TOKEN, LocalHub, Repo
from tests.support.toy_model import ToyShape, toy_metadata, toy_weights

NAME = "acme/toy-GGUF"


@pytest.fixture(scope="session")
def weights(toy) -> bytes:
    """A whole model's file."""
    return Path(toy).read_bytes()


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """The library's own settings as they are for a user with an empty home; the home is returned."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", os.fspath(home))
    monkeypatch.setenv("OLLAMA_MODELS", os.fspath(home / "ollama"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE"):
        monkeypatch.delenv(name, raising=False)
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", os.fspath(home / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", os.fspath(home / "hf" / "token"))
    monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", os.fspath(home / "agents.json"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    # The package for Xet reads the environment.
    monkeypatch.setenv("HF_HOME", os.fspath(home / "hf"))
    return home


@pytest.fixture
def hub(weights, monkeypatch):
    """A hub with one repository of two quantisations; the library asks it."""
    files = {
        "README.md": b"# toy",
        "toy-Q4_K_M.gguf": weights,
        "toy-Q8_0.gguf": weights + bytes(64),
        "mmproj-toy-F16.gguf": b"GGUF",
    }
    from huggingface_hub import constants
    from huggingface_hub.utils import close_session

    with LocalHub({NAME: Repo(files)}) as hub:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE
        template = hub.url + template.removeprefix(constants.ENDPOINT)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        yield hub
        close_session()


@pytest.fixture
def no_pause(monkeypatch):
    """The library writes small pieces, and tries again at once."""
    from huggingface_hub import constants, file_download

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 14)
    monkeypatch.setattr(file_download, "time", SimpleNamespace(sleep=lambda _: None))


def left_behind(home: Path) -> list[str]:
    """Names of all files of models in the home, whole or not, but for links to them."""
    return sorted(
        path.name
        for path in home.rglob("*")
        if path.is_file()
        and not path.is_symlink()
        and path.parent.name != "refs"
        and not path.name.endswith((".lock", ".TAG", ".json", ".log"))
    )


def fails(result, *parts: str) -> None:
    """One plain error line with these parts, and exit code 1."""
    assert result.exit_code == 1
    assert result.stdout == ""
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert " Fix: " in last
    for part in parts:
        assert part in last


def test_pull_brings_the_usual_quantisation(hub, invoke, weights):
    """Without QUANT it is Q4_K_M; stdout is the path alone; a second pull downloads nothing."""
    first = invoke("pull", NAME)
    assert first.exit_code == 0, first.stderr
    path = Path(first.stdout.strip())
    assert path.name == "toy-Q4_K_M.gguf"
    assert path.read_bytes() == weights
    assert "downloading Q4_K_M" in first.stderr
    again = invoke("pull", f"https://huggingface.co/{NAME}")
    assert again.stdout == first.stdout
    assert again.stderr == ""
    assert len(hub.downloads()) == 1


def test_run_downloads_once_and_then_asks_nobody(hub, invoke):
    """-hf stands for MODEL; what is in the cache is used without the hub."""
    name = f"{NAME}:q8_0"
    answer = invoke("run", "-hf", name, "-p", "the", "-n", "2", "--kernels", "reference")
    assert answer.exit_code == 0, answer.stderr
    assert answer.stdout
    asked = len(hub.asked)
    assert asked > 0
    assert invoke("info", "-hf", name).exit_code == 0
    assert len(hub.asked) == asked


def test_commands_with_a_second_argument(hub, invoke, tmp_path, home):
    """With -hf the only argument of `tokenize` and `perplexity` is the text; tokens come out of the header alone."""
    said = invoke("tokenize", "-hf", NAME, "the", "--json")
    assert said.exit_code == 0, said.stderr
    assert "is not here; this is by its header on the hub" in said.stderr
    assert not hub.downloads() or left_behind(home) == []
    path = invoke("pull", NAME).stdout.strip()
    assert json.loads(invoke("tokenize", path, "the", "--json").stdout) == json.loads(said.stdout)
    text = tmp_path / "text"
    text.write_text("the " * 40)
    flags = (os.fspath(text), "--window", "16", "--json", "--kernels", "reference")
    named = invoke("perplexity", "-hf", NAME, *flags)
    assert named.exit_code == 0, named.stderr
    assert named.stdout == invoke("perplexity", path, *flags).stdout
    for command in ("tokenize", "perplexity"):
        assert "Missing argument 'TEXT" in invoke(command, "-hf", NAME).stderr
        both = invoke(command, path, "text", "-hf", NAME)
        assert both.exit_code == 2
        assert "leave one of them out" in both.stderr


def test_a_newer_file_comes_with_pull_alone(hub, invoke, weights):
    """-hf takes what is in the cache; `pull` brings what the hub has now, and both names lead to it then."""
    old = invoke("pull", NAME).stdout
    hub.repos[NAME].files["toy-Q4_K_M.gguf"] = weights + bytes(32)
    hub.repos[NAME].commit = "f" * 40
    assert json.loads(invoke("info", "-hf", NAME, "--json").stdout)["path"] == old.strip()
    new = invoke("pull", NAME).stdout
    assert new != old
    assert json.loads(invoke("info", "-hf", NAME, "--json").stdout)["path"] == new.strip()


def test_a_broken_connection_is_taken_up_where_it_broke(hub, invoke, weights, no_pause):
    """After a cut only the rest is asked for, and the file is whole."""
    hub.cuts = [5 << 14, 3 << 14]
    result = invoke("pull", NAME)
    assert result.exit_code == 0, result.stderr
    assert Path(result.stdout.strip()).read_bytes() == weights
    ranges = [asked for _, asked in hub.downloads()]
    assert ranges == ["", f"bytes={5 << 14}-", f"bytes={8 << 14}-"]


def test_a_connection_that_breaks_again_and_again(hub, invoke, home, no_pause):
    """It is given up, nothing of the file stays, and the next pull brings it."""
    hub.cuts = [100] * 6
    fails(invoke("pull", NAME), "broke off", "pull again")
    assert left_behind(home) == []
    assert invoke("pull", NAME).exit_code == 0


def test_split_models_come_whole(hub, invoke, tmp_path, home, no_pause):
    """All parts are one quantisation; a cut in the last one leaves no model, and keeps the others."""
    shape = ToyShape()
    tensors = [(name, "F32", x) for name, x in toy_weights(shape).items()]
    parts = write_shards(
        tmp_path, "toy-BF16", toy_metadata(shape), [tensors[:3], tensors[3:9], tensors[9:]],
        arch="qwen3moe",
    )  # fmt: skip
    hub.repos[NAME].files = {f"BF16/{path.name}": path.read_bytes() for path in parts}
    hub.breaks_on = parts[-1].name
    fails(invoke("pull", f"{NAME}:bf16"), "broke off")
    assert json.loads(invoke("list", "--json").stdout) == {"models": []}
    assert len(left_behind(home)) == 2
    hub.breaks_on = ""
    result = invoke("pull", NAME)
    assert result.exit_code == 0, result.stderr
    assert Path(result.stdout.strip()).name == parts[0].name
    facts = json.loads(invoke("info", "-hf", NAME, "--json").stdout)
    assert (facts["num_files"], facts["supported"]) == (3, True)
    paths = [path for path, _ in hub.downloads()]
    assert [paths.count(f"/cdn/{NAME}/BF16/{part.name}") for part in parts[:2]] == [1, 1]


def test_a_plan_before_the_download(hub, invoke, tmp_path, home, toy, monkeypatch, measuring):
    """`plan -hf` and `info -hf` read headers alone, say so, and agree with what they say of the whole file."""
    monkeypatch.setattr("thermocline.hub.headers.FIRST_FILE_BYTES", 1 << 16)
    flags = ("--vram", "2GiB", "--ram", "1GiB", "--json", "--no-heat")
    planned = invoke("plan", "-hf", NAME, *flags)
    assert planned.exit_code == 0, planned.stderr
    assert "is not here; this is by its header on the hub" in planned.stderr
    assert json.loads(planned.stdout) == json.loads(
        invoke("plan", toy, *flags, "--no-measure").stdout
    )
    told, facts = (
        json.loads(invoke("info", *args, "--json").stdout) for args in (("-hf", NAME), (toy,))
    )
    assert not Path(told.pop("path")).exists()
    facts.pop("path")
    assert told == facts
    assert {asked for _, asked in hub.downloads()} == {"bytes=0-65535"}
    assert left_behind(home) == []
    assert "thermocline pull" in invoke("plan", "-hf", NAME, "--simulate", "uniform").stderr


@pytest.mark.parametrize(
    ("access", "token", "parts"),
    [
        ("open", "hf_wrong", ("refuses the token (HTTP 401)", "HF_TOKEN")),
        ("private", "", ("no such model, or it is private", "hf auth login")),
        ("gated", "", ("is gated", "accept its conditions at", f"/{NAME},")),
        ("gated", VALID_TOKEN, ("is gated", "accept its conditions")),
        ("forbidden", VALID_TOKEN, ("refuses the token (HTTP 403)", "may read this model")),
    ],
)
def test_access_that_is_missing(hub, invoke, monkeypatch, home, access, token, parts):
    """Each refusal says what it is, and where access comes from; nothing is left in the cache."""
    hub.repos[NAME].access = access
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    fails(invoke("pull", NAME), *parts)
    assert left_behind(home) == []


@pytest.mark.parametrize("kept", ["HF_TOKEN", "file"])
def test_a_token_opens_a_private_model(hub, invoke, monkeypatch, home, kept):
    """It is read from HF_TOKEN or from the file of `hf auth login`, and told to the hub alone."""
    hub.repos[NAME].access = "private"
    if kept == "file":
        (home / "hf").mkdir()
        (home / "hf" / "token").write_text(VALID_TOKEN)
    else:
        monkeypatch.setenv("HF_TOKEN", VALID_TOKEN)
    assert invoke("pull", NAME).exit_code == 0
    assert len(hub.downloads()) == 1
    assert not hub.told_cdn_the_token


def test_a_repository_that_is_not_there(hub, invoke):
    """The name is to be checked."""
    fails(invoke("run", "-hf", "acme/nothing", "-p", "x"), "acme/nothing", "check the spelling")


def test_a_quantisation_that_is_not_there(hub, invoke):
    """Those that are there are named, with their sizes; parts of other models are not."""
    result = invoke("pull", f"{NAME}:Q2_K")
    fails(result, "there is no Q2_K, but Q4_K_M (720.19 KiB), Q8_0 (720.25 KiB)")
    hub.repos[NAME].files.pop("toy-Q4_K_M.gguf")
    hub.repos[NAME].files["other-Q8_0.gguf"] = b"GGUF"
    fails(invoke("pull", NAME), "there is no Q4_K_M, but")
    fails(invoke("pull", f"{NAME}:Q8_0"), "2 models fit (other-Q8_0.gguf, toy-Q8_0.gguf)")
    assert invoke("pull", f"{NAME}:other-q8_0.gguf").exit_code == 0


def test_quants_shows_what_there_is_and_what_fits(hub, invoke, monkeypatch):
    """Sizes, and where a model of that size would be, by the memory that `plan` takes."""
    monkeypatch.setattr("thermocline.prefetch.memory.page_cache_room_bytes", lambda: 737_500)
    page = " ".join(invoke("pull", NAME, "--quants").stdout.split())
    assert "Q4_K_M 720.19 KiB 1 fits the memory" in page
    assert "Q8_0 720.25 KiB 1 read from disk: 36 B more" in page
    assert hub.downloads() == []


def test_a_disk_that_is_full_is_seen_before(hub, invoke, home, monkeypatch):
    """Nothing is downloaded that has no room."""
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1 << 19))
    fails(invoke("pull", NAME), "720.19 KiB are to be downloaded", "512.00 KiB free", "rm")
    assert hub.downloads() == []
    assert left_behind(home) == []


def test_a_disk_that_fills_up_meanwhile(hub, invoke, home, monkeypatch):
    """An error of writing is said as such, and no part of a file stays."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        result = invoke("pull", NAME)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    fails(result, os.strerror(errno.EFBIG), "make room")
    assert left_behind(home) == []


def test_a_xet_store_that_fails(hub, invoke, home, monkeypatch):
    """The package for Xet, which the public hub's files come by, raises its own errors; they are said as others are."""
    hub.has_xet = True
    fails(invoke("pull", NAME), "404 Not Found", "pull again")
    assert left_behind(home) == []

    def full(**_: object) -> None:
        raise RuntimeError("Task error: I/O: No space left on device (os error 28)")

    monkeypatch.setattr("huggingface_hub.file_download.xet_get", full)
    fails(invoke("pull", NAME), os.strerror(errno.ENOSPC), "make room")
    assert left_behind(home) == []


@pytest.mark.parametrize("fault", ["bytes", "size"])
def test_a_damaged_file_is_removed(hub, invoke, home, weights, fault):
    """What has another SHA-256 or size than the hub lists is no model."""
    if fault == "bytes":
        hub.spoils = True
    else:
        hub.repos[NAME].listed["toy-Q4_K_M.gguf"] = len(weights) - 1
    fails(invoke("pull", NAME), "toy-Q4_K_M.gguf arrived damaged", "was removed")
    assert left_behind(home) == []


@pytest.mark.parametrize("why", ["offline", "down", "gone"])
def test_without_the_hub_the_cache_is_enough(hub, invoke, monkeypatch, why):
    """What is here is used, with a word on stderr where the hub was to be asked; what is not here is an error."""
    path = invoke("pull", f"{NAME}:Q8_0").stdout
    from huggingface_hub import constants

    if why == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    elif why == "down":
        hub.is_down = True
    else:
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    asked = len(hub.asked)
    quiet = invoke("info", "-hf", f"{NAME}:Q8_0", "--json")
    assert (json.loads(quiet.stdout)["path"], quiet.stderr) == (path.strip(), "")
    assert len(hub.asked) == asked
    # Without a quantisation the hub would have been asked for Q4_K_M.
    for command in (("pull", NAME), ("pull", f"{NAME}:Q8_0")):
        told = invoke(*command)
        assert (told.exit_code, told.stdout) == (0, path)
        assert f"{NAME}:Q8_0 is taken from the cache as it is" in told.stderr
    reason = {"offline": "HF_HUB_OFFLINE", "down": "HTTP 503", "gone": "can not be reached"}[why]
    fails(invoke("run", "-hf", f"{NAME}:Q4_K_M", "-p", "x"), reason)


def test_an_address_that_is_no_hub(hub, invoke):
    """Another server's answers are no traceback."""
    hub.repos["acme/list"] = Repo({})
    hub.odd_answer = b'{"siblings": [{"size": 3}]}'
    fails(invoke("pull", "acme/list"), "answers unlike a hub", "HF_ENDPOINT")
    hub.odd_answer = b"<html>"
    fails(invoke("pull", "acme/list"), "answers unlike a hub", "HF_ENDPOINT")


def test_names_and_sizes_of_a_hostile_repository(hub, invoke, home):
    """Paths that lead out of the cache, and sizes that can not be, are not there; nothing is written outside."""
    weights = hub.repos[NAME].files["toy-Q4_K_M.gguf"]
    bad = (
        "../../toy-Q4_K_M.gguf",
        "/etc/toy-Q4_K_M.gguf",
        "a\\..\\toy-Q4_K_M.gguf",
        "\x1b[2J-Q4_K_M.gguf",
    )
    hub.repos[NAME].files = dict.fromkeys((*bad, "big-Q4_K_M.gguf"), weights)
    hub.repos[NAME].listed = {"big-Q4_K_M.gguf": 1 << 60}
    fails(invoke("pull", NAME), "no GGUF file")
    assert hub.downloads() == []
    hub.repos[NAME].listed = {"big-Q4_K_M.gguf": -5}
    fails(invoke("pull", NAME), "no GGUF file")
    assert left_behind(home) == []


@pytest.mark.slow
def test_an_interrupt_leaves_no_part_of_a_file(weights, start, tmp_path, home):
    """Ctrl-C during a download, in a process with the real settings: 130, no traceback, nothing in the cache."""
    with LocalHub({NAME: Repo({"toy-Q4_K_M.gguf": weights})}) as hub:
        hub.stalled = threading.Event()
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "HF_ENDPOINT": hub.url,
            "HF_HOME": os.fspath(tmp_path / "own"),
        }
        process = start("run", "-hf", NAME, "-p", "the", env=env)
        assert hub.stalled.wait(60)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, b"")
    assert b"Traceback" not in errors
    assert errors.startswith(b"downloading Q4_K_M")
    assert left_behind(tmp_path / "own") == []


@pytest.mark.parametrize("command", ["run", "chat", "serve", "plan", "info", "bench", "logits"])
def test_a_name_in_place_of_a_path_is_answered(invoke, command, tmp_path):
    """What looks like a model's name, and is no file, gets the commands to type."""
    more = ("--tokens", "1", "--out", "x.npy") if command == "logits" else ()
    result = invoke(command, "acme/toy-GGUF:Q8_0", *more)
    assert result.exit_code == 1
    assert f"thermocline {command} -hf acme/toy-GGUF:Q8_0" in result.stderr
    assert "thermocline pull acme/toy-GGUF:Q8_0" in result.stderr


def test_what_is_meant_as_a_path_is_not_taken_for_a_name(invoke, toy, monkeypatch, tmp_path):
    """A missing .gguf file is just missing; a file whose path looks like a name is opened."""
    assert "-hf" not in invoke("info", "models/missing.gguf").stderr
    monkeypatch.chdir(tmp_path)
    (tmp_path / "acme").mkdir()
    (tmp_path / "acme" / "toy").symlink_to(toy)
    assert invoke("info", "acme/toy").exit_code == 0
    assert "thermocline pull acme/other" in invoke("tokenize", "acme/other", "text").stderr


def test_one_model_at_a_time(invoke, toy):
    """MODEL and -hf exclude each other; a command without built-in model wants one of them."""
    both = invoke("info", toy, "-hf", NAME)
    assert (both.exit_code, both.stdout) == (2, "")
    assert "leave one of them out" in both.stderr
    neither = invoke("logits", "--tokens", "1", "--out", "x.npy")
    assert neither.exit_code == 2
    assert "Missing argument" in neither.stderr


@pytest.mark.parametrize("installed", ["2.3.9", "0.36.0", None])
def test_without_the_package(invoke, monkeypatch, installed):
    """Missing or too old: -hf, pull and rm say what to install; list shows what there is without it."""

    def version(name: str) -> str:
        if installed is None:
            raise PackageNotFoundError(name)
        return installed

    monkeypatch.setattr("thermocline.hub.cache.version", version)
    for command in (("pull", NAME), ("rm", NAME), ("info", "-hf", NAME)):
        fails(invoke(*command), "not installed", "pip install 'thermocline-moe[hub]'")
    assert "no models here" in invoke("list").stderr


def put_ollama(folder: Path, name: str, content: bytes, **changes: object) -> Path:
    """Write a model as Ollama keeps it."""
    digest = hashlib.sha256(content).hexdigest()
    layer = {
        "mediaType": "application/vnd.ollama.image.model",
        "digest": f"sha256:{digest}",
        "size": len(content),
    }
    other = {"mediaType": "application/vnd.ollama.image.license", "digest": "sha256:0", "size": 1}
    manifest = folder / "manifests" / name
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": [other, layer | changes]}))
    blob = folder / "blobs" / f"sha256-{digest}"
    blob.parent.mkdir(exist_ok=True)
    blob.write_bytes(content)
    return blob


def test_list_finds_the_models_of_this_machine(hub, invoke, home, toy, weights):
    """The hub's cache, Ollama's blobs by their names there, and LM Studio's folder; the paths can be opened."""
    hub_path = invoke("pull", NAME).stdout.strip()
    blob = put_ollama(home / "ollama", "registry.ollama.ai/library/toy/8b", weights)
    studio = home / ".lmstudio" / "models" / "acme" / "toy-GGUF" / "toy-Q6_K.gguf"
    studio.parent.mkdir(parents=True)
    studio.write_bytes(weights)
    size = len(weights)
    listed = json.loads(invoke("list", "--json").stdout)["models"]
    assert listed == [
        {"name": f"{NAME}:Q4_K_M", "source": "hub cache", "nbytes": size, "path": hub_path},
        {"name": "toy:8b", "source": "Ollama", "nbytes": size, "path": os.fspath(blob)},
        {
            "name": "acme/toy-GGUF/toy-Q6_K.gguf",
            "source": "LM Studio",
            "nbytes": size,
            "path": os.fspath(studio),
        },
    ]
    left = Path(hub_path).resolve().with_name("0123.4567.incomplete")
    left.write_bytes(bytes(2048))
    result = invoke("list")
    page = result.stdout
    assert "take 2.00 KiB; hf cache prune removes them" in result.stderr
    assert "toy:8b" in page
    assert "fits the memory" in " ".join(page.split())
    assert invoke("tokenize", os.fspath(blob), "the").exit_code == 0


def test_rm_removes_what_is_named_and_nothing_else(hub, invoke, home, weights):
    """One quantisation, or all of a repository with --all; never one of several, and never files of others."""
    hub.repos[NAME].files["toy-Q8_0.gguf"] = weights + bytes(32)
    for quant in ("Q4_K_M", "Q8_0"):
        assert invoke("pull", f"{NAME}:{quant}").exit_code == 0
    blob = put_ollama(home / "ollama", "registry.ollama.ai/library/toy/8b", weights)
    fails(invoke("rm", NAME), "there are several", f"{NAME}:Q4_K_M, {NAME}:Q8_0")
    removed = invoke("rm", f"{NAME}:q8_0")
    assert (removed.exit_code, removed.stdout) == (0, "")
    assert removed.stderr == f"removed {NAME}:Q8_0: 720.22 KiB are free again\n"
    names = [model["name"] for model in json.loads(invoke("list", "--json").stdout)["models"]]
    assert names == [f"{NAME}:Q4_K_M", "toy:8b"]
    assert invoke("rm", NAME, "--all").exit_code == 0
    assert left_behind(home) == sorted(["8b", blob.name])
    fails(invoke("rm", "acme/other"), "no such model")
    fails(invoke("rm", "toy:8b"), "no name of a model")


def test_a_pointer_of_git_lfs_is_explained(invoke, tmp_path):
    """`info` and every other command say what the file is, how large the model is, and how to get it."""
    pointer = tmp_path / "toy.gguf"
    pointer.write_text(
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 18556686912\n"
    )
    fails(
        invoke("info", os.fspath(pointer)),
        "Git LFS pointer",
        "a model of 17.28 GiB, which was not downloaded",
        "git lfs pull",
        "thermocline pull",
    )

"""Command lines as users of llama.cpp type them: each does what it means, or says what to type."""

from __future__ import annotations

import shlex
from contextlib import asynccontextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import click
import pytest

from thermocline.cli import cli
from thermocline.cli.llama_flags import ALSO
from thermocline.cli.sources import SettingOption
from thermocline.config import ALL_LAYERS
from thermocline.settings import engine_settings

MODEL = "model.gguf"

# What is typed -> the fields that the command runs with.
DONE = [
    ("run -m MODEL -p hi", {"path": MODEL, "prompt.text": "hi"}),
    ("run -m MODEL -p hi -n 128 -c 4096", {"params.max_tokens": 128, "ctx": 4096}),
    ("run -m MODEL -p hi -n -1", {"params.max_tokens": None}),
    ("run -m MODEL -p hi --n-predict 5 --ctx-size 512", {"params.max_tokens": 5, "ctx": 512}),
    ("run -m MODEL -p hi -ngl 99 -t 8", {"gpu_layers": 99, "threads": 8}),
    ("run -m MODEL -p hi -ngl all", {"gpu_layers": ALL_LAYERS}),
    ("run -m MODEL -p hi --n-gpu-layers 0 --threads 4", {"gpu_layers": 0, "threads": 4}),
    (
        "run -m MODEL -p hi --temp 0.7 --top-k 40 --top-p 0.9 --min-p 0.05 --repeat-penalty 1.1",
        {
            "params.temperature": 0.7,
            "params.top_k": 40,
            "params.top_p": 0.9,
            "params.min_p": 0.05,
            "params.repetition_penalty": 1.1,
        },
    ),
    ("run -m MODEL -p hi -s 42 --typical 0.9", {"params.seed": 42, "params.typical_p": 0.9}),
    ("run -m MODEL -p hi --seed -1", {"params.seed": None}),
    ("run -m MODEL -f PROMPT -n 5", {"prompt.text": "from a file"}),
    ("run -m MODEL -sys 'Be kind.' -p hi -st", {"prompt.chat": "hi", "prompt.system": "Be kind."}),
    ("run -m MODEL -p hi -no-cnv --no-display-prompt", {"prompt.text": "hi"}),
    ("run -m MODEL -p hi -fa -ctk q8_0 -ctv q8_0", {"kv_type": "q8_0"}),
    ("run -m MODEL -p hi -fa on --cache-type-k q8_0", {"kv_type": "q8_0"}),
    ("run -m MODEL -p hi -ub 256", {"prefill_chunk": 256}),
    ("run -m MODEL -p hi -ot 'exps=CPU' -ncmoe 3", {"override_tensor": ("exps=CPU",), "n_cpu_moe": 3}),
    ("run -m MODEL -p hi -cmoe --ignore-eos", {"cpu_moe": True, "params.ignore_eos": True}),
    ("chat -m MODEL -c 8192 --temp 0.6", {"path": MODEL, "ctx": 8192, "params.temperature": 0.6}),
    ("chat -m MODEL -sys 'Be kind.' --jinja", {"system": "Be kind."}),
    ("serve -m MODEL --host 127.0.0.1 --port 8080", {"path": MODEL, "host": "127.0.0.1", "port": 8080}),
    ("serve -m MODEL -a big --api-key k -cb --metrics", {"card.id": "big", "api_keys": ("k",)}),
    ("serve -m MODEL -to 600 --jinja -fa auto --reasoning-format auto", {"request_timeout_s": 600.0}),
    ("bench -m MODEL -p 512 -n 128 -r 5", {"path": MODEL, "plan.num_prompt": 512, "plan.num_decode": 128, "plan.num_repetitions": 5}),
    ("bench -m MODEL -p 64 -n 16 -t 4 -ngl 0 -ctk q8_0 -ctv q8_0 -fa 1 -mmp 1", {"threads": 4, "kv_type": "q8_0", "gpu_layers": 0}),
]  # fmt: skip

# What is typed -> what of the answer says what to type.
REFUSED = [
    ("run -m a.gguf b.gguf -p hi", "MODEL is b.gguf, but -m is a.gguf: give one"),
    ("run -m MODEL -p hi -b 2048", "-ub N (--prefill-chunk N)"),
    ("run -m MODEL -cnv", "thermocline chat MODEL"),
    ("run -m MODEL -p hi -i", "thermocline chat MODEL"),
    ("run -m MODEL -p hi -r User:", "--stop TEXT"),
    ("run -m MODEL -p hi -nkvo", "--trunk-device cpu"),
    ("serve -m MODEL --cache-ram 8192", "--cache-spill 8GiB"),
    ("run -m MODEL -p hi --mlock", "leave it out (--prefetch on"),
    ("run -m MODEL -p hi --no-mmap", "leave it out"),
    ("run -m MODEL -p hi -fa off", "leave -fa out, or type -fa on"),
    ("run -m MODEL -p hi -tb 8", "type -t N"),
    ("run -m MODEL -p hi -ctk q8_0 -ctv f16", "give both the same"),
    ("run -m MODEL -p hi -ctk q4_0", "'f16', 'bf16', 'q8_0', 'f32'"),
    ("run -m MODEL -p hi --device CUDA0", "--trunk-device and --hot-device"),
    ("run -m MODEL -p hi --chat-template chatml", "--chat-template-file FILE"),
    ("run -m MODEL -p hi --mirostat 2", "--temp, --top-k"),
    ("run -m MODEL -p hi -f PROMPT", "leave one out"),
    ("serve -m MODEL -np 4", "--max-requests N"),
    ("serve -m MODEL --temp 0.7", "requests say it: temperature"),
    ("serve -m MODEL -n 100", "requests say max_tokens"),
    ("serve -m MODEL --reasoning-format none", "--reasoning-format auto"),
    ("serve -m MODEL --log-disable", "--quiet"),
    ("chat -m MODEL -cnv", "leave it out"),
    ("chat -m MODEL -p 'You are kind.'", "--system TEXT"),
    ("bench -m MODEL -o json", "--json"),
    ("bench -m MODEL -pg 512,128", "-p for the prompt and -n"),
    ("plan -m MODEL --vram 12", "did you mean 12GiB"),
    ("plan -m MODEL --vram 12000000000", "write 12000000000B for bytes"),
]  # fmt: skip


@pytest.fixture
def ran(monkeypatch) -> dict[str, Any]:
    """What a command was about to run with; none opens a model."""
    held: dict[str, Any] = {}

    @asynccontextmanager
    async def opened(path, config, trace=None, **_):
        held.update(path=path, config=config)
        yield SimpleNamespace(require_template=lambda: None)

    async def run_order(order):
        held.update(path=order.path, config=order.config, params=order.params, prompt=order.prompt)

    async def run_bench(path, plan, config, as_json):
        held.update(path=path, plan=plan, config=config)

    async def run_server(path, config, server, card, *_):
        held.update(path=path, config=config, server=server, card=card)

    monkeypatch.setattr(import_module("thermocline.cli.run"), "_run", run_order)
    monkeypatch.setattr(import_module("thermocline.cli.bench"), "_run", run_bench)
    monkeypatch.setattr(import_module("thermocline.cli.chat"), "open_engine", opened)
    monkeypatch.setattr(
        import_module("thermocline.cli.chat"),
        "_converse",
        lambda _, session, history: held.update(params=session.params, system=session.system),
    )
    monkeypatch.setattr("thermocline.server.app.serve", run_server)
    return held


def _typed(line: str, toy: str, folder) -> list[str]:
    """Return the words of a command line, with files that are there."""
    prompt = folder / "prompt.txt"
    prompt.write_text("from a file\n")
    model = toy if line.startswith("serve") else MODEL
    return [{"MODEL": model, "PROMPT": str(prompt)}.get(word, word) for word in shlex.split(line)]


def _field(held: dict[str, Any], name: str, toy: str) -> object:
    """Return a field by its path, or an engine's or server's setting by its name."""
    first, _, rest = name.partition(".")
    if rest:
        return getattr(held[first], rest)
    if first in held:
        return MODEL if held[first] == toy else held[first]
    if "server" in held and hasattr(held["server"], first):
        return getattr(held["server"], first)
    setting = next(each for each in engine_settings() if each.key == first)
    section = getattr(held["config"], setting.section) if setting.section else held["config"]
    return getattr(section, setting.name)


@pytest.mark.parametrize(("line", "fields"), DONE, ids=[line for line, _ in DONE])
def test_a_line_does_what_it_means(invoke, ran, toy, tmp_path, line, fields):
    """The command runs with what llama.cpp's user asked for; no word is dropped without effect."""
    result = invoke(*_typed(line, toy, tmp_path))
    assert result.exit_code == 0, result.stderr
    assert {name: _field(ran, name, toy) for name in fields} == fields


@pytest.mark.parametrize(("line", "said"), REFUSED, ids=[line for line, _ in REFUSED])
def test_a_line_that_means_nothing_here_says_what_to_type(invoke, ran, toy, tmp_path, line, said):
    """A usage error, before anything is opened."""
    result = invoke(*_typed(line, toy, tmp_path))
    assert result.exit_code in (1, 2)
    assert said in result.stderr
    assert not ran


def test_ours_is_the_name_of_each_setting():
    """Aliases never hide our name: a setting is called after its first long flag."""
    for command in cli.commands.values():
        for option in command.params:
            if isinstance(option, SettingOption):
                assert f"--{option.key.replace('_', '-')}" not in sum(ALSO.values(), ())


def test_no_flag_means_two_things():
    """In no command do two options have one name."""
    for name, command in cli.commands.items():
        flags = [flag for each in command.params for flag in (*each.opts, *each.secondary_opts) if isinstance(each, click.Option)]  # fmt: skip
        assert len(flags) == len(set(flags)), name


@pytest.mark.parametrize("name", ["tokenize", "perplexity"])
def test_the_model_may_be_a_flag_before_another_argument(invoke, toy, tmp_path, name):
    """-m leaves the place of MODEL to what follows it; without that, it says what is missing."""
    assert invoke(name, "-m", toy).stderr.splitlines()[-1].startswith("Error: Missing argument")
    assert "Missing argument 'MODEL'" in invoke(name).stderr
    if name == "tokenize":
        assert invoke(name, "-m", toy, "the").stdout == invoke(name, toy, "the").stdout != ""

"""Flags are made from the config classes: one source of defaults, types, ranges and helps."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import get_type_hints

import click
import pytest
from click.testing import CliRunner

from thermocline.cli import cli
from thermocline.cli.options import engine_options, parse_token_ids, sampling_options
from thermocline.config import EngineConfig
from thermocline.errors import ConfigError
from thermocline.sampling.params import SamplingParams


def _parse(decorator, argument, *args):
    """Return what a command with the decorator receives as `argument`."""
    received = []

    @click.command()
    @decorator
    def command(**values: object) -> None:
        received.append(values[argument])

    result = CliRunner().invoke(command, args)
    assert result.exit_code == 0, result.output
    return received[0]


def test_no_flags_give_the_default_config():
    """A command without flags runs with the config that the library runs with."""
    assert _parse(engine_options(), "config") == EngineConfig()
    assert _parse(sampling_options, "params") == SamplingParams()


def test_engine_flags_arrive_in_their_section():
    """Every engine flag sets its own field and nothing else."""
    config = _parse(
        engine_options(),
        "config",
        *("--ctx", "77", "--prefill-chunk", "8", "--hot-device", "cpu", "--hot-fraction", "0.25"),
        *("--prefetch", "off", "--kernels", "reference"),
    )
    assert config.memory.max_context_tokens == 77
    assert config.scheduler.prefill_chunk_tokens == 8
    assert (config.placement.hot_device, config.placement.hot_fraction) == ("cpu", 0.25)
    assert config.prefetch.mode == "off"
    assert config.kernels == "reference"


def test_any_flagged_field_can_be_offered():
    """A command names the flags that it wants; whatever the config classes flag is known."""
    flags = [field.metadata["flag"] for field in fields(EngineConfig) if field.metadata]
    for kind in get_type_hints(EngineConfig).values():
        if is_dataclass(kind):
            flags += [field.metadata["flag"] for field in fields(kind) if field.metadata]
    assert "--max-requests" in flags
    config = _parse(engine_options(*flags), "config", "--max-requests", "3")
    assert config.scheduler.max_requests == 3


def test_sampling_flags_arrive():
    """Sampling flags set the fields of their names; --stop repeats."""
    params = _parse(
        sampling_options,
        "params",
        *("-n", "5", "--temperature", "0.5", "--top-k", "3", "--top-p", "0.9", "--min-p", "0.1"),
        *("--seed", "4", "--stop", "a", "--stop", "b", "--ignore-eos"),
    )
    assert params == SamplingParams(
        max_tokens=5,
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        seed=4,
        stop=("a", "b"),
        ignore_eos=True,
    )


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--ctx", "0"), "--ctx is 0"),
        (("--hot-fraction", "1.5"), "--hot-fraction is 1.5"),
        (("--n-cpu-moe", "-1"), "--n-cpu-moe is -1"),
        (("-ngl", "-1"), "--gpu-layers is -1"),
        (("-ngl", "few"), "write a number, all or auto"),
        (("--hot", "1:2", "--hot-device", "none"), "give --hot-device"),
        (("--hot-device", "gpu"), "'gpu' is not one of 'auto', 'none'"),
        (("--temperature", "9"), "temperature is 9.0"),
        (("--top-k", "many"), "'many' is not a valid integer"),
        (("--no-such-flag",), "No such option"),
        (("--system", "be kind"), "--system goes with --chat"),
        (("--chat", "hi"), "exactly one of"),
    ],
)
def test_bad_flags_are_usage_errors(invoke, flags, named):
    """A flag that can not be taken ends with exit code 2 and a line that names it."""
    result = invoke("run", "model.gguf", "--prompt", "x", *flags)
    assert result.exit_code == 2
    assert named in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("command", ["run", "bench", "serve"])
def test_what_explain_calls_asked_for_can_be_asked_for(command):
    """`--explain` says "asked for (--prompt-chunks)": each command that chooses has the flags that its choices name."""
    offered = {name for parameter in cli.commands[command].params for name in parameter.opts}
    assert {"--ctx", "--prefill-chunk", "--prompt-chunks", "--speculate"} <= offered


def test_token_ids_are_separated_by_commas_spaces_and_line_ends():
    """Ids can be written by hand or come out of another program."""
    assert parse_token_ids("1, 2\n3\n", "--tokens") == (1, 2, 3)


@pytest.mark.parametrize("text", ["", " ", "1,x", "1.5"])
def test_bad_token_ids_are_refused(text):
    """Anything but integers is an error that names the flag."""
    with pytest.raises(ConfigError, match="--tokens"):
        parse_token_ids(text, "--tokens")


def test_every_command_has_an_example():
    """A newcomer finds something to copy in each help page."""
    runner = CliRunner()
    for name in cli.commands:
        page = runner.invoke(cli, [name, "--help"]).stdout
        assert "Example" in page, name
        assert f"  thermocline {name}" in page or "| thermocline" in page, name
    overview = runner.invoke(cli, ["--help"]).stdout
    assert "..." not in overview.split("Commands:")[1], "a summary is cut off"


@pytest.mark.parametrize(
    ("words", "offered"), [("thermocline ru", "run"), ("thermocline run --hot-d", "--hot-device")]
)
def test_a_shell_completes_commands_and_flags(words, offered):
    """With the lines that docs/commands.md says to put into the shell's file."""
    line = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    env = line | {"_THERMOCLINE_COMPLETE": "bash_complete"}
    shown = CliRunner().invoke(cli, env=env, prog_name="thermocline").stdout
    assert shown == f"plain,{offered}\n"

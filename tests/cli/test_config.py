"""Settings from flags, variables and a file: one rule of which counts, and a command that shows it."""

from __future__ import annotations

import json

import pytest

from thermocline.cli import cli
from thermocline.cli.sources import known_settings
from thermocline.environment import settings_path


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Writes the user's file of settings."""
    path = tmp_path / "settings.toml"
    monkeypatch.setenv("THERMOCLINE_CONFIG", str(path))
    return path


def shown(invoke, *args: str) -> dict[str, tuple[object, str]]:
    """Return value and origin of each setting that `thermocline config` shows."""
    result = invoke("config", "--json", *args)
    assert result.exit_code == 0, result.stderr
    return {each["name"]: (each["value"], each["from"]) for each in json.loads(result.stdout)["settings"]}  # fmt: skip


def test_flag_over_variable_over_file_over_default(invoke, file, monkeypatch):
    """The one rule, and each step of it is named."""
    assert shown(invoke, "run")["ctx"] == (None, "default")
    file.write_text("ctx = 100\nthreads = 3\n")
    assert shown(invoke, "run")["ctx"] == (100, str(file))
    monkeypatch.setenv("THERMOCLINE_CTX", "200")
    assert shown(invoke, "run")["ctx"] == (200, "THERMOCLINE_CTX")
    found = shown(invoke, "run", "-c", "300")
    assert found["ctx"] == (300, "flag")
    assert found["threads"] == (3, str(file))
    assert found["temperature"] == (0.0, "default")


def test_what_is_shown_is_what_a_command_runs_with(invoke, file, toy, monkeypatch):
    """The engine gets it: a context of 96 tokens from the file refuses a longer prompt, as the flag does."""
    file.write_text('ctx = 8\nkernels = "reference"\n')
    result = invoke("run", toy, "-p", "a prompt of more than eight tokens")
    assert result.exit_code == 1
    assert "the context holds 8" in result.stderr
    monkeypatch.setenv("THERMOCLINE_CTX", "64")
    assert invoke("run", toy, "-p", "a prompt", "-n", "1").exit_code == 0


def test_a_table_is_for_one_command(invoke, file):
    """It counts over what stands outside of tables; dashes and underscores are the same."""
    file.write_text('hot-device = "none"\nctx = 100\n[serve]\nctx = 200\nmax_queue = 9\n')
    assert shown(invoke, "serve")["ctx"] == (200, f"{file} [serve]")
    assert shown(invoke, "serve")["max_queue"] == (9, f"{file} [serve]")
    assert shown(invoke, "run")["ctx"] == (100, str(file))
    assert shown(invoke, "run")["hot_device"] == ("none", str(file))
    page = invoke("config").stdout
    assert "ctx (serve)" in page
    assert "ctx (run, chat" in page


def test_lists_and_switches(invoke, file, monkeypatch):
    """Several values are a list in the file, and words in a variable; a switch is true or false."""
    file.write_text('heat = false\nstop = ["a b", "c"]\nignore_eos = true\nhot = "3:1"\n')
    found = shown(invoke, "run")
    assert found["heat"] == (False, str(file))
    assert found["stop"] == (["a b", "c"], str(file))
    assert found["ignore_eos"][0] is True
    assert found["hot"][0] == ["3:1"]
    monkeypatch.setenv("THERMOCLINE_HOT", "3:1 4")
    monkeypatch.setenv("THERMOCLINE_HEAT", "yes")
    found = shown(invoke, "run")
    assert found["hot"] == (["3:1", "4"], "THERMOCLINE_HOT")
    assert found["heat"] == (True, "THERMOCLINE_HEAT")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cts = 1", "there is no setting 'cts': did you mean ctx?"),
        ("[server]\nctx = 1", "there is no command 'server': did you mean serve?"),
        ("[serve]\ntemperature = 1", "there is no setting of serve 'temperature'"),
        ("ctx = ", "can not be read as settings"),
        ("ctx = [1, 2]", "has 2 values: give one"),
        ("ctx = 1979-05-27", "give a text, a number, true or false"),
        ("ctx = true", "'true' is not a valid integer. It is from"),
        ("ctx = 1.5", "'1.5' is not a valid integer. It is from"),
        ('device_memory = "12"', "did you mean 12GiB"),
        ("ctx = 0", "--ctx is 0; it must be at least 1 (settings are also from"),
    ],
)
def test_a_file_of_no_use_is_an_error_that_names_it(invoke, file, text, said):
    """Nothing is ignored, and the line says where to mend it."""
    file.write_text(text)
    result = invoke("run", "model.gguf", "-p", "x")
    assert result.exit_code in (1, 2)
    assert said in result.stderr
    assert str(file) in result.stderr


def test_a_variable_of_no_use_is_named(invoke, monkeypatch):
    """With what it was."""
    monkeypatch.setenv("THERMOCLINE_THREADS", "many")
    result = invoke("run", "model.gguf", "-p", "x")
    assert "'many' is not a valid integer. It is from THERMOCLINE_THREADS." in result.stderr


def test_variables_that_nothing_reads_are_shown_and_keys_are_not(invoke, monkeypatch):
    """A mistyped name is found; a key is not for screens."""
    monkeypatch.setenv("THERMOCLINE_CTXX", "1")
    monkeypatch.setenv("THERMOCLINE_API_KEY", "kept-quiet")
    page = invoke("config").stdout
    assert "Nothing reads the variable THERMOCLINE_CTXX: did you mean THERMOCLINE_CTX?" in page
    assert shown(invoke, "serve")["api_key"] == ("***", "THERMOCLINE_API_KEY")
    assert "kept-quiet" not in page
    assert invoke("config", "tokenize").exit_code == 1


def test_the_file_is_in_the_users_folder(monkeypatch, tmp_path):
    """By the XDG rules; an empty THERMOCLINE_CONFIG is no file."""
    assert settings_path() is None
    monkeypatch.delenv("THERMOCLINE_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert settings_path() == tmp_path / "thermocline" / "config.toml"
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert settings_path() == tmp_path / ".config" / "thermocline" / "config.toml"


def test_a_setting_has_one_meaning_in_all_commands():
    """The file's names are few: each is one flag, which any command that has it means alike."""
    kinds: dict[str, set[object]] = {}
    for name, keys in known_settings(cli).items():
        assert len(keys) == len(set(keys)), name
        for option in cli.commands[name].params:
            if getattr(option, "key", None) in keys:
                kinds.setdefault(option.key, set()).add((type(option.type), option.multiple))
    assert {"ctx", "port", "temperature", "hot_device"} <= kinds.keys()
    mixed = {key for key, found in kinds.items() if len(found) > 1}
    # plan checks ranges by itself, and top has one key.
    assert mixed <= {"ctx", "max_requests", "prefill_chunk", "worker_share", "api_key"}

"""The only reader of environment variables, and the writer of one: folders of this user and of other programs, and settings by variables."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache_folder() -> Path | None:
    """Return the folder for this user's files that can be made again; None for a user without a home.

    THERMOCLINE_CACHE, else thermocline/ in XDG_CACHE_HOME or in ~/.cache. By the XDG rules a relative
    XDG_CACHE_HOME is ignored.
    """
    given = os.environ.get("THERMOCLINE_CACHE")
    return Path(given) if given else _user_folder("XDG_CACHE_HOME", ".cache")


def setting_variables() -> dict[str, str]:
    """Return the variables of the environment whose names begin with THERMOCLINE_."""
    return {name: text for name, text in os.environ.items() if name.startswith("THERMOCLINE_")}


def settings_path() -> Path | None:
    """Return the user's file of settings, which need not be there; None for a user without a home.

    THERMOCLINE_CONFIG (empty: no file), else thermocline/config.toml in XDG_CONFIG_HOME or in ~/.config.
    """
    given = os.environ.get("THERMOCLINE_CONFIG")
    if given is not None:
        return Path(given) if given else None
    folder = _user_folder("XDG_CONFIG_HOME", ".config")
    return None if folder is None else folder / "config.toml"


def user_state_folder() -> Path | None:
    """Return the folder for what this user did, such as lines typed before; None for a user without a home.

    thermocline/ in XDG_STATE_HOME or in ~/.local/state.
    """
    return _user_folder("XDG_STATE_HOME", ".local/state")


def torchrun_ranks() -> tuple[int, int, int] | None:
    """Return this process's rank, how many ranks there are, and how many on this machine; None without torchrun.

    RANK, WORLD_SIZE and LOCAL_WORLD_SIZE count where MASTER_ADDR and MASTER_PORT say where the ranks meet.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    rank, size, address, port = (os.environ.get(name, "") for name in names)
    if not (rank.isdigit() and size.isdigit() and address and port):
        return None
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(rank), int(size), int(local) if local.isdigit() else 1


def local_rank() -> int:
    """Return this process's number among torchrun's on this machine; 0 without torchrun."""
    text = os.environ.get("LOCAL_RANK", "")
    return int(text) if text.isdigit() else 0


def rank_network() -> tuple[str, str | None]:
    """Return where the ranks of torchrun meet, and the network interface that gloo is told to use, if it is."""
    named = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    return os.environ.get("MASTER_ADDR", ""), named or None


def set_gloo_interface(name: str) -> None:
    """Have gloo, which reads this variable alone, use a network interface."""
    os.environ["GLOO_SOCKET_IFNAME"] = name


def _user_folder(variable: str, below_home: str) -> Path | None:
    base = Path(os.environ.get(variable, ""))
    try:
        return (base if base.is_absolute() else Path.home() / below_home) / "thermocline"
    except RuntimeError:
        return None


def ollama_folders() -> tuple[Path, ...]:
    """Return where Ollama keeps models: OLLAMA_MODELS, else this user's folder and that of its service on Linux."""
    given = os.environ.get("OLLAMA_MODELS")
    if given:
        return (Path(given),)
    return (*_below_home(".ollama/models"), Path("/usr/share/ollama/.ollama/models"))


def lm_studio_folders() -> tuple[Path, ...]:
    """Return where LM Studio keeps models, and where earlier versions of it did."""
    return _below_home(".lmstudio/models", ".cache/lm-studio/models")


def _below_home(*paths: str) -> tuple[Path, ...]:
    try:
        return tuple(Path.home() / path for path in paths)
    except RuntimeError:
        return ()  # a user without a home

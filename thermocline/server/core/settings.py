"""A server's settings: address, access, limits, and the model's card.

Knows no aiohttp, so that the command line reads the defaults without importing it.
"""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from thermocline.errors import ConfigError
from thermocline.server.core.access import ANY, host_name, normal_origin

DEFAULT_HOST: Final = "127.0.0.1"
DEFAULT_PORT: Final = 7717

_MAX_PORT: Final = 65535

OnModelChange: TypeAlias = Literal["reopen", "exit"]


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where, to whom and how to serve. Raises ConfigError for values that can not be served."""

    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    """0 picks a free one."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """With any, every route but health and the page needs one of them."""
    is_insecure: bool = False
    """Whether other machines may be served without a key."""
    allowed_hosts: tuple[str, ...] = ()
    """Names besides its own that the Host header may have; "*" is all."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose web pages may call the server; "*" is all."""
    shutdown_timeout_s: float = 30.0
    """How long running answers may go on when the server is told to stop."""
    on_model_change: OnModelChange = "reopen"
    """What to do once the model's file was truncated or overwritten: open it again as soon as it is whole, or end."""
    models: tuple[str, ...] = ()
    """Folders and lists of models, in place of one model."""
    keep_alive_s: float | None = None
    """How long a model stays in memory after its last request; None: five minutes, or for ever if it is the only one."""
    load_timeout_s: float = 300.0
    """How long a request waits until its model is in memory. For a model that is there from the start it does not wait."""
    models_memory_bytes: int | None = None
    """What models may take of the memory together; None for what is available when the server starts."""
    allows_model_changes: bool = False
    """Whether clients may download models from the hub, and remove those of its cache."""
    slot_folder: str | None = None
    """Where prompt caches are saved to and restored from; None refuses both."""
    max_slots_bytes: int = 16 << 30
    """Of all files there."""
    max_connections: int = 512
    max_body_bytes: int = 8 << 20
    max_total_body_bytes: int = 256 << 20
    """Of all bodies that are being received."""
    max_work_bytes: int = 512 << 20
    """What large bodies and answers that are not streamed may take together."""
    header_timeout_s: float = 10.0
    """How long a client may take to send a request's header."""
    body_timeout_s: float = 30.0
    """How long a client may take to send its body."""
    idle_timeout_s: float = 75.0
    """How long a connection may stay open between requests."""
    write_timeout_s: float = 30.0
    """How long a client may leave a full socket unread, before its connection is cut."""
    socket_buffer_bytes: int = 128 << 10
    """Send buffer of a connection; Linux allocates twice as much."""
    max_unread_entries: int = 8192
    """Tokens, their top_logprobs included, by which a client may be behind."""
    request_timeout_s: float | None = None
    """How long an answer may take, from the request's header to the answer's end."""
    open_after_s: float = 1.0
    """A stream whose first token takes longer starts without it. Until it starts, errors are plain responses."""
    ping_after_s: float = 15.0
    """Silence after which a stream sends a ping."""
    any_model: bool = False
    """Whether requests that name another model are served by this one."""
    strict_params: bool = False
    """Whether unknown fields are refused; otherwise they are ignored, and the answer lists them."""
    trust_request_chat_template: bool = False
    """Whether requests may bring a chat template, a program that runs in a separate process."""

    def __post_init__(self) -> None:
        """Check ranges. Raises ConfigError."""
        self._check_listening()
        self._check_names()
        for flag, seconds in (
            ("--shutdown-timeout", self.shutdown_timeout_s),
            (
                "--request-timeout",
                1.0 if self.request_timeout_s is None else self.request_timeout_s,
            ),
            ("--load-timeout", self.load_timeout_s),
        ):
            if not 0 <= seconds < math.inf:
                raise ConfigError(f"{flag} is {seconds}; choose a number of seconds from 0 on")
        for flag, number in (
            ("--max-connections", self.max_connections),
            ("--max-body", self.max_body_bytes),
            ("--slot-save-limit", self.max_slots_bytes),
            (
                "--models-memory",
                1 if self.models_memory_bytes is None else self.models_memory_bytes,
            ),
        ):
            if number < 1:
                raise ConfigError(f"{flag} is {number}; it must be at least 1")

    def _check_names(self) -> None:
        for key in self.api_keys:
            # A key that no header can carry could never match.
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError(
                    "--api-key has a key that is empty or has spaces or other than printable ASCII "
                    "characters: choose another"
                )
        for name in self.allowed_hosts:
            if name != ANY and host_name(name) is None:
                raise ConfigError(
                    f"--allowed-hosts has {name!r}: give names such as box.example.org"
                )
        for origin in self.cors_origins:
            if origin != ANY and normal_origin(origin) is None:
                raise ConfigError(
                    f"--cors-origins has {origin!r}: give origins such as https://chat.example.org"
                )

    def _check_listening(self) -> None:
        if not is_loopback(self.host):
            try:
                ipaddress.ip_address(self.host)
            except ValueError:
                raise ConfigError(
                    f"--host is {self.host!r}: give one of this machine's addresses, such as 0.0.0.0 "
                    "for all of them"
                ) from None
            if not self.api_keys and not self.is_insecure:
                raise ConfigError(
                    f"--host is {self.host!r}, which other machines can reach, and there is no API "
                    "key: set one with THERMOCLINE_API_KEY or --api-key-file, or give --insecure if "
                    "everybody who can reach it may use it"
                )
        if not 0 <= self.port <= _MAX_PORT:
            raise ConfigError(
                f"--port is {self.port}; choose 0 to {_MAX_PORT} (0 picks a free one)"
            )

    @property
    def bind_host(self) -> str:
        """The address to listen at. "localhost" stands for several, each with another free port."""
        return DEFAULT_HOST if self.host.lower() == "localhost" else self.host

    def url(self, port: int) -> str:
        """Return the address for people and clients, given the port that was bound."""
        host = f"[{self.bind_host}]" if ":" in self.bind_host else self.bind_host
        return f"http://{host}:{port}"

    def admits(self, host_header: str) -> bool:
        """Whether a request with this Host header is meant for this server.

        A web page whose name resolves to this machine (DNS rebinding) sends that name, so only known names are
        admitted. Addresses can not be rebound: a server that listens beyond this machine admits any.
        """
        name = host_name(host_header)
        if name is None:
            return False
        known = (self.host.lower(), *(host.lower() for host in self.allowed_hosts))
        if name in known or ANY in known or is_loopback(name):
            return True
        return not is_loopback(self.host) and _is_address(name)


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What clients are shown of the model file. quant: the format of most of its bytes, as "Q4_K"."""

    id: str
    num_parameters: int
    total_bytes: int
    quant: str
    architecture: str = ""


def is_loopback(host: str) -> bool:
    """Whether the host is a loopback address or a localhost name."""
    name = host.lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    return _is_address(name) and ipaddress.ip_address(name).is_loopback


def keys_in_file(text: str) -> tuple[str, ...]:
    """Return the API keys of a key file: one a line; empty lines and those with # in front are skipped.

    Raises ConfigError for a file without any.
    """
    lines = (line.strip() for line in text.splitlines())
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError("--api-key-file has no keys: write one on each line")
    return keys


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True

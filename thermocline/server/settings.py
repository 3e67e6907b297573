"""What a server is told: where to listen, its limits, and which model it shows. Knows no aiohttp, so that
the command line can read the defaults before it is needed.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Final

from thermocline.errors import ConfigError

DEFAULT_HOST: Final = "127.0.0.1"
DEFAULT_PORT: Final = 7717
DEFAULT_SHUTDOWN_TIMEOUT_S: Final = 30.0

_MAX_PORT: Final = 65535
_HOST_HEADER: Final = re.compile(
    r"(?:\[(?P<six>[0-9a-f:.]+)\]|(?P<name>[^:/@\[\]\s]+))(?::[0-9]*)?", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where and how to serve. Anything that can not be served is a ConfigError."""

    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    """0 picks a free one."""
    shutdown_timeout_s: float = DEFAULT_SHUTDOWN_TIMEOUT_S
    """How long running answers may go on when the server is told to stop."""
    max_body_bytes: int = 32 << 20
    body_timeout_s: float = 30.0
    """How long a client may take to send its body."""
    open_after_s: float = 1.0
    """A stream whose first token takes longer starts without it; until then, errors are plain answers."""
    ping_after_s: float = 15.0
    """Silence after which a stream says that it is alive."""
    any_model: bool = False
    """Whether requests that name another model are served by this one."""
    strict_params: bool = False
    """Whether fields that nobody knows are refused; else they are ignored, and the answer says so."""
    trust_request_chat_template: bool = False
    """Whether requests may bring a chat template, a program that runs in a process of its own."""

    def __post_init__(self) -> None:
        """Check ranges. Raises ConfigError."""
        if not is_loopback(self.host):
            raise ConfigError(
                f"--host is {self.host!r}: API keys do not exist yet in this version, so it serves this "
                "machine only; use 127.0.0.1, ::1 or localhost, and reach it from elsewhere through "
                "an SSH tunnel"
            )
        if not 0 <= self.port <= _MAX_PORT:
            raise ConfigError(
                f"--port is {self.port}; choose 0 to {_MAX_PORT} (0 picks a free one)"
            )
        if not 0 <= self.shutdown_timeout_s < float("inf"):
            raise ConfigError(
                f"--shutdown-timeout is {self.shutdown_timeout_s}; choose a number of seconds from 0 on"
            )

    @property
    def bind_host(self) -> str:
        """The address to listen at; a name would stand for several, each with its own free port."""
        return DEFAULT_HOST if self.host.lower() == "localhost" else self.host

    def url(self, port: int) -> str:
        """Return the address for people and clients, given the port that was bound."""
        host = f"[{self.bind_host}]" if ":" in self.bind_host else self.bind_host
        return f"http://{host}:{port}"

    def admits(self, host_header: str) -> bool:
        """Whether a request with this Host header is meant for this server.

        A web page whose name was made to point at this machine sends its own name.
        """
        match = _HOST_HEADER.fullmatch(host_header.strip())
        if match is None:
            return False
        name = match["six"] or match["name"]
        return name.lower() == self.host.lower() or is_loopback(name)


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What clients are shown of the model file. quant: the format of most of its bytes, as "Q4_K"."""

    id: str
    num_parameters: int
    total_bytes: int
    quant: str


def is_loopback(host: str) -> bool:
    """True for addresses that only this machine can reach, and for the names that always mean them."""
    name = host.lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False

"""Where a server may listen, and which Host headers it takes for its own."""

from __future__ import annotations

import pytest

from thermocline.errors import ConfigError
from thermocline.server.settings import ServerConfig, is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.8.7", "::1", "localhost", "LocalHost"])
def test_loopback_is_served(host):
    """Every way to name this machine is accepted."""
    assert is_loopback(ServerConfig(host=host).host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org", "", "127.1"])
def test_other_addresses_are_refused_with_the_reason(host):
    """There are no API keys yet, and the error says so."""
    with pytest.raises(ConfigError, match="API keys do not exist yet"):
        ServerConfig(host=host)


@pytest.mark.parametrize(
    "fields", [{"port": -1}, {"port": 65536}, {"shutdown_timeout_s": -1.0}], ids=str
)
def test_ranges_are_checked(fields):
    """The error names the flag."""
    with pytest.raises(ConfigError, match="--"):
        ServerConfig(**fields)


def test_a_time_that_is_no_number_is_refused():
    """NaN and infinity would never end."""
    for value in (float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="--shutdown-timeout"):
            ServerConfig(shutdown_timeout_s=value)


@pytest.mark.parametrize(
    ("header", "is_ours"),
    [
        ("127.0.0.1", True),
        ("127.0.0.1:80", True),
        ("localhost:", True),
        ("LOCALHOST:7717", True),
        ("app.localhost:1", True),
        ("[::1]:7717", True),
        ("[::1]", True),
        ("::1", False),
        ("example.org", False),
        ("localhost.example.org", False),
        ("example.org:127.0.0.1", False),
        ("localhost@example.org", False),
        ("[::1]example.org", False),
        ("", False),
    ],
)
def test_host_headers(header, is_ours):
    """Loopback names and addresses with any port are ours, everything else is not."""
    assert ServerConfig().admits(header) is is_ours


def test_urls_can_be_opened():
    """The name localhost becomes the one address that is bound; IPv6 gets its brackets."""
    assert ServerConfig(host="localhost").url(5) == "http://127.0.0.1:5"
    assert ServerConfig(host="::1").url(5) == "http://[::1]:5"

"""Where the server is that scripts/clients.sh has started, and what its model is called."""

from __future__ import annotations

import json
import os
import urllib.request

import pytest


@pytest.fixture(scope="session")
def url():
    """The server's address."""
    address = os.environ.get("THERMOCLINE_CLIENTS_URL")
    if address is None:
        pytest.skip("there is no server: these tests run by `make clients`")
    return address


@pytest.fixture(scope="session")
def model(url):
    """The name of the one model."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as response:
        return json.load(response)["data"][0]["id"]

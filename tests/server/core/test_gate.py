"""Keys, origins and headers over HTTP: every route but health wants the key, whoever asks."""

from __future__ import annotations

import logging

import pytest

from tests.server.live import CHAT, HELLO, TEXT, live

KEY = "sk-of-the-test"
BEARER = {"Authorization": f"Bearer {KEY}"}
PAGE = "https://chat.example.org"


@pytest.mark.slow
async def test_every_route_but_health_wants_a_key(toy, caplog):
    """401 in the interface's shape for each route of the application, and no key in any log."""
    caplog.set_level(logging.DEBUG)
    async with live(toy, api_keys=("sk-other", KEY)) as server:
        client = server.client
        routes = {
            (route.method, route.resource.canonical.replace("{id}", "x"))
            for route in server.server.app.router.routes()
        }
        assert ("POST", CHAT) in routes
        for method, path in sorted(routes):
            wrong = {"Authorization": "Bearer sk-of-the-tes"}
            async with client.request(method, path, headers=wrong) as response:
                is_open = path in ("/health", "/v1/health", "/", "/docs") or path.startswith(
                    "/page/"
                )
                assert response.status == (200 if is_open else 401), path
                if not is_open and method != "HEAD":
                    assert "error" in await response.json()
                    assert response.headers["WWW-Authenticate"]
        async with client.get("/nothing") as response:
            assert response.status == 401
        async with client.get("/v1/models", headers={"x-api-key": KEY}) as response:
            assert response.status == 200
        fields = {"messages": HELLO, "max_tokens": 1}
        async with client.post(CHAT, json=fields, headers=BEARER) as response:
            assert response.status == 200
        async with client.get("/metrics", headers=BEARER) as response:
            assert KEY not in await response.text()
    assert KEY not in caplog.text


async def test_the_page_opens_without_a_key(toy):
    """Its files hold nothing of the model, and it asks for the key itself; all else wants one."""
    async with live(toy, api_keys=(KEY,)) as server:
        for path in ("/", "/page/page.js"):
            async with server.client.get(path) as response:
                assert response.status == 200
        for path in ("/events", "/experts", "/page", "/trace/last"):
            async with server.client.get(path) as response:
                assert (response.status, response.headers["WWW-Authenticate"]) == (401, "Bearer")


async def test_pages_of_other_origins_are_refused(toy):
    """Without --cors-origins: no preflight passes, no POST is served, no answer can be read."""
    async with live(toy) as server:
        client = server.client
        asks = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
        async with client.options(CHAT, headers=asks) as response:
            assert response.status == 405
        for origin in (PAGE, "null"):
            fields = {"json": {"messages": HELLO}, "headers": {"Origin": origin}}
            async with client.post(CHAT, **fields) as response:
                assert response.status == 403
                assert (await response.json())["error"]["code"] == "origin_not_allowed"
        async with client.get("/v1/models", headers={"Origin": PAGE}) as response:
            assert not [name for name in response.headers if name.startswith("Access-Control")]
            assert response.headers["Cross-Origin-Resource-Policy"] == "same-origin"
        own = {"Origin": server.server.url}
        fields = {"json": {"prompt": "a", "max_tokens": 1}, "headers": own}
        async with client.post(TEXT, **fields) as response:
            assert response.status == 200


async def test_pages_of_listed_origins_are_served(toy):
    """Preflights need no key; answers, streams and errors can be read, by this origin alone."""
    async with live(toy, api_keys=(KEY,), cors_origins=(PAGE,)) as server:
        client = server.client
        asks = {
            "Origin": PAGE,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
        }
        async with client.options(CHAT, headers=asks) as response:
            assert response.status == 204
            assert response.headers["Access-Control-Allow-Origin"] == PAGE
            assert response.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
        async with client.options(CHAT, headers=asks | {"Origin": "https://evil"}) as response:
            assert response.status == 401
            assert "Access-Control-Allow-Origin" not in response.headers
        for stream in (False, True):
            fields = {"prompt": "a", "max_tokens": 1, "stream": stream}
            headers = BEARER | {"Origin": PAGE}
            async with client.post(TEXT, json=fields, headers=headers) as response:
                assert response.status == 200
                assert response.headers["Access-Control-Allow-Origin"] == PAGE
                assert response.headers["Vary"] == "Origin"
                assert "Access-Control-Allow-Credentials" not in response.headers
        async with client.post(TEXT, json={}, headers={"Origin": PAGE}) as response:
            assert response.status == 401
            assert response.headers["Access-Control-Allow-Origin"] == PAGE


async def test_holders_of_different_keys_share_no_prompts(toy):
    """What one of them asked is computed anew for the other; with one key alone it is shared."""
    asked = {"prompt": "a" * 64, "max_tokens": 1}

    async def cached(server, key: str, **fields: object) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        async with server.client.post(TEXT, json=asked | fields, headers=headers) as response:
            usage = (await response.json())["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    async with live(toy, api_keys=("first", "second")) as server:
        assert await cached(server, "first") == 0
        assert await cached(server, "second") == 0
        assert await cached(server, "first") > 0
        assert await cached(server, "first", cache_salt="own") == 0
    async with live(toy, api_keys=(KEY,)) as server:
        assert await cached(server, KEY) == 0
        assert await cached(server, KEY) > 0


async def test_more_names_of_the_server(toy):
    """--allowed-hosts adds a name; others are refused still."""
    async with live(toy, allowed_hosts=("box.example.org",)) as server:
        for host, status in (("box.example.org:7717", 200), ("example.org", 403)):
            async with server.client.get("/health", headers={"Host": host}) as response:
                assert response.status == status


@pytest.mark.parametrize("path", ["/health", "/nothing", "/metrics"])
async def test_every_response_forbids_guessing_its_type(toy, path):
    """Good or bad, no browser takes an answer for a page or a program."""
    async with live(toy) as server, server.client.get(path) as response:
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert response.headers["X-Request-Id"].startswith("req_")

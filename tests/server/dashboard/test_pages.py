"""The page's files: complete, cached by their tags, and free of what a strict policy forbids."""

from __future__ import annotations

import re

import pytest

from tests.server.live import live
from thermocline.server.dashboard.pages import FILES_PATH, PAGE_FILES, PAGES, load_page_files

FILES = load_page_files()


@pytest.mark.slow
async def test_every_file_is_served_with_its_tag(toy):
    """200 with the right type; 304 for whoever has it; a policy on the page; HEAD works too."""
    async with live(toy) as server:
        for path in (*PAGES, *(FILES_PATH + name for name in PAGE_FILES)):
            async with server.client.get(path) as response:
                assert response.status == 200
                tag = response.headers["ETag"]
                assert response.headers["X-Content-Type-Options"] == "nosniff"
                assert await response.read()
            async with server.client.get(path, headers={"If-None-Match": tag}) as response:
                assert (response.status, await response.read()) == (304, b"")
            async with server.client.head(path) as response:
                assert (response.status, response.headers["ETag"]) == (200, tag)
        for path in PAGES:
            async with server.client.get(path) as response:
                policy = response.headers["Content-Security-Policy"]
                assert "script-src 'self'; style-src 'self'" in policy
                assert "default-src 'none'" in policy


def test_the_pages_load_what_is_served_and_nothing_else():
    """Each src and href is one of the files or a page, each file is used, and there is no code in a page."""
    used = set()
    for name in PAGES.values():
        page = FILES[name].content.decode()
        used |= set(re.findall(r'(?:src|href)="(/[^"]*)"', page))
        assert not re.search(r"<style|<script(?! src)|\son\w+=|\sstyle=", page)
    assert used == {*PAGES, "/openapi.json", *(FILES_PATH + name for name in PAGE_FILES)}


def test_the_scripts_do_nothing_that_the_policy_forbids():
    """No markup made of text, no code made of text, no address of another place."""
    for name, file in FILES.items():
        text = file.content.decode()
        forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function"
        assert not re.search(forbidden, text), name
        addresses = set(re.findall(r"https?://[^\s\"']+", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, name

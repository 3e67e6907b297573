"""The simulated figures that the documentation quotes are what the program gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.ranks import CPU, DECODE, GPU, LARGE, LINKS, PROMPTS, SMALL, Case, first, row

PAGE = Path(__file__).parents[2] / "docs" / "results" / "ranks.md"


def section(title):
    """The page's lines from a heading to the next."""
    _, _, rest = PAGE.read_text().partition(f"## {title}\n")
    return rest.partition("\n## ")[0].splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "machine", "link", "num_ranks", "work", "title"),
    [
        (SMALL, CPU, LINKS[0], 2, DECODE, "Qwen3-30B-A3B (17.6 GB of experts), CPU, requests"),
        (SMALL, GPU, LINKS[2], 8, DECODE, "Qwen3-30B-A3B (17.6 GB of experts), GPU, requests"),
        (LARGE, CPU, LINKS[1], 4, PROMPTS, "Qwen3-235B-A22B (137.7 GB of experts), CPU, prompts"),
    ],
)
def test_the_page_has_what_the_simulation_gives(model, machine, link, num_ranks, work, title):
    """Lines of the page, computed again."""
    expected = row(Case(model, machine, link, num_ranks), work)
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in section(title)]
    assert expected in lines


def test_where_something_begins_to_win():
    """The first number from which on all are won; none where the last is not."""
    assert first((1, 2, 4), (True, False, True)) == "4"
    assert first((1, 2, 4), (False, True, True)) == "2"
    assert first((1, 2, 4000), (False, False, True)) == "4,000"
    assert first((1, 2, 4), (True, True, False)) == "-"

"""Quoted figures are those of the files: the newest fit run, whole, never two runs at once, and never a guess."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import pipeline_overhead, result_tables, results
from benchmarks.measure import Row, write_rows
from benchmarks.result_rows import Over, Pick, quotable, read_runs
from benchmarks.result_tables import PAGES, Line, Sentence, Settings, Table
from benchmarks.sides import every_setting

FACTS = {
    "run": "1", "taken": "2026-01-01T10:00Z", "commit": "abc1234", "cpu": "A", "cores": "2", "memory_gib": "8.0",
    "cpu_flags": "avx2 avx512f avx512_vnni avx512_bf16", "foreign_cores": "0.02",
}  # fmt: skip
RATIO = Line(
    "speed", "rows",
    {"ours": Pick("c", "us", "speed"), "theirs": Pick("c", "them", "speed")},
    ("{ours:.1s}", "{theirs:.0}"),
)  # fmt: skip
TABLE = Table(("", "ours", "theirs"), (RATIO,))
EMPTY = "# Page\n\n<!-- results: t -->\n<!-- end -->\n\nmore\n"


def rows(ours=(3.0, 1.0, 2.0), theirs=(5.0,)):
    return [
        Row("b", "c", "us", "speed", "tokens/s", ours, "mine"),
        Row("b", "c", "them", "speed", "tokens/s", theirs),
    ]


class Page:
    """A folder with one page and one file of results."""

    def __init__(self, folder, entry=TABLE):
        self.folder, self.pages = folder, {"page.md": {"t": entry}}
        self.path = folder / "page.md"
        self.path.write_text(EMPTY)

    def add(self, found=None, **facts):
        write_rows(self.folder / "rows.csv", rows() if found is None else found, FACTS | facts)

    def run(self, *flags):
        place = ("--root", str(self.folder), "--results", str(self.folder))
        return results.main([*place, *flags], pages=self.pages)

    @property
    def text(self):
        return self.path.read_text()


@pytest.fixture
def page(tmp_path):
    return Page(tmp_path)


def test_the_committed_pages_are_what_the_files_say(capsys):
    """README.md and docs/benchmarks.md: `make results` would change nothing."""
    assert results.main(["--check"]) == 0, capsys.readouterr().out


def test_a_table_is_written_once_and_checked(page, capsys):
    """Median and extremes, the machine below; a page that says something else fails until it is written again."""
    page.add()
    assert page.run("--check") == 1
    assert page.text == EMPTY
    assert page.run() == 0
    assert "| speed | 2.0 (1.0 to 3.0) |      5 | 2026-01-01, abc1234, A |" in page.text
    assert "Machines: A: A, 2 cores, 8.0 GiB, AVX-512 VNNI + BF16." in page.text
    assert page.text.startswith("# Page\n")
    assert page.text.endswith("\n\nmore\n")
    assert page.run("--check") == 0
    page.path.write_text(page.text.replace("2.0 (1.0", "2.5 (1.0"))
    capsys.readouterr()
    assert page.run("--check") == 1
    assert "run make results" in capsys.readouterr().out


UNFIT = [
    {"commit": "abc1234-dirty"},
    {"commit": "unknown"},
    {"foreign_cores": "0.11"},
    {"foreign_cores": ""},
]


@pytest.mark.parametrize("unfit", UNFIT, ids=str)
def test_an_unfit_run_is_never_quoted(page, unfit, capsys):
    """Not measured where there is no other; the older fit one where there is."""
    page.add(rows((9.0,), (9.0,)), run="2", taken="2026-02-02T10:00Z", **unfit)
    assert page.run() == 0
    assert "not measured" in page.text
    assert "9" not in page.text
    assert "not measured: t: speed" in capsys.readouterr().out
    page.add()
    assert page.run() == 0
    assert "2026-01-01, abc1234, A" in page.text
    assert "9" not in page.text


def test_other_programs_do_not_disturb_a_virtual_clock(page):
    """A replay has the same figures on a busy machine; a dirty commit is unfit all the same."""
    page.add(clock="virtual", foreign_cores="1.75")
    assert page.run() == 0
    assert "2.0 (1.0 to 3.0)" in page.text
    run = read_runs(page.folder / "rows.csv")[0]
    assert not run.refusal
    assert replace(run, facts={**run.facts, "commit": "x-dirty"}).refusal


@pytest.mark.parametrize("is_last", [True, False])
def test_the_newest_run_counts_wherever_it_stands(page, is_last):
    """By its time, not by its place in the file; of one minute, the later one."""
    newer = {"run": "2", "taken": "2026-01-02T09:00Z"}
    if not is_last:
        page.add(rows((7.0,)), **newer)
    page.add()
    if is_last:
        page.add(rows((7.0,)), **newer)
    page.run()
    assert "| speed |  7.0 |" in page.text
    page.add(rows((8.0,)), **newer | {"run": "3"})
    page.run()
    assert "| speed |  8.0 |" in page.text


def test_the_two_sides_are_of_one_run(page):
    """A newer run with one side alone is passed over, and its row is not put beside the other run's."""
    page.add()
    page.add(rows((9.0,))[:1], run="2", taken="2026-01-02T10:00Z")
    page.add(rows(theirs=(8.0,))[1:], run="3", taken="2026-01-02T10:00Z")
    page.run()
    assert "| speed | 2.0 (1.0 to 3.0) |      5 |" in page.text


def test_runs_that_can_not_be_told_apart_are_not_quoted(page):
    """Old files name no run: two of one minute with equal facts would be mixed."""
    page.add(run="")
    page.add(rows((9.0,)), run="")
    assert "told apart" in read_runs(page.folder / "rows.csv")[0].refusal
    page.run()
    assert "not measured" in page.text


def test_each_line_names_its_machine(page):
    """Two lines from two machines have two letters."""
    other = replace(RATIO, label="other", file="more")
    page.pages["page.md"]["t"] = replace(TABLE, lines=(RATIO, other))
    page.add()
    write_rows(page.folder / "more.csv", rows(), FACTS | {"cpu": "B", "cpu_flags": "avx2"})
    page.run()
    assert "abc1234, A |" in page.text
    assert "abc1234, B |" in page.text
    assert "A: A, 2 cores, 8.0 GiB, AVX-512 VNNI + BF16; B: B, 2 cores, 8.0 GiB, AVX2." in page.text


def test_routings_are_different_rows(page):
    """A figure is of the routing that its line names."""
    both = [
        replace(rows()[0], values=(float(n),), routing=name) for n, name in ((1, "x"), (2, "y"))
    ]
    pick = Pick("c", "us", "speed", routing="y")
    page.pages["page.md"]["t"] = Table(("", "v"), (Line("y", "rows", {"v": pick}, ("{v:.0}",)),))
    page.add(both)
    page.run()
    assert "| y | 2 |" in page.text


def test_a_sentence_quotes_a_quotient(tmp_path):
    """Of two medians of one run, with the machine; else it says that there is nothing."""
    share = Over(Pick("c", "us", "speed"), Pick("c", "them", "speed"), 100)
    page = Page(tmp_path, Sentence("share", "rows", {"v": share}, "It keeps {v:.0} %"))
    page.run()
    assert "\n  not measured.\n" in page.text
    page.add()
    page.run()
    words = " ".join(page.text.split())
    assert "It keeps 40 % (A, 2 cores, 8.0 GiB, AVX-512 VNNI + BF16; 2026-01-01, abc1234)." in words


def llama_rows(settings):
    tuning = [
        Row("b", case, "llama.cpp", "speed, tuning", "tokens/s", (speed, 1.0), str(setting))
        for case, ubatches in (("prefill 512", (512,)), ("prefill 2048", (512, 2048)), ("decode at 0", (512,)))
        for speed, setting in enumerate(settings, 10)
        if setting.ubatch in ubatches
    ]  # fmt: skip
    pairs = [
        Row("b", case, side, "speed", "x", (2.0,))
        for case in ("prefill 512", "prefill 2048", "decode at 0")
        for side in ("thermocline", "llama.cpp", "ratio")
    ]
    return [*tuning, *pairs]


def test_llama_s_best_is_the_best_of_all_settings(tmp_path):
    """A run in which one setting was not tried is not quoted; with all, the table has each, the best in bold."""
    entries = PAGES["docs/benchmarks.md"]
    line, settings = entries["against-llama"].lines[1], entries["against-llama-settings"]
    assert line.label == "prompt of 2048"
    everything = every_setting((False, True), (512, 2048))
    page = Page(tmp_path, replace(settings, line=replace(settings.line, file="rows")))
    page.add(llama_rows(everything[:-1]))
    (run,) = quotable(read_runs(page.folder / "rows.csv"))
    assert not all(need.of(run) for need in line.needs)
    page.run()
    assert "not measured" in page.text
    page.add(llama_rows(everything), run="2")
    page.run()
    squeezed = " ".join(page.text.split())
    assert "| repacked, flash attention, ubatch 2048 | | **17.0** | |" in squeezed
    assert page.text.count("**") == 2 * 3


@pytest.mark.parametrize(
    "text",
    ["<!-- results: t -->", "nothing", EMPTY + EMPTY, "<!-- results: u --><!-- end -->"],
    ids=["no end", "no block", "twice", "unknown"],
)
def test_a_page_that_does_not_fit_is_left_alone(page, text, capsys):
    """Status 2 and what does not fit, and not a byte written."""
    page.path.write_text(text)
    assert page.run() == 2
    assert page.text == text
    assert "page.md: " in capsys.readouterr().out


def test_every_entry_says_what_needs_a_figure():
    """Lines and sentences show each row that they pick; limits are those that the benchmark judges by."""
    shown = []
    for entries in PAGES.values():
        for entry in entries.values():
            match entry:
                case Table():
                    shown += [("".join(line.cells), line.picks) for line in entry.lines]
                case Sentence():
                    shown.append((entry.text, entry.picks))
                case Settings():
                    assert entry.line.needs
    for text, picks in shown:
        assert all(f"{{{name}:" in text for name in picks), text
    assert {case: f"{us:g}" for case, us in pipeline_overhead.MAX_US.items()} == dict(
        result_tables.LIMITS
    )

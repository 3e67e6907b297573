"""Long texts: slices give the ids of the whole, within a memory that the text does not make larger."""

from __future__ import annotations

import random
import time
import tracemalloc
from itertools import chain

import pytest

from tests.unit.text.vocabularies import train_pieces
from thermocline.errors import PromptTooLongError, RequestError
from thermocline.text.tokenization.pretokenizers import PRE_TOKENIZERS
from thermocline.text.tokenization.slices import SLICE_CHARS, TextSlicer
from thermocline.text.tokenizer import Tokenizer

PARTS = (
    *("a", "aB", "word", "fooBar", "it's", "'LL", "é", "ß", "नमस्ते", "漢字", "かな", "안녕", "ʰʲ"),
    *("1", "12", "1234", "٣٤٥", "²", "½", " ", "  ", "\n", "\r\n", "\t", "\u00a0", " \n", "\n  "),
    *(
        "!",
        "...",
        "//",
        "<",
        "<sentinel:12>",
        "<sentinel:",
        "IMGIMGAAZ",
        "'",
        "👍",
        "\u0301",
        "_",
        "$",
    ),
)
DISTINCT = {
    (pre.patterns, pre.ignore_merges, pre.is_raw): name for name, pre in PRE_TOKENIZERS.items()
}


def texts(seed, count):
    """Yield texts of runs: of one part again and again, and of parts that alternate."""
    rng = random.Random(seed)
    for _ in range(count):
        runs = []
        while sum(map(len, runs)) < 260:
            some = rng.choices(PARTS, k=rng.choice([1, 1, 2, 3, 6]))
            runs.append("".join(rng.choices(some, k=rng.choice([1, 2, 8, 40, 90]))))
        yield "".join(runs)


@pytest.mark.parametrize("name", DISTINCT.values())
def test_slices_give_the_ids_of_the_whole(vocabulary, name):
    """Wherever a slice of 24 to 99 characters ends, and however text is cut into words."""
    tokenizer = Tokenizer(vocabulary.data(name))
    slicer = tokenizer._engine._table._slicer
    num_slices = 0
    for number, text in enumerate(texts(len(name), 40)):
        slicer._slice_chars = SLICE_CHARS
        whole = list(chain(*tokenizer._engine.encode(text)))
        slicer._slice_chars = 24 + number % 76
        parts = list(tokenizer._engine.encode(text))
        num_slices += len(parts)
        assert list(chain(*parts)) == whole, (slicer._slice_chars, text)
    assert num_slices > 40


def test_a_long_text_takes_the_memory_of_a_slice(tokenizer):
    """Digits, each a token: they come slice by slice, and 131,072 leave nothing behind but their ids."""
    text = "7" * (1 << 17)
    sizes = [len(ids) for ids in tokenizer._engine.encode(text)]
    assert sum(sizes) == len(text)
    assert max(sizes) <= SLICE_CHARS
    tracemalloc.start()
    for _ in tokenizer._engine.encode(text):
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * SLICE_CHARS * 8


def test_a_text_without_a_cut_is_refused(tokenizer):
    """One word of more than half a million letters would take hundreds of megabytes; a shorter one is encoded."""
    engine = tokenizer._engine._table._slicer._engine
    slicer = TextSlicer(engine, digits_are_local=True, slice_chars=64, max_uncut_chars=1024)
    word = "abc" * 340
    assert [*chain(*slicer.encode(word + " a"))] == tokenizer.encode(word + " a")
    with pytest.raises(RequestError, match="more than 1024 characters without a place to cut"):
        [*slicer.encode("abc" * 350)]


@pytest.mark.parametrize("part", ["abc", "<a0"], ids=["one run", "one word"])
def test_what_has_no_cut_is_encoded_three_times_at_most(vocabulary, monkeypatch, part):
    """Counted in characters that are handed to the package, for every length: the work is linear."""
    slicer = Tokenizer(vocabulary.data("bloom"))._engine._table._slicer
    slicer._slice_chars, slicer._max_uncut_chars = 32, 1024
    given = []

    class Counting:
        def __getattr__(self, name):
            return lambda texts, **more: (
                given.append(len(texts[0])) or getattr(engine, name)(texts, **more)
            )

    engine = slicer._engine
    monkeypatch.setattr(slicer, "_engine", Counting())
    for num_chars in range(1, 1024, 7):
        given.clear()
        text = (part * num_chars)[:num_chars]
        assert [*chain(*slicer.encode(text))] == engine.encode(text, add_special_tokens=False).ids
        assert num_chars <= sum(given) < 3 * num_chars, given
        # One run has no place that is far enough from its end: nothing is tried.
        assert part != "abc" or given == [num_chars]


def test_encoding_stops_beyond_max_tokens(tokenizer, monkeypatch):
    """A text that must have too many tokens is not encoded at all; one that has, not to its end."""
    longest = max(map(len, tokenizer._texts))
    counted = []
    real = tokenizer._engine._table._slicer.encode
    monkeypatch.setattr(
        tokenizer._engine._table._slicer,
        "encode",
        lambda text: (counted.append(len(ids)) or ids for ids in real(text)),
    )
    with pytest.raises(PromptTooLongError, match="at least 101 tokens"):
        tokenizer.encode("7" * (100 * longest + 1), max_tokens=100)
    assert not counted
    with pytest.raises(PromptTooLongError, match="at least"):
        tokenizer.encode("7" * (4 * SLICE_CHARS), max_tokens=SLICE_CHARS)
    assert len(counted) == 2
    assert len(tokenizer.encode("7" * 100, max_tokens=100)) == 100
    with pytest.raises(PromptTooLongError):
        tokenizer.encode_parts(["7" * 60, tokenizer.eos_id, "7" * 40], max_tokens=100)


def test_pieces_come_in_slices_too():
    """SentencePiece's: the ids are those of the whole, with words over the ends of slices."""
    tokenizer = Tokenizer(train_pieces(vocab_size=300, num_words=500, tie=16).data("default"))
    text = "hello world 7" * 6000
    parts = list(tokenizer._engine.encode(text))
    assert len(parts) == 3
    part = list(chain(*tokenizer._engine.encode("hello world 7" * 60)))
    assert len(list(chain(*parts))) == len(part) * 100
    assert tokenizer.decode(list(chain(*parts))) == text


def test_what_is_cut_off_is_not_encoded(vocabulary):
    """With `truncate` the ids so far are those of the whole text, and few more than were asked for."""
    tokenizer = Tokenizer(vocabulary.data("qwen2"))
    text = "word 12 " * 40_000
    few = tokenizer.encode(text, max_tokens=100, truncate=True)
    assert few == tokenizer.encode(text)[: len(few)]
    assert 100 < len(few) <= SLICE_CHARS
    with pytest.raises(PromptTooLongError):
        tokenizer.encode(text, max_tokens=100)


def test_a_slice_without_a_cut_costs_no_square(vocabulary):
    """One word of 140,000 characters is encoded in slices of 32,768, 65,536 and 131,072 that have no cut, then as a whole.

    So it costs some twenty times what a slice does. It was 700 times, when all tokens were looked through for each character.
    """
    tokenizer = Tokenizer(vocabulary.data("bloom"))
    seconds = []
    for num_chars in (30_000, 140_000):
        tries = []
        for _ in range(3):  # the first one also fills the processor's caches
            begin_s = time.thread_time()
            tokenizer.encode("<a0" * (num_chars // 3))
            tries.append(time.thread_time() - begin_s)
        seconds.append(min(tries))
    assert seconds[1] < 60 * seconds[0], seconds


@pytest.mark.parametrize("digits_are_local", [False, True])
def test_doubling_windows_miss_no_place(digits_are_local):
    """Looked at in parts, a text has each place to cut that it has as a whole, although none of those before was one."""
    chance = random.Random(5)
    slicer = TextSlicer(None, digits_are_local=digits_are_local)
    num_new = num_skipped = 0
    for _ in range(600):
        runs = [chance.choice("a7 .") * chance.choice((1, 2, 20, 60)) for _ in range(12)]
        text, size = "".join(runs), 16
        seen, num_edges, tried = 0, 0, set()
        while size < len(text):
            places = {*slicer._far_places(text[:size])}
            is_hopeful, more = slicer._look(text[:size], seen, num_edges)
            assert is_hopeful or places <= tried, (text, size)
            num_new += not places <= tried
            num_skipped += not is_hopeful
            tried |= places
            seen, num_edges, size = size, num_edges + more, 2 * size
    assert num_new > 200
    assert num_skipped > 200

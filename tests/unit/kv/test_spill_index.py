"""The second tier's index: what goes first, where parts lie, and that no byte is given twice."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thermocline.kv.spill_index import Extents, PartKey, PartKind, SpillIndex, SpillPlace


def key(name: str, kind: PartKind = PartKind.BLOCK) -> PartKey:
    return PartKey(kind, name.encode())


def put(index: SpillIndex, name: str, num_bytes: int = 4):
    """Write a part; return what moved for it."""
    place, moved = index.reserve(key(name), num_bytes)
    assert place is not None
    index.confirm(key(name))
    index.check_integrity()
    return [demotion.key.tokens.decode() for demotion in moved]


def there(index: SpillIndex, names: str) -> str:
    return "".join(name for name in names if index.find(key(name)) is not None)


@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=60))
def test_extents_are_what_a_map_of_bytes_says(size, actions):
    """First fit, and freed bytes join; the twin is a list with one flag for each byte."""
    extents, used, held = Extents(size), [False] * size, []
    chosen = random.Random(size)
    for takes, length in actions:
        if takes:
            starts = [at for at in range(size - length + 1) if not any(used[at : at + length])]
            at = extents.allocate(length)
            assert at == (starts[0] if starts else None)
            if at is not None:
                used[at : at + length] = [True] * length
                held.append((at, length))
        elif held:
            at, length = held.pop(chosen.randrange(len(held)))
            extents.free(at, length)
            used[at : at + length] = [False] * length
        assert extents.free_bytes == used.count(False)


def test_bytes_behind_the_limit_are_not_given_again():
    """What is used there stays until it is freed, and is then lost."""
    extents = Extents(12)
    first, second = extents.allocate(4), extents.allocate(4)
    extents.limit(6)
    assert (first, second, extents.free_bytes) == (0, 4, 0)
    extents.free(4, 4)
    assert extents.free_bytes == 2
    assert extents.allocate(3) is None
    with pytest.raises(AssertionError, match="free twice"):
        extents.free(4, 1)


def test_a_part_is_found_when_it_is_written():
    """Not before, though it is known; and nobody makes room of it meanwhile."""
    index = SpillIndex([4])
    place, _ = index.reserve(key("a"), 4)
    assert index.find(key("a")) is None
    assert index.knows(key("a"))
    assert index.reserve(key("b"), 4) == (None, [])
    index.confirm(key("a"))
    assert index.find(key("a")) == place == SpillPlace(0, 0, 4)


def test_the_part_that_was_needed_longest_ago_goes_on_to_the_next_level_and_out_of_the_last():
    """Memory of two parts, a file of two: the fifth part costs the first."""
    index = SpillIndex([8, 8])
    assert [put(index, name) for name in "abcd"] == [[], [], ["a"], ["b"]]
    assert index.used_bytes == (8, 8)
    assert put(index, "e") == ["c"]
    assert there(index, "abcde") == "bcde"
    assert index.total_dropped == 1
    assert [index.find(key(name)).level for name in "bcde"] == [1, 1, 0, 0]


def test_what_is_touched_stays_longer():
    """Whether it was read, or its other copy has gone."""
    index = SpillIndex([8])
    put(index, "a")
    put(index, "b")
    assert index.touch(key("a"))
    assert not index.touch(key("x"))
    put(index, "c")
    assert there(index, "abc") == "ac"


def test_a_part_too_large_for_memory_goes_to_the_file():
    """And one that is too large for everything nowhere, without pushing others out."""
    index = SpillIndex([4, 16])
    put(index, "a")
    place, moved = index.reserve(key("b"), 10)
    assert (place.level, moved) == (1, [])
    assert index.reserve(key("c"), 17) == (None, [])
    assert there(index, "a") == "a"


def test_a_part_is_discarded_at_its_place_alone():
    """What came to another place since is another copy."""
    index = SpillIndex([8, 8])
    for name in "abc":
        put(index, name)
    index.discard(key("a"), SpillPlace(0, 0, 4))  # where it was before it went on
    assert there(index, "a") == "a"
    index.discard(key("a"), index.find(key("a")))
    assert there(index, "abc") == "bc"
    index.check_integrity()


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 11), st.integers(1, 9), st.integers(0, 3)), max_size=80),
)
def test_no_byte_is_lost_or_given_twice(capacities, actions):
    """Through any order of writing, failing, touching and dropping."""
    index = SpillIndex(capacities)
    for name, length, action in actions:
        part = key(str(name), list(PartKind)[name % 3])
        if action == 0 or not index.knows(part):
            if not index.knows(part):
                index.reserve(part, length)
        elif action == 1:
            index.confirm(part)
        elif action == 2:
            index.touch(part)
        else:
            index.discard(part)
        index.check_integrity()

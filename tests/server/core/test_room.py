"""Which models are unloaded for another one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from thermocline.engine.needs import ModelNeeds
from thermocline.server.core.room import LoadedModel, models_to_unload

WHOLE = ModelNeeds(1, uses_device=True)


def model(name: str, size: int, used_s: float, **more: object) -> LoadedModel:
    """Return a loaded model of so many bytes."""
    return LoadedModel(name, ModelNeeds(size), used_s, **more)


def test_nothing_goes_while_there_is_room():
    """The sum of all counts, up to the budget itself."""
    loaded = [model("a", 40, 1.0), model("b", 40, 2.0)]
    assert models_to_unload(ModelNeeds(20), loaded, 100) == ()


def test_the_least_recently_used_goes_first_and_no_more_than_needed():
    """One byte too many costs one model; a small old one stays if it would not help."""
    loaded = [model("new", 40, 3.0), model("old", 40, 1.0), model("tiny", 1, 0.5)]
    assert models_to_unload(ModelNeeds(25), loaded, 100) == ("old",)
    assert models_to_unload(ModelNeeds(20), loaded[:2], 99) == ("old",)
    assert set(models_to_unload(ModelNeeds(99), loaded, 100)) == {"old", "new"}


def test_a_busy_model_goes_after_every_idle_one():
    """Though it was used longer ago."""
    loaded = [model("busy", 50, 1.0, is_busy=True), model("idle", 50, 9.0)]
    assert models_to_unload(ModelNeeds(50), loaded, 100) == ("idle",)
    assert set(models_to_unload(ModelNeeds(60), loaded, 100)) == {"idle", "busy"}


def test_any_model_fits_alone_but_not_beside_one_that_stays():
    """A model larger than the memory is read again and again, as ever."""
    assert models_to_unload(ModelNeeds(500), [], 100) == ()
    assert models_to_unload(ModelNeeds(500), [model("a", 1, 0.0)], 100) == ("a",)
    pinned = [model("a", 1, 0.0, is_pinned=True)]
    assert models_to_unload(ModelNeeds(500), pinned, 100) is None
    assert models_to_unload(ModelNeeds(99), pinned, 100) == ()


def test_a_device_is_shared_only_by_models_with_limits():
    """Without --device-memory a model takes what is free, so that none has room beside it."""
    limited = ModelNeeds(1, uses_device=True, device_bytes=10)
    for wanted, there, going in (
        (WHOLE, WHOLE, ("a",)),
        (limited, WHOLE, ("a",)),
        (WHOLE, limited, ("a",)),
        (limited, limited, ()),
        (ModelNeeds(1), WHOLE, ()),
    ):
        assert models_to_unload(wanted, [LoadedModel("a", there, 0.0)], 100) == going


SIZES = st.integers(1, 60)


@given(
    SIZES,
    st.lists(st.tuples(SIZES, st.integers(0, 9), st.booleans(), st.booleans()), max_size=6),
)
def test_what_stays_fits_and_nobody_goes_in_vain(wanted, found):
    """For any models: the rest fits or nothing is left, pinned ones stay, and each that goes was needed."""
    loaded = [
        model(str(n), size, float(used), is_busy=busy, is_pinned=pinned)
        for n, (size, used, busy, pinned) in enumerate(found)
    ]

    def fits(gone):
        left = [each.needs.host_bytes for each in loaded if each.name not in gone]
        return not left or sum(left) + wanted <= 100

    going = models_to_unload(ModelNeeds(wanted), loaded, 100)
    if going is None:
        assert not fits({each.name for each in loaded if not each.is_pinned})
        return
    assert fits(set(going))
    assert not {each.name for each in loaded if each.is_pinned} & set(going)
    for name in going:
        assert not fits(set(going) - {name})
    if not any(each.is_busy for each in loaded if each.name in going):
        return
    idle = {each.name for each in loaded if not each.is_busy and not each.is_pinned}
    assert not fits(idle)

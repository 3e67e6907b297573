"""How values and unknown names are shown."""

from __future__ import annotations

from dataclasses import dataclass, field

from thermocline.wording import ShowsChanges, unknown_name


@dataclass(repr=False)
class _Point(ShowsChanges):
    x: int = 0
    tags: list[str] = field(default_factory=list)
    name: str = field(default="a", kw_only=True)


def test_a_repr_has_what_differs_from_the_default():
    """Fields with factories too."""
    assert repr(_Point()) == "_Point()"
    assert repr(_Point(3, ["b"])) == "_Point(x=3, tags=['b'])"


def test_an_unknown_name_is_answered_with_near_ones_or_all():
    """So that the next try is right."""
    names = ("temperature", "top_k", "top_p")
    assert unknown_name("temprature", names, "field") == (
        "there is no field 'temprature': did you mean temperature?"
    )
    assert unknown_name("zzz", names, "field").endswith("there are temperature, top_k, top_p")

"""Who drafts for a request, how far, and why not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.scripted_drafters import ScriptedDrafter
from thermocline.errors import RequestError
from thermocline.messages import RequestId
from thermocline.speculation.contract import Draft, DrafterFacts, DraftWish, Verified
from thermocline.speculation.speculator import Speculator, pruned

REQUEST = RequestId(1)
PROMPT = (1, 2, 3)
ANSWER = tuple(range(100, 3000))


class Run:
    """A request's steps: what the model says is ANSWER."""

    def __init__(self, speculator: Speculator, names: tuple[str, ...] | None = None) -> None:
        self.speculator = speculator
        self.num_known = 0
        speculator.begin(REQUEST, PROMPT, names)
        self.step(0)

    def wish(self) -> DraftWish:
        known = len(PROMPT) + self.num_known
        return DraftWish(REQUEST, known, ANSWER[self.num_known - 1], 16)

    def draft(self) -> int:
        """Return how many tokens are chosen to be verified."""
        assert self.speculator.wants_any(1)
        chosen = self.speculator.choose(self.speculator.instant_drafts([self.wish()]), 1)
        return sum(len(draft.tokens) for draft in chosen)

    def step(self, num_drafted: int, num_right: int = 0) -> None:
        """Verify so many drafted tokens."""
        position = len(PROMPT) + self.num_known - 1
        self.speculator.count(REQUEST, num_drafted, num_right) if num_drafted else None
        tokens = ANSWER[self.num_known : self.num_known + 1 + num_right]
        self.num_known += len(tokens)
        self.speculator.observe(Verified(REQUEST, position, tokens, num_drafted, num_right))


def scripted(acceptance: float = 1.0, name: str = "scripted", **facts) -> ScriptedDrafter:
    return ScriptedDrafter(acceptance, {PROMPT: [ANSWER]}, DrafterFacts(name, **facts))


def with_prices(speculator: Speculator, row_costs: float) -> Speculator:
    for rows in range(1, 5):
        speculator.step_took(rows, 0.01 * (1 + row_costs * (rows - 1)))
    return speculator


def after_a_trial(seconds: float) -> Speculator:
    """Return a speculator whose only request ended with a draft that was tried in vain, in a step that took so long."""
    speculator = Speculator([scripted()])
    run = Run(speculator)
    for _ in range(40):
        with_prices(speculator, 0.9)
        run.step(run.draft(), 0)
    while not (count := run.draft()):
        with_prices(speculator, 0.9)
        run.step(0)
    speculator.step_took(1 + count, seconds, is_plain=False)
    run.step(count, 0)
    speculator.end(REQUEST)
    return speculator


def test_good_drafts_get_longer_and_bad_ones_stop():
    """From the first guess on, the request's own drafts decide."""
    run = Run(with_prices(Speculator([scripted()]), 0.3))
    first = run.draft()
    assert 1 <= first < 8
    for _ in range(20):
        count = run.draft()
        run.step(count, count)
    assert run.draft() > first
    for _ in range(20):
        run.step(min(run.draft(), 4), 0)
    assert run.draft() == 0
    why_off = run.speculator.why_off(REQUEST)
    assert why_off is not None
    assert "30 %" in why_off
    assert run.speculator.why_off_now == why_off


def test_now_and_then_a_draft_is_tried():
    """Two tokens at most, for a fiftieth of the time at most. If they are right again, drafts come back."""
    run = Run(with_prices(Speculator([scripted()]), 0.9))
    for _ in range(30):
        run.step(1, 0) if run.draft() else run.step(0)
    trials = []
    for number in range(400):
        count = run.draft()
        if count:
            trials.append((number, count))
        run.speculator.step_took(1 + count, 0.01 * (1 + 0.9 * count), is_plain=not count)
        run.step(count, 0)
    assert trials
    assert all(count <= 2 for _, count in trials)
    assert sum(0.9 * count for _, count in trials) <= 0.02 * 400
    with_prices(run.speculator, 0.0)
    for _ in range(200):
        with_prices(run.speculator, 0.0)
        count = run.draft()
        run.step(count, count)
    assert run.draft() > 2
    assert run.speculator.why_off(REQUEST) is None


@pytest.mark.parametrize(("names", "is_tried"), [((), False), (None, True)])
def test_steps_without_drafters_pay_for_no_trials(names, is_tried):
    """What a request that turned drafts off takes is nothing that others may spend."""
    speculator = with_prices(Speculator([scripted()]), 0.9)
    run = Run(speculator)
    for _ in range(30):
        run.step(run.draft(), 0)
    speculator.end(REQUEST)
    speculator.begin(REQUEST, PROMPT, names)
    for _ in range(30):
        with_prices(speculator, 0.9)
    speculator.end(REQUEST)
    assert bool(Run(speculator).draft()) is is_tried


@pytest.mark.parametrize(("took", "is_tried"), [(0.019, True), (0.5, False)])
def test_a_trial_costs_what_its_step_took(took, is_tried):
    """Where its rows had to be read, that is more than was expected, and the next trial waits for longer."""
    speculator = after_a_trial(took)
    speculator.begin(REQUEST, PROMPT, None)
    for _ in range(10):
        with_prices(speculator, 0.9)
    speculator.end(REQUEST)
    assert bool(Run(speculator).draft()) is is_tried


def test_a_step_in_which_the_computer_slept_ends_no_trials():
    """However long it took: the next trial comes after some hundred steps at the latest."""
    speculator = after_a_trial(3600.0)
    later = Run(speculator)
    for _ in range(100):
        with_prices(speculator, 0.9)
    assert later.draft()


def test_a_step_full_of_answers_has_no_drafts():
    """Beyond eight answers nobody is asked, and each request is told why."""
    run = Run(Speculator([scripted()]))
    assert run.speculator.wants_any(8)
    assert not run.speculator.wants_any(9)
    assert "answers fill a step" in (run.speculator.why_off(REQUEST) or "")


def test_requests_choose_among_drafters():
    """All by default, those that are named, or none; what there is not is refused."""
    speculator = Speculator([scripted(), scripted(0.0, "other")], enabled=("other",))
    assert speculator.names == ("other",)
    for names, expected in ((None, 1), ((), 0), (("scripted",), 1), (("scripted", "other"), 1)):
        speculator.check(names)
        speculator.begin(REQUEST, PROMPT, names)
        wish = DraftWish(REQUEST, 3, 3, 2)
        with pytest.raises(IndexError) if expected else pytest.MonkeyPatch.context():
            speculator.instant_drafts([wish])  # a scripted drafter wants to know the last token
        speculator.end(REQUEST)
    with pytest.raises(RequestError, match="auto, off, scripted, other"):
        speculator.check(("nobody",))


def test_an_engine_without_drafters_says_why():
    """A request that names a known drafter is served, and told."""
    speculator = Speculator([], absent={"lookup": "it can not"}, why_none="a device attends")
    speculator.check(("lookup",))
    with pytest.raises(RequestError, match="lookup"):
        speculator.check(("nobody",))
    for names, why in ((None, "a device attends"), (("lookup",), "it can not"), ((), "off")):
        speculator.begin(REQUEST, PROMPT, names)
        assert why in (speculator.why_off(REQUEST) or "")
        speculator.end(REQUEST)
    assert not speculator.wants_any(1)
    assert speculator.why_off_now == "a device attends"


def test_drafters_that_compute_are_asked_for_what_pays():
    """The cheaper a drafted token, the more; none where an instant draft is surer."""
    drafter = scripted(1.0, "slow", computes=True)
    run = Run(with_prices(Speculator([drafter, scripted()]), 0.1))
    assert run.speculator.computes
    drafts = run.speculator.instant_drafts([run.wish()])
    assert [draft.request for draft in drafts] == [REQUEST]
    ((asked, (wish,)),) = run.speculator.tasks([run.wish()], [], 1)
    assert asked is drafter
    cheap = wish.max_tokens
    run.speculator.proposed(drafter, [wish], [Draft.chain(wish, range(4))], 0.012)
    costly = run.speculator.tasks([run.wish()], [], 1)
    assert sum(each.max_tokens for _, wishes in costly for each in wishes) < cheap
    sure = [draft.__class__.chain(run.wish(), draft.tokens, [0.99] * 16) for draft in drafts]
    assert run.speculator.tasks([run.wish()], sure, 1) == []


def test_what_can_not_be_is_cut_off():
    """A draft's beginning, with its parents; None where its first token can not be."""
    run = Run(Speculator([scripted()]))
    (draft,) = run.speculator.instant_drafts([run.wish()])
    for count in (1, 3):
        cut = pruned(draft, lambda _, count=count: count)
        assert cut is not None
        assert (cut.tokens, cut.is_chain) == (draft.tokens[:count], True)
    assert pruned(draft, lambda _: 0) is None


def test_the_price_without_drafts_stays_known():
    """Where every step has drafts, one in 64 has none, and sooner at first: a slow first step does not stay the price."""
    run = Run(Speculator([scripted()]))
    run.speculator.step_took(1, 0.1)  # as slow as a first step is
    lengths = []
    for _ in range(300):
        count = run.draft()
        lengths.append(count)
        run.speculator.step_took(1 + count, 0.01 * (1 + 0.4 * count), is_plain=not count)
        run.step(count, count // 3)
    plain = [index for index, count in enumerate(lengths) if not count]
    assert plain[0] <= 8
    assert len(plain) > 3
    price = run.speculator._prices.seconds(1)
    assert price is not None
    assert price < 0.05


def tree(confidence=()):
    """Tokens 10 and 11 behind the known one, 12 and 13 behind 10, 14 behind 12."""
    return Draft(REQUEST, 4, (10, 11, 12, 13, 14), (-1, -1, 0, 0, 2), confidence)


def test_of_a_tree_what_can_not_be_goes_with_all_behind_it():
    """Each way down is asked for by itself."""
    asked = []

    def without_twelve(way):
        asked.append(way)
        return way.index(12) if 12 in way else len(way)

    cut = pruned(tree((0.5, 0.4, 0.3, 0.2, 0.1)), without_twelve)
    assert cut == Draft(REQUEST, 4, (10, 11, 13), (-1, -1, 0), (0.5, 0.4, 0.2))
    assert sorted(asked) == [(10, 12, 14), (10, 13), (11,)]
    assert pruned(tree(), lambda _: 0) is None


@pytest.mark.parametrize(("row_costs", "expected"), [(0.02, 5), (0.2, 3), (3.0, 0)])
def test_a_tree_grows_while_it_pays(row_costs, expected):
    """Its nodes gain what their ways down are likely, the best first: 0.5, 0.4, 0.3, 0.1, 0.06."""
    speculator = with_prices(Speculator([scripted()]), row_costs)
    run = Run(speculator)
    speculator.instant_drafts([run.wish()])  # somebody's draft is offered
    chosen = speculator.choose([tree((0.5, 0.4, 0.6, 0.2, 0.2))], 1)
    assert [len(each.tokens) for each in chosen] == [expected] * bool(expected)


def test_a_drafter_that_guesses_at_once_is_asked_for_all():
    """A draft costs the same however long it is; where that is too much, nobody is asked."""
    drafter = scripted(1.0, "blocks", computes=True, at_once=True, max_tokens=9)
    run = Run(with_prices(Speculator([drafter]), 0.1))
    ((_, (wish,)),) = run.speculator.tasks([run.wish()], [], 1)
    assert wish.max_tokens == 9
    run.speculator.proposed(drafter, [wish], [Draft.chain(wish, range(9))], 0.004)
    assert len(run.speculator.tasks([run.wish()], [], 1)) == 1
    for _ in range(40):
        run.speculator.proposed(drafter, [wish], [Draft.chain(wish, range(9))], 0.5)
    assert run.speculator.tasks([run.wish()], [], 1) == []


def test_drafts_that_are_made_in_vain_are_not_made_for_ever():
    """A drafter is asked by what its drafts were worth. That none was worth verifying is as good as that all were wrong."""
    drafter = scripted(1.0, "slow", computes=True)
    run = Run(with_prices(Speculator([drafter]), 0.5))
    asked = 0
    for _ in range(60):
        tasks = run.speculator.tasks([run.wish()], [], 1)
        asked += len(tasks)
        for _, (wish,) in tasks:
            draft = Draft.chain(wish, range(wish.max_tokens), [0.3] * wish.max_tokens)
            run.speculator.proposed(drafter, [wish], [draft], 0.001 * wish.max_tokens)
            assert run.speculator.choose([draft], 1) == []
        run.step(0)
    assert 1 <= asked < 10


def test_of_two_drafts_the_better_one_is_taken_not_the_surer():
    """A long free draft of likely tokens beats one token that is likelier and takes half a step."""
    drafter = scripted(1.0, "slow", computes=True)
    run = Run(with_prices(Speculator([drafter, scripted()]), 0.1))
    (free,) = run.speculator.instant_drafts([run.wish()])
    likely = Draft.chain(run.wish(), free.tokens, [0.7] * 16)
    slow = replace(run.wish(), max_tokens=16)
    run.speculator.proposed(drafter, [slow], [Draft.chain(slow, range(16))], 16 * 0.005)
    for _ in range(30):
        run.speculator._served[REQUEST].acceptance["slow"].observe(4, 3)
    assert run.speculator._guess("slow", run.wish()) > 0.7
    assert run.speculator.tasks([run.wish()], [likely], 1) == []
    assert len(run.speculator.tasks([run.wish()], [], 1)) == 1


def test_a_drafter_that_claims_too_much_is_believed_less():
    """Tokens that are said to be likely and never are; nothing but what came of them tells."""
    run = Run(with_prices(Speculator([scripted()]), 0.4))
    lengths = []
    for _ in range(12):
        (draft,) = run.speculator.instant_drafts([run.wish()])
        sure = replace(draft, confidence=(0.9,) * len(draft.tokens))
        (*chosen,) = run.speculator.choose([sure], 1)
        count = sum(len(each.tokens) for each in chosen)
        lengths.append(count)
        run.step(count, 0)
    assert lengths[0] >= 2
    assert lengths[-4:] == [0] * 4

"""Decides for each request whether, by whom and how far its next tokens are drafted, and counts what came of it.

Owns the drafters, and what is known of acceptance and prices. Pure but for the drafters: who drives it says the times.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from thermocline.errors import RequestError
from thermocline.speculation.acceptance import Acceptance, Calibration, expected_gains
from thermocline.speculation.lengths import choose_lengths, expected_rate
from thermocline.speculation.prices import StepPrices
from thermocline.speculation.trials import TrialBudget, Waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from thermocline.messages import RequestId
    from thermocline.speculation.contract import Draft, Drafter, DraftWish, Verified

_MAX_DECODING: Final = 8
"""With more answers at a time a step is full without drafts: each of its experts serves several rows already."""
_TRIAL_TOKENS: Final = 2
_MAX_FIRST_COST: Final = 1.0
"""Of steps: what a request's first draft may cost if all of it is wrong. Other requests' drafts may have been better."""
_MAX_TRIAL_COST: Final = 4.0
"""Of steps: what a trial's rows are charged at most. A computer that slept meanwhile says nothing of drafts."""
_PLAIN_DISTANCE: Final = 64
_NEW_PLAIN_DISTANCE, _FEW_PLAIN = 8, 4
"""After so many steps with drafts comes one without; sooner as long as there were few of these."""
_NEWEST: Final = 0.2
_PRIOR: Final = 0.6
"""Of drafters that say nothing themselves."""


@dataclass(slots=True)
class _Served:
    """What is known of one request."""

    drafters: tuple[Drafter, ...]
    acceptance: dict[str, Acceptance]
    calibration: dict[str, Calibration]
    why_off: str | None
    waiting: Waiting = field(default_factory=Waiting)
    offered: str = ""
    """Whose draft its next step verifies, or its present one."""
    depth: int = 0
    """The longest way down that draft."""
    claimed: Sequence[float] = ()
    """What its drafter said of each token, if it is a chain."""
    num_verified: int = 0
    """Drafts, so far."""
    is_trial: bool = False
    """Whether that draft is only to find out whether drafts pay by now."""
    num_due: int = 0
    """Tokens since a drafter that computes was last asked: it computes these first."""


class _Mean:
    """A mean in which the newest value counts a fifth."""

    def __init__(self) -> None:
        self.value = 0.0

    def observe(self, value: float) -> None:
        self.value += (value - self.value) * (_NEWEST if self.value else 1.0)


class Speculator:
    """Asks drafters, and chooses among their drafts.

    fixed_tokens: verify so many tokens of each draft, whatever it costs, to measure; None: what is expected to pay.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        *,
        enabled: tuple[str, ...] | None = None,
        absent: Mapping[str, str] | None = None,
        why_none: str | None = None,
        fixed_tokens: int | None = None,
    ) -> None:
        """enabled: names of the drafters that requests get which name none; None for all. absent: others that requests
        may name, and get nothing, with the reason. why_none: why nobody drafts for requests that name none; None if somebody
        does, or was turned off.
        """
        self._drafters: Mapping[str, Drafter] = {each.facts.name: each for each in drafters}
        self._enabled = tuple(self._drafters) if enabled is None else enabled
        self._is_off = enabled == ()
        self._absent = absent or {}
        self.why_none = why_none
        """Why there are no drafters for requests that name none; None if there are."""
        self._fixed_tokens = fixed_tokens
        self._prices = StepPrices()
        self._since_plain = self._num_plain = 0
        """Steps with drafts since the last without; steps without."""
        self._overall = {name: Acceptance(_PRIOR) for name in self._drafters}
        self._claims = {name: Calibration() for name in self._drafters}
        self._draft_seconds = {name: _Mean() for name in self._drafters}
        """What a token of a draft takes, or a whole draft of a drafter that makes it at once."""
        self._due_seconds = {name: _Mean() for name in self._drafters}
        """What a known token takes that a drafter has to compute first, where it was not asked for long."""
        self._trials = TrialBudget()
        self._latest_step = 0, 0.0
        """Its rows and seconds."""
        self._served: dict[RequestId, _Served] = {}
        self._totals = dict.fromkeys(self._drafters, (0, 0))
        self.why_off_now = why_none
        """Why the latest draft was not verified, or there is none; None if it was. Others only read it."""

    def __repr__(self) -> str:
        return f"Speculator({', '.join(self._drafters) or self.why_none}; {self._prices})"

    @property
    def names(self) -> tuple[str, ...]:
        """Of the drafters that requests get which name none."""
        return tuple(name for name in self._enabled if name in self._drafters)

    @property
    def drafters(self) -> tuple[Drafter, ...]:
        """All that there are."""
        return tuple(self._drafters.values())

    @property
    def totals(self) -> Mapping[str, tuple[int, int]]:
        """By drafter: tokens that steps verified, and those of them that were right."""
        return self._totals

    def check(self, names: tuple[str, ...] | None) -> None:
        """Raise RequestError for a drafter that there is not. None is the engine's own choice, () none."""
        for name in names or ():
            if name not in self._drafters and name not in self._absent:
                there = ", ".join(("auto", "off", *self._drafters, *self._absent))
                raise RequestError(
                    f"speculate names {name!r}, which this model does not have: choose of {there}",
                    param="speculate",
                )

    def begin(
        self, request: RequestId, prompt: Sequence[int], names: tuple[str, ...] | None
    ) -> None:
        """Take a request. names: as `check` takes them."""
        wanted = self._enabled if names is None else names
        drafters = tuple(self._drafters[name] for name in wanted if name in self._drafters)
        why_off = None
        if not drafters:
            is_off = names == () or (names is None and self._is_off)
            why_absent = (self._absent[name] for name in wanted if name in self._absent)
            why_off = "it was turned off" if is_off else next(why_absent, self.why_none)
        names_of = [each.facts.name for each in drafters]
        acceptance = {name: Acceptance(_PRIOR, self._overall[name]) for name in names_of}
        calibration = {name: Calibration(self._claims[name]) for name in names_of}
        self._served[request] = _Served(drafters, acceptance, calibration, why_off)
        for drafter in drafters:
            drafter.begin(request, prompt)

    def end(self, request: RequestId) -> None:
        """Forget a request."""
        for drafter in self._served.pop(request).drafters:
            drafter.end(request)

    def why_off(self, request: RequestId) -> str | None:
        """Return why the request's latest tokens were not drafted, or not verified; None if they were."""
        return self._served[request].why_off

    def wants_any(self, num_decoding: int) -> bool:
        """Whether to ask for drafts at all, with so many answers at a time."""
        if not self._drafters:
            return False
        if num_decoding <= _MAX_DECODING:
            return True
        for served in self._served.values():
            if served.drafters:
                self._note(served, f"more than {_MAX_DECODING} answers fill a step")
        return False

    def instant_drafts(self, wishes: Sequence[DraftWish]) -> list[Draft]:
        """Return what drafters that take no time propose, the most promising draft of each request."""
        best: dict[RequestId, tuple[float, str, Draft]] = {}
        for name, drafter in self._drafters.items():
            mine = [wish for wish in wishes if drafter in self._served[wish.request].drafters]
            if drafter.facts.computes or not mine:
                continue
            for draft in drafter.propose(mine):
                worth = sum(expected_gains(self._chances(name, draft)))
                if draft.tokens and worth > best.get(draft.request, (0.0,))[0]:
                    best[draft.request] = worth, name, draft
        for request, (_, name, _) in best.items():
            self._served[request].offered = name
        return [draft for _, _, draft in best.values()]

    @property
    def computes(self) -> bool:
        """Whether some drafter takes its time: see `tasks`."""
        return any(drafter.facts.computes for drafter in self._drafters.values())

    def tasks(
        self, wishes: Sequence[DraftWish], drafts: Sequence[Draft], num_rows: int
    ) -> list[tuple[Drafter, list[DraftWish]]]:
        """Return what to ask of drafters that take their time, where they are expected to pay, and to be better than `drafts`."""
        if self._plain_is_due:
            return []
        found = {
            draft.request: self._chances(self._offered(draft), draft)
            for draft in drafts
            if self._fixed_tokens is None
        }
        tasks = []
        asked: set[RequestId] = set()
        for name, drafter in self._drafters.items():
            if not drafter.facts.computes:
                continue
            seconds, at_once = self._draft_seconds[name].value, drafter.facts.at_once
            cost = (0.0, seconds) if at_once else (seconds, 0.0)
            mine = [
                wish
                for wish in wishes
                if wish.request not in asked
                and drafter in self._served[wish.request].drafters
                and self._is_better(drafter, wish, cost, found.get(wish.request, ()), num_rows)
            ]
            limits = [min(wish.max_tokens, drafter.facts.max_tokens) for wish in mine]
            chances = [
                [self._guess(name, wish)] * limit for wish, limit in zip(mine, limits, strict=True)
            ]
            requests = [wish.request for wish in mine]
            lengths = self._lengths(requests, chances, num_rows, cost, name)
            chosen = [
                # What costs nothing more is wanted whole: how far it is verified is decided when it is there.
                replace(wish, max_tokens=limit if at_once else length)
                for wish, length, limit in zip(mine, lengths, limits, strict=True)
                if length
            ]
            for wish in chosen:
                self._served[wish.request].offered = name
                asked.add(wish.request)
            if chosen:
                tasks.append((drafter, chosen))
        return tasks

    def proposed(
        self, drafter: Drafter, asked: Sequence[DraftWish], drafts: Sequence[Draft], seconds: float
    ) -> None:
        """Learn what a drafter takes, and that it may have no draft: that is as good as a wrong one."""
        name, lengths = drafter.facts.name, {each.request: len(each.tokens) for each in drafts}
        num_tokens = sum(max(lengths.get(wish.request, 0), 1) for wish in asked)
        num_drafts = len(asked) if drafter.facts.at_once else num_tokens
        num_due = 0
        for wish in asked:
            served = self._served.get(wish.request)
            if served is None:
                continue
            num_due += served.num_due
            served.num_due = 0
            served.waiting.draft_seconds = seconds / len(asked)
            if wish.request not in lengths:
                served.acceptance[name].observe(1, 0)
        price, known = self._draft_seconds[name], self._draft_seconds[name].value
        # A drafter that is asked for each step has no more to catch up with than such a step's tokens.
        if num_due <= len(asked) + num_tokens or not known:
            price.observe(seconds / num_drafts)
        else:
            self._due_seconds[name].observe(max(seconds - known * num_drafts, 0.0) / num_due)

    def choose(self, drafts: Sequence[Draft], num_rows: int) -> list[Draft]:
        """Return the beginnings of drafts that the next step verifies. num_rows: of the step without them."""
        if drafts and self._plain_is_due:
            self._since_plain = 0
            return []
        chances = [self._chances(self._offered(draft), draft) for draft in drafts]
        lengths = self._lengths([draft.request for draft in drafts], chances, num_rows)
        chosen = []
        for draft, length in zip(drafts, lengths, strict=True):
            served, name = self._served[draft.request], self._offered(draft)
            if not length:
                # It was made in vain, as if it had been wrong: who asks again and again for such drafts loses.
                if self._drafters[name].facts.computes:
                    served.acceptance[name].observe(1, 0)
                continue
            kept = draft.kept(range(length))
            served.depth = max(kept.depths)
            served.claimed = kept.confidence if kept.is_chain else ()
            chosen.append(kept)
        return chosen

    def count(self, request: RequestId, num_drafted: int, num_accepted: int) -> None:
        """Count drafted rows of a request's present step, and such that stay."""
        name = self._served[request].offered
        before = self._totals[name]
        self._totals[name] = before[0] + num_drafted, before[1] + num_accepted

    def observe(self, verified: Verified) -> None:
        """Take what a step made known of a request."""
        served = self._served[verified.request]
        name = served.offered if verified.num_drafted else ""
        verified = replace(verified, drafter=name)
        depth = min(served.depth or verified.num_drafted, verified.num_drafted)
        if name:
            served.acceptance[name].observe(depth, verified.num_accepted)
            served.num_verified += 1
            if served.claimed:
                served.calibration[name].observe(served.claimed[:depth], verified.num_accepted)
        if served.is_trial:
            plain = self._prices.seconds(1) or 0.0
            self._trials.spend(self._cost_of_trial(verified) - verified.num_accepted * plain)
            served.waiting.ended(was_right=0 < depth == verified.num_accepted)
        elif not name:
            served.waiting.left_out()
        served.offered, served.is_trial, served.claimed = "", False, ()
        served.num_due += len(verified.tokens)
        for drafter in served.drafters:
            drafter.observe(verified)

    def step_took(self, num_rows: int, seconds: float, *, is_plain: bool = True) -> None:
        """Learn what a decode step of so many rows takes, drafted ones included; nothing else ran beside it.

        is_plain: none was drafted.
        """
        self._prices.observe(num_rows, seconds)
        self._latest_step = num_rows, seconds
        # Who wants no drafts pays for no trials.
        if any(served.drafters for served in self._served.values()):
            self._trials.earn(seconds, self._prices.seconds(1) or seconds)
        self._since_plain = 0 if is_plain else self._since_plain + 1
        self._num_plain += is_plain

    def _cost_of_trial(self, verified: Verified) -> float:
        """Return what a request's trial took: what was expected, or more where its rows had to be read from a disk."""
        waiting = self._served[verified.request].waiting
        num_rows, seconds = self._latest_step
        base = self._prices.seconds(max(num_rows - verified.num_drafted, 1)) or seconds
        more = min(seconds - base, _MAX_TRIAL_COST * base)
        return waiting.draft_seconds + max(waiting.row_seconds, more)

    @property
    def _plain_is_due(self) -> bool:
        """Whether the price without drafts must be measured again: it is what all gains are compared with."""
        is_new = self._num_plain < _FEW_PLAIN
        distance = _NEW_PLAIN_DISTANCE if is_new else _PLAIN_DISTANCE
        return self._fixed_tokens is None and self._since_plain >= distance

    def _chances(self, name: str, draft: Draft) -> Sequence[float]:
        """Return how likely each token is right, if those before it are; of a tree the chances of a chain that gains as much."""
        chances: Sequence[float] = draft.confidence
        if not chances:
            chance = self._served[draft.request].acceptance[name].probability
            chances = (chance,) * len(draft.tokens)
        elif draft.is_chain:
            factor = self._served[draft.request].calibration[name].factor
            chances = [min(each * factor, 0.999) for each in chances]
        if draft.is_chain:
            return chances
        reached: list[float] = []
        for chance, parent in zip(chances, draft.parents, strict=True):
            reached.append(chance * (1.0 if parent < 0 else reached[parent]))
        before = [1.0, *reached]
        return [
            min(gain / most, 1.0) if most > 0 else 0.0
            for gain, most in zip(reached, before, strict=False)
        ]

    def _offered(self, draft: Draft) -> str:
        return self._served[draft.request].offered

    def _guess(self, name: str, wish: DraftWish) -> float:
        return self._served[wish.request].acceptance[name].probability

    def _is_better(
        self,
        drafter: Drafter,
        wish: DraftWish,
        cost: tuple[float, float],
        instant: Sequence[float],
        num_rows: int,
    ) -> bool:
        """Whether a drafter that takes its time is expected to be better than a draft that is there.

        cost: as `expected_rate` takes it. instant: how likely the tokens of the draft are; () for none.
        """
        if not instant:
            return True
        guess = self._guess(drafter.facts.name, wish)
        chances = [guess] * min(wish.max_tokens, drafter.facts.max_tokens)
        own = expected_rate(chances, num_rows, self._prices, cost)
        return own > expected_rate(instant, num_rows, self._prices)

    def _lengths(
        self,
        requests: Sequence[RequestId],
        chances: Sequence[Sequence[float]],
        num_rows: int,
        cost: tuple[float, float] = (0.0, 0.0),
        drafter: str = "",
    ) -> list[int]:
        """Return how many tokens of each draft pay; where none do, now and then those of a trial.

        cost: seconds of a token that `drafter` must draft first, and of a draft.
        """
        if self._fixed_tokens is not None:
            return [min(len(each), self._fixed_tokens) for each in chances]
        lengths = choose_lengths(chances, num_rows, self._prices, *cost)
        for index, (request, each) in enumerate(zip(requests, chances, strict=True)):
            served = self._served[request]
            if lengths[index]:
                self._note(served, None)
                served.waiting.paid_off()
                served.is_trial = False
                if not served.num_verified:
                    lengths[index] = self._first_length(lengths[index], num_rows, cost[0])
                continue
            self._note(served, self._why_not(each[0], num_rows))
            if served.is_trial:  # and its draft is there
                lengths[index] = min(len(each), _TRIAL_TOKENS)
            else:
                lengths[index] = self._trial_length(served, len(each), num_rows, cost, drafter)
        return lengths

    def _first_length(self, length: int, num_rows: int, token_seconds: float) -> int:
        """Return how much of a request's first draft is made and verified, where so much is expected to pay."""
        base = self._prices.seconds(num_rows) or 0.0
        while length > 1:
            seconds = self._prices.seconds(num_rows + length) or 0.0
            if seconds - base + length * token_seconds <= _MAX_FIRST_COST * base:
                break
            length -= 1
        return length

    def _trial_length(
        self,
        served: _Served,
        length: int,
        num_rows: int,
        cost: tuple[float, float],
        drafter: str,
    ) -> int:
        """Return how many tokens of a draft that does not pay are tried nevertheless, and pay for it."""
        base = self._prices.seconds(num_rows)
        if base is None:
            return 0
        waiting = served.waiting
        due = served.num_due * self._due_seconds[drafter].value if drafter else 0.0
        for count in range(min(length, _TRIAL_TOKENS), 0, -1):
            more = (self._prices.seconds(num_rows + count) or base) - base
            drafting = count * cost[0] + cost[1] + due
            if self._trials.allows(waiting, more + drafting):
                served.is_trial, waiting.row_seconds, waiting.draft_seconds = True, more, drafting
                return count
        return 0

    def _note(self, served: _Served, why_off: str | None) -> None:
        served.why_off = self.why_off_now = why_off

    def _why_not(self, chance: float, num_rows: int) -> str:
        one, two = self._prices.seconds(num_rows), self._prices.seconds(num_rows + 1)
        if one is None or two is None:
            return "no step was measured so far"
        return f"one more row costs {100 * (two / one - 1):.0f} % of a step, and is right in {100 * chance:.0f} %"


def pruned(draft: Draft, count_possible: Callable[[tuple[int, ...]], int]) -> Draft | None:
    """Return the part of a draft that its request may have at all; None where nothing is left."""
    if draft.is_chain:
        nodes: Sequence[int] = range(count_possible(draft.tokens))
    else:
        inner = set(draft.parents)
        stays = set[int]()
        for leaf in range(len(draft.tokens)):
            if leaf not in inner:
                way = draft.way_to(leaf)
                stays.update(way[: count_possible(tuple(draft.tokens[node] for node in way))])
        nodes = sorted(stays)
    return draft.kept(nodes) if nodes else None

"""What is polished, and how fast: the merge or one of its parents, by large steps, small ones or none, as held-out
examples say.

Everything that is tried is fitted to most of the examples, with the same goals, and compared on the others. The best is
fitted again on all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from isomerge.errors import RequestError
from isomerge.merging.layerwise.candidates import Candidates
from isomerge.merging.layerwise.goals import GoalData
from isomerge.merging.layerwise.gradient_steps import POLISH_RATES
from isomerge.merging.layerwise.output_fit import finite

Tried = dict[str, Any]


@dataclass(frozen=True)
class Choice:
    """`start` and `rate` as users name them; no rate: each of POLISH_RATES."""

    candidates: Candidates
    shares: Sequence[float]
    start: str
    polish: int
    rate: float | None

    @property
    def is_open(self) -> bool:
        """Whether there is anything to choose."""
        return self.start in ("parent", "best") or (self.polish > 0 and self.rate is None)

    def finished(self, every: GoalData, parts: tuple[GoalData, GoalData] | None) -> Tried:
        """The model as it is returned, and what there is to report of it. `parts`: most examples, and the others."""
        if not self.is_open:
            (number,) = self._starts()
            named = {} if number is None else {"start": {"chosen": self._name(number), "model": number}}
            return self._fit(number, every, self.polish, self.rate) | named
        assert parts is not None
        tried = []
        for place, number in enumerate(self._starts()):
            known = self.candidates.tried(f"start-{place}", partial(self._outcomes, number, *parts))
            tried += known["outcomes"]
        best = min(tried, key=lambda one: finite(one["held_out"]))
        steps = self.polish if best["rate"] else 0
        if self.polish and not steps:
            self.candidates.run.parents.notes.append(
                f"not polished: {self.polish} steps on these examples predict held-out ones worse than none do. More "
                "data help"
            )
        if len({one["model"] for one in tried}) > 1:
            self.candidates.run.parents.notes.append(_compared(tried, best))
        chosen = {"chosen": best["start"], "model": best["model"], "steps": steps, "rate": best["rate"], "tried": tried}
        return self._fit(best["model"], every, steps, best["rate"]) | {"start": chosen}

    def _starts(self) -> list[int | None]:
        """The merge (None) and parents, by their numbers."""
        count, fits = len(self.candidates.run.shares), self.candidates.run.fits
        if self.start == "merge":
            return [None]
        if self.start.startswith("parent-"):
            return [parent_number(self.start, count)]
        return [*([None] if self.start == "best" else []), *filter(fits, range(count))]

    def _name(self, number: int | None) -> str:
        return "the merge" if number is None else self.candidates.run.inputs.models[number].name

    def _fit(
        self, number: int | None, data: GoalData, steps: int, rate: float | None, *, keep: bool = True
    ) -> dict[str, Any]:
        if number is None:
            record = self.candidates.merge(self.shares, data, keep=keep)
        else:
            record = self.candidates.parent(number, data, keep=keep)
        return record | ({"polished": self.candidates.polish(steps, rate, data, keep=keep)} if steps and rate else {})

    def _outcomes(self, number: int | None, train: GoalData, held_out: GoalData) -> dict[str, Any]:
        """Without steps, and after steps at every rate from there."""
        return {"outcomes": list(self._each(number, train, held_out))}

    def _each(self, number: int | None, train: GoalData, held_out: GoalData) -> Iterator[Tried]:
        candidates, about = self.candidates, {"start": self._name(number), "model": number}
        self._fit(number, train, 0, None, keep=False)
        yield {**about, "rate": 0.0, "held_out": candidates.loss(held_out)}
        solved = candidates.weights()
        for rate in (POLISH_RATES if self.rate is None else (self.rate,)) if self.polish else ():
            candidates.restore(solved)
            done = candidates.polish(self.polish, rate, train, keep=False)
            losses = {key: done[key] for key in ("loss_before", "loss_after")}
            yield {**about, "rate": rate, **losses, "held_out": candidates.loss(held_out)}


def _compared(tried: Sequence[Tried], best: Tried) -> str:
    """The best that every start reaches, and which of them was taken."""
    reached: dict[int | None, str] = {}
    for one in sorted(tried, key=lambda one: finite(one["held_out"])):
        reached.setdefault(one["model"], f"{one['start']} {one['held_out']:.3f}")
    losses = ", ".join(reached.values())
    return f"started from {best['start']}; on held-out examples each start reaches {losses} (a parent is the control)"


def parent_number(start: str, count: int) -> int:
    """Which parent parent-N means, from 0."""
    number = int(start.removeprefix("parent-"))
    if not 1 <= number <= count:
        raise RequestError(
            f"reconstruct: start is {start}, and the models are parent-1 to parent-{count}.", keys=("start",)
        )
    return number - 1

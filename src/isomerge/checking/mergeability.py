"""How much a merge would lose: a range from the weights alone, or what was measured on data."""

from __future__ import annotations

from dataclasses import dataclass, field

from isomerge.checking.zoo_quantiles import KNOTS, PAIRS
from isomerge.results import Result

SAFE = 0.05
"""Of all a model could lose, the logarithm of the number of its outputs: more in the range is not called safe."""


@dataclass
class ExpectedLoss(Result):
    """What the plain mean loses, by pairs of models at the same distance whose means were measured."""

    low: float
    """In nats per token or answer: a tenth of such pairs lose less."""
    middle: float
    high: float
    """A tenth lose more."""
    safe: bool
    """Whether even the high end is small."""
    pairs: int = PAIRS
    """How many measured pairs the range comes from."""


@dataclass
class TriedMerge(Result):
    """One merge, made in memory and measured on examples it has not seen."""

    name: str
    method: str
    loss: list[float]
    """On each data set."""
    lost: float
    """Above the parents that are believed there; the mean over the data sets."""
    agreement: float | None
    """How often its answer is that of the parents; None for texts to be predicted."""
    seconds: float


@dataclass
class MeasuredMerges(Result):
    """What merges lose on data."""

    unit: str
    """Of losses: nats per token of the text; or nats from the parents' predictions, where these are the goal."""
    data: list[str]
    examples: list[int]
    """Held-out ones, of each data set."""
    goals: str
    """Who is believed on an example: its "own" model, the "expert", or the "mean" of all."""
    parents: list[list[float]]
    """The loss of each model on each data set."""
    believed: list[float]
    """On each data set, the loss of whoever is believed there."""
    merges: list[TriedMerge] = field(default_factory=list)
    best: str | None = None
    """What loses least; of several that lose about the same, the simplest."""
    notes: list[str] = field(default_factory=list)

    def named(self, name: str | None) -> TriedMerge | None:
        return next((one for one in self.merges if one.name == name), None)


@dataclass
class Mergeability(Result):
    """What to expect of merging these models."""

    says: str
    """In one sentence."""
    expected: ExpectedLoss | None = None
    """Of the plain mean, from the distance alone; None where the weights do not tell."""
    measured: MeasuredMerges | None = None
    """With data."""


def expected_loss(distance: float | None, most: float) -> ExpectedLoss | None:
    """The range at a distance; `most` is the logarithm of the number of outputs, which losses are relative to.

    >>> near, far = expected_loss(0.001, 10.0), expected_loss(1.4, 10.0)
    >>> near.safe, far.safe, near.high < far.high
    (True, False, True)
    """
    if distance is None:
        return None
    low, middle, high = (most * share for share in _at(distance))
    return ExpectedLoss(low, middle, high, safe=high <= SAFE * most)


def _at(distance: float) -> tuple[float, float, float]:
    """Between the two nearest knots; beyond the last, its values."""
    before = (0.0, 0.0, 0.0, 0.0)
    for knot in KNOTS:
        if distance <= knot[0]:
            part = (distance - before[0]) / (knot[0] - before[0])
            low, middle, high = (a + part * (b - a) for a, b in zip(before[1:], knot[1:], strict=True))
            return low, middle, high
        before = knot
    return before[1], before[2], before[3]


def told(expected: ExpectedLoss | None, measured: MeasuredMerges | None) -> str:
    """Both in one sentence."""
    if measured is not None and measured.merges:
        losses = [f"{_the(one)} {_loses(one.lost)}{_kept(one)}" for one in measured.merges]
        return f"measured on held-out data, {'; '.join(losses)} ({measured.unit})"
    if expected is None:
        return "what a merge would lose cannot be told from these weights: measure it, with `data`"
    span = f"{expected.low:.2g} to {expected.high:.2g} nats"
    if expected.safe:
        return f"the mean of models this near each other loses {span}"
    most = "most where they know different things: measure it, with `data`"
    return f"the mean of models this far apart loses {span}, {most}"


def _the(merge: TriedMerge) -> str:
    return f"the {merge.name}" if merge.name.endswith("mean") else merge.name


def _kept(merge: TriedMerge) -> str:
    return "" if merge.agreement is None else f" and keeps {100 * merge.agreement:.0f} % of the answers"


def _loses(nats: float) -> str:
    return f"loses {nats:.2f}" if nats > 0.005 else "loses nothing" if nats > -0.005 else f"gains {-nats:.2f}"

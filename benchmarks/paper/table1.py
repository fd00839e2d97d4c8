"""Table 1: language models fine-tuned on different sets, merged in pairs and all together, with and without matching.

    python benchmarks/paper/table1.py --scale small --data DATA --models MODELS --work DIR

In pairs, a merged model is tested on both sets, each time with the head of the model that was trained on it; all
together, on sets that none of them saw, with the merged head. Every model but the first is moved to the first.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import table1_report
from corpora import prepare
from crew import EACH, cells, side_by_side
from encoding import Inputs
from language import (
    Job,
    Judge,
    Plan,
    State,
    base_path,
    bases_of,
    fine_tune,
    origin,
    plan_for,
    seeds_for,
    state_of,
    title,
    with_head,
)
from runner import Result, Run, main

if TYPE_CHECKING:
    from isomerge import Alignment
    from isomerge.calibrate import Statistics
    from isomerge.checkpoint.memory import MemoryCheckpoint

METHODS = ("Simple", "Fisher", "RegMean")
TIMES = 50
"""How much memory a process takes with all models of a task and what was measured of them, in sizes of their base."""
MATCHINGS: dict[str, dict[str, Any] | None] = {
    "": None,
    "+match": {"level": "rotation", "only": "attention"},
    "+full": {"level": "full"},
}


@dataclass(frozen=True)
class Suite:
    """The sets of one task: those that models are trained on, and those that none of them sees."""

    task: str
    inside: tuple[str, ...]
    outside: tuple[str, ...]


CROSSNER = tuple(f"crossner-{domain}" for domain in ("ai", "literature", "music", "politics", "science"))
SUITES = {
    "reduced": (
        Suite("emotion", ("emoint", "tec"), ("dair-emotion",)),
        Suite("ner", ("crossner-politics", "btc"), ("wikigold",)),
    ),
    "small": (
        Suite("emotion", ("emoint", "ssec", "tec", "isear", "crowdflower"),
              ("dailydialog", "goemotions", "dair-emotion", "affectivetext")),
        Suite("ner", (*CROSSNER, "btc", "wnut17", "gum"), ("wikigold",)),
    ),
    "original": (
        Suite("emotion-6", tuple(f"unified-{name}" for name in
                                 ("emoint", "ssec", "electoraltweets", "grounded_emotions", "affectivetext")),
              tuple(f"unified-{name}" for name in ("dailydialog", "crowdflower", "tec", "tales-emotion", "isear"))),
        Suite("ner", tuple(f"ontonotes-{genre}" for genre in ("bc", "bn", "mz", "nw", "tc", "wb")), ("conll2003",)),
    ),
}  # fmt: skip


def pairs(count: int, seed: int, every: bool) -> list[tuple[int, int]]:
    """All pairs; or a ring, in which each set has two partners: with the next seed the partners are other ones.

    >>> pairs(5, 1, every=False)
    [(0, 2), (1, 3), (2, 4), (0, 3), (1, 4)]
    """
    if every:
        return list(itertools.combinations(range(count), 2))
    step = seed % (count // 2) + 1
    found = [(place, (place + step) % count) for place in range(count)]
    return list(dict.fromkeys((min(pair), max(pair)) for pair in found))


@dataclass(frozen=True)
class Group:
    """Models to merge: a pair is tested on its own sets, all together on those that none of them saw."""

    base: str
    suite: Suite
    seed: int
    members: tuple[int, ...]
    plan: Plan
    data: Path | None
    work: Path
    device: str

    def job(self, member: int) -> Job:
        corpus = self.suite.inside[member]
        return Job(self.base, corpus, self.seed, self.plan, self.data, self.work, self.device)


def script(run: Run) -> Result:
    suites = SUITES[run.scale]
    plans = {title(base): plan_for(run.scale, base) for base in bases_of(run)}
    run.settings["plan"] = repr(plans)
    prepare(run, [name for suite in suites for name in (*suite.inside, *suite.outside)])
    bases = {title(base): base_path(base, run.models) for base in bases_of(run)}
    alone: dict[str, Group] = {}
    together: dict[str, Group] = {}
    wanted = {title(base): seeds_for(run, base) for base in bases_of(run)}
    # The larger base first: side by side, the longest jobs should not be the last.
    for (name, base), suite, seed in itertools.product(reversed(bases.items()), suites, range(run.seeds)):
        if seed >= wanted[name]:
            continue
        every = tuple(range(len(suite.inside)))
        here = (plans[name], run.data, run.work, run.device)
        start = f"{name}, {suite.task}, seed {seed}"
        alone[f"{start}, alone"] = Group(base, suite, seed, every, *here)
        if len(every) > 2:  # else the pair is all
            together[f"{start}, all"] = Group(base, suite, seed, every, *here)
        for pair in pairs(len(every), seed, run.scale == "original"):
            together[f"{start}, {'+'.join(suite.inside[member] for member in pair)}"] = Group(
                base, suite, seed, pair, *here
            )
    train(run, alone | together)
    table1_report.notes(run, plans)
    for name, seeds in wanted.items():
        if seeds < run.seeds:
            run.note(f"{name}: {seeds} of {run.seeds} seeds, since its models take long.")
    for base in bases.values():
        if told := origin(base):
            run.note(told)
    found = cells(run, judge_alone, alone)
    for base in reversed(bases.values()):  # one after the other, as all models of a task are in memory at once
        own = {key: group for key, group in together.items() if group.base == base}
        size = sum(file.stat().st_size for file in Path(base).glob("*.safetensors"))
        found |= cells(run, merge_and_judge, own, kin=everyone, each=max(EACH // 4, TIMES * size))
    return table1_report.report(run, list(bases), suites, found)


def train(run: Run, groups: Mapping[str, Group]) -> None:
    """The models of groups that are not judged yet; those that are need no models, not even on another machine."""
    wanted = groups.values() if run.dry else [group for key, group in groups.items() if not run.known(key)]
    jobs = list(dict.fromkeys(group.job(member) for group in wanted for member in group.members))
    missing = [job for job in jobs if not job.done]
    if run.dry:
        for job in jobs:
            run.say(f"would fine-tune {job.base} on {job.corpus}, seed {job.seed}: {job.plan.epochs} epochs, rate "
                    f"{job.plan.rate}, batch {job.plan.batch}, warm-up {job.plan.warm_up}")  # fmt: skip
        return
    run.say(f"{len(missing)} models to fine-tune, {len(jobs) - len(missing)} are there")
    side_by_side(run, fine_tune, missing)


# --- merging ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Parent:
    """A model as it goes into a merge, and what was measured of it."""

    state: State
    config: dict[str, Any]
    corpus: str
    gram: Statistics | None = None
    fisher: Statistics | None = None

    @property
    def checkpoint(self) -> MemoryCheckpoint:
        from isomerge.checkpoint.memory import MemoryCheckpoint

        return MemoryCheckpoint(self.corpus, self.state, self.config)


class Workshop:
    """The models of one base, task and seed, each read and measured once, and the judge of what is made of them."""

    def __init__(self, group: Group) -> None:
        self._group, plan = group, group.plan
        self._inputs = Inputs(group.base, group.data, plan.examples, plan.tested, plan.length)
        self._known: dict[int, Parent] = {}
        self.judge = Judge(group.job(0).folder, group.suite.task, self._inputs, group.device)

    def parent(self, member: int, *, measured: bool = True) -> Parent:
        if member not in self._known or (measured and self._known[member].gram is None):
            folder = self._group.job(member).folder
            config = json.loads((folder / "config.json").read_text())
            plain = Parent(state_of(folder), config, self._group.suite.inside[member])
            self._known[member] = self._measured(plain) if measured else plain
        return self._known[member]

    def _measured(self, parent: Parent, gram: Statistics | None = None) -> Parent:
        """With Gram matrices (or those that were moved) and Fisher information, on the model's own training set."""
        from isomerge.calibrate import calibrate

        plan, device = self._group.plan, self._group.device
        if gram is None:
            gram = calibrate(
                parent.checkpoint, self._inputs.passes(parent.corpus, plan.grams), what={"gram"}, device=device
            )
        batches = self._inputs.passes(parent.corpus, plan.informed, size=16)  # with gradients: half the memory
        fisher = calibrate(parent.checkpoint, batches, what={"fisher"}, fisher="empirical", device=device)
        return Parent(parent.state, parent.config, parent.corpus, lighter(gram), lighter(fisher))

    def moved(self, member: int, anchor: int, matching: dict[str, Any]) -> tuple[Parent, tuple[float, float]]:
        """A model next to another one, and their relative distance before and after.

        Its Gram matrices move with it; Fisher information is measured again. Where nothing needs to move, the model
        itself.
        """
        import isomerge
        from isomerge.merge.statistics import moved_grams

        parent = self.parent(member)
        assert parent.gram is not None
        target = self.parent(anchor).checkpoint
        alignment: Alignment = isomerge.align(parent.checkpoint, target, device=self._group.device, **matching)  # type: ignore[assignment]
        before, after, size = (sum(each[k] for each in alignment.distances().values()) for k in range(3))
        distance = (math.sqrt(before / size), math.sqrt(after / size))
        if alignment.siblings:
            return parent, distance
        plain = Parent(alignment.state_dict(), parent.config, parent.corpus)
        return self._measured(plain, moved_grams(alignment.move(), parent.gram)), distance


def lighter(measured: Statistics) -> Statistics:
    """In float32: sums over examples are made in float64, but what they weigh needs no more digits."""
    from isomerge.calibrate import Statistics

    stored = measured.stored
    return Statistics.of({name: stored.read(name).float() for name in stored.tensors}, measured.info)


@lru_cache(maxsize=1)
def workshop(group: Group) -> Workshop:
    return Workshop(group)


def everyone(group: Group) -> Group:
    """The whole of which it is a part."""
    return replace(group, members=tuple(range(len(group.suite.inside))))


def judge_alone(group: Group) -> dict[str, Any]:
    """Every model on its own set and on those outside."""
    shop, found = workshop(everyone(group)), {}
    for member in group.members:
        parent = shop.parent(member, measured=False)
        for corpus in (parent.corpus, *group.suite.outside):
            found[f"{parent.corpus} on {corpus}"] = shop.judge(parent.state, corpus)["score"]
    return found


def merge_and_judge(group: Group) -> dict[str, Any]:
    """Scores and losses by method, matching and set; mean distances to the first model by matching."""
    shop = workshop(everyone(group))
    plain = [shop.parent(member) for member in group.members]
    first, *others = group.members
    scores: dict[str, dict[str, float]] = {}
    losses: dict[str, dict[str, float]] = {}
    distances: dict[str, list[float]] = {}
    for mark, matching in MATCHINGS.items():
        parents = plain
        if matching is not None:
            moved = [shop.moved(member, first, matching) for member in others]
            parents = [plain[0], *(parent for parent, _ in moved)]
            distances[mark] = [statistics.mean(side) for side in zip(*(both for _, both in moved), strict=True)]
        same = matching is not None and all(a is b for a, b in zip(parents, plain, strict=True))
        for method in METHODS:
            row = method + mark
            if same:  # nothing moved, so the merge is the one that was judged before
                scores[row], losses[row] = scores[method], losses[method]
                continue
            found = judged(shop, group, merged(method, parents, group.device), parents)
            scores[row] = {name: each["score"] for name, each in found.items()}
            losses[row] = {name: each["loss"] for name, each in found.items()}
    return {"scores": scores, "losses": losses, "distances": distances}


def merged(method: str, parents: Sequence[Parent], device: str) -> State:
    import isomerge
    from isomerge.merge.statistics import merge_fisher, merge_regmean

    if method == "Simple":
        return isomerge.merge_state_dicts([parent.state for parent in parents])
    models = [parent.checkpoint for parent in parents]
    if method == "Fisher":
        return dict(merge_fisher(models, [parent.fisher for parent in parents], device=device))
    return dict(merge_regmean(models, [parent.gram for parent in parents], device=device))


def judged(shop: Workshop, group: Group, state: State, parents: Sequence[Parent]) -> dict[str, dict[str, float]]:
    """By test set."""
    found = {}
    if len(parents) == 2:
        for parent in parents:
            owned = with_head(state, parent.state, shop.judge.head)
            found[parent.corpus] = shop.judge(owned, parent.corpus)
    if len(parents) == len(group.suite.inside):
        for corpus in group.suite.outside:
            found[corpus] = shop.judge(state, corpus)
    return found


if __name__ == "__main__":
    main("table1", "Merging fine-tuned language models", "Table 1 of the founding paper", script)

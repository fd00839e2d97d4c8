"""Table 1: language models fine-tuned on different sets, merged in pairs and all together, with and without matching.

    python benchmarks/paper/table1.py --scale small --data DATA --models MODELS --work DIR

In pairs, a merged model is tested on both sets, each time with the head of the model that was trained on it; all
together, on sets that none of them saw, with the merged head. Every model but the first is moved to the first.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import table1_report
from corpora import prepare
from crew import cells, side_by_side
from language import Job, Judge, Plan, State, base_path, bases_of, origin, plan_for, seeds_for, title
from parents import Parent, forget, inputs_for, made, measured_file, moved, parent_of, start_of
from runner import Result, Run, main
from table1_report import BEYOND, METHODS, SIBLINGS

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
    merged: bool
    """Or each of them is judged alone."""
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
    run.settings |= {"plan": repr(plans), "methods": repr((*METHODS, *BEYOND))}
    prepare(run, [name for suite in suites for name in (*suite.inside, *suite.outside)])
    bases = {title(base): base_path(base, run.models) for base in bases_of(run)}
    groups: dict[str, Group] = {}
    wanted = {title(base): seeds_for(run, base) for base in bases_of(run)}
    for (name, base), suite, seed in itertools.product(bases.items(), suites, range(run.seeds)):
        if seed >= wanted[name]:
            continue
        every = tuple(range(len(suite.inside)))
        here = (plans[name], run.data, run.work, run.device)
        start = f"{name}, {suite.task}, seed {seed}"
        groups[f"{start}, alone"] = Group(base, suite, seed, every, False, *here)
        if len(every) > 2:  # else the pair is all
            groups[f"{start}, all"] = Group(base, suite, seed, every, True, *here)
        for pair in pairs(len(every), seed, run.scale == "original"):
            both = "+".join(suite.inside[member] for member in pair)
            groups[f"{start}, {both}"] = Group(base, suite, seed, pair, True, *here)
    table1_report.notes(run, plans)
    for name, seeds in wanted.items():
        if seeds < run.seeds:
            run.note(f"{name}: {seeds} of {run.seeds} seeds, since its models take long.")
    for base in bases.values():
        if told := origin(base):
            run.note(told)
    found = {}
    for base in bases.values():  # one after the other: what was measured of all their models might fill a disk
        own = {key: group for key, group in groups.items() if group.base == base}
        get_ready(run, own)
        # The longest first, as the last ones have to be waited for.
        longest = sorted(own, key=lambda key: (own[key].merged, len(own[key].members)), reverse=True)
        found |= cells(run, judged_group, {key: own[key] for key in longest})
        if not (run.dry or run.finished) and all(run.known(key) for key in own):
            forget(group.job(member) for group in own.values() for member in group.members)
    return table1_report.report(run, list(bases), suites, found)


def get_ready(run: Run, groups: Mapping[str, Group]) -> None:
    """The models of groups that are not judged yet; those that are need no models, not even on another machine."""
    jobs: dict[Job, bool] = {}
    for key, group in groups.items():
        if run.dry or not run.known(key):
            for member in group.members:
                job = group.job(member)
                jobs[job] = jobs.get(job, False) or group.merged
    if run.dry:
        for job in jobs:
            run.say(f"would fine-tune {job.base} on {job.corpus}, seed {job.seed}: {job.plan.epochs} epochs, rate "
                    f"{job.plan.rate}, batch {job.plan.batch}, warm-up {job.plan.warm_up}")  # fmt: skip
        return
    missing = [
        (job, measured)
        for job, measured in jobs.items()
        if not job.done or (measured and not measured_file(job).is_file())
    ]
    run.say(
        f"{sum(not job.done for job in jobs)} models to fine-tune, {sum(job.done for job in jobs)} are there; "
        f"{sum(measured and not measured_file(job).is_file() for job, measured in jobs.items())} to measure"
    )
    side_by_side(run, made, missing)


# --- merging ----------------------------------------------------------------------------------------------------------
_judges: dict[tuple[Any, ...], Judge] = {}


def judge_for(group: Group) -> Judge:
    """One in a process serves all seeds of a base and task."""
    key = (group.base, group.suite.task, group.plan, group.data, group.device)
    if key not in _judges:
        inputs = inputs_for(group.base, group.data, group.plan)
        _judges[key] = Judge(group.job(group.members[0]).folder, group.suite.task, inputs, group.device)
    return _judges[key]


def judged_group(group: Group) -> dict[str, Any]:
    return merge_and_judge(group) if group.merged else judge_alone(group)


def judge_alone(group: Group) -> dict[str, Any]:
    """Every model on its own set and on those outside."""
    judge, found = judge_for(group), {}
    for member in group.members:
        parent = parent_of(group.job(member), measured=False)
        judge.take(parent.state)
        for corpus in (parent.corpus, *group.suite.outside):
            found[f"{parent.corpus} on {corpus}"] = judge.score(corpus)["score"]
    return found


def merge_and_judge(group: Group) -> dict[str, Any]:
    """Scores and losses by method, matching and set; mean distances to the first model by matching; sums of Fisher
    information by model, as the one with the most decides."""
    plain = [parent_of(group.job(member)) for member in group.members]
    scores: dict[str, dict[str, float]] = {}
    losses: dict[str, dict[str, float]] = {}
    distances: dict[str, list[float]] = {}
    for mark, matching in MATCHINGS.items():
        parents = plain
        if matching is not None:
            there = [moved(parent, plain[0], matching) for parent in plain[1:]]
            parents = [plain[0], *(parent for parent, _ in there)]
            distances[mark] = [statistics.mean(side) for side in zip(*(both for _, both in there), strict=True)]
        same = matching is not None and all(a is b for a, b in zip(parents, plain, strict=True))
        for method in METHODS if mark else (*METHODS, *BEYOND):
            row = method + mark
            if same:  # nothing moved, so the merge is the one that was judged before
                scores[row], losses[row] = scores[method], losses[method]
                continue
            found = judged(group, merged(method, parents, group.device), parents)
            scores[row] = {name: each["score"] for name, each in found.items()}
            losses[row] = {name: each["loss"] for name, each in found.items()}
    information = {parent.corpus: parent.information for parent in plain}
    return {"scores": scores, "losses": losses, "distances": distances, "information": information}


def merged(method: str, parents: Sequence[Parent], device: str) -> State:
    import isomerge

    if method == "Simple":
        return isomerge.merge_state_dicts([parent.state for parent in parents])
    models, seen = [parent.checkpoint for parent in parents], [parent.seen for parent in parents]
    if method == "RegMean":
        return isomerge.merge(models, method="regmean", statistics=seen, device=device).state_dict()
    if method in SIBLINGS:
        more = {"statistics": seen} if method == "ESM" else {}
        base = start_of(parents[0].job)
        return isomerge.merge(models, base=base, device=device, **SIBLINGS[method], **more).state_dict()
    normalize = method == "Fisher normalized"
    return isomerge.merge(models, method="fisher", importance=seen, normalize=normalize, device=device).state_dict()


def judged(group: Group, state: State, parents: Sequence[Parent]) -> dict[str, dict[str, float]]:
    """By test set."""
    judge, found = judge_for(group), {}
    judge.take(state)
    if len(parents) == len(group.suite.inside):
        for corpus in group.suite.outside:
            found[corpus] = judge.score(corpus)
    if len(parents) == 2:
        for parent in parents:
            judge.take_head(parent.state)
            found[parent.corpus] = judge.score(parent.corpus)
    return found


if __name__ == "__main__":
    main("table1", "Merging fine-tuned language models", "Table 1 of the founding paper", script)

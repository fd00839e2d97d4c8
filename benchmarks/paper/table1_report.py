"""Table 1's numbers as tables, plots and sentences."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from language import Plan
from runner import Mean, Plot, Result, Run, Table

METHODS = ("Simple", "Fisher", "RegMean")
SIBLINGS: dict[str, dict[str, Any]] = {
    "TIES": {"method": "ties", "density": 0.2}, "TSV-M": {"method": "tsv"}, "Iso-C": {"method": "iso_c"},
    "Iso-CTS": {"method": "iso_cts"}, "WUDI": {"method": "wudi"}, "SVC": {"method": "svc"},
    "DC-Merge": {"method": "dc_merge"}, "OrthoMerge": {"method": "ortho_merge"}, "ACE": {"method": "ace"},
    "EMR, unified": {"method": "emr"}, "Consensus TIES": {"method": "consensus_ties", "density": 0.2},
    "Localize-and-Stitch": {"method": "localize_and_stitch"}, "KnOTS-TIES": {"method": "knots", "density": 0.2},
    "Core Space-TIES": {"method": "core_space", "density": 0.2}, "ESM": {"method": "esm"},
}  # fmt: skip
"""By name, how the newest methods for models of one base merge."""
BEYOND = ("Fisher normalized", *SIBLINGS)
"""Not in the paper, and merged without matching only."""
MARKS = {"": "without matching", "+match": "+match (rotation, attention)", "+full": "+full"}
KINDS = {"inside": "in pairs, in-domain", "outside": "all together, out-of-domain"}
PAPER = {
    "Simple": "35.87 2.99 60.88 27.54 26.86 10.80", "Simple+match": "35.87 2.99 60.88 31.31 26.87 23.30",
    "Fisher": "44.02 35.95 54.55 33.20 23.06 12.53", "Fisher+match": "44.05 35.98 54.58 33.83 23.05 18.33",
    "RegMean": "35.87 2.99 60.88 27.54 26.86 10.80", "RegMean+match": "39.95 2.99 60.88 31.31 26.87 14.06",
}  # fmt: skip
CHANCE = 0.023
"""Of a normal distribution, beyond two standard errors on one side."""
LEAST = 0.1
"""Points of F1."""
Cells = Mapping[str, Mapping[str, Any]]


def notes(run: Run, plans: Mapping[str, Plan]) -> None:
    plan = next(iter(plans.values()))
    if run.scale != "original":
        run.note("The bases are smaller than the paper's RoBERTa-base and DeBERTa-v3-large.")
        run.note(
            f"At most {plan.examples:,} training and {plan.tested:,} test examples a set, {plan.epochs} epochs, "
            f"batches of {plan.batch}; " + "; ".join(f"{base}: {_told(own)}" for base, own in plans.items()) + "."
        )
        run.note(
            "Not all of the paper's sets can be had. Texts count by one of four shared emotions (those with several "
            "are left out), entities by the kinds PER, LOC and ORG; wikigold stands for CoNLL."
        )
    if run.scale == "small":
        run.note("A ring of pairs for each seed, another one for the next, instead of all pairs for each.")
    if run.scale == "reduced":
        skipped = (
            "three of five emotion sets, six of eight sets of entities, three of four sets outside, all but one seed"
        )
        run.note(f"Left out: {skipped}.")
    run.note(
        f"RegMean and ESM see {plan.grams:,} training examples of each model, Fisher {plan.informed:,} with their "
        "labels (empirical). Models of a seed begin with one head; out-of-domain it is merged like the rest."
    )


def _told(plan: Plan) -> str:
    """What may differ between bases."""
    layers = f"the first {plan.layers} layers, " if plan.layers else ""
    precision = ", bfloat16" if plan.bfloat16 else ""
    return f"{layers}rate {plan.rate:g}{precision}, at least {plan.least_steps} steps"


def report(run: Run, bases: Sequence[str], suites: Sequence[Any], cells: Cells) -> Result:
    if run.dry:
        return Result([])
    columns = [(suite, base, kind) for kind in KINDS for suite in suites for base in bases]
    names = [f"{suite.task}, {base}, {KINDS[kind].split(', ')[1]}" for suite, base, kind in columns]
    rows: list[list[str | Mean]] = [["each model alone", *(alone(run, cells, *column) for column in columns)]]
    changes: list[list[str | Mean]] = []
    losses: list[list[str | Mean]] = []
    for method, mark in itertools.product(METHODS, MARKS):
        rows.append([f"{method} {mark}".strip(), *(by_seed(run, cells, *column, method + mark) for column in columns)])
        if mark:
            found = [Mean(differences(cells, *column, method, mark), 2) for column in columns]
            changes.append([f"{method} {mark}", *found])
            found = [Mean(differences(cells, *column, method, mark, "losses"), 5) for column in columns]
            losses.append([f"{method} {mark}", *found])
    rows += [[method, *(by_seed(run, cells, *column, method) for column in columns)] for method in BEYOND]
    tables = [
        Table("F1 in %: macro of emotions, micro of entities; mean and standard error over seeds", ["", *names], rows),
        Table("What matching changes: points of F1, mean and standard error over merges and test sets",
              ["", *names], changes),
        Table("The same of the test loss (negative is better)", ["", *names], losses),
        Table("The paper's numbers",
              ["", *(f"{task}, {base}" for task in ("Emotion", "NER", "NER-CoNLL") for base in ("RoBERTa", "DeBERTa"))],
              [[name, *values.split()] for name, values in PAPER.items()]),
    ]  # fmt: skip
    return Result(tables, plots(run, bases, suites, cells), claims(bases, suites, cells))


# --- numbers ----------------------------------------------------------------------------------------------------------
def merges(
    cells: Cells, suite: Any, base: str, kind: str, seed: int | None = None, what: str = "scores"
) -> Iterator[Mapping[str, Any]]:
    """By method and matching, the scores (or losses) of each merge on the sets of this kind."""
    sets = suite.inside if kind == "inside" else suite.outside
    start = f"{base}, {suite.task}, seed " + ("" if seed is None else f"{seed},")
    for key, cell in cells.items():
        if key.startswith(start) and what in cell:
            kept = {row: [value for name, value in by.items() if name in sets] for row, by in cell[what].items()}
            if any(kept.values()):
                yield kept


def by_seed(run: Run, cells: Cells, suite: Any, base: str, kind: str, row: str) -> Mean:
    means = []
    for seed in range(run.seeds):
        found = [statistics.mean(each[row]) for each in merges(cells, suite, base, kind, seed)]
        means.append(statistics.mean(found) if found else None)
    return Mean(means)


def alone(run: Run, cells: Cells, suite: Any, base: str, kind: str) -> Mean:
    means = []
    for seed in range(run.seeds):
        found = cells.get(f"{base}, {suite.task}, seed {seed}, alone")
        if found is None:  # of this base there are fewer seeds
            continue
        keys = [f"{own} on {own}" for own in suite.inside]
        if kind == "outside":
            keys = [f"{own} on {other}" for own in suite.inside for other in suite.outside]
        means.append(statistics.mean(found[key] for key in keys))
    return Mean(means)


def differences(
    cells: Cells, suite: Any, base: str, kind: str, method: str, mark: str, what: str = "scores"
) -> list[float]:
    """With minus without matching: one number for each merge and test set."""
    return [
        after - before
        for each in merges(cells, suite, base, kind, what=what)
        for after, before in zip(each[method + mark], each[method], strict=True)
    ]


# --- plots and sentences ----------------------------------------------------------------------------------------------
def plots(run: Run, bases: Sequence[str], suites: Sequence[Any], cells: Cells) -> list[Any]:
    found = []
    for kind, suite in itertools.product(KINDS, suites):
        means = {
            label: [by_seed(run, cells, suite, base, kind, method + mark) for base in bases for method in METHODS]
            for mark, label in MARKS.items()
        }
        ticks = [f"{method}, {base}" for base in bases for method in METHODS]
        values = {label: [mean.mean for mean in row] for label, row in means.items()}
        errors = {label: [mean.error for mean in row] for label, row in means.items()}
        found.append(Plot(f"{suite.task}, {KINDS[kind]}", ticks, values, y="F1, %", kind="bars", errors=errors))
    return found


def noise(mean: Mean) -> float:
    """Two standard errors, and at least one answer of a thousand; fewer than three numbers tell nothing."""
    return max(2 * mean.error, LEAST) if len(mean.known) > 2 else math.inf


def distances(cells: Cells, bases: Sequence[str], mark: str) -> list[str]:
    told = []
    for base in bases:
        both = [cell["distances"][mark] for key, cell in cells.items() if key.startswith(base) and "distances" in cell]
        if not both:  # nothing of it is finished
            continue
        before, after = (100 * statistics.mean(side) for side in zip(*both, strict=True))
        told.append(f"{before:.3f} % to {after:.3f} % ({base})")
    if not told:
        return []
    return [f"{MARKS[mark]} brings a model from a distance to the other of {' and of '.join(told)} of its length."]


def informed(bases: Sequence[str], suites: Sequence[Any], cells: Cells) -> list[str]:
    """How unequally Fisher counts the models of a seed."""
    told = []
    for base, suite in itertools.product(bases, suites):
        seeds: dict[str, dict[str, float]] = {}
        for key, cell in cells.items():
            if key.startswith(f"{base}, {suite.task}, ") and "information" in cell:
                seeds.setdefault(key.split(", ")[2], {}).update(cell["information"])
        least = [(max(found.values()), min(found.values())) for found in seeds.values()]
        ratios = [most / few if few > 0 else math.inf for most, few in least]
        if ratios:
            told.append(f"{statistics.median(ratios):,.0f} ({base}, {suite.task})")
    if not told:
        return []
    return [
        "Fisher counts a model by its information, of which one that is sure of its training set has little. The "
        f"largest sum of a seed's models is, in the median over seeds, so many times the smallest: {', '.join(told)}."
    ]


def claims(bases: Sequence[str], suites: Sequence[Any], cells: Cells) -> list[str]:
    sentences, gains = [], {}
    for mark in ("+match", "+full"):
        changes = {
            (base, suite.task, kind, method): Mean(differences(cells, suite, base, kind, method, mark), 2)
            for base, suite, kind, method in itertools.product(bases, suites, KINDS, METHODS)
        }
        changes = {key: mean for key, mean in changes.items() if mean.known}
        if not changes:
            return []
        if mark == "+match":
            gains = {base: Mean([m.mean for key, m in changes.items() if key[0] == base], 2) for base in bases}
        decided = sum(math.isfinite(noise(mean)) for mean in changes.values())
        better = [key for key, mean in changes.items() if mean.mean > noise(mean)]
        worse = [key for key, mean in changes.items() if mean.mean < -noise(mean)]
        every = Mean([mean.mean for mean in changes.values()], 2)
        held = "held in part" if better and worse else "held" if better else "did not hold"
        held = held if better or worse else "not to be told from noise"
        if not decided:
            held = "not decided, with fewer than three numbers for each comparison"
        sentences.append(
            f"Matching helps ({MARKS[mark]}): {held}. Of {decided} comparisons with at least three numbers "
            f"{len(better)} rose and {len(worse)} fell by more than two standard errors "
            f"(by chance {CHANCE * decided:.1f} would each way); "
            f"the mean change is {every} points of F1, from {min(m.mean for m in changes.values()):+.2f} to "
            f"{max(m.mean for m in changes.values()):+.2f}."
        )
        if worse:
            told = "; ".join(f"{method} on {task} ({base}, {kind}): {changes[base, task, kind, method]}"
                             for base, task, kind, method in worse)  # fmt: skip
            sentences.append(f"Worse by more than noise with {MARKS[mark]}: {told}.")
        sentences += distances(cells, bases, mark)
    sentences += informed(bases, suites, cells)
    if len(bases) < 2:
        return sentences
    small, *_, large = bases
    more = gains[large].mean - gains[small].mean
    bound = max(noise(gains[large]), noise(gains[small]))
    held = "held" if more > bound else "did not hold" if more < -bound else "not to be told from noise"
    sentences.append(
        f"Larger models gain more: {held}. +match changes {large} by {gains[large]} and "
        f"{small} by {gains[small]} points of F1."
    )
    return sentences

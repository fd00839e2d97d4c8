"""Table 2: vision transformers merged by Simple, Fisher, RegMean and OT, without and with matching; then our own ways.

python benchmarks/paper/table2.py --scale small --data DATA --work DIR
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from crew import shared, side_by_side
from merges import METHODS, RECONSTRUCT, Merge, Options, Pair, matched_once
from runner import Mean, Plot, Result, Run, Table, main
from vision import Vision

PAPER: dict[str, Options] = {
    "without matching": None,
    "with matching": {"level": "rotation", "only": "attention"},
    "with matching, feed-forwards too": {"level": "rotation"},
    "with scaling matching": {"level": "rotation", "only": "attention", "scale": True},
}
SELECTED = "with matching of one layer, chosen by validation"
OURS: dict[str, Options] = {
    "permutation": {"level": "permutation"},
    "full": {"level": "full"},
    "full, the stream from data": {"level": "full", "data": True},
}
BESIDE = ("with matching, feed-forwards too", *OURS)
WHY = (
    "Why RegMean can lose by matching models that were trained apart: see the section of that name in "
    "`benchmarks/paper/README.md`. It was found on digits: the residual stream stays as it was, so what a query of one "
    "model makes with a key of the other seems to be noise, and matching makes more of it. `full` aligns it too."
)
PUBLISHED = {
    "without matching": {"Simple": 7.60, "Fisher": 17.96, "RegMean": 14.24, "OT": 32.08},
    "with matching": {"Simple": 10.22, "Fisher": 18.61, "RegMean": 15.31, "OT": 32.50},
    "with scaling matching": {"Simple": 10.19, "Fisher": 18.58, "RegMean": 15.35, "OT": 32.53},
}


# --- one number -------------------------------------------------------------------------------------------------------
def measure(vision: Vision, merge: Merge, options: Options, pair: Pair, split: str = "test") -> dict[str, float]:
    models, matching = matched_once(vision, pair, options)
    start = time.perf_counter()
    state = merge(vision, models)
    seconds = time.perf_counter() - start
    return {**vision.judge([state], split), "match_seconds": matching, "merge_seconds": seconds}


def measure_both(vision: Vision, merge: Merge, pair: Pair) -> dict[str, float]:
    """On test and validation images: what is compared with others of its kind."""
    state = merge(vision, matched_once(vision, pair, None)[0])
    return {**vision.judge([state]), "validation": vision.judge([state], "validation")["accuracy"]}


def choose_layer(vision: Vision, merge: Merge, pair: Pair) -> dict[str, Any]:
    """The paper's selection: every layer is matched alone, and the merge that validates best is the one reported."""
    ways = [{"level": "rotation", "only": "attention", "layers": str(layer)} for layer in range(vision.layers)]
    found = [measure(vision, merge, options, pair, "validation")["accuracy"] for options in ways]
    best = max(range(len(ways)), key=lambda layer: found[layer])
    return {**measure(vision, merge, ways[best], pair), "layer": best, "validations": found}


# --- the table --------------------------------------------------------------------------------------------------------
def script(run: Run) -> Result:
    vision = Vision(run)
    parents = Mean([100 * parent["accuracy"] for parent in vision.parents()], unit=" %")
    if shared() and not run.dry:  # every pair in a process of its own; what follows finds its cells
        side_by_side(run, measure_pair, [(run, pair) for pair in vision.pairs])
    cells = {name: [row.cell(run, pair) for pair in row.pairs] for name, row in rows_of(vision).items()}
    means = {name: Mean([100 * cell["accuracy"] for cell in row], unit=" %") for name, row in cells.items()}
    found = {(matching, m): means[f"{m}, {matching}"] for matching in (*PAPER, *OURS, SELECTED) for m in METHODS}
    more = {name: means[name] for name in RECONSTRUCT}
    ensemble = means["ensemble"]
    noted(run, vision)
    order = [*PAPER, SELECTED, *OURS]
    main_table = Table(
        "Test accuracy of the merged model",
        ["matching", *METHODS],
        [[matching, *(found[matching, method] for method in METHODS)] for matching in order],
    )
    rows: dict[str, Mean] = {"the parents": parents, **more, "their ensemble": ensemble}
    beyond = Table("Beyond the paper", ["model", "test accuracy"], [[name, value] for name, value in rows.items()])
    published = Table(
        "The paper's own numbers (two other models, other images)",
        ["matching", *METHODS],
        [[name, *(f"{row[method]:.2f} %" for method in METHODS)] for name, row in PUBLISHED.items()],
    )
    plot = Plot(
        "accuracy of the merged model, %",
        list(METHODS),
        {matching: [found[matching, method].mean for method in METHODS] for matching in order},
        kind="bars",
        errors={matching: [found[matching, method].error for method in METHODS] for matching in order},
    )
    return Result([main_table, beyond, published], [plot], claims(run, vision, found, more, parents))


@dataclass(frozen=True)
class Row:
    """One way to merge, and the pairs it is measured on."""

    name: str
    work: Callable[[Pair], dict[str, Any]]
    pairs: list[Pair]

    def cell(self, run: Run, pair: Pair) -> dict[str, Any]:
        return run.cell(f"{self.name} {pair[0]}-{pair[1]}", partial(self.work, pair))


def rows_of(vision: Vision) -> dict[str, Row]:
    run, every = vision.run, vision.pairs
    found = []
    for method, merge in METHODS.items():
        for matching, options in {**PAPER, **OURS}.items():
            some = pairs_for(run, vision, method, matching)
            found.append(Row(f"{method}, {matching}", partial(measure, vision, merge, options), some))
        some = pairs_for(run, vision, method, SELECTED)
        found.append(Row(f"{method}, {SELECTED}", partial(choose_layer, vision, merge), some))
    found += [Row(name, partial(measure_both, vision, merge), every) for name, merge in RECONSTRUCT.items()]
    found.append(Row("ensemble", vision.together, every))
    return {row.name: row for row in found}


def measure_pair(job: tuple[Run, Pair]) -> None:
    """Every row of one pair, into the cells."""
    run, pair = job
    for row in rows_of(Vision(run)).values():
        if pair in row.pairs:
            row.cell(run, pair)


def pairs_for(run: Run, vision: Vision, method: str, matching: str) -> list[Pair]:
    """All; but at the small scale, which has to end in ten minutes, the first alone where a method takes long."""
    long = (method != "Simple" and matching == SELECTED) or (method == "OT" and matching in BESIDE)
    if run.scale != "small" or not long or len(vision.pairs) == 1:
        return vision.pairs
    run.note(
        "For the first pair only: all but Simple with the layer chosen by validation (a merge for every layer), "
        f"and OT {'; '.join(BESIDE)}."
    )
    return vision.pairs[:1]


def noted(run: Run, vision: Vision) -> None:
    counts = vision.counts
    run.note(
        f"Training images, without labels: Fisher {counts.fisher:,} (labels drawn from the model), RegMean "
        f"{counts.regmean:,}, OT {counts.transport:,}, the stream {counts.stream:,}, reconstruct "
        f"{counts.reconstruct:,} ({counts.refine} gradient steps a block where refined). The paper does not say how "
        "many it used."
    )
    run.note(
        "OT is OT-acts-EMD with its authors' options; the published method changes the plan of the residual stream "
        "from sum to sum, here the stream has one plan."
    )
    run.note(
        "As we read it, the paper reports for matching only the layer chosen by validation; here matching all layers "
        "has rows of its own."
    )


def claims(
    run: Run, vision: Vision, found: Mapping[tuple[str, str], Mean], more: Mapping[str, Mean], parents: Mean
) -> list[str]:
    if not all(mean.known for mean in (parents, *found.values(), *more.values())):  # a dry run, or not finished
        return []
    images = int(run.cells["parent 0"]["values"]["images"])
    said = []
    for matching in ("with matching", "with scaling matching", SELECTED):
        gains = {m: difference(found[matching, m], found["without matching", m], images) for m in METHODS}
        worse = [m for m, (gain, noise) in gains.items() if gain < -2 * noise]
        better = [m for m, (gain, noise) in gains.items() if gain > 2 * noise]
        numbers = ", ".join(f"{m} {gain:+.1f} ± {noise:.1f}" for m, (gain, noise) in gains.items())
        held = "did not hold" if worse else "held in part" if better else "not to be told from noise"
        held = "held" if len(better) == len(gains) else held
        said.append(
            f"Matching helps: {held} {matching} (points gained, ± noise: {numbers}); beyond twice the noise, better "
            f"for {', '.join(better) or 'none'} and worse for {', '.join(worse) or 'none'}."
        )
        if "RegMean" in worse:
            run.note(WHY)
    moved = []
    for method in METHODS:
        after, before = found["full", method], same_pairs(found["without matching", method], found["full", method])
        moved.append(f"{method} {before.mean:.1f} → {after.mean:.1f} %")
    said.append(f"With the level `full` instead: {', '.join(moved)}; parents {parents}.")
    best = max(more, key=lambda name: validated(vision, name))
    said.append(
        f"Of the merges beyond the paper, validation prefers {best}: {more[best]} on the test, {parents} the parents."
    )
    return said


def validated(vision: Vision, name: str) -> float:
    return Mean([vision.run.cells[f"{name} {a}-{b}"]["values"]["validation"] for a, b in vision.pairs]).mean


def same_pairs(before: Mean, after: Mean) -> Mean:
    """Those pairs that both were measured on: the first ones, where `after` has fewer."""
    return Mean(before.values[: len(after.values)])


def difference(after: Mean, before: Mean, images: int) -> tuple[float, float]:
    """The mean gain over pairs, and its noise: the larger of the pairs' standard error and that of counting images."""
    earlier = same_pairs(before, after)
    gain = Mean([a - b for a, b in zip(after.known, earlier.known, strict=True)])
    share = min(max((after.mean + earlier.mean) / 200, 0.0), 1.0)
    counting = 100 * (2 * share * (1 - share) / images / len(after.known)) ** 0.5
    return gain.mean, max(gain.error, counting)


if __name__ == "__main__":
    main("table2", "Merging vision transformers", "Table 2 of the founding paper", script)

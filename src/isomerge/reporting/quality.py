"""How good a merged model is, from scores and curves that were measured: what a verdict rests on before all else."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from isomerge.reporting.blocks import known
from isomerge.reporting.measurements import data_name, is_about, is_line, is_score, is_sweep, same_model
from isomerge.reporting.record import Record

ON_THE_LINE = ("linear", "uniform_soup", "slerp")
"""Of two models these lie on the line between them, or near it: a barrier there is about the merged model."""

Card = tuple[str, str, str]
"""Label, value, explanation."""


@dataclass(frozen=True)
class Evidence:
    """What was measured, in words, and the share of the parents' quality that was kept; None where parents lack."""

    words: str
    kept: float | None
    of: str = "score"
    """Of the model's own score, or of the barrier between its parents."""


def evidence(record: Record, measurements: Sequence[Record], name: str) -> Evidence | None:
    """The worst of the merged model's scores beside its parents'; without scores, the barrier between the parents."""
    found = [_beside_parents(own, _of_parents(record, measurements, own)) for own in own_scores(measurements, name)]
    found = found or [_on_the_line(curve, line) for curve, line in merge_lines(record, measurements)]
    compared = [one for one in found if one.kept is not None]
    return min(compared, key=lambda one: one.kept or 0.0) if compared else next(iter(found), None)


# --- scores -----------------------------------------------------------------------------------------------------------
def own_scores(measurements: Sequence[Record], name: str) -> list[Record]:
    return [one for one in measurements if is_score(one) and same_model(one["model"], name)]


def parents_of(record: Record) -> list[str]:
    return [entry["reference"] for entry in record.get("inputs") or () if entry.get("role") != "file"]


def _of_parents(record: Record, measurements: Sequence[Record], own: Record) -> list[Record]:
    """Scores of the parents on the same data."""
    parents = parents_of(record)
    return [
        one
        for one in measurements
        if is_score(one)
        and any(same_model(one["model"], parent) for parent in parents)
        and all(one.get(key) == own.get(key) for key in ("task", "data", "metric_name"))
    ]


def best_of(scores: Sequence[Record]) -> Record | None:
    """By the metric, or by the loss where one of them has no metric."""
    if not scores:
        return None
    if all(one.get("metric") is not None for one in scores):
        sign = 1 if scores[0]["higher_is_better"] else -1
        return max(scores, key=lambda one: sign * one["metric"])
    losses = [one for one in scores if one.get("loss") is not None]
    return min(losses, key=lambda one: one["loss"]) if losses else None


def _beside_parents(own: Record, parents: Sequence[Record]) -> Evidence:
    best = best_of(parents)
    key = "metric" if own.get("metric") is not None else "loss"
    value, name = own.get(key), own["metric_name"] if key == "metric" else "loss"
    where = f" on {data}" if (data := data_name(own)) else ""
    if value is None:
        return Evidence(f"the {name} of the result{where} is no number", 0.0)
    words = f"the result has {name} {shown(value)}{where}"
    if best is None or best.get(key) is None:
        return Evidence(f"{words}, and its parents were not measured there", None)
    higher = key == "metric" and own["higher_is_better"]
    kept = _share(value, best[key], higher=higher) if key == "metric" else math.exp(min(0.0, best[key] - value))
    return Evidence(f"{words}, its best parent {shown(best[key])}", kept)


def _share(value: float, best: float, *, higher: bool) -> float:
    """The part of the best value that is left; metrics that can be negative have no share, only a sign.

    >>> _share(0.45, 0.9, higher=True), _share(20.0, 10.0, higher=False), _share(-0.1, 0.0, higher=True)
    (0.5, 0.5, 0.0)
    """
    above, below = (value, best) if higher else (best, value)
    if below > 0:
        return max(0.0, above / below)
    return 1.0 if above >= below else 0.0


# --- curves -----------------------------------------------------------------------------------------------------------
def merge_lines(record: Record, measurements: Sequence[Record]) -> list[tuple[Record, Record]]:
    """The curves that this merge lies on, each with its line: between its two parents, and aligned as it was."""
    parents = parents_of(record)
    if len(parents) != 2 or record.get("method") not in ON_THE_LINE:
        return []
    alignment = record.get("alignment")
    found = []
    for curve in measurements:
        if is_line(curve) and is_about(curve, parents):
            lines = [one for one in aligned_lines(curve) if alignment and one["level"] == alignment.get("level")]
            found += [(curve, line) for line in (lines if alignment else [curve])]
    return found


def aligned_lines(curve: Record) -> list[Record]:
    aligned = curve.get("aligned") or []
    return list(aligned) if isinstance(aligned, list) else [aligned]


def _on_the_line(curve: Record, line: Record) -> Evidence:
    """The rise of the loss; of a measure without a loss, how far the worst point lies below the ends."""
    where = f" on {data}" if (data := data_name(curve)) else ""
    if (barrier := line.get("barrier")) is not None:
        words = f"between the parents the loss{where} rises by at most {shown(barrier)} above its ends"
        return Evidence(words, math.exp(-max(0.0, barrier)), "barrier")
    metrics = [point["metric"] for point in line["points"]]
    if len(known(metrics)) < len(metrics):
        return Evidence(f"between the parents the loss{where} is not everywhere a number", 0.0, "barrier")
    higher = curve.get("higher_is_better") is not False
    ends, worst = (metrics[0] + metrics[-1]) / 2, min(metrics) if higher else max(metrics)
    name, verb = curve.get("metric_name") or "metric", "falls to" if higher else "rises to"
    words = f"between the parents the {name}{where} {verb} {shown(worst)}, from {shown(ends)} at the ends"
    return Evidence(words, min(1.0, _share(worst, ends, higher=higher)), "barrier")


# --- the numbers on top of the page, and how to get them --------------------------------------------------------------
def quality_cards(record: Record, measurements: Sequence[Record], name: str) -> list[Card]:
    """Scores of this model, the barrier between its parents, the best point of a sweep."""
    parents, scores = parents_of(record), own_scores(measurements, name)
    cards = [_score_card(own, best_of(_of_parents(record, measurements, own))) for own in scores]
    cards += [_barrier_card(one) for one in measurements if is_line(one) and is_about(one, parents)]
    return cards + [_sweep_card(one) for one in measurements if is_sweep(one) and is_about(one, parents)]


def _score_card(own: Record, best: Record | None) -> Card:
    hint = [f"on {data}" if (data := data_name(own)) else own["task"]]
    if best is not None:
        hint.append(f"best parent {_value(best)[1]}")
    return *_value(own), "; ".join(hint)


def _value(score: Record) -> tuple[str, str]:
    by_metric = score.get("metric") is not None
    return (score["metric_name"], shown(score["metric"])) if by_metric else ("loss", shown(score.get("loss")))


def _barrier_card(curve: Record) -> Card:
    lines = [curve, *aligned_lines(curve)]
    values = " → ".join(shown(line.get("barrier")) for line in (lines[0], lines[-1])[: len(lines)])
    where = f" on {data}" if (data := data_name(curve)) else ""
    moved = f"; then aligned at level {lines[-1]['level']}" if len(lines) > 1 else ""
    return "barrier", values, f"rise of the loss between the parents{where}{moved}"


def _sweep_card(sweep: Record) -> Card:
    best, name = sweep["best"], sweep["metric_name"] if sweep["by"] == "metric" else "loss"
    at = ", ".join(f"{key} = {value}" for key, value in best["parameters"].items()) or "the recipe as it is"
    tested = (sweep.get("test") or {}).get("best")
    other = f"; {shown(tested.get(sweep['by']))} on other data" if tested else ""
    return f"best {name} of a sweep", shown(best.get(sweep["by"])), f"{at}, of {len(sweep['points'])} points{other}"


def how_to_measure(record: Record, place: str) -> str:
    """Commands that measure the model in this folder and its parents beside it, and write the page again."""
    models = {place: "eval.json"} | {parent: f"eval-{n}.json" for n, parent in enumerate(parents_of(record), start=1)}
    evals = [
        f"isomerge eval {shlex.quote(model)} --data DATA --json > {shlex.quote(f'{place}/{file}')}"
        for model, file in models.items()
    ]
    return "\n".join([*evals, f"isomerge report {shlex.quote(place)}"])


def shown(value: Any) -> str:
    """Four digits at most.

    >>> shown(0.91250), shown(12.3456), shown(None)
    ('0.9125', '12.35', '–')
    """
    return "–" if value is None else f"{value:.4g}"

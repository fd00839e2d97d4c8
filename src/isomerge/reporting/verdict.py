"""The first sentence of a page: what was done to which models, what to expect, and what was measured."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isomerge.kinship import IDENTICAL, RELATED, SIBLINGS, STRANGERS, are_related
from isomerge.reporting.blocks import figures, known, percent
from isomerge.reporting.method_sections import has_joint_features
from isomerge.reporting.quality import evidence, parents_of
from isomerge.reporting.record import Record
from isomerge.text import short_names

GOOD, CAUTION, BAD = "good", "caution", "bad"
NEAR = 0.04
"""Siblings at most this far apart: of nine in ten such pairs that were measured, the mean lost little (see check)."""
APART = math.sqrt(2 * (1 - RELATED))
"""The distance of two models of one size whose cosine is `RELATED`."""
KEEPS, LOSES = 0.95, 0.8
"""Shares of the parents' quality: from the first on a merge is called good, below the second poor."""
MEASURED = {
    "score": {GOOD: "Keeps its parents' quality", CAUTION: "Loses some quality", BAD: "Loses much quality"},
    "barrier": {GOOD: "No barrier", CAUTION: "A low barrier", BAD: "A high barrier"},
}
DAMAGE = {"complete", "opens", "index", "lock"}
"""Checks that fail where files were changed, lost or cut short after they were written."""
DEEDS = {
    "linear": "averaged",
    "uniform_soup": "averaged",
    "slerp": "interpolated",
    "passthrough": "stacked",
    "reconstruct": "rebuilt from their features",
}


@dataclass(frozen=True)
class Verdict:
    """A colour, two or three words, a sentence, and a command where something else should be done, and what it does."""

    tone: str
    label: str
    sentence: str
    command: str | None = None
    purpose: str = ""


def verdict(
    record: Record, measurements: Sequence[Record] = (), name: str = "merged", place: str | None = None
) -> Verdict | None:
    """A failed check comes first, then what was measured, then what is known of such models; `name` is the folder's,
    `place` its path in a command. None for a demo, which has a page of its own."""
    place = name if place is None else place
    failed = [c for c in (record.get("run") or {}).get("checks") or () if c["passed"] is False]
    if record["kind"] == "demo":
        return None
    if failed:
        return _failed(record, failed, name, place)
    if record["kind"] == "align":
        return _aligned(record)
    return _adapters(record) if record["kind"] == "adapters" else _merged(record, measurements, name, place)


def has_failed(record: Record) -> bool:
    """A file check failed: nothing else about this model is worth knowing before it is written again."""
    return any(check["passed"] is False for check in (record.get("run") or {}).get("checks") or ())


def _failed(record: Record, checks: Sequence[Record], name: str, place: str) -> Verdict:
    first, more = checks[0], len(checks) - 1
    others = f", and {more} other{'s' if more > 1 else ''}" if more else ""
    sentence = f"Do not use {name}: the check '{first['name']}' failed ({first['detail']}){others}."
    if record["kind"] != "merge" or not {check["name"] for check in checks} & DAMAGE:
        return Verdict(BAD, "File check failed", sentence)
    again = shlex.join(["isomerge", "reproduce", place, "-o", f"{place}-again"])
    return Verdict(BAD, "File check failed", sentence, again, "Write it again, from its lock file:")


def _aligned(record: Record) -> Verdict:
    alignment = record["alignment"]
    (moved,) = alignment["models"]
    who, anchor = short_names([moved["model"], alignment["anchor"]])
    done = moved["verdict"].partition(":")[0]
    if done == "changed":
        return Verdict(BAD, "Function changed", f"{who} was moved next to {anchor}, and {moved['verdict']}.")
    if done in ("siblings", "unmoved"):
        why = "already lies next to" if done == "siblings" else "has nothing that may move next to"
        return Verdict(GOOD, "Nothing to move", f"{who} {why} {anchor}, and was written as it is.")
    distance, difference = record.get("distance") or {}, record.get("max_output_difference")
    nearer = ""
    if distance.get("before") is not None and distance.get("after") is not None:
        nearer = f"; its distance to {anchor} fell from {figures(distance['before'])} to {figures(distance['after'])}"
    said = f"{who} was moved next to {anchor} without a change of its function"
    if difference is None:
        reason = record.get("max_output_difference_reason") or "no reason given"
        return Verdict(CAUTION, "Not compared", f"{said}, but its outputs were not compared ({reason}){nearer}.")
    return Verdict(GOOD, "Same function", f"{said}: outputs differ by {difference:.1g} of the largest{nearer}.")


def _adapters(record: Record) -> Verdict:
    who, missed = _listed(parents_of(record)), record.get("relative_error")
    said = f"{who} were merged into one adapter by {record.get('method')}"
    if missed is None:
        return Verdict(CAUTION, "Not measured", f"{said}.")
    sentence = f"{said}; cutting it to its rank misses {percent(missed).text} of the merged update."
    return Verdict(*((GOOD, "Close fit") if missed <= 1 - KEEPS else (CAUTION, "Rank was cut")), sentence)


# --- merged models ----------------------------------------------------------------------------------------------------
def _merged(record: Record, measurements: Sequence[Record], name: str, place: str) -> Verdict:
    models, expected = _models(record), _expected(record)
    measured = evidence(record, measurements, name)
    were = "was" if len(models) == 1 else "were"
    said = f"{_listed(models)}{expected.kin} {were} {_deed(record)}{' unaligned' * (expected.tone == BAD)}"
    if measured is None:
        sentence = f"{said}: {expected.words}."
        return Verdict(
            expected.tone, expected.label, sentence, _instead(record, expected, place), "Align them instead:"
        )
    if measured.kept is None:
        tone = BAD if expected.tone == BAD else CAUTION
        return Verdict(tone, "Compare with its parents", f"{said}: {measured.words}.")
    tone = GOOD if measured.kept >= KEEPS else CAUTION if measured.kept >= LOSES else BAD
    return Verdict(tone, MEASURED[measured.of][tone], f"{said}: {measured.words}.")


@dataclass(frozen=True)
class Expectation:
    """What to expect of a merge that was not measured; `kin`: what the models are to each other, after their names."""

    tone: str
    label: str
    kin: str
    words: str


def _expected(record: Record) -> Expectation:
    kin, near, distance = _kinship(record)
    if kin is None:
        return Expectation(CAUTION, "Not measured", "", "how well the result works is not known until it is measured")
    if kin == IDENTICAL:
        return Expectation(GOOD, "Same weights", ", which hold the same weights,", "the result is the same model")
    if kin == STRANGERS:
        return _of_strangers(record, near)
    who = f", siblings{_of_base(record, ' of')}{near},"
    if distance is not None and distance > NEAR:
        words = f"they lie {figures(distance)} apart, so the result may lose quality: measure how much"
        return Expectation(CAUTION, "Measure it", who, words)
    return Expectation(GOOD, "Expect it to work", who, "expect the result to work like its parents")


def _of_strangers(record: Record, near: str) -> Expectation:
    met, moved = record.get("strangers"), _was_moved(record)
    if met:
        return Expectation(BAD, "Expect noise", "; ".join(_met(record, *one) for one in met.items()), "expect noise")
    who = f", strangers{_of_base(record, ' to')}{near},"
    if met is None and not moved and not record.get("layers"):  # a record of version 0.1
        return Expectation(BAD, "Expect noise", who, "expect noise")
    left = _farthest(record, "after") if moved else None
    if left is not None and left <= NEAR:
        words = "they were one model in another order, and the result should work like it"
        return Expectation(GOOD, "Expect it to work", who, words)
    still = "" if left is None else f"after alignment they still lie {figures(left)} apart, so "
    return Expectation(
        CAUTION, "Expect lower quality", who, f"{still}expect the result to lose quality, and measure how much"
    )


def _met(record: Record, reference: str, others: Mapping[str, float]) -> str:
    """Strangers of one model, after the names of all."""
    near = f" (cosine {_cosine(min(others.values()))})"
    if {*_models(record)} <= {reference, *others}:
        return f", strangers{_of_base(record, ' to')}{near},"
    are = "are strangers" if len(others) > 1 else "is a stranger"
    return f", of which {_listed(list(others))} {are} to {_listed([reference])}{near},"


def _kinship(record: Record) -> tuple[str | None, str, float | None]:
    """What the models are to each other as they are stored; by which number, in words; how far they lie apart."""
    measured = record.get("measured") or {}
    if record.get("strangers"):
        return STRANGERS, "", None
    distance = _farthest(record, "before")
    distance = _farthest(record, "after") if distance is None else distance
    pairs = [] if measured.get("base") else [pair["cosine"] for pair in measured.get("pairs") or ()]
    cosine = min(known(one["after"] if one["before"] is None else one["before"] for one in pairs), default=None)
    if distance == 0.0:
        return IDENTICAL, "", distance
    if cosine is not None:
        return SIBLINGS if are_related(cosine) else STRANGERS, f" (cosine {_cosine(cosine)})", distance
    if distance is None:
        return None, "", None
    return SIBLINGS if distance < APART else STRANGERS, f" (distance {figures(distance)})", distance


def _farthest(record: Record, side: str) -> float | None:
    """From the anchor, the base or the first model: as the models are stored (before), and as they are merged."""
    whole: dict[str, Any] = (record.get("measured") or {}).get("all") or {}
    return max(known((whole.get("distance") or {}).get(side) or ()), default=None)


def _was_moved(record: Record) -> bool:
    models = (record.get("alignment") or {}).get("models") or ()
    return any(model["verdict"].startswith("aligned") for model in models)


def _bases(record: Record) -> list[str]:
    """Bases that task vectors are measured from; elsewhere a base is one of the models."""
    inputs = record.get("inputs") or () if (record.get("measured") or {}).get("base") else ()
    return [entry["reference"] for entry in inputs if entry.get("role") == "base"]


def _models(record: Record) -> list[str]:
    bases = _bases(record)
    return [name for name in parents_of(record) if name not in bases]


def _of_base(record: Record, word: str) -> str:
    bases = _bases(record)
    return f"{word} the base {_listed(bases)}" if bases else ""


def _listed(models: Sequence[str]) -> str:
    names = short_names(models)
    if len(names) > 4:
        return f"{names[0]}, {names[1]} and {len(names) - 2} more models"
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names) or "The models"


def _deed(record: Record) -> str:
    method = str(record.get("method"))
    deed = DEEDS.get(method, f"merged by {method}")
    alignment = record.get("alignment") or {}
    if _was_moved(record):
        level = f" (level {alignment['level']})" if alignment.get("level") else ""
        return f"aligned{level} and {deed}"
    return deed.replace("features", "joint features") if has_joint_features(record) else deed


def _instead(record: Record, expected: Expectation, place: str) -> str | None:
    """Strangers that were merged as they are: the same models, aligned."""
    if expected.tone != BAD:
        return None
    return shlex.join(["isomerge", "merge", *_models(record), "--align", "-o", f"{place}-aligned"])


def _cosine(value: float) -> str:
    """
    >>> _cosine(0.987), _cosine(-0.0004)
    ('0.99', '0.00')
    """
    return f"{round(value, 2) + 0.0:.2f}"

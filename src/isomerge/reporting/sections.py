"""From the record of a run to the sections of its page. What the record does not have, the page does not mention."""

from __future__ import annotations

from collections.abc import Sequence

from isomerge.reporting import blocks as b
from isomerge.reporting.curve_sections import connection_sections, score_section
from isomerge.reporting.demo_sections import demo_cards, demo_origin_sections, demo_sections
from isomerge.reporting.method_sections import method_section
from isomerge.reporting.origin_sections import checks_words, origin_sections, seconds_words
from isomerge.reporting.quality import Card, quality_cards
from isomerge.reporting.record import Record
from isomerge.reporting.relation_sections import alignment_section, relation_section
from isomerge.reporting.search_section import search_section
from isomerge.reporting.terminal import size

UNRELATED = ": 0 is the same, 1.41 unrelated"


def sections(record: Record, lock: Record | None, measurements: Sequence[Record]) -> list[b.Section]:
    """Every section that has something to say, in the order of the page: what to know first, where it comes from
    last."""
    measured = [score_section(measurements), *connection_sections(measurements), search_section(record)]
    relations = [alignment_section(record), relation_section(record)]
    if record["kind"] == "demo":
        every = [*demo_sections(record), *measured, *relations, *demo_origin_sections(record)]
    else:
        every = [_notes(record, lock), *measured, *relations, method_section(record), _adapters(record)]
    every += origin_sections(record, lock)
    every += [_notes(record, lock)] if record["kind"] == "demo" else []
    return [section for section in every if section is not None and section.blocks]


def cards(record: Record, measurements: Sequence[Record], name: str) -> list[Card]:
    """The few numbers to see first, quality before all else."""
    numbers = demo_cards(record) if record["kind"] == "demo" else _merge_cards(record)
    numbers = [*quality_cards(record, measurements, name), *numbers]
    run = record.get("run") or {}
    if (seconds := seconds_words(run.get("seconds"))) is not None:
        memory = f"{size(run['peak_memory_bytes'])} of memory at most" if run.get("peak_memory_bytes") else ""
        numbers.append(("time", seconds, memory))
    if run.get("checks") and record["kind"] != "demo":
        wrong = any(check["passed"] is False for check in run["checks"])
        numbers.append(("file integrity", "failed" if wrong else "good", checks_words(run["checks"])))
    return numbers


def _merge_cards(record: Record) -> list[Card]:
    numbers: list[Card] = []
    whole = (record.get("measured") or {}).get("all")
    distance = record.get("distance")
    if distance and distance.get("before") is not None:
        numbers.append(("distance", _arrow(distance["before"], distance["after"]), f"from the anchor{UNRELATED}"))
    elif whole and b.known(whole["distance"]["after"]):
        before, after = (b.mean(whole["distance"][side]) for side in ("before", "after"))
        numbers.append(("distance", _arrow(before, after), f"from {record['measured']['reference']}{UNRELATED}"))
    if record.get("max_output_difference") is not None:
        numbers.append(("output difference", b.number(record["max_output_difference"]).text, "of the largest output"))
    if whole and b.known(whole["cosine"].values()):
        between = "task vectors" if record["measured"]["base"] else "models"
        known = b.known(whole["cosine"][side] for side in ("before", "after"))
        angle = " → ".join(f"{value:.3f}" for value in known)  # near 0 a cosine has no digits worth more
        numbers.append(("cosine", angle, f"between the {between}: 1 is the same direction, 0 unrelated"))
    if record.get("relative_error") is not None:
        numbers.append(
            ("missed", b.percent(record["relative_error"]).text, "of the merged update, by cutting its rank")
        )
    return numbers


def _arrow(before: float | None, after: float | None) -> str:
    shown = [b.number(value).text for value in (before, after) if value is not None]
    return " → ".join(shown)


def _adapters(record: Record) -> b.Section | None:
    targets = record.get("targets")
    if not targets:
        return None
    rows = [
        b.Row([b.text(t["name"], code=True), b.count(t["rank"]), b.percent(t["error"]),
               *([b.number(t["cosine"])] if "cosine" in t else [])], t.get("layer"))
        for t in targets
    ]  # fmt: skip
    columns = ("layer", "rank", "missed", *(("cosine",) if "cosine" in targets[0] else ()))
    caption = "Every adapted layer: the rank that was kept and what the cut misses of the merged update"
    if "cosine" in targets[0]:
        caption += "; the mean cosine between the adapters' updates"
    return b.Section("adapters", "Adapted layers", [b.TableBlock(caption, columns, rows, frozenset({1, 2, 3}))])


def _notes(record: Record, lock: Record | None) -> b.Section | None:
    notes = list(record.get("notes") or ())
    if lock is not None and record.get("sha256") not in (None, lock["sha256"]):
        notes.insert(0, "the lock file is of other weights than this record: the folder was written more than once")
    return b.Section("notes", "Notes", [b.Notes(notes)] if notes else [])

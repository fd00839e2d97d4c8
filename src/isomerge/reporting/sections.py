"""From the record of a run to the sections of its page. What the record does not have, the page does not mention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from isomerge.reporting import blocks as b
from isomerge.reporting.curve_sections import connection_sections
from isomerge.reporting.demo_sections import demo_cards, demo_headline, demo_origin_sections, demo_sections
from isomerge.reporting.method_sections import method_section
from isomerge.reporting.record import TEXT, Record
from isomerge.reporting.relation_sections import alignment_section, relation_section
from isomerge.reporting.terminal import size

NO_LOCK = (
    "align writes no lock file: isomerge verify can look at this folder but has no hashes to compare it with, and "
    "isomerge reproduce cannot be asked. Nothing in an alignment is random: on the same machine the same command gives "
    "the same weights again."
)


def sections(record: Record, lock: Record | None, curves: Sequence[Record]) -> list[b.Section]:
    """Every section that has something to say, in the order of the page."""
    relations = [alignment_section(record), relation_section(record)]
    every = [
        *(demo_sections(record) if record["kind"] == "demo" else relations),
        *connection_sections(curves),
        *(relations if record["kind"] == "demo" else [method_section(record)]),
        _adapters(record),
        *(demo_origin_sections(record) if record["kind"] == "demo" else []),
        _request(record),
        _recipe(record),
        _lineage(record, lock),
        _lock(record, lock),
        _verification(record),
        _run(record),
        _notes(record, lock),
    ]
    return [section for section in every if section is not None and section.blocks]


def headline(record: Record) -> str:
    """One sentence on top of the page."""
    if record["kind"] == "demo":
        return demo_headline(record)
    inputs = record.get("inputs") or []
    origin = {"align": "Moved next to its anchor", "adapters": f"One adapter made from {len(inputs)} adapters"}
    made = origin.get(record["kind"], f"One model made from {_parents(record)}")
    return f"{made} with isomerge {record['isomerge']}."


def _parents(record: Record) -> str:
    """A base is counted apart where the others are taken as what they add to it; elsewhere it is one of them."""
    inputs = record.get("inputs") or []
    apart = (record.get("measured") or {}).get("base") and any(entry.get("role") == "base" for entry in inputs)
    models = sum(entry.get("role") != "file" for entry in inputs) - bool(apart)
    return f"{models} model{'s' if models != 1 else ''}" + (" and a base" if apart else "")


def cards(record: Record) -> list[tuple[str, str, str]]:
    """The few numbers to see first: label, value, explanation."""
    numbers = demo_cards(record) if record["kind"] == "demo" else _merge_cards(record)
    run = record.get("run") or {}
    if run.get("seconds") is not None:
        memory = f"{size(run['peak_memory_bytes'])} of memory at most" if run.get("peak_memory_bytes") else ""
        numbers.append(("time", _seconds(run["seconds"]), memory))
    if run.get("checks") and record["kind"] != "demo":
        wrong = sum(check["passed"] is False for check in run["checks"])
        asked = sum(check["passed"] is not None for check in run["checks"])
        left = len(run["checks"]) - asked
        passed = f"{asked - wrong} of {asked} checks passed" + (f", {left} not asked" if left else "")
        numbers.append(("verified", "no" if wrong else "yes", passed))
    return numbers


def _merge_cards(record: Record) -> list[tuple[str, str, str]]:
    numbers: list[tuple[str, str, str]] = []
    if record.get("method"):
        numbers.append(("method", record["method"], record.get("summary") or ""))
    whole = (record.get("measured") or {}).get("all")
    distance = record.get("distance")
    if distance and distance.get("before") is not None:
        numbers.append(
            ("distance", _arrow(distance["before"], distance["after"]), "to the anchor, relative to its size")
        )
    elif whole and b.known(whole["distance"]["after"]):
        before, after = (b.mean(whole["distance"][side]) for side in ("before", "after"))
        numbers.append(("distance", _arrow(before, after), f"from {record['measured']['reference']}, relative"))
    if record.get("max_output_difference") is not None:
        numbers.append(("output difference", b.number(record["max_output_difference"]).text, "the largest, relative"))
    if whole and b.known(whole["cosine"].values()):
        between = "task vectors" if record["measured"]["base"] else "models"
        angle = _arrow(whole["cosine"]["before"], whole["cosine"]["after"])
        numbers.append(("cosine", angle, f"between the {between}, matrices only"))
    if record.get("relative_error") is not None:
        numbers.append(
            ("missed", b.percent(record["relative_error"]).text, "of the merged update, by cutting its rank")
        )
    return numbers


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{b.figures(value, 2)} s"


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


def _request(record: Record) -> b.Section | None:
    request = record.get("request")
    if not request:
        return None
    facts = {
        name.replace("_", " "): ("yes" if value else "no") if isinstance(value, bool) else value
        for name, value in request["options"].items()
    }
    return b.Section("request", "Request", [b.Code(request["command"], "The command"), b.FactList(facts)])


def _recipe(record: Record) -> b.Section | None:
    if not record.get("recipe"):
        return None
    method = f"{record['method']}: {record['summary'].rstrip('.')}." if record.get("summary") else ""
    blocks: list[Any] = [b.Paragraph(method)] if method else []
    facts = {"paper": record.get("paper"), "config and side files from": record.get("donor")}
    return b.Section("recipe", "Recipe", [*blocks, b.FactList(facts), b.Code(record["recipe"], "The recipe as YAML")])


def _lineage(record: Record, lock: Record | None) -> b.Section | None:
    roles = {entry["reference"]: entry["role"] for entry in record.get("inputs") or ()}
    entries = [
        {**entry, "role": entry["kind"] if entry["kind"] != "model" else roles.get(entry["reference"], "model")}
        for entry in (lock or {}).get("inputs", ())
    ] or record.get("inputs") or []  # fmt: skip
    hashed = any(entry.get("sha256") for entry in entries)
    rows = []
    for entry in entries:
        cells = [b.text(entry["reference"], code=True), b.text(entry["role"])]
        cells.append(b.text(entry.get("revision") or "local", code=True))
        cells += [b.count(entry.get("tensors")), b.text(entry.get("sha256"), code=True)] if hashed else []
        rows.append(b.Row(cells))
    what = "the weight file of an adapter" if record["kind"] == "adapters" else "all tensors of a model together"
    caption = f"The inputs; the sha256 is of {what}" if hashed else "The inputs"
    columns = ("model", "role", "commit", *(("tensors", "sha256") if hashed else ()))
    blocks: list[Any] = [b.TableBlock(caption, columns, rows, frozenset({3}))] if rows else []
    if record.get("data"):
        sets = [
            b.Row([b.text(d["name"], code=True), b.count(None if d.get("kind") == TEXT else d["examples"]),
                   b.count(d["size"]), b.text(d["sha256"], code=True)])
            for d in record["data"]
        ]  # fmt: skip
        caption = "The data that models were run on"
        if any(d.get("kind", TEXT) == TEXT for d in record["data"]):
            caption += "; of running text the lines are counted, and language models read it in chunks"
        blocks.append(b.TableBlock(caption, ("data", "used", "of", "sha256"), sets, frozenset({1, 2})))
    return b.Section("lineage", "Lineage", blocks)


def _lock(record: Record, lock: Record | None) -> b.Section | None:
    if lock is None:
        return b.Section("lock", "Lock", [b.Paragraph(NO_LOCK)]) if record["kind"] == "align" else None
    facts = {
        "sha256 of the weights": lock["sha256"],
        "tensors": lock["tensors"],
        "side files": ", ".join(lock["side_files"]) or None,
        "seed": lock["seed"],
        "versions": ", ".join(f"{name} {version}" for name, version in lock["versions"].items()),
        "options": ", ".join(f"{k}: {v}" for k, v in lock["options"].items() if isinstance(v, (str, int, float))),
    }
    purpose = (
        "isomerge.lock.json holds the hash of every input and output tensor. isomerge verify compares the folder with "
    )
    return b.Section(
        "lock", "Lock", [b.Paragraph(purpose + "it; isomerge reproduce makes the model again."), b.FactList(facts)]
    )


def _verification(record: Record) -> b.Section | None:
    run = record.get("run") or {}
    checks, later = run.get("checks"), run.get("verified")
    if not checks:
        return None
    answers = {True: "yes", False: "NO", None: "not asked"}
    rows = [b.Row([b.text(c["name"]), b.text(answers[c["passed"]]), b.text(c["detail"])]) for c in checks]
    caption = "Asked right after writing"
    if later:
        depth = "every weight was read" if later["deep"] else "headers and side files only"
        caption = f"Asked by isomerge verify on {later['when']}: {depth}"
    table = b.TableBlock(caption, ("check", "passed", "found"), rows, text=frozenset({2}))
    return b.Section("verification", "Verification", [table])


def _run(record: Record) -> b.Section | None:
    run = record.get("run") or {}
    facts = {
        "time": _seconds(run["seconds"]) if run.get("seconds") is not None else None,
        "of it to open and solve": _seconds(run["solve_seconds"]) if run.get("solve_seconds") is not None else None,
        "peak memory": size(run["peak_memory_bytes"]) if run.get("peak_memory_bytes") else None,
        "threads": run.get("threads"),
        "device": run.get("device"),
        "written": f"{run['tensors']} tensors, {size(run['bytes'])}" if run.get("bytes") is not None else None,
        "sha256 of the weights": record.get("sha256"),
    }
    return b.Section(
        "run", "Time and memory", [b.FactList(facts)] if any(v is not None for v in facts.values()) else []
    )


def _notes(record: Record, lock: Record | None) -> b.Section | None:
    notes = list(record.get("notes") or ())
    if lock is not None and record.get("sha256") not in (None, lock["sha256"]):
        notes.insert(0, "the lock file is of other weights than this record: the folder was written more than once")
    return b.Section("notes", "Notes", [b.Notes(notes)] if notes else [])

"""The sections on where a model comes from: request, recipe, lineage, and whether its files are whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from isomerge.reporting import blocks as b
from isomerge.reporting.lineage_picture import Origin, lineage_picture
from isomerge.reporting.record import TEXT, Record
from isomerge.reporting.terminal import size

NO_LOCK = (
    "align writes no lock file: isomerge verify can look at this folder but has no hashes to compare it with, and "
    "isomerge reproduce cannot be asked. Nothing in an alignment is random: on the same machine the same command gives "
    "the same weights again."
)


def origin_sections(record: Record, lock: Record | None) -> list[b.Section | None]:
    return [_request(record), _recipe(record), _lineage(record, lock), _integrity(record, lock), _run(record)]


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
    if record.get("earlier"):
        known = [
            b.Row([b.text(one["reference"], code=True), b.text(one["role"]), b.text(one["of"], code=True),
                   b.text(one["by"], code=True), b.count(one["generation"])])
            for one in record["earlier"]
        ]  # fmt: skip
        caption = "What the inputs were made of, as far as isomerge made them"
        columns = ("model", "role", "went into", "method", "generations back")
        blocks.append(b.TableBlock(caption, columns, known, frozenset({4})))
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


def lineage(record: Record, name: str) -> str:
    """The small drawing beside the verdict."""
    inputs = [Origin(entry["reference"], entry["role"]) for entry in record.get("inputs") or ()]
    if not inputs:
        return ""
    data = [Origin(one["name"], "data") for one in record.get("data") or ()]
    alignment = record.get("alignment") or {}
    level = f"level {alignment['level']}" if alignment.get("level") else ""
    aligned = "aligned" if alignment else ""
    step = ("align", level) if record["kind"] == "align" else (str(record.get("method")), aligned)
    return lineage_picture([*inputs, *data], step, name)


def _integrity(record: Record, lock: Record | None) -> b.Section:
    """Folded while all is well: most readers want to know how good a model is, not how whole its files are."""
    run = record.get("run") or {}
    checks = run.get("checks") or []
    wrong = any(check["passed"] is False for check in checks)
    label = f"{checks_words(checks)}: show the checks and the lock" if checks else "Show the lock"
    blocks = [*_checks(checks, run.get("verified")), *_lock(record, lock)]
    return b.Section("integrity", "File integrity", [b.Foldable(label, blocks, open=wrong)] if blocks else [])


def checks_words(checks: Sequence[Record]) -> str:
    """How many were asked, and the answers.

    >>> checks_words([{"passed": True}, {"passed": None}])
    '1 of 1 checks passed, 1 not asked'
    """
    asked = [check["passed"] for check in checks if check["passed"] is not None]
    left = len(checks) - len(asked)
    return f"{sum(asked)} of {len(asked)} checks passed" + (f", {left} not asked" if left else "")


def _checks(checks: Sequence[Record], later: Record | None) -> list[b.TableBlock]:
    if not checks:
        return []
    answers = {True: "yes", False: "NO", None: "not asked"}
    rows = [b.Row([b.text(c["name"]), b.text(answers[c["passed"]]), b.text(c["detail"])]) for c in checks]
    caption = "Asked right after writing"
    if later:
        depth = "every weight was read" if later["deep"] else "headers and side files only"
        caption = f"Asked by isomerge verify on {later['when']}: {depth}"
    return [b.TableBlock(caption, ("check", "passed", "found"), rows, text=frozenset({2}))]


def _lock(record: Record, lock: Record | None) -> list[Any]:
    if lock is None:
        return [b.Paragraph(NO_LOCK)] if record["kind"] == "align" else []
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
        "it; isomerge reproduce makes the model again."
    )
    return [b.Paragraph(purpose), b.FactList(facts)]


def _run(record: Record) -> b.Section:
    run = record.get("run") or {}
    facts: dict[str, Any] = {
        "time": seconds_words(run.get("seconds")),
        "of it to open and solve": seconds_words(run.get("solve_seconds")),
        "peak memory": size(run["peak_memory_bytes"]) if run.get("peak_memory_bytes") else None,
        "threads": run.get("threads"),
        "device": run.get("device"),
        "written": f"{run['tensors']} tensors, {size(run['bytes'])}" if run.get("bytes") is not None else None,
        "sha256 of the weights": record.get("sha256"),
    }
    label = ", ".join(str(facts[key]) for key in ("time", "peak memory", "written") if facts[key])
    known = any(value is not None for value in facts.values())
    return b.Section("run", "Time and memory", [b.Foldable(label or "More", [b.FactList(facts)])] if known else [])


def seconds_words(value: float | None) -> str | None:
    if value is None:
        return None
    return f"{value:.1f} s" if value >= 1 else f"{b.figures(value, 2)} s"

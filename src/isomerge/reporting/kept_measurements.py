"""What a page has of measurements: those of its last writing, and of files beside the weights."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from isomerge.errors import RequestError
from isomerge.json_files import JsonError, parse_json, read_text
from isomerge.reporting.measurements import (
    BESIDE,
    is_measurement,
    is_plane,
    is_score,
    is_sweep,
    is_trained,
    read_measurement,
    same_model,
)
from isomerge.reporting.record import Record


def measurements_beside(folder: Path) -> tuple[list[Record], list[str]]:
    """Of files with the names that measurements have, and a note for each that is left out."""
    found: list[Record] = []
    notes = []
    written = max((path.stat().st_mtime for path in folder.glob("*.safetensors")), default=0.0)
    for path in sorted(path for pattern in BESIDE for path in folder.glob(pattern)):
        try:
            one = read_measurement(path)
        except RequestError as error:
            notes.append(f"left out of the report: {error}")
            continue
        if is_score(one) and same_model(one["model"], folder.resolve().name) and path.stat().st_mtime < written:
            notes.append(f"left out of the report: {path.name} is older than the weights. Run isomerge eval again.")
        else:
            found.append(one)
    return found, notes


def searched_scores(record: Record, name: str) -> list[Record]:
    """The final test of the search that found this model, as scores of it and of the models beside it."""
    search = record.get("search") or {}
    test = search.get("test")
    if not test or not search.get("metric_name"):
        return []
    shared = {key: search.get(key) for key in ("task", "metric_name", "higher_is_better")}
    shared |= {"data": test["data"], "examples": test["examples"]}
    rows = {name: test["best"]} | {one["name"]: one for one in test.get("controls") or ()}
    scores = [{"model": model, **shared, "loss": row["loss"], "metric": row["metric"]} for model, row in rows.items()]
    return [one for one in scores if is_measurement(one)]


def replaced(*groups: Iterable[Record]) -> list[Record]:
    """All of them, where a later one takes the place of an earlier one of the same models on the same data."""
    every = [one for group in groups for one in group]
    last = {_subject(one): one for one in every}
    return [one for one in every if last[_subject(one)] is one]


def kept_measurements(record: Record, *pages: Path) -> list[Record]:
    """Those of the first page that is of this record."""
    return next((found for page in pages if (found := page_measurements(page, record)) is not None), [])


def page_measurements(page: Path, record: Record | None = None) -> list[Record] | None:
    """What a page has; None for one that is not ours, or not of the output that `record` describes."""
    content = _content(page) if page.is_file() else None
    # A later verification changes only what the run says.
    if content is None or (record is not None and _as_written(content["record"]) != _as_written(record)):
        return None
    return [one for one in content["measurements"] if isinstance(one, dict) and is_measurement(one)]


def _content(page: Path) -> dict[str, Any] | None:
    parser = _Embedded()
    parser.feed(read_text(page, errors="replace"))
    try:
        content = parse_json(parser.text)
    except JsonError:
        return None
    if not isinstance(content, dict) or not isinstance(content.get("record"), dict):
        return None
    found = content.get("measurements", content.get("curves"))  # pages of version 0.1 have curves alone
    return {**content, "measurements": found} if isinstance(found, list) else None


def _as_written(record: Record) -> dict[str, Any]:
    """Without what verifications change, and what other folders told when the page was made."""
    return {key: value for key, value in record.items() if key not in ("run", "earlier")}


def _subject(one: Record) -> str:
    """What a measurement is about, whatever was found there and at how many points."""
    kinds = {"score": is_score(one), "sweep": is_sweep(one), "plane": is_plane(one), "curve": is_trained(one)}
    kind = next((name for name, fits in kinds.items() if fits), "line")
    models = [model["model"] if isinstance(model, Mapping) else model for model in one.get("models") or ()]
    data, aligned = one.get("data"), one.get("aligned")
    several = aligned if isinstance(aligned, list) else [aligned] if aligned else []
    levels = [line["level"] if isinstance(line, Mapping) else line for line in several]
    sha256 = data.get("sha256") if isinstance(data, Mapping) else data
    swept = [one.get("method"), [axis["name"] for axis in one["parameters"]]] if kind == "sweep" else None
    if kind == "curve":
        swept = [one["method"], one.get("level"), one.get("towards")]
    return json.dumps([kind, one.get("model"), models, sha256, one.get("task"), levels, swept], default=str)


class _Embedded(HTMLParser):
    """The text of the element `record`."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self._inside = "", False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag == "script" and ("id", "record") in attrs

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.text += data

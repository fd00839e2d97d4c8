"""Plain dictionaries, as the Python API returns them, to short tables for a terminal."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from isomerge.reporting.record import Record
from isomerge.results import plain

LISTED = 12


def align_table(record: Record) -> RenderableType:
    """Distance before and after, what moved, how exact it is, what was written, and the notes."""
    facts: dict[str, Any] = {"verdict": record.get("verdict")}
    distance = record.get("distance")
    if distance:
        facts["distance to the anchor"] = f"{number(distance['before'])} → {number(distance['after'])}"
    facts["largest output difference"] = _difference(record)
    facts |= _written(record)
    return _page(_facts(facts), _spaces_table(record.get("spaces") or []), _notes(record.get("notes")))


def selftest_table(record: Record) -> RenderableType:
    """Did the scrambled model compute the same, and was it found back?"""
    facts = {
        "function after scrambling": {True: "unchanged", False: "CHANGED", None: "not measured"}[record["unchanged"]],
        "largest output difference": _difference(record),
        "distance after scrambling": number(record.get("scrambled_distance")),
        "distance after alignment": number(record.get("recovered_distance")),
    }
    return _page(_facts(facts | _seconds(record)), _notes(record.get("notes")))


def merge_table(record: Record) -> RenderableType:
    """What was merged, how, and what was written."""
    facts: dict[str, Any] = {
        "method": record.get("method"),
        "models": record.get("models"),
        "config from": record.get("donor"),
        "aligned": record.get("aligned"),
    }
    for model in (record.get("alignment") or {}).get("models", []):
        facts[f"  {model['model']}"] = model["verdict"]
    for data in record.get("data") or []:
        facts[f"data {data['name']}"] = _used(data)
    if record.get("peak_memory_bytes"):
        facts["peak memory"] = size(record["peak_memory_bytes"])
    facts |= _written(record) | {"sha256": record.get("sha256"), "report": record.get("report")}
    facts["pushed"] = record.get("pushed")
    return _page(_facts(facts), _notes(record.get("notes")))


def adapter_table(record: Record) -> RenderableType:
    """The layers an adapter fits worst, what it misses in all, and what was written."""
    table = Table("layer", "rank", "relative error", box=None, pad_edge=False)
    worst = sorted(record["targets"], key=lambda row: -row["error"])
    for row in worst[:LISTED]:
        table.add_row(Text(row["name"]), str(row["rank"]), number(row["error"]))
    if len(worst) > LISTED:
        table.add_row(f"and {len(worst) - LISTED} with smaller errors", "", "")
    facts = {"missed of the whole change": f"{number(record['relative_error'])} (relative norm)"} | _written(record)
    return _page(table, _facts(facts), _notes(record.get("notes")))


def conversion_table(record: Record) -> RenderableType:
    """What was written, and how its weights are stored."""
    facts: dict[str, Any] = {"model": record["model"], "format": f"{record['format']}, {record['type']}"}
    return _page(_facts(facts | _written(record)), _notes(record.get("notes")))


def plan_table(record: Record) -> RenderableType:
    """What a merge would read, write and need."""
    facts = {
        "method": record["method"],
        "models": record["models"],
        "config from": record["donor"],
        "tensors": record["tensors"],
        "to read": size(record["bytes_read"]),
        "to write": size(record["bytes_written"]),
        "peak memory, about": size(record["peak_memory_bytes"]),
        "time, about": f"{duration(record['seconds'])} on {record['threads']} threads, beside the disk's own time",
        "changes in config.json": ", ".join(f"{k}: {v}" for k, v in record["config_changes"].items()) or None,
    }
    if before := record.get("aligning"):
        apart = f"{duration(before['strangers_seconds'])} and {size(before['peak_memory_bytes'])}"
        siblings = duration(before["siblings_seconds"])
        facts["time to align, about"] = f"{apart} for models trained apart, {siblings} for siblings"
    for use in record.get("data") or []:
        facts[f"data for {use['purpose']}"] = f"{use['name']}, {_used(use)}; {use['passes']}"
    return _page(_facts(facts), _notes(record.get("notes")))


def _used(data: Record) -> str:
    """Running text has lines, and is read in chunks of the model's context."""
    if data.get("kind") == "corpus":
        return f"a text of {data['size']} lines"
    return f"{data['examples']} of {data['size']} examples"


def explain_table(record: Record) -> RenderableType:
    """The inputs of one tensor, and every option with where it comes from."""
    facts: dict[str, Any] = {"tensor": record["tensor"], "method": record["method"]}
    if record["base"]:
        facts["base"] = f"{record['base']['model']}: {record['base']['tensor']}"
    for place, given in enumerate(record["inputs"], start=1):
        facts[f"model {place}"] = f"{given['model']}: {given['tensor']}"
    table = Table("option", "value", "from", box=None, pad_edge=False)
    for name, option in record["options"].items():
        origin = option["origin"]
        if isinstance(origin, Mapping):
            origin = "; ".join(f"{model}: {where}" for model, where in origin.items())
        table.add_row(name, Text(_say(option["value"])), Text(str(origin)))
    return _page(_facts(facts), table if record["options"] else None)


def page_table(record: Record) -> RenderableType:
    """The numbers on top of a report, and where its page is."""
    facts = {**record["summary"], "sections": ", ".join(record["sections"]), "page": record["page"]}
    return _page(_facts(facts), _notes(record["notes"]))


def demo_table(record: Record) -> RenderableType:
    """What predicts how well, for two models and for three; of several pairs one row each and their mean."""
    pairs, groups = record["pairs"], record.get("groups")
    ways = _ways_table(groups) if groups else None
    table = None
    if len(pairs) > 1 or not groups:
        table = Table(title=record.get("title", "accuracy"), title_justify="left")
        columns = [key for key in pairs[0] if key != "seed"]
        for column in ("seed", *columns):
            table.add_column(column, justify="right", overflow="fold")
        for pair in pairs:
            table.add_row(str(pair.get("seed", "")), *(percent(pair[column]) for column in columns))
        if len(pairs) > 1:
            table.add_section()
            table.add_row("mean", *(percent(_mean(pair[column] for pair in pairs)) for column in columns))
    facts = _facts({"models": record.get("out")} | _seconds(record) | {"report": record.get("report")})
    return _page(ways, table, _notes(record.get("notes")), facts)


def _ways_table(groups: list[Record]) -> RenderableType:
    """One line per way to predict, accuracy and loss of every group beside each other."""
    table = Table(title="test digits: accuracy and loss", title_justify="left")
    table.add_column("")
    for group in groups:
        seeds = ", ".join(map(str, group["seeds"]))
        table.add_column(f"seeds {seeds}", justify="right")
        table.add_column("loss", justify="right")
    ways = list(dict.fromkeys(row["way"] for group in reversed(groups) for row in group["rows"]))
    by_way = [{row["way"]: row for row in group["rows"]} for group in groups]
    for way in ways:
        label = "their ensemble" if way == "ensemble" else next(rows[way]["label"] for rows in by_way if way in rows)
        cells = [
            (percent(rows[way]["accuracy"]), f"{rows[way]['loss']:.3f}") if way in rows else ("", "") for rows in by_way
        ]
        table.add_row(Text(label), *(cell for pair in cells for cell in pair), end_section=way == "ensemble")
    return table


def catalogue_table(record: Record) -> RenderableType:
    """One line per method, architecture or solver, cut at the width of a terminal."""
    rows: list[Record] = plain(next(iter(record.values())))
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", min_width=max((len(row["name"]) for row in rows), default=0))
    table.add_column()
    for row in rows:
        table.add_row(Text(row["name"]), Text(row["summary"], no_wrap=True, overflow="ellipsis"))
    return table if rows else Text("Nothing yet.")


def entry_table(record: Record) -> RenderableType:
    """All that is known of one method, architecture or solver; a method's options in a table."""
    options = record.get("options") or []
    table = Table("option", "type", "meaning", box=None, pad_edge=False)
    for option in options:
        table.add_row(option["name"], option["kind"], Text(option["meaning"]))
    return _page(_facts({key: value for key, value in record.items() if key != "options"}), table if options else None)


def verbatim(text: str) -> Text:
    """Commands, recipes and paths of their own: what is copied is never folded."""
    return Text(text, no_wrap=True, overflow="ignore")


def number(value: float | None) -> str:
    """Four significant digits, or a dash.

    >>> number(0.123456), number(None)
    ('0.1235', '–')
    """
    return "–" if value is None else f"{value:.4g}"


def percent(value: Any) -> str:
    """A fraction, or several, as percentages.

    >>> percent(0.9725), percent([0.5, 1.0])
    ('97.2 %', '50.0 / 100.0 %')
    """
    if value is None:
        return "–"
    if isinstance(value, (list, tuple)):
        return " / ".join(f"{100 * item:.1f}" for item in value) + " %"
    return f"{100 * value:.1f} %"


def size(count: int) -> str:
    """Bytes in the largest unit that keeps the number above one.

    >>> size(5_300_000_000)
    '5.3 GB'
    """
    scaled = float(count)
    for unit in ("B", "kB", "MB"):
        if scaled < 1000:
            return f"{scaled:.3g} {unit}"
        scaled /= 1000
    return f"{scaled:.3g} GB"


def duration(seconds: float) -> str:
    """A time in the units that one would say it in.

    >>> duration(3.21), duration(245), duration(4000)
    ('3.2 s', '4 min 05 s', '1 h 06 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _spaces_table(spaces: list[Record]) -> RenderableType | None:
    """One row per kind of space: the layers of a model are counted, not listed."""
    if not spaces:
        return None
    families: dict[tuple[str, str], list[Record]] = {}
    for space in spaces:
        kind = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", space["name"])
        families.setdefault((kind, str(space.get("group", ""))), []).append(space)
    columns = [key for key in ("moved", "gain", "distance") if any(key in space for space in spaces)]
    table = Table(title="spaces", title_justify="left")
    for name in ("space", "group", "count", *columns):
        table.add_column(name, justify="left" if name in ("space", "group") else "right")
    for (kind, group), members in families.items():
        cells = (_SUMMARIES[column]([member.get(column) for member in members]) for column in columns)
        table.add_row(Text(kind), Text(group), str(len(members)), *cells)
    return table


def _moved(values: list[Any]) -> str:
    """A truth per space becomes a count; a fraction of units per space becomes their mean."""
    if all(isinstance(value, bool) for value in values):
        return f"{sum(values)} of {len(values)}"
    return percent(_mean(values))


def _mean(values: Iterable[Any]) -> Any:
    known = [value for value in values if value is not None]
    if not known:
        return None
    if isinstance(known[0], (list, tuple)):
        return [_mean(column) for column in zip(*known, strict=True)]
    return sum(known) / len(known)


_SUMMARIES: dict[str, Callable[[list[Any]], str]] = {
    "moved": _moved,
    "gain": lambda values: percent(_mean(values)),
    "distance": lambda values: number(_mean(values)),
}


def _difference(record: Record) -> str:
    if record.get("max_output_difference") is not None:
        return number(record["max_output_difference"])
    return f"not measured: {record.get('max_output_difference_reason') or 'no reason given'}"


def _written(record: Record) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    if record.get("out"):
        facts["written"] = f"{record['out']} ({record['tensors']} tensors, {size(record['bytes'])})"
    return facts | _seconds(record)


def _seconds(record: Record) -> dict[str, Any]:
    return {} if record.get("seconds") is None else {"time": duration(record["seconds"])}


def facts_table(record: Record) -> RenderableType:
    """Every field that is one word or number."""
    return _facts({key: value for key, value in record.items() if not isinstance(value, (Mapping, list))})


def _facts(facts: Mapping[str, Any]) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        if value is not None:
            grid.add_row(Text(name, style="dim"), Text(_say(value)))
    return grid


def _say(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(_say(item) for item in value)
    return "" if value is None else str(value)


def _notes(notes: Iterable[Any] | None) -> RenderableType | None:
    lines = [Text(f"• {note}") for note in notes or []]
    return Group(*lines) if lines else None


def _page(*parts: RenderableType | None) -> RenderableType:
    return Group(*(part for part in parts if part is not None))

"""The sections on how models relate: what alignment moved, and where task vectors agree or pull apart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from isomerge.reporting import blocks as b
from isomerge.reporting.charts import Line, line_chart
from isomerge.reporting.measured import space_place
from isomerge.reporting.moved_units import LISTED
from isomerge.reporting.record import Record

WHOLE = "outside"  # of all layers
ENDS = {"cosine": (-1.0, 1.0), "conflict": (0.0, 1.0)}  # of an axis: the same on every page
WHEN = {"before": " before alignment", "after": " after alignment"}
STRANGERS_APART = math.sqrt(2)  # the distance of two models of one size that have nothing in common
DISTANCE = (
    "How far the weights lie apart, relative to their size: 0 is the same, 1.41 is what two unrelated models have. "
    "A space is a set of units or directions that can move together."
)
BOTH = " Each cell: before → after alignment, and the change; blue is nearer, orange farther."
COSINE = "Do they point the same way? 1 is the same direction, 0 is unrelated, −1 is opposite."
CONFLICT = {
    False: "The share of weights that are above zero in one model and below in another: half between unrelated models.",
    True: "The share of weights that one model moves up and another down: high values mean that they pull apart.",
}


def alignment_section(record: Record) -> b.Section | None:
    """Distance per layer and space before and after, and what moved."""
    alignment = record.get("alignment")
    if not alignment:
        return None
    facts: dict[str, Any] = {"anchor": alignment["anchor"], "level": alignment.get("level")}
    facts |= {model["model"]: model["verdict"] for model in alignment["models"]}
    if record.get("max_output_difference_reason"):
        facts["output difference"] = f"not measured: {record['max_output_difference_reason']}"
    blocks: list[Any] = [b.FactList(facts)]
    measured = record.get("measured") or {}
    for place in range(len(measured.get("compared", ()))):
        spaces = [row for row in measured.get("spaces", ()) if row["distance"]["before"][place] is not None]
        blocks += _distance_map(spaces, place, measured)
    for moved in alignment["models"]:
        if moved.get("spaces"):
            rows = _moves(moved, measured)
            blocks.append(_kinds(moved["model"], rows))
            blocks.append(b.Foldable(f"Every space of {moved['model']}", [_spaces(moved["model"], rows)]))
            units = units_table(moved["model"], alignment["anchor"], rows)
            if units.rows:
                blocks.append(b.Foldable(f"Which units of {moved['model']} moved", [units]))
    return b.Section("alignment", "Alignment", blocks)


def relation_section(record: Record) -> b.Section | None:
    """Cosine and sign conflict per layer and part; distances where nothing was aligned."""
    measured = record.get("measured")
    if not measured:
        return None
    base = measured["base"]
    between = "task vectors" if base else "models"
    when = WHEN if record.get("alignment") else {}
    blocks: list[Any] = [b.Paragraph(_explained(measured, between))]
    charts = [
        _chart(measured, "cosine", f"Cosine between the {between}, per layer", when, COSINE),
        _chart(measured, "conflict", f"Sign conflict between the {between}, per layer", when, CONFLICT[bool(base)]),
    ]
    blocks.append(b.Side([chart for chart in charts if chart is not None]))
    if not record.get("alignment"):
        for place in range(len(measured["compared"])):
            blocks += _distance_map(measured["spaces"], place, measured)
    if len(measured["pairs"]) > 1:
        blocks.append(_pairs(measured))
    blocks.append(b.Foldable("Every part of every layer", [_parts(measured)]))
    return b.Section("relations", "Task vectors" if base else "How the models relate", blocks)


def _explained(measured: Record, between: str) -> str:
    of = f"Task vectors are what each model adds to {measured['base']}. " if measured["base"] else ""
    return (
        f"{of}Measured between the {between}, on rows drawn with seed {measured['seed']}: up to "
        f"{measured['sample']:,} elements of each tensor ({100 * measured['fraction']:.3g} % of all)."
    )


def _distance_map(spaces: Sequence[Record], place: int, measured: Record) -> list[b.Heat | b.Foldable]:
    """Of one model, before and after in one map, or what is known of them. The first is open."""
    model, reference = measured["compared"][place], measured["reference"]
    ordered = sorted(
        spaces, key=lambda row: (row["layer"] < 0, row["kind"].rpartition(".")[0], row["layer"], row["kind"])
    )
    before, after = ({_cell(row): row["distance"][side][place] for row in ordered} for side in ("before", "after"))
    caption = f"Distance of {model} from {reference}, per layer and space"
    explained = DISTANCE + BOTH * bool(b.known(before.values()) and b.known(after.values()))
    drawn = b.heat(caption, before, after, top=STRANGERS_APART, ends=("the same", "strangers"), explained=explained)
    if drawn is None:
        return []
    return [drawn if place == 0 else b.Foldable(f"Distance of {model}", [drawn])]


def _cell(row: Record) -> tuple[str, int, str]:
    """Where a space stands in a map: its row, its layer, its column. The layers of two stacks are two sets of rows."""
    stack, _, kind = row["kind"].rpartition(".")
    if row["layer"] < 0:
        return WHOLE, -1, row["kind"]
    return f"{stack or 'layer'} {row['layer']}", row["layer"], kind


def _moves(model: Record, measured: Record) -> list[Record]:
    """The spaces of a model, layer by layer, each with its gain."""
    gains: dict[str, float | None] = {}
    if model["model"] in measured.get("compared", ()):
        place = measured["compared"].index(model["model"])
        gains = {row["name"]: row["gain"][place] for row in measured["spaces"]}
    rows = [{"gain": gains.get(row["name"]), **row, **space_place(row["name"])} for row in model["spaces"]]
    return sorted(rows, key=lambda row: (row["layer"] < 0, row["layer"], row["name"]))


def _kinds(model: str, rows: Sequence[Record]) -> b.TableBlock:
    kinds: dict[tuple[str, str], list[Record]] = {}
    for row in rows:
        kinds.setdefault((row["kind"], row["group"]), []).append(row)
    shown = [
        b.Row([
            b.text(kind, code=True), b.text(group), b.count(len(own)),
            b.percent(b.mean(float(r["moved"]) for r in own)),
            b.percent(b.mean(r["displacement"] for r in own), bar=False), b.percent(b.mean(r["gain"] for r in own)),
        ])
        for (kind, group), own in sorted(kinds.items())
    ]  # fmt: skip
    explained = (
        "Mean over the spaces of a kind. moved: the share of units that changed place, or all for spaces without "
        "units. displacement: how far they went, as a share of the farthest. gain: how much of the squared distance "
        "the move took away."
    )
    columns = ("space", "group", "count", "moved", "displacement", "gain")
    return b.TableBlock(f"What moved in {model}", columns, shown, frozenset({2, 3, 4, 5}), explained=explained)


def _spaces(model: str, rows: Sequence[Record]) -> b.TableBlock:
    shown = [
        b.Row([b.text(row["name"], code=True), b.text(row["group"]), b.percent(float(row["moved"])),
               b.percent(row["displacement"], bar=False), b.percent(row["gain"]), b.text(row["reason"])], row["layer"])
        for row in rows
    ]  # fmt: skip
    columns = ("space", "group", "moved", "displacement", "gain", "why it stays")
    return b.TableBlock(f"Every space of {model}", columns, shown, frozenset({2, 3, 4}))


def _chart(measured: Record, key: str, title: str, when: Mapping[str, str], explained: str) -> b.Figure | None:
    layers = [row for row in measured["layers"] if row["layer"] >= 0]
    stacks = list(dict.fromkeys(row["stack"] for row in layers))
    lines = []
    for stack in stacks:
        own = [row for row in layers if row["stack"] == stack]
        sides = [side for side in ("before", "after") if any(row[key][side] is not None for row in own)]
        for side in sides:
            name = ("" if len(stacks) == 1 else stack.partition(".")[0]) + when.get(side, "")
            points = [(float(row["layer"]), row[key][side]) for row in own]
            lines.append(
                Line(
                    name.removesuffix(" alignment" * (len(stacks) > 1)).strip()
                    or {"cosine": "mean of all pairs", "conflict": "all models"}[key],
                    points,
                )
            )
    drawn = line_chart(title, lines, "layer", key, counts=True, ends=ENDS[key])
    if not drawn:
        return None
    columns = ("stack", "layer", f"{key} before", f"{key} after")
    rows = [
        b.Row([b.text(row["stack"] or WHOLE), b.number(float(row["layer"]), 6), b.number(row[key]["before"]),
               b.number(row[key]["after"])], row["layer"])
        for row in layers
    ]  # fmt: skip
    return b.Figure(drawn, title, b.TableBlock(title, columns, rows, frozenset({1, 2, 3})), explained)


def _pairs(measured: Record) -> b.TableBlock:
    rows = [
        b.Row([*(b.text(name, code=True) for name in pair["models"]), b.number(pair["cosine"]["before"]),
               b.number(pair["cosine"]["after"])])
        for pair in measured["pairs"]
    ]  # fmt: skip
    return b.TableBlock("Cosine of every two models", ("model", "model", "before", "after"), rows, frozenset({2, 3}))


def _parts(measured: Record) -> b.TableBlock:
    """Numbers as they are merged; as they are stored where nothing else is known."""
    rows = []
    for row in measured["parts"]:
        side = "after" if row["cosine"]["after"] is not None or b.known(row["distance"]["after"]) else "before"
        rows.append(
            b.Row([b.text(row["stack"] or WHOLE), b.count(None if row["layer"] < 0 else row["layer"]),
                   b.text(row["part"], code=True), b.count(row["elements"]), b.number(row["cosine"][side]),
                   b.percent(row["conflict"][side]), b.number(b.mean(row["distance"][side]))],
                  row["layer"])
        )  # fmt: skip
    columns = ("stack", "layer", "part", "elements", "cosine", "sign conflict", "distance")
    return b.TableBlock("Cosine, sign conflict and mean distance", columns, rows, frozenset({1, 3, 4, 5, 6}))


# --- which units moved where ------------------------------------------------------------------------------------------
SPACE = "\u00a0"  # keeps a unit on one line


def units_table(model: str, anchor: str, spaces: Sequence[Record]) -> b.TableBlock:
    """`spaces` are rows of the record, each with its layer; those that stay are left out."""
    rows = [
        b.Row([b.text(row["name"], code=True), _count(row["units"]),
               b.Cell(_units(row["units"], row["kind"]))], row["layer"])
        for row in spaces
        if (row.get("units") or {}).get("changed")
    ]  # fmt: skip
    explained = (
        f"From their place in {model} to that in {anchor}, the farthest first, at most {LISTED} of a space. An angle "
        "is how far vectors are turned in the mean (90° by a random rotation), × how much they are stretched."
    )
    columns = ("space", "changed", "from → to")
    return b.TableBlock(
        f"Which units of {model} moved", columns, rows, frozenset({1}), text=frozenset({2}), explained=explained
    )


def _count(units: Record) -> b.Cell:
    return b.Cell(
        f"{b.count(units['changed']).text} of {b.count(units['of']).text}".replace(" ", SPACE), units["changed"]
    )


def _units(units: Record, kind: str) -> str:
    own = kind.rpartition(".")[2]
    listed = [unit_words(entry, units["names"], own) for entry in units["listed"]]
    more = units["changed"] - len(listed)
    return f"{SPACE}· ".join([*listed, *([f"and {b.count(more).text} more".replace(" ", SPACE)] if more else [])])


def unit_words(entry: Record, names: Sequence[str], own: str = "") -> str:
    """One unit in words; where they are those of the space itself (`own`), what they are need not be said.

    >>> print(unit_words({"from": 2, "to": 0, "angle": 37.2, "factor": 1.13}, ["head"], "qk").replace(SPACE, " "))
    head 2 → 0: 37.2°, × 1.13
    >>> entry = {"from": 5, "to": 1, "within": [3], "flipped": True}
    >>> print(unit_words(entry, ["expert", "ffn"], "ffn").replace(SPACE, " "))
    expert 3, 5 → 1: sign
    >>> unit_words({"angle": 90.0}, [])
    '90.0°'
    """
    done = []
    if entry.get("flipped"):
        done.append("sign")
    if entry.get("angle") is not None:
        done.append(f"{b.figures(entry['angle'])}°")
    if entry.get("factor") is not None:
        done.append(f"× {b.figures(entry['factor'])}".replace("-", "−"))
    outer = [f"{name} {number}" for name, number in zip(names, entry.get("within") or (), strict=False)]
    place = []
    if "to" in entry:
        kind = "" if names[-1] == own else f"{names[-1]} "
        place = [f"{kind}{entry['from']} → {entry['to']}" if entry["from"] != entry["to"] else f"{kind}{entry['to']}"]
    where = ", ".join([*outer, *place])
    return ": ".join(part for part in (where, ", ".join(done)) if part).replace(" ", SPACE)

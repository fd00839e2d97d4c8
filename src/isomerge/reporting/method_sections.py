"""The section on what a method tells of its own work: the regressions of reconstruct, the choice of a greedy soup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from isomerge.kinship import place_of
from isomerge.reporting import blocks as b
from isomerge.reporting.charts import Line, line_chart
from isomerge.reporting.record import Record

WHEN = ("before", "after")


def method_section(record: Record) -> b.Section:
    blocks: list[Any] = []
    layers = record.get("layers")
    if isinstance(layers, list) and layers and "residual_before" in layers[0]:
        blocks += residual_blocks(layers)
    if record.get("refined"):
        blocks.append(_refined(record["refined"]))
    if facts := _goals(record):
        blocks.append(b.FactList(facts))
    for key, words in (("lean", "Shares of the stream"), ("start", "What to start from")):
        tried = record.get(key, {}).get("tried") if key == "start" else record.get(key)
        if tried:
            blocks.append(_tried(f"{words}, and the distance to the models' predictions on held-out examples", tried))
    if isinstance(record.get("polished"), Mapping):
        polished = record["polished"]
        change = " → ".join(b.number(polished[f"loss_{when}"]).text for when in WHEN)
        blocks.append(
            b.FactList({"polished": f"{polished['steps']} steps, distance to the models' predictions {change}"})
        )
    if record.get("scores"):
        blocks.append(_scores(record))
    return b.Section("method", f"What {record.get('method')} did", blocks)


def _goals(record: Record) -> dict[str, str]:
    """Whose word counted, and what fitting the output map to predictions gained."""
    facts = {}
    if isinstance(goals := record.get("goals"), Mapping):
        counts = goals.get("examples")
        shares = f", examples that follow each model: {', '.join(f'{count:.0f}' for count in counts)}" if counts else ""
        facts["goals"] = f"{goals['kind']}{shares}"
    if isinstance(fitted := record.get("output"), Mapping):
        change = " → ".join(b.number(fitted[f"loss_{when}"]).text for when in WHEN)
        facts["output map"] = f"fitted to the models' predictions, distance {change}"
    return facts


def _tried(title: str, tried: Sequence[Record]) -> b.TableBlock:
    best = min(range(len(tried)), key=lambda number: tried[number]["held_out"])
    rows = []
    for number, one in enumerate(tried):
        name = one["start"] if "start" in one else ", ".join(f"{share:g}" for share in one["weights"])
        chosen = "yes" if number == best else "no"
        rows.append(b.Row([b.text(name, code=True), b.number(one["held_out"]), b.text(chosen)]))
    return b.TableBlock(title, ("tried", "distance", "chosen"), rows, frozenset({1}))


def residual_blocks(layers: Sequence[Record], of: str = "") -> list[Any]:
    """Maps of the residuals by layer, before and after, on one scale; and all of them in the order they were solved."""
    title = f"Residual of every regression in the order in which the maps run, relative to the target{of}"
    lines = [
        Line(when, [(float(n), row[f"residual_{when}"]) for n, row in enumerate(layers, start=1)]) for when in WHEN
    ]
    rows = [
        b.Row([
            b.count(place), b.text("\n".join(row["layers"]), code=True), b.text(row["kind"]),
            b.count(row["samples"]), b.number(row["residual_before"]), b.number(row["residual_after"]),
        ], _place(row["layers"])[1])
        for place, row in enumerate(layers, start=1)
    ]  # fmt: skip
    columns = ("number", "map", "kind", "samples", "before", "after")
    table = b.TableBlock(title, columns, rows, frozenset({0, 3, 4, 5}))
    chart = line_chart(title, lines, "number of the regression", "residual", counts=True)
    captions = [f"Residual {when} solving, per layer and map{of}" for when in WHEN]
    return [b.Side(b.heats(captions, _grids(layers))), b.Figure(chart, title, table)]


def _grids(layers: Sequence[Record]) -> list[dict[tuple[str, int, str], float | None]]:
    """(row, layer, column) → residual, before and after; the experts of one weight in the mean."""
    places = [_place(row["layers"]) for row in layers]
    stacks = {stack for stack, layer, _ in places if layer >= 0}
    parts = list(dict.fromkeys(part for _, _, part in places))
    grids: list[dict[tuple[str, int, str], float | None]] = []
    for when in WHEN:
        values: dict[tuple[str, int, str], list[float | None]] = {}
        for (stack, layer, part), row in zip(places, layers, strict=True):
            within = stack if len(stacks) > 1 else "layer"
            label = f"{within} {layer}" if layer >= 0 else "outside"
            values.setdefault((label, layer, _short(part, parts)), []).append(row[f"residual_{when}"])
        grids.append({key: b.mean(own) for key, own in values.items()})
    return grids


def _place(names: Sequence[str]) -> tuple[str, int, str]:
    """Where maps that are solved together stand: one part for all of them.

    >>> _place(["h.3.attn.q.weight", "h.3.attn.k.weight"])
    ('h', 3, 'attn.q, k')
    """
    stack, layer, first = place_of(names[0])
    others = [place_of(name)[2].rpartition(".")[2] for name in names[1:]]
    return stack, layer, ", ".join([first, *others])


def _short(part: str, parts: Sequence[str]) -> str:
    """The end of a dotted name that tells it from all others.

    >>> _short("attention.output.dense", ["attention.output.dense", "output.dense", "mlp.up"]), _short("mlp.up", [])
    ('attention.output.dense', 'up')
    """
    words = part.split(".")
    for start in range(len(words) - 1, 0, -1):
        end = ".".join(words[start:])
        if not any(other != part and (other == end or other.endswith(f".{end}")) for other in parts):
            return end
    return part


def _refined(refined: Sequence[Record]) -> b.Figure:
    title = "Error of every block before and after its gradient steps, relative to the spread of its output"
    lines = [Line(when, [(float(n), row[f"error_{when}"]) for n, row in enumerate(refined)]) for when in WHEN]
    rows = [
        b.Row([b.text(row["block"], code=True), b.number(row["error_before"]), b.number(row["error_after"])])
        for row in refined
    ]
    table = b.TableBlock(title, ("block", "before", "after"), rows, frozenset({1, 2}))
    return b.Figure(line_chart(title, lines, "block", "error", counts=True), title, table)


def _scores(record: Record) -> b.TableBlock:
    chosen = set(record.get("chosen") or ())
    rows = [
        b.Row([
            b.text(row["model"], code=True), b.number(row["score"]),
            b.text("yes" if row["model"] in chosen else "no"),
        ])
        for row in record["scores"]
    ]  # fmt: skip
    return b.TableBlock("Scores", ("model", record.get("metric") or "score", "chosen"), rows, frozenset({1}))

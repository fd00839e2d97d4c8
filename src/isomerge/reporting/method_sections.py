"""The section on a method's own work: the regressions and joint features of reconstruct, the choice of a soup, learned
coefficients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from isomerge.kinship import place_of
from isomerge.reporting import blocks as b
from isomerge.reporting.charts import Line, line_chart
from isomerge.reporting.record import Record

WHEN = ("before", "after")
STEPS = {"rate": "first step", "loss_before": "before polishing", "loss_after": "after, on the data"}
LOST = {"stream": "the stream", "chosen": "what heads and units compute"}
RESIDUAL = "How much of a map's target it misses: 0 reproduces the models' features exactly, 1 is no better than zeros."


def method_section(record: Record) -> b.Section:
    blocks: list[Any] = []
    layers = record.get("layers")
    if isinstance(layers, list) and layers and "residual_before" in layers[0]:
        blocks += residual_blocks(layers)
    if record.get("refined"):
        blocks.append(_refined(record["refined"]))
    if (features := _features(record)) is not None:
        blocks.append(b.Paragraph(features_words(features)))
        if features.get("lost"):
            blocks.append(_lost(features["lost"]))
    if facts := _goals(record):
        blocks.append(b.FactList(facts))
    for key, words in (("lean", "Shares of the stream"), ("start", "The merge and its control, one parent")):
        tried = record.get(key, {}).get("tried") if key == "start" else record.get(key)
        if tried:
            blocks.append(_tried(f"{words}, and the distance to predictions (and text) on held-out examples", tried))
    if isinstance(record.get("polished"), Mapping):
        polished = record["polished"]
        change = " → ".join(b.number(polished[f"loss_{when}"]).text for when in WHEN)
        blocks.append(b.FactList({"polished": f"{_steps(polished)}, distance to the models' predictions {change}"}))
    if isinstance(record.get("distilled"), Mapping):
        blocks += _distilled(record["distilled"])
    if isinstance(record.get("rebased"), Mapping):
        blocks += _rebased(record["rebased"])
    if record.get("scores"):
        blocks.append(_scores(record))
    if record.get("coefficients"):
        blocks += _coefficients(record)
    return b.Section("method", f"What {record.get('method')} did", blocks)


def _steps(polished: Mapping[str, Any]) -> str:
    size = f", the first {100 * polished['rate']:g} % of a tensor's size" if "rate" in polished else ""
    return f"{polished['steps']} steps{size}"


def _distilled(distilled: Mapping[str, Any]) -> list[Any]:
    """The steps, and the controls: where the student was and is, its teachers and their mean."""
    facts = {"steps": _steps(distilled), "temperature": f"{distilled['temperature']:g}"}
    title = "Distance to the goals on held-out examples, and loss and metric where they have labels"
    return [b.FactList(facts), _standing(title, distilled["held_out"])]


def _standing(title: str, rows: Sequence[Mapping[str, Any]]) -> b.TableBlock:
    """A row for each model, a column for each measure."""
    columns = tuple(dict.fromkeys(key for row in rows for key in row if key != "model"))
    cells = [
        b.Row([b.text(row["model"], code=True), *(b.number(row[key]) if key in row else b.text("") for key in columns)])
        for row in rows
    ]
    return b.TableBlock(title, ("model", *columns), cells, frozenset(range(1, len(columns) + 1)))


def _rebased(rebased: Mapping[str, Any]) -> list[Any]:
    """How a fine-tune was carried to another base, and how much of it arrived."""
    bases = "siblings" if rebased.get("siblings") else "of different shapes" if rebased["other_shape"] else "aligned"
    facts = {"bases": bases, "correction": rebased["correction"], "scale": f"{rebased['scale']:g}"}
    if not rebased.get("held_out"):
        return [b.FactList({**facts, "arrived": "not measured, as no data was given"})]
    shares = {name: share for name, share in rebased["shares"].items() if share is not None}
    arrived = ", ".join(f"{100 * share:.0f} % by {name}" for name, share in shares.items())
    title = "Distance to the fine-tune's predictions on held-out examples, and loss and metric where they have labels"
    return [b.FactList({**facts, "arrived": arrived or "unknown: the fine-tune is no better than its base here"}),
            _standing(title, rebased["held_out"])]  # fmt: skip


def _features(record: Record) -> Record | None:
    features = record.get("features")
    return features if isinstance(features, Mapping) else None


def has_joint_features(record: Record) -> bool:
    return bool((_features(record) or {}).get("stream") == "joint")


def features_words(features: Record) -> str:
    """What the features of the merged model are, for the page and the card."""
    if features.get("stream") == "joint":
        words = (
            "Joint features: the width of one model is filled from the features of all models side by side, and what "
            "matters least on the data has no room."
        )
    else:
        words = "The stream holds the mean of the models' features; each head and each unit follows one model."
    counts = [shares for shares in (features.get("chosen") or {}).values() if any(shares)]
    if counts:
        totals = [sum(own) for own in zip(*counts, strict=True)]
        shares = ", ".join(f"{100 * total / sum(totals):.0f} %" for total in totals)
        words += f" Heads and units that follow each model, in the order of the inputs: {shares}."
    lost = {part: b.mean(shares.values()) for part, shares in (features.get("lost") or {}).items()}
    missing = [f"{100 * share:.1f} % of {name}" for key, name in LOST.items() if (share := lost.get(key)) is not None]
    return words + (f" Without room, in the mean over the layers: {' and '.join(missing)}." if missing else "")


def _goals(record: Record) -> dict[str, str]:
    """Whose word counted, and what fitting the output map to predictions gained."""
    facts = {}
    if isinstance(goals := record.get("goals"), Mapping):
        counts = goals.get("examples")
        shares = f", examples that follow each model: {', '.join(f'{count:.0f}' for count in counts)}" if counts else ""
        facts["goals"] = f"{goals['kind']}{shares}"
    if isinstance(width := record.get("width"), Mapping):
        sizes = {name: " → ".join(f"{size:,}" for size in both) for name, both in width.items()}
        facts["more room"] = ", ".join(f"{name} {both}" for name, both in sizes.items())
    if isinstance(fitted := record.get("output"), Mapping):
        change = " → ".join(b.number(fitted[f"loss_{when}"]).text for when in WHEN)
        facts["output map"] = f"fitted to the models' predictions, distance {change}"
    return facts


def _lost(lost: Mapping[str, Mapping[str, float]]) -> b.TableBlock:
    """By layer, the share of the energy of the models' features that had no room in the merged model."""
    title = "Share of the models' features that has no room in one model, per layer"
    layers: dict[int, dict[str, float]] = {}
    for name, share in lost.get("stream", {}).items():
        layers.setdefault(place_of(name)[1], {})["stream"] = share
    for space, share in lost.get("chosen", {}).items():
        part = "units" if "ffn" in space.split(".") else "heads"
        layers.setdefault(int(space.rpartition(".")[2]), {})[part] = share
    columns = ("stream", "heads", "units")
    rows = [
        b.Row([b.count(layer), *(b.number(shares[c]) if c in shares else b.text("") for c in columns)])
        for layer, shares in sorted(layers.items())
    ]
    return b.TableBlock(title, ("layer", *columns), rows, frozenset({0, 1, 2, 3}))


def _tried(title: str, tried: Sequence[Record]) -> b.TableBlock:
    reached = [one["held_out"] for one in tried]
    best = reached.index(min(reached))
    polished = any(one.get("rate") for one in tried)
    rows = []
    for number, one in enumerate(tried):
        name = one["start"] if "start" in one else ", ".join(f"{share:g}" for share in one["weights"])
        steps = [b.number(one[key]) if key in one else b.text("") for key in STEPS] if polished else []
        chosen = b.text("yes" if number == best else "no")
        rows.append(b.Row([b.text(name, code=True), *steps, b.number(one["held_out"]), chosen]))
    columns = ("tried", *STEPS.values()) if polished else ("tried",)
    return b.TableBlock(title, (*columns, "distance", "chosen"), rows, frozenset(range(1, len(columns) + 1)))


def _coefficients(record: Record) -> list[Any]:
    """Of learned coefficients: what they made lower, and each model's in every group of tensors."""
    objective, rows = record["objective"], record["coefficients"]
    change = " → ".join(b.number(objective[when]).text for when in WHEN)
    names = list(rows[0]["models"])
    cells = [b.Row([b.text(row["group"], code=True), *map(b.number, row["models"].values())]) for row in rows]
    numbers = frozenset(range(1, len(names) + 1))
    table = b.TableBlock("Learned coefficients, how much of each model", ("tensors", *names), cells, numbers)
    return [b.FactList({str(objective["kind"]): f"{change} in {objective['steps']} steps"}), table]


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
    ends = "solved exactly", "no better than zeros"
    caption = f"Residual before and after solving, per layer and map{of}"
    shown = b.heat(caption, *_grids(layers), top=1.0, ends=ends, explained=RESIDUAL)
    return [*([shown] if shown else []), b.Figure(chart, title, table, explained=RESIDUAL)]


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

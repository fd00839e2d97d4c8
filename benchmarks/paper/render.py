"""A record as Markdown and as a picture, and the page that says what held, from all records of a folder.

python benchmarks/paper/render.py docs/results                # every NAME.json there, and index.md
python benchmarks/paper/render.py RECORDS --out docs/results  # the same, with the records copied to another folder
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from results import Map, Plot, Table, from_json

COLOURS = ("#8a8f98", "#1f6feb", "#2da44e", "#d4713c", "#8250df", "#bf3989", "#bf8700", "#0a3069")
Record = Mapping[str, Any]
CLAIMS = ("Matching helps", "Larger models gain more", "Overhead under 5 %", "First layers matter most")
"""Of the founding paper: a sentence that tests one begins with its words."""
VERDICTS = ("held in part", "held", "did not hold", "not to be told from noise", "not decided")


def render(record: Record, out: Path) -> None:
    """NAME.md and NAME.svg beside the record, and the folder's index.md."""
    name, result = record["name"], from_json(record)
    if result.plots:
        draw(result.plots, out / f"{name}.svg")
    (out / f"{name}.md").write_text(markdown(record))
    write_index(out)


def markdown(record: Record) -> str:
    result = from_json(record)
    parts = [f"# {record['title']}", f"After {record['paper']}. Scale: {record['scale']}."]
    if result.claims:
        parts.append(bullets(result.claims))
    parts += [f"## {each.title}\n\n{markdown_table(each)}" for each in result.tables]
    if result.plots:
        parts.append(f"![{record['title']}]({record['name']}.svg)")
    if record["notes"]:
        parts.append("## What was left out, and what differs\n\n" + bullets(record["notes"]))
    parts.append("## How it was made\n\n" + provenance(record))
    return "\n\n".join(parts) + "\n"


def markdown_table(table: Table) -> str:
    lines = [table.columns, ["---"] * len(table.columns), *([str(cell) for cell in row] for row in table.rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def provenance(record: Record) -> str:
    facts = {
        "command": f"`{record['command']}`",
        "commit": record["commit"],
        "hardware": record["hardware"],
        "date": record["date"],
        "software": record["software"],
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in facts.items())])


def bullets(sentences: list[str]) -> str:
    return "\n".join(f"- {sentence}" for sentence in sentences)


# --- the page of all results ------------------------------------------------------------------------------------------
def write_index(out: Path) -> None:
    """index.md: what became of the paper's claims, then every record of the folder with its other sentences."""
    records = [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]
    parts = [
        "# Results",
        "Measured by the scripts in `benchmarks/paper/`, and written by them: this page, too. Each has its tables, "
        "its plot, the command, the commit, the hardware and the date; the `.json` beside it has every number.",
        "## The founding paper's claims",
        *(judged(claim, records) for claim in CLAIMS),
        "## All results",
    ]
    for record in records:
        about = f"{record['paper']}, scale {record['scale']}, {record['date'][:10]}, {record['hardware']}."
        parts.append(f"### [{record['title']}]({record['name']}.md)\n\n{about}")
        if others := [sentence for sentence in record["claims"] if not sentence.startswith(CLAIMS)]:
            parts.append(bullets(others))
    (out / "index.md").write_text("\n\n".join(parts) + "\n")


def judged(claim: str, records: Sequence[Record]) -> str:
    """How often it held, and each sentence with the page that it is from."""
    found = [(sentence, record) for record in records for sentence in record["claims"] if sentence.startswith(claim)]
    if not found:
        return f"**{claim}**: not measured yet."
    verdicts = [verdict(sentence) for sentence, _ in found]
    counts = ", ".join(f"{word} in {verdicts.count(word)}" for word in VERDICTS if word in verdicts)
    sentences = [f"{sentence} ([{record['title']}]({record['name']}.md))" for sentence, record in found]
    return f"**{claim}**: {counts} of {len(found)}.\n\n{bullets(sentences)}"


def verdict(sentence: str) -> str:
    """The words behind the first colon.

    >>> verdict("Matching helps (RegMean): held in part, by 2 points")
    'held in part'
    """
    found = re.search(rf": ({'|'.join(VERDICTS)})", sentence)
    assert found, f"no verdict in: {sentence}"
    return found[1]


# --- pictures ---------------------------------------------------------------------------------------------------------
def draw(plots: list[Plot | Map], path: Path) -> None:
    """One panel each, at most three in a row, as an SVG without date or random names: equal numbers, equal files."""
    import matplotlib
    from matplotlib.figure import Figure

    across = 2 if len(plots) in (4, 8) else min(len(plots), 3)
    down = math.ceil(len(plots) / across)
    figure = Figure(figsize=(6.4 * across, 4.0 * down), layout="constrained")
    for number, plot in enumerate(plots, start=1):
        axes = figure.add_subplot(down, across, number)
        axes.set_title(plot.title, fontsize=10)
        if isinstance(plot, Map):
            _map(figure, axes, plot)
        elif plot.kind == "bars":
            _bars(axes, plot)
        else:
            _lines(axes, plot)
    with matplotlib.rc_context({"svg.hashsalt": "isomerge", "svg.fonttype": "none"}):
        figure.savefig(path, format="svg", metadata={"Date": None})


def _lines(axes: Any, plot: Plot) -> None:
    for colour, (name, values) in zip(_colours(len(plot.series)), plot.series.items(), strict=True):
        known = [place for place, value in enumerate(values) if value is not None]  # a line goes on over a gap
        ticks, heights = ([row[place] for place in known] for row in (plot.ticks, _numbers(values)))
        errors = [_numbers(plot.errors[name])[place] for place in known] if name in plot.errors else None
        axes.errorbar(ticks, heights, errors, color=colour, marker="o", ms=3, capsize=2, label=name)
    _finish(axes, plot)


def _bars(axes: Any, plot: Plot) -> None:
    width = 0.8 / len(plot.series)
    for place, (colour, (name, values)) in enumerate(zip(_colours(len(plot.series)), plot.series.items(), strict=True)):
        where = [n + (place - (len(plot.series) - 1) / 2) * width for n in range(len(plot.ticks))]
        errors = _numbers(plot.errors[name]) if name in plot.errors else None
        axes.bar(where, _numbers(values), width, yerr=errors, color=colour, capsize=2, label=name)
    axes.set_xticks(range(len(plot.ticks)), plot.ticks, rotation=30, ha="right", fontsize=8)
    _finish(axes, plot)


def _finish(axes: Any, plot: Plot) -> None:
    axes.set_xlabel(plot.x)
    axes.set_ylabel(plot.y)
    axes.grid(alpha=0.3)
    if plot.log and any(value > 0 for row in plot.series.values() for value in _numbers(row)):
        axes.set_yscale("log")
    if len(plot.series) > 1:  # beside the plot, where it hides nothing
        axes.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _map(figure: Any, axes: Any, plot: Map) -> None:
    """Far-off values are cut, or they would hide the valley."""
    from matplotlib.patheffects import withStroke

    values = [_numbers(row) for row in plot.values]
    known = sorted(value for row in values for value in row if math.isfinite(value))
    low, top = known[0], known[int(0.9 * (len(known) - 1))]
    levels = [low + (top - low or 1.0) * n / 20 for n in range(21)]
    filled = axes.contourf(plot.x, plot.y, values, levels=levels, cmap="viridis", extend="max")
    figure.colorbar(filled, ax=axes, label=plot.label)
    seen = [withStroke(linewidth=2, foreground="black")]  # white letters, on yellow too
    for name, x, y in plot.marks:
        axes.plot([x], [y], "o", color="white", mec="black", ms=5)
        style = {"color": "white", "fontsize": 8, "path_effects": seen}
        axes.annotate(name, (x, y), xytext=(5, 5), textcoords="offset points", **style)
    axes.set_aspect("equal")


def _colours(count: int) -> list[str]:
    return [COLOURS[n % len(COLOURS)] for n in range(count)]


def _numbers(values: Any) -> list[float]:
    return [math.nan if value is None else float(value) for value in values]


def main() -> None:
    parser = argparse.ArgumentParser(description="Pages and plots from records.")
    parser.add_argument("records", type=Path, help="a folder with NAME.json files")
    parser.add_argument("--out", type=Path, help="where to, with a copy of the records; the same folder if not named")
    given = parser.parse_args()
    out = given.out or given.records
    out.mkdir(parents=True, exist_ok=True)
    found = sorted(given.records.glob("*.json"))
    if not found:
        raise SystemExit(f"{given.records} holds no records (NAME.json). Run a script of benchmarks/paper first.")
    for path in found:
        if out != given.records:
            (out / path.name).write_bytes(path.read_bytes())
        render(json.loads(path.read_text()), out)
        print(f"written: {out / path.stem}.md")


if __name__ == "__main__":
    main()

"""The page of the demo: ways to make one model out of several, beside the models themselves, and how they were made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from isomerge.reporting import blocks as b
from isomerge.reporting.curve_sections import connection_sections
from isomerge.reporting.method_sections import residual_blocks
from isomerge.reporting.record import Record

# JSON that is stored in a sorted order tells no order.
ALONE = ("none", "permutation", "rotation", "full")
"""Merged without looking at data."""
BY_FEATURES = {"reconstruct": "mean", "joint": "joint"}


def demo_headline(record: Record) -> str:
    return (
        f"{_count(record['groups'][-1]).capitalize()} small image classifiers, trained apart on handwritten digits "
        f"and made into one with isomerge {record['isomerge']}."
    )


def demo_cards(record: Record) -> list[tuple[str, str, str]]:
    """The numbers of the pair."""
    rows = {row["way"]: row for row in record["groups"][0]["rows"]}
    own = b.mean(row["accuracy"] for way, row in rows.items() if way.startswith("seed"))
    heights = record["curves"][0]["barrier"]

    def share(way: str) -> str:
        return _together(b.percent(rows[way]["accuracy"]).text)

    return [
        ("the two models", _together(b.percent(own).text), f"accuracy, their mean; as an ensemble {share('ensemble')}"),
        ("plain average", share("none"), "one model, nothing aligned"),
        ("aligned, averaged", share("full"), "one model, and no data was used"),
        ("reconstructed", share("reconstruct"), "one model, by images without labels"),
        ("loss barrier", f"{heights['none']:.2f} → {heights['full']:.2f}", "between the two, before and after"),
    ]


def demo_sections(record: Record) -> list[b.Section]:
    heights = record["curves"][0]["barrier"]
    relation = (
        "B and C compute the same function: C is B, moved next to A at level full. The straight way from A to B rises "
        f"{heights['none']:.2f} above the losses at its ends, that from A to C {heights['full']:.2f}."
    )
    line, _, plane = connection_sections([_line(record), {**record["plane"], "notes": [relation]}])
    blocks: list[Any] = []
    for group in record["groups"]:
        for way, features in BY_FEATURES.items():
            of = f"{_count(group)} models, {features} features"
            inside = residual_blocks(group["layers"][way], f": {of}")
            blocks += [b.Foldable(of.capitalize(), inside)] if blocks else inside
    return [
        _ways(record),
        line,
        replace(plane, title="Where the models lie"),
        b.Section("method", "What reconstruct did", blocks),
    ]


def _ways(record: Record) -> b.Section:
    meaning = (
        "Every row predicts the same 500 digits, which no model has seen. The models and their ensemble are what to "
        "compare with; each of the others is one model of the same size, loaded from its folder in the stock class."
    )
    blocks: list[Any] = [b.Paragraph(meaning), b.Side([_table(group) for group in record["groups"]])]
    if len(record["pairs"]) > 1:
        blocks.append(_pairs(record))
    return b.Section("ways", "One model out of several", blocks)


def _table(group: Record) -> b.TableBlock:
    rows = [
        b.Row(
            [b.text(row["label"]), b.percent(row["accuracy"]), b.number(row["loss"]),
             b.text("images" if row["data"] else "none" if row["way"] in ALONE else "")],
            quiet=row["way"] not in ALONE and not row["data"],
        )
        for row in group["rows"]
    ]  # fmt: skip
    seeds = ", ".join(map(str, group["seeds"]))
    caption = f"{_count(group).capitalize()} models, trained from the seeds {seeds}"
    return b.TableBlock(caption, ("what predicts", "accuracy", "loss", "data"), rows, frozenset({1, 2}), wide=True)


def _pairs(record: Record) -> b.TableBlock:
    columns = ["ensemble", *ALONE, *BY_FEATURES]
    rows = [
        b.Row([b.text(pair["seed"]), b.text(" / ".join(f"{100 * share:.1f}" for share in pair["parents"]) + " %"),
               *(b.percent(pair[key], bar=False) for key in columns)])
        for pair in record["pairs"]
    ]  # fmt: skip
    means = [b.percent(b.mean(pair[key] for pair in record["pairs"]), bar=False) for key in columns]
    parents = b.mean(share for pair in record["pairs"] for share in pair["parents"])
    rows.append(b.Row([b.text("mean"), b.percent(parents, bar=False), *means]))
    caption = "Accuracy of every pair"
    return b.TableBlock(caption, ("seeds", "models", *columns), rows, frozenset(range(1, len(columns) + 2)))


def _line(record: Record) -> dict[str, Any]:
    """The first pair's curves in the form that `isomerge barrier` prints."""
    curve = record["curves"][0]
    together = next(row for row in record["groups"][0]["rows"] if row["way"] == "ensemble")

    def measured(level: str) -> dict[str, Any]:
        numbers = zip(curve["t"], curve["loss"][level], curve["accuracy"][level], strict=True)
        points = [{"t": t, "loss": loss, "metric": share} for t, loss, share in numbers]
        return {"level": level, "points": points, "barrier": curve["barrier"][level]}

    return {
        **measured("none"),
        "models": [f"model {seed}" for seed in record["groups"][0]["seeds"]],
        "metric_name": "accuracy",
        "ensemble": {"loss": together["loss"], "metric": together["accuracy"]},
        "aligned": [measured(level) for level in ALONE[1:]],
    }


def _together(text: str) -> str:
    """A number and its unit on one line."""
    return text.replace(" ", "\u00a0")


def _count(group: Record) -> str:
    return {2: "two", 3: "three"}[len(group["seeds"])]


# --- how the models were made -----------------------------------------------------------------------------------------


def demo_origin_sections(record: Record) -> list[b.Section]:
    instructions = record.get("how")
    return [_recipe(instructions), _lineage(record, instructions)] if instructions else []


def _recipe(instructions: Record) -> b.Section:
    again = (
        "Run inside the demo's folder, these commands make the models that need no data again, beside the first ones. "
        "In the folder of every merged model, isomerge.json holds its recipe as YAML."
    )
    features = (
        "Merges by features look at the training images, without their labels. In Python, inside the same folder:"
    )
    return b.Section("recipe", "Recipe", [
        b.Paragraph(again),
        b.Code("\n".join(instructions["commands"]), "Commands that merge and align again"),
        b.Paragraph(features),
        b.Code(instructions["python"], "Python that merges by features again"),
    ])  # fmt: skip


def _lineage(record: Record, instructions: Record) -> b.Section:
    trained = [
        b.Row([b.text(one["model"]), b.Cell(str(one["seed"]), one["seed"]), b.text(one["folder"], code=True),
               b.text(one["sha256"], code=True)])
        for one in instructions["models"]
    ]  # fmt: skip
    merged = [
        b.Row([b.text(row["folder"], code=True), b.text(row["label"]),
               b.text(", ".join(map(str, group["seeds"]))), b.text(row["sha256"], code=True)])
        for group in record["groups"]
        for row in group["rows"]
        if row.get("sha256")
    ]  # fmt: skip
    training = instructions["training"]
    facts = {
        "trained by": training["command"],
        "data": training["data"],
        "a seed": training["seed"],
        "epochs": training["epochs"],
        "images at a time": training["batch"],
        "learning rate": training["learning_rate"],
        "weight decay": training["weight_decay"],
        "versions": ", ".join(f"{name} {version}" for name, version in training["versions"].items()),
    }
    hashed = "the sha256 is of all tensors together"
    return b.Section("lineage", "Lineage", [
        b.TableBlock(f"The trained models; {hashed}", ("model", "seed", "folder", "sha256"), trained, frozenset({1})),
        b.FactList(facts),
        b.TableBlock(f"The merged models; {hashed}", ("folder", "way", "of models", "sha256"), merged),
    ])  # fmt: skip

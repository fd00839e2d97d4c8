"""The sections on how the demo's models were made: commands that make them again, and what came from which seed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isomerge.reporting import blocks as b

Record = Mapping[str, Any]


def demo_made_sections(record: Record) -> list[b.Section]:
    how = record.get("how")
    return [_recipe(how), _lineage(record, how)] if how else []


def _recipe(how: Record) -> b.Section:
    said = (
        "Run inside the demo's folder, these commands make the models that need no data again, beside the first ones. "
        "In the folder of every merged model, isomerge.json holds its recipe as YAML."
    )
    features = (
        "Merges by features look at the training images, without their labels. In Python, inside the same folder:"
    )
    return b.Section("recipe", "Recipe", [
        b.Words(said),
        b.Code("\n".join(how["commands"]), "Commands that merge and align again"),
        b.Words(features),
        b.Code(how["python"], "Python that merges by features again"),
    ])  # fmt: skip


def _lineage(record: Record, how: Record) -> b.Section:
    trained = [
        b.Row([b.words(one["model"]), b.Cell(str(one["seed"]), one["seed"]), b.words(one["folder"], code=True),
               b.words(one["sha256"], code=True)])
        for one in how["models"]
    ]  # fmt: skip
    merged = [
        b.Row([b.words(row["folder"], code=True), b.words(row["label"]),
               b.words(", ".join(map(str, group["seeds"]))), b.words(row["sha256"], code=True)])
        for group in record["groups"]
        for row in group["rows"]
        if row.get("sha256")
    ]  # fmt: skip
    training = how["training"]
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
        b.Table(f"The trained models; {hashed}", ("model", "seed", "folder", "sha256"), trained, frozenset({1})),
        b.Facts(facts),
        b.Table(f"The merged models; {hashed}", ("folder", "way", "of models", "sha256"), merged),
    ])  # fmt: skip

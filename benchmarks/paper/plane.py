"""Figure 2's idea, for real: the loss on the plane through A, B and B aligned to A, with both merges marked.

python benchmarks/paper/plane.py --scale small --data DATA --work DIR
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from merges import matched
from runner import Map, Mean, Result, Run, Table, main
from vision import Vision

LEVELS: dict[str, dict[str, Any]] = {
    "the paper's matching": {"level": "rotation", "only": "attention"},
    "full": {"level": "full"},
}
GRID = {"reduced": 9, "small": 21, "original": 21}
IMAGES = {"reduced": 250, "small": 1000, "original": 2000}


def script(run: Run) -> Result:
    vision = Vision(run)
    on_cpu = run.device == "cpu" and run.scale != "reduced"
    points, images = (5, 100) if on_cpu else (GRID[run.scale], IMAGES[run.scale])
    run.settings |= {"points": points, "images": images}
    run.note(
        f"The paper draws this by hand; here it is measured at {points} × {points} places on {images:,} test images, "
        "for the first pair of models. Axes are distances in the space of weights; far-off losses are cut."
    )
    planes = {
        name: run.cell(f"plane, {name}", partial(measure, vision, options, points, images))
        for name, options in LEVELS.items()
    }
    found = {name: each for name, each in planes.items() if "marks" in each}  # else it is a dry run, or not finished
    if not found:
        return Result([])
    names = ["A", "B", "B aligned", "merge of A and B", "merge of A and B aligned"]
    rows: list[list[str | Mean]] = [
        [name, *(Mean([each["marks"][name]["loss"]], 3) for each in found.values())] for name in names
    ]
    table = Table("Loss at the marked places", ["model", *found], rows)
    maps = [
        Map(
            f"loss, B aligned by {name}",
            each["x"],
            each["y"],
            each["loss"],
            [(label, each["marks"][label]["x"], each["marks"][label]["y"]) for label in names],
        )
        for name, each in found.items()
    ]
    return Result([table], [*maps], [claim(name, each["marks"]) for name, each in found.items()])


def measure(vision: Vision, options: dict[str, Any], points: int, images: int) -> dict[str, Any]:
    import isomerge

    first, second = matched(vision, (0, 1), None)
    moved = matched(vision, (0, 1), options)[1]
    loss = loss_on(vision, images)
    found = isomerge.plane(first, second, moved, loss=loss, points=points, device=vision.run.device)
    a, b, c = found["models"]
    marks = {"A": a, "B": b, "B aligned": c}
    for name, other, checkpoint in (("merge of A and B", b, second), ("merge of A and B aligned", c, moved)):
        between = {"x": (a["x"] + other["x"]) / 2, "y": (a["y"] + other["y"]) / 2}
        marks[name] = {**between, "loss": loss(_average(vision, first, checkpoint))}
    kept = {name: {key: mark[key] for key in ("x", "y", "loss")} for name, mark in marks.items()}
    return {"x": found["x"], "y": found["y"], "loss": found["loss"], "marks": kept}


def _average(vision: Vision, first: Any, second: Any) -> Any:
    import isomerge
    from isomerge.running.stock import load_stock

    states = [{name: model.read(name) for name in model.tensors} for model in (first, second)]
    return load_stock(vision.config, isomerge.merge_state_dicts(states)).to(vision.run.device)


def loss_on(vision: Vision, images: int) -> Callable[[Any], float]:
    """The cross-entropy of a module, on test images."""
    import torch

    x, y = (part[:images] for part in vision.images["test"])

    @torch.no_grad()
    def loss(module: Any) -> float:
        total = 0.0
        for pixels, labels in zip(x.split(500), y.split(500), strict=True):
            logits = module(pixel_values=pixels.float().to(vision.run.device)).logits.float().cpu()
            total += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
        return total / len(y)

    return loss


def claim(name: str, marks: dict[str, Any]) -> str:
    plain, aligned = marks["merge of A and B"]["loss"], marks["merge of A and B aligned"]["loss"]
    ends = (marks["A"]["loss"] + marks["B"]["loss"]) / 2
    word = "lower" if aligned < plain else "not lower"
    return (
        f"Aligned by {name}, the merge has a {word} loss: {aligned:.3f} instead of {plain:.3f}; the two models have "
        f"{ends:.3f} on average."
    )


if __name__ == "__main__":
    main("plane", "The loss between two models, as they are and aligned", "Figure 2 of the founding paper", script)

"""Paths and simplexes of low loss between two models

Two image classifiers trained apart, not aligned. The highest loss on a path, its barrier (the highest rise above the
line between the losses of the two models, in nats, as `isomerge barrier` measures it), the lowest accuracy on it, and
accuracy and loss in its middle, at 21 points on images that no path was trained on. Each path is trained on 400 batches
of 32 images; the straight ones are not trained. Of a simplex the path goes through the mean of the vertices that
learned; samples are five points drawn from it.

The control is one of the models, trained on as many more batches. A trained path costs as much as training a model, and
its middle is no better than one: use it to see whether two models are connected, for points to average predictions of,
or for a path that is low on perturbed inputs. Alignment alone, without data, takes nine tenths of the barrier away.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from setting import Models, Row, loaded, main, trained

import isomerge

STEPS, BATCH, POINTS = 400, 32, 21
NOISE = 0.5
COLUMNS = (
    ("highest loss", 3), ("barrier", 3), ("lowest accuracy", 1), ("middle accuracy", 1), ("middle loss", 3),
    ("middle loss, noise", 3),
)  # fmt: skip
PATHS: dict[str, dict[str, Any]] = {
    "Bézier": {"method": "bezier"},
    "Bézier, towards the parents' predictions": {"method": "bezier", "towards": "predictions"},
    "Bézier, after alignment": {"method": "bezier", "align": True},
    f"Bézier, inputs with noise ({NOISE:g} σ)": {"method": "bezier", "noise": NOISE},
    "chain, one pivot": {"method": "chain"},
    "AutoNEB": {"method": "autoneb"},
    "geodesic, no labels": {"method": "geodesic"},
    "simplex (SPRO, two vertices)": {"method": "simplex"},
    "subspace, a line": {"method": "subspace"},
}


def rows(models: Models, seed: int) -> Iterator[Row]:
    a, b = (str(folder) for folder in models.strangers)
    scores = [models.score(folder) for folder in (a, b)]
    noisy = with_noise(models, seed)
    under_noise = sum(loss_on(loaded(folder), noisy, models) for folder in models.strangers) / 2
    alone = middle(*(sum(s[k] for s in scores) / 2 for k in ("accuracy", "loss")))
    yield {"row": "one model (mean)", **alone, "middle loss, noise": under_noise}
    epochs = round(STEPS * BATCH / len(models.labels["train"]))
    longer = models.folder / "longer"
    trained(loaded(models.strangers[0]), models.pixels["train"], models.labels["train"], epochs, 1e-3, seed, longer)
    yield {"row": "one model, trained on as many more batches", **middle(*models.score(longer).values())}
    line = isomerge.barrier(a, b, data=models.data("test"), points=POINTS, align=True)
    assert line.ensemble is not None and line.aligned is not None
    yield {"row": "ensemble of the two", **middle(100 * line.ensemble["metric"], line.ensemble["loss"])}
    yield {"row": "straight line", **of_path(line.points, line.barrier)}
    yield {"row": "straight line, aligned", **of_path(line.aligned.points, line.aligned.barrier)}
    for name, options in PATHS.items():
        found = isomerge.curve(
            a, b, data=models.data("train"), test=models.data("test"), steps=STEPS, batch_size=BATCH, points=POINTS,
            seed=seed, **options,
        )  # fmt: skip
        measured = of_path(found.points, found.barrier)
        if options["method"] == "bezier" and "align" not in options:
            measured["middle loss, noise"] = loss_on(found.module(0.5), noisy, models)
        yield {"row": name, **measured}
        if found.samples is not None and found.samples.ensemble is not None:
            points = found.samples.points
            mean = [sum(p[key] for p in points) / len(points) for key in ("metric", "loss")]
            yield {"row": f"{name}: mean of five samples", **middle(100 * mean[0], mean[1])}
            together = found.samples.ensemble
            yield {"row": f"{name}: ensemble of five samples", **middle(100 * together["metric"], together["loss"])}


def of_path(points: list[dict[str, Any]], barrier: float | None) -> dict[str, Any]:
    centre = points[len(points) // 2]
    return {
        "highest loss": max(p["loss"] for p in points), "barrier": barrier,
        "lowest accuracy": 100 * min(p["metric"] for p in points), **middle(100 * centre["metric"], centre["loss"]),
    }  # fmt: skip


def middle(accuracy: float, loss: float) -> dict[str, float]:
    return {"middle accuracy": accuracy, "middle loss": loss}


def with_noise(models: Models, seed: int) -> torch.Tensor:
    pixels = models.pixels["test"]
    drawn = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(seed))
    return pixels + NOISE * pixels.std() * drawn


@torch.no_grad()
def loss_on(module: Any, pixels: torch.Tensor, models: Models) -> float:
    return float(torch.nn.functional.cross_entropy(module(pixels).logits.double(), models.labels["test"]))


if __name__ == "__main__":
    main(__doc__, rows, COLUMNS, siblings=1)

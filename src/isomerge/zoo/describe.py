"""`isomerge.describe`: a small file beside a model, by which it can be found."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from math import isfinite, prod
from pathlib import Path
from typing import Any

import numpy as np

from isomerge import __version__
from isomerge.arguments import require_shared_types, require_types
from isomerge.checkpoint import Checkpoint, open_checkpoint
from isomerge.data.base import Data, DataSource
from isomerge.data.open import open_data
from isomerge.data.task_heads import CLASSIFIERS, label_names, task_of
from isomerge.errors import RequestError
from isomerge.evaluation.evaluate import evaluate
from isomerge.progress_bars import Shown, callback, shows_progress
from isomerge.results import Result
from isomerge.zoo.description import FORMAT, place_for, write_description
from isomerge.zoo.embedding import MEMBERS, Embedding, reduced
from isomerge.zoo.features import features_of

POINTS = 16
LIMIT = 2000
"""Examples of an embedding where nobody asks for another number."""
NEAR = 1e-2
"""A point this near to an example, relative to the length of examples, shows it."""


@dataclass
class Description(Result):
    """What the file says, but for the points."""

    model: str
    task: str | None
    labels: list[str] | None
    parameters: int
    features: str
    examples: int
    points: int
    error: float
    loss: float | None
    metric: float | None
    metric_name: str | None
    file: str
    notes: list[str]
    seconds: float


@shows_progress
def describe(
    model: Any,
    data: DataSource,
    *,
    points: int | None = None,
    score: bool = True,
    batch_size: int | None = None,
    limit: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    out: str | os.PathLike[str] | None = None,
    force: bool = False,
    progress: Shown = None,
) -> Description:
    """Write a description of a model beside it: its task, labels and scores, and what its data looks like.

    The data is that which the model was trained on. At most `points` weighted points stand for it (16, or one per ten
    examples, whichever is less), in features that depend on no model. No point is an example; docs/find.md says what
    the file tells all the same. `score=False` does not run the model. `out` names another place for the file.

    >>> described = isomerge.describe("model-a", "cifar10.tar.xz", limit=400, score=False, out="about-a.json", force=True)
    >>> described.features, described.points <= 16
    ('image-1', True)
    """  # noqa: E501
    progress = callback(progress)
    start = time.perf_counter()
    require_types(points=(points, int, None), score=(score, bool), out=(out, str, os.PathLike, None))
    require_shared_types(
        batch_size=batch_size, limit=limit, seed=seed, device=device, force=force, progress=progress
    )  # fmt: skip
    if data is None:
        raise RequestError("Describing a model needs the data it was trained on. Pass data.", keys=("data",))
    target = place_for(model, out, force=force)
    checkpoint = open_checkpoint(model)
    opened = open_data(data)
    described, notes = _embedded(opened, points, limit, seed)
    scores: dict[str, Any] = {"loss": None, "metric": None, "metric_name": None}
    if score:
        measured = evaluate(
            model, opened, batch_size=batch_size, limit=limit, seed=seed, device=device, progress=progress
        )
        scores = {
            "loss": _finite(measured.loss),
            "metric": _finite(measured.metric),
            "metric_name": measured.metric_name,
        }
        notes += measured.notes
    content = {"format": FORMAT, "isomerge": __version__, **_about(checkpoint), **described, **scores}
    write_description(target, content)
    shown = {key: value for key, value in content.items() if key not in ("format", "isomerge", "weights", "points")}
    return Description(
        **shown, points=len(content["points"]), file=str(target), notes=list(dict.fromkeys(notes)),
        seconds=time.perf_counter() - start,
    )  # fmt: skip


def _about(checkpoint: Checkpoint) -> dict[str, Any]:
    task = task_of(checkpoint.config)
    return {
        "model": Path(checkpoint.name).name,
        "task": task,
        "labels": label_names(checkpoint.config) if task in CLASSIFIERS else None,
        "parameters": sum(prod(info.shape) for info in checkpoint.tensors.values()),
    }


def _embedded(data: Data, points: int | None, limit: int | None, seed: int) -> tuple[dict[str, Any], list[str]]:
    chosen, rows, _ = features_of(data, limit, seed, default=LIMIT)
    most = len(rows) // (2 * MEMBERS)
    if most < 1 or (points is not None and not 1 <= points <= most):
        raise RequestError(
            f"Describing the data {data.name}: {len(rows)} examples in {POINTS if points is None else points} points "
            f"would show single examples. A point needs {2 * MEMBERS} examples: "
            f"{f'name {most} points at most, or' if most else ''} use more data.",
            keys=("points",),
        )
    embedding = reduced(rows, min(POINTS, most) if points is None else points, chosen.variance, seed)
    whole = Embedding.of_examples(rows)
    error = embedding.distance(whole, chosen.variance) / np.sqrt(whole.product(whole, chosen.variance))
    record = {
        "features": chosen.name,
        "examples": len(rows),
        "points": [[float(f"{x:.6g}") for x in point] for point in embedding.points],
        "weights": [float(f"{x:.9g}") for x in embedding.weights],
        "error": float(f"{error:.4g}"),
    }
    near = _examples_among(embedding.points, rows)
    return record, [] if not near else [
        f"{near} of {len(embedding.points)} points are as good as an example: the data repeats it many times"
    ]


def _examples_among(points: np.ndarray, rows: np.ndarray) -> int:
    """How many points are an example to two digits."""
    length = float(np.sqrt((rows * rows).sum(1).mean()))
    nearest = [np.linalg.norm(rows - point, axis=1).min() for point in points]
    return int(sum(distance <= NEAR * length for distance in nearest))


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None

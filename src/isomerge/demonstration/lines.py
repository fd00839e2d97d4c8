"""Loss and accuracy on the line between two models, and the loss on the plane through three."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isomerge.demonstration.digits import Digits, accuracy, loss, predict

POINTS = 21  # on the line between two models, both ends included
GRID = 15  # places each way on the plane


def between(a: Any, b: Any, digits: Digits) -> dict[str, list[float]]:
    """Loss and accuracy of (1 − t) a + t b at evenly spaced t from 0 to 1."""
    probe = copy.deepcopy(a)
    first, last = a.state_dict(), b.state_dict()
    found: dict[str, list[float]] = {"loss": [], "accuracy": []}
    for n in range(POINTS):
        probe.load_state_dict(_mixed(first, last, n / (POINTS - 1)))
        probabilities = predict(probe, digits)
        found["loss"].append(loss(probabilities, digits))
        found["accuracy"].append(accuracy(probabilities, digits))
    return found


def _mixed(first: Mapping[str, Any], last: Mapping[str, Any], t: float) -> dict[str, Any]:
    return {name: ((1 - t) * first[name].double() + t * last[name].double()).float() for name in first}


def barrier(losses: list[float]) -> float:
    """`max_t L(t) − [(1−t) L(0) + t L(1)]` over evenly spaced t.

    >>> barrier([1.0, 3.0, 2.0])
    1.5
    """
    last = len(losses) - 1
    return max(value - (losses[0] * (last - n) + losses[-1] * n) / last for n, value in enumerate(losses))


def loss_plane(models: Mapping[str, Path], digits: Digits) -> dict[str, Any]:
    """The loss on the plane through three models, by name: the record of `isomerge.connectivity.plane`."""
    from isomerge.connectivity import plane

    found = plane(*models.values(), loss=lambda model: loss(predict(model, digits), digits), points=GRID)
    corners = [
        {"model": name, **{key: corner[key] for key in ("x", "y", "loss")}}
        for name, corner in zip(models, found["models"], strict=True)
    ]
    return {"models": corners, **{key: found[key] for key in ("x", "y", "loss")}}

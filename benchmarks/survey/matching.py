"""Ways to match units: solvers of orders, mutual information, and many models at once

Image classifiers trained apart, three for each seed: the plain mean of two of them after each way to match them (over
all three pairs), and of all three. `distance` is that of the aligned model to the other one, relative to the other
one; of three models, their spread about the mean. `seconds` are those of one processor. The controls are the means
without any matching, and the default, `assignment`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from setting import Models, Row, main

import isomerge

COLUMNS = (("accuracy", 1), ("loss", 3), ("distance", 3), ("seconds", 2))
BY_WEIGHTS = {
    "permutation": ("assignment", "graph", "sinkhorn", "annealing"),
    "full": ("assignment", "sinkhorn", "annealing"),
}
MEASURES = ("covariance", "correlation", "information")


def rows(models: Models, seed: int) -> Iterator[Row]:
    pairs = list(itertools.combinations(models.strangers, 2))
    yield mean("one model", [models.score(model) for model in models.strangers])
    yield mean("two models: plain mean", [measured(models, pair, None) for pair in pairs])
    for level, solvers in BY_WEIGHTS.items():
        for solver in solvers:
            how = {"level": level, "solver": solver}
            yield mean(f"two models: {level}, {solver}", [measured(models, pair, how) for pair in pairs])
    data = models.data("train")
    for measure in MEASURES:
        how = {"level": "permutation", "evidence": "activations", "measure": measure, "data": data}
        yield mean(f"two models: permutation, activations by {measure}", [measured(models, p, how) for p in pairs])
    yield {"row": "three models: plain mean", **measured(models, models.strangers, None)}
    for level in BY_WEIGHTS:
        for many in ("anchor", "universe", "cycle"):
            how = {"level": level, "many": many}
            yield {"row": f"three models: {level}, {many}", **measured(models, models.strangers, how)}


def measured(models: Models, folders: Sequence[Path], how: dict[str, Any] | None) -> dict[str, float]:
    """The mean of these models, matched as `how` says. Seconds are those of a processor, for matching alone."""
    out = models.folder / "mean"
    states: list[Any] = [str(folder) for folder in folders]
    found: dict[str, float] = {}
    if how is not None:
        many, options = how.get("many", "anchor"), {k: v for k, v in how.items() if k not in ("many", "data")}
        if "data" in how:
            options["data"] = isomerge.open_data(how["data"]["path"], split=how["data"]["split"])
        anchor = None if many != "anchor" else states[0]
        start = time.process_time()
        family = isomerge.align_family(states if anchor is None else states[1:], anchor=anchor, many=many, **options)
        found = {"seconds": time.process_time() - start, "distance": family.report().distance.after}
    isomerge.merge(states, align=False if how is None else how).save(out, report=False, lock=False, force=True)
    return {**models.score(out), **found}


def mean(name: str, found: Sequence[dict[str, float]]) -> Row:
    return {"row": name, **{key: sum(one[key] for one in found) / len(found) for key in found[0]}}


if __name__ == "__main__":
    main(__doc__, rows, COLUMNS, strangers=3, siblings=0)

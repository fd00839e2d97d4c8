"""Ways to match units: solvers of orders, mutual information, and many models at once

Image classifiers trained apart, three for each seed: the plain mean of two of them after each way to match them (over
all three pairs), and of all three. `distance` is that of the aligned model to the other one, relative to the other
one; of three models without an anchor, their spread about the mean. `seconds` are those of one processor. The controls
are the means without any matching, and the default, `assignment`.

`found` is the share, in percent, of the stream's units that are put back in place: of a model and its shuffled copy,
every matrix of which got Gaussian noise of four times its deviation. With *new tables*, the model's embeddings and
classifier are noise alone.

When to use which: level `full` with the default solver. Where only orders may move, data helps two models, however they
are compared (`correlation` is the safe choice), and `--many cycle` helps three. Graph matching, Sinkhorn, annealing and
mutual information have not helped here.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from setting import Models, Row, main
from torch import Tensor

import isomerge
from isomerge.alignment.scope import Scope
from isomerge.architectures import describe
from isomerge.symmetry.transform import Transform, random_transform

COLUMNS = (("accuracy", 1), ("loss", 3), ("distance", 3), ("found", 1), ("seconds", 2))
BY_WEIGHTS = {
    "permutation": ("assignment", "graph", "sinkhorn", "annealing"),
    "full": ("assignment", "sinkhorn", "annealing"),
}
NOISE = 4.0
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
    for tables in ("", ", new tables"):
        for solver in ("assignment", "graph"):
            copies = [shuffled(model, seed, bool(tables)) for model in models.strangers]
            yield mean(f"a shuffled noisy copy{tables}: {solver}", [restored(*copy, solver) for copy in copies])


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


def shuffled(folder: Path, seed: int, new_tables: bool) -> tuple[Path, dict[str, Tensor], dict[str, Tensor], Transform]:
    """A model, its shuffled noisy copy, and the shuffle."""
    bound = describe(isomerge.open_checkpoint(folder))
    shuffle = random_transform(Scope("permutation").restrict(bound.architecture).spaces, seed)
    draw = torch.Generator().manual_seed(seed)

    def noise(like: Tensor) -> Tensor:
        return like.std() * torch.randn(like.shape, generator=draw, dtype=torch.float64) if like.ndim > 1 else 0 * like

    own = {name: bound.checkpoint.read(name).double() for name in bound.layouts}
    copy = {name: shuffle.act(t, bound.layouts[name]) + NOISE * noise(t) for name, t in own.items()}
    if new_tables:
        own |= {name: noise(t) for name, t in own.items() if t.ndim > 1 and is_table(name)}
    return folder, own, copy, shuffle


def is_table(name: str) -> bool:
    return "embeddings" in name or name.startswith("classifier")


def restored(
    folder: Path, own: dict[str, Tensor], copy: dict[str, Tensor], shuffle: Transform, solver: str
) -> dict[str, float]:
    config = json.loads((folder / "config.json").read_text())
    start = time.process_time()
    found = isomerge.align(copy, own, config=config, level="permutation", solver=solver)
    seconds = time.process_time() - start
    order = shuffle.then(found.transform).element("residual")
    return {"found": 100 * float((order == torch.arange(len(order))).double().mean()), "seconds": seconds}


def mean(name: str, found: Sequence[dict[str, float]]) -> Row:
    return {"row": name, **{key: sum(one[key] for one in found) / len(found) for key in found[0]}}


if __name__ == "__main__":
    main(__doc__, rows, COLUMNS, strangers=3, siblings=0)

"""Merging by features: the recipe's form of `isomerge.merging.reconstruct`."""

from __future__ import annotations

from typing import Any

from isomerge.merging.methods.method import PerModel, each
from isomerge.merging.whole.method import Solved, Work, whole_method


@whole_method(data="together", passes="every model, once per linear map, as far as the map")
def reconstruct(
    work: Work,
    *,
    weight: PerModel[float] = each(1.0),
    features: str = "mean",
    refine: int = 0,
    polish: int = 0,
    ridge: float = 1e-2,
    floor: float = 1e-6,
) -> Solved:
    """Solve every linear map again, so that layer by layer the features are the mean of the models'.

    Options:
        weight: how much of each model, divided by their sum
        features: mean of the models', or joint: one model's width out of all models side by side
        refine: gradient steps on each block after it was solved
        polish: gradient steps on the whole model at the end, towards the models' mean prediction
        ridge: how strongly weights are held at the average, as a share of what each input varies
        floor: the same, as a share of what all inputs of a map vary on average
    """
    settings = {"features": features, "refine": refine, "polish": polish, "ridge": ridge, "floor": floor}
    return solved(work, method="reconstruct", weights=weight, **settings)


def solved(work: Work, **options: Any) -> Solved:
    """Run it, and hand over its result."""
    from isomerge.merging.reconstruct import reconstruct as run

    batches = [one.passes(work.models[0]) for one in work.data]
    align = False if work.align is None else work.align
    found = run(work.models, batches, align=align, device=work.device, progress=work.progress, **options)
    record = found.report()
    notes = [*record.pop("warnings"), *record.pop("notes")]
    known = ("examples", "layers", "weights", "features", "refined", "polished")
    told = {key: record[key] for key in known if record.get(key)}
    return Solved(found.tensors, found.plan, found.config_changes, record["aligned"], notes, told)

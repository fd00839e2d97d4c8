"""Ways to merge the image classifiers, and a pair with the second model next to the first."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from vision import Vision

if TYPE_CHECKING:
    from fusing import State

    from isomerge.calibration import Statistics

Options = Mapping[str, Any] | None
Pair = tuple[int, int]
MOVED = "moved"
Merge = Callable[[Vision, list[Any]], "State"]
# As its authors run it: all units of a layer at once, before the activation function, the stream's plans averaged.
TRANSPORT: dict[str, Any] = {
    "cost": "activations",
    "solver": "emd",
    "residual": "averaging",
    "heads": "across",
    "site": "pre",
}


def simple(vision: Vision, models: list[Any], device: str | None = None) -> State:
    import isomerge

    return isomerge.merge_state_dicts([{name: model.read(name) for name in model.tensors} for model in models])


def fisher(vision: Vision, models: list[Any], device: str | None = None, *, kept: bool = False) -> State:
    known = (
        {"importance": measured(vision, models, "fisher")} if kept else {"data": vision.batches(vision.counts.fisher)}
    )
    return _merged(vision, models, device, method="fisher", **known)


def regmean(vision: Vision, models: list[Any], device: str | None = None, *, kept: bool = False) -> State:
    known = (
        {"statistics": measured(vision, models, "gram")} if kept else {"data": vision.batches(vision.counts.regmean)}
    )
    return _merged(vision, models, device, method="regmean", **known)


def _merged(vision: Vision, models: list[Any], device: str | None = None, **options: Any) -> State:
    import isomerge

    return isomerge.merge(models, device=device or vision.run.device, **options).state_dict()


def measured(vision: Vision, models: list[Any], what: str) -> list[Statistics]:
    """What Fisher and RegMean would measure; once of a model that was not moved, since many merges begin with it."""
    from isomerge.calibration import calibrate

    batches = vision.batches(vision.counts.fisher if what == "fisher" else vision.counts.regmean)
    found = []
    for model in models:
        key = f"{what} of {model.name}"
        known = vision.statistics.get(key) or calibrate(model, batches, what={what}, device=vision.run.device)
        if MOVED not in key:
            vision.statistics[key] = known
        found.append(known)
    return found


def transport(vision: Vision, models: list[Any], device: str | None = None) -> State:
    batches = vision.batches(vision.counts.transport)
    return _merged(vision, models, device, method="ot_fusion", data=batches, **TRANSPORT)


def reconstructed(align: bool, **options: Any) -> Merge:
    def merge(vision: Vision, models: list[Any]) -> State:
        steps = {"refine": vision.counts.refine} if options.get("refine") else {}
        batches = vision.batches(vision.counts.reconstruct)
        by_weights = {"evidence": "weights"} if align else False
        return _merged(vision, models, method="reconstruct", data=batches, align=by_weights, **{**options, **steps})

    return merge


METHODS: dict[str, Merge] = {
    "Simple": simple,
    "Fisher": partial(fisher, kept=True),
    "RegMean": partial(regmean, kept=True),
    "OT": transport,
}
TIMED = {"Simple": simple, "Fisher": fisher, "RegMean": regmean, "OT": transport}
RECONSTRUCT = {
    "reconstruct, mean features, not aligned": reconstructed(False),
    "reconstruct, mean features, aligned (full)": reconstructed(True),
    "reconstruct, joint features": reconstructed(False, features="joint"),
    "reconstruct, joint features, refined": reconstructed(False, features="joint", refine=True),
}


def measured_methods(device: str) -> dict[str, Merge]:
    """The methods, on a device of one's choice, each measuring what it needs."""
    return {name: partial(merge, device=device) for name, merge in TIMED.items()}


def matched(vision: Vision, pair: Pair, options: Options, device: str | None = None) -> list[Any]:
    """The pair with the second next to the first, in memory."""
    import isomerge

    first, second = (vision.checkpoint(vision.state(n), f"model {n}") for n in pair)
    if options is None:
        return [first, second]
    settings = dict(options)
    if settings.pop("data", False):
        settings["data"] = vision.batches(vision.counts.stream)
    alignment = isomerge.align(second, first, device=device or vision.run.device, **settings)
    return [first, vision.checkpoint(alignment.state_dict(), f"model {pair[1]}, {MOVED}")]


def matched_once(vision: Vision, pair: Pair, options: Options) -> tuple[list[Any], float]:
    """The same kept for the next method that wants it, and the seconds it took."""
    key = json.dumps([pair, options], sort_keys=True)
    if key not in vision.kept:
        start = time.perf_counter()
        vision.kept[key] = matched(vision, pair, options), time.perf_counter() - start
    return vision.kept[key]

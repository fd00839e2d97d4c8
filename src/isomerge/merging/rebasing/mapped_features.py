"""A change carried to a base of another width or depth, by maps between activations.

    ΔW' = T_out ΔW T_in⁺

T_out is the least-squares map from the old base's outputs of a linear map to the new base's, on the same examples.
T_in⁺ need not be known: the change of every map is regressed on the inputs that the result has there,

    ΔW' = argmin ‖X ΔW' − s (f_tuned − f_base) T_out‖² + ridge,

so that what earlier maps have changed is in it. Layers are matched as `reconstruct` does. No labels are needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from isomerge.checkpoint import Checkpoint
from isomerge.data.base import Batches
from isomerge.errors import RequestError
from isomerge.merging.layerwise.assembly import FeatureAssembly
from isomerge.merging.layerwise.candidates import Candidates
from isomerge.merging.layerwise.goals import GoalData
from isomerge.merging.layerwise.layerwise_merge import LayerwiseMerge
from isomerge.merging.layerwise.ridge import RIDGE, ridge_solution
from isomerge.merging.layerwise.shapes import require_mergeable
from isomerge.merging.layerwise.solver import calls_by_number
from isomerge.merging.layerwise.stages import Stage
from isomerge.merging.merge_inputs import MergedWeights, MergeInputs
from isomerge.merging.rebasing.features import FLOOR
from isomerge.running.padding import PaddingMask
from isomerge.running.passes import DataPass
from isomerge.running.predictions import rows_of

Outcome = tuple[str, bool]
"""A map by its name in memory, and whether the sum that it goes into is meant."""


@dataclass
class MappedChange(FeatureAssembly):
    """The features of the new base, and what the fine-tune has changed in the old one's, mapped to them."""

    scale: float = 1.0
    maps: Mapping[Outcome, Tensor] = field(default_factory=dict)

    def combine(
        self, name: str, values: Sequence[Tensor], *, follows: bool = False, believed: Tensor | None = None
    ) -> Tensor:
        """`values`: rows of the new base, the fine-tune and the old base."""
        onto, tuned, base = values
        change = self.scale * (tuned - base)
        known = self.maps.get((name, follows))
        return onto + (change if known is None else change @ known.to(change))

    def is_answer(self, name: str) -> bool:
        """Whether the outputs of a map are what the model answers, which means the same in every model."""
        layout = self.bound.layouts.get(self.described(name))
        atoms = [atom for axis in layout.axes for segment in axis for atom in segment.atoms] if layout else []
        return bool(atoms) and all(atom.free or atom.dual for atom in atoms)


class LinearFit:
    """The least-squares map from rows of one model to those of another, but for a constant; sums in float64."""

    def __init__(self) -> None:
        self._count = 0
        self._sums: list[Tensor] = []

    def add(self, given: Tensor, wanted: Tensor) -> None:
        x, y = given.double(), wanted.double()
        found = [x.T @ x, x.T @ y, x.sum(0), y.sum(0)]
        self._sums = [a + b for a, b in zip(self._sums, found, strict=True)] if self._sums else found
        self._count += len(x)

    def solved(self) -> Tensor:
        """(in, out)"""
        gram, cross, x, y = self._sums
        gram, cross = gram - torch.outer(x, x) / self._count, cross - torch.outer(x, y) / self._count
        return ridge_solution(gram, cross, RIDGE, FLOOR)


def fitted_to_another_shape(
    inputs: MergeInputs, data: Batches, scale: float, ridge: float | None, cache: str
) -> MergedWeights:
    """The new base with the change. `inputs.models`: the fine-tune and its base."""
    tuned, base = inputs.models
    onto = inputs.base
    assert onto is not None
    three = replace(inputs, models=[onto, tuned, base], base=None, align=None)
    _require_mergeable(three.models)
    run = LayerwiseMerge(three, [1.0, scale, -scale], [data], cache, joint=True)
    stages = [stage for stage in run.plan.stages if stage.kind != "experts"]
    like = run.assembly(run.shares, run.roles.stored)
    assembly = MappedChange(like.bound, like.weights, names=like.names, views=like.views, scale=scale)
    assembly.maps = _maps(run, stages, assembly)
    record = Candidates(run, True, ridge, FLOOR, 0, False).solve(
        assembly, stages, GoalData(run.examples[0], None), 0, True
    )
    return run.result(record)


def _require_mergeable(models: Sequence[Checkpoint]) -> None:
    try:
        require_mergeable(models)
    except RequestError as error:
        why = str(error).partition("cannot be merged here: ")[2] or str(error)
        raise RequestError(
            f"Carrying a fine-tune to {models[0].name}, which is of another shape: {why}", keys=("onto",)
        ) from error


def _maps(run: LayerwiseMerge, stages: Sequence[Stage], assembly: MappedChange) -> dict[Outcome, Tensor]:
    """For every map, from what the old base gives to what the new one does, by a pass of both over the data."""
    kept = run.inputs.kept
    if kept is not None and (known := kept.load("maps")) is not None:
        return {(name, follows): known[0][str(k)] for k, (name, follows) in enumerate(known[1])}
    fits: dict[Outcome, LinearFit] = {}
    _, onto, _, base = run.runners()
    examples: DataPass = run.examples[0]
    for number, batch in enumerate(examples):
        padding = PaddingMask(batch, onto.model)
        runs = [one.run(stages, batch, number, place=stages[0].place) for one in (base, onto)]
        for stage in stages:
            theirs, own = (found[stage] for found in runs)
            for place in (place for places in calls_by_number(stage, own) for place in places):
                valid = padding.of_side(own[place].rows, encoder=own[place].encoded)
                outcome = own[place].weight, stage.follows
                if not assembly.is_answer(outcome[0]):
                    rows = (rows_of(stage.outcome(calls[place]), valid) for calls in (theirs, own))
                    fits.setdefault(outcome, LinearFit()).add(*rows)
        run.inputs.report(number + 1, examples.count, "comparing activations")
    maps = {outcome: fit.solved() for outcome, fit in fits.items()}
    if kept is not None:
        kept.store("maps", {str(k): one for k, one in enumerate(maps.values())}, [list(key) for key in maps])
    return maps

"""Merging by features: every linear map of the merged model is solved again, towards the mean features of its parents.

In the order in which they run, on the inputs X that a map has in the merged model so far:

    W = argmin ‖X W − T‖² + ‖Λ^½ (W − W̄)‖²,  Λ = diag(ridge · G_jj + floor · mean diag G),  G = XᵀX

with W̄ the average and T the mean of the parents' outputs or, for maps that write to the residual stream, the mean of
the parents' streams minus the merged model's own. No labels are needed.
"""

from __future__ import annotations

import itertools
from typing import Any

from isomerge.arguments import require_choice
from isomerge.errors import RequestError
from isomerge.merging.data_methods.method import data_method
from isomerge.merging.layerwise.assembly import FeatureAssembly
from isomerge.merging.layerwise.gradient_steps import BlockRefinement
from isomerge.merging.layerwise.gradient_steps import polish as polish_model
from isomerge.merging.layerwise.joint import find_assembly
from isomerge.merging.layerwise.layerwise_merge import LayerwiseMerge
from isomerge.merging.layerwise.solver import LayerSolver, LayerTargets
from isomerge.merging.merge_inputs import MergedWeights, MergeInputs
from isomerge.merging.methods.method import PerModel, each

FEATURES = ("mean", "joint")


@data_method(data="together", passes="every model, once per linear map, as far as the map")
def reconstruct(
    inputs: MergeInputs,
    *,
    weight: PerModel[float] = each(1.0),
    features: str = "mean",
    refine: int = 0,
    polish: int = 0,
    ridge: float = 1e-2,
    floor: float = 1e-6,
    cache: str = "2GB",
) -> MergedWeights:
    """Solve every linear map again, so that layer by layer the features are the mean of the models'.

    Options:
        weight: how much of each model, divided by their sum
        features: mean of the models', or joint: one model's width out of all models side by side
        refine: gradient steps on each block after it was solved
        polish: gradient steps on the whole model at the end, towards the models' mean prediction
        ridge: how strongly weights are held at the average, as a share of what each input varies
        floor: the same, as a share of what all inputs of a map vary on average
        cache: memory that spares running finished layers again, as 2GB; 0 switches it off
    """
    require_choice("features", features, FEATURES)
    if min(refine, polish) < 0:
        raise RequestError(f"reconstruct: refine is {refine} and polish {polish}; both are numbers of steps from 0.")
    if features == "joint" and not min(weight) > 0:
        raise RequestError(
            f"reconstruct: joint features need positive weights, and these are {weight}. Leave out models without "
            "weight."
        )
    passes = [data.passes(inputs.models[0]) for data in inputs.data]
    together = [lambda: itertools.chain.from_iterable(one() for one in passes)]
    run = LayerwiseMerge(inputs, weight, together, cache, joint=features == "joint", refine=refine > 0)
    record: dict[str, Any] = {}
    assembly = FeatureAssembly(run.parents.bound, run.shares, names=run.roles.stored)
    if features == "joint":
        assembly = find_assembly(
            lambda: run.runners()[1:], run.plan.stages, run.examples[0], assembly,
            lambda done, total: inputs.report(done, total, "choosing features"),
        )  # fmt: skip
        record["features"] = assembly.summary()
        run.start_from(assembly)
    record |= _solve(run, assembly, ridge, floor, refine, polish)
    return run.result(record)


def _solve(
    run: LayerwiseMerge, assembly: FeatureAssembly, ridge: float, floor: float, refine: int, polish: int
) -> dict[str, Any]:
    """Stage by stage, then the whole model; what there is to report of gradient steps."""
    (examples,), stages, inputs = run.examples, run.plan.stages, run.inputs
    merged, *parents = run.runners()
    targets = LayerTargets(parents, assembly, stages, run.roles, run.budget // 4)
    solver = LayerSolver(merged, targets, ridge, floor, run.report)
    refinement = BlockRefinement(merged, parents, assembly, run.roles, run.plan, refine, run.budget)
    last = {stage.place: stage for stage in stages}
    refined = []
    for number, stage in enumerate(stages):
        solver.solve(stage, examples)
        if refine and last[stage.place] is stage and (done := refinement.refine(stage.place, examples)):
            refined.append(done)
        inputs.report(number + 1, len(stages), "reconstructing")
    record: dict[str, Any] = {"refined": refined} if refine else {}
    if polish:
        record["polished"] = polish_model(
            merged, parents, run.shares, examples, polish, lambda step: inputs.report(step, polish, "polishing")
        )
    return record

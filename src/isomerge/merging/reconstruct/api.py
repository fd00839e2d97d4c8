"""`reconstruct`: open, align, average, then walk the merged model and solve it layer by layer."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from isomerge.checkpoint import Checkpoint, open_checkpoint, parse_size, require_floating
from isomerge.checkpoint.base import Progress as Tell
from isomerge.checkpoint.base import name_some
from isomerge.checkpoint.memory import saved_state
from isomerge.errors import RequestError, did_you_mean
from isomerge.merging.reconstruct.assembly import Assembly
from isomerge.merging.reconstruct.blocks import BlockCache, find_stacks
from isomerge.merging.reconstruct.goals import Goals
from isomerge.merging.reconstruct.joint import all_joint, find_assembly, turns
from isomerge.merging.reconstruct.parents import Parents, State, canonical, held, prepare
from isomerge.merging.reconstruct.polish import polish as polish_merged
from isomerge.merging.reconstruct.refine import Refinement
from isomerge.merging.reconstruct.regmean import RegMeanWalk
from isomerge.merging.reconstruct.result import Reconstructed
from isomerge.merging.reconstruct.roles import Roles, file_names, find_roles
from isomerge.merging.reconstruct.running import Batch, Batches, Examples, Runner
from isomerge.merging.reconstruct.stages import Plan, find_stages
from isomerge.merging.reconstruct.walk import Progress, Walk, bias_name
from isomerge.symmetry.architecture import RESIDUAL
from isomerge.symmetry.canonical import Canonical

METHODS = ("reconstruct", "regmean++")
FEATURES = ("mean", "joint")


def reconstruct(
    models: Sequence[Any],
    batches: Batches | Sequence[Batches],
    *,
    weights: Sequence[float] | None = None,
    align: bool | Mapping[str, Any] = True,
    features: str = "mean",
    refine: int = 0,
    polish: int = 0,
    ridge: float = 1e-2,
    floor: float = 1e-6,
    method: str = "reconstruct",
    off_diagonal: float = 0.9,
    limit: int | None = None,
    cache: int | str = "2GB",
    device: str = "cpu",
    progress: Tell | None = None,
) -> Reconstructed:
    """Merge models so that, layer by layer, the result has the mean features of its parents. No labels are needed.

    The models (checkpoints, folders, hub ids or modules) are aligned to the first and averaged with `weights`; then
    every linear map is solved again, in the order in which they run, on the inputs X it has in the merged model so far:

        W = argmin ‖X W − T‖² + ‖Λ^½ (W − W̄)‖²,  Λ = diag(ridge · G_jj + floor · mean diag G),  G = XᵀX

    with W̄ the average and T the mean of the parents' outputs or, for maps that write to the residual stream, the mean
    of the parents' streams minus the merged model's own.

    `features="joint"` takes, instead of the mean in every space, the width of one model out of all models side by side:
    the stream that holds most of all streams, and the heads and units that explain most of what all of them write.
    `refine` is the number of gradient steps on each block after it was solved, `polish` on the whole model at the end,
    towards the parents' mean prediction.

    `batches` gives a fresh iterator of batches (keyword arguments of the model) at every call, the same ones each time;
    `limit` uses that many examples. `align` may hold options of `isomerge.align`. `cache` bounds the memory that spares
    running finished layers again; 0 switches it off. `method="regmean++"` needs one `batches` per model, and
    `off_diagonal` is its α.

    >>> merged = reconstruct(["model-a", "model-b"], batches)
    >>> written = merged.save("merged")
    """
    start = time.perf_counter()
    shares = _require_sound(models, weights, ridge, floor, method, off_diagonal, limit, features, refine, polish)
    sources = _sources(batches, method, len(models))
    opened = [_open(model) for model in models]
    joint = features == "joint"
    parents, states = _prepare(opened, align, joint, device, progress)
    merged, others, unheld = _load(parents, states, Assembly(parents.bound, shares), device)
    budget = parse_size(cache) if cache != 0 else 0
    budget = budget // 2 if refine else budget  # the other half holds what the blocks are refined on
    examples = [Examples(source, limit, device, budget // (4 * len(sources))) for source in sources]
    roles = find_roles(merged, parents.bound)
    run = _Run(
        _plan(merged, roles, examples[0]), roles, examples, shares, [c.name for c in opened], budget, Progress(roles),
        progress or (lambda *_: None),
    )  # fmt: skip
    more: dict[str, Any] = {}
    if method == "reconstruct":
        assembly = Assembly(parents.bound, shares, names=roles.stored)
        if joint:
            assembly = run.joint_features(merged, others, assembly)
            more["features"] = assembly.summary()
            merged, _, unheld = _load(parents, states, assembly, device, others)
        more |= run.by_features(merged, others, assembly, ridge, floor, refine, polish)
    else:
        run.by_regmean(merged, others, floor, off_diagonal)
    record = {
        "method": method, "models": run.names, "weights": list(shares), "aligned": parents.alignment,
        "examples": sum(e.size or 0 for e in examples), "ridge": ridge, "floor": floor,
        "layers": run.told.layers, **more,
        "warnings": run.told.warnings, "notes": _notes(parents, merged, roles, run.plan),
        "seconds": time.perf_counter() - start,
    }  # fmt: skip
    changes = {k: v for k, v in parents.config.items() if opened[0].config.get(k) != v or k not in opened[0].config}
    found = {name: tensor.detach().cpu() for name, tensor in _held(merged, parents).items()} | unheld
    tensors = {name: found[name] for name in parents.plan}
    return Reconstructed(tensors, parents.plan, opened, changes, record, progress)


@dataclass(frozen=True)
class _Run:
    """What every way to solve the merged model needs."""

    plan: Plan
    roles: Roles
    examples: Sequence[Examples]
    shares: Sequence[float]
    names: list[str]
    budget: int
    told: Progress
    tell: Tell

    def runners(self, merged: Any, others: Sequence[Any]) -> list[Runner]:
        """The merged model and its parents, with an empty cache: each pass starts at the front."""
        kept = BlockCache(self.plan.stacks, self.budget // 2)
        named = zip((merged, *others), ("the merged model", *self.names), strict=True)
        return [Runner(model, name, who, kept) for who, (model, name) in enumerate(named)]

    def joint_features(self, merged: Any, others: Sequence[Any], mean: Assembly) -> Assembly:
        return find_assembly(
            lambda: self.runners(merged, others)[1:], self.plan.stages, self.examples[0], mean,
            lambda done, total: self.tell(done, total, "choosing features"),
        )  # fmt: skip

    def by_features(
        self,
        merged: Any,
        others: Sequence[Any],
        assembly: Assembly,
        ridge: float,
        floor: float,
        refine: int,
        polish: int,
    ) -> dict[str, Any]:
        """Solve stage by stage; what else there is to tell."""
        (examples,), stages = self.examples, self.plan.stages
        runner, *parents = self.runners(merged, others)
        goals = Goals(parents, assembly, stages, self.roles, self.budget // 4)
        walk = Walk(runner, goals, ridge, floor, self.told)
        refinement = Refinement(runner, parents, assembly, self.roles, self.plan, refine, self.budget)
        last = {stage.place: stage for stage in stages}
        refined = []
        for number, stage in enumerate(stages):
            walk.solve(stage, examples)
            if refine and last[stage.place] is stage and (done := refinement.refine(stage.place, examples)):
                refined.append(done)
            self.tell(number + 1, len(stages), "reconstructing")
        more: dict[str, Any] = {"refined": refined} if refine else {}
        if polish:
            more["polished"] = polish_merged(
                runner, parents, self.shares, examples, polish, lambda step: self.tell(step, polish, "polishing")
            )
        return more

    def by_regmean(self, merged: Any, others: Sequence[Any], floor: float, off_diagonal: float) -> None:
        runner = self.runners(merged, others)[0]
        walk = RegMeanWalk(runner, others, self.shares, floor, off_diagonal, self.told)
        for number, stage in enumerate(self.plan.stages):
            walk.solve(stage, self.examples)
            self.tell(number + 1, len(self.plan.stages), "reconstructing")


def _prepare(
    opened: Sequence[Checkpoint], align: bool | Mapping[str, Any], joint: bool, device: str, progress: Tell | None
) -> tuple[Parents, list[State]]:
    """The parents, aligned where that is asked for and of use; canonical if the stream gets a basis of its own."""
    if not joint:
        return prepare(opened, align, device, progress)
    from isomerge.architectures import describe

    apart = [describe(checkpoint, untie=True) for checkpoint in opened]
    small = [name for one in apart for name in Canonical(one, [RESIDUAL]).undividable()] if turns(apart[0]) else []
    if turns(apart[0]) and not small:
        needless = align is not False and len(opened) > 1 and all_joint(apart[0])
        parents, states = prepare(opened, False if needless else align, device, progress)
        if needless:
            parents.notes.append("the models were not aligned: joint features do not depend on the basis of each model")
        return canonical(parents, states)
    parents, states = prepare(opened, align, device, progress)
    why = f"the gain of {small[0]} is too small to divide by" if small else "of this kind of model it cannot be turned"
    parents.notes.append(f"the residual stream is the mean of the models', since {why}")
    return held(parents), states


def _load(
    parents: Parents, states: Sequence[State], assembly: Assembly, device: str, others: list[Any] | None = None
) -> tuple[Any, list[Any], State]:
    """The start and the parents as stock modules, and the start of what no module holds (old buffers)."""
    from isomerge.running.stock import load_stock

    start = assembly.state(states)
    loaded = []
    for state in (start,) if others is not None else (start, *states):
        model = load_stock(parents.config, state, dtype=parents.precision).to(device).requires_grad_(False)
        for part in model.modules():  # nothing is generated; a decoder may have a configuration of its own
            if hasattr(getattr(part, "config", None), "use_cache"):
                part.config.use_cache = False
        if parents.config.get("tie_word_embeddings") is False and _is_tied(model):  # some load equal tables as one
            output = model.get_output_embeddings()
            output.weight = torch.nn.Parameter(output.weight.clone(), requires_grad=False)
        loaded.append(model)
    held = _held(loaded[0], parents)
    return loaded[0], others or loaded[1:], {name: start[name] for name in parents.plan if name not in held}


def _held(model: Any, parents: Parents) -> State:
    """The weights of a module by name on disk."""
    renamed = file_names(parents.bound)
    return {renamed.get(name, name): tensor for name, tensor in saved_state(model, "the merged model").items()}


def _is_tied(model: Any) -> bool:
    """The output table is the input table."""
    output = model.get_output_embeddings()
    return output is not None and output.weight is model.get_input_embeddings().weight


def _plan(model: Any, roles: Roles, examples: Examples) -> Plan:
    """What to solve in which order, from a forward pass on a few examples."""
    few = examples.few()

    def run() -> None:
        with torch.no_grad():
            model(**few)

    names = {name for name, _ in model.named_parameters()}
    stacks = find_stacks(model, run)
    return find_stages(
        model, run, stacks, weights=roles.weights, norms=roles.norms, writes=roles.writes,
        has_bias=lambda name: bias_name(name) in names,
    )  # fmt: skip


def _notes(parents: Parents, model: Any, roles: Roles, plan: Plan) -> list[str]:
    notes = list(parents.notes)
    if _is_tied(model):
        notes.append("the output table is tied to the input table, so it is not solved: both stay averaged")
    if roles.writers is None:
        notes.append(
            "no specification says who writes to the residual stream: whatever is added to a sum is taken as a writer"
        )
    solved = {name for stage in plan.stages for name in stage.names}
    unseen = [roles.label(name) for name in roles.weights if name not in solved and name.endswith("weight")]
    if unseen:
        notes.append(f"{len(unseen)} weights stay averaged, as no linear map was seen to use them: {name_some(unseen)}")
    return notes


def _open(model: Any) -> Checkpoint:
    checkpoint = open_checkpoint(model)
    require_floating(checkpoint)
    if not checkpoint.config:
        raise RequestError(
            f"Reconstructing from {checkpoint.name}: it has no config.json, so no stock class can run it. "
            "Give a folder with config.json, or a transformers module."
        )
    return checkpoint


def _sources(batches: Batches | Sequence[Batches], method: str, count: int) -> list[Batches]:
    """One source of data per model for RegMean++, one for all otherwise."""
    given = list(batches) if isinstance(batches, Sequence) else [batches]
    if any(not callable(source) for source in given) or not given:
        raise RequestError(
            "Reconstructing: `batches` must be callable and give a fresh iterator of batches each time, since the data "
            "is passed over once per layer. Wrap a list as `lambda: iter(batches)`."
        )
    if method == "reconstruct":
        return [lambda: itertools.chain.from_iterable(source() for source in given)]
    if len(given) != count:
        raise RequestError(
            f"RegMean++ of {count} models with {len(given)} sources of data: it needs the data of each model, in the "
            "order of the models. On the same data for all, its solution is the plain average."
        )
    return given


def _require_sound(
    models: Sequence[Any],
    weights: Sequence[float] | None,
    ridge: float,
    floor: float,
    method: str,
    off_diagonal: float,
    limit: int | None,
    features: str,
    refine: int,
    polish: int,
) -> list[float]:
    """Weights that sum to 1, or all that is wrong with the request."""
    problems = []
    if isinstance(models, (str, bytes)) or not models:
        problems.append("`models` must list at least one model")
    if method not in METHODS:
        problems.append(f"'{method}' is not a method. {did_you_mean(method, METHODS)}".rstrip("."))
    if features not in FEATURES:
        problems.append(f"'{features}' is not a kind of features. {did_you_mean(features, FEATURES)}".rstrip("."))
    if method != "reconstruct" and (features != "mean" or refine or polish):
        problems.append(f"{method} has no features, refine or polish; leave them out")
    for name, steps in (("refine", refine), ("polish", polish)):
        if not (isinstance(steps, int) and steps >= 0):
            problems.append(f"{name} is {steps}, and must be a number of steps from 0")
    for name, value in (("ridge", ridge), ("floor", floor)):
        if not (value >= 0 and math.isfinite(value)):
            problems.append(f"{name} is {value}, and must be a number from 0")
    if not 0 <= off_diagonal <= 1:
        problems.append(f"off_diagonal is {off_diagonal}, and must lie between 0 and 1")
    if limit is not None and limit < 1:
        problems.append(f"limit is {limit}, and must be at least 1")
    shares = [1.0] * len(models) if weights is None else [float(w) for w in weights]
    if len(shares) != len(models):
        problems.append(f"there are {len(shares)} weights for {len(models)} models")
    elif not all(math.isfinite(w) for w in shares) or not sum(shares) > 0:
        problems.append(f"the weights {shares} must be finite and have a positive sum")
    elif features == "joint" and not min(shares) > 0:
        problems.append(
            f"joint features need positive weights, and these are {shares}; leave out models without weight"
        )
    if problems:
        raise RequestError(f"Reconstructing: {'; '.join(problems)}.")
    return [w / sum(shares) for w in shares]


__all__ = ["Batch", "Batches", "reconstruct"]

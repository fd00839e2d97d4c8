"""`reconstruct`: open, align, average, then walk the merged model and solve it layer by layer."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from isomerge.checkpoint import Checkpoint, open_checkpoint, parse_size, require_floating
from isomerge.checkpoint.base import name_some
from isomerge.checkpoint.module import saved_state
from isomerge.errors import RequestError, did_you_mean
from isomerge.merge.merged import Progress as Tell
from isomerge.merge.reconstruct.blocks import BlockCache, find_stacks
from isomerge.merge.reconstruct.goals import Goals
from isomerge.merge.reconstruct.parents import Parents, State, mean_state, prepare
from isomerge.merge.reconstruct.regmean import RegMeanWalk
from isomerge.merge.reconstruct.result import Reconstructed
from isomerge.merge.reconstruct.roles import Roles, file_names, find_roles
from isomerge.merge.reconstruct.running import Batch, Batches, Examples, Runner
from isomerge.merge.reconstruct.stages import Plan, find_stages
from isomerge.merge.reconstruct.walk import Progress, Walk, bias_name

METHODS = ("reconstruct", "regmean++")


def reconstruct(
    models: Sequence[Any],
    batches: Batches | Sequence[Batches],
    *,
    weights: Sequence[float] | None = None,
    align: bool | Mapping[str, Any] = True,
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

    `batches` gives a fresh iterator of batches (keyword arguments of the model) at every call, the same ones each time;
    `limit` uses that many examples. `align` may hold options of `isomerge.align`. `cache` bounds the memory that spares
    running finished layers again; 0 switches it off. `method="regmean++"` needs one `batches` per model, and
    `off_diagonal` is its α.

    >>> merged = reconstruct(["model-a", "model-b"], batches)          # doctest: +SKIP
    >>> merged.save("merged")                                          # doctest: +SKIP
    """
    start = time.perf_counter()
    shares = _require_sound(models, weights, ridge, floor, method, off_diagonal, limit)
    sources = _sources(batches, method, len(models))
    opened = [_open(model) for model in models]
    parents, states = prepare(opened, align, device, progress)
    merged, others, unheld = _load(parents, states, shares, device)
    del states
    budget = parse_size(cache) if cache != 0 else 0
    examples = [Examples(source, limit, device, budget // (4 * len(sources))) for source in sources]
    roles = find_roles(merged, parents.bound)
    plan = _plan(merged, roles, examples[0])
    told = Progress(roles)
    kept = BlockCache(plan.stacks, budget // 2)
    runner = Runner(merged, "the merged model", 0, kept)
    if method == "reconstruct":
        rest = [Runner(model, c.name, k, kept) for k, (model, c) in enumerate(zip(others, opened, strict=True), 1)]
        goals = Goals(rest, shares, plan.stages, roles, budget // 4)
        walk = Walk(runner, goals, ridge, floor, told)
        solve = [lambda stage=stage: walk.solve(stage, examples[0]) for stage in plan.stages]
    else:
        other = RegMeanWalk(runner, others, shares, floor, off_diagonal, told)
        solve = [lambda stage=stage: other.solve(stage, examples) for stage in plan.stages]
    for number, step in enumerate(solve):
        step()
        if progress:
            progress(number + 1, len(solve), "reconstructing")
    record = {
        "method": method, "models": [c.name for c in opened], "weights": list(shares), "aligned": parents.alignment,
        "examples": sum(e.size or 0 for e in examples), "ridge": ridge, "floor": floor, "layers": told.layers,
        "warnings": told.warnings, "notes": _notes(parents, roles, plan), "seconds": time.perf_counter() - start,
    }  # fmt: skip
    changes = {k: v for k, v in parents.config.items() if opened[0].config.get(k) != v or k not in opened[0].config}
    found = {name: tensor.detach().cpu() for name, tensor in _held(merged, parents).items()} | unheld
    tensors = {name: found[name] for name in parents.plan}
    return Reconstructed(tensors, parents.plan, opened, changes, record, progress)


def _load(
    parents: Parents, states: Sequence[State], shares: Sequence[float], device: str
) -> tuple[Any, list[Any], State]:
    """The average and the parents as stock modules, and the average of what no module holds (old buffers)."""
    from isomerge.evaluate.probe import load_stock

    average = mean_state(states, shares)
    loaded = []
    for state in (average, *states):
        model = load_stock(parents.config, state, dtype=parents.precision).to(device).requires_grad_(False)
        model.config.use_cache = False  # nothing is generated
        loaded.append(model)
    held = _held(loaded[0], parents)
    return loaded[0], loaded[1:], {name: average[name] for name in parents.plan if name not in held}


def _held(model: Any, parents: Parents) -> State:
    """The weights of a module by name on disk."""
    renamed = file_names(parents.bound)
    return {renamed.get(name, name): tensor for name, tensor in saved_state(model, "the merged model").items()}


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


def _notes(parents: Parents, roles: Roles, plan: Plan) -> list[str]:
    notes = list(parents.notes)
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
) -> list[float]:
    """Weights that sum to 1, or all that is wrong with the request."""
    problems = []
    if isinstance(models, (str, bytes)) or not models:
        problems.append("`models` must list at least one model")
    if method not in METHODS:
        problems.append(f"'{method}' is not a method. {did_you_mean(method, METHODS)}".rstrip("."))
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
    if problems:
        raise RequestError(f"Reconstructing: {'; '.join(problems)}.")
    return [w / sum(shares) for w in shares]


__all__ = ["Batch", "Batches", "reconstruct"]

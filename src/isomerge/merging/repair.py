"""REPAIR (Jordan et al. 2023, arXiv 2211.08403): the units of a merged model get the spread they had in its parents.

Averaging shrinks how much units vary from sample to sample. Layer by layer, in the order in which they run, the output
y of every unit is renormalised to the parents' mean and standard deviation (averaged by the models' weights),

    y ← (y − μ_M) σ / σ_M + μ,

which is a factor on a row of the weight and a change of the bias: the result is a model like any other. A layer without
a bias gets the factor only. A layer is measured after all earlier ones were repaired, so there is one pass per layer.

Where the parents know different things, each is believed on some examples only (`goals`), and y is to have the mean and
spread of the units of whoever is believed: those of all rows together, each parent's as far as it counts there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from isomerge.architectures import describe
from isomerge.calibration import Batches, Statistics, calibrate, open_statistics
from isomerge.calibration.sites import sites_of
from isomerge.checkpoint import Checkpoint, TensorInfo, open_checkpoint
from isomerge.checkpoint.base import Progress
from isomerge.checkpoint.memory import MemoryCheckpoint, saved_state
from isomerge.errors import RequestError
from isomerge.merging.data_methods import ALL_METHODS
from isomerge.merging.layerwise.assembly import sum_of
from isomerge.merging.layerwise.goals import Beliefs, OwnedBatches, expert_beliefs, own_beliefs, require_evidence
from isomerge.merging.recipe import ModelReference, Recipe
from isomerge.merging.recipe.settings import RepairSettings
from isomerge.merging.recipe_data import DataSet
from isomerge.merging.run.jobs import Job
from isomerge.merging.run.rows import InMemory, TensorSource
from isomerge.name_patterns import NamePattern
from isomerge.running.activation_watch import ActivationWatch
from isomerge.running.gram import UnitSums
from isomerge.running.linear_maps import LinearMap
from isomerge.running.passes import DataPass, as_batches
from isomerge.running.stock import StockModel, load_stock, read_weights
from isomerge.symmetry.architecture import part_of

Targets = dict[str, tuple[Tensor, Tensor]]
"""Mean and spread of the outputs of linear maps, by their weights."""
DEAD = 1e-6
"""A unit whose spread is below this share of the layer's largest is constant: there is nothing to rescale."""


# --- as the last step of a merge --------------------------------------------------------------------------------------
def repaired(
    jobs: Sequence[Job],
    parents: Sequence[Checkpoint],
    config: Mapping[str, Any],
    *,
    weights: Sequence[float],
    data: Sequence[DataSet],
    owners: Sequence[Sequence[int]],
    first: Checkpoint,
    settings: RepairSettings,
    device: str,
    progress: Progress | None,
) -> list[Job]:
    """Jobs for the repaired tensors. The merged model is made in memory, and rounded only when it is
    written; `first` is the model whose tokenizer or image settings make the batches. `owners` of each data set are
    places of parents."""
    state = {job.name: job.tensor() for job in jobs}
    merged = MemoryCheckpoint("the merged model", state, dict(config))
    owned = OwnedBatches([one.passes(first) for one in data], owners)
    reading = DataPass(
        owned, hashed=False, progress=progress, total=sum(one.examples for one in data), what="repairing"
    )  # every pass is shown as a stage of its own
    believed = _believed(settings, owned, parents, _shares(weights, len(parents)), device)
    state |= repair(
        merged, parents, lambda: iter(reading), weight=weights, believed=believed, only=settings.only, device=device
    )
    return [finished_job(job.name, job.info, state[job.name]) for job in jobs]


def finished_job(name: str, info: TensorInfo, tensor: Tensor | TensorSource) -> Job:
    """A tensor that is already there, or only has to be read: it is rounded and written."""
    source = InMemory(tensor, f"tensor '{name}', solved") if isinstance(tensor, Tensor) else tensor
    return Job(name, info, [source], None, None)


def parents_of(recipe: Recipe) -> tuple[list[ModelReference], list[float], list[str]]:
    """The models that were merged, how much each counts, and a note where that is not one number for each."""
    method = ALL_METHODS[recipe.merge_method]
    entries = [e for e in recipe.models or () if method.base == "ignored" or e.model != recipe.base_model]
    shared = (recipe.parameters or {}).get("weight", 1.0)
    given = [(entry.parameters or {}).get("weight", shared) for entry in entries]
    plain = [float(one) for one in given if isinstance(one, (int, float)) and not isinstance(one, bool)]
    models = [entry.model for entry in entries]
    if len(plain) == len(given) and sum(plain) > 0:
        return models, plain, []
    return models, [1.0] * len(models), ["repair: every parent counts the same, as 'weight' is not one number for each"]


# --- the repair itself ------------------------------------------------------------------------------------------------
def repair(
    merged: Any,
    parents: Sequence[Any],
    batches: Any,
    *,
    weight: Sequence[float] | None = None,
    believed: Beliefs | None = None,
    only: str | None = None,
    device: str = "cpu",
    limit: int | None = None,
) -> dict[str, Tensor]:
    """The merged model's state_dict with renormalised units.

    `parents` are the models that were merged, *aligned* if the merge was (or their `Statistics` with `units`); units
    are compared by their place. `believed`: how much each counts on every example; without it each by its weight.
    `only` is a pattern for names of weights; by default the maps into feed-forward units.
    """
    checkpoint = open_checkpoint(merged)
    stock = StockModel.load(checkpoint, device)
    shares = _shares(weight, len(parents))
    chosen = _chosen(stock, only)
    known = [] if believed else [_measured(parent, batches, device, limit) for parent in parents]
    batches = as_batches(batches, checkpoint, limit=limit, device=device)
    order = _in_running_order(stock, chosen, batches)
    if believed is None:
        targets = _means(known, shares, order)
    else:
        examples = DataPass(batches, device=device, dtype=stock.dtype, limit=limit)
        targets = _of_the_believed(parents, order, examples, believed)
    for linear in order:
        mean, spread = (part.to(device) for part in targets[linear.weight])
        _renormalise(stock.modules[linear.module], linear, _now(stock, linear, batches, limit), mean, spread)
    state = saved_state(stock.module, checkpoint.name)
    return {name: state[name].to("cpu", info.dtype) for name, info in checkpoint.tensors.items() if name in state}


def _believed(
    settings: RepairSettings, data: OwnedBatches, parents: Sequence[Checkpoint], shares: Sequence[float], device: str
) -> Beliefs | None:
    """How much each parent counts on every example; None: each by its weight."""
    goals = ("own" if data.apart else "mean") if settings.goals == "auto" else settings.goals
    examples = DataPass(data, device=device, labels=False, hashed=False)
    if goals == "own":
        return own_beliefs(data, examples, shares)
    if goals == "mean":
        return None
    models = [load_stock({**m.config, "use_cache": False}, read_weights(m)).to(device) for m in parents]
    require_evidence(models[0], examples, "repair", "own or mean goals", "repair")
    return expert_beliefs(examples, models, shares, settings.temperature)[0]


def _shares(weight: Sequence[float] | None, parents: int) -> list[float]:
    given = [1.0] * parents if weight is None else list(weight)
    if len(given) != parents or not parents or sum(given) <= 0:
        raise RequestError(f"Repairing: the weights {given} do not fit {parents} parents. Give one for each.")
    return [share / sum(given) for share in given]


def _measured(parent: Any, batches: Batches, device: str, limit: int | None) -> Statistics:
    if isinstance(parent, Statistics):
        return open_statistics(parent)
    return calibrate(parent, batches, what={"units"}, device=device, limit=limit)


def _means(known: Sequence[Statistics], shares: Sequence[float], chosen: Sequence[LinearMap]) -> Targets:
    """Of the parents' means and spreads."""
    targets = {}
    for linear in chosen:
        own = [statistics.units(linear.weight) for statistics in known]
        mean, spread = (sum_of(share * one[k] for share, one in zip(shares, own, strict=True)) for k in (0, 1))
        targets[linear.weight] = mean, spread
    return targets


def _of_the_believed(
    parents: Sequence[Any], chosen: Sequence[LinearMap], examples: DataPass, believed: Beliefs
) -> Targets:
    """Mean and spread of the rows of all parents together, each as far as it counts there."""
    sums = {linear.weight: UnitSums() for linear in chosen}
    for m, parent in enumerate(parents):
        stock = StockModel.load(open_checkpoint(parent), str(believed.batches[0].device))
        watch, now = ActivationWatch(stock), _Place(believed, m)
        for linear in chosen:
            watch.listen(
                linear.module, linear.weight, now.with_shares,
                lambda rows, own=sums[linear.weight]: own.add(rows[:, :-1], rows[:, -1]),  # type: ignore[misc]
            )  # fmt: skip
        for now.batch, batch in enumerate(examples):
            watch.run(batch)
    return {name: (own.mean(), own.spread()) for name, own in sums.items()}


@dataclass
class _Place:
    """The batch that is running."""

    believed: Beliefs
    parent: int
    batch: int = 0

    def with_shares(self, module: nn.Module, given: Tensor, made: Tensor) -> Tensor:
        """How much each row counts, as a last column, which goes where padding does."""
        shares = self.believed.rows(self.batch, made[..., 0].numel())[self.parent]
        return torch.cat([made, shares.reshape(*made.shape[:-1], 1).to(made)], -1)


def _chosen(stock: StockModel, only: str | None) -> list[LinearMap]:
    maps = stock.maps
    if only is not None:
        pattern = NamePattern(only)
        chosen = [m for m in maps if pattern.search(m.weight)]
    else:
        sites = sites_of(describe(stock.checkpoint), stock, roles=["output"]).values()
        modules = {s.module for s in sites if all(part_of(space) == "ffn" or "." in space for space in s.spaces)
                   and any(part_of(space) == "ffn" for space in s.spaces)}  # fmt: skip
        chosen = [m for m in maps if m.module in modules]
    if not chosen:
        raise RequestError(
            f"Repairing {stock.checkpoint.name}: no layer is chosen. Name some with only='PATTERN' (names of weights)."
        )
    return chosen


def _in_running_order(stock: StockModel, chosen: list[LinearMap], batches: Batches) -> list[LinearMap]:
    """As the first batch meets them."""
    watch = ActivationWatch(stock)
    met: list[LinearMap] = []

    def listen(linear: LinearMap) -> None:
        watch.listen(linear.module, linear.weight, lambda module, given, made: made, lambda rows: met.append(linear))

    for linear in chosen:
        listen(linear)
    for batch in DataPass(batches, device=stock.device, dtype=stock.dtype, limit=1):
        watch.run(batch)
    return list(dict.fromkeys(met))


def _now(stock: StockModel, linear: LinearMap, batches: Batches, limit: int | None) -> tuple[Tensor, Tensor]:
    """Mean and spread of a layer's units in the model as it is."""
    watch, sums = ActivationWatch(stock), UnitSums()
    watch.listen(linear.module, linear.weight, lambda module, given, made: made, sums.add)
    for batch in DataPass(batches, device=stock.device, dtype=stock.dtype, limit=limit):
        watch.run(batch)
    return sums.mean(), sums.spread()


def _renormalise(
    module: nn.Module, linear: LinearMap, now: tuple[Tensor, Tensor], mean: Tensor, spread: Tensor
) -> None:
    own_mean, own = now
    alive = own > DEAD * own.max()
    factor = torch.where(alive, spread / torch.where(alive, own, 1), 1)
    weight: Any = module.weight
    with torch.no_grad():
        weight.copy_(weight.double() * (factor if linear.transposed else factor.reshape(-1, *[1] * (weight.ndim - 1))))
        bias: Any = module.bias
        if bias is not None:
            bias.copy_((bias.double() - own_mean) * factor + mean)

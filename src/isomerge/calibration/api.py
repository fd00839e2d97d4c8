"""`calibrate`: one pass for activations and Gram matrices, one for Fisher information."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from isomerge.architectures import describe
from isomerge.calibration.batches import BATCH_SIZE, Batches, Progress, Reading, as_batches
from isomerge.calibration.fisher import diagonal_fisher
from isomerge.calibration.gram import GramPass, Sums
from isomerge.calibration.maps import LinearMap, Stock
from isomerge.calibration.sites import sites_of
from isomerge.calibration.statistics import Statistics, zeros
from isomerge.calibration.watch import Watch
from isomerge.checkpoint import Checkpoint, open_checkpoint
from isomerge.checkpoint.base import name_some
from isomerge.checkpoint.hashing import hash_tensors, tensors_digest
from isomerge.choices import STATISTICS
from isomerge.data import open_data
from isomerge.data.base import Data
from isomerge.data.heads import task_of
from isomerge.errors import RequestError, did_you_mean


def calibrate(
    model: Any,
    batches: Any,
    *,
    what: Iterable[str] = ("gram",),
    fisher: str = "true",
    samples: int = 1,
    only: str | None = None,
    device: str = "cpu",
    limit: int | None = None,
    batch_size: int = BATCH_SIZE,
    seed: int = 0,
    progress: Progress | None = None,
) -> Statistics:
    """Measure a model on data: a function that gives batches, an opened data set, or what `isomerge.open_data` takes.

    Memory does not grow with the data. `what` is any of: `gram` (Σ x xᵀ of every linear map's input), `activations`
    (the same at every site of the specification's spaces), `units` (mean and spread of every linear map's outputs),
    `fisher` (diagonal Fisher information, `true` or `empirical`). `only` is a pattern that names of weights must
    contain, for all of these but `activations`. `limit` is the most examples to read.

    >>> statistics = calibrate("model-a", batches, what={"gram"})
    >>> written = statistics.save("statistics.safetensors")
    """
    wanted = set(what)
    for unknown in sorted(wanted - set(STATISTICS)):
        raise RequestError(f"Measuring a model: '{unknown}' cannot be measured. {did_you_mean(unknown, STATISTICS)}")
    if not wanted:
        raise RequestError(f"Measuring a model: nothing is asked for. Known values: {', '.join(STATISTICS)}.")
    if not callable(batches) and not isinstance(batches, Data):
        batches = open_data(batches)
    checkpoint = open_checkpoint(model)
    _require_readable(checkpoint, batches)
    stock = Stock.load(checkpoint, device)
    names = _tensors(stock, only) if "fisher" in wanted else None
    needs_labels = "fisher" in wanted and fisher == "empirical"
    given = as_batches(
        batches, checkpoint, limit=limit, labels=needs_labels, seed=seed, device=device, batch_size=batch_size
    )
    tensors: dict[str, Tensor] = {}
    info: dict[str, Any] = {
        "model": checkpoint.name,
        "model_sha256": tensors_digest(hash_tensors(checkpoint, threads=1)),
        "what": sorted(wanted),
    }
    if only is not None:
        info["only"] = only
    if given is not batches:
        info |= {"data": batches.name, "source_sha256": batches.sha256}
    if wanted - {"fisher"}:
        reading = _activations(stock, given, wanted, only, limit, progress, tensors, info)
        info |= {"data_sha256": reading.sha256, "examples": reading.examples}
    if "fisher" in wanted:
        found, record, reading = diagonal_fisher(
            stock, given, kind=fisher, samples=samples, seed=seed, names=names, limit=limit, progress=progress
        )
        tensors |= found
        info |= {"fisher": record, "data_sha256": reading.sha256, "examples": reading.examples}
    if given is not batches and batches.notes:
        info["notes"] = list(batches.notes)
    return Statistics.of({name: tensor.cpu() for name, tensor in tensors.items()}, info)


def _activations(
    stock: Stock,
    batches: Batches,
    wanted: set[str],
    only: str | None,
    limit: int | None,
    progress: Progress | None,
    tensors: dict[str, Tensor],
    info: dict[str, Any],
) -> Reading:
    """One pass, without gradients; sums and what they mean go into `tensors` and `info`."""
    watch = Watch(stock)
    weights = _weights(stock, only)
    grams = GramPass(watch, weights) if "gram" in wanted else None
    moments = _MomentPass(watch, stock.checkpoint) if "activations" in wanted else None
    units = _UnitPass(watch, weights) if "units" in wanted else None
    reading = Reading(
        batches, device=stock.device, dtype=stock.dtype, limit=limit, progress=progress, what="measuring activations"
    )
    for batch in reading:
        watch.run(batch)
    for part in (grams, moments, units):
        if part is not None:
            _record(part, tensors, info)
    return reading


def _require_readable(checkpoint: Checkpoint, data: Any) -> None:
    """Refuse images for a model of texts and the other way round, before the model is loaded."""
    if not isinstance(data, Data) or data.kind == "batches" or (own := task_of(checkpoint.config)) is None:
        return
    reads = "images" if own == "image" else "texts"
    if (data.kind == "images") != (reads == "images"):
        raise RequestError(
            f"Measuring {checkpoint.name} on {data.name}: the model reads {reads} and the data does not hold any. Name "
            f"data of {reads}."
        )


def _weights(stock: Stock, only: str | None) -> set[str] | None:
    if only is None:
        return None
    try:
        pattern = re.compile(only)
    except re.error as error:
        raise RequestError(
            f"Choosing weights: '{only}' is not a pattern ({error}). Part of a name is enough, as in q_proj."
        ) from error
    names = {*(m.weight for m in stock.maps()), *stock.checkpoint.tensors}
    found = {name for name in names if pattern.search(name)}
    if not found:
        raise RequestError(
            f"Choosing weights of {stock.checkpoint.name}: no name contains '{only}'. Its names are like "
            f"{name_some(sorted(m.weight for m in stock.maps()), 3)}."
        )
    return found


def _tensors(stock: Stock, only: str | None) -> set[str] | None:
    """Tensors of the checkpoint that the pattern names; None for all. A table that is not stored is the one it is tied
    to."""
    chosen = _weights(stock, only)
    if chosen is None:
        return None
    tied = {stock.layout.on_disk[source] for name, source in stock.layout.ties.items() if name in chosen}
    found = (chosen | tied) & stock.checkpoint.tensors.keys()
    parameters = {name for name, _ in stock.model.named_parameters(remove_duplicate=False)}
    in_memory = [stock.layout.in_memory.get(name) for name in found]  # None: part of a parameter
    if not any(name is None or name in parameters for name in in_memory):
        raise RequestError(
            f"Measuring Fisher information of {stock.checkpoint.name}: no name of a parameter contains '{only}', only "
            f"{name_some(sorted(found or chosen))}. Name weights."
        )
    return found


class _MomentPass:
    """Σ x xᵀ at every site."""

    def __init__(self, watch: Watch, checkpoint: Checkpoint) -> None:
        self.sums: dict[str, Sums] = {}
        for name, site in sites_of(describe(checkpoint), watch.stock).items():
            sums = self.sums[name] = Sums.empty(site.width, watch.stock.device)
            watch.listen(site.module, name, site.values, sums.add)


class _UnitPass:
    """Σ y and Σ y² of every linear map's outputs."""

    def __init__(self, watch: Watch, weights: set[str] | None) -> None:
        self.units: dict[str, _Units] = {}
        for linear in watch.stock.maps():
            if weights is None or linear.weight in weights:
                units = self.units[linear.weight] = _Units(watch.stock.device)
                watch.listen(
                    linear.module, linear.weight, lambda module, given, made: _channels_last(module, made), units.add
                )


class _Units:
    def __init__(self, device: str) -> None:
        self.count = 0
        self.total = self.squares = zeros(0, device)

    def add(self, rows: Tensor) -> None:
        rows = rows.double()
        if self.count == 0:
            self.total, self.squares = (torch.zeros_like(rows[0]) for _ in range(2))
        self.count += len(rows)
        self.total += rows.sum(0)
        self.squares += rows.square().sum(0)


def _channels_last(module: torch.nn.Module, made: Tensor) -> Tensor:
    convolution = isinstance(module, (torch.nn.Conv1d, torch.nn.Conv2d))
    return made.flatten(2).transpose(1, 2) if convolution else made


def _record(part: GramPass | _MomentPass | _UnitPass, tensors: dict[str, Tensor], info: dict[str, Any]) -> None:
    if isinstance(part, GramPass):
        tensors |= {f"gram:{name}": sums.product for name, sums in part.sums.items()}
        tensors |= {f"sum:{name}": sums.total for name, sums in part.sums.items()}
        info["maps"] = {
            weight: _described(linear, part.same.get(weight), part.sums)
            for weight, linear in part.maps.items()
            if part.same.get(weight, weight) in part.sums
        }
    elif isinstance(part, _MomentPass):
        seen = {name: sums for name, sums in part.sums.items() if sums.count}
        tensors |= {f"moment:{name}": sums.product for name, sums in seen.items()}
        tensors |= {f"moment_sum:{name}": sums.total for name, sums in seen.items()}
        info["sites"] = {name: {"count": sums.count} for name, sums in seen.items()}
    else:
        known = {name: units for name, units in part.units.items() if units.count}
        tensors |= {f"unit_sum:{name}": units.total for name, units in known.items()}
        tensors |= {f"unit_squares:{name}": units.squares for name, units in known.items()}
        info["units"] = {name: {"count": units.count} for name, units in known.items()}


def _described(linear: LinearMap, same: str | None, sums: dict[str, Sums]) -> dict[str, Any]:
    entry: dict[str, Any] = {"count": sums[same or linear.weight].count, "transposed": linear.transposed}
    if linear.bias is not None:
        entry["bias"] = linear.bias
    return entry | ({"same": same} if same else {})

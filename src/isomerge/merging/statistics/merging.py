"""`merge_fisher` and `merge_regmean`: measure (or take what was measured), align if asked, merge tensor by tensor.

Data measure the models as they are merged: with alignment, the aligned ones. Statistics from files move with the models
where they can (Gram matrices) and are refused where they cannot (diagonal Fisher information).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isomerge.calibration import Batches, Statistics, calibrate, open_statistics
from isomerge.checkpoint import Checkpoint, TensorInfo, cast, open_checkpoint
from isomerge.errors import RequestError
from isomerge.merging.aligned import AlignedModels, align_models
from isomerge.merging.methods import METHODS
from isomerge.merging.run.jobs import Job
from isomerge.merging.run.rows import GramSource, TensorSource
from isomerge.merging.run.sources import Stored
from isomerge.merging.statistics.moved import gram_source
from isomerge.merging.statistics.regression import regression_mean
from isomerge.merging.statistics.warning import Shortage, gathered, tell, too_little

Measured = str | Path | Statistics | Batches | Any
"""Statistics or the file that holds them; batches to measure on, or an opened data set."""
BIASES = ("average", "augment")


def merge_fisher(
    models: Sequence[Any],
    data: Measured | Sequence[Measured],
    *,
    weight: Sequence[float] | None = None,
    floor: float = 1e-6,
    normalize: bool = False,
    fisher: str = "true",
    align: bool = False,
    device: str = "cpu",
    limit: int | None = None,
    seed: int = 0,
) -> Iterator[tuple[str, Tensor]]:
    """Average models, each weight counted by its Fisher information: (name, tensor) of the first model's checkpoint.

    `data` is one entry for all models or one per model: batches, an opened data set, a statistics file or `Statistics`.
    With `align` the models are brought to the first one, and measured there. A model that is sure of its data has
    little information on them; with `normalize` it counts as much in every tensor as the others.
    """
    prepared = _prepare(models, data, "fisher", align, device, limit, fisher, seed)
    shares = _shares(weight, prepared)
    yield from prepared.copied()
    for name, sources, info in prepared.tensors():
        option_tensors = {"importance": [_importance(s, name, info) for s in prepared.statistics]}
        options = {"weight": shares, "floor": floor, "normalize": normalize}
        job = Job(name, info, sources, None, METHODS["fisher"], options, option_tensors, device=device)
        yield name, cast(job.tensor(), info.dtype)[0]


def merge_regmean(
    models: Sequence[Any],
    data: Measured | Sequence[Measured],
    *,
    weight: Sequence[float] | None = None,
    alpha: float = 0.9,
    bias: str = "average",
    align: bool = False,
    device: str = "cpu",
    limit: int | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Merge models by regression: (name, tensor) of the first model's checkpoint.

    `data` as in `merge_fisher`; every model should be measured on its own data. `bias="augment"` solves for each bias
    together with its weight, as the weight of an input that is always 1; by default biases are averaged, as in the
    paper.
    """
    if bias not in BIASES:
        raise RequestError(f"Merging by regression: bias is '{bias}'; use one of {', '.join(BIASES)}.")
    prepared = _prepare(models, data, "gram", align, device, limit)
    shares = _shares(weight, prepared)
    yield from prepared.copied()
    pairs = _biases(prepared) if bias == "augment" else {}
    every = {name: (sources, info) for name, sources, info in prepared.tensors()}
    problems: list[Shortage] = []
    for name, (sources, info) in every.items():
        if name in pairs.values():
            continue
        grams = prepared.grams(name)
        if name in pairs and grams and pairs[name] in every:
            together = every[pairs[name]]
            with gathered(problems):
                both = _augmented(name, sources, info, pairs[name], together[0], together[1], grams, shares, alpha)
            yield from both
            continue
        options = {"weight": shares, "alpha": alpha}
        option_tensors: dict[str, Sequence[TensorSource]] = {"statistics": grams}
        job = Job(name, info, sources, None, METHODS["regmean"], options, option_tensors, device=device)
        with gathered(problems):
            merged = job.tensor()
        yield name, cast(merged, info.dtype)[0]
    tell(problems)


@dataclass(frozen=True)
class _Prepared:
    """The models as they are merged, and what was measured of each."""

    models: list[Checkpoint]
    statistics: list[Statistics]
    aligned: AlignedModels | None
    """Set where statistics of the models as they were still have to move."""

    def copied(self) -> Iterator[tuple[str, Tensor]]:
        """Integers, which nobody averages: the first model's."""
        for name, info in self.models[0].tensors.items():
            if not info.dtype.is_floating_point:
                yield name, self.models[0].read(name)

    def tensors(self) -> Iterator[tuple[str, list[TensorSource], TensorInfo]]:
        """Floating-point tensors with their sources."""
        plan = self.aligned.plan() if self.aligned else self.models[0].tensors
        for name, info in plan.items():
            if not info.dtype.is_floating_point:
                continue
            sources: list[TensorSource] = [self._source(model, name) for model in self.models]
            if len({s.info.shape for s in sources}) > 1:
                raise RequestError(f"Merging '{name}': the models have it in different shapes. Use one architecture.")
            yield name, sources, info

    def _source(self, model: Checkpoint, name: str) -> TensorSource:
        return self.aligned.source(model, name) if self.aligned else Stored(model, name)

    def grams(self, weight: str) -> list[GramSource]:
        found = [gram_source(s, weight, m, self.aligned) for s, m in zip(self.statistics, self.models, strict=True)]
        there = [source for source in found if source is not None]
        if there and len(there) < len(found):
            raise RequestError(
                f"Merging by regression: '{weight}' has a Gram matrix for some of the models only. Measure all of "
                "them the same way."
            )
        return there


def _prepare(
    models: Sequence[Any],
    data: Measured | Sequence[Measured],
    what: str,
    align: bool,
    device: str,
    limit: int | None,
    fisher: str = "true",
    seed: int = 0,
) -> _Prepared:
    opened = [open_checkpoint(model) for model in models]
    if not opened:
        raise RequestError("Merging: there is no model. Pass a list of models.")
    given: list[Measured] = list(data) if isinstance(data, (list, tuple)) else [data] * len(opened)  # type: ignore[list-item]
    if len(given) != len(opened):
        raise RequestError(f"Merging: {len(given)} data for {len(opened)} models. Give one for each, or one for all.")
    fresh = [_is_batches(one) for one in given]
    aligned = align_models(opened, opened[0], device=device) if align else None
    if aligned is not None and not all(fresh):
        if what == "fisher":
            raise RequestError(
                "Merging by Fisher information with alignment: the information in a file belongs to the weights as "
                "they were measured, one number per weight, and a rotation mixes weights. Pass the data, so that it "
                "is measured on the aligned models."
            )
        if any(fresh):
            raise RequestError("Merging with alignment: pass data for all models, or statistics for all of them.")
    elif aligned is not None:
        opened, aligned = [aligned.as_checkpoint(model) for model in opened], None
    statistics = [
        calibrate(model, one, what={what}, fisher=fisher, device=device, limit=limit, seed=seed)  # type: ignore[arg-type]
        if measure
        else _stored(one, what)
        for model, one, measure in zip(opened, given, fresh, strict=True)
    ]
    return _Prepared(opened, statistics, aligned)


def _is_batches(one: Measured) -> bool:
    return callable(one) or hasattr(one, "passes")


def _stored(one: Any, what: str) -> Statistics:
    found = open_statistics(one)
    if what not in found.info.get("what", ()):
        raise RequestError(
            f"Merging with {found.name}: it holds {', '.join(found.info.get('what', ()))} and not '{what}'. Measure "
            f"again with what={{'{what}'}}."
        )
    return found


def _shares(weight: Sequence[float] | None, prepared: _Prepared) -> list[float]:
    shares = [1.0] * len(prepared.models) if weight is None else [float(w) for w in weight]
    if len(shares) != len(prepared.models) or not all(map(math.isfinite, shares)):
        raise RequestError(f"Merging {len(prepared.models)} models with the weights {shares}: give one for each.")
    return shares


@dataclass(frozen=True)
class _Information:
    """A tensor's Fisher information as a source of rows."""

    tensor: Tensor
    label: str

    @property
    def info(self) -> TensorInfo:
        return TensorInfo.of(self.tensor)

    def rows(self, start: int, stop: int) -> Tensor:
        return self.tensor[start:stop] if self.tensor.dim() > 1 else self.tensor


def _importance(statistics: Statistics, name: str, info: TensorInfo) -> TensorSource:
    held = statistics.stored.tensors
    if name not in held or held[name].shape != info.shape:
        raise RequestError(
            f"Merging by Fisher information: {statistics.name} has nothing for '{name}' in the shape {info.shape}. "
            "Measure this very model, and all of it."
        )
    return _Information(statistics.stored.read(name), f"the information of '{name}' in {statistics.name}")


def _biases(prepared: _Prepared) -> dict[str, str]:
    """From a weight to its bias."""
    maps = prepared.statistics[0].info.get("maps", {})
    return {weight: entry["bias"] for weight, entry in maps.items() if entry.get("bias")}


def _augmented(
    weight: str,
    weights: Sequence[TensorSource],
    info: TensorInfo,
    bias: str,
    biases: Sequence[TensorSource],
    bias_info: TensorInfo,
    grams: Sequence[GramSource],
    shares: Sequence[float],
    alpha: float,
) -> list[tuple[str, Tensor]]:
    """A weight and its bias together: the bias is the weight of an input that is always 1."""
    transposed = grams[0].transposed
    matrices = []
    for source, offset in zip(weights, biases, strict=True):
        values = source.rows(0, source.info.shape[0]).to(torch.float64, copy=True)  # good only until the next read
        matrix = values.T if transposed else values.flatten(1)
        matrices.append(torch.cat([matrix, offset.rows(0, 1).double().reshape(-1, 1)], dim=1))
    solved = regression_mean(matrices, [_with_ones(g) for g in grams], shares, alpha=alpha)
    problem = too_little(weight, sum(g.count for g in grams), matrices[0].shape[1], solved.ridge, alpha)
    if problem:
        warnings.warn(problem, stacklevel=2)
    result = solved.weight[:, :-1]
    result = result.T if transposed else result
    return [
        (weight, cast(result.reshape(info.shape).contiguous(), info.dtype)[0]),
        (bias, cast(solved.weight[:, -1].contiguous(), bias_info.dtype)[0]),
    ]


def _with_ones(gram: GramSource) -> Tensor:
    product, total = gram.read(), gram.read_total()
    top = torch.cat([product, total[:, None]], dim=1)
    bottom = torch.cat([total, torch.tensor([float(gram.count)], dtype=torch.float64)])
    return torch.cat([top, bottom[None]])

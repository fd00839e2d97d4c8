"""Feed-forward units of several models matched to global units by a Beta–Bernoulli process: they may become more.

Heads and the residual stream are averaged, after an alignment where that is asked for. Both methods go through the
feed-forwards in their order. Each is one hidden layer between two readings of the stream, so the inputs of a layer,
which the published methods put into the order of the layer before, are in one order already: the stream by the
alignment, the units by the matching. The clients of FedMA retrain between the layers, with labels; nothing is trained
here.

References: Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks" (ICML 2019); Wang et al.,
"Federated Learning with Matched Averaging" (ICLR 2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isomerge.arguments import require_choice
from isomerge.errors import RequestError
from isomerge.merging.data_methods.method import data_method
from isomerge.merging.matching.beta_process import BetaProcess, match_units
from isomerge.merging.matching.feed_forwards import FeedForwards, UnitMaps
from isomerge.merging.merge_inputs import MergedWeights, MergeInputs
from isomerge.merging.methods.method import PerModel, each

STRENGTHS = ("share", "full")


@data_method(data="optional", passes="none; data are for the alignment", reference="https://arxiv.org/abs/1905.12022")
def pfnm(
    inputs: MergeInputs,
    *,
    weight: PerModel[float] = each(1.0),
    sigma: float = 1.0,
    sigma0: float = 1.0,
    growth: float = 1.0,
    largest: float = 2.0,
    strength: str = "share",
) -> MergedWeights:
    """Match feed-forward units by all their weights, keep those without a match as new units, and average.

    Options:
        weight: how much of each model, divided by their sum
        sigma: how far a model's unit may be from the global one; units are measured by their root mean square
        sigma0: how large global units are; two units match from a cosine of 1 / (1 + sigma² / sigma0²) on
        growth: how readily units without a match become new ones (γ of the process)
        largest: how many units the result may have at most, as a factor on those of one model
        strength: of a unit that not all models have: share (as the mean of the models' outputs) or full (as published)
    """
    process = BetaProcess(sigma, sigma0, growth)
    return _merged(inputs, "pfnm", inputs.shares(weight), process, largest, strength, handing_on=True)


@data_method(data="optional", passes="none; data are for the alignment", reference="https://arxiv.org/abs/2002.06440")
def fedma(
    inputs: MergeInputs,
    *,
    weight: PerModel[float] = each(1.0),
    sigma: float = 1.0,
    sigma0: float = 1.0,
    growth: float = 1.0,
    largest: float = 2.0,
    strength: str = "share",
) -> MergedWeights:
    """As pfnm, but layer by layer: units are matched by what they read alone, and what they write follows.

    Options:
        weight: how much of each model, divided by their sum
        sigma: how far a model's unit may be from the global one; units are measured by their root mean square
        sigma0: how large global units are; two units match from a cosine of 1 / (1 + sigma² / sigma0²) on
        growth: how readily units without a match become new ones (γ of the process)
        largest: how many units the result may have at most, as a factor on those of one model
        strength: of a unit that not all models have: share (as the mean of the models' outputs) or full (as published)
    """
    process = BetaProcess(sigma, sigma0, growth)
    return _merged(inputs, "fedma", inputs.shares(weight), process, largest, strength, handing_on=False)


def _merged(
    inputs: MergeInputs, method: str, shares: Sequence[float], process: BetaProcess, largest: float, strength: str,
    *, handing_on: bool,
) -> MergedWeights:  # fmt: skip
    require_choice("strength", strength, STRENGTHS)
    _check(method, sigma=process.sigma, sigma0=process.sigma0, growth=process.gamma)
    if not 1 <= largest < float("inf"):
        raise RequestError(f"{method}: largest is {largest}; it is a factor of 1 or more.", keys=("largest",))
    feed_forwards = FeedForwards.of(inputs, shares, method)
    if inputs.data and inputs.align is None:
        feed_forwards.parents.notes.append(f"{method} compares weights: the data were not used, as nothing is aligned")
    maps: dict[str, UnitMaps] = {}
    for number, space in enumerate(feed_forwards.writers):
        units = feed_forwards.units(space, handing_on=handing_on)
        places = match_units(units, process, int(largest * len(units[0])))
        maps[space] = maps_of(places, shares, full=strength == "full")
        inputs.report(number + 1, len(feed_forwards.writers), "matching units")
    return feed_forwards.result(*feed_forwards.merged(maps), {"matched": {s: _summary(m) for s, m in maps.items()}})


def maps_of(places: Sequence[Tensor], shares: Sequence[float], *, full: bool) -> UnitMaps:
    """A merged unit reads the mean of what its units read, in the shares of their models. What they hand on is added up
    in these shares or, if `full`, averaged over the models that have the unit."""
    count = max(int(own.max()) + 1 for own in places)
    whole = torch.zeros(count, dtype=torch.float64)
    for own, share in zip(places, shares, strict=True):
        whole[own] += share
    read, shared = [], []
    for own, share in zip(places, shares, strict=True):
        has = torch.zeros(count, len(own), dtype=torch.float64)
        has[own, torch.arange(len(own))] = share
        shared.append(has)
        read.append(torch.where(whole[:, None] > 0, has / whole[:, None], 0))
    return UnitMaps(read, read if full else shared)


def _summary(maps: UnitMaps) -> dict[str, Any]:
    """Units of the result, and how many of them all models have."""
    has = torch.stack([one.sum(1) > 0 for one in maps.read])
    return {"units": maps.count, "of_all": int(has.all(0).sum())}


def _check(method: str, **numbers: float) -> None:
    for name, value in numbers.items():
        if not 0 < value < float("inf"):
            raise RequestError(f"{method}: {name} is {value}; it is a number above 0.", keys=(name,))

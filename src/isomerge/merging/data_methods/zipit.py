"""ZipIt: units of all models, each with the one it correlates with most, be it of another model or of its own.

Feed-forward units are zipped; heads and the residual stream are averaged, after an alignment where that is asked for.
With the groups g of units that became one, of all models together, each model k with a share s_k:

    W_in[g] = mean over (k, i) in g of W_in,k[i]        W_out[:, g] = Σ over (k, i) in g of s_k W_out,k[:, i]

Up to a layer alone, the rest is that of one model. The published method keeps the rest of all models behind the zipped
layers; no stock class has several tails, but a merge for each of them gives as many native models that have their first
layers in common. Where all layers are zipped, the outputs of all models can stay apart in one native classifier.

Reference: Stoica et al., "ZipIt! Merging Models from Different Tasks without Training" (ICLR 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isomerge.arguments import require_choice
from isomerge.errors import RequestError
from isomerge.merging.data_methods.method import data_method
from isomerge.merging.layerwise.parents import in_memory
from isomerge.merging.matching.correlations import unit_correlations
from isomerge.merging.matching.feed_forwards import FeedForwards, UnitMaps
from isomerge.merging.matching.outputs import outputs_apart
from isomerge.merging.matching.tail import comes_after
from isomerge.merging.matching.zipping import zip_units
from isomerge.merging.merge_inputs import MergedWeights, MergeInputs
from isomerge.merging.methods.method import PerModel, Share, each
from isomerge.running.passes import DataPass
from isomerge.symmetry.architecture import layer_of

OUTPUTS = ("mean", "apart")


@data_method(data="one", passes="every model, once", reference="https://arxiv.org/abs/2305.03053")
def zipit(
    inputs: MergeInputs,
    *,
    weight: PerModel[float] = each(1.0),
    repeats: Share = 0.3,
    within: Share = 0.125,
    up_to: int | None = None,
    rest: int = 1,
    outputs: str = "mean",
) -> MergedWeights:
    """Zip feed-forward units by the correlation of their activations, across models or within one, and average the rest.

    Options:
        weight: how much of each model, divided by their sum
        repeats: what correlations are multiplied by each time a unit is zipped again; 0 for pairs only
        within: which share of the units that a model gives up may be zipped with its own; 0 for across models only
        up_to: how many layers are merged; those after them, and the outputs, are of one model. null for all layers
        rest: which model the rest is of, counted from 1
        outputs: mean of the classifiers, or apart (the labels of all models side by side in one classifier)
    """  # noqa: E501
    shares = inputs.shares(weight)
    feed_forwards = FeedForwards.of(inputs, shares, "zipit")
    _check(inputs, feed_forwards, up_to, rest, outputs)
    zipped = {s: w for s, w in feed_forwards.writers.items() if up_to is None or (layer_of(s) or 0) < up_to}
    models = [in_memory(state, feed_forwards.parents.config) for state in feed_forwards.states]
    passes = inputs.data[0].passes(inputs.models[0])
    data = DataPass(passes, device=inputs.device, labels=False, progress=inputs.progress, what="zipping units")
    correlations = unit_correlations(models, zipped, data, inputs.device) if zipped else {}
    groups = {space: _zipped(one, len(models), repeats, within) for space, one in correlations.items()}
    counts = {space: len(one) // len(models) for space, one in correlations.items()}
    maps = {space: maps_of(one, counts[space], shares) for space, one in groups.items()}
    parents, state = feed_forwards.merged(maps)
    if up_to is not None:
        own = feed_forwards.states[rest - 1]
        late = comes_after(parents.bound, up_to)
        state |= {name: own[name] for name in late if name in own}  # a tied table is where the stream starts
    zips = {space: _summary(one, counts[space]) for space, one in groups.items()}
    record = {"examples": data.examples, "zipped": zips, "up_to": up_to}
    if outputs == "apart":
        apart, changes, ranges = outputs_apart(parents, feed_forwards.states, inputs.models)
        return feed_forwards.result(parents, state | apart, {**record, "outputs": ranges}, **changes)
    return feed_forwards.result(parents, state, record)


def _check(
    inputs: MergeInputs, feed_forwards: FeedForwards, up_to: int | None, rest: int, outputs: str
) -> None:  # fmt: skip
    require_choice("outputs", outputs, OUTPUTS)
    layers = 1 + max(layer_of(space) or 0 for space in feed_forwards.writers)
    if not 1 <= rest <= len(inputs.models):
        raise RequestError(
            f"zipit: rest is {rest}; it is the place of one of {len(inputs.models)} models, from 1.", keys=("rest",)
        )
    if up_to is None:
        return
    if not 0 < up_to <= layers:
        raise RequestError(f"zipit: up_to is {up_to}, and the models have {layers} layers.", keys=("up_to",))
    if feed_forwards.parents.config.get("is_encoder_decoder"):
        raise RequestError(
            "zipit: up_to counts the layers of one stack, and these have an encoder and a decoder. Leave it out.",
            keys=("up_to",),
        )
    if outputs == "apart":
        raise RequestError(
            "zipit: with up_to the rest is of one model, and so are its outputs: no stock class has a tail for each "
            "model. Leave out up_to or outputs, or merge once for each model with rest.",
            keys=("up_to", "outputs"),
        )


def _zipped(correlation: Tensor, models: int, repeats: float, within: float) -> list[list[int]]:
    count = len(correlation) // models
    owners = torch.arange(models).repeat_interleave(count)
    return zip_units(correlation, owners, count, repeats=repeats, within=within)


def maps_of(groups: Sequence[Sequence[int]], count: int, shares: Sequence[float]) -> UnitMaps:
    """`groups` of units of all models side by side, `count` of each model."""
    member = torch.zeros(len(groups), count * len(shares), dtype=torch.float64)
    for number, group in enumerate(groups):
        member[number, list(group)] = 1.0
    read, given = (member / member.sum(1, keepdim=True)).split(count, 1), member.split(count, 1)
    return UnitMaps(list(read), [share * one for share, one in zip(shares, given, strict=True)])


def _summary(groups: Sequence[Sequence[int]], count: int) -> dict[str, Any]:
    """How many merged units are of several models, of several units of one model, and of a single unit."""
    owners = [{unit // count for unit in group} for group in groups]
    return {
        "across": sum(len(one) > 1 for one in owners),
        "within": sum(len(one) == 1 and len(group) > 1 for one, group in zip(owners, groups, strict=True)),
        "single": sum(len(group) == 1 for group in groups),
    }

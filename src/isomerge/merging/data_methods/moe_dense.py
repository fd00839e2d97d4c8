"""A dense model of a mixture of experts: in every layer one feed-forward takes the place of all of them.

Exact where all experts of a layer are alike, and lossy else: what a router chose between is decided once for all texts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isomerge.checkpoint import TensorInfo
from isomerge.choices import ToDense
from isomerge.errors import RequestError
from isomerge.merging.data_methods.method import data_method
from isomerge.merging.experts.configs import dense_entries, loaded_config
from isomerge.merging.experts.layers import ExpertLayers, Maps, read_layers
from isomerge.merging.experts.measuring import activation_of, examples, loaded_with, watched_mixture
from isomerge.merging.experts.uniting import Activation, output, weighted_mean
from isomerge.merging.experts.watching import LayerWatch, watch
from isomerge.merging.merge_inputs import MergedWeights, MergeInputs
from isomerge.merging.run.rows import TensorSource
from isomerge.merging.run.sources import Stored

ACT = "Making a mixture of experts dense"
HALF = 0.5
"""How much a shared expert counts where nothing is known of its gate: the sigmoid of 0."""


@data_method(
    data="optional",
    passes="the mixture once, and the dense model once, to compare their losses",
    least=1,
    most=1,
    parts=True,
)
def moe_dense(inputs: MergeInputs, *, experts: ToDense = "average") -> MergedWeights:
    """Make a mixture of experts dense: one feed-forward per layer, made of the experts.

    Options:
        experts: what becomes of them: their mean (average), the one that is used most (most_used), or their mean by how much each is used (by_use); the last two need data
    """  # noqa: E501
    (model,) = inputs.models
    known = read_layers(model, ACT)
    _require_data(inputs, known, experts)
    seen = watched_mixture(inputs, known) if inputs.data else None
    own = known.own_tensors
    activation = activation_of(model)
    feed_forwards: dict[int, Maps] = {}
    record = []
    for place, layer in enumerate(known.layers):
        inputs.report(place, len(known.layers), "joining experts")
        watched = seen.layers[layer] if seen else None
        feed_forwards[layer], about = _joined(known, layer, experts, watched, activation)
        record.append({"layer": layer, **about})
    inputs.report(len(known.layers), len(known.layers), "joining experts")
    units = _units(known, feed_forwards)
    wide = torch.promote_types(model.tensors[known.router(known.layers[0])].dtype, torch.float32)
    sources: dict[str, Tensor | TensorSource] = {n: Stored(model, n) for n in model.tensors if n not in own}
    for layer, names in _dense_layers(known).items():
        maps = feed_forwards[layer] if layer in feed_forwards else known.read(names)
        sources |= {names[part]: tensor.to(wide) for part, tensor in _padded(maps, units).items()}
    dtype = model.tensors[known.names(known.layers[0], 0)["gate"]].dtype
    plan = {
        name: model.tensors[name] if not isinstance(one, Tensor) else TensorInfo(tuple(one.shape), dtype)
        for name, one in sources.items()
    }
    changes = dense_entries(model, known.held_by, units=units)
    details: dict[str, Any] = {"experts": experts, "units": units, "layers": record}
    notes = ["a dense model cannot choose: what the experts know apart from each other is mixed in every text"]
    if seen:
        dense = loaded_with({**model.config, **changes}, sources, model, inputs.device)
        details["loss"] = {"before": seen.loss, "after": watch(dense, examples(inputs, 0)).loss}
        notes.append(f"loss on the data: {seen.loss:.4g} before, {details['loss']['after']:.4g} after")
    return MergedWeights(sources, plan, changes, None, notes, {"made_dense": details})


def _require_data(inputs: MergeInputs, known: ExpertLayers, experts: str) -> None:
    if inputs.data:
        return
    if experts != "average":
        raise RequestError(
            f"{ACT}: {experts} looks at how much each expert is used, on data. Name data, or choose average.",
            keys=("data", "experts"),
        )
    if not known.always_one:
        raise RequestError(
            f"{ACT}: the weights of the experts that {known.checkpoint.name} chooses do not sum to 1 "
            f"({known.held_by.sums_to_one}: false), so their sum has to be measured. Name data.",
            keys=("data",),
        )


def _joined(
    known: ExpertLayers, layer: int, how: str, seen: LayerWatch | None, activation: Activation
) -> tuple[Maps, dict[str, Any]]:
    """One feed-forward for a layer, and what it loses: the share of the mean square of the mixture's output that the
    feed-forward misses on the data."""
    experts = [known.read(known.names(layer, k)) for k in range(known.experts)]
    use = [1.0] * known.experts
    total = 1.0
    if seen is not None:
        assert seen.weights is not None
        total = 1.0 if known.always_one else float(seen.weights.sum()) / seen.tokens
        use = (seen.weights / seen.weights.sum()).tolist()
    weights = {
        "average": [1.0] * known.experts,
        "most_used": [float(k == max(range(known.experts), key=lambda one: use[one])) for k in range(known.experts)],
        "by_use": use,
    }[how]
    chosen = [k for k, weight in enumerate(weights) if weight > 0]
    joined = weighted_mean([experts[k] for k in chosen], [weights[k] for k in chosen])
    joined = {**joined, "down": joined["down"] * total}
    about: dict[str, Any] = {"weights": [weight / sum(weights) for weight in weights]}
    shared = known.read(known.shared_names(layer)) if known.held_by.shared else None
    if shared is not None and not any(bool(tensor.any()) for tensor in shared.values()):
        shared = None
    gate = known.checkpoint.read(f"{known.prefix}{layer}.{known.held_by.shared_gate}").double() if shared else None
    if seen is not None:
        rows = seen.rows.double()
        about["missed"] = _missed(known, layer, experts, joined, rows, activation)
    if shared is not None and gate is not None:
        counts = HALF if seen is None else float((seen.rows.double() @ gate.T).sigmoid().mean())
        about["shared_expert"] = counts
        joined = _beside(joined, {**shared, "down": shared["down"] * counts})
    return joined, about


def _missed(
    known: ExpertLayers, layer: int, experts: list[Maps], joined: Maps, rows: Tensor, activation: Activation
) -> float:
    """Of the experts that are chosen; the shared one is in both."""
    scores = (rows @ known.checkpoint.read(known.router(layer)).double().T).softmax(-1)
    top, places = scores.topk(known.chosen, -1)
    if known.always_one:
        top = top / top.sum(-1, keepdim=True)
    each = torch.zeros_like(scores).scatter_(1, places, top)
    truth = sum(each[:, k, None] * output(maps, rows, activation) for k, maps in enumerate(experts))
    assert isinstance(truth, Tensor)
    difference = output(joined, rows, activation) - truth
    return float(difference.square().sum() / truth.square().sum().clamp_min(1e-300))


def _beside(one: Maps, other: Maps) -> Maps:
    """The sum of two feed-forwards: the units of both."""
    return {
        "gate": torch.cat([one["gate"], other["gate"]]), "up": torch.cat([one["up"], other["up"]]),
        "down": torch.cat([one["down"], other["down"]], 1),
    }  # fmt: skip


def _dense_layers(known: ExpertLayers) -> dict[int, dict[str, str]]:
    """All layers, those that had no experts too."""
    count = int(loaded_config(known.checkpoint).num_hidden_layers)
    return {layer: known.dense_names(layer) for layer in range(count)}


def _units(known: ExpertLayers, made: dict[int, Maps]) -> int:
    """All layers of a dense model have as many units as the one that has most."""
    stored = [
        known.checkpoint.tensors[names["gate"]].shape[0]
        for layer, names in _dense_layers(known).items() if layer not in made
    ]  # fmt: skip
    return max([*stored, *(len(maps["gate"]) for maps in made.values())])


def _padded(maps: Maps, units: int) -> Maps:
    """With units that do nothing."""
    more = units - len(maps["gate"])
    wide = maps["gate"].new_zeros(more, maps["gate"].shape[1])
    return _beside(maps, {"gate": wide, "up": wide, "down": wide.T}) if more else maps

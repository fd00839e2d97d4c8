"""A mixture of experts with fewer experts: those that are alike become one, and the routers are fitted anew."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isomerge.checkpoint import TensorInfo
from isomerge.errors import RequestError
from isomerge.merging.data_methods.method import data_method
from isomerge.merging.experts.layers import ExpertLayers, read_layers
from isomerge.merging.experts.measuring import activation_of, examples, loaded_with, watched_mixture
from isomerge.merging.experts.recalibrating import fitted_rows, mean_rows
from isomerge.merging.experts.uniting import apart_by_weights, apart_on_data, groups, weighted_mean
from isomerge.merging.experts.watching import LayerWatch, watch
from isomerge.merging.merge_inputs import MergedWeights, MergeInputs
from isomerge.merging.run.rows import TensorSource
from isomerge.merging.run.sources import Stored

ACT = "Shrinking a mixture of experts"


@data_method(
    data="optional",
    passes="the mixture once, and the smaller one once, to compare their losses",
    least=1,
    most=1,
    parts=True,
    reference="https://arxiv.org/abs/2410.08589",
)
def moe_shrink(inputs: MergeInputs, *, keep: int, experts_per_token: int | None = None) -> MergedWeights:
    """Keep fewer experts: those with like outputs on data (without data: like weights) become their mean.

    Options:
        keep: how many experts every layer keeps
        experts_per_token: how many of them a token is sent to; as before, or all that are left, by default
    """
    (model,) = inputs.models
    known = read_layers(model, ACT)
    if not 1 <= keep <= known.experts:
        raise RequestError(
            f"{ACT}: keep is {keep}, and {model.name} has {known.experts} experts. Keep 1 to {known.experts} of them.",
            keys=("keep",),
        )
    chosen = min(known.chosen, keep) if experts_per_token is None else experts_per_token
    if not 1 <= chosen <= keep:
        raise RequestError(
            f"{ACT}: experts_per_token is {chosen}, and {keep} experts are kept. Choose 1 to {keep}.",
            keys=("experts_per_token",),
        )
    seen = watched_mixture(inputs, known) if inputs.data else None
    own = known.own_tensors
    sources: dict[str, Tensor | TensorSource] = {n: Stored(model, n) for n in model.tensors if n not in own}
    for name in own if known.held_by.shared else ():  # the shared expert stays
        if name.startswith(tuple(_shared_places(known))):
            sources[name] = Stored(model, name)
    record: list[dict[str, Any]] = []
    for place, layer in enumerate(known.layers):
        inputs.report(place, len(known.layers), "joining experts")
        state, about = _shrunk(known, layer, keep, seen.layers[layer] if seen else None)
        sources |= state
        record.append({"layer": layer, **about})
    inputs.report(len(known.layers), len(known.layers), "joining experts")
    held = known.held_by
    changes = {held.experts_key: keep, held.chosen_key: chosen}
    plan = {name: TensorInfo(_shape(one), model.tensors[name].dtype) for name, one in sources.items()}
    details: dict[str, Any] = {
        "experts": {"before": known.experts, "after": keep}, "experts_per_token": chosen, "layers": record,
        "evidence": "outputs" if seen else "weights",
    }  # fmt: skip
    notes = []
    if seen:
        smaller = loaded_with({**model.config, **changes}, sources, model, inputs.device)
        details["loss"] = {"before": seen.loss, "after": watch(smaller, examples(inputs, 0)).loss}
    else:
        notes.append("no data was given, so experts were compared by weights and routers have the means of their rows")
    return MergedWeights(sources, plan, changes, None, notes, {"shrunk": details})


def _shared_places(known: ExpertLayers) -> list[str]:
    held = known.held_by
    return [f"{known.prefix}{layer}.{rest}" for layer in known.layers for rest in (held.shared, held.shared_gate)]


def _shape(one: Tensor | TensorSource) -> tuple[int, ...]:
    return tuple(one.shape) if isinstance(one, Tensor) else one.info.shape


def _shrunk(
    known: ExpertLayers, layer: int, keep: int, seen: LayerWatch | None
) -> tuple[dict[str, Tensor | TensorSource], dict[str, Any]]:
    """The experts and the router of one layer, and what to report."""
    experts = [known.read(known.names(layer, k)) for k in range(known.experts)]
    router = known.checkpoint.read(known.router(layer)).double()
    use = [1.0] * known.experts
    if seen is not None:
        assert seen.weights is not None
        use, rows = seen.weights.tolist(), seen.rows.double()
        distances = apart_on_data(experts, rows, activation_of(known.checkpoint))
    else:
        distances = apart_by_weights(experts)
    found = groups(distances, keep)
    state: dict[str, Tensor | TensorSource] = {}
    wide = torch.promote_types(known.checkpoint.tensors[known.router(layer)].dtype, torch.float32)
    for number, members in enumerate(found):
        united = weighted_mean([experts[k] for k in members], [use[k] for k in members])
        state |= {name: united[part].to(wide) for part, name in known.names(layer, number).items()}
    unchanged = keep == known.experts
    new = mean_rows(router, found, use) if seen is None or unchanged else fitted_rows(router, found, rows)
    state[known.router(layer)] = new
    inside = [float(distances[i, j]) for members in found for i in members for j in members if i < j]
    about = {"groups": found, "apart": max(inside, default=0.0)}
    if seen is not None:
        about["use"] = [one / max(sum(use), 1e-300) for one in use]
    return state, about

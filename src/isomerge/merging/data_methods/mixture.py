"""A mixture of experts made of models that were trained apart: every model's feed-forwards are kept, and a router sends
each token to those of the model that knows the text.

Nothing of the models is averaged, and nothing but the router is solved, from a little data without labels: where a
text is sent to the right expert, the mixture computes what that model computes. The result is a stock Mixtral
(of Qwen3 models a stock Qwen3-MoE) with many parameters more than one model.
"""

from __future__ import annotations

import math
from typing import Any

from isomerge.arguments import require_choice
from isomerge.checkpoint import TensorInfo
from isomerge.errors import RequestError
from isomerge.merging.data_methods.method import data_method
from isomerge.merging.layerwise.goals import GoalData, OwnedBatches, expert_beliefs, own_beliefs
from isomerge.merging.layerwise.parent_views import State
from isomerge.merging.layerwise.parents import read_parents, with_norms_folded
from isomerge.merging.merge_inputs import MergedWeights, MergeInputs
from isomerge.merging.methods.method import PerModel, each
from isomerge.merging.mixture.assembly import SideBySide
from isomerge.merging.mixture.evidence import vocabulary_evidence
from isomerge.merging.mixture.native import expert_class, mixture_config, read_shape
from isomerge.merging.mixture.router import find_router
from isomerge.running.passes import DataPass
from isomerge.running.stock import load_stock

GOALS = ("auto", "own", "expert")
HELD = 2**28
"""Bytes of data that are kept in memory from pass to pass."""


@data_method(data="together", passes="every model twice, and the first layer of the mixture")
def mixture(
    inputs: MergeInputs,
    *,
    weight: PerModel[float] = each(1.0),
    goals: str = "auto",
    temperature: float = 1.0,
) -> MergedWeights:
    """Build a mixture of experts: the feed-forwards of all models, and a router that knows whose text it is.

    Options:
        weight: how much each model is believed before its text is seen, for expert goals
        goals: whose text is what: each model's own data, or on each example the posterior of the models. auto is own where models have data of their own, else expert
        temperature: of the posterior; more lets others speak, too
    """  # noqa: E501
    require_choice("goals", goals, GOALS)
    if not temperature > 0 or not min(weight) > 0:
        raise RequestError(
            f"mixture: temperature is {temperature} and the weights are {weight}. All of them are numbers above 0.",
            keys=("temperature", "weight"),
        )
    held_by, *_ = [expert_class(checkpoint) for checkpoint in inputs.models]
    parents, states = with_norms_folded(*read_parents(inputs, align=False))

    def load(config: dict[str, Any], state: State) -> Any:
        return load_stock(config, state, dtype=parents.precision).to(inputs.device).requires_grad_(False)

    models = [load({**parents.config, "use_cache": False}, state) for state in states]
    data, about_goals = _believed(inputs, models, goals, temperature, inputs.shares(weight))
    shape = read_shape(models[0].config, len(models), held_by)
    changes = mixture_config(models[0].config, shape, held_by)
    inputs.report(1, 3, "building the mixture")
    beside = SideBySide(states, shape, held_by, models[0].config, models[0].model.layers[0].mlp.act_fn)
    state = beside.state(vocabulary_evidence(models, data.examples).cpu())
    inputs.report(2, 3, "building the mixture")
    undecided = load({**parents.config, **changes, "use_cache": False}, state)
    router, agreement = find_router(undecided, data, shape)
    state |= beside.routers(router)
    inputs.report(3, 3, "building the mixture")

    first = inputs.models[0]
    dtype = first.tensors[parents.bound.files["model.embed_tokens.weight"][0]].dtype
    plan = {name: TensorInfo(tuple(tensor.shape), dtype) for name, tensor in state.items()}
    price = _price(plan, len(models)) | {"one_model": sum(math.prod(info.shape) for info in first.tensors.values())}
    record = {
        "examples": data.examples.examples, "goals": about_goals, "router": {"agreement": agreement},
        "parameters": price, "weights": inputs.shares(weight),
    }  # fmt: skip
    notes = [*parents.notes, _told(price)]
    if inputs.align is not None:
        notes.append("the models were not aligned: a mixture does not depend on the basis of each model")
    return MergedWeights(state, plan, changes, None, notes, record)


def _believed(
    inputs: MergeInputs, models: list[Any], goals: str, temperature: float, shares: list[float]
) -> tuple[GoalData, dict[str, Any]]:
    """The data and who is believed on it, and what to report of that."""
    passes = [data.passes(inputs.models[0]) for data in inputs.data]
    owned = OwnedBatches(passes, inputs.owners or [range(len(models))] * len(passes))
    if goals == "own" and not owned.apart:
        raise RequestError(
            "mixture: goals own needs data for each model, and all models have the same. Name data beside each model, "
            "or use expert goals.",
            keys=("goals", "data"),
        )
    goals = ("own" if owned.apart else "expert") if goals == "auto" else goals
    examples = DataPass(owned, device=inputs.device, labels=False, hashed=False, budget=HELD)
    if goals == "own":
        beliefs = own_beliefs(owned, examples, shares)
    else:
        beliefs, _ = expert_beliefs(examples, models, shares, temperature)
    totals = beliefs.totals()
    for model, total in zip(inputs.models, totals, strict=True):
        if not total > 1e-3:
            raise RequestError(
                f"mixture: {model.name} is believed on none of the examples, so nothing would go to its expert. Give "
                "data that it knows, or leave it out.",
                keys=("data",),
            )
    return GoalData(examples, beliefs), {"kind": goals, "examples": totals}


def _price(plan: dict[str, TensorInfo], experts: int) -> dict[str, int]:
    """Parameters of the mixture, and how many of them a token uses."""
    total = sum(math.prod(info.shape) for info in plan.values())
    own = sum(math.prod(info.shape) for name, info in plan.items() if ".experts." in name)
    return {"total": total, "active": total - own + own // experts}


def _told(price: dict[str, int]) -> str:
    total, active, one = (f"{price[key] / 1e6:.3g}" for key in ("total", "active", "one_model"))
    return f"the mixture has {total} million parameters, a token uses {active} million; one model has {one} million"

"""A mixture of experts made of dense models of one origin: their feed-forwards are the experts, everything else is that
of the base, and a router sends each token to a few of them.

Unlike `mixture`, which puts models that were trained apart side by side, this keeps one residual stream: the experts
have to read and write the same one, as fine-tunes of one base do. Copies of one model give its own function.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from isomerge.architectures.expert_classes import ExpertClass
from isomerge.checkpoint import Checkpoint, TensorInfo
from isomerge.choices import PROMPTED_GATES, GateMode
from isomerge.errors import RequestError
from isomerge.merging.data_methods.method import data_method
from isomerge.merging.experts.building import SILENT, Expert, MixtureTensors
from isomerge.merging.experts.configs import mixture_entries
from isomerge.merging.experts.dense import DenseModel, holding_class, read_dense, require_alike
from isomerge.merging.experts.gates import alike, prompted_rows, random_rows
from isomerge.merging.experts.measuring import data_rows, measured
from isomerge.merging.merge_inputs import ExpertRequest, MergedWeights, MergeInputs
from isomerge.merging.vocabulary.files import other_ids

EMBEDDINGS = "embed_tokens.weight"


@data_method(
    data="any",
    passes="the base for gate_mode data, and the mixture, to say where it sends what",
    least=0,
    base="optional",
    parts=True,
)
def moe(
    inputs: MergeInputs,
    *,
    gate_mode: GateMode = "hidden",
    experts_per_token: int = 2,
    architecture: str | None = None,
) -> MergedWeights:
    """Build a mixture of experts from dense models: their feed-forwards as experts, all else from the base.

    Options:
        gate_mode: what router rows are made of: hidden states of prompts (hidden, hidden_last, hidden_avg), their embeddings (cheap_embed), each model's data (data), or random numbers (random, uniform_random)
        experts_per_token: how many experts a token is sent to
        architecture: the class to build, where several can hold the models, as in mixtral or qwen
    """  # noqa: E501
    first = inputs.base or inputs.models[0]
    held_by = holding_class([first, *inputs.models], architecture, shared=inputs.shared_expert is not None)
    experts, shared = _experts(inputs)
    base = read_dense(first)
    require_alike(base, [one.model for one in [*experts, *([shared] if shared else [])]])
    changes = mixture_entries(
        first, held_by, experts=len(experts), chosen=experts_per_token, units=base.units,
        shared_units=shared.model.units if shared else SILENT,
    )  # fmt: skip
    tensors = MixtureTensors(base, experts, shared, held_by, inputs.seed)
    everyone = [*experts, *([shared] if shared else [])]
    rows, notes = _rows(inputs, gate_mode, base, everyone)
    tensors.route(rows[:, : len(experts)], rows[:, len(experts) :] if shared else None)
    price = _price(tensors.plan, held_by, len(experts), experts_per_token, first)
    record: dict[str, Any] = {
        "class": held_by.name, "gate_mode": gate_mode, "experts": [one.model.checkpoint.name for one in experts],
        "shared_expert": shared.model.checkpoint.name if shared else None, "experts_per_token": experts_per_token,
        "parameters": price,
    }  # fmt: skip
    notes += _notes(inputs, first, experts, gate_mode)
    if inputs.data:
        record["measured"] = measured(inputs, first, {**first.config, **changes}, tensors.sources)
    return MergedWeights(tensors.sources, tensors.plan, changes, None, notes, {"moe": record})


def _experts(inputs: MergeInputs) -> tuple[list[Expert], Expert | None]:
    """Those that the recipe names; without, every model is one."""
    dense = [read_dense(model) for model in inputs.models]
    requests = inputs.experts or [ExpertRequest(place) for place in range(len(dense))]
    shared = inputs.shared_expert
    return [Expert(dense[one.model], one) for one in requests], Expert(dense[shared.model], shared) if shared else None


def _rows(inputs: MergeInputs, mode: str, base: DenseModel, experts: Sequence[Expert]) -> tuple[Tensor, list[str]]:
    """(layers, experts, width), the shared expert's row last; and what to say of them."""
    layers = len(base.layers)
    inputs.report(0, 1, "finding the routers")
    if mode in PROMPTED_GATES:
        table = next((name for name in base.rest if name.endswith(EMBEDDINGS)), None)
        if table is None:
            raise RequestError(f"Building a mixture of experts: {base.checkpoint.name} has no {EMBEDDINGS}.")
        requests = [one.request for one in experts]
        rows = prompted_rows(base.checkpoint, requests, mode, layers, table=table, device=inputs.device)
    elif mode == "data":
        rows = data_rows(inputs, base.checkpoint, [one.request.model for one in experts])
    else:
        rows = random_rows(mode, inputs.seed, layers, len(experts), base.width)
    inputs.report(1, 1, "finding the routers")
    close = alike(rows) if mode in PROMPTED_GATES else []
    if not close:
        return rows, []
    where = f"layers {', '.join(map(str, close))}" if len(close) < layers else "all layers"
    return rows, [
        f"the prompts hardly tell some experts apart in {where} (rows nearly alike); use prompts that differ more"
    ]


def _notes(inputs: MergeInputs, base: Checkpoint, experts: Sequence[Expert], mode: str) -> list[str]:
    notes = []
    if len({id(one.model.checkpoint) for one in experts}) == 1 and len(experts) > 1:
        notes.append("all experts are copies of one model: the mixture computes what it computes, until it is trained")
    if mode in ("random", "uniform_random"):
        notes.append("the router is random: it sends no text to any expert in particular, until it is trained")
    if len(experts) & (len(experts) - 1):
        notes.append(f"{len(experts)} experts are no power of two, which llama.cpp asks for")
    notes += [f"{text}: the mixture reads text with the base's tokenizer" for text in other_ids([base, *inputs.models])]
    return notes


def _price(
    plan: dict[str, TensorInfo], held_by: ExpertClass, experts: int, chosen: int, dense: Checkpoint
) -> dict[str, int]:
    """Parameters of the mixture, how many of them a token uses, and those of the dense model."""
    total = sum(math.prod(info.shape) for info in plan.values())
    places = tuple(held_by.expert.format(number) for number in range(experts))
    own = sum(math.prod(info.shape) for name, info in plan.items() if any(f".{place}" in name for place in places))
    one = sum(math.prod(info.shape) for info in dense.tensors.values())
    return {"total": total, "active": total - own + own * chosen // experts, "one_model": one}

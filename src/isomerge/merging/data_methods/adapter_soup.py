"""AdapterSoup (Chronopoulou et al. 2023, arXiv 2302.07027): the models whose data are like that of the task, averaged.

    s_k = mean over x of model k's data, y of the task's of cos(e(x), e(y)),    W = Σ_{k of the largest s} w_k W_k

e(x) is what the base makes of an example: its last hidden states, in the mean over the tokens or patches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isomerge.data.base import Batches
from isomerge.errors import RequestError
from isomerge.merging.data_methods.method import data_method
from isomerge.merging.merge_inputs import MergedWeights, MergeInputs
from isomerge.merging.state_dicts import merge_state_dicts
from isomerge.running.passes import DataPass
from isomerge.running.stock import StockModel, inputs_of, run_module


@data_method(
    data="task",
    passes="the base, once over every data set",
    least=1,
    base="required",
    reference="https://arxiv.org/abs/2302.07027",
)
def adapter_soup(inputs: MergeInputs, *, top: int = 5, temperature: float | None = None) -> MergedWeights:
    """Average the models, such as a base with one of many adapters, whose data are most similar to that of a task.

    Options:
        top: how many models are averaged, the most similar ones
        temperature: weigh them by softmax(similarity / temperature); null for all alike
    """
    if top < 1 or (temperature is not None and not temperature > 0):
        raise RequestError(
            f"adapter_soup: top is {top} and temperature {temperature}. Use a whole number from 1, and a number above "
            "0 or null.",
            keys=("top", "temperature"),
        )
    assert inputs.base is not None, "the method is entered with base='required'"
    reader = StockModel.load(inputs.base, inputs.device)
    means: list[Tensor] = []
    for number, data in enumerate(inputs.data, start=1):
        means.append(mean_direction(reader, data.passes(inputs.base, device=inputs.device)))
        inputs.report(number, len(inputs.data), "reading data")
    similar = [float(own @ means[-1]) for own in means[:-1]]
    chosen = sorted(range(len(similar)), key=lambda k: (-similar[k], k))[:top]
    scores = torch.tensor([similar[k] for k in chosen], dtype=torch.float64)
    shares = (scores * 0 if temperature is None else scores / temperature).softmax(0).tolist()

    aligned = inputs.aligned()
    models = [aligned.as_checkpoint(inputs.models[k]) if aligned else inputs.models[k] for k in chosen]
    soup = merge_state_dicts([{n: model.read(n) for n in model.tensors} for model in models], weight=shares)
    names = [model.name for model in inputs.models]
    weights = {names[k]: share for k, share in zip(chosen, shares, strict=True)}
    record = {
        "metric": "similarity", "scores": [{"model": n, "score": s} for n, s in zip(names, similar, strict=True)],
        "chosen": [names[k] for k in chosen], "weights": weights,
    }  # fmt: skip
    said = ", ".join(f"{names[k]} {similar[k]:.4f} (weight {weights[names[k]]:.3g})" for k in chosen)
    notes = [*(aligned.notes if aligned else ()), f"in the soup, each with its data's similarity to the task's: {said}"]
    return MergedWeights(
        soup, aligned.plan if aligned else inputs.models[0].tensors, aligned.config_changes if aligned else {},
        aligned.record if aligned else None, notes, record, chosen,
    )  # fmt: skip


def mean_direction(model: StockModel, batches: Batches) -> Tensor:
    """The mean of e(x) / ‖e(x)‖ over the data: the inner product of two of these is the mean cosine of all pairs."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    with torch.no_grad():
        for batch in DataPass(batches, device=model.device, labels=False, hashed=False):
            given = {**inputs_of(batch, model.module), "output_hidden_states": True}
            outputs = run_module(model.module, given, model.checkpoint.name)
            states = outputs.get("encoder_hidden_states") or outputs.get("hidden_states")
            hidden = states[-1].double()  # (examples, tokens, width)
            mask = batch.get("attention_mask")
            kept = mask.to(hidden) if mask is not None else torch.ones_like(hidden[..., 0])
            mean = (hidden * kept[..., None]).sum(1) / kept.sum(1, keepdim=True).clamp_min(1)
            total = total + torch.nn.functional.normalize(mean, dim=-1).sum(0).cpu()
            count += len(mean)
    return total / count

"""Classifiers with other labels joined into one that knows the labels of all: heads side by side on a mean body.

    W_body = Σ_k w_k W_k        row of label y in the head = the mean of the rows of the models that have y

With the whole weight on one model the logits of its labels are its own, as long as no other model has one of them.
"""

from __future__ import annotations

from isomerge.checkpoint import Checkpoint, TensorInfo
from isomerge.data.task_heads import CLASSIFIERS, label_names, nameless, task_of
from isomerge.errors import RequestError
from isomerge.merging.data_methods.method import data_method
from isomerge.merging.label_union import LabelUnion, head_tensors
from isomerge.merging.layerwise.assembly import sum_of
from isomerge.merging.merge_inputs import MergedWeights, MergeInputs
from isomerge.merging.methods.method import PerModel, each


@data_method(data="optional", passes="none", any_width=True)
def join_labels(inputs: MergeInputs, *, weight: PerModel[float] = each(1.0)) -> MergedWeights:
    """Join classifiers with other labels: average the bodies, and put the heads side by side.

    Options:
        weight: how much of each model is in the body and in the rows of labels that several have, divided by their sum
    """
    first = inputs.models[0]
    _check(inputs, weight)
    heads, union = head_tensors(first), LabelUnion.of([label_names(model.config) for model in inputs.models])
    shares, tensors = inputs.shares(weight), {}
    for name, info in first.tensors.items():
        parts = [model.read(name) for model in inputs.models]
        if name in heads:
            tensors[name] = union.joined(parts, shares)
        elif info.dtype.is_floating_point:
            tensors[name] = sum_of([share * part.double() for share, part in zip(shares, parts, strict=True)])
        else:
            tensors[name] = parts[0]
    plan = {name: TensorInfo(tuple(tensors[name].shape), info.dtype) for name, info in first.tensors.items()}
    shared = sum(map(len, union.places)) - len(union.labels)
    notes = [f"{len(union.labels)} labels of {len(inputs.models)} models" + (f", {shared} in common" if shared else "")]
    if inputs.data:
        notes.append("join_labels does not use the data")
    # num_labels follows from id2label; a number that stands beside it would contradict it.
    count = {"num_labels": len(union.labels)} if "num_labels" in first.config else {}
    return MergedWeights(tensors, plan, {**union.config(), **count}, None, notes, {"weights": shares})


def _check(inputs: MergeInputs, weight: list[float]) -> None:
    if inputs.align is not None:
        raise RequestError(
            "join_labels takes the models as they are. Move each next to the first with isomerge align, and join what "
            "it writes.",
            keys=("align",),
        )
    if not min(weight) >= 0:
        raise RequestError(f"join_labels: the weights are {weight}. None of them may be negative.", keys=("weight",))
    first = inputs.models[0]
    for model in inputs.models:
        task = task_of(model.config)
        if task not in CLASSIFIERS or task != task_of(first.config):
            raise RequestError(
                f"join_labels: {model.name} is for '{task}' and {first.name} for '{task_of(first.config)}'. Name "
                "classifiers of one kind: of images, texts or words."
            )
        if nameless(label_names(model.config)):
            raise RequestError(
                f"join_labels: the labels of {model.name} have no names, so nothing says which are the same. Put "
                "them into id2label and label2id of config.json."
            )
        _require_one_body(first, model)


def _require_one_body(first: Checkpoint, model: Checkpoint) -> None:
    if model.tensors.keys() != first.tensors.keys():
        raise RequestError(f"join_labels: {model.name} has other tensors than {first.name}. Name models of one class.")
    heads = head_tensors(first)
    for name, info in first.tensors.items():
        own, given = info.shape, model.tensors[name].shape
        if own[1:] != given[1:] or (name not in heads and own != given):
            raise RequestError(
                f"join_labels: {name} is {own} in {first.name} and {given} in {model.name}. Bodies are averaged, so "
                "they must have one shape."
            )

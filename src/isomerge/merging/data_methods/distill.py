"""Distillation (Hinton et al. 2015, arXiv 1503.02531) of many teachers into one student, without labels.

    L = T² · KL( Σ_m w_m softmax(t_m / T) ‖ softmax(s / T) )

The student is the base: one of the teachers, a merged model, a smaller one or one of another architecture, or the
config of one, whose weights are drawn. Teachers and student give scores of the same classes or tokens; language models
of another vocabulary are carried to the student's by the texts of the tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from isomerge.arguments import require_choice
from isomerge.checkpoint import Checkpoint, TensorInfo
from isomerge.checkpoint.base import main_dtype
from isomerge.checkpoint.memory import saved_state
from isomerge.choices import GOALS
from isomerge.data.task_heads import heads_apart
from isomerge.errors import RequestError
from isomerge.merging.data_methods.method import data_method
from isomerge.merging.distillation.controls import standing
from isomerge.merging.distillation.teaching import Teaching
from isomerge.merging.layerwise.goals import HELD_OUT
from isomerge.merging.layerwise.token_matching import find_matches
from isomerge.merging.merge_inputs import MergedWeights, MergeInputs
from isomerge.merging.methods.method import PerModel, each

RATE, FRESH_RATE = 0.003, 0.05


@data_method(
    data="together",
    passes="every teacher and the student, once for every step",
    least=1,
    base="optional",
    any_architecture=True,
    reference="https://arxiv.org/abs/1503.02531",
)
def distill(
    inputs: MergeInputs,
    *,
    weight: PerModel[float] = each(1.0),
    goals: str = "auto",
    steps: int = 500,
    rate: float | None = None,
    temperature: float = 1.0,
    agree: float | None = None,
    fresh: bool = False,
) -> MergedWeights:
    """Draw a student, which is the base, to the predictions of all models, by gradient steps and without labels.

    Options:
        weight: how much each teacher counts, divided by their sum
        goals: whose predictions count: the mean of all teachers', each teacher's own on its own data, or on each example the posterior of the teachers (expert). auto is own where teachers have data of their own, else expert where they know different things, else mean
        steps: gradient steps, each on one batch
        rate: size of the first steps, relative to a tensor's. If not named 0.003, and 0.05 for a fresh student
        temperature: what all scores are divided by before they are compared; more shows more of what is unlikely
        agree: choose the teachers' shares on each batch so that their joint gradient is the shortest, none larger than this (AE-KD); for teachers that contradict each other
        fresh: start from random weights of the student's class; its folder may hold a config.json alone
    """  # noqa: E501
    require_choice("goals", goals, GOALS)
    _check(inputs, weight, steps, rate, temperature, agree, fresh)
    student = inputs.base or inputs.models[0]
    for teacher in inputs.models:
        _require_one_head(student, teacher)
    matches = find_matches([student, *inputs.models])
    teaching = Teaching(inputs, inputs.shares(weight), temperature, agree, matches)
    chosen, train, held_out = teaching.data(goals)
    loss = teaching.loss_on(train)
    controls = standing(loss, held_out, student, [one.name for one in inputs.models])
    rate = (FRESH_RATE if fresh else RATE) if rate is None else rate
    teaching.learn(train, steps, rate)
    controls += standing(loss, held_out, student, None)
    before, after = controls[0], controls[-1]
    before["model"], after["model"] = "student before", "student after"
    about = {"steps": steps, "rate": rate, "temperature": temperature, "agree": agree, "fresh": fresh}
    record: dict[str, Any] = {
        "distilled": {**about, "held_out": controls},
        "examples": sum(data.examples for data in inputs.data),
        "goals": {"kind": chosen, **({"examples": train.beliefs.totals()} if train.beliefs else {})},
        "weights": inputs.shares(weight),
    }
    notes = [_told(before, after), *(match.note() for match in matches.values())]
    if not held_out.is_new:
        notes.append(f"with fewer than {HELD_OUT} examples none are kept aside: the distances are of those it has seen")
    tensors = saved_state(teaching.student.model, "the student")
    usual = main_dtype(student.tensors.values()) or torch.float32
    dtypes = {name: student.tensors[name].dtype if name in student.tensors else usual for name in tensors}
    plan = {name: TensorInfo(tuple(tensor.shape), dtypes[name]) for name, tensor in tensors.items()}
    return MergedWeights({name: one.detach().cpu() for name, one in tensors.items()}, plan, notes=notes, record=record)


def _check(
    inputs: MergeInputs, weight: list[float], steps: int, rate: float | None, temperature: float,
    agree: float | None, fresh: bool,
) -> None:  # fmt: skip
    if steps < 1:
        raise RequestError(f"distill: steps is {steps}. Write 1 or more.", keys=("steps",))
    for key, value in (("rate", 1.0 if rate is None else rate), ("temperature", temperature)):
        if not value > 0:
            raise RequestError(f"distill: {key} is {value}. Write a number above 0.", keys=(key,))
    if not min(weight) >= 0:
        raise RequestError(f"distill: the weights are {weight}. None of them may be negative.", keys=("weight",))
    least = 1 / len(inputs.models)
    if agree is not None and not least <= agree <= 1:
        raise RequestError(
            f"distill: agree is {agree}. Write a share from {least:.4g} (the mean of the teachers) to 1.",
            keys=("agree",),
        )
    if fresh and (inputs.base is None or inputs.base.kind != "fresh"):
        raise RequestError(
            "distill: a fresh student needs a folder of its own with its config.json, beside those of the teachers. "
            "Name one as student.",
            keys=("fresh", "student"),
        )


def _require_one_head(student: Checkpoint, teacher: Checkpoint) -> None:
    apart = heads_apart(student.config, teacher.config)
    if apart is not None:
        raise RequestError(
            f"distill: the heads of {student.name} and {teacher.name} differ: {apart}. Give models of one task; if the "
            "names mean the same, make them the same in config.json (id2label).",
            keys=("student", "models"),
        )


def _told(before: dict[str, Any], after: dict[str, Any]) -> str:
    told = f"distance to the goals on held-out examples: {before['distance']:.4g} → {after['distance']:.4g}"
    if after["distance"] < before["distance"]:
        return told
    return f"{told}. The student learned nothing that helps there: a smaller rate, fewer steps or more data may"

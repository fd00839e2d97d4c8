"""Merging by features: every linear map of the merged model is solved again, towards the features of its parents.

In the order in which they run, on the inputs X that a map has in the merged model so far:

    W = argmin ‖X W − T‖² + ‖Λ^½ (W − W̄)‖²,  Λ = diag(ridge · G_jj + floor · mean diag G),  G = XᵀX

with W̄ the average and T the parents' outputs or, for maps that write to the residual stream, the parents' streams
minus the merged model's own: their mean, or on each example those of the parent that knows it (`goals`). No labels are
needed.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from isomerge.arguments import require_choice
from isomerge.choices import GOALS
from isomerge.data.base import Batches
from isomerge.errors import RequestError
from isomerge.kinship import ONE_BASE, are_related
from isomerge.merging.data_methods.method import data_method
from isomerge.merging.layerwise.believed import Believed, resolved_goals
from isomerge.merging.layerwise.candidates import Candidates
from isomerge.merging.layerwise.choice import Choice, parent_number
from isomerge.merging.layerwise.dreams import with_dreams
from isomerge.merging.layerwise.goals import OwnedBatches
from isomerge.merging.layerwise.layerwise_merge import LayerwiseMerge
from isomerge.merging.layerwise.parents import least_cosine, of_other_shapes
from isomerge.merging.layerwise.ridge import RIDGE
from isomerge.merging.layerwise.shapes import require_mergeable, require_one_task
from isomerge.merging.layerwise.token_matching import TokenMatch, find_matches
from isomerge.merging.layerwise.width import Width
from isomerge.merging.merge_inputs import MergedWeights, MergeInputs
from isomerge.merging.methods.method import PerModel, each

FEATURES = ("auto", "mean", "joint")
POSTERIORS = ("example", "token")
OUTPUTS = ("auto", "scores", "predictions")
LEANS = ("auto", "no")
STARTS = ("auto", "merge", "parent", "best")


@data_method(data="together", passes="every model, once per linear map, as far as the map", any_shape=True)
def reconstruct(
    inputs: MergeInputs,
    *,
    weight: PerModel[float] = each(1.0),
    goals: str = "auto",
    temperature: float = 1.0,
    posterior: str = "example",
    features: str = "auto",
    lean: str = "auto",
    output: str = "auto",
    dream: int = 0,
    refine: int = 0,
    polish: int = 0,
    start: str = "auto",
    rate: float | None = None,
    ridge: float | None = None,
    floor: float = 1e-6,
    width: str = "1",
    cache: str = "2GB",
) -> MergedWeights:
    """Solve every linear map again, so that layer by layer the features are those of the models.

    Options:
        weight: how much of each model, divided by their sum
        goals: whose features count: the mean of all models', each model's own on its own data, or on each example those of the expert, the model that finds it likely or is sure of its answer. auto is own where models have data of their own, else expert where the models know different things, else mean
        temperature: of the expert's posterior; more lets others speak, too
        posterior: of each example, from all of it, or of each token, from the text up to there (language models)
        features: mean of the models', or joint, one model's width out of all models side by side. auto is joint for models of other shapes or vocabularies and for models trained apart, unless they are aligned and the goals are the mean; for siblings it is the mean
        lean: auto lets a joint stream lean to one model where this predicts held-out examples better, unless weights or mean goals are given; no keeps the weights; shares of the models, as 0.95/0.05, are taken as they are
        output: fit the output map to scores as all maps, or to predictions. auto is scores for mean goals of models of one vocabulary, and predictions for others
        dream: texts that each language model writes itself, to be used beside the data
        refine: gradient steps on each block after it was solved
        polish: gradient steps on the whole model at the end, towards the models' predictions
        start: what is polished: the merge, one parent (the better, or as parent-1), or the best of all these on held-out examples. auto is best with polish, and merge otherwise
        rate: size of the first steps of polishing, relative to a tensor's. If not named 0.003, 0.015 or no steps at all, whatever predicts held-out examples best
        ridge: how strongly weights are held at the average, as a share of what each input varies. If not named 0.01 for mean goals; for others every regression takes what predicts held-out inputs best, from 0.001 to 1
        floor: the same, as a share of what all inputs of a map vary on average
        width: how much more room the merged model has than the first one, as a factor for its feed-forward units and heads (2) or by part (units=2,heads=2,stream=1.5)
        cache: memory that spares running finished layers again, as 2GB; 0 switches it off
    """  # noqa: E501
    require_choice("posterior", posterior, POSTERIORS)
    _check(goals, features, lean, output, start, {"refine": refine, "polish": polish, "dream": dream})
    _require_positive(temperature=temperature, rate=1.0 if rate is None else rate)
    named = _given_shares(lean, len(weight))
    if start.startswith("parent-"):
        parent_number(start, len(weight))
    room = Width.read(width)
    require_one_task(inputs.models)
    matches = find_matches(inputs.models)
    of_one_shape = not (matches or of_other_shapes(inputs.models))
    if not of_one_shape and features != "mean":
        require_mergeable(inputs.models, matches)
    passes = _passes(inputs, matches)
    data = OwnedBatches(passes, inputs.owners or [range(len(inputs.models))] * len(passes))
    goals, apart = resolved_goals(goals, temperature, data, inputs, inputs.shares(weight))
    if posterior == "token" and goals != "expert":
        raise RequestError(
            f"reconstruct: a posterior of each token is asked for, and the goals are {goals}. Use goals expert.",
            keys=("posterior", "goals"),
        )
    if dream and matches:
        raise RequestError(
            "reconstruct: dream lets models write texts for all, and their vocabularies differ. Leave dream out.",
            keys=("dream",),
        )
    if dream:
        data = with_dreams(data, inputs, dream)
    mean = goals == "mean"
    other = not (of_one_shape and room.is_one)
    # Models of one basis have units in common, and choosing among copies of one unit breaks what they do together.
    joint = features == "joint" or (features == "auto" and (other or _in_two_bases(inputs, weight, mean)))
    if not (joint or room.is_one):
        raise RequestError(
            "reconstruct: width is for joint features, and mean features are asked for. Use joint features, or leave "
            "out the width.",
            keys=("width", "features"),
        )
    if joint and not min(weight) > 0:
        raise RequestError(
            f"reconstruct: joint features need positive weights, and these are {weight}. Leave out models without "
            "weight."
        )
    together: Batches = (lambda: itertools.chain.from_iterable(one() for one in data.passes)) if mean else data
    if matches and not joint:
        raise RequestError(
            "reconstruct: the models have different vocabularies, which joint features can bring together and mean "
            "features cannot. Use joint features.",
            keys=("features",),
        )
    run = LayerwiseMerge(
        inputs, weight, [together], cache, joint=joint, width=room, refine=refine > 0, matches=matches
    )  # fmt: skip
    # Scores for one vocabulary say little of those for another: a token may begin several of the other one's.
    fits = output == "predictions" or (output == "auto" and (not mean or bool(matches)))
    candidates = Candidates(run, joint, RIDGE if ridge is None and mean else ridge, floor, refine, fits)
    believed = Believed(goals, temperature, run, by_token=posterior == "token")
    every = believed.on(data, run.examples[0])
    record: dict[str, Any] = {"goals": {"kind": goals}}
    if every.beliefs is not None:
        record["goals"]["examples"] = every.beliefs.totals()
    if apart is not None:
        record["goals"]["apart"] = apart
    if start == "auto":
        start = "best" if polish else "merge"
    merges = start in ("merge", "best")
    leans = joint and not mean and merges and lean == "auto" and len(set(weight)) == 1
    choice = Choice(candidates, named or list(run.shares), start, polish, rate)
    parts = believed.divided(data) if leans or choice.is_open else None
    if leans and parts:
        shares, record["lean"] = candidates.best_lean(*parts, polish)
        choice = replace(choice, shares=shares)
    record |= choice.finished(every, parts)
    if joint and merges and not (refine or polish):
        run.parents.notes.append(MORE)
    if matches:
        record["vocabularies"] = [match.summary() for match in matches.values()]
        run.parents.notes.extend(match.note() for match in matches.values())
    return run.result(record)


def _passes(inputs: MergeInputs, matches: Mapping[int, TokenMatch]) -> list[Batches]:
    """Over every data set, for all models to read: those of other vocabularies in their own tokens."""
    sets = inputs.data
    if matches:
        pending = next(iter(matches.values())).pending
        sets = [data.beside({m: inputs.models[m] for m in matches}, pending) for data in inputs.data]
    return [data.passes(inputs.models[0]) for data in sets]


MORE = (
    "more time brings it nearer to its parents: gradient steps on every block (refine 100), or on the whole model "
    "(polish 200), which also tries each parent as a start"
)


def _given_shares(lean: str, count: int) -> list[float] | None:
    """Shares of the stream that were named, divided by their sum."""
    if lean in LEANS:
        return None
    try:
        shares = [float(part) for part in lean.split("/")]
    except ValueError:
        shares = []
    if len(shares) != count or not all(math.isfinite(share) and share > 0 for share in shares):
        raise RequestError(
            f"reconstruct: lean is '{lean}'; it is auto, no, or a positive share for each of the {count} models, as "
            f"{'/'.join(['0.8', *['0.2'] * (count - 1)])}.",
            keys=("lean",),
        )
    return [share / sum(shares) for share in shares]


def _in_two_bases(inputs: MergeInputs, weight: Sequence[float], mean: bool) -> bool:
    """Whether joint features suit the models: strangers and, where the goals are not the mean of all, what alignment
    alone has brought together."""
    if not mean:
        return least_cosine(inputs.models) < ONE_BASE
    return min(weight) > 0 and not inputs.align and not are_related(least_cosine(inputs.models))


def _check(goals: str, features: str, lean: str, output: str, start: str, counts: Mapping[str, int]) -> None:
    choices = {"goals": (goals, GOALS), "features": (features, FEATURES), "output": (output, OUTPUTS)}
    if not re.fullmatch(r"parent-\d+", start):
        choices["start"] = (start, STARTS)
    if "/" not in lean:
        choices["lean"] = (lean, LEANS)
    for name, (value, known) in choices.items():
        require_choice(name, value, known)
    for name, count in counts.items():
        if count < 0:
            raise RequestError(f"reconstruct: {name} is {count}. Write 0 for none, or a larger number.", keys=(name,))


def _require_positive(**numbers: float) -> None:
    for name, value in numbers.items():
        if not 0 < value < math.inf:
            raise RequestError(f"reconstruct: {name} is {value}; it is a number above 0.", keys=(name,))

"""The best merge beside the models it was made of, on data that nothing was chosen on; and one honest sentence."""

from __future__ import annotations

import math
from collections.abc import Mapping

from isomerge.errors import IsomergeError
from isomerge.merging.data_methods import ALL_METHODS
from isomerge.merging.recipe import ModelReference, Recipe, load_recipe
from isomerge.sweeping.measuring import Bench, NotFinite, SweepMeasure
from isomerge.sweeping.points import Point, Values, describe_values
from isomerge.sweeping.result import Contestant, Judge, Sweep, SweepPoint, SweepTest

CLEAR = 2.0
"""A difference of so many standard errors is no chance."""
FEW = 3
"""Values that a sentence can hold."""


def models_of(recipe: Recipe) -> dict[ModelReference, str]:
    """Every model of a recipe with its role. The base of a method with a `t` is one of the two that it goes between."""
    method = ALL_METHODS[recipe.merge_method]
    apart = method.base != "ignored" and all(option.name != "t" for option in method.options)
    roles = {model: "base" if apart and model == recipe.base_model else "model" for model in recipe.referenced_models()}
    return dict(sorted(roles.items(), key=lambda item: item[1] == "base"))


def measured_controls(bench: Bench, models: Mapping[ModelReference, str], measure: SweepMeasure) -> list[Contestant]:
    """Every model alone, as `isomerge eval` measures it; one that cannot be measured gets a note."""
    found = []
    for reference, role in models.items():
        try:
            found.append(_control(bench, reference, role, measure))
        except IsomergeError as error:
            bench.notes.append(f"{reference} could not be measured alone: {error}")
    return found


def _control(bench: Bench, reference: ModelReference, role: str, measure: SweepMeasure) -> Contestant:
    alone = {"merge_method": "passthrough", "models": [{"model": str(reference)}]}
    point = Point({"model": str(reference)}, load_recipe(alone)[0])
    if measure is bench.measure:
        one = bench.measured(point)
        return Contestant(str(reference), role, one.loss, one.metric, bench.judge.error(one), _scores=one._scores)
    return _tested(bench, point, str(reference), role, measure)


def _tested(bench: Bench, point: Point, name: str, role: str, measure: SweepMeasure) -> Contestant:
    try:
        numbers, scores = bench.numbers(point, measure)
    except NotFinite:  # the best point can do better than a recipe that gives no weights
        numbers, scores = {"loss": math.nan, "metric": math.nan}, None
    one = Contestant(name, role, numbers["loss"], numbers["metric"], None, _scores=scores)
    one.error = bench.judge.error(one)
    return one


def final_test(
    bench: Bench, measure: SweepMeasure, recipe: Recipe, best: SweepPoint, models: Mapping[ModelReference, str]
) -> SweepTest:
    """The unchanged recipe, the best merge, and every model alone on other data: each once, and nothing is chosen."""
    assert measure.data is not None
    start = _tested(bench, Point({}, recipe), "the recipe as it is", "merge", measure)
    same = best.recipe.to_yaml() == recipe.to_yaml()
    chosen = start if same else _tested(bench, Point(best.parameters, best.recipe), "the best merge", "merge", measure)
    controls = measured_controls(bench, models, measure)
    for one in controls:
        one.against(chosen, bench.judge)
    before, after = ({"loss": one.loss, "metric": one.metric} for one in (start, chosen))
    return SweepTest(measure.data.describe(), before, after, measure.facts["examples"], chosen.error, controls)


def conclude(result: Sweep, judge: Judge, way: str | None) -> None:
    """Enter what came out: whether the best merge is better than the best of its parents, or one should be kept.
    `way` names the way of merging, where several were tried."""
    test = result.test
    controls = (result.controls if test is None else test.controls) or []
    rated = [one for one in controls if one.gain is not None]
    if not rated:
        result.says = "No model could be measured beside the best merge, so nothing is known of what merging gains."
        return
    rival = judge.best(rated)
    assert rival.gain is not None
    merged = judge.value(result.best) if test is None else float(test.best[result.by] or math.nan)
    result.says = sentence(
        rival, judge.value(rival), merged, "loss" if result.by == "loss" else result.metric_name or "metric",
        _place(result.best.parameters, way), "the data of the search" if test is None else "the test part",
    )  # fmt: skip
    result.keep = rival.name if not rival.gain > 0 else None


def _place(values: Values, way: str | None) -> str:
    """
    >>> _place({"t": 0.5}, None), _place({"t": 0.5}, "slerp"), _place({}, "mean")
    ('t=0.5', 'slerp, t=0.5', 'mean')
    >>> _place(dict.fromkeys("abcd", 1.0), None)
    '4 numbers, see best'
    """
    if way and not values:
        return way
    numbers = describe_values(values) if len(values) <= FEW else f"{len(values)} numbers, see best"
    return f"{way}, {numbers}" if way else numbers


def sentence(rival: Contestant, alone: float, merged: float, by: str, values: str, where: str) -> str:
    """
    >>> rival = Contestant("model-b", "model", 0.7, 0.8, None, gain=-0.05, gain_error=0.01)
    >>> sentence(rival, 0.7, 0.75, "loss", "t=0.5", "the test part")
    'Keep model-b: on the test part its loss is 0.7, and that of the best merge 0.75 (t=0.5), worse by 0.05 ± 0.01.'
    """
    assert rival.gain is not None
    gain, error = rival.gain, rival.gain_error
    size = f"{abs(gain):.3g}" + (f" ± {error:.2g}" if error is not None else "")
    numbers = f"on {where} its {by} is {alone:.4g}, and that of the best merge {merged:.4g} ({values})"
    base = "the base " if rival.role == "base" else ""
    if error is not None and abs(gain) <= CLEAR * error:
        advice = "keep it, which needs no merge" if gain <= 0 else "the merge may gain nothing"
        way = "worse" if gain <= 0 else "better"
        return (
            f"No clear difference from {base}{rival.name}: {numbers}, {way} by {size}, within two standard errors; "
            f"{advice}."
        )
    if gain <= 0:
        return f"Keep {base}{rival.name}: {numbers}, worse by {size}."
    of = "the base" if rival.role == "base" else "the best single model"
    return f"The best merge beats {of}, {rival.name}: {numbers}, better by {size}."

"""From the verdict to one sentence, to a recipe that runs, and to the command that runs it."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from isomerge.checking.tokenizers import TokenizerComparison
from isomerge.checkpoint import Checkpoint
from isomerge.errors import IsomergeError
from isomerge.kinship import IDENTICAL, SIBLINGS, STRANGERS
from isomerge.merging.plan.tensors import plan_tensors
from isomerge.merging.recipe import ModelReference, Recipe, recipe_of
from isomerge.merging.recipe.problem_list import RecipeError
from isomerge.text import short_names

SAME = 0.9  # of the squared distance that alignment takes away: these were one model, or siblings
EXAMPLES = 2000
REFINE = 100  # steps on each block: what models trained apart gain most by
DENSITY = 0.5
CONFLICT = 0.3  # of the weights that both changed: from there on signs are elected (TIES) instead of added up
NEARLY_PARALLEL = 0.99  # above this cosine the arc between two models is the line
MORE = (
    "with data (`data`: images or texts like those they were trained on, without labels) the suggestion is "
    "reconstruct, which brings together what their layers compute and not the weights alone"
)
ONE_KIND = 0.9  # of all tokens shared: these vocabularies are of one kind, and their union is worth having


@dataclass(frozen=True)
class Advice:
    """A method with its options, and why."""

    method: str
    why: str
    more: str | None = None
    """What else would help."""
    base: str | None = None
    options: dict[str, Any] | None = None
    align: bool | dict[str, Any] = False
    data: list[dict[str, Any]] | None = None
    """One for all models, or one for each."""


def advise(
    verdict: str,
    models: Sequence[str],
    *,
    base: str | None,
    cosine: float | None,
    conflict: float | None,
    level: str,
    data: Sequence[str] = (),
    one_vocabulary: bool,
    by_features: bool,
    gain: float,
) -> Advice | None:
    """What to try first. `gain` is the share of the squared distance that an alignment takes away; `data` are paths,
    each model's or one for all. `by_features`: joint features can bring their vocabularies together."""
    if len(data) > 1 and (one_vocabulary if verdict == SIBLINGS else verdict == STRANGERS and by_features):
        why = "each model has data of its own: there the merged model follows it, feature by feature"
        return reconstruction(data, why)
    aligned: bool | dict[str, Any] = True if level == "full" else {"level": level}
    if verdict == STRANGERS:
        one = gain > SAME
        who = "one model or siblings with units in another order" if one else "strangers share no basis"
        if not one_vocabulary:
            who = who if one else "strangers with different tokens"
            if data and by_features and not one:
                return reconstruction(
                    data, f"{who}: each reads the texts in its own tokens, and the features are joined"
                )
            why = f"{who}: each is moved next to the first, then rows are matched by their token"
            return Advice("linear", why, MORE if by_features and not one else None, align=aligned)
        if one:
            return Advice("linear", f"{who}: their weights suffice to bring them back, then their mean", align=aligned)
        if data:
            why = f"{who}: of their features side by side, those that matter most on data are kept"
            return reconstruction(data, why, features="joint", refine=REFINE)
        why = f"{who}: each is moved next to the first by its weights, then averaged"
        return Advice("linear", why, MORE, align=aligned)
    if verdict != SIBLINGS:
        return None
    if base is not None and len(models) > 1:
        if len(models) > 2 or (conflict or 0.0) >= CONFLICT:
            why = "their changes pull some weights in opposite directions: TIES keeps the largest and elects a sign"
            return Advice("ties", why, base=base, options={"weight": 1.0, "density": DENSITY})
        weight = round(1 / math.sqrt(len(models)), 1)
        why = "their changes hardly contradict each other: add them to the base, each a little shortened"
        return Advice("task_arithmetic", why, base=base, options={"weight": weight})
    if len(models) == 2 and cosine is not None and cosine < NEARLY_PARALLEL:
        why = "two siblings some way apart: the arc between them keeps their size"
        return Advice("slerp", why, base=models[0], options={"t": 0.5})
    return Advice("linear", "siblings: what they share stays, and the rest is averaged", options={"weight": 1.0})


def reconstruction(data: Sequence[str], why: str, **options: Any) -> Advice:
    return Advice("reconstruct", why, options=options, data=[{"path": path, "limit": EXAMPLES} for path in data])


def tokenizer_of(advice: Advice, models: Sequence[str], tokens: TokenizerComparison) -> str | None:
    """Whose tokens the result is to have, where they are not the same and the method does not say so."""
    if tokens.vocabulary is not False or advice.method == "reconstruct":
        return None
    if (tokens.shared or 0.0) >= ONE_KIND:
        return "union"
    return "base" if advice.base else models[0]


def make_recipe(
    advice: Advice, checkpoints: Sequence[Checkpoint], base: Checkpoint | None, *, tokens: TokenizerComparison,
    dtypes: Sequence[str],
) -> tuple[str | None, list[str], list[str]]:  # fmt: skip
    """The recipe as YAML, or None and what stands in its way; and notes on what it does. It is planned against the
    headers before it is shown."""
    everyone = [*checkpoints, *([base] if base is not None else [])]
    names = [c.name for c in checkpoints]
    settings: dict[str, Any] = {"tokenizer": tokenizer_of(advice, names, tokens)}
    if tokens.chat_template is False:
        settings["chat_template"] = "auto"
    if len(set(dtypes)) > 1:
        settings["dtype"] = Counter(dtypes).most_common(1)[0][0]
    try:
        recipe = recipe_of(
            _besides(names, advice.base), advice.method, advice.base, advice.options, advice.align,
            data=_one_or_each(advice.data), **settings,
        )  # fmt: skip
        notes = _plan(recipe, everyone)
    except RecipeError as error:
        return None, [f"in the way of a merge: {text.rstrip('.')}" for _, text in error.problems], []
    except IsomergeError as error:
        return None, [f"in the way of a merge: {error}"], []
    head = "".join(f"# {text}\n" for text in (advice.why, advice.more) if text)
    return head + recipe.to_yaml(), [], notes


def _one_or_each(data: list[dict[str, Any]] | None) -> Any:
    return data[0] if data and len(data) == 1 else data


def _besides(models: Sequence[str], base: str | None) -> list[str]:
    """The base counts once, as the base."""
    return [m for m in models if m != base]


def _plan(recipe: Recipe, checkpoints: Sequence[Checkpoint]) -> list[str]:
    known = {ModelReference.parse(c.name): c for c in checkpoints}
    return plan_tensors(recipe, {model: known[model] for model in recipe.referenced_models()}).notes


def command(advice: Advice, models: Sequence[str], tokens: TokenizerComparison) -> str:
    """The command line that does the same, where flags can say it."""
    if tokens.chat_template is False:
        return "isomerge check … --recipe recipe.yml, then isomerge merge recipe.yml -o merged"
    named = _besides(models, advice.base)
    parts = ["isomerge", "merge", *named, "--method", advice.method]
    parts += ["--base", advice.base] if advice.base else []
    for key, value in (advice.options or {}).items():
        if (key, value) != ("weight", 1.0):
            parts += ["--weights", ",".join([str(value)] * len(named))] if key == "weight" else [f"--{key}", str(value)]
    if advice.align:
        parts += ["--align"]
        parts += ["--level", advice.align["level"]] if isinstance(advice.align, dict) else []
    for one in advice.data or ():
        parts += ["--data", one["path"]]
    parts += ["--limit", str(EXAMPLES)] if advice.data else []
    source = tokenizer_of(advice, models, tokens)
    parts += ["--tokenizer", source] if source else []
    return shlex.join([*parts, "-o", "merged"])


# --- the verdict in one sentence --------------------------------------------------------------------------------------
def sentence(
    models: Sequence[str],
    verdict: str,
    *,
    cosine: float | None,
    gain: float,
    one_vocabulary: bool,
    obstacles: list[str],
    safe: bool,
) -> str:
    """Who they are to each other, and what that means for a merge; `safe`: the mean of such siblings loses little."""
    who = listed(models)
    near = "" if cosine is None else f" (cosine {cosine:.3g})"
    if verdict == IDENTICAL:
        return f"{who} hold the same weights: there is nothing to merge."
    if obstacles:
        others = f", and {len(obstacles) - 1} more" if len(obstacles) > 1 else ""
        return f"{who} are {verdict}{near}, but cannot be merged as they are: {obstacles[0].rstrip('.')}{others}."
    tokens = "" if one_vocabulary else ", matching tokens by their text"
    if verdict == SIBLINGS:
        far = "" if safe else " They are far enough apart for their mean to fail."
        return (
            f"{who} are siblings{near}: merge them directly{tokens}; alignment would change nothing worth having.{far}"
        )
    if gain > SAME:
        return (
            f"{who} are one model or siblings with units in another order{near}, and alignment takes away "
            f"{100 * gain:.0f} % of what lies between them: align, then merge{tokens}."
        )
    return f"{who} are strangers{near}: align them before merging{tokens}, since their plain average would be noise."


def incompatible(models: Sequence[str], problems: Sequence[str], what: str = "merged") -> str:
    """The same for models that do not fit together; `what` cannot be done with them."""
    first, more = problems[0].split(". ")[0].rstrip("."), len(problems) - 1
    return f"{listed(models)} cannot be {what}: {first}{f', and {more} more' if more else ''}."


def listed(models: Sequence[str]) -> str:
    """Their short names in a sentence.

    >>> listed(["runs/a", "runs/b"])
    'a and b'
    """
    names = short_names(models)
    return f"{', '.join(names[:-1])} and {names[-1]}"

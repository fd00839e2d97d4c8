"""From the verdict to a recipe that runs, and to the command that runs it."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from isomerge.checkpoint import Checkpoint
from isomerge.errors import IsomergeError
from isomerge.merge.recipe import ModelReference, Recipe, recipe_of
from isomerge.merge.recipe.plan import plan_tensors
from isomerge.merge.recipe.write import to_yaml

DATA = "PATH/TO/DATA"
EXAMPLES = 2000
DENSITY = 0.5
CONFLICT = 0.3  # of the weights that both changed: from there on signs are elected (TIES) instead of added up
NEARLY_PARALLEL = 0.99  # above this cosine the arc between two models is the line
RELATED = 0.9  # of all tokens shared: these vocabularies are of one kind, and their union is worth having


@dataclass(frozen=True)
class Advice:
    """A method with its options, and why."""

    method: str
    why: str
    base: str | None = None
    options: dict[str, Any] | None = None
    align: bool | dict[str, Any] = False
    data: dict[str, Any] | None = None


def advise(
    verdict: str,
    models: Sequence[str],
    *,
    base: str | None,
    cosine: float | None,
    conflict: float | None,
    level: str,
    data: str | None,
    one_vocabulary: bool,
) -> Advice | None:
    """What to try first."""
    aligned: bool | dict[str, Any] = True if level == "full" else {"level": level}
    if verdict == "strangers" and not one_vocabulary:
        why = "strangers with different tokens: each is moved next to the first, then rows are matched by their token"
        return Advice("linear", why, align=aligned)
    if verdict == "strangers":
        path = {"path": data or DATA, "limit": EXAMPLES}
        why = "strangers share no basis: each is moved next to the first, then their features are averaged on data"
        return Advice("reconstruct", why, align=aligned, data=path)
    if verdict != "siblings":
        return None
    if base is not None and len(models) > 1:
        if len(models) > 2 or (conflict or 0.0) >= CONFLICT:
            why = "their changes pull some weights in opposite directions: TIES keeps the largest and elects a sign"
            return Advice("ties", why, base, {"weight": 1.0, "density": DENSITY})
        weight = round(1 / math.sqrt(len(models)), 1)
        why = "their changes hardly contradict each other: add them to the base, each a little shortened"
        return Advice("task_arithmetic", why, base, {"weight": weight})
    if len(models) == 2 and cosine is not None and cosine < NEARLY_PARALLEL:
        return Advice(
            "slerp", "two siblings some way apart: the arc between them keeps their size", models[0], {"t": 0.5}
        )
    return Advice("linear", "siblings close to each other: their mean is between them", None, {"weight": 1.0})


def make_recipe(
    advice: Advice, checkpoints: Sequence[Checkpoint], base: Checkpoint | None, *, words: dict[str, Any],
    dtypes: Sequence[str],
) -> tuple[str | None, str | None]:  # fmt: skip
    """The recipe as YAML, or None and what stands in its way. It is planned against the headers before it is shown."""
    everyone = [*checkpoints, *([base] if base is not None else [])]
    settings: dict[str, Any] = {}
    if words["vocabulary"] is False:
        settings["tokenizer"] = "union" if (words["shared"] or 0.0) >= RELATED else "base"
    if words["chat_template"] is False:
        settings["chat_template"] = "auto"
    if len(set(dtypes)) > 1:
        settings["dtype"] = Counter(dtypes).most_common(1)[0][0]
    names = [c.name for c in checkpoints]
    merged = [n for n in names if n != advice.base] if advice.method == "slerp" else names
    try:
        recipe = recipe_of(
            merged, advice.method, advice.base, advice.options, advice.align, data=advice.data, **settings
        )
        _plan(recipe, everyone)
    except IsomergeError as error:
        return None, str(error)
    head = f"# {advice.why}\n"
    if advice.data and advice.data["path"] == DATA:
        head += f"# {DATA}: images or texts like those the models were trained on; labels are not needed\n"
    return head + to_yaml(recipe), None


def _plan(recipe: Recipe, checkpoints: Sequence[Checkpoint]) -> None:
    known = {ModelReference.parse(c.name): c for c in checkpoints}
    plan_tensors(recipe, {model: known[model] for model in recipe.referenced_models()})


def command(advice: Advice, models: Sequence[str], settings_needed: bool) -> str:
    """The command line that does the same, where flags can say it."""
    if settings_needed:
        return "isomerge check … --recipe recipe.yml, then isomerge merge recipe.yml -o merged"
    named = [m for m in models if m != advice.base] if advice.method == "slerp" else list(models)
    words = ["isomerge", "merge", *named, "--method", advice.method]
    words += ["--base", advice.base] if advice.base else []
    for key, value in (advice.options or {}).items():
        if (key, value) != ("weight", 1.0):
            words += ["--weights", ",".join([str(value)] * len(named))] if key == "weight" else [f"--{key}", str(value)]
    if advice.align:
        words += ["--align"]
        words += ["--level", advice.align["level"]] if isinstance(advice.align, dict) else []
    if advice.data:
        words += ["--data", advice.data["path"], "--limit", str(advice.data["limit"])]
    return shlex.join([*words, "-o", "merged"])

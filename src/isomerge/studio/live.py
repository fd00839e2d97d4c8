"""A recipe while it is typed: what is wrong with it and where, or what it would take."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import isomerge
from isomerge.checkpoint.hub import looks_like_hub_id
from isomerge.errors import CheckpointError, IsomergeError
from isomerge.merging.recipe import Recipe, load_recipe
from isomerge.merging.recipe.problem_list import RecipeError
from isomerge.studio.recipe_form import RecipeForm, read_form, write_form

_planning = threading.Lock()
"""A plan times a small trial: two at once would slow each other down, and both numbers would be wrong."""


def judged(text: str, form: RecipeForm | None = None) -> dict[str, Any]:
    """The text with the form's part written into it, its form, its problems with their lines, and its plan."""
    if form is not None:
        text = write_form(text, form)
    shown = read_form(text)
    result: dict[str, Any] = {
        "text": text, "form": shown and shown.model_dump(), "problems": [], "plan": None, "remote": [],
    }  # fmt: skip
    try:
        recipe = load_recipe(f"{text}\n")
    except RecipeError as error:
        return result | {"problems": [{"line": line, "text": said} for line, said in error.problems]}
    try:
        with _planning:
            return result | {"plan": isomerge.plan(recipe).to_dict()}
    except RecipeError as error:
        return result | {"problems": [{"line": line, "text": said} for line, said in error.problems]}
    except IsomergeError as error:
        # The page is offline, so a model of the hub that is not in the cache is no mistake.
        if isinstance(error, CheckpointError) and (remote := _remote(recipe)):
            return result | {"remote": remote}
        return result | {"problems": [{"line": None, "text": str(error)}]}


def _remote(recipes: list[Recipe]) -> list[str]:
    """Models that can only be on the hub."""
    paths = {model.path for recipe in recipes for model in recipe.referenced_models()}
    return sorted(path for path in paths if looks_like_hub_id(path) and not Path(path).exists())

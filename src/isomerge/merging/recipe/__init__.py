"""Recipes: what is to be merged, and how. Read, validated once, walked in one place (entries.py).

mergekit's recipes run unchanged; docs/recipes.md is the reference.
"""

from isomerge.merging.recipe.definitions import Recipe, TokenizerSettings
from isomerge.merging.recipe.load import load_recipe, recipe_of
from isomerge.merging.recipe.model_reference import ModelReference
from isomerge.merging.recipe.problem_list import RecipeError
from isomerge.merging.recipe.settings import AlignSettings, CalibrateSettings, DataSettings, RepairSettings

__all__ = [
    "AlignSettings",
    "CalibrateSettings",
    "DataSettings",
    "ModelReference",
    "Recipe",
    "RecipeError",
    "RepairSettings",
    "TokenizerSettings",
    "load_recipe",
    "recipe_of",
]

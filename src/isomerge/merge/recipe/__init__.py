"""Recipes: what is to be merged, and how, down to each tensor.

    text or file ── load ──> Recipe ── plan ──> one TensorPlan per tensor of the output

mergekit's recipes run unchanged; docs/recipes.md is the reference.
"""

from isomerge.merge.recipe.align_settings import AlignSettings
from isomerge.merge.recipe.build import recipe_of
from isomerge.merge.recipe.data_settings import CalibrateSettings, DataSettings, RepairSettings
from isomerge.merge.recipe.definitions import Recipe, TokenizerSettings
from isomerge.merge.recipe.load import load_recipe
from isomerge.merge.recipe.plan import Input, RecipePlan, TensorPlan, explain, plan_tensors
from isomerge.merge.recipe.problems import RecipeError
from isomerge.merge.recipe.reference import ModelReference

__all__ = [
    "AlignSettings",
    "CalibrateSettings",
    "DataSettings",
    "Input",
    "ModelReference",
    "Recipe",
    "RecipeError",
    "RecipePlan",
    "RepairSettings",
    "TensorPlan",
    "TokenizerSettings",
    "explain",
    "load_recipe",
    "plan_tensors",
    "recipe_of",
]

"""Recipes: what is to be merged, and how, down to each tensor.

    text or file ── load ──> Recipe ── plan ──> one TensorPlan per tensor of the output

mergekit's recipes run unchanged; docs/recipes.md is the reference.
"""

from isomerge.merging.recipe.align_settings import AlignSettings
from isomerge.merging.recipe.build import recipe_of
from isomerge.merging.recipe.data_settings import CalibrateSettings, DataSettings, RepairSettings
from isomerge.merging.recipe.definitions import Recipe, TokenizerSettings
from isomerge.merging.recipe.load import load_recipe
from isomerge.merging.recipe.plan import Input, RecipePlan, TensorPlan, explain, plan_tensors
from isomerge.merging.recipe.problems import RecipeError
from isomerge.merging.recipe.reference import ModelReference

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

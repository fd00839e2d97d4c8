"""Statistics for methods that weigh by what data show of each model: measured on the models as they are merged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from isomerge.calibration import Statistics, calibrate
from isomerge.checkpoint import Checkpoint
from isomerge.errors import RequestError
from isomerge.merging.data_sets import DataSets
from isomerge.merging.methods import METHODS
from isomerge.merging.methods.method import MEASURED
from isomerge.merging.plan.tensor_plan import TensorPlan
from isomerge.merging.recipe import CalibrateSettings, DataSettings, ModelReference, Recipe
from isomerge.merging.recipe.entries import parameter_blocks
from isomerge.merging.run.rows import TensorSource
from isomerge.merging.run.sources import Stored
from isomerge.merging.statistics.moved import gram_source

if TYPE_CHECKING:
    from isomerge.merging.aligned import AlignedModels

OF_BASE = "base_importance"


@dataclass(frozen=True)
class Measured:
    """By model: what the method asks for."""

    statistics: Mapping[ModelReference, Statistics]
    models: Mapping[ModelReference, Checkpoint]

    def sources(self, plan: TensorPlan, shape: tuple[int, ...]) -> dict[str, list[TensorSource]]:
        """For each option that would name files, what they would have held for this tensor."""
        found: dict[str, list[TensorSource]] = {}
        for option in METHODS[plan.method].options:
            if MEASURED.get(option.name) == "gram":
                found[option.name] = self._grams(plan)
            elif option.name in MEASURED:
                found[option.name] = [self._information(i.model, i.tensor, shape) for i in plan.inputs]
            elif option.name == OF_BASE and plan.base is not None and plan.base.model in self.statistics:
                found[option.name] = [self._information(plan.base.model, plan.base.tensor, shape)]
        return found

    def _grams(self, plan: TensorPlan) -> list[TensorSource]:
        """Of what a linear map reads in each model; nothing for other tensors."""
        found = [gram_source(self.statistics[i.model], i.tensor, self.models[i.model], None) for i in plan.inputs]
        there: list[TensorSource] = [source for source in found if source is not None]
        if there and len(there) < len(found):
            raise RequestError(
                f"Merging '{plan.name}': the data of some of the models never reaches it. Use more, or other examples."
            )
        return there

    def _information(self, model: ModelReference, tensor: str, shape: tuple[int, ...]) -> TensorSource:
        stored = self.statistics[model].stored
        if tensor not in stored.tensors or stored.tensors[tensor].shape != shape:
            raise RequestError(
                f"Merging '{tensor}' by Fisher information: no gradient of {model} has this name and shape {shape}. "
                "Merge models that load in their stock class as they are."
            )
        return Stored(stored, tensor)


def measures_of(recipe: Recipe) -> str | None:
    """What has to be measured on data: nothing where files are named, or where the method asks for nothing."""
    method = METHODS.get(recipe.merge_method)
    wanted = method.measures if method is not None else None
    has_data = recipe.data is not None or any(entry.data is not None for entry in recipe.entries())
    return wanted if has_data and not _names_files(recipe) else None


def measure(
    recipe: Recipe,
    models: Mapping[ModelReference, Checkpoint],
    data: DataSets,
    *,
    aligned: AlignedModels | None = None,
    device: str = "cpu",
    progress: Callable[[int, int, str], None] | None = None,
) -> Measured | None:
    """Run every model that counts over its data; with alignment, the aligned model."""
    what = measures_of(recipe)
    if what is None:
        return None
    settings = recipe.calibrate or CalibrateSettings.model_validate({})
    statistics: dict[ModelReference, Statistics] = {}
    for reference in counting(recipe):
        wanted = measuring_data(recipe, reference)
        if wanted is None:
            raise RequestError(f"Merging with {recipe.merge_method}: {reference} has no data to be measured on.")
        own = models[reference]
        labels = what == "fisher" and settings.fisher == "empirical"
        statistics[reference] = calibrate(
            own if aligned is None else aligned.as_checkpoint(own),
            data.open(wanted).passes(own, labels=labels),
            what={what}, fisher=settings.fisher, samples=settings.samples, only=settings.only, device=device,
            seed=recipe.seed, progress=progress,
        )  # fmt: skip
    return Measured(statistics, models)


def measuring_data(recipe: Recipe, model: ModelReference) -> DataSettings | None:
    """What a model is measured on; `calibrate` may want fewer examples, or more."""
    found = recipe.data_of(model)
    limit = recipe.calibrate.limit if recipe.calibrate else None
    return found.model_copy(update={"limit": limit}) if found is not None and limit is not None else found


def _names_files(recipe: Recipe) -> bool:
    blocks = [block for _, block, _ in parameter_blocks(recipe)]
    return any(block.get(option) is not None for block in blocks for option in MEASURED)


def counting(recipe: Recipe) -> list[ModelReference]:
    """The models to measure. A base counts only for a method that cannot do without it and weighs it too."""
    method = METHODS[recipe.merge_method]
    base_counts = method.base == "required" and any(option.name == OF_BASE for option in method.options)
    without = method.base != "ignored" and not base_counts
    return [model for model in recipe.referenced_models() if not (without and model == recipe.base_model)]

"""Statistics for methods that weigh by what data show of each model: measured on the models as they are merged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from isomerge.calibration import Statistics, calibrate
from isomerge.checkpoint import Checkpoint
from isomerge.checkpoint.base import Progress
from isomerge.errors import RequestError
from isomerge.kinship import in_few_layers, sampled_rows
from isomerge.merging.aligned_tensors import AlignedTensors
from isomerge.merging.methods import METHODS
from isomerge.merging.methods.method import MEASURED
from isomerge.merging.moved_grams import gram_sources
from isomerge.merging.plan.tensor_plan import RecipePlan, TensorPlan
from isomerge.merging.recipe import CalibrateSettings, ModelReference, Recipe
from isomerge.merging.recipe_data import BASE_IMPORTANCE, DataSets, measured_models, measures_of, measuring_data
from isomerge.merging.run.jobs import Job
from isomerge.merging.run.rows import TensorSource
from isomerge.merging.run.sources import fitting_source

UNEVEN = 50.0
"""Times. Fine-tuned classifiers gained by Fisher merging up to 19 and lost from 86 on (benchmarks/paper/README.md)."""


@dataclass(frozen=True)
class MeasuredModels:
    """What the method asks for, by model: of the aligned models where they are aligned."""

    statistics: Mapping[ModelReference, Statistics]
    models: Mapping[ModelReference, Checkpoint]
    aligned: AlignedTensors | None = None

    def sources(self, plan: TensorPlan, shape: tuple[int, ...]) -> dict[str, list[TensorSource]]:
        """For each option that would name files, what they would have held for this tensor."""
        by_option: dict[str, list[TensorSource]] = {}
        longer = plan.longest is not None
        for option in METHODS[plan.method].options:
            if MEASURED.get(option.name) == "gram":
                by_option[option.name] = self._grams(plan)
            elif option.name in MEASURED:
                by_option[option.name] = [self._information(i.model, i.tensor, shape, longer) for i in plan.inputs]
            elif option.name == BASE_IMPORTANCE and plan.base is not None and plan.base.model in self.statistics:
                by_option[option.name] = [self._information(plan.base.model, plan.base.tensor, shape, longer)]
        return by_option

    def _grams(self, plan: TensorPlan) -> list[TensorSource]:
        """Of what a linear map reads in each model; nothing for other tensors."""
        grams = gram_sources(
            [self.statistics[i.model] for i in plan.inputs],
            [i.tensor for i in plan.inputs],
            [self.models[i.model] for i in plan.inputs],
            self.aligned,
            measured_aligned=True,
            solve_biases=bool(plan.options.get("solve_biases")),
        )
        known: list[TensorSource] = [source for source in grams if source is not None]
        if known and len(known) < len(grams):
            raise RequestError(
                f"Merging '{plan.name}': the data of some of the models never reaches it. Use more, or other examples."
            )
        return known

    def _information(self, model: ModelReference, tensor: str, shape: tuple[int, ...], longer: bool) -> TensorSource:
        stored = self.statistics[model].stored
        source = fitting_source(stored, tensor, shape, longer=longer)
        if source is None:
            raise RequestError(
                f"Merging '{tensor}' by Fisher information: no gradient of {model} has this name and shape {shape}. "
                "Merge models that load in their stock class as they are."
            )
        return source


def measure(
    recipe: Recipe,
    models: Mapping[ModelReference, Checkpoint],
    data: DataSets,
    *,
    aligned: AlignedTensors | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> MeasuredModels | None:
    """Run every model that counts over its data; with alignment, the aligned model."""
    what = measures_of(recipe)
    if what is None:
        return None
    settings = recipe.calibrate or CalibrateSettings.model_validate({})
    statistics: dict[ModelReference, Statistics] = {}
    for reference in measured_models(recipe):
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
    return MeasuredModels(statistics, models, aligned)


def name_uneven(jobs: Iterable[Job], plan: RecipePlan) -> list[str]:
    """A note where models have Fisher information of other orders of magnitude and nobody asked to normalize: the
    merge is nearly the one that has most. From some rows of three layers."""
    weighed = {job.name: job for job in jobs if _by_information(job) and job.name in plan.tensors}
    sums: dict[str, float] = {}
    for name in in_few_layers(weighed):
        job = weighed[name]
        of = zip(plan.tensors[name].inputs, job.option_tensors["importance"], job.options["weight"], strict=True)
        for given, information, weight in of:
            if weight:
                rows = sampled_rows(name, job.merged_shape)
                size = weight * sum(float(information.rows(*some).double().sum()) for some in rows)
                sums[str(given.model)] = sums.get(str(given.model), 0.0) + size
    if len(sums) < 2 or max(sums.values()) <= UNEVEN * min(sums.values()):
        return []
    most, least = max(sums, key=sums.__getitem__), min(sums, key=sums.__getitem__)
    times = f"about {sums[most] / sums[least]:,.0f} times" if sums[least] > 0 else "any number of times"
    return [
        f"the Fisher information of {most}, by its weight, is {times} that of {least}, so {least} barely contributes: "
        "confident models have little Fisher information. With `normalize` all models count alike"
    ]


def _by_information(job: Job) -> bool:
    named = job.method is not None and job.method.name == "fisher"
    return named and not job.options.get("normalize") and bool(job.option_tensors.get("importance"))

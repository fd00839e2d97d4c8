"""Files of tensors that a method's options name: importances of weights, or Gram matrices of their inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from isomerge.checkpoint import Checkpoint, open_checkpoint
from isomerge.errors import RequestError
from isomerge.merging.methods import METHODS
from isomerge.merging.plan.tensor_plan import TensorPlan
from isomerge.merging.recipe import ModelReference
from isomerge.merging.run.rows import TensorSource, gram_options
from isomerge.merging.run.sources import InputHashes, Stored

if TYPE_CHECKING:
    from isomerge.calibration import Statistics
    from isomerge.merging.aligned import AlignedModels


class TensorFiles:
    """Opens each file once. An option whose value is text names one."""

    def __init__(self) -> None:
        self.opened: dict[str, Checkpoint] = {}
        self._statistics: dict[str, Statistics] = {}

    def sources(
        self,
        plan: TensorPlan,
        shape: tuple[int, ...],
        hashes: InputHashes,
        *,
        models: Mapping[ModelReference, Checkpoint],
        aligned: AlignedModels | None = None,
    ) -> dict[str, list[TensorSource]]:
        """For every such option that is set, this tensor (or the Gram matrix of its inputs) from each of its files."""
        sources: dict[str, list[TensorSource]] = {}
        chosen = METHODS[plan.method]
        for option in chosen.options:
            value = plan.options.get(option.name)
            if option.kind is not str or value is None or value == [None] * len(plan.inputs):
                continue
            names = [given.tensor for given in plan.inputs] if option.per_model else [_name(plan)]
            files = value if option.per_model else [value]
            if option.name in gram_options(chosen.function):
                owners = [models[given.model] for given in plan.inputs]
                sources[option.name] = self._grams(files, names, owners, option.name, aligned)
                continue
            if aligned is not None:
                raise RequestError(
                    f"Merging with {plan.method} and align: importances belong to the weights as they were measured, "
                    "one number per weight, and a rotation mixes weights. Align the models first (isomerge align), "
                    "measure again, then merge."
                )
            sources[option.name] = [
                self._source(file, tensor, option.name, shape, hashes)
                for file, tensor in zip(files, names, strict=True)
            ]
        return sources

    def _grams(
        self, files: list[Any], names: list[str], models: list[Checkpoint], option: str, aligned: AlignedModels | None
    ) -> list[TensorSource]:
        """The Gram matrix of every model's inputs to this weight, in the basis the models are merged in; [] for a
        tensor that is no linear map. They move with the models, exactly."""
        from isomerge.merging.statistics.moved import gram_source

        if None in files:
            raise RequestError(f"Merging: '{option}' is given for some of the models only. Name a file for each.")
        known = [self._opened_statistics(file) for file in files]
        grams: list[TensorSource | None] = [
            gram_source(statistics, name, model, aligned)
            for statistics, name, model in zip(known, names, models, strict=True)
        ]
        there = [source for source in grams if source is not None]
        if there and len(there) < len(grams):
            lacking = [file for file, source in zip(files, grams, strict=True) if source is None]
            raise RequestError(
                f"Merging with '{option}': {', '.join(map(str, lacking))} has no Gram matrix of what '{names[0]}' "
                "reads, and another file has. Measure all models the same way (isomerge calibrate)."
            )
        return there

    def _opened_statistics(self, file: str) -> Statistics:
        from isomerge.calibration import open_statistics

        if file not in self._statistics:
            self._statistics[file] = open_statistics(file)
            self.opened[file] = self._statistics[file].stored
        return self._statistics[file]

    def _source(self, file: Any, tensor: str, option: str, shape: tuple[int, ...], hashes: InputHashes) -> TensorSource:
        if file is None:
            raise RequestError(f"Merging: '{option}' is given for some of the models only. Name a file for each.")
        if file not in self.opened:
            self.opened[file] = open_checkpoint(file)
        held: Mapping[str, Any] = self.opened[file].tensors
        if tensor not in held or held[tensor].shape != shape:
            state = f"{held[tensor].shape} there and {shape} in the models" if tensor in held else "not there"
            raise RequestError(
                f"Merging with '{option}' from {file}: tensor '{tensor}' is {state}. The file has to hold every tensor "
                "of the model, under its name and in its shape."
            )
        return Stored(self.opened[file], tensor, hashes)


def _name(plan: TensorPlan) -> str:
    return plan.base.tensor if plan.base else plan.inputs[0].tensor

"""Files of tensors that a method's options name: importances of weights, or Gram matrices of their inputs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from isomerge.calibration import Statistics, open_statistics
from isomerge.checkpoint import Checkpoint, open_checkpoint
from isomerge.errors import RequestError
from isomerge.merging.methods import METHODS
from isomerge.merging.moved_grams import gram_sources
from isomerge.merging.plan.tensor_plan import TensorPlan
from isomerge.merging.recipe import ModelReference
from isomerge.merging.run.rows import TensorSource, gram_options
from isomerge.merging.run.sources import InputHashes, fitting_source

if TYPE_CHECKING:
    from isomerge.merging.aligned_tensors import AlignedTensors


def named_statistics(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Statistics]]:
    """Options as a recipe can write them, and the statistics among them that were given as objects, by their name."""
    given: dict[str, Statistics] = {}

    def named(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [named(one) for one in value]
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if not isinstance(value, Statistics):
            return value
        name = value.name
        while given.get(name, value) is not value:
            name += "'"
        given[name] = value
        return name

    return {key: named(value) for key, value in options.items()}, given


class TensorFiles:
    """Opens each file once. An option whose value is text names one, or statistics that were given as an object."""

    def __init__(self, given: Mapping[str, Statistics] | None = None) -> None:
        self._given = dict(given or {})
        self.opened: dict[str, Checkpoint] = {}
        self._statistics: dict[str, Statistics] = {}

    def sources(
        self,
        plan: TensorPlan,
        shape: tuple[int, ...],
        hashes: InputHashes,
        *,
        models: Mapping[ModelReference, Checkpoint],
        aligned: AlignedTensors | None = None,
    ) -> dict[str, list[TensorSource]]:
        """For every such option that is set, this tensor (or the Gram matrix of its inputs) from each of its files."""
        sources: dict[str, list[TensorSource]] = {}
        chosen = METHODS[plan.method]
        for option in chosen.options:
            value = plan.options.get(option.name)
            if option.kind is not str or option.choices or value is None or value == [None] * len(plan.inputs):
                continue
            names = [given.tensor for given in plan.inputs] if option.per_model else [_name(plan)]
            files = value if option.per_model else [value]
            if option.name in gram_options(chosen.function):
                owners = [models[given.model] for given in plan.inputs]
                biases = bool(plan.options.get("solve_biases"))
                sources[option.name] = self._grams(files, names, owners, option.name, aligned, biases)
                continue
            if aligned is not None:
                raise RequestError(
                    f"Merging with {plan.method} and align: importances belong to the weights as they were measured, "
                    "one number per weight, and a rotation mixes weights. Align the models first (isomerge align), "
                    "measure again, then merge."
                )
            sources[option.name] = [
                self._source(file, tensor, option.name, shape, hashes, longer=plan.longest is not None)
                for file, tensor in zip(files, names, strict=True)
            ]
        return sources

    def _grams(
        self,
        files: list[Any],
        names: list[str],
        models: list[Checkpoint],
        option: str,
        aligned: AlignedTensors | None,
        solve_biases: bool,
    ) -> list[TensorSource]:
        """The Gram matrix of every model's inputs to this weight, in the basis the models are merged in; [] for a
        tensor that is no linear map. They move with the models, exactly."""
        if None in files:
            raise RequestError(f"Merging: '{option}' is given for some of the models only. Name a file for each.")
        known = [self._opened_statistics(file) for file in files]
        grams = gram_sources(known, names, models, aligned, solve_biases=solve_biases)
        there: list[TensorSource] = [source for source in grams if source is not None]
        if there and len(there) < len(grams):
            lacking = [file for file, source in zip(files, grams, strict=True) if source is None]
            raise RequestError(
                f"Merging with '{option}': {', '.join(map(str, lacking))} has no Gram matrix of what '{names[0]}' "
                "reads, and another file has. Measure all models the same way (isomerge calibrate)."
            )
        return there

    def _opened_statistics(self, file: str) -> Statistics:
        if file not in self._statistics:
            statistics = open_statistics(self._given.get(file, file))
            if "gram" not in statistics.info.get("what", ()):
                raise RequestError(
                    f"Merging with {statistics.name}: it holds {', '.join(statistics.info.get('what', ()))} and not "
                    "'gram'. Measure it again with isomerge calibrate --what gram."
                )
            self._statistics[file] = statistics
            self.opened[file] = statistics.stored
        return self._statistics[file]

    def _source(
        self, file: Any, tensor: str, option: str, shape: tuple[int, ...], hashes: InputHashes, *, longer: bool
    ) -> TensorSource:
        if file is None:
            raise RequestError(f"Merging: '{option}' is given for some of the models only. Name a file for each.")
        if file not in self.opened:
            self.opened[file] = self._given[file].stored if file in self._given else open_checkpoint(file)
        held: Mapping[str, Any] = self.opened[file].tensors
        source = fitting_source(self.opened[file], tensor, shape, hashes, longer=longer)
        if source is None:
            state = f"{held[tensor].shape} there and {shape} in the models" if tensor in held else "not there"
            raise RequestError(
                f"Merging with '{option}' from {file}: tensor '{tensor}' is {state}. The file has to hold every tensor "
                "of the model, under its name and in its shape."
            )
        return source


def _name(plan: TensorPlan) -> str:
    return plan.base.tensor if plan.base else plan.inputs[0].tensor

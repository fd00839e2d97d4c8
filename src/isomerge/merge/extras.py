"""Files of tensors that a method's options name, such as the importances of weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isomerge.checkpoint import Checkpoint, open_checkpoint
from isomerge.errors import RequestError
from isomerge.merge.group import Source
from isomerge.merge.methods import METHODS
from isomerge.merge.recipe import TensorPlan
from isomerge.merge.sources import InputHashes, Stored


class TensorFiles:
    """Opens each file once. An option whose value is text names one."""

    def __init__(self) -> None:
        self.opened: dict[str, Checkpoint] = {}

    def sources(self, plan: TensorPlan, shape: tuple[int, ...], hashes: InputHashes) -> dict[str, list[Source]]:
        """For every such option that is set, this tensor from each of its files."""
        found: dict[str, list[Source]] = {}
        for option in METHODS[plan.method].options:
            value = plan.options.get(option.name)
            if option.kind is not str or value is None or value == [None] * len(plan.inputs):
                continue
            names = [given.tensor for given in plan.inputs] if option.per_model else [_name(plan)]
            files = value if option.per_model else [value]
            found[option.name] = [
                self._source(file, tensor, option.name, shape, hashes)
                for file, tensor in zip(files, names, strict=True)
            ]
        return found

    def _source(self, file: Any, tensor: str, option: str, shape: tuple[int, ...], hashes: InputHashes) -> Source:
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

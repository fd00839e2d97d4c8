"""Write a moved model unit by unit: what is mapped over threads, or sent to other processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from isomerge.checkpoint import CastReport, TensorInfo
from isomerge.checkpoint.staged_tensors import TensorSink, write_tensor
from isomerge.symmetry.moved import MovedModel


@dataclass(frozen=True)
class WrittenTensor:
    name: str
    sha256: str
    lost: CastReport
    """By the cast to the written dtype."""


@dataclass(frozen=True)
class MovedTensors:
    """Makes and writes the tensors of one name of the specification: several files where experts are stacked."""

    moved: MovedModel
    plan: Mapping[str, TensorInfo]
    left: frozenset[str]
    """What no interrupted run has finished."""
    writer: TensorSink

    def units(self) -> list[str]:
        """In the plan's order."""
        model = self.moved.model
        names = [n for n in sorted(model.layouts) if any(file in self.left for file in model.files.get(n, (n,)))]
        return names + [name for name in model.extra if name in self.left]

    def __call__(self, name: str) -> list[WrittenTensor]:
        if name in self.moved.model.layouts:
            made = self.moved.made(name, self.plan)
        else:
            made = {name: (self.moved.model.checkpoint.read(name), CastReport())}
        return [
            WrittenTensor(file, write_tensor(self.writer, file, tensor), lost)
            for file, (tensor, lost) in made.items()
            if file in self.left
        ]

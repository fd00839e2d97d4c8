"""Any point of a curve or simplex as a checkpoint that loads in the stock class."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from isomerge.checkpoint import Checkpoint, TensorInfo, refuse_overwrite
from isomerge.checkpoint.memory import MemoryCheckpoint, saved_state
from isomerge.checkpoint.writer import Written, write_checkpoint
from isomerge.connectivity.curves.shapes import Shape
from isomerge.connectivity.curves.space import WeightSpace
from isomerge.errors import RequestError


@dataclass(frozen=True)
class CurvePoints:
    """The trained vertices with what it takes to write a point: the models that they came from."""

    space: WeightSpace
    shape: Shape
    models: Sequence[Checkpoint]

    def module(self, coordinates: Sequence[float]) -> Any:
        return self.space.put(self.shape.point(coordinates))

    def state(self, coordinates: Sequence[float]) -> dict[str, Tensor]:
        """By the names of the files of A, in its dtypes. What is no floating tensor is that of A."""
        module, first = self.module(coordinates), self.models[0]
        own = module.state_dict() if not self.space.mixture.config else saved_state(module, "a point of a curve")
        found = {name: tensor.detach().cpu().clone() for name, tensor in own.items()}
        dtypes = {name: info.dtype for name, info in first.tensors.items()}
        usual = next((d for d in dtypes.values() if d.is_floating_point), None)
        for name, tensor in found.items():
            if tensor.is_floating_point():
                found[name] = tensor.to(dtypes.get(name, usual or tensor.dtype))
        return found

    def checkpoint(self, coordinates: Sequence[float]) -> Checkpoint:
        """In memory, to be merged, aligned or measured like any model."""
        config = {**self.models[0].config, **self._changes()}
        return MemoryCheckpoint(_name(coordinates), self.state(coordinates), config, beside=self.models[0])

    def save(self, coordinates: Sequence[float], out: str | os.PathLike[str], *, force: bool) -> Written:
        first, state = self.models[0], self.state(coordinates)
        if not self.space.mixture.config:
            raise RequestError(
                f"Writing {_name(coordinates)} into {out}: the models have no config.json, so no stock class could "
                "load it. Use checkpoint() and its tensors."
            )
        refuse_overwrite(Path(out), self.models)
        plan = {name: TensorInfo.of(tensor) for name, tensor in sorted(state.items())}
        produce = ((name, state[name].contiguous()) for name in plan)
        return write_checkpoint(
            out, plan, produce, config=self._changes(), donor=first, force=force, inputs=self.models
        )

    def _changes(self) -> dict[str, Any]:
        before, after = self.models[0].config, self.space.mixture.config
        return {key: value for key, value in after.items() if key not in before or before[key] != value}


def _name(coordinates: Sequence[float]) -> str:
    return f"the point {', '.join(f'{x:g}' for x in coordinates)}"

"""The tensors of aligned models as a merge reads them: each next to the anchor, unrounded, by the donor's names."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from isomerge.alignment.family import AlignedFamily
from isomerge.checkpoint import Checkpoint, TensorInfo
from isomerge.checkpoint.memory import MemoryCheckpoint
from isomerge.errors import RequestError
from isomerge.merging.run.rows import TensorSource
from isomerge.merging.run.sources import Computed, Stored
from isomerge.symmetry.moved import MovedModel


class AlignedTensors:
    """Reads the models of a family under the names that `donor`, one of them or their anchor, has on disk."""

    def __init__(self, family: AlignedFamily, donor: Checkpoint) -> None:
        family.require_one_gauge()
        self.family, self.donor = family, donor
        models = [*(member.source.checkpoint for member in family.members), donor]
        self.moves: dict[Checkpoint, MovedModel] = {model: family.moved(model) for model in models}
        self.own = self.moves[donor]
        self.plan = self.own.plan(None)
        """Every tensor of the result: those of the donor, and the table that a rotated stream unties."""
        self._tensor_of = {
            file: name for name in self.own.model.layouts for file in self.own.model.files.get(name, (name,))
        }
        self._stacks: dict[tuple[int, str], dict[str, Tensor]] = {}
        self._stacking = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stacks": {}, "_stacking": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= {**state, "_stacking": threading.Lock()}

    @property
    def config_changes(self) -> dict[str, Any]:
        return dict(self.own.model.architecture.untied_config)

    @property
    def notes(self) -> list[str]:
        """What the solver noted, and whether a table had to be untied."""
        untied = ["input and output table were tied and are now separate, since the stream was rotated"]
        return self.family.solver_notes() + (untied if self.config_changes else [])

    @property
    def record(self) -> dict[str, Any]:
        """What the record of a merge says of the alignment."""
        return {"anchor": self.donor.name, **self.family.record()}

    def tied_to(self, name: str) -> str | None:
        """The stored tensor whose copy this is, for a table that was untied."""
        tied = self.own.model.architecture.tied.get(self._tensor_of.get(name, name))
        return self.own.model.files[tied[0]][0] if tied and name not in self.donor.tensors else None

    def source(self, checkpoint: Checkpoint, file: str) -> TensorSource:
        """A model's tensor in the anchor's basis; what no symmetry touches comes from the file."""
        if file not in self._tensor_of:
            return self._own_source(checkpoint, file)
        move, name = self.moves[checkpoint], self._tensor_of[file]
        layout = move.model.layouts.get(name)
        info = self.plan[file]
        if layout is None:
            raise RequestError(f"Merging with alignment: {checkpoint.name} has no '{name}'. Use models of one kind.")
        if move.stays(name) and move.model.files[name] == self.own.model.files.get(name):
            return Stored(checkpoint, file)
        single = self.own.model.files.get(name, (name,)) == (file,)
        shape = tuple(layout.shape) if single else info.shape
        label = f"tensor '{file}' of {checkpoint.name}, aligned"
        return Computed(TensorInfo(shape, info.dtype), label, partial(self._part, move, name, file))

    def tensors(self, checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
        """A whole model in the anchor's basis, one tensor at a time."""
        for file in self.plan:
            source = self.source(checkpoint, file)
            yield file, source.rows(0, source.info.shape[0] if source.info.shape else 1).cpu()
            if hasattr(source, "release"):
                source.release()

    def as_checkpoint(self, checkpoint: Checkpoint) -> Checkpoint:
        """The same in memory, to be run on data: in float32, or float64 where the model is."""
        wide = any(info.dtype == torch.float64 for info in checkpoint.tensors.values())
        state = {}
        for file, tensor in self.tensors(checkpoint):
            dtype = tensor.dtype if not tensor.is_floating_point() else torch.float64 if wide else torch.float32
            state[file] = torch.empty(tensor.shape, dtype=dtype).copy_(tensor)
        return MemoryCheckpoint(f"{checkpoint.name}, aligned", state, {**checkpoint.config, **self.config_changes})

    def _own_source(self, checkpoint: Checkpoint, file: str) -> TensorSource:
        """A tensor that the anchor does not store, such as the head of an untied model beside a tied one."""
        move = self.moves[checkpoint]
        for name, layout in move.model.layouts.items():
            if file in move.model.files.get(name, (name,)) and not (name in move.model.files and move.stays(name)):
                info = TensorInfo(tuple(layout.shape), checkpoint.tensors[file].dtype)
                label = f"tensor '{file}' of {checkpoint.name}, aligned"
                return Computed(info, label, partial(_part_of, move, name, file))
        return Stored(checkpoint, file)  # no symmetry touches it

    def _part(self, move: MovedModel, name: str, file: str) -> Tensor:
        files = self.own.model.files.get(name, (name,))
        if len(files) == 1:
            return self.own.model.split(name, move.tensor(name))[file]
        # Experts are solved as one stack and stored apart: make the stack once and hand out its parts.
        with self._stacking:
            key = (id(move), name)
            if key not in self._stacks:
                for other in [k for k in self._stacks if k[0] == id(move)]:
                    del self._stacks[other]
                self._stacks[key] = dict(self.own.model.split(name, move.tensor(name)))
            return self._stacks[key][file]


def _part_of(move: MovedModel, name: str, file: str) -> Tensor:
    return move.model.split(name, move.tensor(name))[file]

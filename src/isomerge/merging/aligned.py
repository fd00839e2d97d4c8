"""Alignment inside a merge: every model moved next to the anchor, tensor by tensor, unrounded."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from isomerge.alignment.api import align_family
from isomerge.alignment.record import space_moves
from isomerge.checkpoint import Checkpoint, TensorInfo
from isomerge.checkpoint.memory import MemoryCheckpoint
from isomerge.errors import RequestError
from isomerge.merging.run.rows import TensorSource
from isomerge.merging.run.sources import Computed, Stored
from isomerge.symmetry.moved import MovedModel


@dataclass
class AlignedModels:
    """Models in the anchor's basis, under the names the anchor has on disk."""

    anchor: Checkpoint
    own: MovedModel
    moves: Mapping[Checkpoint, MovedModel]
    notes: list[str]
    record: dict[str, Any]
    _plan: dict[str, TensorInfo] | None = None
    _tensor_of: dict[str, str] = field(default_factory=dict)
    _stacks: dict[tuple[int, str], dict[str, Tensor]] = field(default_factory=dict)
    _stacking: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        for name in self.own.model.layouts:
            for file in self.own.model.files.get(name, (name,)):
                self._tensor_of[file] = name

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stacks": {}, "_stacking": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= {**state, "_stacking": threading.Lock()}

    def plan(self) -> dict[str, TensorInfo]:
        """Every tensor of the result: those of the anchor, and the table that a rotated stream unties."""
        if self._plan is None:
            self._plan = self.own.plan(None)
        return self._plan

    def tied_to(self, name: str) -> str | None:
        """The stored tensor whose copy this is, for a table that was untied."""
        tied = self.own.model.architecture.tied.get(self._tensor_of.get(name, name))
        return self.own.model.files[tied[0]][0] if tied and name not in self.anchor.tensors else None

    @property
    def config_changes(self) -> dict[str, Any]:
        return dict(self.own.model.architecture.untied_config)

    def source(self, checkpoint: Checkpoint, file: str) -> TensorSource:
        """A model's tensor in the anchor's basis; what no symmetry touches comes from the file."""
        if file not in self._tensor_of:
            return self._own_source(checkpoint, file)
        move, name = self.moves[checkpoint], self._tensor_of[file]
        layout = move.model.layouts.get(name)
        info = self.plan()[file]
        if layout is None:
            raise RequestError(f"Merging with alignment: {checkpoint.name} has no '{name}'. Use models of one kind.")
        if move.stays(name) and move.model.files[name] == self.own.model.files.get(name):
            return Stored(checkpoint, file)
        single = self.own.model.files.get(name, (name,)) == (file,)
        shape = tuple(layout.shape) if single else info.shape
        label = f"tensor '{file}' of {checkpoint.name}, aligned"
        return Computed(TensorInfo(shape, info.dtype), label, partial(self._part, move, name, file))

    def as_checkpoint(self, checkpoint: Checkpoint) -> Checkpoint:
        """A whole model in the anchor's basis, in memory, to be run on data: in float32, or float64 where it is."""
        wide = any(info.dtype == torch.float64 for info in checkpoint.tensors.values())
        state = {}
        for file in self.plan():
            source = self.source(checkpoint, file)
            rows = source.rows(0, source.info.shape[0] if source.info.shape else 1).cpu()
            dtype = rows.dtype if not rows.is_floating_point() else torch.float64 if wide else torch.float32
            state[file] = torch.empty(rows.shape, dtype=dtype).copy_(rows)
            if hasattr(source, "release"):
                source.release()
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


def align_models(models: Sequence[Checkpoint], anchor: Checkpoint, **options: Any) -> AlignedModels | None:
    """Align every model with the anchor; None when there is nothing but the anchor."""
    others = [model for model in models if model is not anchor]
    if not others:
        return None
    if options.get("many") == "universe":  # a common mean is the goal, and the anchor moves like the others
        others.insert(1, anchor)
        family = align_family(others, **options)
    else:
        family = align_family(others, anchor=anchor, **options)
    family.require_one_gauge()
    moves = {model: family.moved(model) for model in (*others, anchor)}
    own = moves[anchor]
    notes = family.solver_notes()
    if own.model.architecture.untied_config:
        notes.append("input and output table were tied and are now separate, since the stream was rotated")
    records = [
        {
            "model": model.name,
            "verdict": member.verdict,
            "moved": len(member.transform.elements),
            "spaces": space_moves(member),
        }
        for model, member in zip(others, family.members, strict=True)
    ]
    level = family.members[0].scope.level
    return AlignedModels(anchor, own, moves, notes, {"anchor": anchor.name, "level": level, "models": records})

"""Alignment inside a merge: every model moved next to the anchor, tensor by tensor, unrounded."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from isomerge.alignment.alignment import Alignment
from isomerge.alignment.api import align
from isomerge.alignment.move import Move
from isomerge.alignment.reporting import verdict
from isomerge.checkpoint import Checkpoint, TensorInfo
from isomerge.checkpoint.memory import MemoryCheckpoint
from isomerge.errors import RequestError
from isomerge.merging.group import Source
from isomerge.merging.sources import Computed, Stored
from isomerge.reporting.moves import space_moves


@dataclass
class AlignedModels:
    """Models in the anchor's basis, under the names the anchor has on disk."""

    anchor: Checkpoint
    own: Move
    moves: Mapping[int, Move]
    """By the id of the checkpoint."""
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

    def source(self, checkpoint: Checkpoint, file: str) -> Source:
        """A model's tensor in the anchor's basis; what no symmetry touches comes from the file."""
        if file not in self._tensor_of:
            return self._own_source(checkpoint, file)
        move, name = self.moves[id(checkpoint)], self._tensor_of[file]
        layout = move.model.layouts.get(name)
        info = self.plan()[file]
        if layout is None:
            raise RequestError(f"Merging with alignment: {checkpoint.name} has no '{name}'. Use models of one kind.")
        if move.stays(name) and move.model.files[name] == self.own.model.files.get(name):
            return Stored(checkpoint, file)
        single = self.own.model.files.get(name, (name,)) == (file,)
        shape = tuple(layout.shape) if single else info.shape
        label = f"tensor '{file}' of {checkpoint.name}, aligned"
        return Computed(TensorInfo(shape, info.dtype), label, lambda: self._part(move, name, file))

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

    def _own_source(self, checkpoint: Checkpoint, file: str) -> Source:
        """A tensor that the anchor does not store, such as the head of an untied model beside a tied one."""
        move = self.moves[id(checkpoint)]
        for name, layout in move.model.layouts.items():
            if file in move.model.files.get(name, (name,)) and not (name in move.model.files and move.stays(name)):
                info = TensorInfo(tuple(layout.shape), checkpoint.tensors[file].dtype)
                label = f"tensor '{file}' of {checkpoint.name}, aligned"
                return Computed(info, label, lambda name=name: move.model.split(name, move.tensor(name))[file])  # type: ignore[misc]
        return Stored(checkpoint, file)  # no symmetry touches it

    def _part(self, move: Move, name: str, file: str) -> Tensor:
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


def align_models(models: Sequence[Checkpoint], anchor: Checkpoint, **options: Any) -> AlignedModels | None:
    """Align every model with the anchor; None when there is nothing but the anchor."""
    others = [model for model in models if model is not anchor]
    if not others:
        return None
    found = align(others[0], anchor, others=others[1:], **options)
    known = [found] if isinstance(found, Alignment) else found.members
    if len(known) > len(others):  # a common mean is the goal, and the anchor moves like the others
        others.insert(1, anchor)
    if any(bool(a.fragile) != bool(known[0].fragile) for a in known):
        raise RequestError(
            "Merging with alignment: the gains of the anchor are too small to bring some of the models to it. "
            "Name another anchor (align: {anchor: …}, or --base)."
        )
    moves = {id(other): a.move() for other, a in zip(others, known, strict=True)}
    own = moves.get(id(anchor)) or max(known, key=lambda a: len(a.transform.elements)).anchor_move()
    moves[id(anchor)] = own
    notes = list(dict.fromkeys(n for a in known for n in a.solution.notes))
    if own.model.architecture.untied_config:
        notes.append("input and output table were tied and are now separate, since the stream was rotated")
    records = [
        {
            "model": other.name,
            "verdict": verdict(a.solution),
            "moved": len(a.transform.elements),
            "spaces": space_moves(a.solution),
        }
        for other, a in zip(others, known, strict=True)
    ]
    return AlignedModels(
        anchor, own, moves, notes, {"anchor": anchor.name, "level": known[0].solution.scope.level, "models": records}
    )

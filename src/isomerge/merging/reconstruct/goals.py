"""What a stage is solved towards: the parents' outcomes, brought together as the assembly says (usually their mean).

The parents do not change, so one pass over a block can note the goals of all its stages; those that are not due yet are
kept as far as `budget` bytes go, and found again by another pass where they are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from isomerge.merging.reconstruct.assembly import Assembly
from isomerge.merging.reconstruct.roles import Roles
from isomerge.merging.reconstruct.running import Batch, Runner, require_finite_rows, rows_of, valid_rows
from isomerge.merging.reconstruct.stages import Stage


@dataclass
class Goals:
    parents: Sequence[Runner]
    assembly: Assembly
    stages: Sequence[Stage]
    roles: Roles
    budget: int
    _used: int = 0
    _kept: dict[tuple[int, Stage], list[Tensor]] = field(default_factory=dict)

    def of(self, stage: Stage, batch: Batch, number: int) -> list[Tensor]:
        """One goal per use of the stage, in the order of the uses, without padding."""
        if (number, stage) in self._kept:
            goals = self._kept.pop((number, stage))
            self._used -= _size(goals)
            return goals
        found = self._run(self._together_with(stage), batch, number)
        for other, goals in found.items():
            if other is not stage and self._used + _size(goals) <= self.budget:
                self._used += _size(goals)
                self._kept[number, other] = goals
        return found[stage]

    def combine(self, name: str, values: Sequence[Tensor], *, follows: bool = False) -> Tensor:
        """The goal of a map (or of the sum it goes into) from the rows that each parent gives."""
        for parent, rows in zip(self.parents, values, strict=True):
            require_finite_rows(rows, self.roles.label(name), parent.name)
        return self.assembly.combine(name, values, follows=follows)

    def _together_with(self, stage: Stage) -> list[Stage]:
        """The stages of the same block that are still to come, while there is room for their goals."""
        if self._used >= self.budget * 0.9:
            return [stage]
        later = self.stages[self.stages.index(stage) + 1 :]
        return [stage, *(s for s in later if s.place == stage.place and s.kind != "experts")]

    def _run(self, stages: Sequence[Stage], batch: Batch, number: int) -> dict[Stage, list[Tensor]]:
        runs = [parent.run(stages, batch, number) for parent in self.parents]
        found: dict[Stage, list[Tensor]] = {}
        for stage in stages:
            goals = []
            for uses in zip(*(run[stage] for run in runs), strict=True):
                valid = valid_rows(uses[0], batch, self.parents[0].two_sided)
                rows = [rows_of(stage.outcome(use), valid) for use in uses]
                goals.append(self.combine(uses[0].key.name, rows, follows=stage.follows))
            found[stage] = goals
        return found


def _size(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)

"""How much symmetry to use: the level, the layers and the parts a user asked for, as smaller groups.

| level | what moves |
|---|---|
| permutation | feed-forward units, heads, units inside a head, residual units: permutations only |
| rotation | the founding paper: one rotation per head for QK and VO, permutations of feed-forward units |
| full | everything the architecture allows |
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from isomerge.arguments import require_choice
from isomerge.choices import LEVELS, PARTS
from isomerge.errors import RequestError
from isomerge.symmetry.architecture import RESIDUAL, Architecture, Norm, layer_of, part_of
from isomerge.symmetry.groups import Group, Invertible, Permutation, Rotary, Rotation


@dataclass(frozen=True)
class Scope:
    """What the user asked to be moved. `scale=None` is the level's default (only `full` rescales)."""

    level: str = "full"
    scale: bool | None = None
    layers: str | None = None
    only: str | None = None

    def __post_init__(self) -> None:
        require_choice("level", self.level, LEVELS)
        if self.only is not None:
            require_choice("only", self.only, PARTS)
        if self.level == "permutation" and self.scale:
            raise RequestError("Aligning at level 'permutation': nothing can be rescaled there. Leave scale out.")

    @property
    def rescales(self) -> bool:
        return self.level == "full" if self.scale is None else self.scale

    @property
    def gauges(self) -> bool:
        """Only `full` brings both models to canonical form first; the other levels are defined on the raw weights."""
        return self.level == "full"

    def restrict(self, architecture: Architecture) -> Architecture:
        """The groups this scope leaves."""
        depth = 1 + max((n for s in architecture.spaces if (n := layer_of(s)) is not None), default=-1)
        wanted = None if self.layers is None else parse_layers(self.layers, depth)

        # Raw weights keep their gains, and one that heads share, or that stands before a rotation, cannot move.
        norms = [norm for norm in architecture.norms if isinstance(norm, Norm) and norm.space != RESIDUAL]
        unfolded = set() if self.gauges else {norm.space for norm in norms}

        def rule(space: str, group: Group) -> Group:
            if space in unfolded:
                return group.restricted(None)
            part = part_of(architecture.root(space))
            if self.only is not None and part != self.only:
                return group.restricted(None)
            if wanted is not None and layer_of(space) not in wanted:  # spaces of no layer run through several, or all
                return group.restricted(None)
            return at_level(self, part, group)

        restricted = architecture.restricted(rule)
        if not restricted.movable() and architecture.movable():
            note = f"level '{self.level}' leaves nothing to move in what `only` and `layers` name"
            return replace(restricted, notes=[*restricted.notes, note])
        if wanted is not None and self.level != "rotation":
            note = "only the named layers move; what runs through several (residual stream, task heads) stays"
            return replace(restricted, notes=[*restricted.notes, note])
        return restricted


def at_level(scope: Scope, part: str, group: Group) -> Group:
    """The group a level leaves of a declared one."""
    if scope.level == "full":
        return group
    if scope.level == "permutation":
        return group.restricted(Permutation if group.element in ("order", "matrix") else None)
    if part == "attention" and isinstance(group, Rotary):
        return replace(group, scale=scope.rescales) if group.phase == "any" else group.restricted(None)
    if part == "attention" and group.element == "matrix":
        return group.restricted(Invertible if scope.rescales else Rotation)
    return group if part == "ffn" and group.reorders and not group.signed else group.restricted(None)


def parse_layers(text: str, depth: int) -> set[int]:
    """Layers by number, range, or `first n` / `last n`: at most as many as there are.

    >>> sorted(parse_layers("0-2,5", 8)), sorted(parse_layers("last 2", 8))
    ([0, 1, 2, 5], [6, 7])
    """
    layers: set[int] = set()
    for piece in filter(None, (p.strip() for p in text.split(","))):
        if match := re.fullmatch(r"(first|last)[ :]?(\d+)", piece):
            count = min(int(match[2]), depth)
            layers |= set(range(count)) if match[1] == "first" else set(range(depth - count, depth))
        elif match := re.fullmatch(r"(\d+)(?:-(\d+))?", piece):
            first, last = int(match[1]), int(match[2] or match[1])
            if last < first:
                raise RequestError(
                    f"Reading layers '{text}': '{piece}' runs backwards. Write {last}-{first}.", keys=("layers",)
                )
            layers |= set(range(first, last + 1))
        else:
            known = "Write 3, 0-4, 'first 3', 'last 2'."
            raise RequestError(f"Reading layers '{text}': '{piece}' is not a layer. {known}", keys=("layers",))
    if not layers or max(layers) >= depth:
        raise RequestError(
            f"Reading layers '{text}': the model has layers 0 to {depth - 1}. Name some of them.", keys=("layers",)
        )
    return layers

"""What comes after the first layers of a model: the later layers, the last norm, poolers and heads."""

from __future__ import annotations

import re

from isomerge.symmetry.architecture import RESIDUAL, Norm
from isomerge.symmetry.binding import BoundModel


def comes_after(bound: BoundModel, layers: int) -> set[str]:
    """The tensors behind the first `layers` layers, by their names on disk."""
    names = {name for name in bound.layouts if _is_late(bound, name, layers)}
    for norm in bound.architecture.norms:
        if isinstance(norm, Norm) and all(reader in names for reader in norm.readers if reader in bound.layouts):
            names |= {norm.name + ".weight", norm.name + ".bias"} & set(bound.layouts)
    return {file for name in names for file in bound.files.get(name, (name,))}


def _is_late(bound: BoundModel, name: str, layers: int) -> bool:
    """Of a later layer; or of none, and not among the tables that start the stream."""
    if (number := re.search(r"\.(\d+)\.", name)) is not None:
        return int(number[1]) >= layers
    atoms = [a for axis in bound.layouts[name].axes for segment in axis for a in segment.atoms]
    return not any(a.space == RESIDUAL and not a.dual for a in atoms)

"""Can one model be carried to the other? Widths may differ; depth, heads and what is looked up may not."""

from __future__ import annotations

from isomerge.errors import RequestError
from isomerge.symmetry.architecture import RESIDUAL, Architecture, part_of
from isomerge.symmetry.binding import BoundModel


def require_transportable(source: BoundModel, anchor: BoundModel, moving: Architecture) -> None:
    """What the tensors say; `moving` has the groups that are left to move."""
    problems = []
    declared, other = anchor.architecture.spaces, source.architecture.spaces
    for only, one, two in (("anchor", anchor, source), ("source", source, anchor)):
        missing = [n for n in one.layouts if n not in two.layouts]
        if missing:
            problems.append(f"only the {only} has {', '.join(missing[:3])}{' …' if len(missing) > 3 else ''}")
    parents = {p for group in declared.values() if group.size > 1 for p in group.per}  # a size of 1 is only a scale
    for space, group in declared.items():
        size = other[space].size if space in other else group.size
        if size == group.size:
            continue
        sizes = f"{size} and {group.size}"
        counted = group.reorders and not group.signed and part_of(anchor.architecture.root(space)) == "attention"
        if RESIDUAL not in declared:
            problems.append(f"'{space}' has {sizes} units, and no specification says who reads them")
        elif counted or space in parents:
            problems.append(f"{space!r} has {sizes} units: numbers of heads, groups and experts must be equal")
        elif not moving.spaces[space].movable:
            problems.append(f"{space!r} has {sizes} units and stays as it is, so the numbers must be equal")
    for name in sorted(set(source.layouts) & set(anchor.layouts)):
        a, b = anchor.layouts[name], source.layouts[name]
        if a.pattern != b.pattern:
            problems.append(f"{name} is used differently in the two: check tie_word_embeddings and the head class")
            continue
        for axis, x in enumerate(a.axes):
            free = all(atom.free for segment in x for atom in segment.atoms)
            if free and a.shape[axis] != b.shape[axis]:
                word = x[0].atoms[0].space.lstrip("_") or "entries"
                problems.append(f"{name} has {b.shape[axis]} and {a.shape[axis]} {word}")
    if problems:
        shown = "; ".join(problems[:6]) + (f"; and {len(problems) - 6} more" if len(problems) > 6 else "")
        raise RequestError(
            f"Transporting {source.name} to {anchor.name}: {shown}. Widths may differ, but the architecture, the "
            "depth, the heads and the vocabulary must be the same."
        )

"""Units that share tensors: which of them is solved before which.

Most units meet only the residual stream. Some also meet each other: the heads of latent attention read a latent space
that has its own rotation, and one complex number serves all of them. Such units form a chain. They are solved in an
order in which each has evidence that depends on nothing unsolved, and then once more, each next to all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from isomerge.alignment.evidence import met_beside
from isomerge.alignment.units import Unit
from isomerge.symmetry.architecture import Architecture, is_stream
from isomerge.symmetry.patterns import Layout


def leaders(architecture: Architecture, layouts: Mapping[str, Layout]) -> dict[str, str]:
    """For every root space the first name among the roots that tensors connect it with."""
    leader: dict[str, str] = {}

    def first(root: str) -> str:
        while leader.setdefault(root, root) != root:
            root = leader[root]
        return root

    for layout in layouts.values():
        roots = {architecture.root(s) for s in layout.spaces()}
        firsts = sorted({first(root) for root in sorted(roots) if not is_stream(root)})
        for other in firsts:
            leader[other] = firsts[0]
    return {root: first(root) for root in leader}


def chains(units: Sequence[Unit], leader: Mapping[str, str], layouts: Iterable[Layout]) -> list[list[Unit]]:
    """Units that share tensors together, each chain in the order it is solved."""
    together: dict[str, list[Unit]] = {}
    for unit in units:
        together.setdefault(leader.get(unit.root, unit.root), []).append(unit)
    kept = list(layouts) if any(len(chain) > 1 for chain in together.values()) else []
    return [_in_order(chain, kept) if len(chain) > 1 else chain for chain in together.values()]


def _in_order(chain: Sequence[Unit], layouts: Iterable[Layout]) -> list[Unit]:
    """Each time the first unit all of whose spaces have evidence that needs none of those still waiting."""
    places = [place for layout in layouts for place in _places(layout)]
    waiting = {unit.root: unit for unit in chain}
    order: list[Unit] = []
    while waiting:
        unsolved = {s: root for root, unit in waiting.items() for s in unit.members}

        def ready(unit: Unit, unsolved: Mapping[str, str] = unsolved) -> bool:
            known = [own for own, met in places if all(unsolved.get(s, unit.root) == unit.root for s in met)]
            told = {s for own in known for s in own}
            return all(s in told or not g.movable for s, g in unit.spaces.items())

        order.append(waiting.pop(next((r for r, u in waiting.items() if ready(u)), next(iter(waiting)))))
    return order


def _places(layout: Layout) -> Iterator[tuple[set[str], set[str]]]:
    """For every segment its spaces, and all that its evidence depends on."""
    for axis, segments in enumerate(layout.axes):
        for segment in segments:
            yield {a.space for a in segment.atoms}, met_beside(layout, axis, segment)

"""Which unit of a space went where, and which head was turned by how much: the most moved by name, all counted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from isomerge.reporting.measured import space_place
from isomerge.symmetry.groups import Group
from isomerge.symmetry.transform import Transform

LISTED = 20  # of one space: a record stays small, whatever the size of the model
STILL = {"angle": 1e-3, "factor": 1e-6, "flipped": 0.5}  # below it nothing has moved
REST = {"angle": 0.0, "factor": 1.0, "flipped": 0.0}


def moved_units(transform: Transform, space: str) -> dict[str, Any] | None:
    """None for a space that stays; otherwise `names` (what is counted), `changed`, `of` how many, and `listed`.

    A listed unit has `from` and `to`, its places in the model and in the anchor; `within`, the units of outer spaces
    that it is a part of, in the anchor's numbers; `flipped` where its sign changed; `angle` in degrees and `factor`
    where it was turned or stretched. A space with one element per head is counted by heads.
    """
    element = transform.elements.get(space)
    if element is None:
        return None
    group = transform.spaces[space]
    order = group.order(element)
    if order is not None:
        names: Sequence[str] = (*group.per, space)
        effects: Mapping[str, Tensor] = {"flipped": (element < 0).double()}
        distance = (order - torch.arange(group.size, device=order.device)).abs().double()
    else:
        names, effects = _effects(space, group, element)
        # The last bits of a sum depend on who added them, and must not decide who is listed.
        distance = (effects["angle"] if "angle" in effects else effects["factor"].abs().log().abs()).round(decimals=4)
    changed = torch.stack([_changed(key, values) for key, values in effects.items()]).any(0)
    if order is not None:
        changed |= distance > 0
    elif names:
        order = _origins(transform, names[-1], distance.shape)
    return {
        "names": [space_place(name)["kind"].rpartition(".")[2] for name in names],
        "changed": int(changed.sum()),
        "of": changed.numel(),
        "listed": _listed(distance, changed, order, effects),
    }


def _effects(space: str, group: Group, element: Tensor) -> tuple[Sequence[str], Mapping[str, Tensor]]:
    """What the elements of a group without an order belong to, and what they do there.

    The angle is that between an element and the identity, cos φ = tr g / (√n ‖g‖): by so much a vector is turned in the
    mean. The factor of a matrix is its mean stretch ‖g‖ / √n. One trace and one norm: cheap for the widest stream.
    """
    if group.element == "factor":
        alone = group.size == 1
        return (group.per if alone else (*group.per, space)), {"factor": element.squeeze(-1) if alone else element}
    if group.element == "pairs":
        trace, squares, size = element.real.sum(-1), element.abs().square().sum(-1), element.shape[-1]
    else:
        trace, squares = element.diagonal(dim1=-2, dim2=-1).sum(-1), element.square().sum((-2, -1))
        size = group.size
    factor = (squares / size).sqrt()
    angle = (trace / size / factor).clamp(-1, 1).arccos() * (180 / math.pi)
    return group.per, {"angle": angle, "factor": factor}


def _changed(key: str, values: Tensor) -> Tensor:
    return (values - REST[key]).abs() > STILL[key]


def _origins(transform: Transform, parent: str, shape: Sequence[int]) -> Tensor:
    """Where the units come from that elements belong to: elements are stored by where their unit arrives."""
    order = transform.spaces[parent].order(transform.element(parent))
    return (torch.arange(shape[-1]) if order is None else order).expand(tuple(shape))


def _listed(
    distance: Tensor, changed: Tensor, order: Tensor | None, effects: Mapping[str, Tensor]
) -> list[dict[str, Any]]:
    """The most moved first; equally moved ones in the order of their places."""
    ranked = torch.where(changed, distance, -1.0).flatten().argsort(descending=True, stable=True)
    units = []
    for place in ranked[: min(LISTED, int(changed.sum()))].tolist():
        at = coordinates(place, changed.shape)
        entry: dict[str, Any] = {} if order is None else {"from": int(order[at]), "to": at[-1]}
        if len(at) > 1:
            entry["within"] = list(at[:-1])
        for key, values in effects.items():
            if _changed(key, values[at]):
                entry[key] = True if key == "flipped" else float(f"{float(values[at]):.4g}")
        units.append(entry)
    return units


def coordinates(place: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The place of an element in a tensor, from its place in the flattened one.

    >>> coordinates(5, (2, 3)), coordinates(0, ())
    ((1, 2), ())
    """
    places = []
    for length in reversed(shape):
        place, at = divmod(place, length)
        places.append(at)
    return tuple(reversed(places))

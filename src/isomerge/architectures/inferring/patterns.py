"""Axis patterns for what the units of a traced model say: runs of heads, of hidden units, of a stream."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Place = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Role:
    """Units of one kind: their sizes, outermost first, and how they are written alone and inside their group."""

    sizes: tuple[int, ...]
    alone: str
    grouped: str = ""
    group: str = ""  # the space that may stand outside a bracket of several roles


def describe_axis(labels: Sequence[Place | None], roles: Mapping[str, Role], still: Mapping[int, str]) -> str | None:
    """The pattern of an axis with these labels, or None if it is none of those that patterns can say.

    >>> units = {"up": Role((2,), "ffn"), "gate": Role((2,), "ffn")}
    >>> describe_axis([("gate", (0,)), ("gate", (1,)), ("up", (0,)), ("up", (1,))], units, {})
    '[ffn | ffn]'
    """
    if any(label is not None and label[0] not in roles for label in labels):
        return None
    parts = _runs(labels, roles, still, ())
    if parts is None:
        return _by_group(labels, roles, still)
    return parts[0] if len(parts) == 1 else "[" + " | ".join(parts) + "]"


def _runs(
    labels: Sequence[Place | None], roles: Mapping[str, Role], still: Mapping[int, str], group: tuple[int, ...]
) -> list[str] | None:
    """The axis as one whole role after another; inside a group, the part of a role that is the group's."""
    parts, at = [], 0
    while at < len(labels):
        first = labels[at]
        if first is None:
            end = next((k for k in range(at, len(labels)) if labels[k] is not None), len(labels))
            if end - at not in still:
                return None
            parts.append(still[end - at])
            at = end
            continue
        role = roles[first[0]]
        whole = [(first[0], (*group, *rest)) for rest in itertools.product(*map(range, role.sizes[len(group) :]))]
        if list(labels[at : at + len(whole)]) != whole:
            return None
        parts.append(role.grouped if group else role.alone)
        at += len(whole)
    return parts


def _by_group(labels: Sequence[Place | None], roles: Mapping[str, Role], still: Mapping[int, str]) -> str | None:
    """Group after group, each with all its roles."""
    present = {label[0] for label in labels if label is not None}
    names = {roles[name].group for name in present}
    sizes = {roles[name].sizes[0] for name in present}
    if len(names) != 1 or len(sizes) != 1 or not (name := names.pop()) or len(labels) % (count := sizes.pop()):
        return None
    size = len(labels) // count
    found = {
        None if parts is None else tuple(parts)
        for g in range(count)
        for parts in [_runs(labels[g * size : (g + 1) * size], roles, still, (g,))]
    }
    parts = found.pop() if len(found) == 1 else None
    if parts is None:
        return None
    return f"({name} {parts[0]})" if len(parts) == 1 else f"({name} [{' | '.join(parts)}])"


def still_sizes(labels: Sequence[Place | None]) -> set[int]:
    """The lengths of the runs that no space moves."""
    return {len(list(run)) for empty, run in itertools.groupby(labels, lambda label: label is None) if empty}

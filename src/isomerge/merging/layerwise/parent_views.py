"""A parent as the layers of the merged model see it, whatever its own width, number of heads and units, and depth.

Every tensor of the merged model has its like in the parent: the same tensor of the same layer or, where the parent has
more layers, of all layers that stand for one, their units and heads side by side.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isomerge.merging.layerwise.token_matching import TokenMatch
from isomerge.symmetry.architecture import RESIDUAL
from isomerge.symmetry.binding import BoundModel
from isomerge.symmetry.groups import Group
from isomerge.symmetry.patterns import Layout, Segment

State = dict[str, Tensor]
VOCABULARY = "_vocab"
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # the first number in a tensor's name is that of its layer


@dataclass(frozen=True)
class ParentView:
    bound: BoundModel
    """Of the parent itself."""
    blocks: Sequence[Sequence[int]] | None = None
    """For every layer of the merged model, those of the parent that stand for it; None: the same."""
    tokens: TokenMatch | None = None
    """Its vocabulary, where it is not that of the merged model."""

    @property
    def width(self) -> int:
        """Of its residual stream."""
        return self.bound.architecture.spaces[RESIDUAL].size

    def own_names(self, name: str) -> list[str]:
        """What a tensor or module of the merged model is called in the parent."""
        found = NUMBER.search(name)
        if self.blocks is None or found is None:
            return [name]
        return [NUMBER.sub(str(layer), name, count=1) for layer in self.blocks[int(found.group())]]

    def tensor(self, state: State, name: str, axis: int | None) -> Tensor:
        """In float64; several layers are laid side by side on `axis`, the one of their units. Without such an axis they
        are biases that all of them add to the stream, or gains of norms, which are folded and all the same."""
        bound, parts = self.bound, []
        for own in self.own_names(name):
            files = bound.files.get(own, (own,))
            whole = torch.cat([state[f].double() for f in files], bound.stacks.get(own, 0))
            parts.append(whole if self.tokens is None else _in_tokens(self.tokens, whole, bound.layouts[own]))
        if len(parts) == 1:
            return parts[0]
        if axis is not None:
            return torch.cat(parts, axis)
        return parts[-1] if is_gain(bound.layouts[own]) else torch.stack(parts).sum(0)

    def units(self, name: str, merged: BoundModel, axis: int) -> list[Tensor]:
        """Where the units on an axis of a tensor lie in the parent, for every segment of that axis: (units, *sizes
        inside one), and -1 where the parent has nothing."""
        like = merged.layouts[name].axes[axis]
        tables: list[list[Tensor]] = [[] for _ in like]
        offset = 0
        for own in self.own_names(name):
            layout = self.bound.layouts[own]
            for table, segment, wanted in zip(tables, layout.axes[axis], like, strict=True):
                at = positions(segment, layout.shape[axis]) + offset
                inside = [group_size(bound, s.atoms[0].space) for bound, s in ((self.bound, segment), (merged, wanted))]
                table.append(regrouped(at, *inside, members=_has_members(self.bound, segment)))
            offset += layout.shape[axis]
        return [torch.cat(table) for table in tables]


def _in_tokens(tokens: TokenMatch, table: Tensor, layout: Layout) -> Tensor:
    """A table of a parent, row by row for the tokens of the merged model; other tensors stay."""
    axes = [axis[0].atoms[0] for axis in layout.axes]
    if axes[0].space != VOCABULARY:
        return table
    return tokens.rows(table, output=any(atom.dual for atom in axes[1:]))


def regrouped(at: Tensor, own: int, wanted: int, *, members: bool) -> Tensor:
    """Positions (groups, members, …) for groups of another size: a larger group becomes several, and a smaller one
    leaves places empty (-1). Without `members`, what the groups share (groups, …) is there once for each.

    >>> regrouped(torch.tensor([[0, 1, 2], [3, 4, 5]]), 3, 2, members=True).tolist()
    [[0, 1], [2, -1], [3, 4], [5, -1]]
    """
    if own == wanted:
        return at
    parts = math.ceil(own / wanted)
    if not members:
        return at.repeat_interleave(parts, 0)
    empty = at.new_full((at.shape[0], parts * wanted - own, *at.shape[2:]), -1)
    return torch.cat([at, empty], 1).reshape(at.shape[0] * parts, wanted, *at.shape[2:])


def group_size(bound: BoundModel, space: str) -> int:
    """How many queries share a key and a value: the units inside one unit of a space."""
    return next((group.size for group in bound.architecture.spaces.values() if _is_member(group, space)), 1)


def _has_members(bound: BoundModel, segment: Segment) -> bool:
    space = segment.atoms[0].space
    return len(segment.atoms) > 1 and _is_member(bound.architecture.spaces[segment.atoms[1].space], space)


def _is_member(group: Group, space: str) -> bool:
    return group.reorders and not group.signed and group.per == (space,)


def positions(segment: Segment, length: int) -> Tensor:
    """Where a segment lies on its axis, shaped like its sizes."""
    return segment.index if segment.index is not None else torch.arange(length).reshape(segment.sizes)


def is_gain(layout: Layout) -> bool:
    """The gain of a norm, which has no direction."""
    return len(layout.axes) == 1 and all(atom.unsigned for segment in layout.axes[0] for atom in segment.atoms)

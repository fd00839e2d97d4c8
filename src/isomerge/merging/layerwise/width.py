"""A merged model with more room than one parent has: more units, more heads, a wider stream, of the same class."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from isomerge.architectures import describe, sizes
from isomerge.checkpoint import TensorInfo
from isomerge.checkpoint.memory import MemoryCheckpoint
from isomerge.checkpoint.stock_classes import class_config
from isomerge.errors import RequestError, SpecificationError
from isomerge.merging.layerwise.joint import choosable, turns
from isomerge.merging.layerwise.parent_views import ParentView, group_size
from isomerge.merging.layerwise.parents import ParentModels
from isomerge.running.stock import stock_class
from isomerge.symmetry.architecture import RESIDUAL, part_of
from isomerge.symmetry.binding import BoundModel
from isomerge.symmetry.groups import Group
from isomerge.symmetry.patterns import Atom, Concatenation, Layout, Node, bind, parse

PARTS = ("units", "heads", "stream")
LARGEST = 64.0


@dataclass(frozen=True)
class Width:
    """Factors."""

    units: float = 1.0
    heads: float = 1.0
    stream: float = 1.0

    @classmethod
    def read(cls, text: str) -> Width:
        """One number is for units and heads; otherwise parts are named.

        >>> Width.read("2"), Width.read("units=2,stream=1.5")
        (Width(units=2.0, heads=2.0, stream=1.0), Width(units=2.0, heads=1.0, stream=1.5))
        """
        entries = [entry.strip() for entry in text.split(",")]
        named = dict(re.split(r"\s*[=:]\s*", entry, maxsplit=1) for entry in entries if re.search("[=:]", entry))
        if len(entries) == 1 and not named:
            named = {"units": text, "heads": text}
        unknown = [entry for entry in entries if entry not in (text, "") and not re.search("[=:]", entry)]
        wrong = unknown or len(named) < len(entries) > 1 or set(named) - set(PARTS)
        try:
            factors = {part: float(number) for part, number in named.items()}
        except ValueError:
            wrong = True
        if wrong or not all(1 <= factor <= LARGEST for factor in factors.values()):
            raise RequestError(
                f"reconstruct: width is '{text}', and is one factor from 1 to {LARGEST:g} for units and heads, or "
                "factors by name: units=2,heads=2,stream=1.5.",
                keys=("width",),
            )
        return cls(**factors)

    def factor(self, space: str) -> float:
        return {RESIDUAL: self.stream, "attention": self.heads, "ffn": self.units}.get(part_of(space), 1.0)

    @property
    def is_one(self) -> bool:
        return self == Width()


def widen(parents: ParentModels, width: Width) -> ParentModels:
    """The same parents, and a merged model with room for more of them."""
    if width.is_one:
        return parents
    bound = parents.bound
    _require_possible(bound, width)
    wider = of_sizes(bound, _sizes(bound, width))
    plan = dict(parents.plan)
    for name, layout in wider.layouts.items():
        files, shape = wider.files.get(name, (name,)), list(layout.shape)
        if name in wider.stacks:
            shape[wider.stacks[name]] //= len(files)
        plan |= {file: TensorInfo(tuple(shape), plan[file].dtype) for file in files if file in plan}
    config = {**parents.config, **_config(parents.config, wider, width)}
    _require_read(bound, plan, config)
    views, configs = parents.views, parents.configs
    room = _room(parents, wider, plan)
    words = ", ".join(f"{part} {old:,} -> {new:,}" for part, (old, new) in room.items() if part != "parameters")
    price = " -> ".join(f"{count / 1e6:.1f}M" for count in room["parameters"])
    parents.notes.append(f"the merged model is wider than the first: {words}; {price} parameters")
    return replace(
        parents, plan=plan, bound=wider, config=config, views=views or (ParentView(bound),) * parents.count,
        configs=configs or (parents.config,) * parents.count, room=room,
    )  # fmt: skip


def _room(parents: ParentModels, wider: BoundModel, plan: Mapping[str, TensorInfo]) -> dict[str, list[int]]:
    """Sizes before and after, of what grows, and the number of parameters."""
    room: dict[str, list[int]] = {}
    for part, word in (("stream", RESIDUAL), ("heads", "attention"), ("units", "ffn")):
        space = next((s for s, g in wider.architecture.spaces.items() if s == word or _is_outer(s, g, word)), None)
        counts = [b.architecture.spaces[space].size * group_size(b, space) for b in (parents.bound, wider) if space]
        room |= {part: counts} if len(set(counts)) > 1 else {}
    room["parameters"] = [sum(math.prod(i.shape) for i in one.values()) for one in (parents.plan, plan)]
    return room


def _sizes(bound: BoundModel, width: Width) -> dict[str, int]:
    """How many units each space has then. Stock classes want a stream that is a multiple of the number of heads: if it
    stays, the next number of heads that divides it is taken, and if it grows, the next multiple of them."""
    spaces = bound.architecture.spaces
    sizes = {space: math.ceil(spaces[space].size * width.factor(space) - 1e-9) for space in choosable(bound)}
    stream = math.ceil(spaces[RESIDUAL].size * width.stream - 1e-9)
    for space in [space for space in sizes if part_of(space) == "attention"]:
        each = group_size(bound, space)
        if width.stream == 1 and width.heads > 1:
            sizes[space] = next((n for n in range(sizes[space], stream + 1) if stream % (n * each) == 0), sizes[space])
        elif width.stream > 1:
            stream = math.ceil(stream / (sizes[space] * each)) * sizes[space] * each
    return {**sizes, RESIDUAL: stream}


def of_sizes(bound: BoundModel, counts: Mapping[str, int]) -> BoundModel:
    """The specification of a model whose spaces have other sizes."""
    spaces = {
        name: replace(group, size=counts[name]) if name in counts else group
        for name, group in bound.architecture.spaces.items()
    }

    def length(node: Node, free: int) -> int:
        if isinstance(node, Atom):
            return free if node.free else spaces[node.space].size
        if isinstance(node, Concatenation):
            return sum(length(part, free) for part in node.parts)
        return math.prod(length(factor, free) for factor in node.factors)

    def layout(name: str, old: Layout) -> Layout:
        shape = [length(node, own) for node, own in zip(parse(old.pattern), old.shape, strict=True)]
        return bind(old.pattern, shape, spaces, name)

    layouts = {name: layout(name, old) for name, old in bound.layouts.items()}
    return replace(bound, architecture=replace(bound.architecture, spaces=spaces), layouts=layouts)


def _config(config: Mapping[str, Any], wider: BoundModel, width: Width) -> dict[str, Any]:
    """What config.json has to say."""
    spaces = wider.architecture.spaces
    changed: dict[tuple[str, ...], int] = {}
    if width.stream > 1:
        changed[sizes.STREAM] = spaces[RESIDUAL].size
    if width.units > 1:
        changed[sizes.UNITS] = next(group.size for space, group in spaces.items() if _is_outer(space, group, "ffn"))
    heads = next((space for space, group in spaces.items() if _is_outer(space, group, "attention")), None)
    if heads is not None:
        if width.heads > 1:
            changed[sizes.GROUPS] = spaces[heads].size
            changed[sizes.HEADS] = spaces[heads].size * group_size(wider, heads)
        inside = [group.size for group in spaces.values() if group.per[:1] == (heads,) and not group.reorders]
        changed |= {sizes.HEAD_SIZE: inside[-1]} if inside else {}
    return sizes.resized(config, changed)


def _is_outer(space: str, group: Group, part: str) -> bool:
    return part_of(space) == part and group.reorders and not group.per


def _require_possible(bound: BoundModel, width: Width) -> None:
    architecture = bound.architecture
    movable = {architecture.root(name) for name, group in architecture.spaces.items() if group.movable}
    known = choosable(bound)
    why = ""
    if width.stream > 1 and not turns(bound):
        why = "its residual stream has a basis of its own, as norms or a tied table stand on it; use stream=1"
    elif width.stream > 1 and architecture.family in sizes.STREAM_IN_NUMBERS:
        why = "its code multiplies by a power of the stream's width; use stream=1"
    elif width.units > 1 and any(part_of(space) == "ffn" and space not in known for space in movable):
        why = "its feed-forward units cannot be chosen one by one; use units=1"
    elif width.heads > 1 and any(part_of(space) == "attention" and space not in known for space in movable):
        why = "its heads cannot be chosen one by one, as they share a norm or a table; use heads=1"
    elif width.heads > 1 and any(_is_norm_over_heads(bound, name) for name in bound.layouts):
        why = "one norm takes the mean over all its heads, which more of them would change; use heads=1"
    if why:
        raise _impossible(architecture.family, why)


def _is_norm_over_heads(bound: BoundModel, name: str) -> bool:
    axes = bound.layouts[name].axes
    return (
        name.endswith(".weight")
        and len(axes) == 1
        and part_of(axes[0][0].atoms[0].space) == "attention"
        and (len(axes[0][0].atoms) > 1)
    )


def _require_read(bound: BoundModel, plan: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> None:
    """Raise unless the family reads these sizes from config.json: some divide the stream among their heads."""
    zero = torch.zeros(())
    state = {name: zero.to(info.dtype).expand(info.shape) for name, info in plan.items()}
    family = bound.architecture.family
    try:
        describe(MemoryCheckpoint("the wider model", state, dict(config)))
    except SpecificationError as error:
        why = "it divides the stream among its heads, so both grow by the same factor; use stream=2,heads=2"
        raise _impossible(family, why) from error
    try:
        class_config(stock_class(config), config)
    except Exception as error:  # whatever its own class does not like
        cause = str(error.__cause__ or error).strip().rstrip(".").splitlines()[-1].strip()
        raise _impossible(family, f"transformers refuses it ({cause}). Use other factors") from error


def _impossible(family: str, why: str) -> RequestError:
    return RequestError(f"reconstruct: width cannot be given to a '{family}' model: {why}.", keys=("width",))

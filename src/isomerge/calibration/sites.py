"""Where activations live: for every space of a specification, the places of the network where one can see it.

A weight with the axis pattern `(head.0 vo.0) residual'` maps the stream to values of heads. So its output lives on
`(head.0 vo.0)`, and its input on `residual`: the input axis with every dual turned round, because where the stream
moves by g the columns of the weight move by g⁻ᵀ. Every site is one product of spaces; an axis that concatenates several
(queries, keys and values in one tensor) gives one site each.

Names and roles of sites (names of tensors are the specification's, which are those on disk unless the file spells them
otherwise):

| site | role | what it is |
|---|---|---|
| `<norm>.weight:in` | `stream` | the stream where a norm reads it |
| `<norm>.weight:out` | `stream` | the stream after a norm that stands on it (post-norm), or a branch after its norm |
| `<norm>.weight:normed` | `normed` | the same, normalised without gain and bias: every token counts alike |
| `<weight>:in` | `input` | what a linear map reads: FFN units after the activation, outputs of heads, … |
| `<weight>:out` | `output` | what it makes: FFN units before the activation, queries, keys, values, branch outputs |
| `…:out:1` | `output` | the second part of a concatenated axis |

Where LayerNorms read the stream, its mean over units is a gauge that never arrives anywhere: streams before a norm and
what is written to them are centred over units, token by token.
A map that reads the stream through a norm in front of it has no `:in` site: gain and bias stand in between, and the
gain does not turn with the stream. `:normed` is the same thing without them.
Experts that are one stacked tensor have no sites: each sees other tokens in each model. Their router has (`:out` lives
on the space of the experts).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from isomerge.errors import RequestError, did_you_mean
from isomerge.running.linear_maps import LinearMap, outputs_as_rows
from isomerge.running.stock import StockModel
from isomerge.symmetry.architecture import Norm
from isomerge.symmetry.binding import BoundModel
from isomerge.symmetry.patterns import Atom, Segment

ROLES = ("stream", "normed", "input", "output")


@dataclass(frozen=True)
class Site:
    """One place of the network, with the product of spaces that its activations live on."""

    name: str
    role: str
    segment: Segment
    """Its spaces with their sizes; activations come in this order, outermost space first."""
    module: str
    """In memory."""
    kind: str
    """in, out or normed."""
    map: LinearMap | None = None
    norm: str = ""
    """layer or rms, for a normalised stream."""
    centred: bool = False
    """The mean over units means nothing here and is taken out."""

    @property
    def spaces(self) -> tuple[str, ...]:
        return tuple(atom.space for atom in self.segment.atoms)

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.segment.sizes

    @property
    def width(self) -> int:
        return int(torch.Size(self.sizes).numel())

    def values(self, module: nn.Module, given: Tensor, made: Tensor) -> Tensor:
        """(…, width) out of a module's input and output."""
        values = given if self.kind != "out" else made
        if self.kind == "normed":
            values = _normalised(module, given, self.norm)
        elif self.map is not None and self.kind == "in":
            values = self.map.rows_in(module, given)
        elif self.map is not None:
            values = outputs_as_rows(module, made)
        if self.centred:
            values = values - values.mean(-1, keepdim=True)
        if self.segment.index is not None:
            values = values.index_select(-1, self.segment.index.flatten().to(values.device))
        return values


def sites_of(
    bound: BoundModel, stock: StockModel, *, spaces: Iterable[str] | None = None, roles: Iterable[str] = ROLES
) -> dict[str, Site]:
    """Every site of a model, by name; only those that touch one of `spaces`, where they are named."""
    wanted = set(roles)
    for role in wanted - set(ROLES):
        raise RequestError(f"Choosing activations: '{role}' is not a role. {did_you_mean(role, ROLES)}")
    known = bound.architecture.spaces
    chosen = set(known) if spaces is None else set(spaces)
    for space in sorted(chosen - set(known)):
        raise RequestError(f"Choosing activations: there is no space '{space}'. {did_you_mean(space, known)}")
    sites = [*_norm_sites(bound, stock), *_map_sites(bound, stock)]
    return {site.name: site for site in sites if site.role in wanted and chosen & set(site.spaces)}


def _norm_sites(bound: BoundModel, stock: StockModel) -> list[Site]:
    in_front = {n.name + ".weight": n.kind for n in bound.architecture.norms if isinstance(n, Norm)}
    layer_norms = bool(bound.architecture.writers)
    memory = _in_memory(bound, stock)
    sites = []
    for name, layout in bound.layouts.items():
        atoms = layout.axes[0][0].atoms if len(layout.axes) == 1 else ()
        if len(atoms) != 1 or not atoms[0].unsigned or name not in memory:
            continue
        segment = Segment((Atom(atoms[0].space),), layout.axes[0][0].sizes, None)
        kinds = ("in", "normed") if name in in_front else ("in", "out")
        for kind in kinds:
            role = "normed" if kind == "normed" else "stream"
            centred = kind == "in" and layer_norms
            norm = in_front.get(name, "")
            sites.append(Site(f"{name}:{kind}", role, segment, memory[name], kind, norm=norm, centred=centred))
    return sites


def _map_sites(bound: BoundModel, stock: StockModel) -> list[Site]:
    maps = {m.module: m for m in stock.maps}
    behind_norm = {r for n in bound.architecture.norms if isinstance(n, Norm) for r in n.readers}
    sites = []
    for name, module in _in_memory(bound, stock).items():
        linear, layout = maps.get(module), bound.layouts[name]
        if linear is None or len(layout.axes) < 2:
            continue
        reading, writing = (0, 1) if linear.transposed else (1, 0)
        if len(layout.axes) == 2 and name not in behind_norm:
            sites += _segments(name, "in", layout.axes[reading], module, linear)
        centred = name in bound.architecture.writers
        sites += [replace(s, centred=centred) for s in _segments(name, "out", layout.axes[writing], module, linear)]
    return sites


def _segments(name: str, kind: str, axis: tuple[Segment, ...], module: str, linear: LinearMap) -> list[Site]:
    role = "input" if kind == "in" else "output"
    sites = []
    for number, segment in enumerate(axis):
        if any(atom.free for atom in segment.atoms):
            continue
        if kind == "in":
            segment = replace(segment, atoms=tuple(replace(a, dual=not a.dual) for a in segment.atoms))
        label = f"{name}:{kind}" + (f":{number}" if len(axis) > 1 else "")
        sites.append(Site(label, role, segment, module, kind, linear))
    return sites


def _in_memory(bound: BoundModel, stock: StockModel) -> dict[str, str]:
    """From the specification's weights to their modules; those stacked in memory are left out."""
    modules = {}
    for name in bound.layouts:
        files = bound.files.get(name, (name,))
        memory = stock.layout.in_memory.get(files[0], files[0]) if len(files) == 1 else ""
        if memory.endswith(".weight"):
            modules[name] = memory.removesuffix(".weight")
    return modules


def _normalised(module: nn.Module, values: Tensor, norm: str) -> Tensor:
    eps = float(getattr(module, "eps", getattr(module, "variance_epsilon", 1e-6)))
    if norm == "layer":
        return functional.layer_norm(values, values.shape[-1:], eps=eps)
    return values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)

"""The space of weights around two models: one module, fixed vertices, and vertices that learn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from isomerge.connectivity.curves.volume import Point, inner
from isomerge.running.weight_replacement import Mixture


class WeightSpace:
    """A point is a tensor for each parameter of the module and each of its other floating tensors; tied parameters are
    there once. The parents are the first two vertices; what learned is added with `keep`."""

    def __init__(self, mixture: Mixture) -> None:
        self.mixture = mixture
        own: Mapping[str, Tensor] = mixture.module.state_dict()
        first: dict[int, str] = {}
        self._place = {name: first.setdefault(own[name].data_ptr(), name) for name in mixture.weights[0]}
        self.names = list(first.values())
        learned = {name for name, _ in mixture.module.named_parameters(remove_duplicate=False)}
        self.learned = [name for name in self.names if name in learned]
        self.vertices: list[Point] = [{name: each[name] for name in self.names} for each in mixture.weights]
        mixture.module.requires_grad_(False)

    def mix(self, shares: Sequence[float], vertices: Sequence[Point] | None = None) -> Point:
        """Σ share × vertex, with the gradients of the vertices."""
        used = [(s, v) for s, v in zip(shares, vertices or self.vertices, strict=True) if s != 0]
        (share, vertex), *others = used
        found = {name: tensor * share for name, tensor in vertex.items()}
        for share, vertex in others:
            found = {name: tensor + share * vertex[name] for name, tensor in found.items()}
        return found

    def start(self, shares: Sequence[float], noise: float = 0.0, draw: torch.Generator | None = None) -> Point:
        """A new vertex that may learn. `noise` is its share of the rms of what A and B differ by, tensor by tensor."""
        found = {name: tensor.detach().clone() for name, tensor in self.mix(shares).items()}
        for name in self.learned if noise else ():
            apart = (self.vertices[1][name] - self.vertices[0][name]).square().mean().sqrt()
            drawn = torch.randn(found[name].shape, generator=draw, dtype=found[name].dtype)
            found[name] += noise * apart * drawn.to(found[name].device)
        return found

    def parameters(self, vertices: Sequence[Point]) -> list[Tensor]:
        return [vertex[name] for vertex in vertices for name in self.learned]

    def keep(self, vertices: Sequence[Point]) -> None:
        """Add vertices that have learned."""
        for vertex in vertices:
            fixed = {name: tensor.detach() for name, tensor in vertex.items()}
            self.vertices.append(fixed)
            self.mixture.weights.append({name: fixed[place] for name, place in self._place.items()})

    def put(self, shares: Sequence[float]) -> Any:
        """The module with the weights of a point. A vertex is there bit by bit."""
        return self.mixture.put(shares)

    def size(self) -> float:
        """How far A and B are apart."""
        a, b = self.vertices[:2]
        apart = {name: b[name] - a[name] for name in self.learned}
        return math.sqrt(float(inner(apart, apart)))

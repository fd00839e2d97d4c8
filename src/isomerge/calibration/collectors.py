"""What one pass over a model's activations sums up: Gram matrices of inputs, moments at sites, statistics of units."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

from torch import Tensor, nn

from isomerge.architectures import describe
from isomerge.calibration.experts import listen_to_experts
from isomerge.calibration.sites import sites_of
from isomerge.running.gram import GramSums, UnitSums
from isomerge.running.linear_maps import LinearMap, outputs_as_rows
from isomerge.running.watch import ActivationWatch, SameInput


class Collector(Protocol):
    """Listens to a watched model while it runs, and then enters its sums."""

    def record(self, tensors: dict[str, Tensor], info: dict[str, Any]) -> None: ...


class GramCollector:
    """Σ x xᵀ and Σ x of every linear map's input. Maps that read the same tensor share one matrix."""

    def __init__(self, watch: ActivationWatch, weights: Collection[str] | None = None) -> None:
        self.sums: dict[str, GramSums] = {}
        self.maps: dict[str, LinearMap] = {}
        self._watch, self._same = watch, SameInput()
        for linear in watch.stock.maps:
            if weights is None or linear.weight in weights:
                self.maps[linear.weight] = linear
                self._listen(linear)
        self.maps |= listen_to_experts(watch, self._add, weights)

    def _listen(self, linear: LinearMap) -> None:
        def look(module: nn.Module, given: Tensor, made: Tensor) -> Tensor | None:
            own = self._same.owner(linear.weight, given) == linear.weight
            return linear.rows_in(module, given) if own else None

        self._watch.listen(linear.module, linear.weight, look, lambda rows: self._add(linear.weight, rows))

    def _add(self, name: str, rows: Tensor) -> None:
        self.sums.setdefault(name, GramSums()).add(rows)

    def record(self, tensors: dict[str, Tensor], info: dict[str, Any]) -> None:
        tensors |= {f"gram:{name}": sums.product for name, sums in self.sums.items()}
        tensors |= {f"sum:{name}": sums.total for name, sums in self.sums.items()}
        info["maps"] = {
            weight: self._described(linear, owner)
            for weight, linear in self.maps.items()
            if (owner := self._same.owner_of.get(weight, weight)) in self.sums
        }

    def _described(self, linear: LinearMap, owner: str) -> dict[str, Any]:
        entry: dict[str, Any] = {"count": self.sums[owner].count, "transposed": linear.transposed}
        if linear.bias is not None:
            entry["bias"] = linear.bias
        return entry | ({"same": owner} if owner != linear.weight else {})


class MomentCollector:
    """Σ x xᵀ and Σ x at every site of the specification."""

    def __init__(self, watch: ActivationWatch) -> None:
        self.sums: dict[str, GramSums] = {}
        for name, site in sites_of(describe(watch.stock.checkpoint), watch.stock).items():
            sums = self.sums[name] = GramSums()
            watch.listen(site.module, name, site.values, sums.add)

    def record(self, tensors: dict[str, Tensor], info: dict[str, Any]) -> None:
        seen = {name: sums for name, sums in self.sums.items() if sums.count}
        tensors |= {f"moment:{name}": sums.product for name, sums in seen.items()}
        tensors |= {f"moment_sum:{name}": sums.total for name, sums in seen.items()}
        info["sites"] = {name: {"count": sums.count} for name, sums in seen.items()}


class UnitCollector:
    """Σ y and Σ y² of every linear map's outputs."""

    def __init__(self, watch: ActivationWatch, weights: Collection[str] | None = None) -> None:
        self.sums: dict[str, UnitSums] = {}
        for linear in watch.stock.maps:
            if weights is None or linear.weight in weights:
                sums = self.sums[linear.weight] = UnitSums()
                watch.listen(
                    linear.module, linear.weight, lambda module, given, made: outputs_as_rows(module, made), sums.add
                )

    def record(self, tensors: dict[str, Tensor], info: dict[str, Any]) -> None:
        seen = {name: sums for name, sums in self.sums.items() if sums.count}
        tensors |= {f"unit_sum:{name}": sums.total for name, sums in seen.items()}
        tensors |= {f"unit_squares:{name}": sums.squares for name, sums in seen.items()}
        info["units"] = {name: {"count": sums.count} for name, sums in seen.items()}
